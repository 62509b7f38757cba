"""The latent row as models norm, rotate and cache it, in floats and int8, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from patterns.examples import caches
from patterns.examples.caches import Write, by_block, copied, in_nz, viewed
from patterns.examples.inputs import Inputs, normal, under
from patterns.examples.latent_model import norm, tables, times, turned
from patterns.examples.mla_prolog_int8 import Quantise, by_inverse, by_number, divided, narrow
from patterns.examples.quantisation import scales, weights

B, S, T, BLOCKS, SIZE = 2, 3, 32, 3, 16
SLOTS = (3, 40, 0, 17, 30, 2)
PAGES = BLOCKS, SIZE
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LatentRows:
    """Makes rows [B, S, W], a gain, tables, positions or slots, both scales, and caches of these shapes."""

    shapes: Shapes
    index: Any = 5
    tokens: int = S
    c: int = 32
    dr: int = 16
    width: int = 0
    table: tuple[int, ...] = ()
    int8: tuple[bool, ...] = (False, False)
    one_scale: bool = False

    def __call__(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Fresh inputs."""
        x, gain = normal(0, B, self.tokens, self.width or self.c + self.dr), 1 + normal(1, self.c) / 8
        given = x, gain, *tables(self.table or (B, self.tokens), self.dr)
        by = (scales(30 + width, 1 if self.one_scale else width) * 4 for width in (self.c, self.dr))
        pairs = enumerate(zip(self.shapes, self.int8, strict=True), 3)
        held = (weights(6 + n, *shape) if int8 else normal(n, *shape).to(dtype) for n, (shape, int8) in pairs)
        parameters = (torch.nn.Parameter(each, requires_grad=False) for each in by)
        return *(each.to(dtype) for each in given), torch.tensor(self.index), *parameters, *held


def rows(*lead: int, c: int = 32, dr: int = 16) -> Shapes:
    """Caches of whole rows."""
    return (*lead, c), (*lead, dr)


