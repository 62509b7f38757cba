"""Attention over a latent in whole numbers whose weights the model rounds as well, and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, normal, under
from patterns.examples.quantisation import weights

B, N, C, R, BLOCKS, SIZE = 2, 4, 64, 32, 7, 8
TABLE = torch.tensor([[3, 6, 1], [5, 0, 2]])
KEYS = TABLE.shape[1] * SIZE
LENGTHS, EMPTY = torch.tensor([6, 19]), torch.tensor([0, 20])
SCALE = 0.125
Attend = Callable[..., Tensor]


def inputs(queries: int, line: int = 32, blocks: int = BLOCKS, lengths: Tensor = LENGTHS) -> Inputs:
    """Whole and rotated queries, both caches in lines of NZ, the block table, lengths, scales of heads."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        latents, ropes = (blocks, C // line, SIZE, line), (blocks, R // 16, SIZE, 16)
        rope, k_rope = (normal(1 + n, *shape).to(dtype) for n, shape in enumerate(((B, N, queries, R), ropes)))
        heads = ((weights(5 + n, N).float().abs() + 9) / 2**unit for n, unit in enumerate((20, 12)))
        scales = (torch.nn.Parameter(each, requires_grad=False) for each in heads)
        return weights(3, B, N, queries, C), rope, weights(4, *latents), k_rope, TABLE.clone(), lengths.clone(), *scales

    return make


def scored(
    q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, of_scores: Tensor, fill: float = -math.inf
) -> Tensor:
    """Scores in float32, those of both parts added."""
    scores = torch.einsum("bnsc,btc->bnst", q.float(), latent.float()) * of_scores[..., None, None]
    scores = (scores + torch.einsum("bnsr,btr->bnst", rope.float(), k_rope.float())) * SCALE
    return scores.masked_fill(~seen, fill)


def written_out(q, rope, latent, k_rope, seen, of_scores, of_values):
    """Weights in int8, the sum of what they were before behind the product."""
    scores = scored(q, rope, latent, k_rope, seen, of_scores)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    whole = (shares * 127).round().to(torch.int8)
    y = torch.einsum("bnst,btc->bnsc", whole.float(), latent.float()) / shares.sum(-1, keepdim=True)
    return (y * (of_values[:, None, None] / 127)).to(rope.dtype)


def least(q, rope, latent, k_rope, seen, of_scores, of_values):
    """Hidden keys have the least number, by which a sequence without keys gives the mean."""
    scores = scored(q, rope, latent, k_rope, seen, of_scores, torch.finfo(torch.float32).min)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    y = torch.einsum("bnst,btc->bnsc", (shares * 127).round() / 127, latent.float()) / shares.sum(-1, keepdim=True)
    return (y * of_values[:, None, None]).to(rope.dtype)


def in_floats(q, rope, latent, k_rope, seen, of_scores, of_values):
    """Steps of 1 / 127 in floats, one scale of all values, keys with a dim for heads."""
    scores = scored(q, rope, latent, k_rope, seen, of_scores)
    shares = torch.exp(scores - scores.max(-1, keepdim=True).values)
    steps = torch.round(shares * 127) / 127
    y = (steps @ latent.float().unsqueeze(1)) * (of_values[:1] * 2)
    return (y / shares.sum(-1, keepdim=True)).to(rope.dtype)


