"""A backend of `torch.compile` that keeps a graph as it came and fused for each target, and compares what they mean."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fusion._torch.tracing import Boxed, specialise_floats
from fusion.frontend.backend import FusionBackend
from fusion.frontend.library import installed
from fusion.inputs.dynamo_inputs import Known
from fusion.options import Options
from fusion.report.outcome import GraphReport
from fusion.runtime.prepared_weights import supply
from fusion.runtime.verification import relative_error
from fusion.stages.capture import capture
from fusion.stages.lower import lower
from fusion.testing import WIDENED, Captured, Trial, further, grains, widen, widened

TIES = 2e-2
"""How far results may differ in float64 where numbers are rounded that may be halfway between two whole ones."""

ROUNDINGS = 2
"""So many units of rounding are allowed beside 1.5 times the error of the graph itself."""
SUMS = 5e-6
"""At least this is, where float32 takes part: inputs hold few bits, so that float32 may sum up exactly what another
order rounds; and a sharp softmax multiplies that."""

LARGE = 2.0**-10
"""Up to this part of the largest number roundings are compared: beyond it sums overflow in some order alone."""

FAINT = 1e-5
"""Numbers up to which a scale stands for a row of zeros, as `patterns.quant.read_dynamic_scales` has it."""


class Wrong(AssertionError):
    """The fused graph is not the plain one."""


class Raised(Exception):
    """The pass or the fused graph raised what the plain one does not."""


@dataclass
class Attack:
    """The backend: every captured graph as it came and fused for each target, called by the current route.

    Attributes:
        targets: what to fuse for.
        lowering: who runs the graphs.
        route: which of them the next call runs: "plain" (eager), "plain lowered", or a target.
        reports: of the first graph, for each target.
        algebra: how far results may differ in float64.
        scaled: whether inputs are at an end of their range, so that nearness to float64 is all that is compared.
        disabled: names of rules that take no part.
        unmeasured: why a graph could not be run in float64, so that nothing was compared.
    """

    targets: Sequence[str]
    lowering: str = "eager"
    route: str = "plain"
    reports: dict[str, GraphReport] = field(default_factory=dict)
    algebra: float = WIDENED
    scaled: bool = False
    disabled: Sequence[str] = ()
    unmeasured: list[str] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What `torch.compile` calls."""
        specialise_floats(gm)
        return capture(gm, example_inputs, partial(self._compile, Known.from_dynamo(gm, example_inputs)))

    def _compile(self, known: Known, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        fused = {target: self._fused(target, known, gm, example_inputs) for target in self.targets}
        plain = fx.GraphModule(gm, _copied(gm))
        lowered = cache(lambda: lower(fx.GraphModule(gm, _copied(gm)), example_inputs, self.lowering))
        checked: list[bool] = []

        def run(values: list[Any]) -> Any:
            if not checked:
                checked.append(True)
                for target, (report, _) in fused.items():
                    with blamed(f"{target}: "):
                        self.unmeasured += self._compared(known, plain, report, values)
            if self.route == "plain":
                return plain(*values)
            return (lowered() if self.route == "plain lowered" else fused[self.route][1])(values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _compared(self, known: Known, plain: fx.GraphModule, report: GraphReport, values: Sequence[Any]) -> list[str]:
        if self.scaled:
            return is_as_near(known, plain, report, values)
        return means_the_same(plain, report, values, self.algebra)

    def _fused(
        self, target: str, known: Known, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> tuple[GraphReport, Boxed]:
        graph = fx.GraphModule(gm, _copied(gm))
        backend = FusionBackend(Options(target=target, lower=self.lowering, disable=frozenset(self.disabled)))
        with blamed(f"{target}: fusing: "):
            report = backend.fuse(graph, known.facts(graph.graph, {}))
        if report.failures:
            raise Raised(f"{target}: fusing: {report.failures[0]}")
        self.reports.setdefault(target, report)
        prepared = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")[len(example_inputs) :]]
        with blamed(f"{target}: lowering: "):
            run = lower(graph, [*example_inputs, *prepared], self.lowering)
        return report, supply(run, graph.graph, report.prepared)


@contextlib.contextmanager
def blamed(where: str) -> Iterator[None]:
    """What is raised inside is a defect, and says where."""
    try:
        yield
    except Wrong as error:
        raise Wrong(f"{where}{error}") from error
    except Exception as error:
        raise Raised(f"{where}{type(error).__name__}: {error}") from error


def _copied(gm: fx.GraphModule) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(gm.graph, {}))
    for old, new in zip(gm.graph.nodes, copied.nodes, strict=True):
        new.meta = copy.copy(old.meta)
    return copied


# one graph -----------------------------------------------------------------------------------------------------------


def means_the_same(plain: fx.GraphModule, report: GraphReport, values: Sequence[Any], algebra: float) -> list[str]:
    """The same algebra in float64; in their own dtypes, about the same error. Why that was not measured, if so.

    Raises:
        Wrong: they differ.
    """
    if not report.matches:
        return []
    count = len(values)
    graphs = (widen(plain), widen(report.graph), plain, report.graph)
    try:
        exact, old = (_run(graphs[number], values, None, count, wide=not number) for number in (0, 2))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    same, new = (_run(graphs[number], values, report, count, wide=number == 1) for number in (1, 3))
    units = [torch.finfo(each).eps for each in grains(plain, count)]
    for number, each in enumerate(zip(exact, same, old, new, units, strict=True)):
        _equal(f"result {number}", *each, algebra)
    return []


def is_as_near(known: Known, plain: fx.GraphModule, report: GraphReport, values: Sequence[Any]) -> list[str]:
    """Require of the fused graph to be as near to float64 as the plain one; return why that was not measured, if so.

    Raises:
        Wrong: a result is further from float64, or is not finite where the plain one is.
    """
    if not report.matches:
        return []
    trial = Trial(installed(), Captured(plain, tuple(values), known), report.graph, report)
    wide = widen(plain)
    try:
        wide(*trial.inputs(wide=True)[: len(values)])
        plain(*trial.inputs()[: len(values)])
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    reason = further(trial, wide)
    if reason:
        raise Wrong(reason)
    return []


def _equal(what: str, exact: Any, same: Any, old: Any, new: Any, unit: float, algebra: float) -> None:
    if not isinstance(exact, Tensor):
        if same != exact:
            raise Wrong(f"{what} is {same}, not {exact}")
        return
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise Wrong(f"{what} is {new.dtype}{list(new.shape)}, not {old.dtype}{list(old.shape)}")
    if not exact.is_floating_point() and not exact.is_complex():
        beside = algebra > WIDENED and not bool(((same.long() - exact.long()).abs() > 1).any())
        if not torch.equal(same, exact) and not beside:
            raise Wrong(f"{what}: whole numbers differ")
        return
    exact, same, old, new = (_real(each) for each in (exact, same, old, new))
    if all(bool((each.abs() <= FAINT).all()) for each in (exact, same, new)):
        return
    wrong = relative_error(same, exact)
    if not wrong <= algebra:
        raise Wrong(f"{what}: the algebra is wrong, float64 differs by {wrong:.3g}")
    finite = exact[exact.isfinite()].abs()
    if bool((finite > LARGE * torch.finfo(old.dtype).max).any()):
        return
    error, before = relative_error(new, exact), relative_error(old, exact)
    unit = max(unit, torch.finfo(old.dtype).eps)
    sums = SUMS if unit > torch.finfo(torch.float64).eps else WIDENED
    beside = max(ROUNDINGS * unit, sums, algebra if algebra > WIDENED else 0.0)
    if not error <= 1.5 * before + beside and before < 0.1:
        raise Wrong(f"{what}: rms error {error:.3g} where the plain graph has {before:.3g}")


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _run(gm: fx.GraphModule, values: Sequence[Any], report: GraphReport | None, count: int, wide: bool) -> list[Any]:
    """Results, and the first `count` inputs as they are afterwards."""
    copies = [_copy(each, wide) for each in values]
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    named = dict(zip(names, copies, strict=False))
    for each in report.prepared if report else ():
        module = widen(each.module) if wide else each.module
        copies.append(module(*(named[name] for name in each.sources)))
    return [*tree_leaves(gm(*copies)), *copies[:count]]


def _copy(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return widened(value) if wide else value.detach().clone()
