"""The laws of precision: no number is computed with less range than in the model, and float64 is never narrowed.

For the first, inputs are scaled by powers of 2, each alone and all at once, until their largest number is near the end
of float16, in its middle, or subnormal. Integers, masks and tables of angles stay unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fusion._torch.nested import tree_leaves
from fusion._torch.operators import arguments_of, short_name
from fusion.operators import operator_of
from fusion.runtime.float64 import widen
from fusion.runtime.verification import relative_error
from fusion.testing.laws import WIDENED, observed
from fusion.testing.trials import Trial

LEVELS = (6e4, 4e3, 250.0, 1e-2, 1e-4, 1e-6, 2e-7)
"""Upper bounds to which the largest magnitude of an input is scaled."""
MASKED = -1e4
"""Bound of masks: an input with an entry at or below it is a mask."""
_CHOICES = frozenset({"topk", "sort", "argsort"})
_STEPS = _CHOICES | {"round", "trunc", "floor"}
"""Calls whose results jump at small changes of their arguments."""
DRAWS = 8
"""Number of times that inputs are moved within their rounding before a fused graph is said to be further off."""
Scales = Mapping[int, float]
"""Factor by number of the input."""


def stays_in_range(t: Trial, pairs: bool = False) -> None:
    """Assert that the fused graph is as close to float64 as the original is, at every scale of its inputs.

    With `pairs` one input is also scaled up as another is scaled down.

    Raises:
        AssertionError: a result is infinite or NaN where the original's is finite, or its rms error is more than an ulp
            and 1.5 times the original's, or 1.5 times the change of float64 when all inputs move by half an ulp.
    """
    wide = widen(t.captured.graph)
    for scales in scalings(t.captured.inputs, pairs):
        inputs = tuple(_scaled(each, scales.get(number)) for number, each in enumerate(t.captured.inputs))
        if any(isinstance(each, Tensor) and _overflows(each, t.captured.inputs[n]) for n, each in enumerate(inputs)):
            continue
        reason = further(replace(t, captured=replace(t.captured, inputs=inputs)), wide)
        assert not reason, f"{reason}; inputs are multiplied by {dict(scales) or 1}"


def keeps_float64(t: Trial) -> None:
    """Assert that a graph fused on float64 inputs computes the numbers of the original.

    Raises:
        AssertionError: integers differ, or floats by more than 1e-12; where the original computes in narrower floats as
            well, by more than 4 ulps of the narrowest.
    """
    count, unit = len(t.captured.inputs), _coarsest(t.captured.graph)
    pairs = zip(
        observed(t.captured.graph, t.inputs()[:count], count), observed(t.fused, t.inputs(), count), strict=True
    )
    for number, (old, new) in enumerate(pairs):
        if not isinstance(old, Tensor):
            continue
        assert new.dtype == old.dtype, f"result {number} is {new.dtype}, not {old.dtype}"
        if not old.is_floating_point():
            assert torch.equal(new, old), f"result {number} has other numbers"
            continue
        limit = max(WIDENED, 4 * unit)
        wrong = relative_error(new, old)
        assert wrong <= limit, f"result {number} in {old.dtype} differs by {wrong:.3g}"


def _coarsest(gm: fx.GraphModule) -> float:
    """Return the largest unit of rounding among the float dtypes in a graph."""
    vals = [each for node in gm.graph.nodes for each in tree_leaves(node.meta.get("val"))]
    return max(torch.finfo(each.dtype).eps for each in vals if isinstance(each, Tensor) and each.is_floating_point())


def refuses_float64(t: Trial, applied: bool) -> None:
    """Assert that a graph fused for a chip has no float64 operator, and a reason where a host has `applied` one.

    Raises:
        AssertionError: an operator reads or returns float64, or nothing is refused.
    """
    for node in t.fused.graph.nodes:
        if "fusion" in node.meta and operator_of(node.target) is not None:
            vals = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
            wide = [each for each in tree_leaves(vals) if isinstance(each, Tensor) and each.dtype == torch.float64]
            assert not wide, f"{node.format_node()} is in float64"
    reasons = [each.reason for each in t.outcome.refusals]
    assert not applied or t.outcome.chosen or reasons, "nothing is fused, and nothing says why"


def scalings(inputs: Sequence[Any], pairs: bool = False) -> Iterator[Scales]:
    """Yield scales: every float input at every level, then all at once; with `pairs`, one up and one down."""
    tops = {n: float(each.double().abs().max()) for n, each in enumerate(inputs) if _is_scaled(each, inputs)}

    def to(level: float, *numbers: int) -> Scales:
        return {n: 2.0 ** math.floor(math.log2(level / tops[n])) for n in numbers}

    yield {}
    yield from (to(level, number) for number in tops for level in LEVELS)
    yield from (to(level, *tops) for level in LEVELS)
    for one, other in combinations(tops, 2) if pairs else ():
        yield from ({one: factor, other: 1 / factor} for factor in (2.0**8, 2.0**-8))


def _is_scaled(x: Any, inputs: Sequence[Any]) -> bool:
    """Return True if `x` has floats of any magnitude: not integers, a mask, or cosines or sines of a pair."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.any() or not x.isfinite().all():
        return False
    is_mask = bool((x <= MASKED).any()) or bool(((x == 0) | (x.abs() == 1)).all())
    return not is_mask and not any(_are_angles(x, each) for each in inputs if each is not x)


