"""Precision of plans: float16 only where the model has float16, float64 wherever the model has float64.

Between its calls a plan computes tensors that the model does not, and some kernels round internally
(`Operator.rounds`). A tensor that is in float16 there must be in float16 in the model too, or be covered by a statement
of the lowering (`fusion.language.float16_ranges`). bfloat16 has the range of float32, and laws bound its error. If a
match reads or gives float64, or depends on float64 inputs alone, then the model and the plan must compute all of it in
float64, unless every reader of its results rounds them to 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.nested import leaves
from fusion._torch.operators import short_name
from fusion.analysis.rounding import exact
from fusion.analysis.upper_bounds import largest
from fusion.graph import Graph, Value
from fusion.graph.launches import is_view
from fusion.language import Refused
from fusion.language.float16_ranges import narrows
from fusion.operators import operator_of
from fusion.records import Input, Match, Output, Plan, Step, outputs_of

F16, F64 = torch.float16, torch.float64
_MOVES = frozenset({
    "cat", "stack", "index", "index_select", "gather", "clone", "flip", "repeat", "where", "masked_fill", "copy",
    "constant_pad_nd", "full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like",
    "new_ones", "eye", "scatter", "neg", "abs", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
})  # fmt: skip
"""ATen operators whose results consist of elements of their arguments, or of numbers that float16 represents."""
_MOVES_AND_CASTS = _MOVES | {"_to_copy"}
_MOVING = frozenset({
    "reshape", "expand", "slice", "narrow", "permute", "cat", "index", "gathered", "flip", "filled", "where", "full",
})  # fmt: skip
"""Canonical ops with that property."""
_ENDS = ", which ends at 65504 and thins out below 6e-5; hold it in bfloat16 or float32"
_COMPUTED = {
    "mul": "a product of tensors", "matmul": "a matrix product", "scale": "a multiple of a tensor", "add": "a sum",
    "power": "a power of a tensor", "shift": "a sum with a number", "cast": "a rounded tensor",
}  # fmt: skip


class Precision:
    """Check of the plans of one graph against losses of precision."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._uncovered = cache(_uncovered)
        self._takes_float64 = any(value.op == "input" and value.dtype is F64 for value in graph.places)

    def refusal(self, match: Match, plan: Plan, built: Iterable[Value]) -> Refused | None:
        """Return the reason why `plan` is less precise than the model, or None.

        `built` are the values that must be built for the plan.
        """
        given = tuple(plan.tensors(match).values())
        wide = any(each.dtype is F64 for each in (*given, *match.results)) or (self._takes_float64 and _is_wide(given))
        if wide and not all(map(_ends_in_16_bits, match.makers)):
            return _demoted(match, plan, given)
        steps = (reason for name, reason in self._uncovered(plan) if not _fits_float16(match.captures.get(name)))
        return next(steps, None) or next(filter(None, map(self._refusal_to_build, (*built, *match.unheld))), None)

    def _refusal_to_build(self, value: Value) -> Refused | None:
        """Return a reason if a recipe computes `value`, which no node has, in float16 from numbers that may not fit it;
        or None.

        None if the recipe moves elements, casts such as float16 represents, or has proven magnitudes.
        """
        recipe = self._graph.recipe(value)
        moves = recipe.op in _MOVING or (recipe.op == "cast" and _fits_float16(recipe.arg)) or _is_negated(recipe)
        if recipe.dtype is not F16 or moves or _is_within(recipe):
            return None
        what = _COMPUTED.get(recipe.op, recipe.op)
        return Refused(
            "{what}: the model does not compute it; the operator requires it in float16" + _ENDS, {"what": what}
        )


def _ends_in_16_bits(node: fx.Node) -> bool:
    """Return True if every reader of `node` gets its result in 16 bits, which hide the difference of float32 and
    float64.

    On the way to the readers the result may be moved and cast.
    """
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if getattr(each.meta.get("val"), "dtype", None) in (F16, torch.bfloat16):
            continue
        if not each.users or not all(map(_is_moved_by, each.users)):
            return False
        waiting.extend(each.users)
    return True


def _is_moved_by(user: fx.Node) -> bool:
    """Return True if the call `user` moves or casts elements of its arguments, without arithmetic."""
    return user.op == "call_function" and (is_view(user.target) or short_name(user.target) in _MOVES_AND_CASTS)


