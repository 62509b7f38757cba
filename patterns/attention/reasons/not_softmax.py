"""Reasons for products that resemble attention, but have another op at the softmax or between the products.

weights = f(softmax(g(q kᵀ)))        out = weights v        f and g are elementwise functions
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from fusion.graph import Graph, Value

OVER_QUERIES = (
    "softmax: it is taken over the queries; npu_fused_infer_attention_score requires it over the keys; "
    "write scores.softmax(-1) of scores [.., queries, keys]"
)
ONE_KEY = (
    "keys: there is one, so that its weight is 1 and multiplies the values elementwise; "
    "npu_fused_infer_attention_score requires a product weights @ values; return the values as they are, "
    "or write torch.matmul"
)
HIDDEN_ONE = (
    "keys: there is one, whose score is a sum over lanes and no matmul, behind a mask or a bias; "
    "npu_fused_infer_attention_score requires a product of queries and keys; write torch.matmul(q, k.mT)"
)
JOINED = (
    "scores: those of single heads are concatenated, with queries or keys that are not slices of one tensor in "
    "the order of heads; npu_fused_infer_attention_score requires one tensor [B, N, S, D]; slice q, k and v "
    "from one tensor each"
)
OF_SEVERAL = (
    "keys, values: there are several tensors of both, each with its own products before and behind the "
    "softmax; npu_fused_infer_attention_score requires one tensor of keys and one of values; write "
    "torch.cat of the keys, and of the values"
)
_ARRANGED = ("cast", "reshape", "permute", "slice", "expand")
"""Ops that only cast or rearrange."""
_SCORES = (*_ARRANGED, "scale", "shift", "add", "where", "cat")
"""Ops of scores, which are also scaled and masked."""
_IN_PLACE = ("sigmoid", "relu", "gelu", "tanh", "exp")
"""Elementwise functions that some models use in place of a softmax."""
_WORDS = {
    "mul": "a multiplication", "add": "an addition", "where": "a choice", "matmul": "another product",
    "shift": "an addition", "scale": "a multiplication", "clip": "clamp", "power": "pow", "log_sum_exp": "logsumexp",
    "aten._euclidean_dist.default": "cdist", "aten._cdist_forward.default": "cdist",
    "total": "sum", "mean": "a mean or a sum", "largest": "topk", "index": "a gather of rows", "cumsum": "cumsum",
}  # fmt: skip
"""Names for users of ops of the canonical graph that torch does not name so."""


def called(op: str) -> str:
    """Return the name by which users know an op of the canonical graph."""
    return _WORDS.get(op, op.removeprefix("aten.").removesuffix(".default"))


def why_not_attention(product: Value) -> str:
    """Return the reason why `product`, of a softmax over q kᵀ with values, is no attention; "" for others.

    It has one key, scores joined from several products, another op between softmax and values, or between q kᵀ and
    softmax.
    """
    if product.op == "mul" and any(map(_has_one_key, product.args)):
        return ONE_KEY
    for side, axis in zip(product.args, (-1, -2), strict=True) if product.op == "matmul" else ():
        between, softmax = _down(side, "softmax", _ARRANGED)
        other, scores = ("", None) if softmax is None else _down(softmax.arg, "matmul", _SCORES)
        if softmax is not None and scores is None and _is_joined(softmax.arg):
            return JOINED
        if softmax is not None and scores is None and _concatenates_keys(softmax):
            return OF_SEVERAL
        if softmax is not None and scores is None and _has_one_key(softmax):
            return HIDDEN_ONE
        if softmax is None or scores is None:
            continue
        if between:
            return (
                f"weights: they go through {between} between the softmax and the values; "
                f"npu_fused_infer_attention_score requires softmax(scores) @ values; {_advice(side, softmax, axis)}"
            )
        if other:
            return (
                f"scores: they go through {other} between the product of queries and keys and the softmax; "
                "npu_fused_infer_attention_score requires scores that are scaled, masked or biased alone"
            )
        places = [place for each, place in _softmaxes(side, side.rank + axis) if each is softmax]
        if places and _keys(softmax) not in places:
            return OVER_QUERIES
    return ""


def _advice(weights: Value, softmax: Value, keys: int) -> str:
    """Return what to write in place of the factor by which `weights` are more than `softmax`; `keys` is the dim of
    keys.

    A factor of each row commutes with the product, and a factor of each key belongs to its value.
    """
    product = weights.below(*_ARRANGED)
    for side, factor in product.operands("mul"):
        if side.below(*_ARRANGED) is not softmax:
            continue
        by_key = factor.rank >= -keys and factor.shape[keys] != 1
        if not by_key:
            return "multiply the product by it, or leave it out"
        if prod(factor.shape) == factor.shape[keys] * prod(factor.shape[:-2]):
            return "multiply the values by it, or leave it out"
    return "leave it out"


def _has_one_key(weights: Value) -> bool:
    """Return True if `weights` are the softmax over one score, the sum of an elementwise product of two rows."""
    softmax = weights.below(*_ARRANGED)
    if softmax.op != "softmax" or softmax.shape[_keys(softmax)] != 1:
        return False
    _, score = _down(softmax.arg, "mean", _SCORES)
    return score is not None and score.arg.below("reshape").op == "mul"


def without_softmax(graph: Graph, product: Value) -> tuple[str, tuple[Value, ...]]:
    """Return the reason why `product`, of another function of scores with values, is no attention, and that function;
    "" and nothing for others.

    Products with Parameters or with gathered rows, such as the matrices of experts, may be layers and are no attention.
    """
    product = product.below("scale", "cast", "reshape")
    if product.op != "matmul" or product.shape[-1] == 1:
        return "", ()
    weights, values = product.args
    if _down(weights, "softmax", _ARRANGED)[1] is not None:
        return "", ()
    for name in _IN_PLACE:
        function = _down(weights, name, _ARRANGED)[1]
        scores = None if function is None else _down(function.arg, "matmul", _SCORES)[1]
        if scores is None or prod(scores.args[1].shape[:-2]) == 1 or _is_attended(scores):
            continue
        operands = [each.below(*_ARRANGED, "scale") for each in (*scores.args, values)]
        if not any(each.op == "index" or graph.is_fixed(each) for each in operands):
            reason = (
                f"weights: they are {name} of the scores, without a softmax; npu_fused_infer_attention_score "
                f"requires a softmax over the keys, and no other operator here computes {name}"
            )
            return reason, (weights.below(*_ARRANGED),)
    return "", ()


def _is_joined(x: Value) -> bool:
    """Return True if the scores `x` concatenate matmuls of single heads, along a dim that is not that of queries or
    keys.
    """
    _, joined = _down(x, "cat", _SCORES)
    if joined is None or joined.attrs[0] >= joined.rank - (2 if x.rank == joined.rank else 1):
        return False
    return all(each.below("reshape", "scale").op == "matmul" for each in joined.args)


def _concatenates_keys(softmax: Value) -> bool:
    """Return True if the scores of `softmax` concatenate several products along the keys."""
    _, joined = _down(softmax.arg, "cat", _SCORES)
    if joined is None or joined.attrs[0] != joined.rank - 1 or joined.shape[-1] != softmax.shape[_keys(softmax)]:
        return False
    return all(_down(each, "matmul", _SCORES)[1] is not None for each in joined.args)


def _keys(softmax: Value) -> int:
    """Return the dim of the keys over which `softmax` is, as a nonnegative index."""
    return softmax.rank + softmax.attrs[0]


def _softmaxes(x: Value, axis: int, most: int = 4) -> Iterator[tuple[Value, int]]:
    """Yield the softmaxes from which `x` is computed, each with the dim that `axis` of `x` is there.

    Between them are views and at most `most` elementwise ops.
    """
    waiting, seen = [(x, axis, 0)], set[tuple[Value, int]]()
    while waiting:
        x, axis, functions = waiting.pop()
        if x.op == "softmax":
            yield x, axis
        elif functions <= most and (x, axis) not in seen:
            seen.add((x, axis))
            functions += x.op not in _ARRANGED
            waiting.extend((each, place, functions) for each, place in _below(x, axis))


def _below(x: Value, axis: int) -> list[tuple[Value, int]]:
    """List the operands of `x` that have the dim `axis` of `x`, each with the index that the dim has there; [] for a
    matmul.
    """
    match x.op:
        case "matmul":
            return []
        case "permute":
            return [(x.arg, x.attrs[axis])]
        case "reshape":
            behind = x.shape[axis:]
            return [(x.arg, place) for place in range(x.arg.rank) if _is_same(x.arg.shape[place:], behind)]
        case "slice":
            return [(x.arg, axis)]
        case _:
            return [(each, axis) for each in x.args if each.shape == x.shape]


def _is_same(dims: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return True if the first dims of `dims` and `others` are the same dim of more than one element."""
    return dims[0] == others[0] != 1 and prod(dims) == prod(others)


