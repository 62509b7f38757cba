"""Why what is attention, or nearly, becomes no operator, in the terms of the model, and which value is to blame.

A mask is blamed where it is made, else where it is put on the scores; a cap and a cast where they stand.
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
_BIAS = "a bias is added to the scores that is not proven to be a mask: 0 where a key is seen, else at most -1e4"
_ASSUME = " (of a mask that is passed in, the option assume says it)"
_KEPT = (
    "the weights are read by more than the product with values: they are computed in any "
    "case, and npu_fused_infer_attention_score returns none; do not return them"
)
TRUTHS = (
    "a mask is added to the scores that is computed from numbers which are passed in, and not known to be 0 or 1, as "
    "booleans are"
)
_VIEWS = ("reshape", "permute", "expand", "slice")
_COMPUTED = ("add", "mul", "scale", "shift", "where", "cast")


def missed(reason: str, product: Value, at: Sequence[Value] = ()) -> Miss:
    """Why attention around a product of weights and values is none."""
    return Miss(RULE, reason, tuple(at), product)


def kept_wide(graph: Graph, root: Value, reading: Reading | Miss | None) -> Miss | None:
    """What it means that an operator takes no queries in such a dtype; None where they were never narrower."""
    if not isinstance(reading, Reading) or reading.op != RULE:
        return None
    operands = [reading.captures[name] for name in ("q", "k", "v")]
    wide, narrow = operands[0].dtype, {uncast(graph.algebra, each).dtype for each in operands}
    if len(narrow) != 1 or wide in narrow:
        return None
    have, given = (str(each).removeprefix("torch.") for each in (wide, *narrow))
    reason = (
        f"the result is read in {have} before anything rounds it, where queries, keys and values are {given}: the "
        "operator gives its results in their dtype"
    )
    return Miss(RULE, reason, _casts(graph, operands[0]), root, limited=True)


def weights_kept(graph: Graph, root: Value, reading: Reading | Miss | None) -> Miss | None:
    """What it means that something else than the product with values reads the weights; None where nothing does."""
    if not isinstance(reading, Reading) or reading.op != RULE:
        return None
    product = stripped(root)[0]
    softmax = product.arg.below(*_VIEWS, "cast")
    waiting, seen = list(graph.places.get(softmax, ())), set[fx.Node]()
    if softmax.op != "softmax" or product.op != "matmul":
        return None
    while waiting:
        for user in waiting.pop().users:
            held = graph.held.get(user)
            if isinstance(held, Value) and held.below(*_VIEWS, "cast") is softmax:
                waiting.extend({user} - seen)
                seen.add(user)
            elif not any(user is node or graph.depends(node, user) for node in graph.places[root]):
                return Miss(RULE, _KEPT, (softmax,), root, useless=True)
    return None


def left_whole(node: fx.Node) -> str:
    """Why a call of sdpa is not written out."""
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    if dropout:
        return (
            "some of the weights are dropped at random; npu_fused_infer_attention_score drops "
            "none; set the dropout to 0"
        )
    given: Any = node.args[1:3]
    keys, values = (dims_of(each.meta["val"].shape[-2:-1]) for each in given)
    if keys != values:
        return "there are not as many values as keys: torch leaves some out, or reads memory behind them"
    return "queries, keys and values are not [.., N, S, D] with a width D that is known"


def _casts(graph: Graph, x: Value) -> tuple[Value, ...]:
    """The values that nodes hold by which `x` was widened, perhaps in another shape."""
    source = x.below(*_VIEWS, "cast")
    return tuple(each for each in graph.places if is_rounding(each) and each.below(*_VIEWS, "cast") is source)


def unproven(mask: Value, by_truths: bool = False) -> str:
    """Why it is not known what a mask lets through that is added to the scores; of truths, `by_truths` it would be."""
    passed = passed_in(mask)
    if passed is not None:
        return _BIAS + _ASSUME
    return TRUTHS if by_truths or _of_float_truths(mask) else _BIAS


def passed_in(x: Value) -> Value | None:
    """The input of which a mask shows some rows and keys; None where it is computed."""
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


def _of_float_truths(x: Value, turned: bool = False) -> bool:
    """Whether a mask would be known if floats that are passed in were 0 or 1: 1 - x."""
    turned = turned or x.op == "shift"
    if x.op == "input":
        return is_float(x) and turned
    passed = x.op in (*_COMPUTED, *_VIEWS)
    return passed and any(_of_float_truths(each, turned) for each in x.args)
