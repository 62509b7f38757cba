"""What is claimed of lanes is what torch computes, for random moves of lanes."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sympy import Symbol
from torch import Tensor

from fusion.analysis.lane_products import Leaves, factor, terms
from fusion.analysis.lanes import NONE, descend, rows, same_lanes
from fusion.graph import Algebra, Value
from fusion.graph.rebuilding import build

from .numbers import leaf

SIZE = 8


def computed(value: Value, inputs: dict[Value, Tensor]) -> Tensor:
    """`value` by its recipes."""
    if value in inputs:
        return inputs[value]
    if value.op == "slice_scatter":
        return torch.slice_scatter(*(computed(arg, inputs) for arg in value.args), *value.attrs)
    return build(value, lambda size: size, *(computed(arg, inputs) for arg in value.args))


@st.composite
def moves(draw, width: int = SIZE, count: int = 5):
    """A list of moves of lanes, each a function of (algebra, value)."""

    def one(kind: str, number: int):
        def apply(a: Algebra, x: Value) -> Value:
            size = int(x.shape[-1])
            lead = x.shape[:-1]
            cut = number % (size - 1) + 1 if size > 1 else 1
            if kind == "roll":
                return a.cat([a.slice(x, -1, cut, size), a.slice(x, -1, 0, cut)], -1)
            if kind == "cut":
                return a.slice(x, -1, 0, max(2, cut)) or x
            if kind == "step" and size % 2 == 0 and size > 2:
                return a.slice(x, -1, number % 2, size, 2) or x
            if kind == "repeat" and size <= 2 * width:
                opened = a.expand(a.reshape(x, (*lead, size, 1)), (*lead, size, 2))
                return a.reshape(opened, (*lead, 2 * size))
            if kind == "pairs" and size % 2 == 0:
                split = a.reshape(x, (*lead, size // 2, 2))
                order = (*range(len(lead)), len(lead) + 1, len(lead))
                return a.reshape(a.permute(split, order), (*lead, size))
            if kind == "flip":
                return a.make("flip", (x,), (x.rank - 1,), x.shape, x.dtype)
            if kind == "write":
                piece = a.slice(x, -1, 0, size - cut)
                bounds = (x.rank - 1, cut, size, 1)
                return a.make("slice_scatter", (x, piece), bounds, x.shape, x.dtype) if size > 1 else x
            if kind == "double" and size <= 2 * width:
                return a.cat([x, x], -1)
            if kind == "negate":
                return a.scale(x, -1)
            if kind == "interleave" and size % 2 == 0:
                halves = [a.reshape(a.slice(x, -1, s, s + size // 2), (*lead, size // 2, 1)) for s in (0, size // 2)]
                return a.reshape(a.cat(halves, -1), (*lead, size))
            return x

        return apply

    kinds = ("roll", "cut", "step", "repeat", "pairs", "double", "negate", "interleave", "flip", "write")
    chosen = draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 100)), min_size=1, max_size=count))
    return [one(*each) for each in chosen]


@given(moves())
@settings(max_examples=150, deadline=None)
def test_a_factor_is_followed_to_the_lanes_that_it_really_holds(chain):
    a = Algebra()
    x, data = leaf(a, "x", 2, 3, SIZE)
    value = x
    for move in chain:
        value = move(a, value)
    at = rows(value)
    assert at is not None
    leaves = Leaves()
    found = factor(at, leaves)
    assert [each for each, _ in leaves.leaves] == [x]
    claimed = torch.from_numpy(found.coefficient) * data.flatten(2)[..., torch.from_numpy(found.index)]
    torch.testing.assert_close(claimed, computed(value, {x: data}), rtol=0, atol=0)


@given(moves(), moves(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_sum_of_products_is_what_its_terms_say(left, right, subtract):
    a = Algebra()
    (x, data), (t, table) = leaf(a, "x", 2, 3, SIZE), leaf(a, "t", 3, SIZE, seed=1)
    first, second = x, t
    for move in left:
        first, second = move(a, first), move(a, second)
    other, another = x, t
    for move in right:
        other, another = move(a, other), move(a, another)
    width = min(int(first.shape[-1]), int(other.shape[-1]))
    pieces = [a.slice(each, -1, 0, width) for each in (first, second, other, another)]
    products = [a.mul(pieces[0], pieces[3]), a.mul(pieces[2], pieces[1])]
    value = a.add(products[0], a.scale(products[1], -1 if subtract else 1))
    leaves = Leaves()
    found = terms(rows(value), leaves)
    if found is None:
        return
    numbers = {x: data, t: table}
    claimed = sum(evaluated(term, leaves, numbers) for term in found)
    torch.testing.assert_close(claimed, computed(value, numbers), rtol=1e-12, atol=1e-12)


def evaluated(term, leaves: Leaves, numbers: dict[Value, Tensor]) -> Tensor:
    result: Tensor = torch.from_numpy(np.asarray(term.coefficient))
    for side in (term.first, term.second):
        lanes = [
            torch.ones(())
            if number < 0
            else computed(leaves.leaves[number][0], numbers).flatten(-leaves.leaves[number][1])[..., lane]
            for number, lane in zip(side.leaf, side.index, strict=True)
        ]
        result = result * torch.stack(torch.broadcast_tensors(*lanes), dim=-1)
    return result


def test_what_a_cast_changes_is_not_followed():
    a = Algebra()
    x, _ = leaf(a, "x", 2, SIZE)
    narrow, whole = a.cast(x, torch.bfloat16), a.cast(x, torch.int64)
    for held in (narrow, whole):
        leaves = Leaves()
        factor(rows(held), leaves)
        assert leaves.leaves == [(held, 1)]
    for dtype, products in ((torch.bfloat16, True), (torch.int64, False)):
        found = terms(rows(a.cast(a.cast(a.mul(x, a.unary("cos", x)), dtype), torch.float64)), Leaves())
        assert found is not None
        assert [bool((each.second.leaf != NONE).all()) for each in found] == [products]


def test_lanes_that_are_provably_equal():
    a = Algebra()
    x, _ = leaf(a, "x", 3, 4)
    both = a.unary("cos", a.cat([x, x], -1))
    assert same_lanes(both, np.arange(4), np.arange(4, 8))
    assert not same_lanes(both, np.arange(4), np.arange(3, 7))
    assert not same_lanes(a.cat([x, a.scale(x, -1)], -1), np.arange(4), np.arange(4, 8))


def test_rows_are_not_lanes():
    a = Algebra()
    x, _ = leaf(a, "x", 3, 4)
    assert descend(rows(a.permute(x, (1, 0)))) is None
    assert descend(rows(a.reshape(x, (4, 3)))) is None
    assert descend(rows(a.cut(x, 0, 1, 3))) is None
    assert descend(rows(a.make("flip", (x,), (0,), x.shape, x.dtype))) is None
    assert descend(rows(a.make("slice_scatter", (x, a.cut(x, 0, 0, 1)), (0, 1, 2, 1), x.shape, x.dtype))) is None
    assert descend(rows(a.reshape(leaf(a, "y", 2, 3, 4)[0], (3, 2, 4)))) is None
    none, _ = leaf(a, "none", 0, 4)
    assert descend(rows(a.reshape(none, (0, 8)))) is None


def test_rows_that_are_written_and_lanes_that_are():
    a = Algebra()
    (x, data), (y, more) = leaf(a, "x", 2, SIZE), leaf(a, "y", 2, 4, seed=1)
    whole = a.make("slice_scatter", (x, y), (1, 2, 6, 1), (2, SIZE), x.dtype)
    for start, stop, found in ((0, 2, [x]), (2, 6, [y]), (6, 8, [x]), (0, 8, [x, y])):
        leaves = Leaves(rounded=a.cast)
        one = factor(rows(a.cut(whole, 1, start, stop)), leaves)
        assert [each for each, _ in leaves.leaves] == found
        sources = [{x: data, y: more}[each] for each in found]
        lanes = [sources[number][:, lane] for number, lane in zip(one.leaf, one.index, strict=True)]
        expected = torch.slice_scatter(data, more, 1, 2, 6)[:, start:stop]
        assert torch.equal(torch.stack(lanes, -1), expected)


def test_lanes_of_several_tensors_are_one_table_or_themselves():
    a = Algebra()
    (x, _), (y, _) = leaf(a, "x", 2, 4), leaf(a, "y", 2, 4, seed=1)
    both = a.cat([x, y], -1)
    for dtype in (x.dtype, torch.bfloat16):
        whole, parts = a.cast(both, dtype), [a.cast(x, dtype), a.cast(y, dtype)]
        for rounded, found in ((None, [whole]), (a.cast, parts)):
            leaves = Leaves(rounded)
            one = factor(rows(whole), leaves)
            assert [leaves.leaves[number][0] for number in sorted(set(one.leaf))][-len(found) :] == found


def test_below_a_rounding_only_a_sign_is_taken_out():
    a = Algebra()
    x, _ = leaf(a, "x", 2, SIZE)
    below = a.cast(x, torch.bfloat16)
    for made, rounded, found in (
        (a.scale(x, -1), a.cast, below),
        (a.scale(x, -1), None, None),
        (a.scale(x, -2), a.cast, None),
        (a.shift(x, -1), a.cast, None),
    ):
        leaves = Leaves(rounded)
        one = factor(rows(a.cast(made, torch.bfloat16)), leaves)
        assert leaves.leaves == [(found or a.cast(made, torch.bfloat16), 1)]
        assert (one.coefficient == (1 if found is None else -1)).all()


def test_a_mean_is_the_sum_of_as_many_terms_as_there_may_be():
    a = Algebra()
    (one, _), (x, _), (y, _) = leaf(a, "one"), leaf(a, "x", 2, 4, 2), leaf(a, "y", 2, 4, 2)
    wide, none = leaf(a, "wide", 2, 4, 4)[0], leaf(a, "none", 2, 4, 0)[0]
    open_ = a.make("input", (), ("open",), (2, 4, Symbol("s", positive=True, integer=True)), x.dtype)
    assert len(terms(rows(a.mean(x, [-1])), Leaves()) or ()) == 2
    for z in (wide, none, open_, a.add(a.mul(x, y), y), a.mul(one, x)):
        assert terms(rows(a.mean(z, [-1])), Leaves()) is None
    both, leaves = a.mean(x, [-2, -1]), Leaves()
    assert len(terms(rows(a.reshape(both, (2, 1))), leaves) or ()) == 1
    assert leaves.leaves == [(both, 2)]


def test_a_number_that_multiplies_all_lanes_is_no_table():
    a = Algebra()
    (one, _), (x, _), (two, _) = leaf(a, "one"), leaf(a, "x", 2, SIZE), leaf(a, "two")
    for product in (a.mul(one, x), a.mul(x, two)):
        assert terms(rows(product), Leaves()) is None
        assert terms(rows(a.cat([x, product], -1)), Leaves()) is None
    assert terms(rows(a.add(one, x)), Leaves()) is None


def test_lanes_are_equal_in_whole_rows_alone():
    a = Algebra()
    (x, _), (pair, _) = leaf(a, "x", 4, 2), leaf(a, "pair", 4, 2, 1)
    twice = a.cat([x, x], -1)
    left, right = np.arange(2), np.arange(2, 4)
    assert same_lanes(a.cut(twice, 0, 1, 3), left, right)
    assert same_lanes(a.permute(a.reshape(twice, (2, 2, 4)), (1, 0, 2)), left, right)
    assert not same_lanes(a.permute(twice, (1, 0)), left, right)
    assert not same_lanes(a.reshape(twice, (2, 8)), left, np.arange(4, 6))
    pairs = a.cut(a.cat([pair, a.unary("cos", pair)], -1), 0, 1, 3)
    assert not same_lanes(a.reshape(pairs, (2, 4)), left, right)


def test_numbers_of_several_rows_are_a_table_of_their_own():
    """Only numbers that are the same in all rows are factors of the lanes."""
    a = Algebra()
    x, _ = leaf(a, "x", 2, SIZE)
    for shape, factors in (((2, SIZE), False), ((1, SIZE), True), ((SIZE,), True)):
        table = a.reshape(a.make("arange", (), (0, 1), (math.prod(shape),), torch.float64), shape)
        at, leaves = rows(a.mul(x, table)), Leaves()
        assert at is not None
        found = terms(at, leaves)
        assert found is not None
        assert [each for each, _ in leaves.leaves] == ([x] if factors else [x, table])
        assert (found[0].coefficient == (np.arange(SIZE) if factors else 1)).all()


def test_tensors_without_dims_have_no_lanes():
    a = Algebra()
    x, one = leaf(a, "x", SIZE)[0], leaf(a, "one")[0]
    numbers = a.make("arange", (), (0, 1), (SIZE,), torch.float64)
    for value in (a.mul(x, a.reshape(a.slice(numbers, 0, 0, 1), ())), a.mul(one, numbers)):
        assert terms(rows(value), Leaves()) is None


def test_lanes_that_are_cast_alike_are_of_one_leaf_however_they_are_divided():
    a = Algebra()
    x, _ = leaf(a, "x", 2, 4, SIZE)

    def heads(*shape: int, dtypes: tuple[torch.dtype, ...]) -> Value:
        value = a.reshape(x, (2, 4, *shape))
        for dtype in dtypes:
            value = a.cast(value, dtype)
        return value

    narrow, wide = (torch.bfloat16,), (torch.bfloat16, torch.float32)
    leaves = Leaves()
    numbers = [leaves.number(heads(*shape, dtypes=dtypes), len(shape))
               for dtypes in (narrow, wide, (torch.float16,)) for shape in ((SIZE,), (2, SIZE // 2))]  # fmt: skip
    assert numbers == [0, 0, 1, 1, 2, 2]
    assert leaves.number(a.cast(a.reshape(x, (4, 2, SIZE)), torch.bfloat16), 1) == 3  # other rows
