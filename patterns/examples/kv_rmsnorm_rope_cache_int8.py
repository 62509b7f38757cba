"""The latent line as models norm, rotate, quantise and cache it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, normal, under
from patterns.examples.mla_prolog import norm, tables, turned
from patterns.examples.mla_prolog_channels import Store, Write, by_inverse, by_number, divided, narrow
from patterns.examples.quantisation import scales
from patterns.examples.quantisation import weights as whole_numbers

B, S, C, DR, BLOCKS, SIZE = 2, 3, 64, 32, 3, 16
SLOTS = (3, 40, 0, 17, 30, 2)


def inputs(*lines: int, heads: tuple[int, ...] = (), whole_keys: bool = True, of_all: bool = False) -> Inputs:
    """Lines [B, S, C + Dr], a gain, tables, slots, both scales, and pages of both caches, whole or in lines."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = normal(0, B, S, C + DR), 1 + normal(1, C) / 8, *tables((B, S), DR)
        of_latent, of_rope = (scales(30 + width, 1 if of_all else width) * 4 for width in (C, DR))
        shapes = [(SIZE, *heads, width) for width in (C, DR)]
        if lines:
            shapes = [(width // line, SIZE, line) for width, line in zip((C, DR), lines, strict=True)]
        latents, keys = (whole_numbers(9 + n, BLOCKS, *shape) for n, shape in enumerate(shapes))
        keys = keys if whole_keys else normal(5, *keys.shape).to(dtype)
        parameters = (torch.nn.Parameter(each, requires_grad=False) for each in (of_latent, of_rope))
        return *(each.to(dtype) for each in given), torch.tensor(SLOTS), *parameters, latents, keys

    return make


def model(
    write: Write, store: Store = divided, whole_keys: bool = True, factor: float = 1.0, kept: bool = False
) -> Callable[..., Any]:
    """A function that writes lines, the latent times a factor, and reads what the caches hold then.

    Where they are `kept`, it gives the rows as they were before they are quantised as well.
    """

    def forward(
        kv: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, of_latent: Tensor, of_rope: Tensor,
        latents: Tensor, keys: Tensor,
    ) -> Any:  # fmt: skip
        latent, rope = kv.split((C, DR), dim=-1)
        latent, rope = norm(latent, gain) * factor, turned(rope, cos, sin)
        stored = store(latent, of_latent), store(rope, of_rope) if whole_keys else rope
        for cache, rows in zip((latents, keys), stored, strict=True):
            write(cache, rows.flatten(0, 1), slots)
        total = latents.float().sum() + keys.float().sum()
        return (total, latent * 2, rope * 2) if kept else total

    return forward


def viewed(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows of all pages by their number."""
    pages.view(-1, *pages.shape[2:])[slots] = rows.view(-1, *pages.shape[2:])


def by_block(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A block and a place in it."""
    pages[slots // SIZE, slots % SIZE] = rows.view(-1, *pages.shape[2:])


def in_lines(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A place in every line of a block."""
    pages[slots // SIZE, :, slots % SIZE] = rows.unflatten(-1, (-1, pages.shape[-1]))


def keys_whole(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Keys in whole rows beside a latent in lines."""
    write = viewed if pages.dim() == 3 else in_lines
    write(pages, rows, slots)


def beside_lines(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages of latents in lines, and of keys in whole rows."""
    *given, keys = inputs(32, 16, whole_keys=False)(dtype)
    return *given, keys.transpose(1, 2).reshape(BLOCKS, SIZE, DR)


EXAMPLES = (
    Example("pages", model(viewed), inputs()),
    Example("pages of one head, times the inverse", model(by_block, by_inverse), inputs(heads=(1,))),
    Example("lines, a latent times a number", model(in_lines, factor=1.5), inputs(32, 32)),
    Example("a scale that is a number", model(by_block, by_number), inputs()),
    Example("the latent alone by one scale", model(viewed, whole_keys=False), inputs(whole_keys=False, of_all=True)),
    Example("both, and the rows", model(viewed, kept=True), inputs()),
    Example("the latent alone, and the rows", model(viewed, whole_keys=False, kept=True), inputs(whole_keys=False)),
    Example("the latent alone in lines", model(in_lines, whole_keys=False), inputs(32, 16, whole_keys=False)),
)
REJECTS = (
    Example("other bounds", model(viewed, narrow), inputs(), "bounded by -127 and 127"),
    Example("short lines", model(in_lines), inputs(16, 16), "in lines of 16 numbers, not of 32"),
    Example("lines beside whole rows", model(keys_whole, whole_keys=False), beside_lines, "the other whole ones"),
)

TRIED = {"kv_rmsnorm_rope_cache": under("int8", (*EXAMPLES, *REJECTS))}
"""Rule -> its examples and rejects."""
