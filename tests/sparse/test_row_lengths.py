"""Queries that see numbers of keys of their own, as by their positions, are sequences of their own to the indexer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.options import Options
from fusion.testing import Trial, capture, emits_valid_calls, trial_of, widen
from tests.engine.graphs import names
from tests.sparse.int8_indexers import products, quantised

B, S, T, N, D, K = 2, 3, 64, 4, 128, 8
POSITIONS = torch.tensor([[3, 40, 9], [20, 0, 63]])
LENGTHS = torch.tensor([5, 2])
Form = Callable[..., Tensor]


def marked(scores: Tensor, seen: Tensor) -> Tensor:
    """The best keys that are seen, then -1."""
    best, places = scores.masked_fill(~seen, -math.inf).topk(K, -1)
    return places.masked_fill(best == -math.inf, -1)


def scored(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bsht,bsh->bst", torch.einsum("bshd,btd->bsht", q, k).relu(), w)


def by_positions(q, k, w, positions):
    return marked(scored(q, k, w), torch.arange(k.shape[1]) <= positions[..., None])


def at_the_end(q, k, w, lengths):
    """The last query stands at the end of its sequence, which may be shorter than there are queries."""
    positions = lengths[:, None] - q.shape[1] + torch.arange(q.shape[1])
    return marked(scored(q, k, w), torch.arange(k.shape[1]) <= positions[..., None])


def packed(q, k, w, positions):
    """The tokens of one sequence."""
    scores = torch.einsum("shd,td->sht", q[0], k[0]).relu() * w[0].unsqueeze(-1)
    return marked(scores.sum(1), torch.arange(k.shape[1]) <= positions[0, :, None])


def alike(q, k, w, positions):
    """Positions that all sequences share."""
    return marked(scored(q, k, w), torch.arange(k.shape[1]) <= positions[:1, :, None])


def pooled(q, k, w, positions):
    """Keys of four tokens each, of which a query sees those that are whole."""
    whole = ((4 * positions[:1] + 6) // 4).unsqueeze(-1)
    places = scored(q, k, w).masked_fill(torch.arange(k.shape[1]) >= whole, -math.inf).topk(K, -1).indices
    return torch.where(places >= whole, -1, places)


def in_int8(q, k, w, positions):
    """Keys in int8 with scales in float16."""
    (q8, of_q), (k8, of_k) = quantised(q), quantised(k)
    scores = (products(q8, k8).relu() * (w.float() * of_q.squeeze(-1)).unsqueeze(-1)).sum(2)
    scores = scores * of_k.squeeze(-1).half().float().unsqueeze(1)
    return marked(scores, torch.arange(k.shape[1]) <= positions[..., None])


def windowed(q, k, w, positions):
    """Of the keys before a position only the last are seen."""
    at = torch.arange(k.shape[1])
    return marked(scored(q, k, w), (at <= positions[..., None]) & (at > positions[..., None] - 16))


def twice_as_far(q, k, w, positions):
    return marked(scored(q, k, w), torch.arange(k.shape[1]) <= 2 * positions[..., None])


def from_two(q, k, w, positions):
    """A sum of two positions, which is not read as an element."""
    return marked(scored(q, k, w), torch.arange(k.shape[1]) <= (positions + positions.flip(1))[..., None])


def tried(form: Form, given: Tensor, dtype: torch.dtype = torch.bfloat16, keys: int = T) -> Trial:
    torch.manual_seed(0)
    floats = (torch.randn(*shape).to(dtype) for shape in ((B, S, N, D), (B, keys, D), (B, S, N)))
    return trial_of(capture(form, (*floats, given)), Options(target="ascend910_93", lower="eager"))


SPELLINGS: dict[Form, Tensor] = {
    by_positions: POSITIONS, at_the_end: LENGTHS, packed: POSITIONS, in_int8: POSITIONS, twice_as_far: POSITIONS,
    alike: POSITIONS, pooled: POSITIONS,
}  # fmt: skip


def lists(t: Trial) -> tuple[Any, Any]:
    """What the plain and the fused graph list in float64."""
    given = t.inputs(wide=True)
    return widen(t.captured.graph)(*given[: len(t.captured.inputs)])[0], widen(t.fused)(*t.inputs(wide=True))[0]


@pytest.mark.rotates(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", SPELLINGS, ids=lambda each: each.__name__)
def test_each_query_is_a_sequence_of_its_own(form: Form, dtype: torch.dtype):
    t = tried(form, SPELLINGS[form], dtype)
    (call,) = [each for each in t.fused.graph.nodes if "lightning_indexer" in str(each.target)]
    assert call.args[0].meta["val"].shape[:2] == ((1 if form is packed else B) * S, 1)
    assert not [each for each in names(t.fused) if "topk" in each]
    want, have = lists(t)
    assert torch.equal(want.sort().values, have.sort().values)
    emits_valid_calls(t)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (windowed, "each query sees a range that starts at a key which data names"),
        (from_two, "it is not proven to be a causal order or a"),
    ],
)
def test_what_is_no_number_of_keys_is_refused(form: Form, reason: str):
    t = tried(form, POSITIONS)
    assert not [each for each in names(t.fused) if "lightning_indexer" in each]
    assert any(reason in each.reason for each in t.outcome.refusals)


def test_rows_that_no_page_divides_are_padded():
    t = tried(by_positions, POSITIONS, keys=T - 4)
    assert [each for each in names(t.fused) if "lightning_indexer" in each]
    want, have = lists(t)
    assert torch.equal(want.sort().values, have.sort().values)
