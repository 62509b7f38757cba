"""The judge of one call of a fused graph: finds results that are wrong by more than rounding explains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fusion._torch.nested import leaves
from fusion.graph.origin import look
from fusion.report.failures import worded
from fusion.runtime.verification.choices import Moved, Recorded, Replayed, Steady, coarsest_dtypes
from fusion.runtime.verification.numbers import (
    TOLERANCE,
    distances,
    farthest,
    gross_rows,
    is_close,
    is_further,
    is_inexact,
    is_like,
    other_rows,
    unequal_rows,
)
from fusion.runtime.verification.runs import Call

log = logging.getLogger("fusion")

Rows = Mapping[int, Tensor]
"""Wrong rows, as booleans, by position among the observed tensors of a call."""


@dataclass(frozen=True)
class Fault:
    """A way in which a fused graph is wrong.

    Attributes:
        message: the wrong results, their errors, and why rounding does not explain them.
        is_of: predicate of graphs with the same inputs that are wrong in the same way.
    """

    message: str
    is_of: Callable[[fx.GraphModule], bool]


@dataclass(frozen=True)
class Judge:
    """Judge of fused graphs by the observed tensors of one call: the results, and the inputs that are written to.

    Attributes:
        original: the plain graph.
        call: the inputs.
        plain: the observed tensors of the plain graph.
        names: their names in the model.
        is_compiled: True if fused graphs are compiled, and may choose differently than their nodes do one by one.
    """

    original: fx.GraphModule
    call: Call
    plain: Sequence[Any]
    names: Sequence[str]
    is_compiled: bool

    def fault(self, fused: Sequence[Any], gm: fx.GraphModule) -> Fault | None:
        """Compare `fused`, the observed tensors of the fused graph `gm`, with the plain ones; None if they agree."""
        pairs = list(enumerate(zip(fused, self.plain, strict=True)))
        others = [place for place, pair in pairs if not is_like(*pair)]
        if others:
            looks = (f"{self.names[at]} is {look(fused[at])}, not {look(self.plain[at])}" for at in others)
            return Fault("; ".join(looks), self._has_other_types)
        different = [place for place, pair in pairs if not is_close(*pair)]
        suspects = [place for place in different if self._is_suspect(place, fused[place])]
        self._note_nearer(different, fused)
        if not suspects:
            return None
        wrong, exact, ties = self._compared(suspects, fused, gm)
        if wrong:
            message = f"{self._described(wrong, fused)}; the fused graph differs from the plain one in float64 as well"
            return Fault(message, lambda other: bool(self._compared(wrong, fused, other)[0]))
        gross = self._gross(suspects, fused, exact)
        if gross:
            return self._unexplained(gross, fused, gm)
        self._note(suspects, ties)
        return None

    def _compared(
        self, places: Iterable[int], fused: Sequence[Any], gm: fx.GraphModule
    ) -> tuple[Rows, Sequence[Any], Sequence[Moved]]:
        """Compare the results `places` of the graph `gm` with those of the plain one, both in float64.

        `fused` are the results of `gm` in its own dtype.

        Returns:
            The rows in which `gm` computes something else; float64 of the plain graph that they were compared with,
            computed with the lists of `gm` where both lists name equal numbers; and these lists.
        """
        exact, sizes = self._exact
        run = Steady(gm.graph, sizes)
        wide = None if exact is None else self._wide(gm, run)
        if exact is None or wide is None:
            return {}, self.judging, ()
        wrong = self._wrong(places, fused, wide, exact)
        following = Steady(self.original.graph, others=run.lists)
        other = self._wide(self.original, following) if wrong and run.lists else None
        if other is None or not following.moved:
            return wrong, exact, ()
        return self._wrong(places, fused, wide, other), other, following.moved

    def judged(self, gm: fx.GraphModule) -> Fault | None:
        """Interpret a fused graph, and return its fault or None."""
        try:
            fused = self.call.run(gm)
        except Exception as error:
            return self.raised(error)
        return self.fault(fused, gm)

    def raised(self, error: Exception) -> Fault:
        """Return the fault of a fused graph that raises `error`, where the plain graph did not."""
        return Fault(f"the fused graph raises {worded(error)}, which the plain graph does not", self._raises)

    def _raises(self, gm: fx.GraphModule) -> bool:
        try:
            self.call.run(gm)
        except Exception:
            return True
        return False

    def _unexplained(self, gross: Rows, fused: Sequence[Any], gm: fx.GraphModule) -> Fault | None:
        """Return the fault of the rows `gross` of the results `fused`, far from float64 although the algebra of `gm` is
        right.

        None if float64 with the choices of `gm`, all of them explained by rounding, is near.
        """
        recorded = Recorded()
        try:
            own = self.call.run(gm, recorded)
            replayed = Replayed(gm.graph, recorded.made)
            exact = self.call.run_wide(gm, replayed)
        except Exception as error:
            log.debug("float64 with the choices of the fused graph cannot run", exc_info=error)
            return self._fault_of_rounding(gross, fused, "")
        strange = [each for each in replayed.moved if not each.is_explained]
        if strange:
            why = f", and no rounding explains what the fused one chooses: {_named(strange)}"
            return self._fault_of_rounding(gross, fused, why)
        compiled_otherwise = self.is_compiled and recorded.made and not self._gross(gross, own, exact)
        if self._gross(gross, fused, exact) and not compiled_otherwise:
            return self._fault_of_rounding(gross, fused, ": the fused one overflows, or rounds more than the plain one")
        self._note(gross, replayed.moved)
        return None

    def _note_nearer(self, places: Iterable[int], fused: Sequence[Any]) -> None:
        """Log those of the results `places` in which rows of the plain graph are further from float64 than rounding
        explains.

        The rows of `fused` are not.
        """
        rows_at = {place: self._nearer_rows(place, fused[place]) for place in places if is_inexact(self.plain[place])}
        counts = ((self.names[place], int(rows.sum()), len(rows)) for place, rows in rows_at.items())
        named = [f"{name} ({count} of {rows} rows)" for name, count, rows in counts if count]
        if named:
            log.warning(
                "verified a fused graph: the plain one is further from float64 in %s, as where a finite number masks "
                "each key of a row",
                ", ".join(named),
            )

    def _nearer_rows(self, place: int, fused: Tensor) -> Tensor:
        measured = distances(fused, self.plain[place], self.judging[place])
        return gross_rows(measured.plain, replace(measured, plain=measured.fused), TOLERANCE[self._grains[place]])

    def _note(self, places: Iterable[int], moved: Sequence[Moved]) -> None:
        """Log that the right results `places` differ from the plain ones by the choices `moved` alone."""
        if moved:
            names = ", ".join(self.names[place] for place in places)
            log.warning("verified a fused graph: what differs in %s comes of %s alone", names, _named(moved))

    def _fault_of_rounding(self, gross: Rows, fused: Sequence[Any], why: str) -> Fault:
        message = f"{self._described(gross, fused)}; float64 of both graphs agrees{why}"
        return Fault(message, lambda gm: bool(self._gross(gross, self.call.run(gm), self.judging)))

    @cached_property
    def _exact(self) -> tuple[list[Any] | None, Collection[int]]:
        """Results and written inputs of the plain graph in float64, and the numbers of entries of the lists that it
        chose.

        (None, ()) if an operator has no kernel for float64.
        """
        run = Steady(self.original.graph)
        exact = self._wide(self.original, run)
        if exact is None or list(map(_sizes, exact)) != list(map(_sizes, self.plain)):
            log.warning("verifying a fused graph: the plain graph cannot run in float64; its own dtype is the judge")
            return None, ()
        return exact, run.sizes

    @property
    def judging(self) -> Sequence[Any]:
        """Results to compare with: float64 of the plain graph, or its own dtype where float64 cannot run."""
        return self._exact[0] or self.plain

    @cached_property
    def _grains(self) -> list[torch.dtype]:
        """The coarsest dtype in the computation of each result and then of each input that is written to."""
        graph = self.original.graph
        coarsest, inputs = coarsest_dtypes(graph), graph.find_nodes(op="placeholder")
        results = [
            coarsest[each.name] if isinstance(each, fx.Node) else torch.float64
            for each in leaves(graph.output_node().args)
        ]
        return [*results, *(coarsest[inputs[place].name] for place in self.call.written)]

    def _wide(self, gm: fx.GraphModule, run: Steady) -> list[Any] | None:
        """Return results and written inputs of `gm` in float64, with the choices of `run`; None where an operator has
        no such kernel.
        """
        try:
            return self.call.run_wide(gm, run)
        except Exception as error:
            log.debug("a graph cannot run in float64", exc_info=error)
            return None

    def _has_other_types(self, gm: fx.GraphModule) -> bool:
        return not all(map(is_like, self.call.run(gm), self.plain))

    def _is_suspect(self, place: int, fused: Tensor) -> bool:
        plain, exact = self.plain[place], self.judging[place]
        if is_inexact(plain):
            return is_further(distances(fused, plain, exact), self._grains[place])
        return bool(unequal_rows(fused, plain, exact).any())

    def _wrong(
        self, places: Iterable[int], fused: Sequence[Any], wide: Sequence[Any], exact: Sequence[Any]
    ) -> dict[int, Tensor]:
        """Find, in the results `places`, the rows in which float64 `wide` of the fused graph is not `exact`, that of
        the plain one.

        Only rows in which `fused` differs from the plain graph in their own dtype as well are wrong.
        """
        rows_at = {place: self._wrong_rows(place, fused[place], wide[place], exact[place]) for place in places}
        return {place: rows for place, rows in rows_at.items() if rows.any()}

    def _wrong_rows(self, place: int, fused: Tensor, wide: Tensor, exact: Tensor) -> Tensor:
        plain = self.plain[place]
        if is_inexact(plain):
            return other_rows(distances(fused, plain, exact), wide, exact, torch.finfo(self._grains[place]).eps)
        return unequal_rows(wide, exact) & unequal_rows(fused, plain)

    def _gross(self, places: Iterable[int], fused: Sequence[Any], exact: Sequence[Any]) -> dict[int, Tensor]:
        """Find, in the results `places`, the rows of `fused` that are further from `exact` than rounding explains."""
        rows_at = {place: self._gross_rows(place, fused[place], exact[place]) for place in places}
        return {place: rows for place, rows in rows_at.items() if rows.any()}

    def _gross_rows(self, place: int, fused: Tensor, exact: Tensor) -> Tensor:
        plain = self.plain[place]
        if not is_inexact(plain):
            return unequal_rows(fused, plain, exact)
        measured = distances(fused, plain, self.judging[place])
        away = measured.fused if exact is self.judging[place] else distances(fused, plain, exact).fused
        return gross_rows(away, measured, TOLERANCE[self._grains[place]])

    def _described(self, rows: Rows, fused: Sequence[Any]) -> str:
        """Describe the worst entry of `fused` in the first result of `rows`, those that are wrong, and name the other
        results.
        """
        place, wrong = next(iter(rows.items()))
        at = farthest(fused[place], self.judging[place], wrong)
        have, want, plain = (f"{x[place][at].item():.6g}" for x in (fused, self.judging, self.plain))
        judge = "the plain graph" if self._exact[0] is None else f"float64 {want}, the plain graph"
        first = f"{self.names[place]} ({look(fused[place])}) at {list(at)} is {have}, {judge} {plain}"
        count = f" ({int(wrong.sum())} of {len(wrong)} rows)" if len(wrong) > 1 else ""
        others = [self.names[each] for each in rows if each != place]
        shown = ", ".join(others[:3]) + (f" and {len(others) - 3} others" if len(others) > 3 else "")
        return f"{first}{count}" + (f"; also wrong: {shown}" if others else "")


def _sizes(x: Any) -> Any:
    return x.shape if isinstance(x, Tensor) else None


def _named(moved: Sequence[Moved]) -> str:
    return ", ".join(dict.fromkeys(map(str, moved)))
