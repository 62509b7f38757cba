"""Experts of a mixture, by the rows of a token that they are given: one for each expert that the token chose.

pair (t, c)     token t and its c-th choice; pairs are listed token by token
rows            one for each pair, as they are listed, or sorted by expert
experts [T, K]  chosen for each token; row i of sorted ones is of pair order[i]

A sort of the experts gives the order, their counts where the rows of each expert end. The three belong together where
they are of one list; which of equal experts comes first is left open, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from fusion import reader
from fusion.analysis.intervals import uncast
from fusion.analysis.nodes import is_handed_out
from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value, broadcast
from patterns.moe.experts.all_experts import all_experts
from patterns.moe.experts.counts import counted, counted_outside, lies_below
from patterns.moe.experts.gathered_matrices import gathered_rows
from patterns.moe.experts.pairs import (
    Arranged,
    Pairs,
    expert_lines,
    named_rows,
    plain,
    repeated_tokens,
    sorted_tokens,
    sorts,
)
from patterns.moe.experts.read_int8_experts import int8_products, routed_rows
from patterns.moe.experts.weighted_sums import RULE, sum_of_products, summed, total
from patterns.moe.words import EXPERT_PRODUCT, EXPERT_SUM, INT8_EXPERT_PRODUCT, ROUTED_ROWS

_GROUPED = ("grouped_matmul", "transformers.grouped_mm_fallback.default")
"""Products of groups: torch's own, and what transformers calls instead where torch compiles none of that dtype."""


@reader(
    gives=(ROUTED_ROWS, EXPERT_PRODUCT, INT8_EXPERT_PRODUCT, EXPERT_SUM), needs=("quantise",), refines=("gate_lanes",)
)
def routed_experts(graph: Graph) -> Iterator[Found]:
    """Rows of tokens, products of each with its expert's matrix, and weighted sums of these; why others are none."""
    given: dict[Value, Reading] = {}
    for value in list(graph.owners):
        for product, found in _products(graph, value):
            if isinstance(found, Reading) and found.op == "expert_product":
                given[product] = found
            yield product, found
    for value, found in _biased(graph, given):
        given[value] = found
        yield value, found
    in_int8: dict[Value, Reading] = {}
    parts: set[Value] = set()
    for value, found in list(int8_products(graph, given)):
        parts.update(value.sources(_lanes) if isinstance(found, Miss) else ())
        if isinstance(found, Reading) and found.op == "int8_expert_product":
            in_int8[value] = found
        yield value, found
    for value, found in _biased(graph, in_int8):
        in_int8[value] = found
        yield value, found
    given |= in_int8
    for value, found in _sums(graph, given):
        if isinstance(found, Miss) or found.op == "expert_sum":
            parts.update(found.at if isinstance(found, Miss) else (found.captures["rows"],))
        yield value, found
    yield from _unsummed(given, parts)
    yield from all_experts(graph)
    yield from _loops(graph)


# products -----------------------------------------------------------------------------------------------------------


def _products(graph: Graph, value: Value) -> Iterator[Found]:
    """A product of every row with the matrix of its expert, and the rows of tokens that it takes."""
    if value.op in _GROUPED:
        yield from _sorted_product(graph, value)
    elif value.op == "matmul":
        yield from _gathered_product(graph, value)


def _sorted_product(graph: Graph, value: Value) -> Iterator[Found]:
    """Rows that are sorted by expert, each group by its own matrix."""
    rows, matrices, ends = value.args
    listed = counted(ends, matrices.shape[0])
    if listed is None:
        yield value, Miss(RULE, _OUTSIDE if counted_outside(ends) else _UNCOUNTED)
        return
    experts = _experts(graph.algebra, listed)
    if not lies_below(experts, matrices.shape[0]):
        yield value, Miss(RULE, _ELSEWHERE)
        return
    yield value, _product(graph, rows, matrices, experts, is_sorted=True)
    tokens = sorted_tokens(graph.algebra, rows, Pairs(*experts.shape))
    if tokens is not None and tokens.order is not None and sorts(tokens.order, experts):
        yield rows, routed_rows(tokens, experts)
    elif named_rows(rows) is not None:
        yield value, Miss(RULE, _OTHERS)


_UNCOUNTED = "the groups are not proven to be the rows of each expert, counted over all experts"
_OUTSIDE = (
    "offs: the rows of each expert are counted outside of this graph; npu_moe_init_routing_v2 requires the list of "
    "experts, of which this graph must count them; count with torch.histc or scatter_add, where torch.bincount breaks "
    "the graph"
)
_OTHERS = (
    "the rows are not proven to be those of the tokens that chose each expert, in the order of the experts counted"
)
_ELSEWHERE = "the experts are not proven to lie among those there are: nothing in this graph chooses them"


