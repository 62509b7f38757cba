"""Reader of experts: products of rows with the matrices of their experts, and weighted sums of these products.

pair (t, k)     token t and its k-th expert; pairs are listed token by token
rows            one of each pair, as listed, or sorted by expert
experts [T, K]  indices of the chosen experts; sorted row i is that of pair order[i]

In a sorted product the order is an argsort of the experts, and the group ends are counted from the experts. The reader
proves that both come from one list. Whether the argsort is stable does not matter: the sum reverses any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch

from fusion import reader
from fusion.analysis.dtypes import elements_below
from fusion.analysis.intervals import uncast
from fusion.analysis.node_predicates import is_handed_out
from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value, broadcast
from patterns.moe.experts.all_experts import all_experts
from patterns.moe.experts.assigned import assigned
from patterns.moe.experts.expert_lists import (
    Active,
    Listing,
    listed_experts,
    marks_active,
    unmasked,
    unsorted,
    weights_of_active,
)
from patterns.moe.experts.gathered_matrices import gathered_rows
from patterns.moe.experts.group_ends import counted, counted_outside
from patterns.moe.experts.read_int8_experts import int8_products, routed_rows
from patterns.moe.experts.token_expert_pairs import (
    Arranged,
    Pairs,
    expert_vectors,
    gathered_by,
    repeated_tokens,
    sorted_tokens,
    sorts,
)
from patterns.moe.experts.weighted_sums import (
    RULE,
    Total,
    Unweighted,
    sum_of_products,
    summed,
    total,
    unweighted,
    weights_before,
)
from patterns.moe.words import EXPERT_PRODUCT, EXPERT_SUM, INT8_EXPERT_PRODUCT, ROUTED_ROWS

_GROUPED = ("grouped_matmul", "transformers.grouped_mm_fallback.default")
"""Grouped matmuls: of torch, and the fallback of transformers for dtypes for which torch does not compile its own."""


@reader(
    gives=(ROUTED_ROWS, EXPERT_PRODUCT, INT8_EXPERT_PRODUCT, EXPERT_SUM), needs=("quantise",), refines=("gate_lanes",)
)
def routed_experts(graph: Graph) -> Iterator[Annotation]:
    """Yield the readings of products of rows with the matrices of their experts, of the weighted sums of these, and
    their rows.

    Products are expert_product or int8_expert_product, sums expert_sum, rows of tokens repeated for their experts
    routed_rows. A `Miss` is yielded for a grouped or gathered product whose order, scales or bias are not proven, for
    one that no sum reads, and for loops over experts.
    """
    products: dict[Value, Reading] = {}
    for value in list(graph.owners):
        for product, result in _products(graph, value):
            if isinstance(result, Reading) and result.op == "expert_product":
                products[product] = result
            yield product, result
    for value, reading in (*_biased(graph, products), *_masked(graph, products)):
        products[value] = reading
        yield value, reading
    in_int8: dict[Value, Reading] = {}
    parts: set[Value] = set()
    for value, result in list(int8_products(graph, products)):
        parts.update(value.sources(_lanes) if isinstance(result, Miss) else ())
        if isinstance(result, Reading) and result.op == "int8_expert_product":
            in_int8[value] = result
        yield value, result
    for value, reading in (*_biased(graph, in_int8), *_masked(graph, in_int8)):
        in_int8[value] = reading
        yield value, reading
    products |= in_int8
    for value, result in _sums(graph, products):
        if isinstance(result, Miss) or result.op == "expert_sum":
            parts.update(result.at if isinstance(result, Miss) else (result.captures["rows"],))
        yield value, result
    yield from _unsummed(products, parts)
    yield from all_experts(graph)
    yield from _loops(graph)


# products -----------------------------------------------------------------------------------------------------------


def _products(graph: Graph, value: Value) -> Iterator[Annotation]:
    """Read `value` as a product of rows with the matrices of their experts, and its rows as routed_rows."""
    if value.op in _GROUPED:
        yield from _sorted_product(graph, value)
    elif value.op == "matmul":
        yield from _gathered_product(graph, value)


def _sorted_product(graph: Graph, value: Value) -> Iterator[Annotation]:
    """Read the grouped matmul `value` as a product of rows sorted by expert, and its rows as routed_rows."""
    rows, matrices, ends = value.args
    listed = counted(graph.algebra, ends, matrices.shape[0])
    if listed is None:
        yield value, Miss(RULE, _OUTSIDE if counted_outside(ends) else _UNCOUNTED)
        return
    listing = listed_experts(graph, listed, matrices.shape[0])
    if listing is None:
        yield value, Miss(RULE, _ELSEWHERE if assigned(graph.algebra, listed) is None else _OTHER_NUMBERS)
        return
    product = _product(graph, rows, matrices, listing, is_sorted=True)
    yield value, product
    yield from _sorted_rows(graph.algebra, value, rows, product)


def _sorted_rows(a: Algebra, value: Value, rows: Value, product: Reading) -> Iterator[Annotation]:
    """Read the `rows` of the sorted `product`, the reading of `value`, as routed_rows; a miss for another order."""
    experts, active = product.captures["experts"], Active(*product.captures["active"])
    below, flags = unmasked(a, rows)
    tokens = sorted_tokens(a, below, Pairs(*experts.shape))
    is_masked = flags is None or marks_active(a, flags, product.captures)
    if is_masked and tokens is not None and tokens.order is not None and sorts(a, tokens.order, experts, active):
        yield rows, routed_rows(tokens, experts)
    elif gathered_by(below) is not None:
        yield value, Miss(RULE, _OTHERS)


_UNCOUNTED = (
    "groups: they are not proven to be the rows of each expert; npu_grouped_matmul requires counts, or their "
    "cumulative sum, of all experts; write torch.histc(experts, E, 0, E - 1).cumsum(0)"
)
_OUTSIDE = (
    "offs: the rows of each expert are counted outside of this graph; npu_moe_init_routing_v2 requires the "
    "list of experts, of which this graph must count them; count with torch.histc or scatter_add, where "
    "torch.bincount breaks the graph"
)
_OTHERS = (
    "rows: they are not proven to be those of the tokens that chose each expert, in the order of the "
    "groups; npu_grouped_matmul requires x[order // K] with order = experts.flatten().argsort(); sort them "
    "so"
)
_ELSEWHERE = (
    "experts: nothing in this graph chooses them, so that they are not proven to be below the number of "
    "experts; npu_moe_init_routing_v2 requires that; compile the top-k of the router in the same graph"
)

_OTHER_NUMBERS = (
    "experts: the numbers that are sorted are not 0, 1, … of experts that follow on each other, and greater ones of "
    "all others; npu_moe_init_routing_v2 requires such a range; write where((experts >= first) & (experts < last), "
    "experts - first, last - first)"
)
_BY_CHOICE = (
    "experts: their matrices are gathered choice by choice, for experts.t(); npu_moe_finalize_routing is called with "
    "rows token by token here, and requires that; gather by experts.flatten()"
)


def _gathered_product(graph: Graph, value: Value) -> Iterator[Annotation]:
    """Read the matmul `value` as a product of rows with matrices gathered for them, and its rows as routed_rows."""
    a = graph.algebra
    operands = gathered_rows(a, *value.args)
    if operands is None:
        return
    rows, matrices, listed = operands
    lead, inputs, outputs = listed.shape, *matrices.shape[1:]
    if broadcast(rows.shape[:-1], lead) != lead or prod(value.shape) != prod((*lead, outputs)):
        return  # several rows share one matrix
    source = unsorted(listed)
    listing = listed_experts(graph, listed if source is None else source, matrices.shape[0])
    if listing is None or (source is None and not listing.is_by_token):
        yield value, Miss(RULE, _ELSEWHERE if listing is None else _BY_CHOICE)
        return
    x = a.expand(rows, (*lead, inputs))
    reading = _product(graph, x, matrices, listing, is_sorted=source is not None)
    shapes = [(*lead, outputs), (prod(lead), outputs)]
    shapes += [each.shape for each in graph.owners if each.op == "reshape" and each.arg is value]
    for shape in dict.fromkeys(shapes):
        if shape[-1:] == (outputs,):
            yield a.reshape(value, shape), reading
    if source is not None:
        yield from _sorted_rows(a, value, x, reading)
        return
    tokens = repeated_tokens(a, x, Pairs(*listing.experts.shape))
    if tokens is not None:
        yield x, routed_rows(Arranged(tokens, None), listing.experts)


def _biased(graph: Graph, products: Mapping[Value, Reading]) -> list[tuple[Value, Reading]]:
    """Read every addition of biases [E, N], gathered for each row's expert, to one of `products`, and reshapes of the
    sum.

    Returns the product with its bias for each sum and reshape.
    """
    a, biased = graph.algebra, dict[Value, Reading]()
    for value in (each for each in list(graph.owners) if each.op == "add" and products):
        for product, rows in value.operands():
            reading = products.get(product)
            if reading is None or value.shape != product.shape or not is_float(rows):
                continue
            biases = expert_vectors(a, rows, rows.shape[-1], reading.captures)
            if biases is None:
                continue
            shapes = [value.shape, (prod(value.shape[:-1]), value.shape[-1])]
            shapes += [each.shape for each in graph.owners if each.op == "reshape" and each.arg is value]
            with_bias = Reading(reading.op, {**reading.captures, "bias": biases})
            biased |= {a.reshape(value, shape): with_bias for shape in shapes if shape[-1:] == value.shape[-1:]}
    return list(biased.items())


def _masked(graph: Graph, products: Mapping[Value, Reading]) -> Iterator[tuple[Value, Reading]]:
    """Yield the readings of all values that are one of `products`, but 0 in rows of experts without matrices here."""
    for value in (each for each in list(graph.owners) if each.op == "where" and products):
        product, flags = unmasked(graph.algebra, value)
        reading = products.get(product)
        if reading is not None and flags is not None and marks_active(graph.algebra, flags, reading.captures):
            yield value, reading


def _product(graph: Graph, x: Value, matrices: Value, listing: Listing, is_sorted: bool) -> Reading:
    captures = {"x": x, "weight": matrices, "experts": listing.experts, "active": tuple(listing.active)}
    return Reading(
        "expert_product", {**captures, "is_sorted": is_sorted, "is_parameter_only": graph.is_fixed(matrices)}
    )


# sums ---------------------------------------------------------------------------------------------------------------


def _sums(graph: Graph, products: Mapping[Value, Reading]) -> Iterator[Annotation]:
    """Read every weighted sum of the rows of one of `products`; a miss for an order or a bias that is not proven."""
    sums, a = summed(graph) if products else {}, graph.algebra
    unrounded, read = set(map(elements_below, products)), set[Value]()
    for (inner, factor), several in sums.items():
        weighted = total(a, inner, factor)
        if weighted is None:
            continue
        product = products.get(weighted.rows)
        if product is not None and product.captures["experts"].shape == weighted.weights.shape:
            read.add(weighted.rows)
            yield from _sum(a, weighted, product, several)
            continue
        below = elements_below(weighted.rows)
        if below.op == "add" and any(elements_below(each) in unrounded for each in below.args):
            yield several[0], Miss(RULE, _BIASED, at=below.args)
    for (inner, factor), several in sums.items():
        rows = unweighted(a, inner, factor)
        if rows is not None and rows.rows in products and rows.rows not in read:
            yield from _plain_sum(graph, rows, products[rows.rows], several)


def _plain_sum(graph: Graph, rows: Unweighted, product: Reading, several: list[Value]) -> Iterator[Annotation]:
    """Read `several`, equal values, as the sum of the rows of `product` without weights, which may multiply the rows of
    `product` instead: (w · h) @ D = w · (h @ D).
    """
    a, captures = graph.algebra, product.captures
    (tokens, _), width = captures["experts"].shape, rows.rows.shape[-1]
    if captures["is_sorted"] != (rows.order is not None) or prod(several[0].shape) != tokens * width:
        return
    before = weights_before(a, product, rows.order) if product.op == "expert_product" else None
    if before is None:
        yield from _sum(a, rows, product, several)
    elif rows.rows.dtype == torch.float16 or "bias" in captures:
        yield several[0], Miss(RULE, _BEFORE_IN_HALF if "bias" not in captures else _BEFORE_BIAS, at=(rows.rows,))
    else:
        hidden, weights = before
        moved = a.make("row_product", (hidden, captures["weight"]), (), rows.rows.shape, rows.rows.dtype)
        reading = Reading(product.op, {**captures, "x": hidden})
        yield moved, reading
        yield from _sum(a, Total(moved, weights, rows.order, rows.addend), reading, several)


_BEFORE_IN_HALF = (
    "weights of experts: they multiply the rows before the second product, in float16; npu_moe_finalize_routing "
    "multiplies what it gives, which may be out of the range of float16, and requires weights there; multiply the "
    "result of the second product"
)
_BEFORE_BIAS = (
    "weights of experts: they multiply the rows before the second product, and not its bias; npu_moe_finalize_routing "
    "multiplies both, and requires that; multiply the result of the second product"
)


def _sum(a: Algebra, weighted: Total | Unweighted, product: Reading, several: list[Value]) -> Iterator[Annotation]:
    """Read `several`, equal values, as the sum `weighted` of the rows of `product`; a miss for another order, or where
    rows of experts without matrices are not proven to be left out.
    """
    if product.captures["is_sorted"] != (weighted.order is not None):
        yield several[0], Miss(RULE, _UNSUMMED, at=(weighted.rows,))
        return
    active, is_left_out = Active(*product.captures["active"]), weighted.rows.op == "where"
    mask = weighted.mask if isinstance(weighted, Total) else None
    if not active.is_all and isinstance(weighted, Total):
        weights, is_zero = weights_of_active(a, weighted.weights, product.captures)
        weighted, is_left_out = weighted._replace(weights=weights), is_zero or is_left_out
    is_masked = mask is not None and marks_active(a, mask, product.captures)
    if (mask is None or is_masked) and (active.is_all or is_masked or is_left_out):
        yield from sum_of_products(a, weighted, product, tuple(active), several)
    else:
        yield several[0], Miss(RULE, _NOT_LEFT_OUT, at=(weighted.rows,))


_NOT_LEFT_OUT = (
    "rows of experts whose matrices are not given: they are not proven to count as 0; npu_moe_finalize_routing leaves "
    "them out, and requires that; write weights.masked_fill((experts < first) | (experts >= last), 0)"
)


def _unsummed(products: Mapping[Value, Reading], parts: set[Value]) -> Iterator[Annotation]:
    """Yield a `Miss` for each of `products` that no weighted sum reads, unless another product reads it.

    `parts` are the values that the weighted sums of the graph are computed from.
    """
    reported = {elements_below(each) for each in parts}
    inner = {elements_below(each) for reading in products.values() for each in reading.captures["x"].sources(_lanes)}
    for value, reading in products.items():
        if reading.op == "int8_expert_product":  # its float reading is that of the product before the scales
            inner |= {
                elements_below(each) for each in value.sources(_lanes) if products.get(each, reading).op != reading.op
            }
    for product in dict.fromkeys(map(elements_below, products)):
        if product not in reported and product not in inner:
            yield product, Miss(RULE, _UNSUMMED)


def _lanes(x: Value) -> tuple[Value, ...]:
    """Return the operands of `x` if each of its elements depends on one row of them: x is elementwise, a view of lanes
    or a cast; else ().
    """
    return x.args if x.op in _ELEMENTWISE else ()


_ELEMENTWISE = (
    "add",
    "aten.erf.default",
    "cast",
    "clip",
    "gelu",
    "mul",
    "power",
    "relu",
    "reshape",
    "round",
    "scale",
    "shift",
    "sigmoid",
    "slice",
    "tanh",
)
_UNSUMMED = (
    "result of the experts: it is not proven to be summed for each token, each row times its own weight, "
    "in the order before the sort; npu_moe_finalize_routing requires that; write out[order] = rows, then "
    "(out.view(T, K, H) * weights[..., None]).sum(1)"
)


def _loops(graph: Graph) -> Iterator[Annotation]:
    """Yield a `Miss` for each mask [E] of the experts that any token chose, from one-hot counts > 0, that the graph
    returns.

    A Python loop over the experts reads it.
    """
    for value, nodes in graph.places.items():
        is_hit = value.op == "compare" and value.rank == 1 and any(each.op == "full" for each in value.args)
        if is_hit and any(map(_is_one_hot, value.sources(_integers))) and any(map(is_handed_out, nodes)):
            yield value, Miss(RULE, _LOOP)


def _integers(x: Value) -> tuple[Value, ...]:
    """Return the operands of `x`, an integer or boolean tensor, unless it is a one-hot encoding or a float."""
    return () if is_float(x) or _is_one_hot(x) else x.args


def _is_one_hot(x: Value) -> bool:
    """Return True if `x` compares numbers by == with 0, 1, …"""
    numbers = (uncast(each, "reshape", "expand") for each in x.args)
    return (
        x.op == "compare"
        and x.attrs == ("eq",)
        and any((each.op, each.attrs) == ("arange", (0, 1)) for each in numbers)
    )


_LOOP = (
    "experts: Python loops over those that were hit, and the graph breaks there; npu_grouped_matmul "
    'requires all experts in one graph; set transformers\' option experts_implementation to "grouped_mm" '
    'or "batched_mm"'
)
_BIASED = (
    "bias: what experts add is not proven to be the bias [N] of each row's own expert; npu_grouped_matmul "
    "requires [E, N]; write bias[experts] for the rows"
)
