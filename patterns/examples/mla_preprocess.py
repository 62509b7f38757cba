"""What stands before latent attention over pages with all layers in whole numbers, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.caches import (
    BLOCKS,
    LENGTHS,
    SIZE,
    TABLE,
    Read,
    Write,
    anywhere,
    by_block,
    in_nz,
    index_copied,
    of_nz,
    two_in_a_row,
    viewed,
)
from patterns.examples.caches import of_pages as in_rows
from patterns.examples.inputs import Inputs, normal
from patterns.examples.latent_model import attended, multiplied
from patterns.examples.quantisation import int8_layer, quantised

B = 2
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Widths of hidden states, both latents, rotated lanes and other ones, values; heads, and rows of a page."""

    he: int = 64
    hcq: int = 96
    c: int = 32
    dr: int = 16
    d: int = 16
    e: int = 16
    n: int = 4
    size: int = SIZE


SIZES = Sizes()


def inputs(queries: int, heads: tuple[int, ...] = (), sizes: Sizes = SIZES) -> Inputs:
    """Hidden states, a gain, layers in whole numbers with their scales, two gains, W_ukv, tables, pages, and places.

    Places are the block table, lengths with the new tokens, and the slot of each.
    """
    he, hcq, c, dr = sizes.he, sizes.hcq, sizes.c, sizes.dr

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((hcq, he), (sizes.n * (sizes.d + dr), hcq), (c + dr, he))
        layers = [each for n, shape in enumerate(shapes) for each in int8_layer(20 + 2 * n, *shape)]
        gains = [(1 + normal(4 + n, width) / 8).to(dtype) for n, width in enumerate((he, hcq, c))]
        up = (normal(3, sizes.n * (sizes.d + sizes.e), c) / 8).to(dtype)
        fixed = [torch.nn.Parameter(each, requires_grad=False) for each in (gains[0], *layers, *gains[1:], up)]
        pages = (normal(9 + n, BLOCKS, sizes.size, *heads, width).to(dtype) for n, width in enumerate((c, dr)))
        angles = normal(6, B, queries, dr // 2).repeat(1, 1, 2)
        at = LENGTHS[:, None] - queries + torch.arange(queries)
        slots = (TABLE.gather(1, at // sizes.size) * sizes.size + at % sizes.size).flatten()
        turning = (angles.cos().to(dtype), angles.sin().to(dtype))
        return normal(8, B, queries, he).to(dtype), *fixed, *turning, *pages, TABLE.clone(), LENGTHS.clone(), slots

    return make


def lines(queries: int, *heads: int, line: int = 16, sizes: Sizes = SIZES) -> Inputs:
    """The same inputs with pages in lines."""
    plain = inputs(queries, sizes=sizes)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        *given, latents, ropes, table, lengths, slots = plain(dtype)
        latents, ropes = (each.view(BLOCKS, *heads, -1, sizes.size, line) for each in (latents, ropes))
        return *given, latents, ropes, table, lengths, slots

    return make


def norm(x: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    """RMSNorm in float32."""
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of lanes rotated, the first of each pair in the first half of the result."""
    return of_halves(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin)


def of_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves rotated."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]


def model(
    write: Write, rotate: Rotate = of_pairs, eps: float = EPS, heads: int = SIZES.n, read: Read = in_rows,
    normed: Callable[[Tensor, Tensor], Tensor] = norm,
) -> Callable[..., Tensor]:  # fmt: skip
    """A function that writes the rows of a token, or of several, and attends to the pages."""

    def forward(
        x: Tensor, gain: Tensor, dq: Tensor, dq_scale: Tensor, uq: Tensor, uq_scale: Tensor, dkv: Tensor,
        dkv_scale: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor, sin: Tensor, latents: Tensor,
        ropes: Tensor, table: Tensor, lengths: Tensor, slots: Tensor,
    ) -> Tensor:  # fmt: skip
        width, turning = gain_kv.shape[0], cos.shape[-1]
        tokens = quantised(norm(x, gain, eps))
        low = norm(multiplied(tokens, dq, dq_scale, x.dtype), gain_q)
        q = multiplied(quantised(low), uq, uq_scale, x.dtype).unflatten(-1, (heads, -1))
        nope, rope = q.transpose(1, 2).split((q.shape[-1] - turning, turning), dim=-1)
        q = torch.cat((nope, rotate(rope, cos.unsqueeze(1), sin.unsqueeze(1))), dim=-1)
        latent, rope = multiplied(tokens, dkv, dkv_scale, x.dtype).split((width, turning), dim=-1)
        for pages, rows in ((latents, normed(latent, gain_kv)), (ropes, rotate(rope, cos, sin))):
            write(pages, rows.flatten(0, 1), slots)
        latent, rope = (read(pages, table) for pages in (latents, ropes))
        return attended(q, latent, rope, ukv, lengths)

    return forward


def multiplied_norm(x: Tensor, gain: Tensor) -> Tensor:
    """A norm times a number."""
    return norm(x, gain) * 1.5


def turned_pages(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages that lie in memory as [Size, Block, ..]."""
    *given, latents, ropes, table, lengths, slots = inputs(1)(dtype)
    latents, ropes = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (latents, ropes))
    return *given, latents, ropes, table, lengths, slots


EXAMPLES = (
    Example("a token through a view", model(viewed), inputs(1)),
    Example("two tokens by index_copy, rotated by halves", model(index_copied, of_halves), inputs(2)),
    Example("pages of one head", model(viewed), inputs(1, heads=(1,))),
    Example("a token by block", model(by_block), inputs(1)),
    Example("a latent times a number", model(viewed, normed=multiplied_norm), inputs(1)),
    Example("a token in lines", model(in_nz, read=of_nz), lines(1)),
    Example("two tokens in lines of a head", model(in_nz, of_halves, read=of_nz), lines(2, 1)),
)
REJECTS = (
    Example("another epsilon", model(viewed, eps=1e-5), inputs(1), "the kernel of npu_mla_preprocess 1e-6"),
    Example("places of unknown range", model(anywhere), inputs(1), "not proven to lie in its page"),
    Example("two tokens at a slot", model(two_in_a_row), inputs(2, heads=(2,)), "hold several heads"),
    Example("pages that lie otherwise", model(by_block), turned_pages, "the pages are not contiguous"),
    Example("weights in short lines", model(viewed), inputs(1, sizes=Sizes(he=48)), "do not fill lines of 32"),
    Example("short lines", model(in_nz, read=of_nz), lines(1, line=8), "in lines of 8 numbers"),
)

TRIED = {"mla_preprocess": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
