"""Attention over an int8 latent whose probabilities the model rounds as well, and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fusion import Example
from tests.examples import latent_attention_int8 as int8
from tests.examples.caches import of_nz
from tests.examples.inputs import Inputs, fixed, tensors, under
from tests.examples.latent_attention_int8 import Attend, over, up_to
from tests.examples.quantisation import weights

B, N, C, R, BLOCKS, SIZE = 2, 4, 64, 32, 7, 8
TABLE = torch.tensor([[3, 6, 1], [5, 0, 2]])
LENGTHS, EMPTY = torch.tensor([6, 19]), torch.tensor([0, 20])


def inputs(queries: int, line: int = 32, blocks: int = BLOCKS, lengths: Tensor = LENGTHS) -> Inputs:
    """int8 and rotated queries, both caches in NZ, the block table, lengths, scales of heads."""
    latents, ropes = (blocks, C // line, SIZE, line), (blocks, R // 16, SIZE, 16)
    heads = (fixed((weights(5 + n, N).float().abs() + 9) / 2**unit) for n, unit in enumerate((20, 12)))
    q = weights(3, B, N, queries, C)
    return tensors(q, (B, N, queries, R), weights(4, *latents), ropes, TABLE, lengths, *heads)


def scored(
    q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, of_scores: Tensor, fill: float = -math.inf
) -> Tensor:
    """Scores in float32, those of both parts added."""
    return int8.scored(q, rope, latent, k_rope, of_scores[..., None, None]).masked_fill(~seen, fill)


def of_shares(shares: Tensor, weights: Tensor) -> Tensor:
    """The sum of exponentials before they are rounded."""
    return shares.sum(-1, keepdim=True)


def weighed(
    weigh: Callable[[Tensor], Tensor], steps: int = 1, total: Attend = of_shares, fill: float = -math.inf
) -> Attend:
    """Attention with the weights that are made of exponentials, divided by the `total` of these and those."""

    def attend(q, rope, latent, k_rope, seen, of_scores, of_values):
        scores, by = scored(q, rope, latent, k_rope, seen, of_scores, fill), of_values[:, None, None]
        shares = (scores - scores.amax(-1, keepdim=True)).exp()
        found = weigh(shares)
        y = torch.einsum("bnst,btc->bnsc", found.float(), latent.float()) / total(shares, found)
        return (y * (by if steps == 1 else by / steps)).to(rope.dtype)

    return attend


written_out = weighed(lambda shares: (shares * 127).round().to(torch.int8), 127)
"""Weights in int8, the sum of what they were before behind the product."""


def in_floats(q, rope, latent, k_rope, seen, of_scores, of_values):
    """Steps of 1 / 127 in floats, one scale of all values, keys with a dim for heads."""
    scores = scored(q, rope, latent, k_rope, seen, of_scores)
    shares = torch.exp(scores - scores.max(-1, keepdim=True).values)
    steps = torch.round(shares * 127) / 127
    y = (steps @ latent.float().unsqueeze(1)) * (of_values[:1] * 2)
    return (y / shares.sum(-1, keepdim=True)).to(rope.dtype)


def rounded_shares(q, rope, latent, k_rope, seen, of_scores, of_values):
    """Rounded behind the division by their sum."""
    shares = (scored(q, rope, latent, k_rope, seen, of_scores).softmax(-1) * 127).round()
    return (torch.einsum("bnst,btc->bnsc", shares, latent.float()) * of_values[:, None, None]).to(rope.dtype)


def of_sequences(q, rope, latent, k_rope, seen, of_scores, of_values):
    """A scale of each sequence besides."""
    more = torch.arange(1, 1 + q.shape[0]).float()[:, None]
    return written_out(q, rope, latent, k_rope, seen, of_scores * more, of_values)


def up_to_one(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Up to a length that is at least 1, [B, 1, 1, T]."""
    return (torch.arange(keys) <= lengths[:, None])[:, None, None]


def in_line(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """The last query sees the last of all keys, [S, T]."""
    return torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries


by_table = partial(over, of_nz, seen=up_to_one)
by_rows = partial(over, lambda pages, table: pages.view(BLOCKS, SIZE, -1)[table].flatten(1, 2), seen=up_to_one)
in_order = partial(over, lambda pages, table: pages.permute(0, 2, 1, 3).reshape(B, -1, pages.shape[1] * pages.shape[3]))
least = weighed(lambda shares: (shares * 127).round() / 127, fill=torch.finfo(torch.float32).min)
"""Hidden keys have the least number, by which a sequence without keys gives the mean."""
everything = in_order(written_out, seen=lambda lengths, queries, keys: torch.ones((), dtype=torch.bool))
other_steps = weighed(lambda shares: (shares * 255).round(), 255)
cut = weighed(lambda shares: (shares * 127).to(torch.int8), 127)
rounded_total = weighed(
    lambda shares: (shares * 127).round(), total=lambda shares, weights: weights.sum(-1, keepdim=True)
)
ONE, EMPTIED = inputs(1), inputs(1, lengths=EMPTY)
OWN = 2 * TABLE.shape[1]
EXAMPLES = (
    Example("a query", by_table(written_out), ONE),
    Example("a query, in floats", by_table(in_floats), ONE),
    Example("a sequence without keys", by_table(written_out, seen=up_to), EMPTIED),
    Example("a sequence without keys, the least number", by_table(least, seen=up_to), EMPTIED),
    Example("the last queries", by_table(written_out, seen=in_line), inputs(3)),
    Example("pages in their own order", everything, inputs(1, blocks=OWN)),
    Example("own order, a sequence without keys", in_order(written_out), inputs(1, blocks=OWN, lengths=EMPTY)),
    Example("the last queries, own order", in_order(in_floats, seen=in_line), inputs(2, blocks=OWN)),
    Example("whole rows", by_rows(written_out), ONE, "its pages are rows [Block, Size, 1, D]"),
    Example("scales of sequences", by_table(of_sequences), ONE, "the int8 product is multiplied by more than"),
    Example("other steps", by_table(other_steps), ONE, "to steps of 1 / 255"),
    Example("cut off", by_table(cut), ONE, "cut off toward zero"),
    Example("rounded shares", by_table(rounded_shares), ONE, "shares of the softmax are rounded"),
    Example("divided by the rounded sum", by_table(rounded_total), ONE, "it is divided by another sum than that of"),
    Example(
        "other lines",
        by_table(written_out),
        inputs(1, 16),
        "lines of 16 lanes; npu_multi_head_latent_attention requires lines of 32",
    ),
    Example("many queries", by_table(written_out, seen=in_line), inputs(5), "a sequence has more than four"),
)

TRIED = {"latent_attention_atb": under("int8", EXAMPLES)}
