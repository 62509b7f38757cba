"""Lists of each key-value head (MiniMax-M3, 2026): one reason for each attention, which says what is listed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusion.options import Options
from fusion.testing import capture, trial_of
from tests.corpus.base import activations

B, G, N, S, T, K, D = 2, 2, 4, 6, 32, 4, 16
KEYS, BLOCKS = "has its own list of keys", "has its own list of blocks of keys"


def marked(places: Tensor, size: int = T) -> Tensor:
    return torch.zeros(B, G, S, size, dtype=torch.bool).scatter(-1, places, True)


def scattered(places: Tensor) -> Tensor:
    return marked(places)


def compared(places: Tensor) -> Tensor:
    return (places[..., None] == torch.arange(T)).any(-2)


def beside_none(places: Tensor) -> Tensor:
    """The last entry of a wider list is no key."""
    return marked(places, T + 1)[..., :T]


def counted(places: Tensor) -> Tensor:
    return torch.zeros(B, G, S, T).scatter_add(-1, places, torch.ones(places.shape)) > 0


def of_blocks(places: Tensor) -> Tensor:
    return marked(places % (T // 4), T // 4).repeat_interleave(4, -1)


def of_compared_blocks(places: Tensor) -> Tensor:
    return ((places % (T // 4))[..., None] == torch.arange(T // 4)).any(-2).repeat_interleave(4, -1)


REASONS = {
    scattered: KEYS, compared: KEYS, beside_none: KEYS, counted: KEYS, of_blocks: BLOCKS, of_compared_blocks: BLOCKS,
}  # fmt: skip


@pytest.mark.parametrize("shown", REASONS, ids=lambda each: each.__name__)
def test_each_attention_has_one_reason(shown: Callable[[Tensor], Tensor]):
    def form(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        keys, values, mask = (each.repeat_interleave(N // G, 1) for each in (k, v, shown(places)))
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    made = torch.Generator().manual_seed(3)
    places = torch.rand(B, G, S, T, generator=made).argsort(-1)[..., :K]
    shapes = (B, N, S, D), (B, G, T, D), (B, G, T, D)
    q, k, v = (activations(seed, *shape).bfloat16() for seed, shape in enumerate(shapes))
    t = trial_of(capture(form, (q, k, v, places)), Options(target="host", lower="eager"))
    assert not t.outcome.chosen
    reasons = [each.reason for each in t.outcome.refusals if "attention" in each.rule]
    assert len(reasons) == 1
    assert REASONS[shown] in reasons[0]
