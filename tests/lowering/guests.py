"""A captured graph compiled by Inductor with the pass as its guest, compared with the graph itself and with float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

import fusion
from fusion._torch.inductor import inductor_table
from fusion.runtime.verification import relative_error
from fusion.testing import Captured, widen, widened

HOOKS = (
    "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass", "joint_custom_post_pass",
)  # fmt: skip
ROUNDINGS = 2
"""Units of rounding that are allowed beside 1.5 times the error of the graph itself."""
SUMS = 5e-6
"""The least error that is allowed: float32 may sum up exactly what another order rounds."""
BYTES = 64
"""Error of int8 numbers from which they are parts of wider ones, of which a rounding changes any byte."""


class Guest(fusion.FusionPass):
    """The pass, which also records the rules that it applied and checks that Inductor lowers what it added."""

    fused_rules: list[str]

    def __call__(self, graph: fx.Graph, *context: Any) -> None:
        super().__call__(graph, *context)
        added = [node for node in graph.nodes if "fusion" in node.meta]
        self.fused_rules = sorted({node.meta["fusion"]["rule"] for node in added})
        refused = [str(node.target) for node in added if _is_refused(node.target)]
        assert not refused, f"Inductor does not lower {refused}"
        assert all("val" in node.meta for node in added)


def _is_refused(target: Any) -> bool:
    """True for an operator of ours, or one that Inductor takes apart before its passes and cannot lower behind them."""
    from torch._inductor.lowering import lowerings

    return "npu" in str(target) or (target in inductor_table() and target not in lowerings)


@dataclass
class Compiled:
    """A graph that Inductor has compiled, and what its guest did."""

    guest: Guest
    run: Any = field(repr=False)


def compiled(captured: Captured, hook: str, target: str, *, kernels: bool = False, **options: Any) -> Compiled:
    """Compile a captured graph with the pass at `hook`; without `kernels` Inductor calls those of torch."""
    guest = Guest({"target": target, **options})
    given = {hook: guest, "fallback_by_default": not kernels, "fx_graph_cache": False}
    with torch.no_grad():
        run = torch._inductor.compile(captured.graph, copies(captured.inputs), options=given)
    return Compiled(guest, run)


def check(captured: Captured, hook: str, target: str, *, kernels: bool = False, **options: Any) -> list[str]:
    """Compare results and inputs afterwards of a graph with and without guest; return the rules that were applied.

    `options` are those of the guest.

    Raises:
        AssertionError: the error is more than 1.5 times that of the graph itself and some units of rounding.
    """
    made = compiled(captured, hook, target, kernels=kernels, **options)
    graphs = (widen(captured.graph), captured.graph, made.run)
    wide = [widened(each) if isinstance(each, Tensor) else each for each in captured.inputs]
    exact, old, new = map(_run, graphs, (wide, copies(captured.inputs), copies(captured.inputs)))
    unit = max((torch.finfo(dtype).eps for dtype in _dtypes(captured.graph)), default=0.0)
    for number, each in enumerate(zip(exact, old, new, strict=True)):
        _agree(f"result {number}", *each, unit)
    return made.guest.fused_rules


def copies(values: Sequence[Any]) -> list[Any]:
    """Return the inputs of a call; tensors are copies in memory of their own that lie as the originals."""
    return [_copy(each) if isinstance(each, Tensor) else each for each in values]


def _copy(x: Tensor) -> Tensor:
    memory = x.detach().untyped_storage().clone()
    return x.new_empty(0).set_(memory, x.storage_offset(), x.shape, x.stride())


def _run(graph: Any, values: list[Any]) -> list[Any]:
    with torch.no_grad():
        return [*tree_leaves(graph(*values)), *values]


def _dtypes(gm: fx.GraphModule) -> set[torch.dtype]:
    """Return the floating dtypes that a graph computes in."""
    vals = (each for node in gm.graph.nodes for each in tree_leaves(node.meta.get("val")))
    return {each.dtype for each in vals if isinstance(each, Tensor) and each.is_floating_point()}


def _agree(what: str, exact: Any, old: Any, new: Any, unit: float) -> None:
    if not isinstance(old, Tensor):
        assert new == old, f"{what} is {new}, not {old}"
        return
    assert (new.shape, new.dtype) == (old.shape, old.dtype), f"{what}: {new.dtype}{list(new.shape)}"
    if old.dtype == torch.int8:
        off, before = ((each.int() - exact.int()).abs().max() for each in (new, old))
        assert off <= max(1, int(before)) or before > BYTES, f"{what} is {off} beside the number in float64"
    elif not (old.is_floating_point() or old.is_complex()):
        assert torch.equal(new, old), f"{what}: integers differ"
    elif old.isfinite().all() or not exact.isfinite().all():
        exact, old, new = (torch.view_as_real(each) if each.is_complex() else each for each in (exact, old, new))
        limit = 1.5 * relative_error(old, exact) + max(ROUNDINGS * unit, SUMS)
        error = relative_error(new, exact)
        assert error <= limit, f"{what}: rms error {error:.3g} where {limit:.3g} is allowed"
