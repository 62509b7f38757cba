"""Which entries of a list are seen: what a mask says of places, and what is changed where entries are hidden alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sympy import Symbol

from fusion.analysis.affine import Formula, Leaf
from fusion.graph import Algebra, Reading, Value
from fusion.graph.comparisons import compare, constant, positions, where
from fusion.graph.proof_steps import proven
from patterns.attention.core.empty_rows import Empty
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import Term
from patterns.sparse.attention.gathered_attention import Entries, Operands, listed_attention

B, S, N, T, K, D, C = 2, 3, 5, 16, 4, 8, 6
a = Algebra()
i64, bf16 = torch.int64, torch.bfloat16


def tensor(name: str, *shape: Any, dtype: torch.dtype = bf16) -> Value:
    return a.make("input", (), (name, 0), shape, dtype)


KV, PLACES = tensor("kv", B, T, D), tensor("places", B, S, K, dtype=i64)
EVERY = a.reshape(positions(a, B), (B, 1, 1))


# parts ---------------------------------------------------------------------------------------------------------------


def entries(*parts: Formula) -> Entries:
    masks = Assumed(a).masks((B, S, N, K), (), (B, 1, S, K))
    return Entries(masks, 2, PLACES, parts)


PLACE, ENTRY = entries().number(), entries().masks.positions.axis(3)
(LEAF,) = (each for each in PLACE.terms if isinstance(each, Leaf))
OTHERS: dict[str, Formula] = {
    "nothing is seen": False,
    "as a mask says": ("is", LEAF),
    "one of two": ("or", (("le", PLACE), ("le", ENTRY))),
    "from a size on that is not known": ("le", PLACE.times(-1).plus(-Symbol("n"))),
    "up to a size that is not known": ("le", PLACE.plus(-Symbol("n"))),
}


def test_places_that_are_seen_lie_within_bounds():
    low, high = ("le", PLACE.times(-1)), ("le", PLACE.plus(-9))
    assert entries(low, high).least(PLACES)
    assert entries(low, high).within(PLACES, 0, 9)
    assert entries(low, high).within(PLACES, -1, 10)
    assert not entries(low, high).within(PLACES, 1, 9)
    assert not entries(low, high).within(PLACES, 0, 8)
    assert not entries(low).within(PLACES, 0, 9)
    assert not entries(high).within(PLACES, 0, 9)
    assert not entries(("le", PLACE.times(-1).plus(-1))).least(PLACES)


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_else_bounds_them(name: str):
    some = entries(OTHERS[name])
    assert not some.least(PLACES)
    assert not some.within(PLACES, 0, 9)
    assert not some.is_tail()


def test_hidden_entries_are_the_last_where_their_number_alone_says_so():
    assert entries().is_tail()
    assert entries(("le", ENTRY.plus(-2))).is_tail()
    assert not entries(("le", ENTRY.times(-1).plus(2))).is_tail()
    assert not entries(("le", ENTRY + PLACE)).is_tail()
    assert not entries(("eq", ENTRY.plus(-2))).is_tail()
    assert not entries(("le", ENTRY), ("le", PLACE)).is_tail()


# readings ------------------------------------------------------------------------------------------------------------


def gathered(places: Value, source: Value = KV) -> Value:
    return a.make("index", (source, EVERY, places), (0, 1), (*places.shape, source.shape[-1]), source.dtype)


SOFTMAX = Empty(a.softmax(tensor("scores", 2, 4), -1, "nan"))


def read(keys: Value, values: Value, hidden: Value | None = None) -> Any:
    """What is said of attention of N heads to these keys [X, M, K, D], for each list; None where it is none."""
    lists = keys.shape[:2]
    shape = (*lists, N, keys.shape[2])
    terms = [] if hidden is None else [Term("drop", a.reshape(hidden, (*lists, 1, shape[-1])), fill=-math.inf)]
    of = Operands(tensor("q", *shape[:-1], D), keys, values, bf16, ())
    found = listed_attention(Assumed(a).masks(shape, terms, (lists[0], 1, *shape[1:3])), of, 1.0, SOFTMAX)
    first = found[0] if found else None
    return first.captures if isinstance(first, Reading) else first


def lanes(rows: Value) -> Value:
    return a.cut(rows, -1, 0, C)


BEHIND = proven(compare(a, "lt", PLACES, constant(a, 0)))


def test_a_choice_is_seen_through_where_it_changes_hidden_entries_alone():
    odd = proven(compare(a, "eq", a.make("remainder", (PLACES,), (2,), PLACES.shape, i64), constant(a, 1)))
    shown = a.make("not", (BEHIND,), (), BEHIND.shape, torch.bool)
    zero = constant(a, 0)
    for condition, seen_through in ((shown, True), (odd, False)):
        chosen = proven(where(a, condition, PLACES, zero, i64))
        rows = gathered(chosen)
        assert read(rows, lanes(rows), BEHIND)["places"].below("wrap") is (PLACES if seen_through else chosen)
    for condition, seen_through in ((BEHIND, True), (odd, False)):
        chosen = proven(where(a, condition, zero, PLACES, i64))
        rows = gathered(chosen)
        assert read(rows, lanes(rows), BEHIND)["places"].below("wrap") is (PLACES if seen_through else chosen)


def test_lists_are_those_of_sequences_however_they_are_arranged():
    rows = gathered(PLACES)
    flat = a.reshape(rows, (1, B * S, K, D))
    for keys in (rows, flat, a.reshape(rows, (B * S, 1, K, D))):
        said = read(keys, lanes(keys))
        assert said["places"].shape == (B, S, K)
        assert said["q"].shape == (B, N, S, D)
    both = a.reshape(gathered(a.reshape(tensor("step", B, K, dtype=i64), (B, 1, K))), (1, 1, B * K, D))
    assert read(both, lanes(both)) is None


def test_keys_and_values_are_rows_of_one_source():
    rows, others = gathered(PLACES), gathered(PLACES, tensor("others", B, T + 2, C))
    assert read(rows, lanes(rows)) is not None
    assert read(rows, gathered(PLACES, tensor("beside", B, T, C))) is not None
    assert read(rows, others) is None
