"""A loop over segments of packed tokens is one call, told where each ends; what only looks like one is none."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.options import Options
from fusion.testing import LEVELS, Level
from tests.engine.graphs import numbers

from .lowered import Form, lowerings, tried

T, N, M, D = 12, 4, 2, 128
LENGTHS = (3, 2, 7)


def given(dtype: torch.dtype, keys: int = T, shared: int = M) -> list[Tensor]:
    return [each.to(dtype) for each in (numbers(T, N, D), *(numbers(keys, shared, D, seed=n) for n in (1, 2)))]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **how)


def heads_first(*packed: Tensor) -> list[Tensor]:
    return [each.transpose(0, 1).unsqueeze(0) for each in packed]


def split(q: Tensor, k: Tensor, v: Tensor, key_lengths: tuple[int, ...] = LENGTHS, **how: Any) -> Tensor:
    """As models of pictures and words write it: heads first, joined before they are turned."""
    q, k, v = heads_first(q, k, v)
    parts = q.split(LENGTHS, 2), k.split(key_lengths, 2), v.split(key_lengths, 2)
    out = torch.cat([sdpa(*each, **how) for each in zip(*parts, strict=True)], dim=2)
    return out.squeeze(0).transpose(0, 1).reshape(T, -1)


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each result turned before they are joined."""
    outs, begin = [], 0
    for end in accumulate(LENGTHS):
        parts = heads_first(*(each[begin:end] for each in (q, k, v)))
        outs.append(sdpa(*parts).transpose(1, 2))
        begin = end
    return torch.cat(outs, dim=1).reshape(T, -1)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Matmuls around a softmax, causal."""
    q, k, v = heads_first(q, *(each.repeat_interleave(N // M, 1) for each in (k, v)))
    outs = []
    for a, b, c in zip(*(each.split(LENGTHS, 2) for each in (q, k, v)), strict=True):
        scores = (a @ b.mT).float() * a.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        outs.append(scores.masked_fill(future, -torch.inf).softmax(-1).to(c.dtype) @ c)
    return torch.cat(outs, dim=2)


def unbatched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads in the place of sequences (a vision tower)."""
    parts = zip(*(each.transpose(0, 1).split(LENGTHS, 1) for each in (q, k, v)), strict=True)
    return torch.cat([sdpa(*each) for each in parts], dim=1).transpose(0, 1).reshape(T, -1)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each result into its rows of a buffer (a serving engine's backend in plain torch)."""
    out, begin = torch.empty_like(q), 0
    for end in accumulate(LENGTHS):
        parts = [each[begin:end].movedim(0, 1) for each in (q, k, v)]
        out[begin:end] = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).movedim(1, 0)
        begin = end
    return out


def in_a_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As many sequences as there are pairs of heads, all in the same segments."""
    q, k, v = (each.unflatten(1, (2, -1)).permute(1, 2, 0, 3) for each in (q, k, v))
    parts = zip(*(each.split(LENGTHS, 2) for each in (q, k, v)), strict=True)
    out = torch.cat([sdpa(*each) for each in parts], dim=2)
    return out.permute(2, 0, 1, 3).reshape(T, -1)


FORMS: dict[str, tuple[Form, dict[str, int]]] = {
    "split": (split, {}),
    "without a batch": (unbatched, dict(shared=N)),
    "without a batch, written": (written, {}),
    "in a batch": (in_a_batch, {}),
    "causal": (lambda q, k, v: split(q, k, v, is_causal=True), {}),
    "other lengths of keys": (lambda q, k, v: split(q, k, v, (4, 5, 7)), dict(keys=16)),
    "turned": (turned, {}),
    "by hand": (by_hand, {}),
    "heads of their own": (split, dict(shared=N)),
}


@pytest.mark.rotates(5)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("level", LEVELS)
def test_they_are_one_call(name: str, level: Level):
    form, sizes = FORMS[name]
    t = tried(form, given(torch.bfloat16, **sizes), level)
    assert lowerings(t) == ["packed"]
    testing.means_what_it_says(t)
    (call,) = [each for each in t.fused.graph.nodes if "npu_fused_infer_attention_score" in str(each.target)]
    assert call.kwargs["actual_seq_qlen"] == list(accumulate(LENGTHS))


def of_others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Segments see the keys of the next."""
    q, k, v = heads_first(q, k, v)
    parts = q.split(LENGTHS, 2), *(each.split(LENGTHS, 2) for each in (k, v))
    seen = [*parts[1][1:], parts[1][0]], [*parts[2][1:], parts[2][0]]
    return torch.cat([sdpa(*each) for each in zip(parts[0], *seen, strict=True)], dim=2)


