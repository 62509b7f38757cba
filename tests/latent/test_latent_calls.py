"""What the lowerings of attention over a latent make of queries, keys and masks: numbers, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from fusion.language import Refused
from fusion.operators import ensure
from patterns.attention.calls import Call
from patterns.attention.masks.visibility import Dense, Structured
from patterns.attention.results import Output, OutputAndLse
from patterns.attention.sources import Rows
from patterns.attention.varlen.pages import Pages
from patterns.extras.latent_attention_atb import LatentAttentionAtb
from patterns.extras.latent_attention_atb_call import AnyPages
from patterns.latent.attention import attention_call as calls
from patterns.latent.attention.attention import LatentAttention, LatentMatch
from patterns.latent.attention.attention_call import Keys
from patterns.latent.attention.encodings import Floats, Int8, Int8ByHead

B, N, S, T, C, R, D, E, SIZE, SCALE = 2, 3, 20, 64, 32, 16, 8, 24, 16, 0.25
TABLE = torch.tensor([[4, 1, 0, 7], [2, 6, 5, 3]])
LENGTHS = torch.tensor([25, 40])


@pytest.fixture(autouse=True)
def operators() -> None:
    ensure()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def given(paged: bool, batch: int = B, queries: int = S) -> tuple[tuple[Tensor, Tensor], Any, list[Tensor]]:
    """Queries, where their keys lie, and a latent with its rotated lanes as rows."""
    q = numbers(batch, N, queries, C), numbers(batch, N, queries, R)
    pages = [numbers(B * T // SIZE, SIZE, width) for width in (C, R)]
    rows = [each[TABLE[:batch]].flatten(1, 2) for each in pages]
    return q, Pages(*rows, *pages, TABLE[:batch], SIZE, "BSND") if paged else Rows(*rows), rows


def plain(q: tuple[Tensor, Tensor], rows: list[Tensor], hidden: Tensor) -> Tensor:
    """The meaning, by a mask that is true where a key is hidden; a query without keys gives the mean."""
    rows = [each[:, None, : hidden.shape[-1]] for each in rows]
    scores = sum(x @ keys.mT for x, keys in zip(q, rows, strict=True)) * SCALE
    return scores.masked_fill(hidden, -1e30).softmax(-1) @ rows[0]


def last(queries: int, keys: int) -> Tensor:
    """Keys behind the own one of a query, the last query at the last key."""
    return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)[None, None]


def shown(queries: int, keys: int) -> Dense:
    hidden = torch.rand(B, 1, queries, keys, generator=torch.Generator().manual_seed(1)) > 0.5
    hidden[1, :, 0] = True
    return Dense(hidden, None, None, None, "dense", None, None, "mean")


NONE = Structured(mask_kind="none", window=None, kv_len=None, kv_lens=None, mask=None, levels=None, count=None)


@pytest.mark.parametrize("heads_first", [False, True], ids=["heads behind", "heads first"])
@pytest.mark.parametrize("paged", [False, True], ids=["rows", "pages"])
@pytest.mark.parametrize("first_rows", [None, T - 16], ids=["all", "the first rows"])
@pytest.mark.parametrize("kind", ["shown", "lengths", "last"])
def test_latent_and_rotated_lanes_apart(kind: str, first_rows: int | None, paged: bool, heads_first: bool):
    q, source, rows = given(paged)
    keys = first_rows or T
    of_lengths = torch.arange(keys) >= LENGTHS[:, None, None, None]
    seen, hidden = {
        "shown": (shown(S, keys), shown(S, keys).mask),
        "lengths": (replace(NONE, kv_lens=LENGTHS), of_lengths.expand(B, 1, S, keys)),
        "last": (replace(NONE, mask_kind="causal_lower_right"), last(S, keys)),
    }[kind]
    y, _ = calls.apart(q, Keys(source, seen, first_rows), Call(SCALE), heads_first)
    torch.testing.assert_close(y, plain(q, rows, hidden), rtol=1e-3, atol=1e-3)


def test_a_mask_of_fewer_keys_than_a_page_has_leaves_pages_whole(monkeypatch: pytest.MonkeyPatch):
    (q, source, rows), seen, told = given(True), shown(S, SIZE // 2), list[tuple[int, ...]]()
    operator = calls.calls.fused

    def fused(q: Tensor, k: Tensor, *rest: Any, **how: Any) -> Any:
        told.append(k.shape)
        return operator(q, k, *rest, **how)

    monkeypatch.setattr(calls.calls, "fused", fused)
    y, _ = calls.apart(q, Keys(source, seen, SIZE // 2), Call(SCALE))
    assert told == [source.first_pages.shape]
    torch.testing.assert_close(y, plain(q, rows, seen.mask), rtol=1e-3, atol=1e-3)


def test_lengths_are_told_of_keys_that_are_expanded():
    q, source, (latent, rope) = given(False, batch=1)
    up_key, up_value = numbers(N, D, C) / 4, numbers(N, C, E) / 4
    nope = numbers(1, N, S, D)
    keys = Keys(source, replace(NONE, kv_lens=LENGTHS[:1]), None)
    y, _ = calls.expanded((nope, q[1]), keys, (up_key, up_value), Call(SCALE))
    hidden = (torch.arange(T) >= LENGTHS[0]).expand(1, 1, S, T)
    expected = plain((nope @ up_key, q[1]), [latent, rope], hidden) @ up_value
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


def int8() -> Int8:
    query, rope, tokens = torch.ones(B, N, S, C, dtype=torch.int8), numbers(B, N, S, R), numbers(B, N, S, 1)
    return Int8(query, rope, None, 1.0, tokens, None, 1.0)


def test_what_is_not_read_apart_is_refused():
    q, pages, _ = given(True)
    rows = given(False)[1]
    with pytest.raises(Refused, match="requires contiguous ones"):
        calls.expanded(q, Keys(pages, NONE, None), q, Call(SCALE))
    with pytest.raises(Refused, match="the result has heads before queries"):
        calls.apart(q, Keys(rows, NONE, None), Call(SCALE, lse=True), heads_first=True)
    with pytest.raises(Refused, match="it has heads before queries, over an int8"):
        calls.apart(q, Keys(rows, NONE, None), Call(SCALE), heads_first=True, query_quant_mode=3)
    seen = replace(shown(S, T), fully_masked_row="zero")
    with pytest.raises(Refused, match="it is a tensor, and int8 keys are rows"):
        LatentAttention().apart(LatentMatch(int8(), rows, Output(()), seen, SCALE), "multiplied", 2)


ATB = LatentAttentionAtb()


def floats(queries: Any) -> Any:
    shaped = SimpleNamespace(shape=(B, N, queries, C))
    return Floats(absorbed=shaped, q_rope=shaped)


def any_pages(layout: str) -> Any:
    return AnyPages(first_pages=numbers(4, 2, 8, 16), second_pages=numbers(4, 2, 8, 16), layout=layout)


def test_few_queries_of_which_the_number_is_known_are_taken():
    ATB.guard(floats(4), any_pages("BSND"))
    for queries in (5, sympy.Symbol("s0", integer=True, positive=True)):
        with pytest.raises(Refused, match="a sequence has more than four"):
            ATB.guard(floats(queries), any_pages("BSND"))
    with pytest.raises(Refused, match="its pages are rows"):
        ATB.guard(Int8ByHead(query=floats(1).absorbed), any_pages("BSND"))


@pytest.mark.parametrize(
    ("encoding", "seen", "reason"),
    [
        (floats(2), NONE, "there is none"),
        (floats(2), shown(2, T), "gives the mean of all"),
        (
            Int8ByHead(query=floats(2).absorbed),
            replace(shown(2, T), fully_masked_row="zero"),
            "it is a tensor beside int8 queries",
        ),
    ],
)
def test_masks_that_the_operator_of_few_queries_does_not_read(encoding: Any, seen: Any, reason: str):
    with pytest.raises(Refused, match=reason):
        ATB.dense(encoding, any_pages("NZ"), Output(()), seen, SCALE, "multiplied")


def test_the_sums_of_scores_are_given_where_they_are_used():
    with pytest.raises(Refused, match="nothing reads it"):
        ATB.ring(floats(1), any_pages("NZ"), Output(()), NONE, SCALE, "multiplied")
    with pytest.raises(Refused, match="something reads it"):
        ATB.structured(floats(1), any_pages("NZ"), OutputAndLse(()), NONE, SCALE, "multiplied")


def test_lanes_are_joined_where_there_are_two_parts_that_the_operator_takes_not_apart():
    q, source, _ = given(paged=False)
    with pytest.raises(Refused, match="they have no rotated lanes"):
        calls.joined(q[:1], Keys(Rows(source.first, None), NONE, None), Call(SCALE))
    wide = tuple(numbers(B, N, 1, width) for width in calls.APART)
    with pytest.raises(Refused, match="they are 512 and 64"):
        calls.joined(wide, Keys(source, NONE, None), Call(SCALE))