def _fits_float16(value: Any) -> bool:
    """Return True if float16 is proven to represent every number of the capture `value`; False for None."""
    return value is not None and (not narrows(exact(value).dtype, F16) or _is_within(value))


def _is_negated(value: Value) -> bool:
    return value.op == "scale" and abs(value.attrs[0]) == 1


def _is_within(value: Value) -> bool:
    """Return True if the magnitudes in `value` are proven to be below the greatest float16."""
    return largest(value) < torch.finfo(F16).max


def _uncovered(plan: Plan) -> Sequence[tuple[str, Refused]]:
    """List a reason for each float16 tensor that `plan` computes on the way to its results, unless its range is stated.

    Each reason comes with the capture that the step casts, "" if it casts none: the range of a capture may be proven.
    """
    reasons: list[tuple[str, Refused]] = []
    for step, result in _computed_on(plan):
        if result.dtype is F16 and not (step.covered or _moves(step)):
            name = step.args[0].name if _is_cast(step) and isinstance(step.args[0], Input) else ""
            reasons.append((name, _computed(step)))
    for step in plan.steps:
        operator = operator_of(step.target)
        if operator is not None and operator.rounds and not step.covered and _is_in_float16(step):
            template = "{values}: the model does not hold this in float16; {op} rounds it to float16" + _ENDS
            reasons.append(("", Refused(template, {"values": operator.rounds, "op": operator.short})))
    return reasons


def _computed(step: Step) -> Refused:
    template = "the result of {op}: the model does not hold it; the lowering requires it in float16" + _ENDS
    return Refused(template, {"op": short_name(step.target)})


def _computed_on(plan: Plan) -> Iterator[tuple[Step, torch.Tensor]]:
    """Yield each step of `plan` and its result, if another step computes with the result, or with a view or copy of
    it.
    """
    read = set[Output]()
    for number, step in reversed([*enumerate(plan.steps)]):
        results = [*outputs_of(number, step.result)]
        if not _moves(step) or any(name in read for name, _ in results):
            read.update(each for each in leaves(step.args, step.kwargs) if isinstance(each, Output))
        yield from ((step, result) for name, result in results if name in read)


def _moves(step: Step) -> bool:
    """Return True if `step` gives elements of its arguments, or numbers that float16 represents."""
    operator = operator_of(step.target)
    if operator is not None:
        return operator.moves
    return is_view(step.target) or short_name(step.target).rstrip("_") in _MOVES


def _is_cast(step: Step) -> bool:
    return short_name(step.target) == "_to_copy"


def _is_in_float16(step: Step) -> bool:
    return any(isinstance(each, torch.Tensor) and each.dtype is F16 for each in leaves(step.result))


def _is_wide(given: Sequence[Value]) -> bool:
    """Return True if the values `given` depend on inputs of the graph whose floats are all float64, at least one of
    them.
    """
    inputs = (each for value in given for each in value.sources() if each.op == "input")
    return {each.dtype for each in inputs if each.dtype is not None and each.dtype.is_floating_point} == {F64}


def _demoted(match: Match, plan: Plan, given: Sequence[Value]) -> Refused | None:
    """Return the reason why `match` is not computed in float64 throughout, in the model or in `plan`; None if it is.

    `given` are the values that the plan reads.
    """
    stops = {each for each in match.captures.values() if isinstance(each, Value)}
    inside = chain.from_iterable(
        result.sources(lambda value: () if value in stops else value.args) for result in match.results
    )
    narrow = next((each for each in (*given, *inside) if _is_narrow_float(each.dtype)), None)
    if narrow is not None:
        template = (
            "float64: the model computes in {dtype} beside it ({op}); the operator requires one of both throughout"
        )
        return Refused(template, {"dtype": str(narrow.dtype).removeprefix("torch."), "op": narrow.op})
    step = next((each for each, result in _computed_on(plan) if _is_narrow_float(result.dtype)), None)
    if step is None:
        return None
    return Refused(
        "float64: the model computes in it; the lowering requires less ({op})", {"op": short_name(step.target)}
    )


def _is_narrow_float(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype is not F64
