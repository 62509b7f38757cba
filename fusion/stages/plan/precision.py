"""Whether a plan keeps the precision of the model: float16 only where the model has it, float64 throughout.

Between its calls a plan holds tensors that the model does not, and some kernels round numbers on the way
(`Operator.rounds`). What is in float16 there must be in float16 in the model too, or be covered by a statement of the
lowering (`fusion.language.ranges`). bfloat16 has the range of float32, and laws bound its error. Where a match reads or
gives float64, or is of float64 inputs alone, all that the model and the plan compute for it must be float64, unless
all that comes of it is rounded to 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.operators import short_name
from fusion._torch.tensors import leaves
from fusion.analysis.magnitudes import largest
from fusion.analysis.rounding import exact
from fusion.graph import Graph, Value
from fusion.graph.launches import is_view
from fusion.language import Refused
from fusion.language.ranges import narrows
from fusion.operators import operator_of
from fusion.records import Input, Match, Output, Plan, Step, outputs_of

F16, F64 = torch.float16, torch.float64
_MOVES = frozenset({
    "cat", "stack", "index", "index_select", "gather", "clone", "flip", "repeat", "where", "masked_fill", "copy",
    "constant_pad_nd", "full", "full_like", "new_full", "zeros", "zeros_like", "new_zeros", "ones", "ones_like",
    "new_ones", "eye", "scatter", "neg", "abs", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
})  # fmt: skip
"""Calls whose results consist of elements of their arguments, or of numbers that float16 holds."""
_MOVES_AND_CASTS = _MOVES | {"_to_copy"}
_MOVING = frozenset({
    "reshape", "expand", "slice", "narrow", "permute", "cat", "index", "gathered", "flip", "filled", "where", "full",
})  # fmt: skip
"""The same of canonical ops."""
_ENDS = ", which ends at 65504 and thins out below 6e-5; hold it in bfloat16 or float32"
_COMPUTED = {
    "mul": "a product of tensors", "matmul": "a matrix product", "scale": "a multiple of a tensor", "add": "a sum",
    "power": "a power of a tensor", "shift": "a sum with a number", "cast": "a rounded tensor",
}  # fmt: skip


class Precision:
    """Refuses the plans of one graph that hold numbers in less than the model does."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._uncovered = cache(_uncovered)
        self._takes_float64 = any(value.op == "input" and value.dtype is F64 for value in graph.places)

    def refusal(self, match: Match, plan: Plan, built: Iterable[Value]) -> Refused | None:
        """Why a plan, with the values that are `built` for it, is less precise than the model; None where it is not."""
        given = tuple(plan.tensors(match).values())
        wide = any(each.dtype is F64 for each in (*given, *match.results)) or (self._takes_float64 and _is_wide(given))
        if wide and not all(map(_ends_in_16_bits, match.makers)):
            return _demoted(match, plan, given)
        steps = (reason for name, reason in self._uncovered(plan) if not _is_held(match.captures.get(name)))
        return next(steps, None) or next(filter(None, map(self._unheld, (*built, *match.unheld))), None)

    def _unheld(self, value: Value) -> Refused | None:
        """Why a value that no node holds may not be built in float16."""
        recipe = self._graph.recipe(value)
        moves = recipe.op in _MOVING or (recipe.op == "cast" and _is_held(recipe.arg)) or _is_negated(recipe)
        if recipe.dtype is not F16 or moves or _is_within(recipe):
            return None
        what = _COMPUTED.get(recipe.op, recipe.op)
        return Refused(
            "{what}: the model does not compute it; the operator requires it in float16" + _ENDS, {"what": what}
        )


def _ends_in_16_bits(node: fx.Node) -> bool:
    """True if all readers of a result get it in 16 bits, which hide the difference of float32 and float64.

    On the way to them it may be moved and cast.
    """
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if _dtype(each) in (F16, torch.bfloat16):
            continue
        if not each.users or not all(map(_is_moved_by, each.users)):
            return False
        waiting.extend(each.users)
    return True


def _dtype(node: fx.Node) -> torch.dtype | None:
    return getattr(node.meta.get("val"), "dtype", None)


