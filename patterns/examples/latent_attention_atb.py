"""Attention of few queries over a latent as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from fusion import Example
from patterns.examples import latent_attention_paged as paged
from patterns.examples.inputs import Inputs
from patterns.examples.latent_attention import absorbed, given
from patterns.examples.sparse_attention import SCALE, B, S, T, causal, eager, hidden, keys_values, position

FEW = 3
TABLE = torch.tensor([[2, 0], [3, 1]])
Form = Callable[..., Any]


def seeing(mask: Callable[..., Tensor | None], attend: Form = scaled_dot_product_attention, **how: Any) -> Form:
    """Attention over keys and values of all heads, behind what `mask` makes of queries and further inputs."""

    def form(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *more: Tensor) -> Tensor:
        return attend(q, *keys_values(latent, rope, up), mask(q, *more), **how)

    return form


step = seeing(lambda q: None, scale=SCALE)
several = seeing(lambda q: causal(FEW, T, T - FEW), scale=SCALE)
at_position = seeing(lambda q, at: (torch.arange(T) <= at)[None, None, None], scale=SCALE)
prompt = seeing(lambda q: hidden(causal(S, S), q.dtype), eager)
chunk = seeing(lambda q: causal(S, T, T - S), scale=SCALE)
drafted = seeing(lambda q, there: hidden(there, q.dtype), lambda *of: eager(*of).flatten(2))
"""Some tokens that were guessed in several ways, what each sees told by a mask; heads side by side [B, S, N·E]."""


def tree() -> Tensor:
    """Which keys a query sees [B, 1, FEW, T], itself among them."""
    some = torch.rand(B, 1, FEW, T, generator=torch.Generator().manual_seed(3)) > 0.5
    return some | (causal(FEW, T, T - FEW) & ~causal(FEW, T, T - FEW - 1))


def least(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, there: Tensor) -> Tensor:
    """Hidden keys have the least number, by which a query without keys gives the mean."""
    k, v = keys_values(latent, rope, up)
    scores = (q @ k.transpose(-2, -1) * SCALE).masked_fill(~there, torch.finfo(q.dtype).min)
    return softmax(scores, dim=-1) @ v


def with_sums(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of one part of the cache: what they give is merged elsewhere, by log-sum-exps in the dtype of the model."""
    k, v = keys_values(latent, rope, up)
    scores = (q @ k.transpose(-2, -1)).float() * SCALE
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total).to(q.dtype) @ v, (top + total.log()).to(q.dtype)


def in_order(form: Form) -> Form:
    """The same over NZ pages in their own order."""

    def forward(q: Tensor, latents: Tensor, ropes: Tensor, up: Tensor, *more: Tensor) -> Any:
        latent, rope = (x.permute(0, 2, 1, 3).reshape(B, T, -1) for x in (latents, ropes))
        return form(q, latent, rope, up, *more)

    return forward


def by_table(form: Form, nz: bool = False, keys: int = T) -> Form:
    """The same over the first keys in pages that a block table names."""

    def forward(q: Tensor, latents: Tensor, ropes: Tensor, up: Tensor, table: Tensor, *more: Tensor) -> Any:
        gathered = (x[table].transpose(2, 3) if nz else x[table] for x in (latents, ropes))
        latent, rope = (x.reshape(B, T, -1)[:, :keys] for x in gathered)
        return form(q, latent, rope, up, *more)

    return forward


def pages(queries: int, *more: Callable[[], Tensor], nz: bool = True, table: bool = True) -> Inputs:
    """The inputs with two pages for each sequence, in NZ with 16 and 4 lanes or whole, and perhaps a block table."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, *both, up = given(queries, T)(dtype)
        both = [x.reshape(2 * B, T // 2, -1) for x in both]
        if nz:
            both = [x.unflatten(-1, (-1, n)).transpose(1, 2).contiguous() for x, n in zip(both, (16, 4), strict=True)]
        return q, *both, up, *([TABLE.clone()] if table else []), *(each() for each in more)

    return make


MODES = (
    (", of a table", by_table, partial(pages, nz=False), slice(2, None)),
    (", in lines of a table", partial(by_table, nz=True), pages, slice(None)),
    (", in lines", in_order, partial(pages, table=False), slice(None)),
)
"""Name, form, inputs, and which of these are tried so."""
PAGED = (
    ("one query", step, 1),
    ("queries that see all", step, FEW),
    ("the last queries", several, FEW),
    ("a mask", drafted, FEW, tree),
)
PLAIN = (*PAGED, ("absorbed", absorbed, 1), ("at a position", at_position, 1, position))
EXAMPLES = (
    *(Example(name, form, given(queries, T, *more)) for name, form, queries, *more in PLAIN),
    Example("pages of a table", paged.whole, paged.inputs(1)),
    Example("queries that see all, pages of a table", paged.whole, paged.inputs(FEW)),
    Example("pages of a table, cut behind", by_table(step, keys=T - 3), pages(1, nz=False)),
    Example("one query, with its sum", with_sums, given(1, T)),
    Example("one query, with its sum, pages of a table", by_table(with_sums), pages(1, nz=False)),
    *(
        Example(name + mode, over(form), inputs(queries, *more))
        for mode, over, inputs, chosen in MODES
        for name, form, queries, *more in PAGED[chosen]
    ),
)
REJECTS = (
    Example("queries with their sums", with_sums, given(FEW, T), "the log-sum-exp of the scores is used"),
    Example("a prompt", prompt, given(), "more than four queries"),
    Example("a chunk", chunk, given(S, T), "more than four queries"),
    Example("a mask that leaves nothing", least, given(FEW, T, tree), "is not proven to be causal or a length"),
)

TRIED = {"latent_attention_atb": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