def _are_angles(x: Tensor, y: Any) -> bool:
    """Return True if x² + y² is 1 everywhere, as for cosines and sines."""
    alike = isinstance(y, Tensor) and y.is_floating_point() and y.shape == x.shape
    return alike and bool(((x.double().square() + y.double().square() - 1).abs() < 0.02).all())


def _scaled(x: Any, by: float | None) -> Any:
    """Multiply `x` by a number, keeping its strides."""
    if by is None:
        return x
    return (x.detach().double() * by).to(x.dtype)


def _overflows(x: Tensor, given: Tensor) -> bool:
    """Return True if scaling made an entry of `x` infinite."""
    return x.is_floating_point() and not bool(x.isfinite().all()) and bool(given.isfinite().all())


def further(t: Trial, wide: fx.GraphModule) -> str:
    """Return why the fused graph is further from `wide`, the original in float64, than the original is; or "".

    Inputs on which the original overflows where float64 does not are beyond its range, and nothing is compared.
    """
    count = len(t.captured.inputs)
    graph, named = t.captured.graph, {short_name(node.target) for node in t.captured.graph.graph.nodes}
    in_float64, in_its_own = (fx.Interpreter(each, garbage_collect_values=False) for each in (wide, graph))
    exact, old = (
        observed(in_float64.run, t.inputs(wide=True)[:count], count),
        observed(in_its_own.run, t.inputs()[:count], count),
    )
    if any(map(_overflowed, in_float64.env.values(), in_its_own.env.values())):
        return ""
    new = observed(t.fused, t.inputs(), count)
    tied = observed(_Backwards(graph).run, t.inputs()[:count], count) if named & _CHOICES else old
    coarsest, moved = grains(graph, count), list[list[Any]]()
    reason = ""
    for seeds in (range(1), range(1, DRAWS)):
        moved += [observed(wide, _moved(t, seed)[:count], count) for seed in seeds]
        reason = _differing(exact, old, new, moved, tied, coarsest, jumps=bool(named & _STEPS))
        if not reason:
            break
    return reason


def _differing(
    exact: Sequence[Any],
    old: Sequence[Any],
    new: Sequence[Any],
    moved: Sequence[Sequence[Any]],
    tied: Sequence[Any],
    coarsest: Sequence[torch.dtype],
    jumps: bool,
) -> str:
    """Return the first result of `new` that is further from `exact` than `old` and each of `moved` are, and how; or "".

    Args:
        exact: the results of the original in float64.
        old: those of the original in its dtypes.
        new: those of the fused graph.
        moved: those of the original in float64 on inputs moved by half an ulp, for several draws.
        tied: those of the original where the last of equal numbers is chosen; where they are not `old`, the order of
            equal numbers decides, and nothing is compared.
        coarsest: the coarsest dtype on the way to each result.
        jumps: True if the graph has calls that jump, see `_further`.
    """
    for number, (truth, was, made) in enumerate(zip(exact, old, new, strict=True)):
        if not isinstance(truth, Tensor) or not torch.equal(was.nan_to_num(), tied[number].nan_to_num()):
            continue
        swung = [each[number] for each in moved]
        if truth.is_floating_point():
            reason = _further(truth, was, made, swung, coarsest[number], jumps)
        else:
            alike = [_rounded_alike(have, want) for have, want in zip(new, old, strict=True) if _is_paired(have, truth)]
            reason = _other_numbers(truth, was, made, swung, alike)
        if reason:
            return f"result {number} {reason}"
    return ""


def _overflowed(exact: Any, old: Any) -> bool:
    """Return True if float64 `exact` of an intermediate is finite where the original `old` is not: its range ends
    there.
    """
    is_float = isinstance(old, Tensor) and old.is_floating_point()
    return is_float and bool((exact.isfinite() & ~old.isfinite()).any())


