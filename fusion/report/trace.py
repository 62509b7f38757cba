"""Traces: the calls of a graph before and after its rewrites, as records that need no graph."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import fsum, isfinite
from pathlib import Path

import torch.fx as fx

from fusion._torch.operators import OpOverload, higher_order, schema_of
from fusion.graph.launches import is_bookkeeping, is_launch
from fusion.graph.origin import frames, location, look, module_path, source_text
from fusion.graph.subgraphs import bodies
from fusion.operators import operator_of
from fusion.planning.cost import has_flops, joint_cost, price
from fusion.planning.target import Target
from fusion.records import Candidate, Refusal
from fusion.report.copied_inputs import CopiedInput, Inputs, copied_input

_FUSED_IN_ATEN = frozenset({"aten::native_layer_norm"})  # aten's own fused kernels, where a rule emits them


@dataclass(frozen=True, order=True)
class Line:
    """One line of source code.

    Attributes:
        file: its path, relative to the folder of its package or to the current one.
        number: its number, from 1.
        text: its text without indentation.
        path: the absolute path of the file.
    """

    file: str
    number: int
    text: str = ""
    path: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Call:
    """One live call of a graph that is no view.

    Attributes:
        name: name of its node, behind the path of the body that has it.
        op: the operator, without the namespace aten and without overload.
        module: path of the module.
        line: line of the model; None where nothing is recorded.
        result: dtype and shape of the result.
        reads: names of the calls whose results it reads, directly or through views.
        is_launch: False for arithmetic of positions, masks and counts.
        is_fused: True for a fused operator that the pass emitted.
        us: predicted microseconds of one call.
        bytes: bytes that one call moves.
        times: number of times that its body runs.
        root: name of the rewrite: of the one that replaces the call, or of the one that emitted it; "" for none.
        copied: the input that it copies, or copies to; None for any other call.
    """

    name: str
    op: str
    module: str
    line: Line | None
    result: str
    reads: tuple[str, ...]
    is_launch: bool
    is_fused: bool
    us: float
    bytes: float
    times: int = 1
    root: str = ""
    copied: CopiedInput | None = None


@dataclass(frozen=True)
class Replaced:
    """Calls that one rewrite replaces.

    Attributes:
        root: name of the first result, by which `Call.root` names the rewrite.
        lines: module and line of every replaced node, views included.
    """

    root: str
    lines: tuple[tuple[str, Line], ...]


@dataclass(frozen=True)
class Missed:
    """The place of one refusal.

    Attributes:
        op: the operator of its node.
        line: the line to blame.
        calls: names of the launches that stay there and that a fusion with this result could replace.
        saving: predicted microseconds that the fusion would save; 0 where another rewrite fused the place, as how much
            of that the fusion would replace is not known.
        is_planned: True if `saving` is that of a planned lowering, which a limit refused; else it is an upper bound,
            the cost of `calls` against one ideal kernel.
        root: name of the rewrite that fused the place otherwise; "" for none.
    """

    op: str
    line: Line | None
    calls: tuple[str, ...]
    saving: float
    is_planned: bool
    root: str


@dataclass(frozen=True)
class Trace:
    """Calls of one graph before and after, with what was replaced, for each rewrite, and missed, for each refusal."""

    before: tuple[Call, ...] = ()
    after: tuple[Call, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    missed: tuple[Missed, ...] = ()


def traced(
    before: fx.Graph,
    after: fx.Graph,
    machine: Target,
    chosen: Sequence[Candidate],
    refusals: Sequence[Refusal],
    inputs: Inputs = Inputs(),
) -> Trace:
    """Trace a graph that was rewritten.

    Args:
        before: a copy of the graph before the rewrites, with equal names of nodes.
        after: the rewritten graph.
        machine: the target, for predictions.
        chosen: the rewrites.
        refusals: the refusals.
        inputs: the inputs of the graph.
    """
    paths: dict[fx.Graph, str] = {}
    for path, graph, _ in _walk(after):
        paths.setdefault(graph, path)
    canonical = {path: paths[graph] for path, graph, _ in _walk(after)}
    owners = {_name(paths, node): _name(paths, each.match.node) for each in chosen for node in each.dying}

    def calls(source: fx.Graph, roots: Mapping[str, str]) -> Iterator[Call]:
        for path, graph, times in _walk(source):
            prefix = canonical.get(path, path)
            for node, call in _calls(graph, path, prefix, times, machine, roots):
                yield replace(call, copied=copied_input(node, inputs if graph in (before, after) else Inputs()))

    replaced = [Replaced(_name(paths, each.match.node), _lines(each.dying)) for each in chosen]
    missed = [_missed(each, paths, owners, machine) for each in refusals]
    return Trace(tuple(calls(before, owners)), tuple(calls(after, {})), tuple(replaced), tuple(missed))


def emitted(node: fx.Node) -> str:
    """Return the name, without overload, of a fused operator that the pass inserted; "" for any other node."""
    if "fusion" not in node.meta or not isinstance(node.target, OpOverload):
        return ""
    name = schema_of(node.target).name
    return name if operator_of(node.target) is not None or name in _FUSED_IN_ATEN else ""


def mark(added: Iterable[fx.Node], root: fx.Node) -> None:
    """Record in the nodes that a rewrite `added` the name of `root`, the first node that the rewrite replaced."""
    for node in added:
        node.meta["fusion"] = {**node.meta["fusion"], "root": root.name}


def line_of(node: fx.Node) -> Line | None:
    """Return the innermost line of the model that made `node`; None without a stack trace."""
    file, _, number = location(node).rpartition(":")
    return Line(displayed(file), int(number), source_text(node), file) if file else None


@cache
def displayed(path: str) -> str:
    """Shorten an absolute `path`: relative to the folder of its package or to the current folder."""
    parents = [each for each in map(Path, {*sys.path, "."}) if each.resolve() in Path(path).parents]
    return min((Path(path).relative_to(each.resolve()).as_posix() for each in parents), key=len, default=path)


def displayed_place(where: str) -> str:
    """Shorten the path in `where`, a `file:line` or ""."""
    file, colon, number = where.rpartition(":")
    return f"{displayed(file)}{colon}{number}" if file else where


def _walk(source: fx.Graph, path: str = "", times: int = 1) -> Iterator[tuple[str, fx.Graph, int]]:
    """Yield `source` and the bodies that it runs, each with its path and the number of calls that run it."""
    yield path, source, times
    entered = [each for each in bodies(source) if each.code is not None and each.is_entered]
    counts = Counter(each.name for each in entered)
    for name, code in {each.name: each.code for each in entered}.items():
        if code is not None:
            yield from _walk(code.graph, f"{path}{name}/", times * counts[name])


def _name(paths: Mapping[fx.Graph, str], node: fx.Node) -> str:
    return f"{paths.get(node.graph, '')}{node.name}"


def _calls(
    graph: fx.Graph, path: str, prefix: str, times: int, machine: Target, roots: Mapping[str, str]
) -> Iterator[tuple[fx.Node, Call]]:
    """Yield the calls of one `graph` with their nodes.

    `roots` maps calls that are replaced, by name behind `prefix`, to rewrites.
    """
    near: dict[fx.Node, tuple[str, ...]] = {}
    for node in graph.nodes:
        reads = tuple(dict.fromkeys(name for each in node.all_input_nodes for name in near[each]))
        launched = is_launch(node)
        if not launched and not is_bookkeeping(node):
            near[node] = reads
            continue
        near[node] = (f"{path}{node.name}",)
        cost = price(node, machine) if launched else None
        root: str = node.meta.get("fusion", {}).get("root", "")
        yield (
            node,
            Call(
                near[node][0],
                operator_name(node),
                module_path(node),
                line_of(node),
                look(node.meta.get("val")),
                reads,
                launched,
                bool(emitted(node)),
                cost.us if cost else 0.0,
                cost.bytes if cost else 0.0,
                times,
                f"{prefix}{root}" if root else roots.get(f"{prefix}{node.name}", ""),
            ),
        )


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator that `node` calls, with its namespace unless that is aten or npu."""
    if not isinstance(node.target, OpOverload):
        return higher_order(node.target) or str(getattr(node.target, "__name__", node.target))
    namespace, _, name = schema_of(node.target).name.partition("::")
    return name if namespace in ("aten", "npu") else f"{namespace}.{name}"