def scaled_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = zip(*(each.split(LENGTHS, 2) for each in heads_first(q, k, v)), strict=True)
    return torch.cat([sdpa(*each, scale=0.1 * n + 0.1) for n, each in enumerate(parts)], dim=2)


def joined_by_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As many queries in each, joined along the heads."""
    parts = zip(*(each.split(T // 2, 2) for each in heads_first(q, k, v)), strict=True)
    return torch.cat([sdpa(*each) for each in parts], dim=1)


def causal_over_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal from the first key, of which there are more than queries: the operator counts from the last."""
    return split(q, k, v, (4, 5, 7), is_causal=True)


def of_hidden_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query and one key in the first segment, which data hides."""
    q, k, v = heads_first(q, k, v)
    seen = q[:, :1, :1, :1] > 100
    parts = zip(*(each.split((1, T - 1), 2) for each in (q, k, v)), strict=True)
    return torch.cat([sdpa(*each, attn_mask=how) for each, how in zip(parts, (seen, None), strict=True)], dim=2)


def of_more_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first segment sees itself, the others keys that several heads share."""
    first, *others = zip(*(each.split(LENGTHS, 2) for each in heads_first(q, k, v)), strict=True)
    return torch.cat([sdpa(first[0], first[0], first[0]), *(sdpa(*each) for each in others)], dim=2)


OTHERS: dict[str, tuple[Form, dict[str, int]]] = {
    "more heads of one": (of_more_heads, {}),
    "a mask of one key": (of_hidden_keys, {}),
    "another scale for each": (scaled_apart, {}),
    "joined along heads": (joined_by_heads, {}),
    "causal over more keys": (causal_over_more, dict(keys=16)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_them_is_none(name: str):
    form, sizes = OTHERS[name]
    t = tried(form, given(torch.bfloat16, **sizes))
    assert not t.outcome.failures
    assert lowerings(t)
    assert "packed" not in lowerings(t)
    testing.means_what_it_says(t)


def test_int8_that_is_read_in_another_dtype_than_that_of_the_queries_is_no_segment():
    """The operator would be given queries in 16 bits beside keys in float32."""

    def of_int8(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
        parts = zip(q.split(LENGTHS), *((each.float() * scale).split(LENGTHS) for each in (k, v)), strict=True)
        outs = [sdpa(*heads_first(a.float(), b, c)).squeeze(0).transpose(0, 1).to(q.dtype) for a, b, c in parts]
        return torch.cat(outs)

    q, k, v = given(torch.bfloat16)
    whole = [(each.float() * 20).clamp(-127, 127).to(torch.int8) for each in (k, v)]
    graph = testing.capture(of_int8, (q, *whole, torch.tensor(0.05)))
    t = testing.trial_of(graph, Options(target="host", lower="eager", plan_cache="off"))
    assert "packed" not in lowerings(t)
    testing.means_what_it_says(t)


def test_attention_to_other_values_than_there_are_keys_is_left_to_torch():
    outcome = tried(sdpa, [numbers(1, N, T, D), numbers(1, N, T, D), numbers(1, N, T + 1, D)]).outcome
    assert not outcome.chosen
    assert "there are not as many as keys, so that" in outcome.refusals[0].reason


def test_segments_that_see_others_are_right():
    testing.means_what_it_says(tried(of_others, given(torch.bfloat16)))


def by_slots(q: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
    """Rows of a cache by their numbers, those of each sequence in a row of a table."""
    outs, begin = [], 0
    for number, length in enumerate(LENGTHS):
        rows = [each[slots[number, : length + 2]].transpose(0, 1)[None] for each in (k, v)]
        own = q[begin : begin + length].transpose(0, 1)[None]
        outs.append(sdpa(own, *rows)[0].transpose(0, 1))
        begin += length
    return torch.cat(outs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.rotates(3)
def test_rows_of_a_cache_are_gathered_at_once(level: Level):
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(1))[:30].view(3, 10)
    t = tried(by_slots, [*given(torch.bfloat16, keys=48), slots], level)
    assert lowerings(t) == ["packed"]
    testing.means_what_it_says(t)
    gathers = [each for each in t.fused.graph.nodes if each.target is torch.ops.aten.index.Tensor]
    assert len(gathers) == 2
