"""A loop over sequences, each with keys in pages of its own, is one call over the pages."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion import testing
from fusion.runtime.verification import relative_error
from fusion.testing import LEVELS, Level
from tests.engine.graphs import numbers
from tests.support.fused import FIA, call, calls

from .lowered import Form, lowerings, tried

pytestmark = pytest.mark.rotates(8)

N, M, D, SIZE, BLOCKS, ROW = 4, 2, 128, 16, 12, 4
CHUNKS, KEYS = (4, 7, 3), (20, 40, 33)
STEPS = (1, 1, 1)
MIXED = (1, 5, 1)
PROMPT = (4, 40, 1)
"""A chunk, a prompt without a cache, and a step."""
LOOKUP = [[7, 2, 0, 0], [3, 9, 11, 0], [1, 8, 5, 10]]


def given(queries: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, *page: int) -> list[Tensor]:
    shape = (BLOCKS, *(page or (SIZE, M, D)))
    caches = (numbers(*shape, seed=n).to(dtype) for n in (1, 2))
    return [numbers(sum(queries), N, D).to(dtype), *caches, torch.tensor(LOOKUP, dtype=torch.int32)]


def between(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(pairwise((0, *accumulate(lengths))))


def weighed(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """By einsum, causal towards the last key; q [s, n, d], keys [t, m, d]."""
    k, v = (each.repeat_interleave(N // M, 1) for each in (k, v))
    queries, keys = q.shape[0], k.shape[0]
    hidden = torch.ones(queries, keys).triu(keys - queries + 1).bool()
    if window is not None:
        hidden |= ~torch.ones(queries, keys).triu(keys - queries - window + 1).bool()
    scores = torch.einsum("qhd,khd->hqk", q, k).float().masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1).to(v.dtype), v)


def reference(
    q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor, queries: Any = CHUNKS, window: int | None = None
) -> Tensor:
    """Pages that each sequence fills are gathered and cut to its length."""
    outs = []
    for number, (start, end) in enumerate(between(queries)):
        count = KEYS[number]
        pages = lookup[number, : -(-count // SIZE)].long()
        k, v = (each[pages].view(-1, M, D)[:count] for each in (keys, values))
        outs.append(weighed(q[start:end] * D**-0.5, k, v, window))
    return torch.cat(outs)


def heads_first(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor, queries: Any = CHUNKS) -> Tensor:
    """Pages [Block, M, Size, D]; attention by torch, of whole pages where a query sees all keys."""
    outs = []
    for number, (start, end) in enumerate(between(queries)):
        pages = lookup[number]
        k, v = (each[pages].transpose(0, 1).reshape(M, -1, D)[None] for each in (keys, values))
        out = F.scaled_dot_product_attention(q[start:end].transpose(0, 1)[None], k, v, enable_gqa=True)
        outs.append(out.squeeze(0).transpose(0, 1).reshape(end - start, -1))
    return torch.cat(outs, dim=0)


def joined_heads(
    q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor, queries: Any = CHUNKS, scale: float = D**-0.5
) -> Tensor:
    """Query heads that share keys stand beside them in a dim of their own; results go into a buffer."""
    out = torch.empty_like(q)
    for number, (start, end) in enumerate(between(queries)):
        count = KEYS[number]
        pages = lookup[number, : -(-count // SIZE)]
        k, v = (each[pages].view(-1, M, D)[:count] for each in (keys, values))
        own = q[start:end].view(-1, M, N // M, D)
        scores = torch.einsum("smgd,tmd->mgst", own, k).float() * scale
        last = torch.arange(end - start)[:, None] + (count - (end - start))
        weights = scores.masked_fill(torch.arange(count) > last, -torch.inf).softmax(-1).to(q.dtype)
        out[start:end] = torch.einsum("mgst,tmd->smgd", weights, v).reshape(-1, N, D)
    return out


def pages_turned_first(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor, queries: Any = CHUNKS) -> Tensor:
    """Pages [Block, M, Size, D] become rows [T, M, D], which are cut and turned."""
    outs = []
    for number, (start, end) in enumerate(between(queries)):
        count = KEYS[number]
        pages = lookup[number, : -(-count // SIZE)]
        k, v = (each[pages].transpose(1, 2).reshape(-1, M, D)[:count] for each in (keys, values))
        outs.append(weighed(q[start:end] * D**-0.5, k, v))
    return torch.cat(outs)


def by_lengths(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor, queries: Any = CHUNKS) -> Tensor:
    """Rows of whole block tables are read; a mask hides those behind the length."""
    outs = []
    for number, (start, end) in enumerate(between(queries)):
        k, v = (each[lookup[number]].view(-1, M, D).transpose(0, 1)[None] for each in (keys, values))
        last = torch.arange(end - start)[:, None] + (KEYS[number] - (end - start))
        seen = torch.arange(k.shape[2]) <= last
        own = q[start:end].transpose(0, 1)[None]
        outs.append(F.scaled_dot_product_attention(own, k, v, seen, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)


def row_by_row(
    q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor, queries: Any = CHUNKS, flat: bool = False
) -> Tensor:
    """Every row is looked up by its page and its place, or by the number of both."""
    outs = []
    for number, (start, end) in enumerate(between(queries)):
        t = torch.arange(KEYS[number])
        page, place = lookup[number][t // SIZE], t % SIZE
        if flat:
            k, v = (each.view(-1, M, D)[page.long() * SIZE + place] for each in (keys, values))
        else:
            k, v = (each[page, place] for each in (keys, values))
        outs.append(weighed(q[start:end] * D**-0.5, k, v))
    return torch.cat(outs)


FORMS: dict[str, tuple[Form, list[Tensor], tuple[int, ...]]] = {
    "chunks": (reference, given(CHUNKS), CHUNKS),
    "steps": (partial(reference, queries=STEPS), given(STEPS), STEPS),
    "steps and a chunk": (partial(reference, queries=MIXED), given(MIXED), MIXED),
    "a prompt beside them": (partial(reference, queries=PROMPT), given(PROMPT), PROMPT),
    "a prompt beside them, in a window": (partial(reference, queries=PROMPT, window=9), given(PROMPT), PROMPT),
    "steps in a window": (partial(reference, queries=STEPS, window=25), given(STEPS), STEPS),
    "a short prompt in a window": (partial(reference, queries=(20, 5, 1), window=25), given((20, 5, 1)), (20, 5, 1)),
    "within a window": (partial(reference, window=9), given(CHUNKS), CHUNKS),
    "heads joined": (joined_heads, given(CHUNKS), CHUNKS),
    "steps and a chunk, heads joined": (partial(joined_heads, queries=MIXED), given(MIXED, torch.float16), MIXED),
    "pages turned first": (pages_turned_first, given(CHUNKS, torch.float16, M, SIZE, D), CHUNKS),
    "behind lengths": (by_lengths, given(CHUNKS), CHUNKS),
    "steps and a chunk behind lengths": (partial(by_lengths, queries=MIXED), given(MIXED), MIXED),
    "row by row": (row_by_row, given(CHUNKS), CHUNKS),
    "row by row, by number": (partial(row_by_row, queries=MIXED, flat=True), given(MIXED), MIXED),
    "heads first": (heads_first, given(CHUNKS, torch.bfloat16, M, SIZE, D), CHUNKS),
    "steps, heads first": (
        partial(heads_first, queries=STEPS), given(STEPS, torch.float16, M, SIZE, D), STEPS,
    ),
}  # fmt: skip


@pytest.mark.rotates(27)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("level", LEVELS)
def test_they_are_one_call_over_the_pages(name: str, level: Level):
    form, inputs, queries = FORMS[name]
    t = tried(form, inputs, level)
    assert lowerings(t) == ["packed"]
    testing.means_what_it_says(t)
    attention = call(t, FIA)
    assert attention.kwargs["actual_seq_qlen"] == list(accumulate(queries))
    assert attention.kwargs["block_table"] is not None
    copies = (torch.ops.aten.index.Tensor, torch.ops.aten.cat.default)
    assert not [each for each in t.fused.graph.nodes if each.target in copies]


def last_rows(
    q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor, queries: Any = CHUNKS, first: bool = False
) -> Tensor:
    """Queries of a chunk stand behind rows of no meaning, one for each key before them, whose results are left out."""
    outs = []
    for number, (start, end) in enumerate(between(queries)):
        count, own = KEYS[number], end - start
        longer = torch.empty(N, count, D, dtype=q.dtype).fill_(0.5)
        kept = slice(0, own) if first else slice(count - own, count)
        longer[:, kept] = q[start:end].transpose(0, 1)
        k, v = (each[lookup[number].long()].view(-1, M, D)[:count].transpose(0, 1) for each in (keys, values))
        out = F.scaled_dot_product_attention(longer[None], k[None], v[None], is_causal=True, enable_gqa=True)
        outs.append(out[0].transpose(0, 1)[kept])
    return torch.cat(outs)


@pytest.mark.parametrize("queries", [CHUNKS, MIXED, (1, 1, 1)])
@pytest.mark.parametrize("level", LEVELS)
def test_the_last_rows_of_each_are_chunks_behind_their_keys(queries: tuple[int, ...], level: Level):
    t = tried(partial(last_rows, queries=queries), given(queries), level)
    assert lowerings(t) == ["packed"]
    testing.means_what_it_says(t)
    attention = call(t, FIA)
    assert attention.kwargs["actual_seq_qlen"] == list(accumulate(queries))
    assert attention.kwargs["block_table"] is not None


def test_the_first_rows_see_the_first_keys():
    t = tried(partial(last_rows, first=True), given(CHUNKS))
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    assert len(calls(t, FIA)) == len(CHUNKS)


def causal_from_the_first(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor) -> Tensor:
    """The chunk sees the first keys, as no other sequence does."""
    outs = []
    for number, (start, end) in enumerate(between(PROMPT)):
        k, v = (each[lookup[number].long()].view(-1, M, D)[: KEYS[number]] for each in (keys, values))
        if number:
            outs.append(weighed(q[start:end], k, v))
            continue
        k, v, own = (each.transpose(0, 1) for each in (k, v, q[start:end]))
        outs.append(F.scaled_dot_product_attention(own, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


def without_order(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor) -> Tensor:
    """A step that sees the last keys beside queries of a few keys, all of which they see."""
    outs = []
    for number, (start, end) in enumerate(between((4, 3, 1))):
        k, v = (each[lookup[number].long()].view(-1, M, D)[: (5, 7, 33)[number]] for each in (keys, values))
        k, v, own = (each.transpose(0, 1) for each in (k, v, q[start:end]))
        seen = torch.arange(k.shape[1]) > 33 - 10 if number == 2 else None
        outs.append(F.scaled_dot_product_attention(own, k, v, seen, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize(("form", "queries"), [(causal_from_the_first, PROMPT), (without_order, (4, 3, 1))])
def test_other_orders_are_no_part_of_them(form: Form, queries: tuple[int, ...]):
    t = tried(form, given(queries))
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    assert lowerings(t) != ["packed"]


def out_of_order(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor) -> Tensor:
    """Each sequence has the pages of the one before."""
    return reference(q, keys, values, lookup.roll(1, 0))


def other_pages(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor) -> Tensor:
    """The last sequence has keys where the others have values."""
    parts = []
    for number, (start, end) in enumerate(between(CHUNKS)):
        pages = lookup[number].long()
        both = (keys, values) if number < 2 else (values, keys)
        parts.append(weighed(q[start:end], *(each[pages].view(-1, M, D)[: KEYS[number]] for each in both)))
    return torch.cat(parts)


def shared_row(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor) -> Tensor:
    """All sequences have the pages of the first."""
    parts = []
    for start, end in between(CHUNKS):
        k, v = (each[lookup[0].long()].view(-1, M, D) for each in (keys, values))
        parts.append(weighed(q[start:end], k, v))
    return torch.cat(parts)


def one_page_each(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor) -> Tensor:
    """Each sequence has one page, the first one of the sequence behind it."""
    parts = []
    for number, (start, end) in enumerate(between(CHUNKS)):
        pages = lookup[(number + 1) % 3, :1]
        parts.append(weighed(q[start:end], *(each[pages].view(-1, M, D)[: SIZE - number] for each in (keys, values))))
    return torch.cat(parts)


JOINED: dict[str, Form] = {
    "rows in another order": out_of_order,
    "one row for all": shared_row,
    "a page of each": one_page_each,
}


@pytest.mark.parametrize("name", JOINED)
def test_rows_of_no_one_table_are_joined(name: str):
    t = tried(JOINED[name], given(CHUNKS))
    assert not t.outcome.failures
    testing.means_what_it_says(t)
    assert lowerings(t) == ["packed"]
    attention = call(t, FIA)
    assert attention.kwargs["block_table"].meta["val"].shape[0] == len(CHUNKS)


def test_pages_of_several_caches_are_gathered():
    t = tried(other_pages, given(CHUNKS))
    testing.means_what_it_says(t)
    assert lowerings(t)
    assert len(calls(t, FIA)) == 3 or all(each.kwargs["block_table"] is None for each in calls(t, FIA))


def test_pages_of_one_sequence_need_no_batch():
    """Packed tokens of one sequence: the dim of sequences comes behind the transpose."""
    t = tried(partial(reference, queries=(5,)), given((5,)))
    testing.means_what_it_says(t)
    attention = call(t, FIA)
    assert attention.kwargs["block_table"] is not None


@pytest.mark.rotates(3)
def test_lengths_may_be_read_from_tensors():
    """They are read before the loop, in lists that the rest of the call appends to."""

    def forward(q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor, ends: Tensor, counts: Tensor) -> Tensor:
        ends, counts = ends.tolist(), counts.tolist()
        outs: list[Tensor] = []
        for number, end in enumerate(ends[1:]):
            pages = lookup[number, : -(-counts[number] // SIZE)]
            k, v = (each[pages].view(-1, M, D)[: counts[number]] for each in (keys, values))
            outs.append(weighed(q[ends[number] : end] * D**-0.5, k, v))
        return torch.cat(outs)

    lengths = torch.tensor((0, *accumulate(MIXED))), torch.tensor(KEYS)
    torch.compiler.reset()
    report = fusion.explain(forward, *given(MIXED), *lengths, options={"target": "ascend910_93"})
    assert dict(report.ops) == {"npu::npu_fused_infer_attention_score_v2": 1}
    assert report.launches[1] == 1
    compiled = torch.compile(forward, backend="cann_fusion", options={"target": "ascend910_93", "lower": "eager"})
    exact = forward(*(each.double() for each in given(MIXED)[:3]), given(MIXED)[3], *lengths)
    fused, plain = (relative_error(each(*given(MIXED), *lengths), exact) for each in (compiled, forward))
    assert fused <= 1.5 * plain


def written(
    q: Tensor, keys: Tensor, values: Tensor, lookup: Tensor, k: Tensor, v: Tensor, slots: Tensor, first: bool = False
) -> Tensor:
    """Each sequence writes its row at a slot that is data: all of them `first`, or each before its own attention."""
    writes = [(keys, k), (values, v)]
    outs = []
    for number in range(len(KEYS) if first else 0):
        for cache, rows in writes:
            cache.view(-1, M, D)[slots[number : number + 1]] = rows[number : number + 1]
    for number, count in enumerate(KEYS):
        for cache, rows in () if first else writes:
            cache.view(-1, M, D)[slots[number : number + 1]] = rows[number : number + 1]
        pages = lookup[number, : -(-count // SIZE)].long()
        one = (each[pages].view(-1, M, D)[:count] for each in (keys, values))
        outs.append(weighed(q[number : number + 1] * D**-0.5, *one))
    return torch.cat(outs)


@pytest.mark.parametrize("first", [False, True])
def test_slots_written_between_the_attentions_may_be_rows_that_were_read(first: bool):
    """The second sequence writes into a page of the first one."""
    rows = [numbers(len(KEYS), M, D, seed=seed).bfloat16() for seed in (5, 6)]
    slots = torch.tensor([2 * SIZE + 3, 7 * SIZE + 1, 5 * SIZE])
    t = tried(partial(written, first=first), [*given(STEPS), *rows, slots])
    testing.means_what_it_says(t)
    assert len(calls(t)) == (1 if first else len(KEYS))
    reasons = [each for each in t.outcome.refusals if "written between the attentions" in each.reason]
    assert bool(reasons) != first
