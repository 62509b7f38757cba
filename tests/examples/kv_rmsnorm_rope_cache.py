"""The latent row as models norm, rotate and cache it, in floats and int8, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fusion import Example
from tests.examples import caches
from tests.examples.caches import Write, by_block, copied, in_nz, shapes, viewed
from tests.examples.inputs import Inputs, under
from tests.examples.latent_model import Setting, changed, norm, taken, times, turned
from tests.examples.mla_prolog_int8 import Quantise, by_inverse, by_number, divided, narrow

B, S, T, SIZE = 2, 3, 32, 16
SLOTS = (3, 40, 0, 17, 30, 2)
pages = partial(shapes, size=SIZE, blocks=3)


def rows(*lead: int) -> tuple[tuple[int, ...], ...]:
    """Caches of whole rows."""
    return (*lead, 32), (*lead, 16)


CACHES = Setting(S, rows(B, T), fixed=("latent_scale", "rope_scale"), he=48, at=5)
"""The projected rows are what stands for hidden states here."""
TOKEN, FOUR = (replace(CACHES, queries=queries) for queries in (1, 4))
PAGED = replace(CACHES, shapes=pages(32, 16, heads=(1,)), at=SLOTS)
NZ = replace(PAGED, shapes=pages(32, 16, 16))
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


def cut(part: slice | int, of_cache: Callable[[Tensor], Tensor]) -> Inputs:
    """A part of the sequences, and what `of_cache` gives of both caches."""
    return changed(CACHES, of_cache, **dict.fromkeys(("x", "cos", "sin"), lambda x: x[part]))


def one_sequence(*heads: int) -> Inputs:
    """One sequence whose caches [T, .., D] have no dim for it."""
    return cut(slice(1), lambda cache: cache[0].unflatten(0, (T, *heads)))


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

    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        g, held = taken(tensors)
        c, dr = g.gain_kv.shape[-1], g.cos.shape[-1]
        latent, rope = g.x[..., first : first + c + dr].split((c, dr), dim=-1)
        new = norm(latent, g.gain_kv), turned(rope, g.cos, g.sin)
        pairs = zip(held, change(*new, g.latent_scale, g.rope_scale), strict=True)
        views = [(write(cache, rows, g.slots), cache) for cache, rows in pairs]
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
    written("caches of one head", replace(CACHES, shapes=rows(B, 1, T)), caches.single),
    written("one sequence without a dim for it", one_sequence(), at_rows),
    written("one sequence and a head", one_sequence(1), at_rows),
    written("any number of places", replace(CACHES, shapes=rows(B, 20))),
    written("a position for each sequence", TOKEN, caches.by_sequence),
    written("a latent times a number", CACHES, change=lambda latent, rope, *by: (latent * 1.5, rope)),
    written("behind other lanes", replace(CACHES, he=24 + 48 + 8), first=24),
    written("more sequences than tokens", replace(TOKEN, shapes=rows(B + 1, T)), caches.by_sequence),
    written("pages", PAGED, viewed),
    written("pages by a block and a place", PAGED, by_block),
    written("pages without heads", replace(PAGED, shapes=pages(32, 16)), caches.index_copied),
    written("pages in lines", NZ, in_nz),
    written("pages of one head in lines", replace(NZ, shapes=pages(32, 16, 16, heads=(1,))), in_nz),
    written("slots counted from the end", replace(PAGED, queries=1, at=(-1, 5)), viewed),
    written("packed tokens", cut(0, lambda cache: cache[:1]), caches.of_one_sequence, "are packed"),
    written("caches of two halves", replace(FOUR, shapes=rows(B, 2, T)), caches.two_halves, "several heads"),
    written(
        "halves as sequences",
        replace(FOUR, shapes=rows(2 * B, T)),
        caches.half_sequences,
        "they have another number of sequences than",
    ),
    written(
        "a place beyond its page",
        replace(PAGED, at=(3, 4, 0, 7, 9, 2)),
        anywhere,
        "a place in a page is not proven to be below",
    ),
    written("short lines", replace(NZ, shapes=pages(32, 16, 8)), in_nz, "read as lines of 8 lanes"),
    written("caches that lie otherwise", changed(CACHES, caches.turned), copied, "is not contiguous"),
)
TURNED = changed(NZ, partial(caches.turned, dims=(1, 2)))
WITH_ROWS = (
    written("consecutive positions", CACHES, kept=True),
    written("a prompt", PAGED, viewed, kept=True),
    written("a token", replace(PAGED, queries=1, at=(7, 33)), viewed, kept=True),
    written("pages in lines", NZ, in_nz, kept=True),
    written("lines that lie otherwise", TURNED, in_nz, "its pages are not contiguous", kept=True),
)


def whole_keys(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Keys in whole rows beside a latent in NZ."""
    write = viewed if pages.dim() == 3 else in_nz
    write(pages, rows, slots)


C, DR = 64, 32
BOTH = replace(PAGED, shapes=pages(C, DR), he=C + DR, c=C, dr=DR, int8_caches=(True, True))
LATENT = replace(BOTH, int8_caches=(True, False))
LATENT_NZ = replace(LATENT, shapes=pages(C, DR, 32, 16))
LATENT_ALONE = int8(keys=False)
HEADS = replace(BOTH, shapes=pages(C, DR, heads=(1,)))
SHORT = replace(BOTH, shapes=pages(C, DR, 16))
MIXED = replace(LATENT, shapes=(LATENT_NZ.shapes[0], LATENT.shapes[1]))
INT8 = (
    written("pages", BOTH, viewed, change=int8()),
    written("pages of one head, times the inverse", HEADS, by_block, change=int8(by_inverse)),
    written("lines, a latent times a number", replace(BOTH, shapes=pages(C, DR, 32)), in_nz, change=int8(factor=1.5)),
    written("a scale that is a number", BOTH, by_block, change=int8(by_number)),
    written("the latent alone by one scale", replace(LATENT, one_scale=True), viewed, change=LATENT_ALONE),
    written("both, and the rows", BOTH, viewed, change=int8(), kept=True),
    written("the latent alone, and the rows", LATENT, viewed, change=LATENT_ALONE, kept=True),
    written("the latent alone in lines", LATENT_NZ, in_nz, change=LATENT_ALONE),
    written("other bounds", BOTH, viewed, "clamped to -127 and 127", int8(narrow)),
    written(
        "short lines", SHORT, in_nz, "lines of 16 lanes; npu_kv_rmsnorm_rope_cache_v2 requires lines of 32", int8()
    ),
    written("lines beside whole rows", MIXED, whole_keys, "one of both is in NZ, the other in rows", LATENT_ALONE),
)

TRIED = {"kv_rmsnorm_rope_cache": (*EXAMPLES, *under("with its rows", WITH_ROWS), *under("int8", INT8))}
