"""What an indexer sums: Σ_n w[i, n] · relu(q[i, n] · k[j]), of floats, or of int8 rows with a scale of each.

    int8:  s_k[j] · Σ_n w[i, n] · s_q[i, n] · relu(q8[i, n] · k8[j])

A scale may stand before the products (`q8 · s_q`), at them, behind the relu, or behind the sum; below the relu it must
be proven that it is not negative, since only then relu(s x) = s relu(x).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from fusion.analysis.dtypes import INTEGERS, is_rounding
from fusion.analysis.factored_products import WIDE, ScaledInt8, product_of, scaled_int8
from fusion.analysis.rounding import is_float
from fusion.analysis.row_layout import Step, arranged, arrangement, row_step, uncast
from fusion.graph import Algebra, Value, broadcast
from fusion.graph.algebra import widens
from fusion.graph.contractions import swapped
from fusion.graph.signs import is_nonnegative
from patterns.sparse.indexer.score_rows import heads_before_keys, in_order, of_one_batch, unflattened, with_one_more

NOT_A_SUM = "what is chosen from is not the sum over heads of weight · relu(query · key)"
SIGN = "scores are multiplied by a number that is not positive, which changes their order"
_NEGATIVE = (
    "a scale of int8 queries or keys stands below the relu and is not proven to be positive, as max|x| / 127 is: the "
    "operator multiplies behind it"
)
_UNSCALED = "int8 keys have no scale of each row alone, as the operator reads one"
_VIEWS = ("scale", "cast", "reshape", "permute", "expand")
_WRAPS = "products of int8 are summed in {dtype}, where they wrap round"
_SUMS = frozenset({torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True)
class _Factor:
    """What products are multiplied by, and as it applies to them [B, S, N, T or 1]; whether below the relu."""

    value: Value
    whole: Value
    below: bool


@dataclass(frozen=True)
class _Products:
    """The product of queries and keys below a relu, how its rows are arranged, and what it is multiplied by."""

    value: Value
    steps: tuple[Step, ...]
    order: tuple[int, ...]
    factors: list[_Factor] = field(default_factory=list[_Factor])


def parts(
    a: Algebra, total: Value, behind: tuple[Value, ...] = (), positions_first: bool = False
) -> dict[str, Value] | str:
    """Query [B, S, N, D], key [B, T, D], weights [B, S, N] and, of int8, their scales; why a sum is none of them.

    Without weights all heads count alike.
    `behind` are the scales of keys [B, S, 1, T], some of them 1, that the sum is multiplied by. With `positions_first`
    the sum is [S, B, .., T].
    """
    batch_first = in_order(a, total, (1, 0, *range(2, total.rank))) if positions_first else total
    for weights, rectified, order in _sums(a, batch_first):
        products = _below_relu(a, rectified, order) if rectified.rank == 4 else None
        floats = _query_and_key(a, products) if products else None
        if products is None or floats is None:
            continue
        if weights is not None:
            products.factors.insert(0, _Factor(weights, a.permute(weights, order), False))
        return _said(a, products, floats, behind)
    return NOT_A_SUM


def _sums(a: Algebra, total: Value) -> Iterator[tuple[Value | None, Value, tuple[int, ...]]]:
    """Weights [.., 1] and rectified products, with the order that makes them [B, S, N, 1] and [B, S, N, T].

    Without weights the rectified products hold them.
    """
    if total.op == "mean" and total.attrs in ((-2,), (-3,)):
        order = (0, 1, 2, 3) if total.attrs == (-2,) else (0, 2, 1, 3)
        yield from (
            (None, each, order) for each in ([total.arg] if total.arg.rank == 4 else with_one_more(a, total.arg))
        )
    factors = total.arg.below(*_VIEWS).args if total.op == "relu" and total.rank == 3 else ()
    if factors and all(each.below(*_VIEWS).op != "relu" for each in factors):  # of a single head, and no sum of others
        yield None, a.reshape(total, (*total.shape[:2], 1, total.shape[2])), (0, 1, 2, 3)
    if total.op != "matmul":
        return
    whole, y = unflattened(a, total.arg, 1), total.args[1]
    of_all = prod(y.shape[:-2]) == 1 and whole.rank > 2  # weights that all queries have in common
    for each in with_one_more(a, heads_before_keys(a, whole)) if of_all else ():
        each = a.permute(each, (0, 3, 2, 1)) if each.shape[-1] == 1 else each  # the keys of one query stand before it
        own = a.reshape(y, (1, 1, *y.shape[-2:]))
        yield a.expand(own, (*each.shape[:2], *own.shape[2:])), each, (0, 1, 2, 3)
    x, y = of_one_batch(a, total.args)
    x = heads_before_keys(a, x)
    opened = [(x, y)] if y.rank == 4 else zip(with_one_more(a, x), with_one_more(a, y), strict=True)
    for both in opened:
        for weights, products in (both, both[::-1]):
            if weights.rank == 4 and weights.shape[-1] == 1:
                yield weights, products, (0, 1, 2, 3)


def _below_relu(a: Algebra, value: Value, order: tuple[int, ...]) -> _Products | None:
    """The product of queries and keys of which `value` is the positive part, times factors; None where it is none."""
    steps: list[Step] = []
    factors: list[_Factor] = []
    below = False
    while value.op != "matmul":
        inner = value.arg if value.args else value
        if value.op == "relu":
            below = True
        elif value.op == "mul":
            inner, factor = next(((x, y) for x, y in (value.args, value.args[::-1]) if _is_product(x)), (value, value))
            if inner.shape != value.shape or inner is value:
                return None
            last = factor.shape[-1] if factor.rank else 1
            whole = arranged(a, a.expand(factor, (*value.shape[:-1], last)), tuple(reversed(steps)))
            factors.append(_Factor(factor, a.permute(whole, order), below))
        elif (step := row_step(value)) is not None:
            steps.append(step)
        elif not (_keeps_order(value) or (value.op == "scale" and value.attrs[0] > 0)):
            return None
        value = inner
    return _Products(value, tuple(reversed(steps)), order, factors) if below else None


def _keeps_order(value: Value) -> bool:
    """Whether a cast rounds floats, or makes them of whole numbers."""
    return is_rounding(value) or (value.op == "cast" and value.arg.dtype in INTEGERS and is_float(value))


def _is_product(value: Value) -> bool:
    """Whether a value is made of products of matrices, by factors and what leaves them in their places."""
    below = value.below("scale", "cast", "reshape", "permute", "relu")
    return below.op == "matmul" or (below.op == "mul" and any(map(_is_product, below.args)))


def _query_and_key(a: Algebra, found: _Products) -> dict[str, Value] | None:
    """Query [B, S, N, D] and key [B, T, D]: one key for all heads and queries of a sequence; [T, D] is of one."""
    x, y = (_unscaled(a, uncast(a, each)) for each in found.value.args)
    y = a.reshape(y, (1, *y.shape)) if y.rank == 2 else y
    if any(size != 1 for size in y.shape[1:-2]):
        return None
    rows = arrangement(found.value.shape[:-1], found.steps)
    apart = rows is None or rows.before[0] != rows.after[0]
    if y.shape[0] != 1 and (apart or y.rank != found.value.rank):
        return None  # the keys do not differ from sequence to sequence, but from query to query
    query = _of_queries(a, found, x)
    if query.shape[0] != y.shape[0]:
        return None
    return {"query": query, "key": a.reshape(swapped(a, y), (y.shape[0], y.shape[-1], y.shape[-2]))}


def _unscaled(a: Algebra, x: Value) -> Value:
    """Floats before they are multiplied by a positive number, which changes no order."""
    match x.op:
        case "scale" if x.attrs[0] > 0 and is_float(x):
            return _unscaled(a, x.arg)
        case "reshape":
            return a.reshape(_unscaled(a, x.arg), x.shape)
        case "permute":
            return a.permute(_unscaled(a, x.arg), x.attrs)
        case _:
            return x


def _of_queries(a: Algebra, found: _Products, x: Value) -> Value:
    """What lies like the queries of a product, or like a scale of each, as [B, S, N, ..]."""
    return a.permute(arranged(a, a.expand(x, (*found.value.shape[:-1], x.shape[-1])), found.steps), found.order)


def _said(a: Algebra, found: _Products, floats: dict[str, Value], behind: tuple[Value, ...]) -> dict[str, Value] | str:
    """The parts of int8 queries and keys, or of floats; why they are none."""
    rows = (*floats["query"].shape[:3], 1)
    heads = [each for each in found.factors if each.whole.shape[-1:] == (1,)]
    if not (heads or found.factors or behind) and all(map(is_float, floats.values())):
        return floats
    if not heads or any(broadcast(each.whole.shape, rows) != rows for each in heads):
        return NOT_A_SUM
    of_rows = [_plain(a, a.reshape(a.expand(each.whole, rows), rows[:3])) for each in heads]
    if None in of_rows:
        return SIGN
    weights, *scales = (each for each in of_rows if each is not None)
    int8 = _int8(a, found)
    said: dict[str, Value] | str = NOT_A_SUM
    if int8 is not None:
        of_queries, *more = _in_float16(a, weights)
        said = _with_scales(a, found, int8, behind, [*more, *scales])
        said = said if isinstance(said, str) else {**said, "weights": of_queries}
        if not more and isinstance(said, dict) and "query_scale" in said:  # the model rounds no product to float16
            said["query_scale"] = a.cast(said["query_scale"], WIDE)
    alone = len(found.factors) == 1 and not heads[0].below and not behind
    floating = alone and all(is_float(each) for each in floats.values())
    if floating and (isinstance(said, str) or said["key_scale"].dtype != torch.float16):
        return {**floats, "weights": weights}
    return said


def _in_float16(a: Algebra, weights: Value) -> list[Value]:
    """Both factors of weights that are a product of two in float16, which the operator multiplies itself."""
    below = weights.below("reshape")
    parts = [_plain(a, a.expand(each, below.shape)) for each in below.args] if below.op == "mul" else []
    halves = [a.reshape(each, weights.shape) for each in parts if each is not None and each.dtype == torch.float16]
    return halves if len(halves) == 2 else [weights]


def _int8(a: Algebra, found: _Products) -> tuple[ScaledInt8, ScaledInt8] | None:
    """Queries and keys in int8, with the scales that they are multiplied by before; None where they are others."""
    x, y = found.value.args
    query, key = _scaled(a, x), _scaled(a, swapped(a, y))
    return None if query is None or key is None else (query, key)


def _scaled(a: Algebra, x: Value) -> ScaledInt8 | None:
    """Whole numbers of 8 bits in any dtype, with a scale of each row or without."""
    plain = _unwidened(a, x)
    return ScaledInt8(plain) if plain.dtype == torch.int8 else scaled_int8(a, x)


def _unwidened(a: Algebra, x: Value) -> Value:
    """Whole numbers before they were cast."""
    if x.op == "cast" and x.arg.dtype == torch.int8:
        return x.arg
    return a.seen_as(_unwidened(a, x.arg), x) if x.op in ("permute", "expand", "reshape") else x


def _with_scales(
    a: Algebra, found: _Products, int8: tuple[ScaledInt8, ScaledInt8], behind: tuple[Value, ...], scales: list[Value]
) -> dict[str, Value] | str:
    """Queries and keys in int8, and their scales [B, S, N] and [B, T]; why the operator does not take them."""
    query, key = int8
    if found.value.dtype not in _SUMS:
        return _WRAPS.format(dtype=found.value.dtype)
    below = [each.rows for each in int8 if each.rows is not None]
    below += [each.value for each in found.factors if each.below]
    ones = (*query.ones, *key.ones)
    if min(query.number, key.number) <= 0:
        return SIGN
    if not all(map(is_nonnegative, (*below, *ones))):
        return _NEGATIVE
    x, shape = _of_queries(a, found, query.base), (key.base.shape[0], key.base.shape[-2])
    of_keys = [
        _of_keys(a, each, (*x.shape[:3], shape[1])) for each in _wholes(a, found, behind, (*x.shape[:3], shape[1]))
    ]
    of_keys += [] if key.rows is None else [a.reshape(key.rows, shape)]
    key_scale = None if None in of_keys else product_of(a, [each for each in of_keys if each is not None])
    if key_scale is None:
        return _UNSCALED
    said = {"query": x, "key": a.reshape(key.base, (*shape, x.shape[-1])), "key_scale": _held(a, key_scale)}
    scales = scales if query.rows is None else [*scales, a.reshape(_of_queries(a, found, query.rows), x.shape[:3])]
    scales += [a.expand(each, x.shape[:3]) for each in ones]
    wide = [_held(a, each) for each in scales]
    wide = wide if len(wide) < 2 else [a.cast(each, WIDE) for each in wide]
    query_scale = product_of(a, wide)
    return said if query_scale is None else {**said, "query_scale": query_scale}


def _wholes(
    a: Algebra, found: _Products, behind: tuple[Value, ...], sizes: Sequence[Any]
) -> Iterator[tuple[Value, Value]]:
    """Every factor of keys [.., T], with all that it applies to [B, S, N, T]."""
    for each in found.factors:
        if each.whole.shape[-1:] != (1,):
            yield each.value, a.expand(each.whole, sizes)
    for each in behind:
        rows = (*sizes[:2], *each.shape[2:]) if prod(each.shape[:2]) == prod(sizes[:2]) else each.shape
        each = a.reshape(each, rows)  # sequences of one query stand in the place of queries where that has no dim
        yield each, a.expand(each, sizes) if broadcast(each.shape, sizes) == tuple(sizes) else each


def _of_keys(a: Algebra, factor: tuple[Value, Value], sizes: Sequence[Any]) -> Value | None:
    """A factor of keys alone, [B, T]; None where it is of queries or heads as well."""
    source, whole = factor[0].below("expand"), factor[1]
    for batch in dict.fromkeys((sizes[0], 1)):
        if prod(source.shape) == batch * sizes[3]:
            found = a.reshape(source, (batch, sizes[3]))
            if a.expand(a.reshape(found, (batch, 1, 1, sizes[3])), sizes) is whole:
                return a.expand(found, (sizes[0], sizes[3]))
    return None


def _held(a: Algebra, x: Value) -> Value:
    """A scale as it is held, in float16 if it is so anywhere: before floats were cast."""
    if x.dtype == torch.float16:
        return x
    if x.op == "cast" and is_float(x.arg):
        return _held(a, x.arg)
    return a.seen_as(_held(a, x.arg), x) if x.op in ("permute", "expand", "reshape") else x


def _plain(a: Algebra, weights: Value) -> Value | None:
    """The weights without a positive factor and before they were widened; None where a factor is not positive."""
    while weights.op == "scale" or (weights.op == "cast" and widens(weights.arg.dtype, weights.dtype)):
        if weights.op == "scale" and weights.attrs[0] <= 0:
            return None
        weights = weights.arg
    return weights
