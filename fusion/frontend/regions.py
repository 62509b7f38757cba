"""Regions: parts of a model in which its author expects a fusion, by `fusion.region`.

A function is known by the lines of its code in the stack traces of nodes, a module class by the module stack, and a
`with` block by an annotation that torch writes into the metadata of nodes while it traces. Graphs are not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, TracebackType
from typing import Any, TypeVar, cast

import torch
import torch.fx as fx
from torch.fx.traceback import annotate

from fusion.errors import OptionError
from fusion.frontend.expectations.path_patterns import is_within
from fusion.frontend.library import uses_of, why_unused
from fusion.graph.origin import frames, location, module_path, modules
from fusion.options import Options
from fusion.report.outcome import Outcome
from fusion.report.refusals import missing
from fusion.report.regions import RegionReport

Marked = TypeVar("Marked", bound=Callable[..., Any])
_KEY = "fusion.region."
"""Beginning of a key in the annotations of nodes; the name of the rule follows."""


@dataclass(frozen=True)
class _Lines:
    """Lines of a decorated function in its file."""

    file: str
    first: int
    last: int
    name: str
    rule: str

    def holds(self, file: str, line: int) -> bool:
        """Return True if `line` of `file` is one of the function."""
        return file == self.file and self.first <= line <= self.last


_functions: dict[tuple[str, int], _Lines] = {}
_classes: dict[str, str] = {}
"""Rules by the qualified name of a decorated class. As with `_functions`, stack traces hold texts alone: what a
decorator says of code must be found by its place. Nothing but reports reads either."""


@dataclass(frozen=True)
class Region:
    """A decorator of functions and module classes, and a context manager; both return at once where nothing traces."""

    rule: str

    def __call__(self, marked: Marked) -> Marked:
        """Record that `marked`, a function or a class of modules, is a region, and return it unchanged.

        Raises:
            OptionError: it is neither.
        """
        given: Any = marked
        if isinstance(given, type) and issubclass(given, torch.nn.Module):
            _classes[f"{given.__module__}.{given.__qualname__}"] = self.rule
        elif isinstance(given, FunctionType):
            code = given.__code__
            lines = _Lines(code.co_filename, code.co_firstlineno, _last_line(code), given.__qualname__, self.rule)
            _functions[lines.file, lines.first] = lines
        else:
            raise OptionError(
                f"marking a region of {self.rule}: {marked!r} is neither a function nor a class of torch.nn.Module; "
                "decorate the function below its other decorators, or write `with fusion.region(...):`"
            )
        return marked

    def __enter__(self) -> Region:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the block: outside tracing a region has no effect."""


def region(rule: str) -> Region:
    """Mark a function, a class of modules or a `with` block in which `rule` is expected to fuse.

        @fusion.region("attention")
        def attend(q, k, v): ...

    Reports list regions with what fused in them; a compilation in which `rule` did not fuse gives an
    `ExpectationWarning`. Numbers and graphs are those of the model without it. Programs of `torch.export` have the
    regions of classes and of `forward` methods alone.

    Args:
        rule: name of a rule, as `cann-fusion rules` lists them.

    Raises:
        OptionError: `rule` is no name.
    """
    if torch.compiler.is_compiling():
        return cast(Region, _annotated(rule))
    if not isinstance(rule, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(
            f"marking a region: {rule!r} is no name of a rule; write @fusion.region('attention'), with a name that "
            "`cann-fusion rules` lists"
        )
    return Region(rule)


@contextmanager
def _annotated(rule: str) -> Generator[None]:
    """Mark the nodes that are traced inside the context; Dynamo traces generators of this kind without a break."""
    with annotate({_KEY + rule: True}):
        yield


def _last_line(code: CodeType) -> int:
    own = (line for _, _, line in code.co_lines() if line is not None)
    inner = (_last_line(each) for each in code.co_consts if isinstance(each, CodeType))
    return max((code.co_firstlineno, *own, *inner))


@dataclass(frozen=True)
class Place:
    """A region in one module of a graph.

    Attributes:
        rule: the rule that is expected to fuse.
        name: name of the function or class, or "".
        module: path of the module.
        where: `file:line` of the first node.
        nodes: names of its nodes.
    """

    rule: str
    name: str
    module: str
    where: str
    nodes: frozenset[str]


@dataclass(frozen=True)
class _Key:
    """A region that a node is in, and what tells calls of the region apart: its module, or the lines of its callers."""

    rule: str
    name: str = ""
    module: str | None = None
    callers: tuple[str, ...] = ()


def regions_in(source: fx.Graph) -> tuple[Place, ...]:
    """List the regions of a graph that is not rewritten yet."""
    groups: dict[_Key, list[fx.Node]] = {}
    for node in source.nodes:
        if node.op == "call_function":
            for key in _keys(node):
                groups.setdefault(key, []).append(node)
    return tuple(each for key, nodes in groups.items() for each in _places(key, nodes))


def _keys(node: fx.Node) -> Iterator[_Key]:
    notes: object = node.meta.get("custom")
    for name in map(str, notes if isinstance(notes, Mapping) else ()):
        if name.startswith(_KEY):
            yield _Key(name.removeprefix(_KEY))
    for path, names in modules(node) if _classes else ():
        if name := next((each for each in names if each in _classes), ""):
            yield _Key(_classes[name], name.rpartition(".")[2], path)
    stack = frames(node) if _functions else []
    for lines in _functions.values() if stack else ():
        depth = next(
            (depth for depth, frame in enumerate(stack) if lines.holds(frame["file"], int(frame["line"]))), None
        )
        if depth is not None:
            callers = tuple(f"{each['file']}:{each['line']}" for each in stack[:depth])
            yield _Key(lines.rule, lines.name, callers=callers)


def _places(key: _Key, nodes: Iterable[fx.Node]) -> Iterator[Place]:
    """Divide the nodes of a region by its module, or else by the outermost modules that have nodes in it."""
    paths = {node: module_path(node) for node in nodes}
    unique = dict.fromkeys(paths.values() if key.module is None else [key.module])
    for module in unique:
        if any(other != module and is_within(module, other) for other in unique):
            continue
        inside = [node for node, path in paths.items() if is_within(path, module)]
        where = next(filter(None, map(location, inside)), "")
        yield Place(key.rule, key.name, module, where, frozenset(node.name for node in inside))


def region_reports(
    places: Iterable[Place], outcome: Outcome, options: Options, rules: Any = None
) -> tuple[RegionReport, ...]:
    """Report on regions of a graph that was rewritten.

    Args:
        places: the regions, by `regions_in` of the graph before.
        outcome: the rewrites and refusals.
        options: the options of the rewrite.
        rules: the rules that were handed over; None for the installed ones.
    """
    uses = uses_of(rules)
    return tuple(_region_report(each, outcome, uses, why_unused(each.rule, options, rules)) for each in places)


def _region_report(place: Place, outcome: Outcome, uses: Mapping[str, frozenset[str]], unused: str) -> RegionReport:
    made = (
        each.match.rule.name for each in outcome.chosen if not place.nodes.isdisjoint(node.name for node in each.dying)
    )
    fused = dict(sorted(Counter(made).items()))
    inside = [
        each
        for each in outcome.refusals
        if any(node is not None and node.name in place.nodes for node in (each.node, each.about, each.blamed))
    ]
    refusals = () if place.rule in fused else tuple(missing(inside, place.rule, uses))
    return RegionReport(place.rule, place.name, place.module, place.where, fused, refusals, unused)
