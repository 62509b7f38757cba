"""Attention over keys and values of a latent as people write it, mostly where no operator takes it as a whole.

The ways are those of teaching code of latent attention without rotated lanes (up-projections of keys and of values
behind one cached latent), of official inference code in float32, and of biases as BLOOM, T5, MPT and Gemma add them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import activations

N, D, R, C, E = 8, 32, 16, 16, 32


@dataclass(frozen=True)
class Sizes:
    """Sequences, queries and keys."""

    batch: int = 1
    queries: int = 1
    keys: int = 96


class Attention(nn.Module):
    """One way of `form` with two projections, or one that is cut, as Parameters."""

    def __init__(self, form: Callable[..., Any], dtype: torch.dtype, biased: bool = False) -> None:
        super().__init__()
        self.form = form
        shapes = {"w_uk": (N * D, C), "w_uv": (N * E, C), "w_ukv": (N * (D + E), C), "table": (N, 32)}
        shapes |= {"b_uk": (N * D,), "b_uv": (N * E,)} if biased else {}
        for seed, (name, shape) in enumerate(shapes.items()):
            weight = (activations(40 + seed, *shape) / 4).to(dtype)
            setattr(self, name, nn.Parameter(weight, requires_grad=False))

    def forward(self, *args: Tensor) -> Any:
        return self.form(self, *args)

    def keys_values(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Of all heads, [B, N, T, D] and [B, N, T, E]."""
        batch, rows, _ = c.shape
        k = F.linear(c, self.w_uk).view(batch, rows, N, D).transpose(1, 2)
        return k, F.linear(c, self.w_uv).view(batch, rows, N, E).transpose(1, 2)

    def together(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """The same of one layer."""
        kv = F.linear(c, self.w_ukv).view(*c.shape[:2], N, D + E).transpose(1, 2)
        k, v = torch.split(kv, [D, E], dim=-1)
        return k, v


# without rotated lanes -----------------------------------------------------------------------------------------------


def taught(m, q, q_rope, c, rope, bias):
    """As notes on the paper write it: two layers, heads, a product over the square root, softmax, heads joined."""
    k, v = m.keys_values(c)
    weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / D**0.5, dim=-1)
    return torch.matmul(weights, v).transpose(1, 2).contiguous().view(q.shape[0], -1, N * E)


def hidden_by_filling(m, q, q_rope, c, rope, bias):
    """A causal mask of the last rows, filled in."""
    k, v = m.keys_values(c)
    scores = q @ k.transpose(2, 3)
    rows, keys = scores.shape[-2:]
    later = torch.triu(torch.ones(rows, keys, dtype=torch.bool), diagonal=keys - rows + 1)
    scores.masked_fill_(later, -torch.inf)
    return (torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1) @ v).transpose(1, 2)


def by_sdpa(m, q, q_rope, c, rope, bias):
    k, v = m.keys_values(c)
    return F.scaled_dot_product_attention(q, k, v)


def one_projection_for_both(m, q, q_rope, c, rope, bias):
    k, _ = m.keys_values(c)
    return F.scaled_dot_product_attention(q, k, k)


def by_einsum(m, q, q_rope, c, rope, bias):
    k = torch.einsum("btc,ndc->btnd", c, m.w_uk.view(N, D, C))
    v = torch.einsum("btc,nec->btne", c, m.w_uv.view(N, E, C))
    weights = torch.einsum("bnsd,btnd->bnst", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bnst,btne->bsne", weights, v).flatten(2)


def cut_from_one_layer(m, q, q_rope, c, rope, bias):
    k, v = m.together(c)
    return F.scaled_dot_product_attention(q, k, v)


UNROTATED = (taught, hidden_by_filling, by_sdpa, one_projection_for_both, by_einsum, cut_from_one_layer)

# a bias, a cap, or no softmax ----------------------------------------------------------------------------------------


def with_rope(m, q, q_rope, c, rope, parts=Attention.keys_values):
    """Queries and keys with rotated lanes behind the others, and values."""
    k, v = parts(m, c)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), dim=-1)
    return torch.cat((q, q_rope), dim=-1), k, v


def added_bias(m, q, q_rope, c, rope, bias):
    q, k, v = with_rope(m, q, q_rope, c, rope)
    scores = torch.matmul(q, k.transpose(2, 3)) * (D + R) ** -0.5 + bias
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def added_bias_of_one_layer(m, q, q_rope, c, rope, bias):
    q, k, v = with_rope(m, q, q_rope, c, rope, Attention.together)
    scores = torch.matmul(q, k.transpose(2, 3)) * (D + R) ** -0.5 + bias
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def passed_to_sdpa(m, q, q_rope, c, rope, bias):
    q, k, v = with_rope(m, q, q_rope, c, rope)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def two_products(m, q, q_rope, c, rope, bias):
    k, v = m.keys_values(c)
    scores = torch.einsum("bnsd,bntd->bnst", q, k) + torch.einsum("bnsr,btr->bnst", q_rope, rope)
    return torch.einsum("bnst,bnte->bsne", (scores * 0.125 + bias).softmax(-1), v)


def in_float32(m, q, q_rope, c, rope, bias):
    """As the reference functions of kernels: everything widened first."""
    q, k, v = (each.float() for each in with_rope(m, q, q_rope, c, rope))
    scores = q @ k.transpose(-2, -1) * (D + R) ** -0.5 + bias.float()
    return (torch.softmax(scores, dim=-1) @ v).to(c.dtype)


