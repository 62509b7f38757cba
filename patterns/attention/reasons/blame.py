"""Reasons why attention, or what resembles it, is not fused, and the values to which the report points.

For a mask, it points to where the mask is made, else to where it is applied; for a cap or a cast, to that op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.rounding import is_float
from fusion.analysis.row_layout import uncast
from fusion.graph import Graph, Miss, Reading, Value, dims_of
from patterns.attention.core.divided_late import stripped

RULE = "softmax_attention"
_BIAS = (
    "mask: what is added to the scores is not proven to be 0 where a key is visible, else at most -1e4; "
    "npu_fused_infer_attention_score requires such a mask, or a bias in the dtype of the queries"
)
_ASSUME = " (name a mask that is passed in by the option assume, or pass booleans)"
_WEIGHTS_USED = (
    "weights: something else reads them beside the product with values, so that they are computed in any "
    "case; npu_fused_infer_attention_score returns none and requires that product alone; do not return them"
)
DROPPED = (
    "weights: some are dropped at random; npu_fused_infer_attention_score requires all of them; "
    "set the dropout to 0 (model.eval())"
)
TRUTHS = (
    "mask: what is added to the scores is computed from numbers that are passed in and may be other than 0 "
    "and 1; npu_fused_infer_attention_score requires a mask; pass booleans, and write torch.where(mask, 0, "
    "-inf), or name a mask [B, T] that is passed in by the option assume"
)
_VIEWS = ("reshape", "permute", "expand", "slice")
_COMPUTED = ("add", "mul", "scale", "shift", "where", "cast")


def missed(reason: str, product: Value, at: Sequence[Value] = ()) -> Miss:
    """Return `reason` as a `Miss` of the attention around the matmul `product` of weights and values.

    The report points to the values `at`.
    """
    return Miss(RULE, reason, tuple(at), product)


def wide_result_miss(graph: Graph, root: Value, reading: Reading | Miss | None) -> Miss | None:
    """Return a `Miss` of the attention `root` if its result is read in a wider dtype than queries, keys and values
    have.

    Operators give results in the dtype of their operands. None if that is not so, or if `reading` is none of attention.
    """
    if not isinstance(reading, Reading) or reading.op != RULE:
        return None
    operands = [reading.captures[name] for name in ("q", "k", "v")]
    wide, narrow = operands[0].dtype, {uncast(graph.algebra, each).dtype for each in operands}
    if len(narrow) != 1 or wide in narrow:
        return None
    have, given = (str(each).removeprefix("torch.") for each in (wide, *narrow))
    reason = (
        f"result: it is read in {have} before anything rounds it, where queries, keys and values are "
        f"{given}; npu_fused_infer_attention_score gives it in {given}; cast the result to {given} before "
        "it is used"
    )
    return Miss(RULE, reason, _casts(graph, operands[0]), root, limited=True)


def used_weights_miss(graph: Graph, root: Value, reading: Reading | Miss | None) -> Miss | None:
    """Return a `Miss` of the attention `root` if its weights have other users than the product with values.

    None if they have not, or if `reading` is none of attention.
    """
    if not isinstance(reading, Reading) or reading.op != RULE:
        return None
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


def why_not_decomposed(node: fx.Node) -> str:
    """Return the reason why `node`, a call of scaled_dot_product_attention, is not decomposed.

    It has dropout, other numbers of keys and values, or operands of unknown dims.
    """
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    if dropout:
        return DROPPED
    given: Any = node.args[1:3]
    keys, values = (dims_of(each.meta["val"].shape[-2:-1]) for each in given)
    if keys != values:
        return (
            "values: there are not as many as keys, so that torch leaves some out or reads memory behind them; "
            "npu_fused_infer_attention_score requires as many"
        )
    return (
        "queries, keys, values: they are not [.., N, S, D] with a static D; npu_fused_infer_attention_score "
        "requires that; compile for a static head dim"
    )


def _casts(graph: Graph, x: Value) -> tuple[Value, ...]:
    """Return the widening casts in the graph that have the same source as `x`, below views and casts."""
    source = x.below(*_VIEWS, "cast")
    return tuple(each for each in graph.places if is_rounding(each) and each.below(*_VIEWS, "cast") is source)


def unproven(mask: Value, by_truths: bool = False) -> str:
    """Return the reason why the keys that the additive `mask` hides are unknown.

    `by_truths` is true if they would be known, were its integer inputs 0 or 1.
    """
    passed = passed_in(mask)
    if passed is not None:
        return _BIAS + _ASSUME
    return TRUTHS if by_truths or _inverts_float_input(mask) else _BIAS


def passed_in(x: Value) -> Value | None:
    """Return the input from which `x` takes rows and keys by views, casts and gathers; None where it is computed."""
    while x.op != "input":
        keeps = (
            {"reshape": x.shape[-1:] == x.args[0].shape[-1:], "permute": x.attrs[-1:] == (x.rank - 1,)}
            if x.args
            else {}
        )
        rows = x.op == "index" and x.rank - 1 not in x.attrs
        if not (keeps.get(x.op) or rows or is_rounding(x) or x.op in ("expand", "slice")):
            return None
        x = x.arg
    return x if x.rank > 1 else None


def _inverts_float_input(x: Value, is_inverted: bool = False) -> bool:
    """Return True if a float input is below a shift, as in 1 - input, among the ops from which the mask `x` is
    computed.

    `is_inverted` is True below a shift. Such a mask would be known, were the input declared to have 0 and 1 alone.
    """
    is_inverted = is_inverted or x.op == "shift"
    if x.op == "input":
        return is_float(x) and is_inverted
    passed = x.op in (*_COMPUTED, *_VIEWS)
    return passed and any(_inverts_float_input(each, is_inverted) for each in x.args)