def nz(*lanes: int, heads: tuple[int, ...] = (), c: int = 32, dr: int = 16) -> Shapes:
    """NZ pages with so many lanes in the blocks of each cache."""
    return tuple((BLOCKS, *heads, x // each, SIZE, each) for x, each in zip((c, dr), lanes * 2, strict=False))


CACHES = LatentRows(rows(B, T))
TOKEN = replace(CACHES, tokens=1)
PAGED = LatentRows(rows(*PAGES, 1), SLOTS)
NZ = LatentRows(nz(16), SLOTS)


Change = Callable[..., tuple[Tensor, Tensor]]


def int8(quantise: Quantise = divided, factor: float = 1.0, keys: bool = True) -> Change:
    """The latent times a factor, and the keys, in int8."""
    return lambda latent, rope, *by: (quantise(times(latent, factor), by[0]), quantise(rope, by[1]) if keys else rope)


def anywhere(pages: Tensor, rows: Tensor, at: Tensor) -> None:
    """A block and a place that may lie outside it."""
    pages[at // SIZE, at] = rows.reshape(-1, 1, rows.shape[-1])


def at_rows(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Consecutive positions of [T, .., D], which holds one sequence."""
    return cache.index_copy_(0, caches.run(rows.shape[1], at), rows.reshape(-1, *cache.shape[1:]))


def one_sequence(*heads: int) -> Inputs:
    """One sequence whose caches [T, .., D] have no dim for it."""
    return lambda dtype: _first(CACHES(dtype), slice(1), lambda cache: cache[0].unflatten(0, (T, *heads)))


def packed(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tokens of the first sequence alone, without a dim for it."""
    return _first(CACHES(dtype), 0, lambda cache: cache[:1])


def _first(given: tuple[Tensor, ...], part: Any, cut: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    kv, gain, cos, sin, *rest, latents, ropes = given
    return kv[part], gain, cos[part], sin[part], *rest, cut(latents), cut(ropes)


def turned_caches(rows: LatentRows, *dims: int) -> Inputs:
    """Caches two dims of which lie in memory in the other order."""
    return lambda dtype: (*rows(dtype)[:-2], *(caches.turned(each, dims) for each in rows(dtype)[-2:]))


def written(
    name: str,
    inputs: Inputs,
    write: Write = copied,
    refusal: str = "",
    change: Change = lambda latent, rope, *by: (latent, rope),
    first: int = 0,
    kept: bool = False,
) -> Example:
    """Writes rows that stand from lane `first` on, changed; where they are `kept`, it gives them beside the caches."""

    def forward(kv: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, at: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        c, dr = gain.shape[-1], cos.shape[-1]
        latent, rope = kv[..., first : first + c + dr].split((c, dr), dim=-1)
        new = norm(latent, gain), turned(rope, cos, sin)
        pairs = zip(rest[2:], change(*new, *rest[:2]), strict=True)
        views = [(write(cache, rows, at), cache) for cache, rows in pairs]
        held = tuple(cache if view is None else view for view, cache in views)
        before = tuple(each * 2 for each in new) if kept else ()
        if held[0].dtype == torch.int8:
            return *before, held[0].float().sum() + held[1].float().sum()
        return *before, *(each * 2 for each in held)

    return Example(name, forward, inputs, refusal)


EXAMPLES = (
    written("a prompt", CACHES),
    written("a token", TOKEN),
    written("the same angles for all sequences", replace(CACHES, table=(1, S))),
    written("caches of one head", LatentRows(rows(B, 1, T)), caches.single),
    written("one sequence without a dim for it", one_sequence(), at_rows),
    written("one sequence and a head", one_sequence(1), at_rows),
    written("any number of places", LatentRows(rows(B, 20))),
    written("a position for each sequence", TOKEN, caches.by_sequence),
    written("a latent times a number", CACHES, change=lambda latent, rope, *by: (latent * 1.5, rope)),
    written("behind other lanes", replace(CACHES, width=24 + 48 + 8), first=24),
    written("more sequences than tokens", replace(TOKEN, shapes=rows(B + 1, T)), caches.by_sequence),
    written("pages", PAGED, viewed),
    written("pages by a block and a place", PAGED, by_block),
    written("pages without heads", replace(PAGED, shapes=rows(*PAGES)), caches.index_copied),
    written("pages in lines", NZ, in_nz),
    written("pages of one head in lines", replace(NZ, shapes=nz(16, heads=(1,))), in_nz),
    written("slots counted from the end", replace(PAGED, tokens=1, index=(-1, 5)), viewed),
    written("packed tokens", packed, caches.of_one_sequence, "are packed"),
    written("caches of two halves", LatentRows(rows(B, 2, T), tokens=4), caches.two_halves, "several heads"),
    written("halves as sequences", LatentRows(rows(2 * B, T), tokens=4), caches.half_sequences, "other sequences than"),
    written("a place beyond its page", replace(PAGED, index=(3, 4, 0, 7, 9, 2)), anywhere, "not proven to lie in"),
    written("short lines", replace(NZ, shapes=nz(8)), in_nz, "in lines of 8 numbers"),
    written("caches that lie otherwise", turned_caches(CACHES, 0, 1), copied, "is not contiguous"),
)
WITH_ROWS = (
    written("consecutive positions", CACHES, kept=True),
    written("a prompt", PAGED, viewed, kept=True),
    written("a token", replace(PAGED, tokens=1, index=(7, 33)), viewed, kept=True),
    written("pages in lines", NZ, in_nz, kept=True),
    written("lines that lie otherwise", turned_caches(NZ, 1, 2), in_nz, "the pages are not contiguous", kept=True),
)


def whole_keys(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Keys in whole rows beside a latent in NZ."""
    write = viewed if pages.dim() == 3 else in_nz
    write(pages, rows, slots)


C, DR = 64, 32
BOTH = LatentRows(rows(*PAGES, c=C, dr=DR), SLOTS, c=C, dr=DR, int8=(True, True))
LATENT = replace(BOTH, int8=(True, False))
LATENT_NZ = replace(LATENT, shapes=nz(32, 16, c=C, dr=DR))
LATENT_ALONE = int8(keys=False)
INT8 = (
    written("pages", BOTH, viewed, change=int8()),
    written(
        "pages of one head, times the inverse",
        replace(BOTH, shapes=rows(*PAGES, 1, c=C, dr=DR)),
        by_block,
        change=int8(by_inverse),
    ),
    written("lines, a latent times a number", replace(BOTH, shapes=nz(32, c=C, dr=DR)), in_nz, change=int8(factor=1.5)),
    written("a scale that is a number", BOTH, by_block, change=int8(by_number)),
    written("the latent alone by one scale", replace(LATENT, one_scale=True), viewed, change=LATENT_ALONE),
    written("both, and the rows", BOTH, viewed, change=int8(), kept=True),
    written("the latent alone, and the rows", LATENT, viewed, change=LATENT_ALONE, kept=True),
    written("the latent alone in lines", LATENT_NZ, in_nz, change=LATENT_ALONE),
    written("other bounds", BOTH, viewed, "bounded by -127 and 127", int8(narrow)),
    written(
        "short lines", replace(BOTH, shapes=nz(16, c=C, dr=DR)), in_nz, "in lines of 16 numbers, not of 32", int8()
    ),
    written(
        "lines beside whole rows",
        replace(LATENT, shapes=(LATENT_NZ.shapes[0], LATENT.shapes[1])),
        whole_keys,
        "the other whole ones",
        LATENT_ALONE,
    ),
)

TRIED = {"kv_rmsnorm_rope_cache": (*EXAMPLES, *under("with its rows", WITH_ROWS), *under("int8", INT8))}
