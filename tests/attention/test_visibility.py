"""Which keys a query sees, as operators are told."""

from __future__ import annotations

import pytest
import torch

from fusion.operators.attention.softmax import Visible
from fusion.operators.attention.visibility import Band, rows_of, visible
from patterns.attention.masks.visibility import Dense


@pytest.mark.parametrize(("rows", "shape"), [(3, (3, 5)), (1, (2, 5)), (3, (2, 3, 5)), (3, (2, 1, 3, 5)), (3, (4, 8))])
def test_a_mask_has_rows_of_queries_or_where_there_is_one_of_sequences(rows: int, shape: tuple[int, ...]):
    query, key = torch.zeros(2, 4, rows, 8), torch.zeros(2, 4, 5, 8)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    seen = visible(query, key, (None, None), Band(1, mask), packed=False, table=None).keys
    assert seen is not None
    expected = mask.reshape(2, 1, 1, 5) if rows == 1 else mask[..., :rows, :5].reshape(-1, 1, rows, 5)
    assert torch.equal(seen.expand(2, 4, rows, 5), ~expected.expand(2, 4, rows, 5))


@pytest.mark.parametrize(("layout", "lengths"), [("BSND", [2, 5]), ("TND", [2, 7])])
def test_a_row_sees_the_keys_of_its_sequence(layout: str, lengths: list[int]):
    given = {
        "query": torch.zeros(2, 3, 1, 8),
        "key": torch.zeros(2, 5, 1, 8) if layout == "BSND" else torch.zeros(7, 1, 8),
        "layout_query": "BSND",
        "layout_kv": layout,
        "actual_seq_lengths_query": None,
        "actual_seq_lengths_kv": torch.tensor(lengths),
        "sparse_mode": 0,
    }
    rows = rows_of(given, "kv")
    assert rows.seen.tolist() == [[2] * 3, [5] * 3]
    assert (None if rows.first is None else rows.first.tolist()) == ([[0] * 3, [2] * 3] if layout == "TND" else None)


def test_whole_sequences_need_no_mask():
    query = torch.zeros(2, 4, 5, 8)
    assert visible(query, query, (None, None), Band(), packed=False, table=None) == Visible()
    assert visible(query, query, (None, None), Band(2), packed=False, table=None) == Visible(causal=True)


def test_without_a_key_the_mean_of_all_values_is_not_that_of_those_lowered_least():
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    said = dict.fromkeys(("count", "kv_lens", "window", "kv_len"))
    seen = Dense(mask=mask, levels=mask * -1e30, mask_kind="dense", fully_masked_row="lowest", **said)
    with pytest.raises(AssertionError, match="queries without visible keys see those that"):
        seen.restored(torch.zeros(2, 4, 3, 8), values=torch.zeros(2, 4, 5, 8))