def by_distance(m, q, q_rope, c, rope, bias):
    """Linear biases with a slope of each head (Press et al., 2022)."""
    k, v = m.keys_values(c)
    slopes = torch.tensor([2.0 ** -(head + 1) for head in range(N)], dtype=q.dtype)
    rows, keys = q.shape[2], c.shape[1]
    distance = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
    scores = q @ k.mT * D**-0.5 + slopes[:, None, None] * distance
    return scores.float().softmax(-1).type_as(q) @ v


def by_buckets(m, q, q_rope, c, rope, bias):
    """A learned bias of each distance, not scaled (Raffel et al., 2020)."""
    k, v = m.keys_values(c)
    rows, keys = q.shape[2], c.shape[1]
    distance = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)).clamp(0, 31)
    scores = torch.matmul(q, k.transpose(3, 2)) + F.embedding(distance, m.table.T).permute(2, 0, 1)
    return F.softmax(scores.float(), dim=-1).type_as(scores) @ v


def by_baddbmm(m, q, q_rope, c, rope, bias):
    """Heads and sequences in one dim, the bias added by the product."""
    k, v = (each.reshape(-1, *each.shape[2:]) for each in m.keys_values(c))
    flat = q.reshape(-1, *q.shape[2:])
    scores = torch.baddbmm(bias.flatten(0, 1), flat, k.transpose(1, 2), beta=1.0, alpha=D**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(*q.shape[:3], E)


def capped(m, q, q_rope, c, rope, bias):
    q, k, v = with_rope(m, q, q_rope, c, rope)
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D + R)
    scores = torch.tanh(scores / 20.0) * 20.0
    return F.softmax(scores + bias, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def with_weights(m, q, q_rope, c, rope, bias):
    """The model gives the weights as well."""
    k, v = m.keys_values(c)
    weights = F.softmax(q @ k.transpose(2, 3) * D**-0.5 + bias, dim=-1)
    return weights @ v, weights


def one_more_in_the_sum(m, q, q_rope, c, rope, bias):
    """A softmax whose weights need not add up to one."""
    k, v = m.keys_values(c)
    powers = torch.exp((q @ k.transpose(2, 3)) * D**-0.5 + bias.clamp(max=2))
    return (powers / (1 + powers.sum(-1, keepdim=True))) @ v


def by_sigmoid(m, q, q_rope, c, rope, bias):
    k, v = m.keys_values(c)
    return torch.sigmoid(q @ k.transpose(2, 3) * D**-0.5 + bias - math.log(c.shape[1])) @ v


def scaled_first(m, q, q_rope, c, rope, bias):
    k, v = m.keys_values(c)
    return ((q * D**-0.5) @ k.transpose(-1, -2) + bias).softmax(-1) @ v


PLAIN = (
    added_bias, added_bias_of_one_layer, passed_to_sdpa, two_products, in_float32, by_distance, by_buckets, by_baddbmm,
    capped, with_weights, one_more_in_the_sum, by_sigmoid, scaled_first,
)  # fmt: skip

# what only looks like it ---------------------------------------------------------------------------------------------


def biased_layer(m, q, q_rope, c, rope, bias):
    k = F.linear(c, m.w_uk, m.b_uk).view(*c.shape[:2], N, D).transpose(1, 2)
    v = F.linear(c, m.w_uv, m.b_uv).view(*c.shape[:2], N, E).transpose(1, 2)
    return (q @ k.mT * D**-0.5 + bias).softmax(-1) @ v


def normed_keys(m, q, q_rope, c, rope, bias):
    k, v = m.keys_values(c)
    return (q @ F.normalize(k, dim=-1).mT + bias).softmax(-1) @ F.relu(v)


def turned_keys(m, q, q_rope, c, rope, bias):
    """Each key by its own position."""
    k, v = m.keys_values(c)
    angles = torch.arange(c.shape[1], dtype=k.dtype)[:, None].expand(-1, D)
    return (q @ (k * angles.cos()).mT + bias).softmax(-1) @ (v * angles.sin())


def keys_that_all_heads_share(m, q, q_rope, c, rope, bias):
    k, v = (F.linear(c, each[: each.shape[0] // N])[:, None] for each in (m.w_uk, m.w_uv))
    return (q @ k.mT + bias).softmax(-1) @ v


def weights_of_each_token(m, q, q_rope, c, rope, bias):
    """A sum over heads, too: no product of heads."""
    k, v = (each.transpose(1, 2).flatten(2) for each in m.keys_values(c))
    return (q.transpose(1, 2).flatten(2) @ k.mT + bias[:, 0]).softmax(-1) @ v


LOOKALIKES = (biased_layer, normed_keys, turned_keys, keys_that_all_heads_share, weights_of_each_token)


def inputs(dtype: torch.dtype, of: Sizes) -> tuple[Tensor, ...]:
    """Queries of both kinds, latents, rotated keys and a bias."""
    rows = (of.batch, N, of.queries)
    shapes = ((*rows, D), (*rows, R), (of.batch, of.keys, C), (of.batch, of.keys, R), (*rows, of.keys))
    return tuple(activations(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))


@dataclass(frozen=True)
class Setting:
    """Sizes, a dtype and a level of tracing."""

    of: Sizes = field(default_factory=Sizes)
    dtype: torch.dtype = torch.bfloat16
    level: Any = "composite"


SIZES: Mapping[str, Sizes] = {"step": Sizes(), "steps": Sizes(2), "few": Sizes(1, 3, 160), "guesses": Sizes(2, 2, 200)}
