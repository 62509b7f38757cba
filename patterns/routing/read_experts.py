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

import torch

from fusion import reader
from fusion.analysis.intervals import bounds, is_exact, uncast
from fusion.analysis.nodes import is_handed_out
from fusion.analysis.rounding import is_float, unscaled
from fusion.graph import Algebra, Dim, Found, Graph, Miss, Reading, Value, broadcast
from fusion.graph.contractions import swapped
from patterns.routing.pairs import Arranged, Pairs, named_rows, plain, repeated_tokens, sorted_tokens, sorts
from patterns.routing.weighted_sums import Total, total
from patterns.routing.words import EXPERT_PRODUCT, EXPERT_SUM, ROUTED_ROWS

RULE = "routed_experts"
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
    summed: set[Value] = set()
    for value, found in _sums(graph, given):
        summed.update((found.captures["rows"],) if isinstance(found, Reading) else found.at)
        yield value, found
    yield from _unsummed(given, summed)
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
    listed = _counted(ends, matrices.shape[0])
    if listed is None:
        yield value, Miss(RULE, "the groups are not proven to be the rows of each expert, counted over all experts")
        return
    experts = _experts(graph.algebra, listed)
    if not _lies_below(experts, matrices.shape[0]):
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
    if not _lies_below(experts, matrices.shape[0]):
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

    The row stands on the left of its matrix, or turned on the right; or one row before matrices that are joined.
    """
    right, left = _gathered(a, y), _gathered(a, x)
    if right is not None and x.shape[-2] == 1:
        return a.reshape(x, (*x.shape[:-2], x.shape[-1])), *right
    if left is not None and y.shape[-1] == 1:
        return a.reshape(y, y.shape[:-1]), swapped(a, left[0]), left[1]
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


def _product(graph: Graph, x: Value, matrices: Value, experts: Value, is_sorted: bool) -> Reading:
    said = {"x": x, "weight": matrices, "experts": experts, "is_sorted": is_sorted}
    return Reading("expert_product", {**said, "is_parameter_only": graph.is_fixed(matrices)})


def _rows(tokens: Arranged, experts: Value) -> Reading:
    said = {"tokens": tokens.value, "experts": experts}
    return Reading("routed_rows", said if tokens.order is None else {**said, "order": tokens.order})


# experts, and how many rows each has --------------------------------------------------------------------------------


def _experts(a: Algebra, listed: Value) -> Value:
    """The list [T, K] that a router gives, of pairs [R] or as it is."""
    chosen = uncast(listed, "reshape")
    return a.reshape(chosen, (prod(chosen.shape[:-1]), chosen.shape[-1]))


def _lies_below(experts: Value, count: Dim) -> bool:
    low, high = bounds(experts)
    return isinstance(count, int) and 0 <= low <= high < count


def _counted(ends: Value, count: Dim) -> Value | None:
    """The list of which `ends` says where the numbers 0 … count - 1 end once it is sorted."""
    ends = _counts(ends)
    if ends.op != "cumsum" or ends.attrs != (0,) or ends.shape != (count,):
        return None
    counts = _counts(ends.arg)
    if not {ends.dtype, counts.dtype} <= _COUNTING:
        return None
    if counts.op == "histogram":
        return _unsorted_list(_counts(counts.arg))
    if counts.op == "add_rows" and counts.arg.op == counts.args[1].below("expand").op == "full":
        numbers = (counts.arg.attrs[0], counts.args[1].below("expand").attrs[0])
        return _unsorted_list(counts.args[2].below("reshape")) if numbers == (0, 1) else None
    return None


_COUNTING = {torch.int32, torch.int64, torch.float32, torch.float64}
"""Dtypes that hold every number of rows."""


def _counts(x: Value) -> Value:
    """Whole numbers before casts to dtypes that hold them."""
    while x.op == "reshape" or (x.op == "cast" and (x.dtype in _COUNTING or is_exact(x))):
        x = x.arg
    return x


def _unsorted_list(x: Value) -> Value:
    """A list, of which a sort holds the same numbers."""
    x = uncast(x, "reshape")
    return uncast(x.arg, "reshape") if x.op == "ascending" else x


# sums ---------------------------------------------------------------------------------------------------------------


def _sums(graph: Graph, given: Mapping[Value, Reading]) -> Iterator[Found]:
    """Each weighted sum of rows that are `given`, with the experts that give them; why others are none."""
    sums: dict[tuple[Value, float], list[Value]] = {}
    for value in list(graph.places) if given else ():
        if is_float(value):
            below, factor = unscaled(plain(value))
            sums.setdefault((plain(below), factor), []).append(value)
    products = set(map(plain, given))
    for (inner, factor), several in sums.items():
        found = total(graph.algebra, inner, factor)
        if found is None:
            continue
        if found.rows in given and given[found.rows].captures["experts"].shape == found.weights.shape:
            yield _as_sum(found, several)
        elif plain(found.rows).op == "add" and any(plain(each) in products for each in plain(found.rows).args):
            yield several[0], Miss(RULE, _BIASED, at=plain(found.rows).args)


def _unsummed(given: Mapping[Value, Reading], summed: set[Value]) -> Iterator[Found]:
    """Why products are no part of a sum, of those that no other product is made of."""
    known = {plain(each) for each in summed}
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
_BIASED = (
    "experts add a bias to what they give: of matrices in one tensor npu_grouped_matmul is not documented to take one "
    "for each"
)


def _as_sum(found: Total, several: list[Value]) -> Found:
    """The sum where it first stands in the dtype of its rows."""
    rows, dtype = found.rows, several[0].dtype
    for value in several:
        if value.dtype == rows.dtype:
            said = {"rows": rows, "weights": found.weights, "shape": value.shape}
            return value, Reading("expert_sum", said if found.order is None else {**said, "order": found.order})
    kept = f"the sum over experts is kept in {dtype}: the operator rounds it to {rows.dtype}, as rows are"
    return several[0], Miss(RULE, kept.replace("torch.", ""), at=(rows,))
