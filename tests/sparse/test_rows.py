"""What reads as rows by a list is what the list says, through views; what moves rows or mixes them is none."""

from __future__ import annotations

import pytest
import torch
from sympy import Symbol

from fusion.graph import Algebra, Value
from fusion.graph.comparisons import positions
from patterns.sparse.lists.gathered_rows import Gathered, gathered

B, S, T, K, D = 2, 3, 8, 4, 6
a = Algebra()


def tensor(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Value:
    return a.make("input", (), (name, 0), shape, dtype)


KV, PLACES = tensor("kv", B, T, D), tensor("places", B, S, K, dtype=torch.int64)
EVERY = a.reshape(positions(a, B), (B, 1, 1))


def index(source: Value, attrs: tuple[int, ...], *shape: int, of: tuple[Value, ...]) -> Value:
    return a.make("index", (source, *of), attrs, shape, source.dtype)


ROWS = index(KV, (0, 1), B, S, K, D, of=(EVERY, PLACES))


def found(x: Value) -> Gathered:
    rows = gathered(a, x)
    assert rows is not None
    return rows


def test_rows_of_every_sequence():
    assert found(ROWS) == Gathered(KV, PLACES, counted_back=True)
    assert found(a.make("take", (KV, PLACES), (), ROWS.shape, KV.dtype)) == Gathered(KV, PLACES, counted_back=False)


def test_views_of_whole_rows():
    lanes = found(a.cut(ROWS, -1, 2, 5))
    assert (lanes.source, lanes.places) == (a.cut(KV, 2, 2, 5), PLACES)
    assert found(a.cast(ROWS, torch.float32)).source is KV
    turned = found(a.permute(ROWS, (0, 2, 1, 3)))
    assert turned.places is a.permute(PLACES, (0, 2, 1))
    flat = found(a.reshape(ROWS, (B * S, K, D)))
    assert (flat.groups, flat.places) == (B, a.reshape(PLACES, (B * S, K)))
    table = a.reshape(KV, (B * T, D))
    one = index(table, (0,), B, S, K, D, of=(PLACES,))
    assert found(one) == Gathered(a.reshape(table, (1, B * T, D)), PLACES, counted_back=True)
    assert found(a.permute(one, (1, 0, 2, 3))).groups == 1


def test_one_list_of_all_sequences():
    listed = a.make("input", (), ("one", 0), (S, K), torch.int64)
    rows = found(index(KV, (1,), B, S, K, D, of=(listed,)))
    assert rows.places is a.expand(listed, (B, S, K))


def test_pages_and_offsets():
    page, offset = (tensor(name, B, S, K, dtype=torch.int32) for name in ("page", "offset"))
    rows = found(index(KV, (0, 1), B, S, K, D, of=(page, offset)))
    assert (rows.groups, rows.counted_back, rows.places.dtype) == (1, False, torch.int64)
    assert rows.source.shape == (1, B * T, D)
    for shape in ((Symbol("n"), T, D), (B, Symbol("t"), D)):
        many = a.make("input", (), ("many", 0), shape, torch.bfloat16)
        assert gathered(a, index(many, (0, 1), B, S, K, D, of=(page, offset))) is None


def test_rows_of_the_one_sequence_that_there_is():
    one, first = tensor("one_kv", 1, T, D), tensor("first", B, 1, 1, dtype=torch.int64)
    assert found(index(one, (0, 1), B, S, K, D, of=(first, PLACES))) == Gathered(one, PLACES, counted_back=True)


@pytest.mark.parametrize("number", [tensor("some", B, 1, 1, dtype=torch.int64), a.reshape(positions(a, B), (1, B, 1))])
def test_rows_of_other_sequences_are_those_of_one_table(number: Value):
    """Sequence `number` for each list: one that is given, or the number of the query, of as many."""
    places = tensor("square", B, B, K, dtype=torch.int64)
    rows = found(index(KV, (0, 1), B, B, K, D, of=(number, places)))
    assert (rows.groups, rows.source) == (1, a.reshape(KV, (1, B * T, D)))
    assert {number, places} <= set(values_below(rows.places))


def values_below(x: Value) -> list[Value]:
    return [x, *(below for each in x.args for below in values_below(each))]


HEADS = tensor("heads", B, T, 2, D)
OTHER = index(KV, (0, 1), B, S, K, D, of=(EVERY, tensor("others", B, S, K, dtype=torch.int64)))
FLAT = index(KV, (0,), S, T, D, of=(tensor("few", S, dtype=torch.int64),))
WIDE = tensor("wide", B, T, D, dtype=torch.float32)
SQUARE = index(tensor("lanes", B, T, K), (0, 1), B, B, K, K, of=(EVERY, tensor("square", B, B, K, dtype=torch.int64)))
LONG = index(tensor("long", B, T + 2, D), (0, 1), B, S, K, D, of=(EVERY, PLACES))
NONE = {
    "sequences exchanged": a.permute(ROWS, (1, 0, 2, 3)),
    "as many sequences exchanged": a.permute(SQUARE, (1, 0, 2, 3)),
    "as many lanes exchanged": a.permute(SQUARE, (0, 1, 3, 2)),
    "lanes exchanged": a.permute(ROWS, (0, 1, 3, 2)),
    "lanes and rows mixed": a.reshape(ROWS, (B, S, K * D)),
    "several rows behind a place": FLAT,
    "rows of heads": index(HEADS, (0, 1), B, S, K, 2, D, of=(EVERY, PLACES)),
    "entries cut off": a.cut(ROWS, 2, 0, 2),
    "two lists": a.make("cat", (ROWS, OTHER), (3,), (B, S, K, 2 * D), KV.dtype),
    "of two sources": a.make("cat", (ROWS, LONG), (3,), (B, S, K, 2 * D), KV.dtype),
    "numbers of a line": index(tensor("line", T), (0,), B, S, K, of=(PLACES,)),
    "behind each other": a.make("cat", (ROWS, ROWS), (2,), (B, S, 2 * K, D), KV.dtype),
    "repeated in front": a.make(
        "expand", (a.reshape(ROWS, (1, B, S, K, D)),), (), (5, B, S, K, D), KV.dtype
    ),
    "rounded": a.cast(index(WIDE, (0, 1), B, S, K, D, of=(EVERY, PLACES)), KV.dtype),
    "another index": index(HEADS, (1, 2), B, S, K, D, of=(PLACES, PLACES)),
    "no rows": KV,
}  # fmt: skip


@pytest.mark.parametrize("name", NONE)
def test_no_rows_by_a_list(name: str):
    assert gathered(a, NONE[name]) is None
