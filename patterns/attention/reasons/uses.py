"""Reasons against an attention that was read, which lie in the uses of its result and of its weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch.fx as fx

from fusion import reader
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.row_layout import unwidened
from fusion.graph import Annotation, Graph, Miss, Reading, Value
from patterns.attention.core.divided_late import stripped
from patterns.attention.core.read import cores_by_value
from patterns.attention.reasons.blame import RULE

_WEIGHTS_USED = (
    "weights: something else reads them beside the product with values, so that they are computed in any "
    "case; npu_fused_infer_attention_score returns none and requires that product alone; do not return them"
)
_VIEWS = ("reshape", "permute", "expand", "slice")


@reader(needs=("attention_core", "softmax_attention"))
def uses_of_attentions(graph: Graph) -> Iterator[Annotation]:
    """Report each `softmax_attention` whose result is read in a wider dtype, or whose weights have other users."""
    for value, cores in cores_by_value(graph):
        reading = graph.readings.one(value, RULE)
        if reading is not None and cores[0].root is value:
            yield from (
                (value, miss) for miss in (_wide_result(graph, value, reading), _used_weights(graph, value)) if miss
            )


def _wide_result(graph: Graph, root: Value, reading: Reading) -> Miss | None:
    """Return a `Miss` of the attention `root` if its result is read in a wider dtype than queries, keys and values
    have; else None.

    Operators give results in the dtype of their operands.
    """
    operands = [reading.captures[name] for name in ("q", "k", "v")]
    wide, narrow = operands[0].dtype, {unwidened(graph.algebra, each).dtype for each in operands}
    if len(narrow) != 1 or wide in narrow:
        return None
    have, given = (str(each).removeprefix("torch.") for each in (wide, *narrow))
    reason = (
        f"result: it is read in {have} before anything rounds it, where queries, keys and values are "
        f"{given}; npu_fused_infer_attention_score gives it in {given}; cast the result to {given} before "
        "it is used"
    )
    return Miss(RULE, reason, _casts(graph, operands[0]), root, limited=True)


def _used_weights(graph: Graph, root: Value) -> Miss | None:
    """Return a `Miss` of the attention `root` if its weights have other users than the product with values; else
    None.
    """
    product = stripped(root)[0]
    softmax = product.arg.below(*_VIEWS, "cast")
    waiting, seen = list(graph.places.get(softmax, ())), set[fx.Node]()
    if softmax.op != "softmax" or product.op != "matmul":
        return None
    while waiting:
        for user in waiting.pop().users:
            value = graph.value_of.get(user)
            if isinstance(value, Value) and value.below(*_VIEWS, "cast") is softmax:
                waiting.extend({user} - seen)
                seen.add(user)
            elif not any(user is node or graph.depends(node, user) for node in graph.places[root]):
                return Miss(RULE, _WEIGHTS_USED, (softmax,), root, useless=True)
    return None


def _casts(graph: Graph, x: Value) -> tuple[Value, ...]:
    """Return the widening casts in the graph that have the same source as `x`, below views and casts."""
    source = x.below(*_VIEWS, "cast")
    return tuple(each for each in graph.places if is_rounding(each) and each.below(*_VIEWS, "cast") is source)
