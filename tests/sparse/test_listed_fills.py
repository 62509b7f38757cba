"""Attention to the keys of an indexer's list, of which finite numbers hide those that a query does not see."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion import Example, testing
from fusion.options import Options
from fusion.testing import Trial, captured
from tests.examples.inputs import tensors

S, N, T, K = 16, 16, 64, 32
A3 = Options(target="ascend910_93", lower="eager")
LEAST = torch.finfo(torch.float32).min


def tried(low: Callable[[Tensor], float], dtype: torch.dtype, wide: bool, keys: int = T, first: int = 0) -> Trial:
    """Attention in which query i sees keys up to `first` + i of those that it lists."""

    def attend(query: Tensor, key: Tensor, weights: Tensor, q: Tensor, kv: Tensor, rope: Tensor, at: Tensor) -> Tensor:
        score = (torch.einsum("shd,td->sht", query, key).relu().float() * weights.float()[..., None]).sum(1)
        score = score.masked_fill(torch.arange(keys) > at[:, None], -math.inf)
        places = score.topk(min(K, keys), -1).indices
        rows = torch.cat([kv[places], rope[places]], -1)
        scores = torch.bmm(q, rows.mT) * 192**-0.5
        scores = scores.float() if wide else scores
        scores = scores.masked_fill((places > at[:, None])[:, None], low(scores))
        return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(q.dtype), rows[..., :512])

    shapes = (S, 64, 128), (keys, 128), (S, 64), (S, N, 576), (keys, 512), (keys, 64)
    return testing.trial_of(captured(Example("", attend, tensors(*shapes, torch.arange(S) + first)), dtype), A3)


def operators(t: Trial) -> set[str]:
    assert not t.outcome.failures, t.outcome.failures
    return {str(node.target).split(".")[1] for node in t.fused.graph.nodes if str(node.target).startswith("npu.")}


BOTH = {"npu_lightning_indexer", "npu_sparse_flash_attention"}
LOW: dict[str, Callable[[Tensor], float]] = {
    "the least": lambda scores: torch.finfo(scores.dtype).min,
    "-1e4": lambda scores: -1e4,
    "-inf": lambda scores: -math.inf,
}
WIDE: dict[str, Callable[[Tensor], float]] = LOW | {"-1e9": lambda scores: -1e9}
CASES = [
    pytest.param(low, dtype, wide, id=f"{name}-{dtype}-{'wide' if wide else 'narrow'}",
                 marks=[] if (name, dtype, wide) == ("the least", torch.bfloat16, False) else [pytest.mark.rotates])
    for dtype in (torch.bfloat16, torch.float16)
    for wide in (False, True)
    for name, low in (WIDE if wide else LOW).items()
]  # fmt: skip


@pytest.mark.parametrize(("low", "dtype", "wide"), CASES)
def test_a_number_hides_what_a_query_does_not_see_of_its_list(low: Callable[[Tensor], float], dtype, wide: bool):
    """Each query sees itself, so weights of others are 0 as with -inf, and the indexer may list -1 there."""
    t = tried(low, dtype, wide)
    assert operators(t) == BOTH, t.outcome.refusals
    testing.means_what_it_says(t)


@pytest.mark.parametrize(
    "keys", [37, pytest.param(72, marks=pytest.mark.rotates), pytest.param(100, marks=pytest.mark.rotates)]
)
def test_keys_that_no_page_divides_have_room_behind_them(keys: int):
    t = tried(LOW["the least"], torch.bfloat16, False, keys)
    assert operators(t) == BOTH, t.outcome.refusals
    testing.means_what_it_says(t)
