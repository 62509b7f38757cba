"""Reasons why attention, or what resembles it, is not fused, and the values to which the report points.

For a mask, it points to where the mask is made, else to where it is applied; for a cap or a cast, to that op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.rounding import is_float
from fusion.graph import Miss, Value, dims_of

RULE = "softmax_attention"
_BIAS = (
    "mask: what is added to the scores is not proven to be 0 where a key is visible, else at most -1e4; "
    "npu_fused_infer_attention_score requires such a mask, or a bias in the dtype of the queries"
)
_ASSUME = " (name a mask that is passed in by the option assume, or pass booleans)"
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
