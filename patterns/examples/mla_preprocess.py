"""What stands before latent attention over pages with all layers in whole numbers, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.mla_prolog import tables
from patterns.examples.mla_prolog_paged import (
    BLOCKS,
    LENGTHS,
    SIZE,
    TABLE,
    Write,
    anywhere,
    by_block,
    copied,
    of_a_head,
    two_in_a_row,
    viewed,
)  # fmt: skip
from patterns.examples.mla_prolog_quantised import multiplied, whole
from patterns.examples.quantisation import quantised

B, N, HE, HCQ, C, D, DR, E = 2, 4, 64, 96, 32, 16, 16, 16
EPS = 1e-6


def inputs(queries: int, heads: tuple[int, ...] = (), he: int = HE) -> Inputs:
    """Hidden states, a gain, layers in whole numbers with their scales, two gains, W_ukv, tables, pages, and places.

    Places are the block table, lengths with the new tokens, and the slot of each.
    """

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        sizes = ((HCQ, he), (N * (D + DR), HCQ), (C + DR, he))
        layers = [each for n, size in enumerate(sizes) for each in whole(20 + 2 * n, *size)]
        gains = [(1 + normal(4 + n, width) / 8).to(dtype) for n, width in enumerate((he, HCQ, C))]
        up = (normal(3, N * (D + E), C) / 8).to(dtype)
        fixed = [torch.nn.Parameter(each, requires_grad=False) for each in (gains[0], *layers, *gains[1:], up)]
        pages = (normal(9 + n, BLOCKS, SIZE, *heads, width).to(dtype) for n, width in enumerate((C, DR)))
        angles = [each.to(dtype) for each in tables((B, queries))]
        at = LENGTHS[:, None] - queries + torch.arange(queries)
        slots = (TABLE.gather(1, at // SIZE) * SIZE + at % SIZE).flatten()
        x = normal(8, B, queries, he).to(dtype)
        return x, *fixed, *angles, *pages, TABLE.clone(), LENGTHS.clone(), slots

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


def model(write: Write, rotate: Rotate = of_pairs, eps: float = EPS) -> Callable[..., Tensor]:
    """A function that writes the rows of a token, or of several, and attends to the pages."""

    def forward(
        x: Tensor, gain: Tensor, dq: Tensor, dq_scale: Tensor, uq: Tensor, uq_scale: Tensor, dkv: Tensor,
        dkv_scale: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor, sin: Tensor, latents: Tensor,
        ropes: Tensor, table: Tensor, lengths: Tensor, slots: Tensor,
    ) -> Tensor:  # fmt: skip
        queries, width, turning = x.shape[1], latents.shape[-1], ropes.shape[-1]
        tokens = quantised(norm(x, gain, eps))
        low = norm(multiplied(tokens, dq, dq_scale, x.dtype), gain_q)
        q = multiplied(quantised(low), uq, uq_scale, x.dtype).unflatten(-1, (N, -1))
        nope, rope = q.transpose(1, 2).split((q.shape[-1] - turning, turning), dim=-1)
        q = torch.cat((nope, rotate(rope, cos.unsqueeze(1), sin.unsqueeze(1))), dim=-1)
        latent, rope = multiplied(tokens, dkv, dkv_scale, x.dtype).split((width, turning), dim=-1)
        for pages, rows in ((latents, norm(latent, gain_kv)), (ropes, rotate(rope, cos, sin))):
            write(pages, rows.flatten(0, 1), slots)
        latent, rope = (pages[table].reshape(x.shape[0], -1, pages.shape[-1]) for pages in (latents, ropes))
        heads = linear(latent, ukv).unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
        k, values = heads.split((nope.shape[-1], heads.shape[-1] - nope.shape[-1]), dim=-1)
        keys = torch.cat((k, rope.unsqueeze(1).expand(-1, q.shape[1], -1, -1)), dim=-1)
        at = lengths[:, None] - queries + torch.arange(queries)
        seen = torch.arange(latent.shape[1]) <= at[:, None, :, None]
        return scaled_dot_product_attention(q, keys, values, attn_mask=seen)

    return forward


def turned_pages(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages that lie in memory as [Size, Block, ..]."""
    *given, latents, ropes, table, lengths, slots = inputs(1)(dtype)
    latents, ropes = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (latents, ropes))
    return *given, latents, ropes, table, lengths, slots


EXAMPLES = (
    Example("a token through a view", model(viewed), inputs(1)),
    Example("two tokens by index_copy, rotated by halves", model(copied, of_halves), inputs(2)),
    Example("pages of one head", model(of_a_head), inputs(1, heads=(1,))),
    Example("a token by block", model(by_block), inputs(1)),
)
REJECTS = (
    Example("another epsilon", model(viewed, eps=1e-5), inputs(1), "the kernel of npu_mla_preprocess 1e-6"),
    Example("places of unknown range", model(anywhere), inputs(1), "not proven to lie in its page"),
    Example("two tokens at a slot", model(two_in_a_row), inputs(2, heads=(2,)), "hold several heads"),
    Example("pages that lie otherwise", model(by_block), turned_pages, "the pages are not contiguous"),
    Example("short lines", model(viewed), inputs(1, he=48), "do not fill lines of 32"),
)
