"""What is left of a mask where truths hold that it is made of."""

from __future__ import annotations

import torch

from fusion.graph import Algebra, Value
from fusion.graph.comparisons import constant, either, where
from patterns.attention.masks.assume_true import assume_true

A = Algebra()
ROWS = (2, 4)
LISTED = A.make("chosen", (A.make("input", (), ("places", 0), (2, 3), torch.int64),), (), ROWS, torch.bool)
OTHER = A.make("input", (), ("other", 0), ROWS, torch.bool)
ADDED = A.make("input", (), ("added", 0), ROWS, torch.float32)
LOWEST, ZERO = (constant(A, number, (), torch.float32) for number in (-1e30, 0.0))


def negated(x: Value) -> Value:
    return A.make("not", (x,), (), x.shape, torch.bool)


def both(x: Value, y: Value) -> Value:
    return A.make("and", (x, y), (), ROWS, torch.bool)


def below(x: Value) -> Value:
    return A.make("below", (x,), (-5000.0,), x.shape, torch.bool)


def left(x: Value | None) -> Value:
    assert x is not None
    return assume_true(A, x, lambda truth: truth is LISTED)


def is_everywhere(x: Value, number: bool) -> bool:
    return (x.op, x.attrs, x.shape) == ("full", (number,), ROWS)


def test_what_a_truth_decides_is_known():
    assert is_everywhere(left(LISTED), True)
    assert is_everywhere(left(negated(LISTED)), False)
    assert is_everywhere(left(either(A, OTHER, LISTED)), True)
    assert is_everywhere(left(both(OTHER, negated(LISTED))), False)
    assert is_everywhere(left(both(LISTED, LISTED)), True)
    assert is_everywhere(left(either(A, negated(LISTED), negated(LISTED))), False)
    assert is_everywhere(left(below(where(A, LISTED, LOWEST, ADDED, torch.float32))), True)
    assert is_everywhere(left(below(where(A, LISTED, ZERO, ADDED, torch.float32))), False)


def test_what_it_does_not_decide_is_left():
    assert left(both(OTHER, LISTED)) is OTHER
    assert left(either(A, OTHER, negated(LISTED))) is OTHER
    assert left(negated(both(OTHER, LISTED))) is negated(OTHER)
    assert left(below(where(A, LISTED, ADDED, LOWEST, torch.float32))) is below(ADDED)
    assert left(below(where(A, negated(LISTED), LOWEST, ADDED, torch.float32))) is below(ADDED)
    three = A.make("input", (), ("third", 0), ROWS, torch.bool)
    assert left(both(both(OTHER, LISTED), three)) is both(OTHER, three)
    assert left(where(A, OTHER, LISTED, three, torch.bool)).args[0] is OTHER


def test_a_chain_in_which_each_mask_stands_twice_is_walked_once():
    mask = both(OTHER, LISTED)
    for number in range(60):
        more = A.make("input", (), (f"more{number}", 0), ROWS, torch.bool)
        mask = both(negated(both(mask, more)), mask)
    assert LISTED not in left(mask).sources()


def test_views_are_passed():
    seen = A.reshape(both(OTHER, LISTED), (2, 1, 4))
    assert left(A.expand(seen, (2, 5, 4))) is A.expand(A.reshape(OTHER, (2, 1, 4)), (2, 5, 4))
    assert is_everywhere(left(both(A.reshape(A.reshape(LISTED, (2, 1, 4)), ROWS), LISTED)), True)


def test_other_values_are_the_same():
    for same in (OTHER, negated(OTHER), both(OTHER, negated(OTHER)), A.cast(LISTED, torch.int32)):
        assert left(same) is same
