"""Graphs that were compiled in this process: `reports` returns a `Compilation` for each, which has its report."""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import CodeType
from typing import Any, TypeVar

import torch.fx as fx
from torch import nn

from fusion._torch.observing import Frame, add_artifact, add_counts, is_traced
from fusion.errors import FusionError, OptionError
from fusion.graph.origin import render
from fusion.graph.subgraphs import bodies
from fusion.planning.target import Target
from fusion.report.failures import attempted
from fusion.report.outcome import GraphReport, Outcome, counted
from fusion.report.report import Report

log = logging.getLogger("fusion")
Made = TypeVar("Made")

MOST = 256
"""Most compilations that are listed, the latest ones."""
LOG_VARIABLE = "CANN_FUSION_LOG"
LEVELS = ("debug", "info", "warning", "error")
TRAINING = "it was traced for training: cann-fusion fuses inference graphs only"

_LISTED: deque[Compilation] = deque(maxlen=MOST)


def nothing() -> None:
    """Return None, as a weak reference to what is freed does."""


@dataclass(eq=False)
class Captured:
    """A graph as it was before the rewrites, of which `make` makes the report; `None` where the graph is gone."""

    make: Callable[[], GraphReport | None]

    @cached_property
    def part(self) -> GraphReport | None:
        """The report of the graph, made by a new search when it is first read."""
        return self.make()


