"""What stands before latent attention as models and serving code write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fusion import Example
from tests.examples import caches
from tests.examples import latent_model as mla
from tests.examples.caches import Write, by_block, copied, in_nz, shapes
from tests.examples.inputs import Inputs
from tests.examples.latent_model import (
    LAYERS,
    B,
    Given,
    Rotate,
    Rows,
    Setting,
    changed,
    fresh,
    in_pages,
    listed,
    model,
)

S, T, C, DR, D = 3, 32, 32, 16, 16
ORDER = "the rotated lanes of a head do not follow"
Parts = tuple[Tensor, Tensor]
CACHES = (B, T, C), (B, T, DR)
PROMPT = Setting(S, CACHES, fixed=(), at=5, listed=T)
TOKEN = replace(PROMPT, queries=1)
FRESH = replace(PROMPT, shapes=(), listed=S)


def rope_multiplied(q: Tensor, cos: Tensor, sin: Tensor) -> Parts:
    """Both parts are multiplied by a number, the lanes of the rotated one put in order before."""
    nope, rope = q.split((D, DR), dim=-1)
    rope = (rope * 1.5).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    low, high = rope.chunk(2, dim=-1)
    cos, sin = (torch.cat((each[..., : DR // 2],) * 2, dim=-1) for each in (cos, sin))
    return nope * 1.5, rope * cos + torch.cat((-high, low), dim=-1) * sin


def in_two(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves rotated, by tables of all lanes."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def by_pairs(q: Tensor, cos: Tensor, sin: Tensor) -> Parts:
    """Pairs of the last lanes rotated, by tables of all lanes."""
    nope, rope = q.split((D, DR), dim=-1)
    return nope, rope * cos + torch.stack((-rope[..., 1::2], rope[..., ::2]), dim=-1).flatten(-2) * sin


def lanes(nope: slice, rope: slice) -> Rotate:
    """These lanes of the queries, some of which belong to both parts or to neither."""
    return lambda q, *table: (q[..., nope], mla.turned(q[..., rope], *table))


def packed(setting: Setting) -> Inputs:
    """Tokens without their sequences, of which each has one."""
    return changed(setting, **dict.fromkeys(("x", "cos", "sin"), lambda x: x[:, 0]))


ONE_SEQUENCE = changed(
    PROMPT, lambda x: x[:1], **dict.fromkeys(("x", "cos", "sin"), lambda x: x[0]), seen=lambda x: x[:1]
)


def stepped(nope: Tensor, rope: Tensor, rows: Rows, g: Given) -> Tensor:
    """A step of packed tokens that absorbs both projections, by einsum."""
    nope, rope = torch.cat([each.squeeze(2) for each in (nope, rope)], -1).split((D, DR), dim=-1)
    latent, k_rope = rows
    up, down = g.ukv.view(g.up.shape[0], -1, C).split((D, D), dim=1)
    query = torch.einsum("tnd,ndc->tnc", nope, up)
    scores = torch.einsum("tnc,tkc->tnk", query, latent) + torch.einsum("tnr,tkr->tnk", rope, k_rope)
    hidden = torch.arange(latent.shape[1]) >= g.seen[:, None, None]
    weights = (scores.float() * 0.3).masked_fill(hidden, -torch.inf).softmax(-1).to(g.x.dtype)
    return torch.einsum("tnc,nec->tne", torch.einsum("tnk,tkc->tnc", weights, latent), down).flatten(1)


def instead(examples: Iterable[Example], name: str = "") -> Iterator[Example]:
    """Examples under a common name; where a store is refused, rows are left to the model."""
    for each in examples:
        yield replace(each, name=f"{name}{each.name}", instead="Fresh" if each.refusal else "")


def in_row(
    name: str,
    setting: Inputs,
    write: Write = copied,
    rotate: Rotate = mla.rope_last,
    row: float = 1.0,
    refusal: str = "",
) -> Example:
    """Rows, the latent times a number, over listed keys; without caches, those of the queries."""
    store = fresh if isinstance(setting, Setting) and not setting.shapes else mla.in_rows(write)
    return Example(name, model(store, listed, rotate, mla.Factors(row=row)), setting, refusal)


def held(setting: Setting, *dims: tuple[int, ...], keys: int = T) -> Setting:
    """Caches of these dims before the lanes, of so many keys."""
    return replace(setting, shapes=tuple((*each, width) for each in dims for width in (C, DR)), listed=keys)


ROWS = (
    in_row("a prompt by index_copy", PROMPT),
    in_row("a token by index_copy", TOKEN),
    in_row("caches of one head", held(PROMPT, (B, 1, T)), caches.single),
    in_row("a length for each sequence", TOKEN, caches.by_sequence),
    in_row("queries and latents times a number", PROMPT, copied, rope_multiplied, 0.75),
    in_row("the same positions in all sequences", replace(FRESH, table=(1, S))),
    in_row("one position in a sequence", replace(FRESH, queries=B, listed=B, table=(B, 1))),
    in_row("no cache", FRESH),
    in_row("rows that the model writes to a slice", PROMPT, caches.sliced),
    in_row("rows joined", held(PROMPT, (B, 5), keys=5 + S), caches.joined),
    in_row("rotated lanes first", PROMPT, copied, lanes(slice(DR, None), slice(DR)), refusal=ORDER),
    in_row("lanes of both", PROMPT, copied, lanes(slice(D // 2, D + D // 2), slice(D, None)), refusal=ORDER),
    in_row(
        "rotated lanes early", replace(PROMPT, head=-DR // 2), copied, lanes(slice(D), slice(-DR, None)), refusal=ORDER
    ),
    in_row(
        "more lanes",
        replace(PROMPT, head=8),
        copied,
        lanes(slice(D), slice(D, D + DR)),
        refusal="a head has more lanes than [nope, rope]",
    ),
    in_row("a third part", replace(PROMPT, line=8), refusal="the latent and the rotated key are not all its lanes"),
    Example("packed tokens", model(mla.in_rows(caches.of_one_sequence), listed), ONE_SEQUENCE, "are packed"),
)
TURNED_ROWS = changed(PROMPT, caches.turned)
HALVES = replace(PROMPT, queries=4)
LEFT = (
    in_row("a negative factor", PROMPT, copied, rope_multiplied, -1.0, "it is multiplied by"),
    in_row("caches of two halves", held(HALVES, (B, 2, T), keys=2 * T), caches.two_halves, refusal="several heads"),
    in_row(
        "halves as sequences",
        held(HALVES, (2 * B, T), keys=2 * T),
        caches.half_sequences,
        refusal="they have another number of sequences than",
    ),
    in_row("caches that lie otherwise", TURNED_ROWS, lambda *of: copied(*of).contiguous(), refusal="is not contiguous"),
    in_row("an odd length", held(PROMPT, (B, 20), keys=20), refusal="positions, which no page"),
)
"""Rejects of which the model keeps the rows itself."""

PAGES = Setting(1, shapes(C, DR), fixed=())
NZ = replace(PAGES, shapes=shapes(C, DR, 16))
TWO = replace(PAGES, queries=2)
PAIRS = replace(TWO, shapes=shapes(C, DR, heads=(2,)))
TURNED = changed(PAGES, caches.turned)
PAGED = (
    in_pages("a token through a view", PAGES),
    in_pages("two tokens by index_copy", TWO, caches.index_copied),
    in_pages("pages of one head", replace(PAGES, shapes=shapes(C, DR, heads=(1,)))),
    in_pages("a token by block", PAGES, by_block),
    in_pages("packed tokens that absorb", packed(PAGES), attend=stepped),
    in_pages("packed tokens over expanded keys", packed(PAGES), by_block),
    in_pages("a token in lines", NZ, in_nz),
    in_pages("two tokens in lines of a head", replace(TWO, shapes=shapes(C, DR, 16, heads=(1,))), in_nz),
    in_pages("places of unknown range", PAGES, caches.anywhere, refusal="a place in a page is not proven to be below"),
    in_pages("two tokens at a slot", PAIRS, caches.two_in_a_row, refusal="its pages have several heads"),
    in_pages("short lines", replace(PAGES, shapes=shapes(C, DR, 8)), in_nz, refusal="read as lines of 8 lanes"),
    in_pages("pages that lie otherwise", TURNED, by_block, refusal="its pages are not contiguous"),
)


ORDERS = in_pages(
    "halves of keys, pairs of queries", PAGES, rotate=by_pairs, turn=in_two, refusal="rotated keys in half order"
)


def w8a8(setting: Setting, *layers: str) -> Setting:
    """These layers in W8A8, and all of them Parameters."""
    return replace(setting, int8=layers, fixed=mla.LAYERS_FIXED)


W8A8 = (
    in_row("a token, the heads quantised", w8a8(TOKEN, "uq")),
    in_row("a prompt, all quantised", w8a8(PROMPT, *LAYERS)),
    in_row("no cache, the heads quantised", w8a8(FRESH, "uq")),
    in_row("no cache, all quantised", w8a8(FRESH, *LAYERS)),
)
turned_first = partial(in_pages, tokens_first=True)
"""Tokens that are rotated before their heads."""
W8A8_PAGED = (
    turned_first("a token, the heads quantised", w8a8(PAGES, "uq")),
    turned_first("two tokens, all quantised", w8a8(TWO, *LAYERS), by_block),
    turned_first("lines of NZ", w8a8(NZ, *LAYERS), in_nz),
    turned_first("packed tokens, the heads quantised", packed(w8a8(PAGES, "uq"))),
    turned_first("packed tokens, all quantised", packed(w8a8(PAGES, *LAYERS))),
    turned_first("two at a slot", w8a8(PAIRS, *LAYERS), caches.two_in_a_row, refusal="have several"),
    turned_first("one layer of both, the heads quantised", w8a8(PAGES, "uq"), joint=True),
    turned_first(
        "unknown places", w8a8(PAGES, "uq"), caches.anywhere, refusal="a place in a page is not proven to be below"
    ),
)

TRIED = {
    "mla_prolog": (
        *ROWS,
        ORDERS,
        *instead(LEFT),
        *instead(PAGED, "pages: "),
        *instead(W8A8, "W8A8: "),
        *instead(W8A8_PAGED, "W8A8 pages: "),
    )
}
