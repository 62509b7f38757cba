"""A loop over the sequences of a contiguous cache, which it writes and reads one by one, is one call over the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.graph.launches import is_launch
from tests.attention.lowered import Form, lowerings, tried
from tests.engine.graphs import numbers
from tests.support.fused import FIA, call, calls

pytestmark = pytest.mark.rotates(5)

B, N, M, T, D = 3, 4, 2, 48, 128
LENGTHS = (37, 5, 48)
BOUNDS, KEYS = (0, 1, 6, 7), (37, 20, 48)


def given(queries: tuple[int, ...], keys: tuple[int, ...], cache: tuple[int, ...]) -> list[Tensor]:
    shapes = (queries, keys, keys, cache, cache)
    return [numbers(*shape, seed=seed).bfloat16() for seed, shape in enumerate(shapes)]


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True, **how)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    outs = []
    for b, n in enumerate(LENGTHS):
        keys[b, :, n - 1 : n], values[b, :, n - 1 : n] = k[b], v[b]
        outs.append(attended(q[b : b + 1], keys[b : b + 1, :, :n], values[b : b + 1, :, :n]))
    return torch.cat(outs)


def chunks(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, size: int = 4) -> Tensor:
    """Written out, causal towards the last key."""
    outs = []
    for b, n in enumerate((37, 8, 48)):
        keys[b, :, n - size : n], values[b, :, n - size : n] = k[b], v[b]
        own, other = (cache[b, :, :n].repeat_interleave(N // M, 0) for cache in (keys, values))
        mask = torch.full((size, n), -torch.inf).triu(n - size + 1)
        weights = ((q[b] @ own.mT).float() * D**-0.5 + mask).softmax(-1)
        outs.append(weights.to(q.dtype) @ other)
    return torch.stack(outs)


def at_positions(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Positions are data, and a mask hides what is behind them."""
    outs = []
    for b in range(B):
        keys[b, :, at[b : b + 1]], values[b, :, at[b : b + 1]] = k[b], v[b]
        seen = (torch.arange(T) <= at[b])[None, None, None]
        outs.append(attended(q[b : b + 1], keys[b : b + 1], values[b : b + 1], seen)[0])
    return torch.stack(outs)


def mixed(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, heads: bool = False) -> Tensor:
    """Packed steps and a chunk; a cache of positions first, or of `heads` first."""
    out = torch.empty_like(q)
    for b, n in enumerate(KEYS):
        start, end = BOUNDS[b : b + 2]
        own = slice(n - (end - start), n)
        if heads:
            keys[b, :, own], values[b, :, own] = k[start:end].transpose(0, 1), v[start:end].transpose(0, 1)
            rows = [keys[b, :, :n], values[b, :, :n]]
        else:
            keys[b, own], values[b, own] = k[start:end], v[start:end]
            rows = [cache[b, :n].transpose(0, 1) for cache in (keys, values)]
        seen = torch.ones(end - start, n, dtype=torch.bool).tril(n - (end - start))
        out[start:end] = attended(q[start:end].transpose(0, 1)[None], *(x[None] for x in rows), seen)[0].transpose(0, 1)
    return out