@dataclass(frozen=True, eq=False, repr=False)
class Compilation:
    """One graph that was compiled in this process.

    Attributes:
        function: qualified name of the compiled function, as "Llama.forward"; "" where it is not known.
        door: "backend", "FusionPass" or "fuse_exported".
        target: name of the target that the fusions were planned for.
        launches: live calls on data before and after the rewrites; (0, 0) for a graph that was traced for training.
        chosen: number of rewrites by rule.
        seconds: time that fusing took.
        is_replayed: True if the graph was rewritten as an equal one was before, without a search.
        is_prepared: True if what depends on Parameters alone is computed once; see `Report.unprepared`.
        note: the reason why the graph runs as it came; "" for a graph that was fused.
        captured: weak reference to the graph.
        code: weak reference to the code of the function, all of it where the graph is of a part behind a graph break.
        module: weak reference to the module whose method the function is.
        cells: identities of the variables of outer functions that the function reads.
    """

    function: str
    door: str
    target: str
    launches: tuple[int, int]
    chosen: Mapping[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0
    is_replayed: bool = False
    is_prepared: bool = True
    note: str = ""
    captured: Callable[[], Captured | None] = nothing
    code: Callable[[], CodeType | None] = nothing
    module: Callable[[], nn.Module | None] = nothing
    cells: frozenset[int] = frozenset()

    @property
    def report(self) -> Report:
        """The report of this graph, as of `fusion.explain`: made by a search when it is first read, and then kept.

        Raises:
            FusionError: the compiled code is gone, and the graph with it.
        """
        captured = self.captured()
        part = None if captured is None else captured.part
        if part is None:
            why = self.note or "the code that was compiled from it is freed, and the graph with it"
            raise FusionError(
                f"reporting on a graph of {self.function or 'a model'}, which was compiled by {self.door}: {why}; "
                "call fusion.explain(model, *inputs)"
            )
        return Report(self.target, (part,))

    @property
    def reasons(self) -> list[str]:
        """The refusals in `report`, each with rule, reason and place."""
        return list(map(str, self.report.refusals))

    def __str__(self) -> str:
        """Summarise in a line: rewrites, function, launches and seconds."""
        fused = ", ".join(f"{number} x {rule}" for rule, number in self.chosen.items()) or "nothing"
        where = f" in {self.function}" if self.function else ""
        before, after = self.launches
        how = ", as an equal graph before" if self.is_replayed else ""
        why = f" ({self.note})" if self.note else ""
        return f"fused {fused}{where}{why}: {before:,} -> {after:,} launches, {self.seconds:.1f} s{how}"

    def __repr__(self) -> str:
        return f"<{self.door}: {self}>"


def reports(compiled: Any = None) -> list[Compilation]:
    """Return what was compiled in this process, a `Compilation` for each graph, newest last; at most `MOST`.

    Warns if nothing was. A graph that Inductor takes from its own cache was rewritten by another process, and is not
    listed.

    Args:
        compiled: a model or a function, or what `torch.compile` returned for it: only its graphs are returned, those of
            the modules inside it among them.
    """
    listed = list(_LISTED)
    if compiled is not None:
        listed = _compiled_from(Frame.called_by(compiled), listed)
    if not listed:
        where = "in this process" if compiled is None else f"of this {type(compiled).__name__}"
        warnings.warn(
            f"listing what was compiled: cann-fusion has compiled no graph {where}. Call what torch.compile returned: "
            "torch.compile(model).generate(...) calls the model's own forward, which is not compiled; write "
            "model.compile(backend='cann_fusion'), or give generate a CompileConfig (docs/generate.md).",
            stacklevel=2,
        )
    return listed


def _compiled_from(frame: Frame, listed: Sequence[Compilation]) -> list[Compilation]:
    """Return those of `listed` that are of the module of `frame` or of one inside it; if none is, of its code, which
    instances of a class, and functions that one function makes, share.

    Parts behind a graph break that no longer use their module are known by the code of its forward.
    """
    inside = () if frame.module is None else tuple(frame.module.modules())
    owners, codes = set(map(id, inside)), {frame.code, *(Frame.called_by(each).code for each in inside)} - {None}

    def is_own(each: Compilation) -> bool:
        is_of_code = each.module is nothing and each.code() in codes
        is_another_closure = bool(each.cells and frame.cells) and each.cells.isdisjoint(frame.cells)
        return id(each.module()) in owners or (is_of_code and not is_another_closure)

    own = list(filter(is_own, listed))
    return own or [each for each in listed if frame.code is not None and each.code() is frame.code]


def add(compilation: Compilation, outcome: Outcome = Outcome()) -> None:
    """List `compilation`, whose pass had `outcome`; count it in torch's counters, and log it in one line."""
    _LISTED.append(compilation)
    rewrites = {f"rewrites.{rule}": number for rule, number in compilation.chosen.items()}
    add_counts(
        {
            "graphs": 1,
            "matches": outcome.match_count,
            "refused": outcome.refused_count,
            "rewrites": sum(rewrites.values()),
            "replayed": compilation.is_replayed,
            "failures": len(outcome.failures),
            "unfused": bool(compilation.note),
            **rewrites,
        }
    )
    log.info("%s; reasons: fusion.reports()[-1].reasons", compilation)


def described(
    door: str, target: str, before: fx.Graph, after: fx.Graph, outcome: Outcome, captured: Captured, seconds: float
) -> Compilation:
    """Describe the graph `after`, which was `before` until the pass with `outcome`, and write both to torch's trace.

    What cannot be described or written is left out, with a warning.

    Args:
        door: where the graph came from.
        target: the option of that name.
        before: a copy of the graph before the rewrites.
        after: the rewritten graph, before it is lowered.
        outcome: the outcome of the pass.
        captured: the graph and the pass, to which the result refers weakly.
        seconds: time that the pass took.
    """
    if is_traced():
        _write("cann_fusion_before", lambda: render(before))
        _write("cann_fusion_after", lambda: render(after))
        _write("cann_fusion_reasons", lambda: str(report_of(target, [captured])))
    least = Compilation("", door, Target.resolve(target).name, (0, 0), seconds=seconds, captured=weakref.ref(captured))
    more = attempted("listing a graph", lambda: _described(before, after, outcome), {})
    return replace(least, **more)


def _write(name: str, text: Callable[[], str]) -> None:
    """Write an artifact to torch's trace."""
    attempted(f"writing {name} to torch's trace", lambda: add_artifact(name, text), None)


def _described(before: fx.Graph, after: fx.Graph, outcome: Outcome) -> dict[str, Any]:
    """Return the fields of a `Compilation` that come from its graphs, `outcome` and the frame that is compiled."""
    frame = Frame.current()
    if outcome.is_replayed:
        tallies, chosen = counted(before), _rewrites_in(after)
    else:
        tallies, chosen = outcome.before, _by_number(each.match.rule.name for each in outcome.chosen)
    return {
        "function": frame.name(before),
        "launches": (_launches(tallies), _launches(counted(after))),
        "chosen": chosen,
        "is_replayed": outcome.is_replayed,
        "is_prepared": outcome.facts.prepares,
        "note": next((str(each) for each in outcome.failures if each.drops_graph), ""),
        "code": _weakly(frame.begun),
        "module": _weakly(frame.module),
        "cells": frame.cells,
    }


def report_of(target: str, captured: Iterable[Captured]) -> Report:
    """Return one report over all of `captured` whose graph is still there; `target` is the option of that name."""
    parts = (each.part for each in captured)
    return Report(Target.resolve(target).name, tuple(each for each in parts if each is not None))


def keeping(made: Made, captured: Captured) -> Made:
    """Make `made`, the code or the program that a graph became, hold what its report is made from, and return it."""
    made.captured = captured  # type: ignore[attr-defined]
    return made


def unfused(door: str, target: str, source: fx.Graph, note: str, is_captured: bool = True) -> Compilation:
    """Describe a graph that runs as it came, for the reason `note`; `is_captured` is False for a graph of Dynamo."""
    launches = _launches(counted(source)) if is_captured else 0
    frame = Frame.current()
    return Compilation(
        function=frame.name(source),
        door=door,
        target=Target.resolve(target).name,
        launches=(launches, launches),
        note=note,
        code=_weakly(frame.begun),
        module=_weakly(frame.module),
        cells=frame.cells,
    )


def _weakly(thing: Any) -> Callable[[], Any]:
    return nothing if thing is None else weakref.ref(thing)


def _rewrites_in(source: fx.Graph) -> dict[str, int]:
    """Count the rewrites by rule in a rewritten graph and the bodies that it runs, by the marks of its nodes."""
    marks = {(id(graph), made["rule"], made["root"]) for graph, made in _marks(source) if "root" in made}
    return _by_number(rule for _, rule, _ in marks)


def _marks(source: fx.Graph) -> Iterator[tuple[fx.Graph, Mapping[str, Any]]]:
    for node in source.nodes:
        if "fusion" in node.meta:
            yield source, node.meta["fusion"]
    for code in {each.code for each in bodies(source) if each.code is not None}:
        yield from _marks(code.graph)


def _by_number(rules: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(rules).items(), key=lambda each: (-each[1], each[0])))


def _launches(tallies: Mapping[str, Any]) -> int:
    return sum(each.launches for each in tallies.values())


def log_as_asked() -> None:
    """Set the level of the logger "fusion" to that in $CANN_FUSION_LOG, and write to stderr if it has no handler.

    Raises:
        OptionError: the variable has another value.
    """
    asked = os.environ.get(LOG_VARIABLE, "")
    if not asked:
        return
    if asked.lower() not in LEVELS:
        raise OptionError(f"reading ${LOG_VARIABLE}: {asked!r} is no level of logging; set one of {', '.join(LEVELS)}")
    log.setLevel(asked.upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("cann-fusion: %(message)s"))
        log.addHandler(handler)