def single(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Up to a length that is at least 1, [B, 1, 1, T]."""
    return (torch.arange(keys) <= lengths[:, None])[:, None, None]


def counted(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Up to a length that may be 0, [B, 1, 1, T]."""
    return (torch.arange(keys) < lengths[:, None])[:, None, None]


def in_line(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """The last query sees the last of all keys, [S, T]."""
    return torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries


def everything(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """All keys."""
    return torch.ones((), dtype=torch.bool)


def by_table(attend: Attend, seen: Callable[..., Tensor] = single) -> Attend:
    """Over pages [Block, C / 32, Size, 32] that a block table names."""

    def forward(q, rope, latents, ropes, table, lengths, of_scores, of_values):
        latent, k_rope = (pages[table].permute(0, 1, 3, 2, 4).reshape(B, KEYS, -1) for pages in (latents, ropes))
        return attend(q, rope, latent, k_rope, seen(lengths, q.shape[2], KEYS), of_scores, of_values)

    return forward


def by_rows(attend: Attend) -> Attend:
    """Over pages that hold rows whole."""

    def forward(q, rope, latents, ropes, table, lengths, of_scores, of_values):
        latent, k_rope = (pages.view(BLOCKS, SIZE, -1)[table].reshape(B, KEYS, -1) for pages in (latents, ropes))
        return attend(q, rope, latent, k_rope, single(lengths, q.shape[2], KEYS), of_scores, of_values)

    return forward


def in_order(attend: Attend, seen: Callable[..., Tensor] = single) -> Attend:
    """Over pages in their own order."""

    def forward(q, rope, latents, ropes, table, lengths, of_scores, of_values):
        latent, k_rope = (pages.permute(0, 2, 1, 3).reshape(B, KEYS, -1) for pages in (latents, ropes))
        return attend(q, rope, latent, k_rope, seen(lengths, q.shape[2], KEYS), of_scores, of_values)

    return forward


EXAMPLES = (
    Example("a query", by_table(written_out), inputs(1)),
    Example("a query, in floats", by_table(in_floats), inputs(1)),
    Example("a sequence without keys", by_table(written_out, counted), inputs(1, lengths=EMPTY)),
    Example("a sequence without keys, the least number", by_table(least, counted), inputs(1, lengths=EMPTY)),
    Example("the last queries", by_table(written_out, in_line), inputs(3)),
    Example("pages in their own order", in_order(written_out, everything), inputs(1, blocks=2 * TABLE.shape[1])),
    Example(
        "own order, a sequence without keys",
        in_order(written_out, counted),
        inputs(1, blocks=2 * TABLE.shape[1], lengths=EMPTY),
    ),
    Example("the last queries, own order", in_order(in_floats, in_line), inputs(2, blocks=2 * TABLE.shape[1])),
)


def other_steps(q, rope, latent, k_rope, seen, of_scores, of_values):
    """Steps of 1 / 255."""
    scores = scored(q, rope, latent, k_rope, seen, of_scores)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    y = torch.einsum("bnst,btc->bnsc", (shares * 255).round(), latent.float()) / shares.sum(-1, keepdim=True)
    return (y * (of_values[:, None, None] / 255)).to(rope.dtype)


def rounded_shares(q, rope, latent, k_rope, seen, of_scores, of_values):
    """Rounded behind the division by their sum."""
    shares = (scored(q, rope, latent, k_rope, seen, of_scores).softmax(-1) * 127).round()
    return (torch.einsum("bnst,btc->bnsc", shares, latent.float()) * of_values[:, None, None]).to(rope.dtype)


def rounded_total(q, rope, latent, k_rope, seen, of_scores, of_values):
    """Divided by the sum of rounded weights."""
    scores = scored(q, rope, latent, k_rope, seen, of_scores)
    whole = ((scores - scores.amax(-1, keepdim=True)).exp() * 127).round()
    y = torch.einsum("bnst,btc->bnsc", whole, latent.float()) / whole.sum(-1, keepdim=True)
    return (y * of_values[:, None, None]).to(rope.dtype)


def cut(q, rope, latent, k_rope, seen, of_scores, of_values):
    """Cut off toward zero."""
    scores = scored(q, rope, latent, k_rope, seen, of_scores)
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    y = torch.einsum("bnst,btc->bnsc", (shares * 127).to(torch.int8).float(), latent.float())
    return (y / shares.sum(-1, keepdim=True) * (of_values[:, None, None] / 127)).to(rope.dtype)


def of_sequences(q, rope, latent, k_rope, seen, of_scores, of_values):
    """A scale of each sequence besides."""
    more = torch.arange(1, 1 + q.shape[0]).float()[:, None]
    return written_out(q, rope, latent, k_rope, seen, of_scores * more, of_values)


REJECTS = (
    Example("whole rows", by_rows(written_out), inputs(1), "do not hold rows in lines of NZ"),
    Example("scales of sequences", by_table(of_sequences), inputs(1), "else than one scale of each head"),
    Example("other steps", by_table(other_steps), inputs(1), "to steps of 1 / 255"),
    Example("cut off", by_table(cut), inputs(1), "cut off toward zero"),
    Example("rounded shares", by_table(rounded_shares), inputs(1), "shares of 1 are rounded"),
    Example("divided by the rounded sum", by_table(rounded_total), inputs(1), "as they were before they were rounded"),
    Example("other lines", by_table(written_out), inputs(1, 16), "in lines of 16 numbers, not of 32"),
    Example("many queries", by_table(written_out, in_line), inputs(5), "more than four queries"),
)

TRIED = {"latent_attention_atb": under("int8", (*EXAMPLES, *REJECTS))}
"""Rule -> its examples and rejects."""
