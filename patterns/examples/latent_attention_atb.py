"""Attention of few queries over a latent as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from fusion import Example
from patterns.examples import latent_attention_paged
from patterns.examples.inputs import Inputs
from patterns.examples.latent_attention import absorbed, at_position, chunk, given, prompt, step
from patterns.examples.sparse_attention import SCALE, B, S, T, causal, eager, hidden, keys_values, position

FEW = 3


def several(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """The last tokens of every sequence, the mask as booleans."""
    k, v = keys_values(latent, rope, up)
    return scaled_dot_product_attention(q, k, v, causal(FEW, T, T - FEW), scale=SCALE)


def drafted(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, there: Tensor) -> Tensor:
    """Some tokens that were guessed in several ways, what each sees told by a mask; heads side by side [B, S, N·E]."""
    return eager(q, *keys_values(latent, rope, up), hidden(there, q.dtype)).flatten(2)


def tree() -> Tensor:
    """Which keys a query sees [B, 1, FEW, T], itself among them."""
    some = torch.rand(B, 1, FEW, T, generator=torch.Generator().manual_seed(3)) > 0.5
    return some | (causal(FEW, T, T - FEW) & ~causal(FEW, T, T - FEW - 1))


def least(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, there: Tensor) -> Tensor:
    """Hidden keys have the least number, by which a query without keys gives the mean."""
    k, v = keys_values(latent, rope, up)
    scores = (q @ k.transpose(-2, -1) * SCALE).masked_fill(~there, torch.finfo(q.dtype).min)
    return softmax(scores, dim=-1) @ v


def by_lines(form: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same over pages that hold their rows in lines of NZ."""

    def forward(q: Tensor, latents: Tensor, ropes: Tensor, up: Tensor, *more: Tensor) -> Tensor:
        latent, rope = (x.permute(0, 2, 1, 3).reshape(B, T, -1) for x in (latents, ropes))
        return form(q, latent, rope, up, *more)

    return forward


def lines(queries: int, *more: Callable[[], Tensor]) -> Inputs:
    """The inputs with two pages for each sequence, in lines of 16 and 4 lanes."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, latent, rope, *others = given(queries, T, *more)(dtype)
        paged = (
            x.reshape(2 * B, T // 2, -1, width).permute(0, 2, 1, 3).contiguous()
            for x, width in ((latent, 16), (rope, 4))
        )
        return q, *paged, *others

    return make


TABLE = torch.tensor([[2, 0], [3, 1]])


def by_table(form: Callable[..., Any], lined: bool = False) -> Callable[..., Any]:
    """The same over pages that a block table names, which hold rows whole or in lines."""

    def forward(q: Tensor, latents: Tensor, ropes: Tensor, up: Tensor, table: Tensor, *more: Tensor) -> Any:
        gathered = (x[table].transpose(2, 3) if lined else x[table] for x in (latents, ropes))
        latent, rope = (x.reshape(B, T, -1) for x in gathered)
        return form(q, latent, rope, up, *more)

    return forward


def listed(queries: int, lined: bool, *more: Callable[[], Tensor]) -> Inputs:
    """The inputs with two pages for each sequence, and a block table."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, latents, ropes, up, *others = lines(queries, *more)(dtype)
        if not lined:
            latents, ropes = (x.transpose(1, 2).reshape(2 * B, T // 2, -1) for x in (latents, ropes))
        return q, latents, ropes, up, TABLE.clone(), *others

    return make


def with_sums(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of one part of the cache: what they give is merged elsewhere, by log-sum-exps in the dtype of the model."""
    k, v = keys_values(latent, rope, up)
    scores = (q @ k.transpose(-2, -1)).float() * SCALE
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total).to(q.dtype) @ v, (top + total.log()).to(q.dtype)


PAGED = (
    ("one query", step, 1),
    ("queries that see all", step, FEW),
    ("the last queries", several, FEW),
    ("a mask", drafted, FEW, tree),
)
PLAIN = (*PAGED, ("absorbed", absorbed, 1), ("at a position", at_position, 1, position))
EXAMPLES = (
    *(Example(name, form, given(queries, T, *more)) for name, form, queries, *more in PLAIN),
    Example("pages of a table", latent_attention_paged.whole, latent_attention_paged.inputs(1)),
    Example("queries that see all, pages of a table", latent_attention_paged.whole, latent_attention_paged.inputs(FEW)),
    Example("one query, with its sum", with_sums, given(1, T)),
    Example("one query, with its sum, pages of a table", by_table(with_sums), listed(1, False)),
    *(Example(f"{name}, of a table", by_table(form), listed(n, False, *more)) for name, form, n, *more in PAGED[2:]),
    *(
        Example(f"{name}, in lines of a table", by_table(form, True), listed(n, True, *more))
        for name, form, n, *more in PAGED
    ),
    *(Example(f"{name}, in lines", by_lines(form), lines(queries, *more)) for name, form, queries, *more in PAGED),
)
REJECTS = (
    Example("queries with their sums", with_sums, given(FEW, T), "the log-sum-exp of the scores is used"),
    Example("a prompt", prompt, given(), "more than four queries"),
    Example("a chunk", chunk, given(S, T), "more than four queries"),
    Example("a mask that leaves nothing", least, given(FEW, T, tree), "is not proven to be causal or a length"),
)

TRIED = {"latent_attention_atb": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
