"""The sum over heads of an indexer: Σ_n w[i, n] · relu(q[i, n] · k[j]), of floats, or of int8 rows with a scale each.

    int8:  s_k[j] · Σ_n w[i, n] · s_q[i, n] · relu(q8[i, n] · k8[j])

A scale may multiply the operands (`q8 · s_q`), their product, the relu or the sum. Below the relu a scale must be
proven to be non-negative, since relu(s x) = s relu(x) holds only for s ≥ 0.
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
from fusion.analysis.row_layout import Step, arranged, arrangement, row_step, unwidened
from fusion.graph import Algebra, Value, broadcast
from fusion.graph.algebra import widens
from fusion.graph.contractions import swapped
from fusion.graph.nonnegative import is_nonnegative
from patterns.sparse.indexer.score_rows import heads_before_keys, in_order, unflattened, with_batch_dims, with_one_more

NOT_A_SUM = (
    "scores of the indexer: they are not the sum over heads of weight * relu(query @ key); "
    "npu_lightning_indexer requires the topk of that sum, behind masks and positive factors alone; write "
    "(relu(q @ k.mT) * w[..., None]).sum(heads)"
)
SIGN = (
    "scores of the indexer: they are multiplied by a number that is not positive; npu_lightning_indexer "
    "requires a positive factor, as their order changes otherwise; leave the factor out"
)
_NEGATIVE = (
    "scale of the indexer: one of int8 queries or keys is multiplied before relu and not proven to be "
    "positive; npu_quant_lightning_indexer multiplies behind relu and requires that; multiply by it behind "
    "relu"
)
_UNSCALED = (
    "int8 keys of the indexer: they have no scale of each row alone; npu_quant_lightning_indexer requires one [B, T]"
)
_VIEWS = ("scale", "cast", "reshape", "permute", "expand")
_WRAPS = (
    "products of the indexer: those of int8 are summed in {dtype}, where they wrap round; "
    "npu_quant_lightning_indexer requires int32 or float32; cast before the product"
)
_SUMS = frozenset({torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True)
class _Factor:
    """A factor of the products of queries and keys.

    Attributes:
        value: the factor as the model has it.
        applied: the factor in the layout of the products, [B, S, N, T or 1].
        below: True if the factor multiplies below the relu.
    """

    value: Value
    applied: Value
    below: bool


@dataclass(frozen=True)
class _Products:
    """A matrix product of queries and keys below a relu, and its factors.

    Attributes:
        value: the matrix product.
        steps: reshapes and permutes between the rows of `value` and those of the relu.
        order: permutation of the relu to [B, S, N, T].
        factors: factors of the product, from the sum inwards.
    """

    value: Value
    steps: tuple[Step, ...]
    order: tuple[int, ...]
    factors: list[_Factor] = field(default_factory=list[_Factor])


def parts(
    a: Algebra, total: Value, behind: tuple[Value, ...] = (), positions_first: bool = False
) -> dict[str, Value] | str:
    """Read `total`, a sum over heads, as the captures `query`, `key`, `weights`, `query_scale` and `key_scale`.

    Returns the reason if it is not such a sum. A capture is left out where there is none: `weights` where all heads
    have the same weight, scales for floats.

    Args:
        a: values of the graph.
        total: sum over heads [B, S, T].
        behind: scales of keys that multiply the sum, [B, S, 1, T], of which any dim may be 1.
        positions_first: True if `total` is [S, B, .., T].
    """
    batch_first = in_order(a, total, (1, 0, *range(2, total.rank))) if positions_first else total
    for weights, rectified, order in _sums(a, batch_first):
        products = _below_relu(a, rectified, order) if rectified.rank == 4 else None
        floats = _query_and_key(a, products) if products else None
        if products is None or floats is None:
            continue
        if weights is not None:
            products.factors.insert(0, _Factor(weights, a.permute(weights, order), False))
        return _captures(a, products, floats, behind)
    return NOT_A_SUM


def _sums(a: Algebra, total: Value) -> Iterator[tuple[Value | None, Value, tuple[int, ...]]]:
    """Yield each way to read `total` as a sum over heads of weights times products of queries and keys.

    Yields the weights [.., 1], or None if there are none; the products [.., T], of rank 4; and the permutation that
    brings both to the dims [B, S, N, ..]. Whether a relu is above the products is not tested.
    """
    if total.op == "mean" and total.attrs in ((-2,), (-3,)):
        order = (0, 1, 2, 3) if total.attrs == (-2,) else (0, 2, 1, 3)
        yield from (
            (None, each, order) for each in ([total.arg] if total.arg.rank == 4 else with_one_more(a, total.arg))
        )
    factors = total.arg.below(*_VIEWS).args if total.op == "relu" and total.rank == 3 else ()
    if factors and all(each.below(*_VIEWS).op != "relu" for each in factors):  # one head: no sum
        yield None, a.reshape(total, (*total.shape[:2], 1, total.shape[2])), (0, 1, 2, 3)
    if total.op != "matmul":
        return
    rows, y = unflattened(a, total.arg, 1), total.args[1]
    is_shared = prod(y.shape[:-2]) == 1 and rows.rank > 2  # one vector for all queries
    for each in with_one_more(a, heads_before_keys(a, rows)) if is_shared else ():
        each = a.permute(each, (0, 3, 2, 1)) if each.shape[-1] == 1 else each  # [.., T, N, 1] of one query
        own = a.reshape(y, (1, 1, *y.shape[-2:]))
        yield a.expand(own, (*each.shape[:2], *own.shape[2:])), each, (0, 1, 2, 3)
    x, y = with_batch_dims(a, total.args)
    x = heads_before_keys(a, x)
    opened = [(x, y)] if y.rank == 4 else zip(with_one_more(a, x), with_one_more(a, y), strict=True)
    for operands in opened:
        for weights, products in (operands, operands[::-1]):
            if weights.rank == 4 and weights.shape[-1] == 1:
                yield weights, products, (0, 1, 2, 3)


def _below_relu(a: Algebra, value: Value, order: tuple[int, ...]) -> _Products | None:
    """Read `value` as the relu of a matrix product, with factors below and above the relu.

    `order` permutes `value` to [B, S, N, T]. None if there is no relu, or if another op is between `value` and the
    product.
    """
    steps: list[Step] = []
    factors: list[_Factor] = []
    below = False
    while value.op != "matmul":
        inner = value.arg if value.args else value
        if value.op == "relu":
            below = True
        elif value.op == "mul":
            inner, factor = next(((x, y) for x, y in value.operands() if _is_product(x)), (value, value))
            if inner.shape != value.shape or inner is value:
                return None
            last = factor.shape[-1] if factor.rank else 1
            applied = arranged(a, a.expand(factor, (*value.shape[:-1], last)), tuple(reversed(steps)))
            factors.append(_Factor(factor, a.permute(applied, order), below))
        elif (step := row_step(value)) is not None:
            steps.append(step)
        elif not (_keeps_order(value) or (value.op == "scale" and value.attrs[0] > 0)):
            return None
        value = inner
    return _Products(value, tuple(reversed(steps)), order, factors) if below else None


def _keeps_order(value: Value) -> bool:
    """Return True if `value` is a cast that keeps the order of numbers: a float to a narrower one, or an integer to a
    float.
    """
    return is_rounding(value) or (value.op == "cast" and value.arg.dtype in INTEGERS and is_float(value))


def _is_product(value: Value) -> bool:
    """Return True if `value` is a matmul below relus, views, casts and factors, on whichever side of a "mul"."""
    below = value.below("scale", "cast", "reshape", "permute", "relu")
    return below.op == "matmul" or (below.op == "mul" and any(map(_is_product, below.args)))


def _query_and_key(a: Algebra, products: _Products) -> dict[str, Value] | None:
    """Return `query` [B, S, N, D] and `key` [B, T, D] of the matrix product `products.value`.

    A key [T, D] has B = 1. None if heads or queries of one sequence have different keys.
    """
    x, y = (_unscaled(a, unwidened(a, each)) for each in products.value.args)
    y = a.reshape(y, (1, *y.shape)) if y.rank == 2 else y
    if any(size != 1 for size in y.shape[1:-2]):
        return None
    rows = arrangement(products.value.shape[:-1], products.steps)
    apart = rows is None or rows.before[0] != rows.after[0]
    if y.shape[0] != 1 and (apart or y.rank != products.value.rank):
        return None  # the keys do not differ from sequence to sequence, but from query to query
    query = _query_rows(a, products, x)
    if query.shape[0] != y.shape[0]:
        return None
    return {"query": query, "key": a.reshape(swapped(a, y), (y.shape[0], y.shape[-1], y.shape[-2]))}


def _unscaled(a: Algebra, x: Value) -> Value:
    """Strip positive constant factors from the float `x`, below reshapes and permutes: they change no order of
    scores.
    """
    match x.op:
        case "scale" if x.attrs[0] > 0 and is_float(x):
            return _unscaled(a, x.arg)
        case "reshape":
            return a.reshape(_unscaled(a, x.arg), x.shape)
        case "permute":
            return a.permute(_unscaled(a, x.arg), x.attrs)
        case _:
            return x


def _query_rows(a: Algebra, products: _Products, x: Value) -> Value:
    """Arrange `x`, which has the rows of the first operand of `products.value`, as [B, S, N, ..]."""
    return a.permute(
        arranged(a, a.expand(x, (*products.value.shape[:-1], x.shape[-1])), products.steps), products.order
    )


def _captures(
    a: Algebra, products: _Products, floats: dict[str, Value], behind: tuple[Value, ...]
) -> dict[str, Value] | str:
    """Return the captures of an indexer over floats or, with scales, over int8; the reason if it is neither.

    Args:
        a: values of the graph.
        products: product of queries and keys, with all of its factors.
        floats: `query` and `key` as the operands of the product, which are floats unless they are int8.
        behind: scales of keys that multiply the sum.
    """
    rows = (*floats["query"].shape[:3], 1)
    heads = [each for each in products.factors if each.applied.shape[-1:] == (1,)]
    if not (heads or products.factors or behind) and all(map(is_float, floats.values())):
        return floats
    if not heads or any(broadcast(each.applied.shape, rows) != rows for each in heads):
        return NOT_A_SUM
    row_factors = [_plain(a, a.reshape(a.expand(each.applied, rows), rows[:3])) for each in heads]
    if None in row_factors:
        return SIGN
    weights, *scales = (each for each in row_factors if each is not None)
    int8 = _int8(a, products)
    captures: dict[str, Value] | str = NOT_A_SUM
    if int8 is not None:
        first, *more = _in_float16(a, weights)
        captures = _with_scales(a, products, int8, behind, [*more, *scales])
        captures = captures if isinstance(captures, str) else {**captures, "weights": first}
        if not more and isinstance(captures, dict) and "query_scale" in captures:  # the model does not round it
            captures["query_scale"] = a.cast(captures["query_scale"], WIDE)
    alone = len(products.factors) == 1 and not heads[0].below and not behind
    floating = alone and all(is_float(each) for each in floats.values())
    if floating and (isinstance(captures, str) or captures["key_scale"].dtype != torch.float16):
        return {**floats, "weights": weights}
    return captures


def _in_float16(a: Algebra, weights: Value) -> list[Value]:
    """Split `weights` into two factors in float16, if they are the product of such; else [`weights`].

    The operator takes both, as weights and query scales, and multiplies them itself.
    """
    below = weights.below("reshape")
    parts = [_plain(a, a.expand(each, below.shape)) for each in below.args] if below.op == "mul" else []
    halves = [a.reshape(each, weights.shape) for each in parts if each is not None and each.dtype == torch.float16]
    return halves if len(halves) == 2 else [weights]


def _int8(a: Algebra, products: _Products) -> tuple[ScaledInt8, ScaledInt8] | None:
    """Read the queries and the keys in `products.value` as int8 rows, with scales below the product if there are any.

    None if one of the two is not int8.
    """
    x, y = products.value.args
    query, key = _scaled(a, x), _scaled(a, swapped(a, y))
    return None if query is None or key is None else (query, key)


def _scaled(a: Algebra, x: Value) -> ScaledInt8 | None:
    """Read `x` as int8 values, with a scale of each row if they are dequantised; None if `x` is not made from int8."""
    plain = _unwidened(a, x)
    return ScaledInt8(plain) if plain.dtype == torch.int8 else scaled_int8(a, x)


def _unwidened(a: Algebra, x: Value) -> Value:
    """Strip from `x`, below views, a cast of int8 values to another dtype."""
    if x.op == "cast" and x.arg.dtype == torch.int8:
        return x.arg
    return a.seen_as(_unwidened(a, x.arg), x) if x.op in ("permute", "expand", "reshape") else x


def _with_scales(
    a: Algebra, products: _Products, int8: tuple[ScaledInt8, ScaledInt8], behind: tuple[Value, ...], scales: list[Value]
) -> dict[str, Value] | str:
    """Return int8 query and key, query_scale [B, S, N] and key_scale [B, T]; the reason if scales are of another kind.

    Args:
        a: values of the graph.
        products: product of the int8 rows, with the factors of the rows and heads.
        int8: the queries and the keys, with the scales below the product.
        behind: factors of the sum over heads.
        scales: factors of queries [B, S, N] other than the weights.
    """
    query, key = int8
    if products.value.dtype not in _SUMS:
        return _WRAPS.format(dtype=products.value.dtype)
    below = [each.rows for each in int8 if each.rows is not None]
    below += [each.value for each in products.factors if each.below]
    ones = (*query.ones, *key.ones)
    if min(query.number, key.number) <= 0:
        return SIGN
    if not all(map(is_nonnegative, (*below, *ones))):
        return _NEGATIVE
    x, shape = _query_rows(a, products, query.base), (key.base.shape[0], key.base.shape[-2])
    key_scales = [
        _by_key(a, each, (*x.shape[:3], shape[1]))
        for each in _key_factors(a, products, behind, (*x.shape[:3], shape[1]))
    ]
    key_scales += [] if key.rows is None else [a.reshape(key.rows, shape)]
    key_scale = None if None in key_scales else product_of(a, [each for each in key_scales if each is not None])
    if key_scale is None:
        return _UNSCALED
    captures = {"query": x, "key": a.reshape(key.base, (*shape, x.shape[-1])), "key_scale": _uncast_scale(a, key_scale)}
    scales = scales if query.rows is None else [*scales, a.reshape(_query_rows(a, products, query.rows), x.shape[:3])]
    scales += [a.expand(each, x.shape[:3]) for each in ones]
    wide = [_uncast_scale(a, each) for each in scales]
    wide = wide if len(wide) < 2 else [a.cast(each, WIDE) for each in wide]
    query_scale = product_of(a, wide)
    return captures if query_scale is None else {**captures, "query_scale": query_scale}


def _key_factors(
    a: Algebra, products: _Products, behind: tuple[Value, ...], sizes: Sequence[Any]
) -> Iterator[tuple[Value, Value]]:
    """Yield each factor of `products` or `behind` that differs from key to key: the factor, and it in the dims `sizes`.

    `sizes` are B, S, N and T.
    """
    for each in products.factors:
        if each.applied.shape[-1:] != (1,):
            yield each.value, a.expand(each.applied, sizes)
    for each in behind:
        rows = (*sizes[:2], *each.shape[2:]) if prod(each.shape[:2]) == prod(sizes[:2]) else each.shape
        each = a.reshape(each, rows)  # [B, 1, 1, T] for one query of each sequence
        yield each, a.expand(each, sizes) if broadcast(each.shape, sizes) == tuple(sizes) else each


def _by_key(a: Algebra, factor: tuple[Value, Value], sizes: Sequence[Any]) -> Value | None:
    """Return `factor`, a value and the same in the dims `sizes` (B, S, N, T), as [B, T]; None if it differs by query or
    head.
    """
    source, applied = factor[0].below("expand"), factor[1]
    for batch in dict.fromkeys((sizes[0], 1)):
        if prod(source.shape) == batch * sizes[3]:
            rows = a.reshape(source, (batch, sizes[3]))
            if a.expand(a.reshape(rows, (batch, 1, 1, sizes[3])), sizes) is applied:
                return a.expand(rows, (sizes[0], sizes[3]))
    return None


def _uncast_scale(a: Algebra, x: Value) -> Value:
    """Strip casts from float to float from the scale `x`, below views, but none below a float16 value."""
    if x.dtype == torch.float16:
        return x
    if x.op == "cast" and is_float(x.arg):
        return _uncast_scale(a, x.arg)
    return a.seen_as(_uncast_scale(a, x.arg), x) if x.op in ("permute", "expand", "reshape") else x


def _plain(a: Algebra, weights: Value) -> Value | None:
    """Strip positive constant factors and widening casts from `weights`; None if a constant factor is 0 or negative."""
    while weights.op == "scale" or (weights.op == "cast" and widens(weights.arg.dtype, weights.dtype)):
        if weights.op == "scale" and weights.attrs[0] <= 0:
            return None
        weights = weights.arg
    return weights