def written_before(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """All sequences at once, at one position; the loop reads alone, some of the sequences."""
    keys[:, :, 4:5], values[:, :, 4:5] = k, v
    parts = ((1, 40), (2, 5))
    return torch.cat([attended(q[b : b + 1], keys[b : b + 1, :, :n], values[b : b + 1, :, :n]) for b, n in parts])


def in_int8(q: Tensor, keys: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """With a scale of each channel."""
    outs = []
    for b, n in enumerate(LENGTHS):
        k, v = (x[b, :, :n].to(q.dtype) * scale for x, scale in zip((keys, values), scales, strict=True))
        outs.append(attended(q[b : b + 1], k[None], v[None]))
    return torch.cat(outs)


def int8_caches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    caches = [torch.randint(-128, 128, (B, M, T, D), generator=generator).to(torch.int8) for _ in range(2)]
    return [numbers(B, N, 1, D).bfloat16(), *caches, (torch.rand(2, M, 1, D, generator=generator) / 64).bfloat16()]


STEP = ((B, N, 1, D), (B, M, 1, D), (B, M, T, D))
PACKED, FIRST = ((7, N, D), (7, M, D)), (B, T, M, D)
FORMS: dict[str, tuple[Form, list[Tensor], int]] = {
    "sdpa": (by_sdpa, given(*STEP), 3),
    "chunks": (chunks, given((B, N, 4, D), (B, M, 4, D), (B, M, T, D)), 3),
    "at positions": (at_positions, [*given(*STEP), torch.tensor([36, 4, 47])], 3),
    "mixed": (mixed, given(*PACKED, FIRST), 2),
    "mixed, heads first": (partial(mixed, heads=True), given(*PACKED, (B, M, T, D)), 3),
    "written before": (written_before, given(*STEP), 3),
    "int8": (in_int8, int8_caches(), 1),
}


def launches(t: testing.Trial) -> int:
    """Without the copies that a compiler for the NPU makes writes in place of."""
    return sum(is_launch(each) for each in t.fused.graph.nodes if "copy_" not in str(each.target))


@pytest.mark.parametrize("name", FORMS)
def test_they_are_one_call_over_the_cache(name: str):
    form, inputs, count = FORMS[name]
    t = tried(form, inputs)
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    assert len(calls(t, FIA)) == 1
    assert launches(t) == count


def test_numbers_of_keys_are_told_as_numbers():
    attention = call(tried(by_sdpa, given(*STEP)), FIA)
    assert attention.kwargs["actual_seq_kvlen"] == [*LENGTHS]


@pytest.mark.parametrize("heads", [False, True])
def test_sequences_of_packed_queries_are_pages(heads: bool):
    t = tried(partial(mixed, heads=heads), given(*PACKED, (B, M, T, D) if heads else FIRST))
    assert lowerings(t) == ["packed"]
    attention = call(t, FIA)
    assert attention.kwargs["block_size"] == (T if heads else 16)
    assert attention.kwargs["actual_seq_kvlen"] == [*KEYS]


def read_before_a_write(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The first sequence is written once more after it was read."""
    out = by_sdpa(q, k, v, keys, values)
    keys[0, :, :1] = k[1]
    return torch.cat((out, by_sdpa(q, k, v, keys, values)))


def from_the_second_row(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    parts = ((b, keys[b : b + 1, :, 1:n], values[b : b + 1, :, 1:n]) for b, n in enumerate(LENGTHS))
    return torch.cat([attended(q[b : b + 1], *rows) for b, *rows in parts])


def in_another_order(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    order = zip((1, 0, 2), LENGTHS, strict=True)
    parts = ((keys[b : b + 1, :, :n], values[b : b + 1, :, :n]) for b, n in order)
    return torch.cat([attended(q[b : b + 1], *rows) for b, rows in enumerate(parts)])


def values_of_other_lengths(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    parts = ((b, keys[b : b + 1, :, :n], values[b : b + 1, :, T - n :]) for b, n in enumerate(LENGTHS))
    return torch.cat([attended(q[b : b + 1], *rows) for b, *rows in parts])


@pytest.mark.parametrize(
    "form", [read_before_a_write, from_the_second_row, in_another_order, values_of_other_lengths],
    ids=lambda each: each.__name__,
)  # fmt: skip
def test_other_rows_are_not_read_as_the_first_of_each_sequence(form: Callable[..., Tensor]):
    t = tried(form, given(*STEP))
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    lengths = [each.kwargs.get("actual_seq_kvlen") for each in calls(t, FIA) if each.args[1].meta["val"].dim() == 4]
    assert form is read_before_a_write or [*LENGTHS] not in lengths
