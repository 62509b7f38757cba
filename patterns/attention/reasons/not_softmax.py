"""What stands where attention has a softmax between two products and nothing else, so that it is none.

weights = f(softmax(g(q kᵀ)))        out = weights v        f and g are functions of single elements
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from fusion.graph import Graph, Value

OVER_QUERIES = (
    "the softmax is taken over the queries, not over the keys; "
    "npu_fused_infer_attention_score requires it over the keys"
)
ONE_KEY = (
    "its weight is 1, as there is one key, and its values are multiplied by it one by one, not as rows of a product"
)
HIDDEN_ONE = (
    "there is one key, whose score is a sum and no row of a product: what is added to it, or hides it, is not read"
)
JOINED = "scores of single heads are joined, of which queries or keys are not cut from one tensor in the same order"
OF_SEVERAL = (
    "its keys and values are several tensors, of which each has products of its own on both sides of the softmax: the "
    "operator reads one tensor of keys and one of values"
)
_ARRANGED = ("cast", "reshape", "permute", "slice", "expand")
"""Ops of weights that attention has as well, and those that say nothing of what is computed."""
_OF_SCORES = (*_ARRANGED, "scale", "shift", "add", "where", "cat")
"""Those of scores, which are scaled and masked."""
_IN_PLACE = ("sigmoid", "relu", "gelu", "tanh", "exp")
"""Functions of single scores that some models have in place of a softmax."""
_WORDS = {
    "mul": "a multiplication", "add": "an addition", "where": "a choice", "matmul": "another product",
    "shift": "an addition", "scale": "a multiplication", "clip": "clamp", "power": "pow", "log_sum_exp": "logsumexp",
    "total": "sum", "mean": "a mean or a sum", "largest": "topk", "index": "a gather of rows", "cumsum": "cumsum",
}  # fmt: skip
"""What users call an op of the canonical graph whose name torch does not have, or has for something else."""


def called(op: str) -> str:
    """Return the name by which users know an op of the canonical graph."""
    return _WORDS.get(op, op.removeprefix("aten.").removesuffix(".default"))


def unlike(product: Value) -> str:
    """Why a product of a softmax over scores with values is no attention; "" where it is no such product."""
    if product.op == "mul" and any(map(_is_of_one_key, product.args)):
        return ONE_KEY
    for side, axis in zip(product.args, (-1, -2), strict=True) if product.op == "matmul" else ():
        odd, softmax = _down(side, "softmax", _ARRANGED)
        other, scores = ("", None) if softmax is None else _down(softmax.arg, "matmul", _OF_SCORES)
        if softmax is not None and scores is None and _is_joined(softmax.arg):
            return JOINED
        if softmax is not None and scores is None and _is_of_several(softmax):
            return OF_SEVERAL
        if softmax is not None and scores is None and _is_of_one_key(softmax):
            return HIDDEN_ONE
        if softmax is None or scores is None:
            continue
        if odd:
            return f"between the softmax and the values the weights go through {odd}, which the operator does not do"
        if other:
            return f"between the product and the softmax the scores go through {other}, which the operator does not do"
        places = [place for each, place in _softmaxes(side, side.rank + axis) if each is softmax]
        if places and _keys(softmax) not in places:
            return OVER_QUERIES
    return ""


def _is_of_one_key(weights: Value) -> bool:
    """Whether a factor is the softmax over one score, which is the sum of the elementwise product of two rows."""
    softmax = weights.below(*_ARRANGED)
    if softmax.op != "softmax" or softmax.shape[_keys(softmax)] != 1:
        return False
    _, score = _down(softmax.arg, "mean", _OF_SCORES)
    return score is not None and score.arg.below("reshape").op == "mul"


def without_softmax(graph: Graph, product: Value) -> str:
    """Why a product of a function of scores, that is no softmax, with values is no attention; "" for what is no such.

    Products with weights, or with rows that are gathered as experts' matrices are, may be layers.
    """
    product = product.below("scale", "cast", "reshape")
    if product.op != "matmul" or product.shape[-1] == 1:
        return ""
    weights, values = product.args
    if _down(weights, "softmax", _ARRANGED)[1] is not None:
        return ""
    for name in _IN_PLACE:
        function = _down(weights, name, _ARRANGED)[1]
        scores = None if function is None else _down(function.arg, "matmul", _OF_SCORES)[1]
        if scores is None or prod(scores.args[1].shape[:-2]) == 1 or _is_attended(scores):
            continue
        operands = [each.below(*_ARRANGED, "scale") for each in (*scores.args, values)]
        if not any(each.op == "index" or graph.is_fixed(each) for each in operands):
            return f"between the products stands {name} in place of a softmax over the keys: no operator does this"
    return ""


def _is_joined(x: Value) -> bool:
    """Whether scores are products that were joined, but not along their rows, unless those were opened, or keys."""
    _, joined = _down(x, "cat", _OF_SCORES)
    if joined is None or joined.attrs[0] >= joined.rank - (2 if x.rank == joined.rank else 1):
        return False
    return all(each.below("reshape", "scale").op == "matmul" for each in joined.args)


def _is_of_several(softmax: Value) -> bool:
    """Whether the keys of scores are those of several products, one behind the other."""
    _, joined = _down(softmax.arg, "cat", _OF_SCORES)
    if joined is None or joined.attrs[0] != joined.rank - 1 or joined.shape[-1] != softmax.shape[_keys(softmax)]:
        return False
    return all(_down(each, "matmul", _OF_SCORES)[1] is not None for each in joined.args)


def _keys(softmax: Value) -> int:
    """The dim of its keys."""
    return softmax.rank + softmax.attrs[0]


def _softmaxes(x: Value, axis: int, most: int = 4) -> Iterator[tuple[Value, int]]:
    """What `x` is arranged from, or a function of each element with at most so many ops, and which dim `axis` is."""
    waiting, seen = [(x, axis, 0)], set[tuple[Value, int]]()
    while waiting:
        x, axis, odd = waiting.pop()
        if x.op == "softmax":
            yield x, axis
        elif odd <= most and (x, axis) not in seen:
            seen.add((x, axis))
            odd += x.op not in _ARRANGED
            waiting.extend((each, place, odd) for each, place in _below(x, axis))


def _below(x: Value, axis: int) -> list[tuple[Value, int]]:
    """The arguments of which a dim is this one of `x`, and which."""
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
    """Whether the first of both, of more than one element, is one dim of the same elements."""
    return dims[0] == others[0] != 1 and prod(dims) == prod(others)


def _is_attended(product: Value) -> bool:
    """Whether a product sums over the dim of a softmax: it is weights times values itself."""
    sides = ((side, side.rank + axis) for side, axis in zip(product.args, (-1, -2), strict=True))
    return any(place == _keys(softmax) for side, axis in sides for softmax, place in _softmaxes(side, axis))


def _down(x: Value, op: str, passed: Sequence[str], most: int = 4) -> tuple[str, Value | None]:
    """The first op that is not passed on the way down to the value of an op that has as many elements; that value.

    Of several ways the latest value is taken first, and none with more than so many ops that are not passed.
    """
    waiting, seen = [(x, tuple[str, ...]())], set[Value]()
    while waiting:
        x, odd = waiting.pop()
        if x.op == op:
            return odd[0] if odd else "", x
        if x in seen or len(odd) > most or (x.op == "matmul" and _is_attended(x)):
            continue
        seen.add(x)
        below = [each for each in x.args if x.op in _ARRANGED or prod(each.shape) == prod(x.shape)]
        own = () if x.op in passed else (called(x.op),)
        latest = below if x.op == "where" else sorted(below, key=lambda each: each.id)
        waiting.extend((each, odd + own) for each in latest)
    return "", None