def _is_paired(x: Any, numbers: Tensor) -> bool:
    """Return True if `x` has one float for each of the integers `numbers`, such as the weights of experts."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.shape == numbers.shape


def _rounded_alike(x: Tensor, y: Tensor) -> Tensor:
    """Return a mask of the entries of `x` and `y` that differ by two units of rounding at most."""
    return torch.isclose(x, y, rtol=2 * _unit(y.dtype), atol=0)


def _other_numbers(exact: Tensor, old: Tensor, new: Tensor, moved: Sequence[Tensor], alike: Sequence[Tensor]) -> str:
    """Return the reason why integers `new` differ from `exact` more often than `old` and each of `moved` do; "" if not.

    Entries for which one of the masks `alike` is True, whose weights are equal but for rounding, may differ.
    """
    off = new != exact
    for each in alike:
        off = off & ~each
    limit = 1.5 * max(int((each != exact).sum()) for each in (old, *moved)) + 1 + exact.numel() // 100
    return f"has {int(off.sum())} other numbers, {limit:g} are allowed" if int(off.sum()) > limit else ""


def grains(gm: fx.GraphModule, count: int) -> list[torch.dtype]:
    """Return the coarsest floating dtype that `gm` rounds to on the way to each result and the first `count` inputs.

    A maximum of numbers that were rounded to bfloat16 may be in float32: it is no better than they are.
    """
    coarsest: dict[fx.Node, torch.dtype] = {}
    for node in gm.graph.nodes:
        own = tree_leaves(node.meta.get("val")) if node.op == "call_function" else []
        dtypes = [each.dtype for each in own if isinstance(each, Tensor) and each.is_floating_point()]
        read = [coarsest[each] for each in node.all_input_nodes]
        coarsest[node] = max((*dtypes, *read), key=_unit, default=torch.float64)
    results = [
        coarsest[each] if isinstance(each, fx.Node) else torch.float64
        for each in tree_leaves(gm.graph.output_node().args)
    ]
    return [*results, *[max(coarsest.values(), key=_unit)] * count]


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _further(exact: Tensor, old: Tensor, new: Tensor, moved: Sequence[Tensor], grain: torch.dtype, jumps: bool) -> str:
    """Return the reason why floats `new` are further from float64 `exact` than `old` and each of `moved` are; "" if
    not.

    One unit of rounding to the coarser of `grain` and the dtype of `old` is allowed beside the limit. In float32 and
    float64 four units are allowed, because each step of a sum is rounded to the dtype of the result there, and a fused
    operator may sum in another order. Behind calls that jump (`jumps`), one number in a hundred is ignored and the
    limit is 4 times the original's error, not 1.5, as near scores may swap places in a list.
    """
    some = exact.isfinite() & old.isfinite()
    lost = int((some & ~new.isfinite()).sum())
    if lost:
        return f"is infinite or NaN {lost} times where the original is finite"
    size = float(exact[some].norm())
    errors = [(each.double() - exact)[some] for each in (new, old, *moved)]
    if jumps:
        errors[0] = errors[0].abs().sort()[0][: -1 - errors[0].numel() // 100]
    wrong, *others = (float(each.norm()) for each in errors)
    info = torch.finfo(max(grain, old.dtype, key=_unit))
    units = 4 if info.eps <= _unit(torch.float32) else 1
    ulp = units * info.eps * size + info.smallest_normal * info.eps * math.sqrt(exact.numel())
    limit = (4 if jumps else 1.5) * max(others) + ulp if all(map(math.isfinite, others)) else math.inf
    return f"has an rms error of {wrong:.3g}, {limit:.3g} is allowed of {size:.3g}" if wrong > limit else ""


def _moved(t: Trial, seed: int) -> list[Any]:
    """Return the wide inputs moved by up to half an ulp of their narrow dtype, drawn by `seed`: rounding could move
    them so.
    """
    draw = torch.Generator().manual_seed(seed)

    def moved(x: Any, narrow: Any) -> Any:
        if not isinstance(x, Tensor) or not narrow.is_floating_point():
            return x
        noise = torch.rand(x.shape, generator=draw, dtype=x.dtype) - 0.5
        return x * (1 + noise * torch.finfo(narrow.dtype).eps)

    return [moved(x, narrow) for x, narrow in zip(t.inputs(wide=True), t.captured.inputs, strict=False)]


class _Backwards(fx.Interpreter):
    """Interpreter that chooses the last of equal numbers, not the first."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if short_name(target) not in _CHOICES:
            return super().call_function(target, args, kwargs)
        axis = arguments_of(target, args, kwargs)["dim"]
        flipped: tuple[Any, ...] = (args[0].flip(axis), *args[1:])
        chosen = super().call_function(target, flipped, kwargs)
        if isinstance(chosen, Tensor):
            return args[0].shape[axis] - 1 - chosen
        return chosen[0], args[0].shape[axis] - 1 - chosen[1]
