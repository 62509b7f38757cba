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
from fusion.graph.contractions import swapped
from patterns.routing.all_experts import all_experts
from patterns.routing.counts import counted, lies_below
from patterns.routing.pairs import Arranged, Pairs, named_rows, plain, repeated_tokens, sorted_tokens, sorts
from patterns.routing.weighted_sums import RULE, as_sum, summed, total
from patterns.routing.words import EXPERT_PRODUCT, EXPERT_SUM, ROUTED_ROWS

_GROUPED = ("grouped_matmul", "transformers.grouped_mm_fallback.default")
"""Products of groups: torch's own, and what transformers calls instead where torch compiles none of that dtype."""


@reader(gives=(ROUTED_ROWS, EXPERT_PRODUCT, EXPERT_SUM))
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
    parts: set[Value] = set()
    for value, found in _sums(graph, given):
        parts.update((found.captures["rows"],) if isinstance(found, Reading) else found.at)
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
        yield value, Miss(RULE, "the groups are not proven to be the rows of each expert, counted over all experts")
        return
    experts = _experts(graph.algebra, listed)
    if not lies_below(experts, matrices.shape[0]):
        yield value, Miss(RULE, _ELSEWHERE)
        return
    yield value, _product(graph, rows, matrices, experts, is_sorted=True)
    tokens = sorted_tokens(graph.algebra, rows, Pairs(*experts.shape))
    if tokens is not None and tokens.order is not None and sorts(tokens.order, experts):
        yield rows, _rows(tokens, experts)
    elif named_rows(rows) is not None:
        yield value, Miss(RULE, _OTHERS)


_OTHERS = (
    "the rows are not proven to be those of the tokens that chose each expert, in the order of the experts counted"
)
_ELSEWHERE = "the experts are not proven to lie among those there are: nothing in this graph chooses them"


def _gathered_product(graph: Graph, value: Value) -> Iterator[Found]:
    """Every row by a matrix that was gathered for it."""
    a = graph.algebra
    found = _gathered_rows(a, *value.args)
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
        yield x, _rows(Arranged(tokens, None), experts)


def _gathered_rows(a: Algebra, x: Value, y: Value) -> tuple[Value, Value, Value] | None:
    """Rows [.., M], the matrices [E, M, N] of all experts, and the list by which one was gathered for each row.

    The row stands on the left of its matrix, or turned on the right; or one row beside matrices that are joined.
    """
    right, left = _gathered(a, y), _gathered(a, x)
    if right is not None and x.shape[-2] == 1:
        return a.reshape(x, (*x.shape[:-2], x.shape[-1])), *right
    if left is not None and y.shape[-1] == 1:
        return a.reshape(y, y.shape[:-1]), swapped(a, left[0]), left[1]
    whole = _gathered(a, x.arg) if x.op == "reshape" and x.arg.rank == 4 else None
    if whole is not None and y.shape[-1] == 1 and x.shape == (x.arg.shape[0], prod(x.arg.shape[1:3]), x.shape[-1]):
        return a.reshape(y, (y.shape[0], 1, y.shape[1])), swapped(a, whole[0]), whole[1]
    joined = y.arg if y.op == "reshape" and (y.arg.op, y.arg.attrs) == ("permute", (0, 3, 1, 2)) else None
    several = None if joined is None else _gathered(a, joined.arg)
    if joined is None or several is None or x.shape[-2] != 1 or y.shape != (*joined.shape[:2], prod(joined.shape[2:])):
        return None
    return x, swapped(a, several[0]), several[1]


def _gathered(a: Algebra, x: Value) -> tuple[Value, Value] | None:
    """Matrices [E, ..] and the list by which one of them is gathered for each row, perhaps turned then."""
    if x.op == "permute" and x.attrs == (*range(x.rank - 2), x.rank - 1, x.rank - 2):
        found = _gathered(a, x.arg)
        return None if found is None else (swapped(a, found[0]), found[1])
    gathers = x.op == "index" and x.attrs == (0,) and x.arg.rank == 3
    return (x.arg, x.args[1]) if gathers else None


def _biased(graph: Graph, given: Mapping[Value, Reading]) -> list[tuple[Value, Reading]]:
    """Products to which each row's line of biases [E, N] is added, in the shapes that they are read in."""
    a, found = graph.algebra, dict[Value, Reading]()
    for value in (each for each in list(graph.owners) if each.op == "add" and given):
        for product, rows in (value.args, value.args[::-1]):
            reading = given.get(product)
            biases = None if reading is None else _lines(rows, reading)
            if reading is None or biases is None or value.shape != product.shape:
                continue
            shapes = [value.shape, (prod(value.shape[:-1]), value.shape[-1])]
            shapes += [each.shape for each in graph.owners if each.op == "reshape" and each.arg is value]
            said = Reading("expert_product", {**reading.captures, "bias": biases})
            found |= {a.reshape(value, shape): said for shape in shapes if shape[-1:] == value.shape[-1:]}
    return list(found.items())


def _lines(rows: Value, product: Reading) -> Value | None:
    """The biases of all experts, of which `rows` are those of the experts of a product's rows."""
    taken = rows.below("reshape", "expand") if rows.shape[-1] == rows.below("reshape", "expand").shape[-1] else rows
    if taken.op != "index" or taken.attrs != (0,) or taken.arg.rank != 2 or prod(taken.shape) != prod(rows.shape):
        return None
    experts, listed = product.captures["experts"], uncast(taken.args[1], "reshape")
    if product.captures["is_sorted"]:
        by = named_rows(listed)
        order = uncast(by[1]) if by is not None and uncast(by[0], "reshape") is uncast(experts, "reshape") else None
        is_sorted = listed.op == "ascending" or (order is not None and order.op == "ascending_index")
        named = listed.arg if listed.op == "ascending" else (order.arg if order is not None else listed)
        return taken.arg if is_sorted and uncast(named, "reshape") is uncast(experts, "reshape") else None
    return taken.arg if listed is uncast(experts, "reshape") else None


def _product(graph: Graph, x: Value, matrices: Value, experts: Value, is_sorted: bool) -> Reading:
    said = {"x": x, "weight": matrices, "experts": experts, "is_sorted": is_sorted}
    return Reading("expert_product", {**said, "is_parameter_only": graph.is_fixed(matrices)})


def _rows(tokens: Arranged, experts: Value) -> Reading:
    said = {"tokens": tokens.value, "experts": experts}
    return Reading("routed_rows", said if tokens.order is None else {**said, "order": tokens.order})


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
        if found.rows in given and given[found.rows].captures["experts"].shape == found.weights.shape:
            yield as_sum(found, several)
        elif plain(found.rows).op == "add" and any(plain(each) in products for each in plain(found.rows).args):
            yield several[0], Miss(RULE, _BIASED, at=plain(found.rows).args)


def _unsummed(given: Mapping[Value, Reading], parts: set[Value]) -> Iterator[Found]:
    """Why products are no part of a sum, of those that no other product is made of."""
    known = {plain(each) for each in parts}
    below = {plain(each) for found in given.values() for each in found.captures["x"].sources(_lanes)}
    for product in dict.fromkeys(map(plain, given)):
        if product not in known and product not in below:
            yield product, Miss(RULE, _UNSUMMED)


def _lanes(x: Value) -> tuple[Value, ...]:
    """What functions of single lanes are computed from."""
    return x.args if x.op in _OF_LANES else ()


_OF_LANES = ("add", "cast", "clip", "mul", "power", "relu", "reshape", "scale", "shift", "sigmoid", "slice")
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