def _gathered_product(graph: Graph, value: Value) -> Iterator[Found]:
    """Every row by a matrix that was gathered for it."""
    a = graph.algebra
    found = gathered_rows(a, *value.args)
    if found is None:
        return
    rows, matrices, listed = found
    lead, inputs, outputs = listed.shape, *matrices.shape[1:]
    if broadcast(rows.shape[:-1], lead) != lead or prod(value.shape) != prod((*lead, outputs)):
        return  # several rows have one matrix
    experts = _experts(a, listed)
    if not lies_below(experts, matrices.shape[0]):
        yield value, Miss(RULE, _ELSEWHERE)
        return
    x = a.expand(rows, (*lead, inputs))
    reading = _product(graph, x, matrices, experts, is_sorted=False)
    shapes = [(*lead, outputs), (prod(lead), outputs)]
    shapes += [each.shape for each in graph.owners if each.op == "reshape" and each.arg is value]
    for shape in dict.fromkeys(shapes):
        if shape[-1:] == (outputs,):
            yield a.reshape(value, shape), reading
    tokens = repeated_tokens(a, x, Pairs(*experts.shape))
    if tokens is not None:
        yield x, routed_rows(Arranged(tokens, None), experts)


def _biased(graph: Graph, given: Mapping[Value, Reading]) -> list[tuple[Value, Reading]]:
    """Products to which each row's line of biases [E, N] is added, in the shapes that they are read in."""
    a, found = graph.algebra, dict[Value, Reading]()
    for value in (each for each in list(graph.owners) if each.op == "add" and given):
        for product, rows in (value.args, value.args[::-1]):
            reading = given.get(product)
            if reading is None or value.shape != product.shape or not is_float(rows):
                continue
            biases = expert_lines(a, rows, rows.shape[-1], reading.captures)
            if biases is None:
                continue
            shapes = [value.shape, (prod(value.shape[:-1]), value.shape[-1])]
            shapes += [each.shape for each in graph.owners if each.op == "reshape" and each.arg is value]
            said = Reading(reading.op, {**reading.captures, "bias": biases})
            found |= {a.reshape(value, shape): said for shape in shapes if shape[-1:] == value.shape[-1:]}
    return list(found.items())


def _product(graph: Graph, x: Value, matrices: Value, experts: Value, is_sorted: bool) -> Reading:
    said = {"x": x, "weight": matrices, "experts": experts, "is_sorted": is_sorted}
    return Reading("expert_product", {**said, "is_parameter_only": graph.is_fixed(matrices)})


# experts ------------------------------------------------------------------------------------------------------------


def _experts(a: Algebra, listed: Value) -> Value:
    """The list [T, K] that a router gives, of pairs [R] or as it is."""
    chosen = uncast(listed, "reshape")
    return a.reshape(chosen, (prod(chosen.shape[:-1]), chosen.shape[-1]))


# sums ---------------------------------------------------------------------------------------------------------------


def _sums(graph: Graph, given: Mapping[Value, Reading]) -> Iterator[Found]:
    """Each weighted sum of rows that are `given`, with the experts that give them; why others are none."""
    products = set(map(plain, given))
    for (inner, factor), several in (summed(graph) if given else {}).items():
        found = total(graph.algebra, inner, factor)
        if found is None:
            continue
        product = given.get(found.rows)
        if product is not None and product.captures["experts"].shape == found.weights.shape:
            if product.captures["is_sorted"] != (found.order is not None):
                yield several[0], Miss(RULE, _UNSUMMED, at=(found.rows,))
                continue
            yield from sum_of_products(graph.algebra, found, product, several)
        elif plain(found.rows).op == "add" and any(plain(each) in products for each in plain(found.rows).args):
            yield several[0], Miss(RULE, _BIASED, at=plain(found.rows).args)


def _unsummed(given: Mapping[Value, Reading], parts: set[Value]) -> Iterator[Found]:
    """Why products are no part of a sum, of those that no other product is made of."""
    known = {plain(each) for each in parts}
    below = {plain(each) for found in given.values() for each in found.captures["x"].sources(_lanes)}
    for value, found in given.items():
        if found.op == "int8_expert_product":  # what it is before it is scaled
            below |= {plain(each) for each in value.sources(_lanes) if given.get(each, found).op != found.op}
    for product in dict.fromkeys(map(plain, given)):
        if product not in known and product not in below:
            yield product, Miss(RULE, _UNSUMMED)


def _lanes(x: Value) -> tuple[Value, ...]:
    """What functions of single lanes are computed from."""
    return x.args if x.op in _OF_LANES else ()


_OF_LANES = (
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
    "what the experts give is not proven to be summed for each token, every row with the weight of its own choice, put "
    "back by the order in which it was sorted"
)


def _loops(graph: Graph) -> Iterator[Found]:
    """Which experts were hit, handed to Python for a loop."""
    for value, nodes in graph.places.items():
        counted = value.op == "compare" and value.rank == 1 and any(each.op == "full" for each in value.args)
        if counted and any(map(_is_one_hot, value.sources(_whole))) and any(map(is_handed_out, nodes)):
            yield value, Miss(RULE, _LOOP)


def _whole(x: Value) -> tuple[Value, ...]:
    """What whole numbers and truths are computed from, up to where numbers are compared with 0, 1, …"""
    return () if is_float(x) or _is_one_hot(x) else x.args


def _is_one_hot(x: Value) -> bool:
    numbers = (uncast(each, "reshape", "expand") for each in x.args)
    return (
        x.op == "compare"
        and x.attrs == ("eq",)
        and any((each.op, each.attrs) == ("arange", (0, 1)) for each in numbers)
    )


_LOOP = (
    "Python loops over the experts that were hit, and the graph breaks there: transformers' option "
    'experts_implementation takes "grouped_mm" and "batched_mm" in its place'
)
_BIASED = "experts add to what they give what is not proven to be the line of biases of each row's expert"
