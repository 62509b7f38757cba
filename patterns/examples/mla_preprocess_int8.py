"""What stands before attention over a latent cache in whole numbers, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusion import Example
from patterns.examples import caches, mla_preprocess, mla_preprocess_static
from patterns.examples import latent_attention_atb_int8 as attention
from patterns.examples.caches import BLOCKS, Read, Write, in_nz, of_nz
from patterns.examples.inputs import Inputs, normal, under
from patterns.examples.latent_model import multiplied
from patterns.examples.mla_preprocess import Rotate, Sizes, norm, of_halves, of_pairs
from patterns.examples.quantisation import quantised, weights

SIZES = Sizes(c=64, dr=32)


def of_tokens(queries: int, line: int = 32, sizes: Sizes = SIZES, others: bool = False) -> Inputs:
    """The inputs of `mla_preprocess`, a latent cache of int8 in lines, W_uk, scales of queries, latent, attention.

    Without lines the caches hold rows whole; `others` gives the scales of queries another dtype.
    """
    plain = mla_preprocess.inputs(queries, sizes=sizes)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        *given, ukv, cos, sin, _, ropes, table, lengths, slots = plain(dtype)
        pages = weights(50, BLOCKS, *((sizes.c // line, sizes.size, line) if line else (sizes.size, sizes.c)))
        up = (normal(51, sizes.n, sizes.d, sizes.c) / 8).to(dtype)
        another = torch.float16 if dtype != torch.float16 else torch.bfloat16
        heads = torch.arange(10, 10 + sizes.n).to(another if others else dtype)
        constants = (
            up,
            heads,
            torch.tensor([1 / 32]).to(dtype),
            1 / 32 / heads.float(),
            torch.full((sizes.n,), 1 / 32),
        )
        kept = (torch.nn.Parameter(each, requires_grad=False) for each in constants)
        ropes = ropes.view(BLOCKS, -1, sizes.size, 16) if line else ropes
        return *given, ukv, cos, sin, pages, ropes, table, lengths - queries, slots, *kept

    return make


def of_constants(queries: int, sizes: Sizes = SIZES) -> Inputs:
    """The same, with constants of quantisation behind them."""
    plain, tokens = mla_preprocess_static.inputs(queries, sizes=sizes), of_tokens(queries, sizes=sizes)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        more, given = plain(dtype), tokens(dtype)
        return *more[:11], *given[11:], *more[18:]

    return make


Queries = Callable[[Tensor, Tensor], Tensor]


def of_heads(query: Tensor, heads: Tensor) -> Tensor:
    """A factor of each head."""
    return (query.float() * heads.float()[:, None, None]).round().clamp(-128, 127).to(torch.int8)


def stored(rows: Tensor, scale: Tensor) -> Tensor:
    """One scale of the latent."""
    return (rows.float() / scale.float()).round().clamp(-128, 127).to(torch.int8)


def model(
    fixed: bool = False, rotate: Rotate = of_pairs, query: Queries = of_heads, store: Queries = stored,
    write: Write = in_nz, heads: int = SIZES.n, read: Read = of_nz,
) -> Callable[..., Tensor]:  # fmt: skip
    """A function that writes the rows of a token, or of several, and attends to the pages."""

    def forward(
        x: Tensor, gain: Tensor, dq: Tensor, dq_scale: Tensor, uq: Tensor, uq_scale: Tensor, dkv: Tensor,
        dkv_scale: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor, sin: Tensor, latents: Tensor,
        ropes: Tensor, table: Tensor, position: Tensor, slots: Tensor, up: Tensor, of_queries: Tensor,
        of_latent: Tensor, of_scores: Tensor, of_values: Tensor, *constants: Tensor,
    ) -> Tensor:  # fmt: skip
        width, turning = gain_kv.shape[0], cos.shape[-1]
        if fixed:
            beta, beta_q, dq_bias, uq_bias, dkv_bias, scale, scale_q, zero, zero_q = constants
            layer = mla_preprocess_static.biased
            whole = mla_preprocess_static.summed(norm(x, gain) + beta, scale, zero)
            low = norm(layer(whole, dq, dq_scale, dq_bias, x.dtype), gain_q) + beta_q
            q = layer(mla_preprocess_static.summed(low, scale_q, zero_q), uq, uq_scale, uq_bias, x.dtype)
            both = layer(whole, dkv, dkv_scale, dkv_bias, x.dtype)
        else:
            tokens = quantised(norm(x, gain))
            low = norm(multiplied(tokens, dq, dq_scale, x.dtype), gain_q)
            q = multiplied(quantised(low), uq, uq_scale, x.dtype)
            both = multiplied(tokens, dkv, dkv_scale, x.dtype)
        nope, rope = q.unflatten(-1, (heads, -1)).transpose(1, 2).split((up.shape[1], turning), dim=-1)
        rope = rotate(rope, cos.unsqueeze(1), sin.unsqueeze(1))
        latent, k_rope = both.split((width, turning), dim=-1)
        write(latents, store(norm(latent, gain_kv), of_latent).flatten(0, 1), slots)
        write(ropes, rotate(k_rope, cos, sin).flatten(0, 1), slots)
        latent, k_rope = (read(pages, table) for pages in (latents, ropes))
        at = position[:, None] + torch.arange(x.shape[1])
        seen = torch.arange(latent.shape[1]) <= at[:, None, :, None]
        query8 = query(nope @ up, of_queries)
        return attention.written_out(query8, rope, latent, k_rope, seen, of_scores, of_values)

    return forward


EXAMPLES = (
    Example("a token", model(), of_tokens(1)),
    Example("a token by halves", model(rotate=of_halves), of_tokens(1)),
    Example("a token, constants", model(fixed=True), of_constants(1)),
)


def cut(query: Tensor, heads: Tensor) -> Tensor:
    """Bounded by 127 on both sides."""
    return (query.float() * heads.float()[:, None, None]).round().clamp(-127, 127).to(torch.int8)


def divided(query: Tensor, heads: Tensor) -> Tensor:
    """Divided by a scale of each head."""
    return (query.float() / heads.float()[:, None, None]).round().clamp(-128, 127).to(torch.int8)


def shifted(rows: Tensor, scale: Tensor) -> Tensor:
    """With a zero point."""
    return (rows.float() / scale.float() + 3).round().clamp(-128, 127).to(torch.int8)


REJECTS = (
    Example("whole rows", model(write=caches.viewed, read=caches.of_pages), of_tokens(1, 0), "not lines of NZ"),
    Example("scales of another dtype", model(), of_tokens(1, others=True), "is not one in the dtype of x"),
    Example("short lines", model(), of_tokens(1, 16), "in lines of 16 numbers, not of 32"),
    Example("other bounds of queries", model(query=cut), of_tokens(1), "queries are bounded by -127"),
    Example("queries divided", model(query=divided), of_tokens(1), "where the operator multiplies by one"),
    Example("a zero point", model(store=shifted), of_tokens(1), "stored with a zero point"),
)

TRIED = {"mla_preprocess": under("int8 latent", (*EXAMPLES, *REJECTS))}
"""Rule -> its examples and rejects."""