def _lines(nodes: Iterable[fx.Node]) -> tuple[tuple[str, Line], ...]:
    """List module and line of each of `nodes`, without repetitions, in the order of files and lines."""
    lines = ((module_path(node), line) for node in nodes if (line := line_of(node)) is not None)
    return tuple(sorted(set(lines), key=lambda each: (each[1], each[0])))


def _missed(refusal: Refusal, paths: Mapping[fx.Graph, str], owners: Mapping[str, str], machine: Target) -> Missed:
    """Describe the place of `refusal`; `owners` maps replaced nodes to their rewrites."""
    starts = [each for each in (refusal.node, refusal.about, *refusal.covers) if each is not None]
    alive = [each for each in starts if _name(paths, each) not in owners and each.op == "call_function"]
    region = _region(alive)
    stay = [each for each in region if is_launch(each)]
    root = owners.get(_name(paths, refusal.node), "")
    planned = isfinite(refusal.benefit)
    most = fsum(price(each, machine).us for each in stay) - joint_cost(region, machine) if stay else 0.0
    saving = 0.0 if root else refusal.benefit if planned else most
    names = tuple(sorted(_name(paths, each) for each in stay))
    line, op = line_of(refusal.blamed or refusal.node), operator_name(refusal.node)
    return Missed(op, line, names, max(saving, 0.0), planned, root)


def _region(starts: Sequence[fx.Node]) -> list[fx.Node]:
    """List `starts` and the calls, of the same function of the model, whose results only these read.

    A product is the last of its chain: what it reads is computed elsewhere.
    """
    inside, waiting = set(starts), list(starts)
    while waiting:
        node = waiting.pop()
        if has_flops(node.target) and node not in starts:
            continue
        fresh = [each for each in node.all_input_nodes if each not in inside and _is_part(each, node, inside)]
        inside.update(fresh)
        waiting.extend(fresh)
    return list(inside)


def _is_part(node: fx.Node, reader: fx.Node, inside: set[fx.Node]) -> bool:
    """Return True if `node` is a call of the model's function that made `reader`, and only nodes `inside` read it."""
    own = node.op == "call_function" and "fusion" not in node.meta
    return own and inside.issuperset(node.users) and _function(node) == _function(reader)


def _function(node: fx.Node) -> tuple[str, str, str]:
    """Return module, file and function of the innermost line of the model that made `node`."""
    stack = frames(node)
    return (module_path(node), stack[-1]["file"], stack[-1]["function"]) if stack else (module_path(node), "", "")