def _is_moved_by(user: fx.Node) -> bool:
    """True if a call gives elements of its arguments as they are, or cast."""
    return user.op == "call_function" and (is_view(user.target) or short_name(user.target) in _MOVES_AND_CASTS)


def _is_held(value: Any) -> bool:
    """True if float16 is proven to hold every number of a value, which is None for what is no capture."""
    return value is not None and (not narrows(exact(value).dtype, F16) or _is_within(value))


def _is_negated(value: Value) -> bool:
    return value.op == "scale" and abs(value.attrs[0]) == 1


def _is_within(value: Value) -> bool:
    """True if every number of a value is proven to be less than the greatest of float16."""
    return largest(value) < torch.finfo(F16).max


def _uncovered(plan: Plan) -> Sequence[tuple[str, Refused]]:
    """What a plan computes in float16 on the way to its results: why it may not, and the capture that it casts, if any.

    A capture may be proven to be within float16; nothing else is.
    """
    found: list[tuple[str, Refused]] = []
    for step, result in _computed_on(plan):
        if result.dtype is F16 and not (step.covered or _moves(step)):
            name = step.args[0].name if _is_cast(step) and isinstance(step.args[0], Input) else ""
            found.append((name, _computed(step)))
    for step in plan.steps:
        operator = operator_of(step.target)
        if operator is not None and operator.rounds and not step.covered and _is_in_float16(step):
            said = "{values}: the model does not hold this in float16; {op} rounds it to float16" + _ENDS
            found.append(("", Refused(said, {"values": operator.rounds, "op": operator.short})))
    return found


def _computed(step: Step) -> Refused:
    said = "the result of {op}: the model does not hold it; the lowering requires it in float16" + _ENDS
    return Refused(said, {"op": short_name(step.target)})


def _computed_on(plan: Plan) -> Iterator[tuple[Step, torch.Tensor]]:
    """The results of steps with which other steps of a plan compute."""
    read = set[Output]()
    for number, step in reversed([*enumerate(plan.steps)]):
        results = [*outputs_of(number, step.result)]
        if not _moves(step) or any(name in read for name, _ in results):
            read.update(each for each in leaves(step.args, step.kwargs) if isinstance(each, Output))
        yield from ((step, result) for name, result in results if name in read)


def _moves(step: Step) -> bool:
    """True if a call gives elements of what it is given, or numbers that float16 holds."""
    operator = operator_of(step.target)
    if operator is not None:
        return operator.moves
    return is_view(step.target) or short_name(step.target).rstrip("_") in _MOVES


def _is_cast(step: Step) -> bool:
    return short_name(step.target) == "_to_copy"


def _is_in_float16(step: Step) -> bool:
    """True if a call gives a tensor of float16."""
    return any(isinstance(each, torch.Tensor) and each.dtype is F16 for each in leaves(step.result))


def _is_wide(given: Sequence[Value]) -> bool:
    """True if of floats values are computed from float64 inputs of the graph alone."""
    inputs = (each for value in given for each in value.sources() if each.op == "input")
    return {each.dtype for each in inputs if each.dtype is not None and each.dtype.is_floating_point} == {F64}


def _demoted(match: Match, plan: Plan, given: Sequence[Value]) -> Refused | None:
    """Why a match that touches float64 is not computed in float64 alone, in the model or in the plan."""
    stops = {each for each in match.captures.values() if isinstance(each, Value)}
    inside = chain.from_iterable(
        result.sources(lambda value: () if value in stops else value.args) for result in match.results
    )
    narrow = next((each for each in (*given, *inside) if _is_narrow_float(each.dtype)), None)
    if narrow is not None:
        said = "float64: the model computes in {dtype} beside it ({op}); the operator requires one of both throughout"
        return Refused(said, {"dtype": str(narrow.dtype).removeprefix("torch."), "op": narrow.op})
    step = next((each for each, result in _computed_on(plan) if _is_narrow_float(result.dtype)), None)
    if step is None:
        return None
    return Refused(
        "float64: the model computes in it; the lowering requires less ({op})", {"op": short_name(step.target)}
    )


def _is_narrow_float(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype is not F64
