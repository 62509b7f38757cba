"""Reasons for softmaxes of attention that no reader claimed: every attention that is not read is reported.

Softmaxes of routers, whose weights select, and of classifiers, which return them, are not reported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch.fx as fx

from fusion import reader
from fusion.graph import Annotation, Graph, Value
from patterns.attention.core.divided_late import stripped
from patterns.attention.core.places import ATTENDING, may_attend
from patterns.attention.reasons.blame import RULE, missed
from patterns.attention.reasons.not_softmax import called, why_not_attention, without_softmax

OF_A_LAYER = (
    "scores: they are computed from each row alone, as sampled places or kernels are, not from queries and "
    "keys; npu_fused_infer_attention_score requires q @ k.mT, and no other operator here computes this; "
    "nothing to change"
)
OF_PAIRS = (
    "scores: they are computed from pairs of queries and keys by {}, not by a product; "
    "npu_fused_infer_attention_score requires q @ k.mT, and no other operator here computes this; nothing to change"
)
PASSED_IN = (
    "scores: they are an input of this graph; npu_fused_infer_attention_score requires their product of "
    "queries and keys in the same graph; compile both as one function, without a graph break between"
)
LEAVES = (
    "weights: they are a result of this graph before they meet values; npu_fused_infer_attention_score "
    "requires their product with values in the same graph; compile both as one function, without a graph break "
    "between"
)
AMID = (
    "scores: {} stands between the product of queries and keys and the softmax; "
    "npu_fused_infer_attention_score requires scores that are scaled, masked or biased alone"
)
BEHIND = (
    "weights: they do not meet all values by weights [B, N, S, T] @ values [B, N, T, D]; "
    "npu_fused_infer_attention_score requires that product; write torch.matmul(weights, values)"
)
_RANK = frozenset({"topk", "sort", "argmax", "multinomial", "kthvalue"})
_CHOOSE = ("topk", "sort", "argmax", "max", "multinomial", "nonzero", "one_hot", "kthvalue", "log")
_MEET = ("matmul", "bmm", "mm", "einsum", "linear")
_REDUCE = ("sum", "mean", "amax", "amin", "prod", "var", "any", "all")
_ARRANGED = ("cast", "reshape", "permute", "slice", "narrow", "expand", "scale", "shift")
_PASSED = (*_ARRANGED, "add", "where", "cat", "mul")
_FAR = 24
"""The most calls that are searched for users of weights."""


@reader(needs=("softmax_attention",))
def unclaimed_attentions(graph: Graph) -> Iterator[Annotation]:
    """Report each product that resembles attention, and each softmax of attention, that no reader of attention read."""
    missed_at = {value for value, _ in graph.readings.missed(RULE)}
    claimed = {value for value in graph.places if value in missed_at or _is_read(graph, value)}
    claimed |= {mask for mask, _ in graph.readings.all("attention_mask")}
    parts = {part for value in claimed for part in value.sources(_below_product)}
    for value in list(graph.places):
        if value in parts or not may_attend(graph, value):
            continue
        product = stripped(value)[0]
        reason, at = why_not_attention(product), ()
        if not reason:
            reason, at = without_softmax(graph, product)
        if reason:
            claimed.add(value)
            yield value, missed(reason, product, at)
    softmaxes = [value for value in graph.places if value.op == "softmax"]
    known = {each for value in claimed for each in _weights_below(value)} if softmaxes else set()
    for softmax in softmaxes:
        reason = "" if softmax in known else _reason(graph, softmax)
        if reason:
            yield softmax, missed(reason, softmax, (softmax,))


def _below_product(x: Value) -> Sequence[Value]:
    """Return the operands of `x` if it is what may stand between a product with values and the result; else ()."""
    return x.args if x.op in ATTENDING and x.op != "matmul" else ()


def _is_read(graph: Graph, value: Value) -> bool:
    return bool(graph.readings.of(value, RULE)) or graph.readings.is_superseded(value, RULE)


def _reason(graph: Graph, softmax: Value) -> str:
    meets, chooses, leaves = _fate(graph.places[softmax])
    products = list(_products(softmax.arg))
    attends = [between for product, between in products if not any(map(graph.is_fixed, product.args))]
    if chooses or graph.is_fixed(softmax.arg) or _ranks(graph, softmax.arg):
        return ""
    if not products and _is_passed_in(softmax.arg):
        return PASSED_IN if softmax.attrs[0] == -1 and (meets or softmax.rank > 3) else ""
    if not (meets or (attends and leaves)):
        return ""
    if not attends:
        pairing = _pairing(graph, softmax.arg)
        return OF_PAIRS.format(pairing) if pairing else OF_A_LAYER
    if not meets:
        return LEAVES
    return AMID.format(called(attends[0])) if all(attends) else BEHIND


def _ranks(graph: Graph, scores: Value) -> bool:
    """Return True if something is chosen by `scores` themselves, as an expert is by logits of a router."""
    users = [user for node in graph.places.get(scores, ()) for user in node.users]
    return any(str(user.target).removeprefix("aten.").partition(".")[0] in _RANK for user in users)


def _is_passed_in(scores: Value) -> bool:
    """Return True if `scores` are an input, perhaps with a mask or another addend."""
    full = [each for each in scores.args if each.shape == scores.shape]
    added = scores.op in _ARRANGED or (scores.op in ("add", "where") and len(full) > 0)
    return scores.op == "input" or (added and any(map(_is_passed_in, scores.args if scores.op in _ARRANGED else full)))


def _fate(nodes: Collection[fx.Node]) -> tuple[bool, bool, bool]:
    """Follow the users of the weights at `nodes`; return three booleans.

    Returns:
        True if the weights are multiplied by a tensor; True if something is chosen by them, as by top-k; True if they
        are
        a result of the graph without having been multiplied before.
    """
    waiting, seen, meets, leaves = list(nodes), set(nodes), False, False
    while waiting and len(seen) < _FAR:
        for user in waiting.pop(0).users:
            name = str(user.target).removeprefix("aten.").partition(".")[0]
            if name in _CHOOSE:
                return meets, True, leaves
            meets |= name in _MEET or (name == "mul" and len(user.all_input_nodes) == 2)
            leaves |= user.op == "output" and not meets
            if user not in seen and name not in (*_MEET, *_REDUCE) and user.op == "call_function":
                seen.add(user)
                waiting.append(user)
    return meets, False, leaves


def _products(scores: Value) -> Iterator[tuple[Value, str]]:
    """Yield each matmul that `scores` are computed from, with the name of an op in between.

    It is the op nearest to `scores` that no reader walks through; "" if there is none.
    """
    waiting, seen = [(scores, "")], set[Value]()
    while waiting and len(seen) < 4 * _FAR:
        x, between = waiting.pop()
        if x in seen:
            continue
        seen.add(x)
        if x.op == "matmul":
            yield x, between
            continue
        between = between or ("" if x.op in _PASSED else x.op)
        waiting.extend((each, between) for each in x.args)


def _pairing(graph: Graph, scores: Value) -> str:
    """Return the name of the op of which `scores` have a number for each pair of rows, such as a distance; "" for
    others.

    The op broadcasts several operands, none of them fixed, to a shape that none of them has, or is a distance.
    """
    for x in scores.sources(lambda each: each.args if each.op != "matmul" or graph.is_fixed(each.args[1]) else ()):
        operands = [each for each in x.args if each.rank > 1 and not graph.is_fixed(each)]
        apart = all(each.shape != x.shape for each in operands) or "dist" in x.op
        if len(operands) > 1 and apart and x.op not in ("cat", "where", "matmul"):
            return called(x.op)
    return ""


def _weights_below(x: Value) -> Iterator[Value]:
    """Yield each softmax that `x` is computed from on a way with at most one matmul."""
    waiting, seen = [(x, False)], set[tuple[Value, bool]]()
    while waiting:
        x, behind = waiting.pop()
        if x.op == "softmax":
            yield x
        elif (x, behind) not in seen and len(seen) < 4 * _FAR and not (behind and x.op == "matmul"):
            seen.add((x, behind))
            waiting.extend((each, behind or x.op == "matmul") for each in x.args)
