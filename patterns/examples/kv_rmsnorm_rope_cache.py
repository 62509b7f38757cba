"""The latent line as models norm, rotate and cache it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, normal, under
from patterns.examples.mla_prolog import copied, half_sequences, lengths, norm, single, turned, two_halves

B, S, T, C, DR, BLOCKS, SIZE = 2, 3, 32, 32, 16, 3, 16


def line(
    *caches: tuple[int, ...], tokens: int = S, table: tuple[int, ...] = (), width: int = C + DR, index: Any = 5
) -> Inputs:
    """Lines [B, S, W], a gain, tables, positions or slots, and caches of these shapes."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        angles = normal(2, *(table or (B, tokens)), DR // 2)
        angles = torch.cat((angles, angles), dim=-1)
        given = normal(0, B, tokens, width), 1 + normal(1, C) / 8, angles.cos(), angles.sin()
        held = (normal(3 + seed, *shape) for seed, shape in enumerate(caches))
        return *(each.to(dtype) for each in given), torch.tensor(index), *(each.to(dtype) for each in held)

    return make


Joined = Callable[..., Any]


def model(join: Joined, first: int = 0) -> Callable[..., Any]:
    """A function that writes the lines from lane `first` on by `join(latent, rope, at, *caches)`."""

    def forward(kv: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, at: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        latent, rope = kv[..., first : first + C + DR].split((C, DR), dim=-1)
        return tuple(each * 2 for each in join(norm(latent, gain), turned(rope, cos, sin), at, *caches))

    return forward


def scaled(latent: Tensor, rope: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    """The latent alone is multiplied."""
    return copied(latent * 1.5, rope, *rest)


def viewed(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """To slots of all pages."""
    latents.view(-1, 1, C)[at] = latent.reshape(-1, 1, C)
    ropes.view(-1, 1, DR)[at] = rope.reshape(-1, 1, DR)
    return latents, ropes


def by_block(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """To a block and a place in it."""
    for pages, rows in ((latents, latent), (ropes, rope)):
        pages[at // SIZE, at % SIZE] = rows.reshape(-1, 1, rows.shape[-1])
    return latents, ropes


def anywhere(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """To a block and a place that may lie outside it."""
    for pages, rows in ((latents, latent), (ropes, rope)):
        pages[at // SIZE, at] = rows.reshape(-1, 1, rows.shape[-1])
    return latents, ropes


def flat(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """To slots of all pages, which have no dim of heads."""
    latents.flatten(0, 1).index_copy_(0, at, latent.flatten(0, 1))
    ropes.flatten(0, 1).index_copy_(0, at, rope.flatten(0, 1))
    return latents, ropes


def kept(latent: Tensor, rope: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """The rows beside the pages."""
    return latent, rope, *viewed(latent, rope, *rest)


def kept_in_sequence(latent: Tensor, rope: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """The rows beside contiguous caches."""
    return latent, rope, *copied(latent, rope, *rest)


LINE = 16


def lined(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """To pages [Block, A, Size, L] that hold a row in lines."""
    for pages, rows in ((latents, latent), (ropes, rope)):
        pages[at // SIZE, :, at % SIZE] = rows.reshape(at.shape[0], -1, pages.shape[-1])
    return latents, ropes


def lined_of_a_head(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """The same of pages [Block, 1, A, Size, L]."""
    for pages, rows in ((latents, latent), (ropes, rope)):
        pages[at // SIZE, :, :, at % SIZE] = rows.reshape(at.shape[0], 1, -1, LINE)
    return latents, ropes


def kept_lines(latent: Tensor, rope: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    """The rows beside the pages in lines."""
    return latent, rope, *lined(latent, rope, *rest)


def lines(line: int = LINE, *heads: int) -> tuple[tuple[int, ...], ...]:
    """Pages of both caches in lines."""
    return tuple((BLOCKS, *heads, width // line, SIZE, line) for width in (C, DR))


CACHES = (B, T, C), (B, T, DR)
PAGES = (BLOCKS, SIZE, 1, C), (BLOCKS, SIZE, 1, DR)
SLOTS = (3, 40, 0, 17, 30, 2)


def turned_pages(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages in lines that lie in memory as whole rows."""
    *given, latents, ropes = line(*lines(), index=SLOTS)(dtype)
    return *given, *(each.transpose(1, 2).contiguous().transpose(1, 2) for each in (latents, ropes))


def one_sequence(*heads: int) -> Inputs:
    """One sequence whose caches [T, .., D] have no dim for it."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        kv, gain, cos, sin, at, *caches = line(*CACHES)(dtype)
        return kv[:1], gain, cos[:1], sin[:1], at, *(each[0].unflatten(0, (T, *heads)) for each in caches)

    return make


def at_rows(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the only sequence at consecutive positions of [T, .., D]."""
    places = torch.arange(latent.shape[1]) + at.clamp(min=0)
    for cache, rows in ((latents, latent), (ropes, rope)):
        cache.index_copy_(0, places, rows.reshape(-1, *cache.shape[1:]))
    return latents, ropes


EXAMPLES = (
    Example("a prompt", model(copied), line(*CACHES)),
    Example("a token", model(copied), line(*CACHES, tokens=1)),
    Example("the same angles for all sequences", model(copied), line(*CACHES, table=(1, S))),
    Example("caches of one head", model(single), line((B, 1, T, C), (B, 1, T, DR))),
    Example("one sequence without a dim for it", model(at_rows), one_sequence()),
    Example("one sequence and a head", model(at_rows), one_sequence(1)),
    Example("any number of places", model(copied), line((B, 20, C), (B, 20, DR))),
    Example("a position for each sequence", model(lengths), line(*CACHES, tokens=1)),
    Example("a latent times a number", model(scaled), line(*CACHES)),
    Example("behind other lanes", model(copied, 24), line(*CACHES, width=24 + C + DR + 8)),
    Example("more sequences than tokens", model(lengths), line((B + 1, T, C), (B + 1, T, DR), tokens=1)),
    Example("pages", model(viewed), line(*PAGES, index=SLOTS)),
    Example("pages by a block and a place", model(by_block), line(*PAGES, index=SLOTS)),
    Example("pages without heads", model(flat), line((BLOCKS, SIZE, C), (BLOCKS, SIZE, DR), index=SLOTS)),
    Example("pages in lines", model(lined), line(*lines(), index=SLOTS)),
    Example("pages of one head in lines", model(lined_of_a_head), line(*lines(LINE, 1), index=SLOTS)),
    Example("slots counted from the end", model(viewed), line(*PAGES, tokens=1, index=(-1, 5))),
)
ROW_EXAMPLES = (
    Example("consecutive positions", model(kept_in_sequence), line(*CACHES)),
    Example("a prompt", model(kept), line(*PAGES, index=SLOTS)),
    Example("a token", model(kept), line(*PAGES, tokens=1, index=(7, 33))),
    Example("pages in lines", model(kept_lines), line(*lines(), index=SLOTS)),
)


def turned_caches(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Caches that lie in memory as [T, B, ..]."""
    *given, latents, ropes = line((T, B, C), (T, B, DR))(dtype)
    return *given, latents.transpose(0, 1), ropes.transpose(0, 1)


def packed(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tokens of the first sequence alone, without a dim for it."""
    kv, gain, cos, sin, at, latents, ropes = line(*CACHES)(dtype)
    return kv[0], gain, cos[0], sin[0], at, latents[:1], ropes[:1]


def unpacked(latent: Tensor, rope: Tensor, at: Tensor, *caches: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, ..] of one sequence."""
    return copied(latent.unsqueeze(0), rope.unsqueeze(0), at, *caches)


REJECTS = (
    Example("packed tokens", model(unpacked), packed, "are packed"),
    Example(
        "caches of two halves",
        model(two_halves),
        line((B, 2, T, C), (B, 2, T, DR), tokens=4),
        "several heads",
    ),
    Example(
        "halves as sequences",
        model(half_sequences),
        line((2 * B, T, C), (2 * B, T, DR), tokens=4),
        "other sequences than",
    ),
    Example("a place beyond its page", model(anywhere), line(*PAGES, index=(3, 4, 0, 7, 9, 2)), "not proven to lie in"),
    Example("short lines", model(lined), line(*lines(8), index=SLOTS), "in lines of 8 numbers"),
    Example("caches that lie otherwise", model(copied), turned_caches, "is not contiguous"),
)
ROW_REJECTS = (Example("lines that lie otherwise", model(kept_lines), turned_pages, "the pages are not contiguous"),)

TRIED = {"kv_rmsnorm_rope_cache": (*EXAMPLES, *REJECTS, *under("with its rows", (*ROW_EXAMPLES, *ROW_REJECTS)))}
"""Rule -> its examples and rejects."""