def _is_attended(product: Value) -> bool:
    """Return True if `product` sums over the dim of a softmax, so that it is weights times values."""
    sides = ((side, side.rank + axis) for side, axis in zip(product.args, (-1, -2), strict=True))
    return any(place == _keys(softmax) for side, axis in sides for softmax, place in _softmaxes(side, axis))


def _down(x: Value, op: str, passed: Sequence[str], most: int = 4) -> tuple[str, Value | None]:
    """Search below `x` for an op `op`, through operands with as many elements as their result.

    Args:
        x: where the search begins.
        op: the name of the op.
        passed: names of ops that are left out of account.
        most: how many ops besides `passed` may be on the way.

    Returns:
        The name of the first op on the way that is not in `passed`, "" if there is none; and the value, None if there
        is
        none. Operands that are computed last are searched first.
    """
    waiting, seen = [(x, tuple[str, ...]())], set[Value]()
    while waiting:
        x, between = waiting.pop()
        if x.op == op:
            return between[0] if between else "", x
        if x in seen or len(between) > most or (x.op == "matmul" and _is_attended(x)):
            continue
        seen.add(x)
        below = [each for each in x.args if x.op in _ARRANGED or prod(each.shape) == prod(x.shape)]
        own = () if x.op in passed else (called(x.op),)
        latest = below if x.op == "where" else sorted(below, key=lambda each: each.id)
        waiting.extend((each, between + own) for each in latest)
    return "", None
