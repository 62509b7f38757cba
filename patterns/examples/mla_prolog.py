"""What stands before latent attention as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from fusion import Example
from patterns.examples.inputs import Inputs, normal

B, N, S, T, HE, HCQ, C, D, DR, E = 2, 4, 3, 32, 64, 48, 32, 16, 16, 16
LISTED = 4


def weights(he: int = HE, head: int = D + DR, line: int = C + DR) -> list[Tensor]:
    """W_dq, W_uq, W_dkv, the gains of both norms, and W_ukv of keys and values."""
    shapes = (HCQ, he), (N * head, HCQ), (line, he), (N * (D + E), C)
    dq, uq, dkv, ukv = (normal(seed, *shape) / 8 for seed, shape in enumerate(shapes))
    return [dq, uq, dkv, 1 + normal(4, HCQ) / 8, 1 + normal(5, C) / 8, ukv]


def tables(tokens: tuple[int, ...], width: int = DR) -> list[Tensor]:
    """cos and sin [*tokens, width]; their halves are equal."""
    angles = normal(6, *tokens, width // 2)
    angles = torch.cat((angles, angles), dim=-1)
    return [angles.cos(), angles.sin()]


def listed(queries: int, keys: int) -> Tensor:
    """For each query [B, S] the keys that it sees, no two of them the same."""
    return torch.rand(B, queries, keys, generator=torch.Generator().manual_seed(7)).argsort(-1)[..., :LISTED]


def prolog(
    queries: int = S, keys: int = S, *caches: tuple[int, ...], table: tuple[int, ...] = (), **sizes: int
) -> Inputs:  # fmt: skip
    """Hidden states [B, S, He], weights, tables, a list of keys, a position, and caches of these shapes."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [normal(8, B, queries, HE), *weights(**sizes), *tables(table or (B, queries))]
        held = (normal(9 + seed, *shape).to(dtype) for seed, shape in enumerate(caches))
        return *(each.to(dtype) for each in given), listed(queries, keys), torch.tensor(5), *held

    return make


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm in float32."""
    wide = x.float()
    return gain * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of lanes rotated, the first of each pair in the first half of the result."""
    half = x.shape[-1] // 2
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], cos[..., :half], sin[..., :half]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def rope_last(q: Tensor, *table: Tensor) -> Tensor:
    """Queries [B, N, S, D + Dr] whose last lanes are rotated."""
    nope, rope = q.split((D, DR), dim=-1)
    return torch.cat((nope, turned(rope, *table)), dim=-1)


def rope_multiplied(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries of which both parts are multiplied by a number."""
    nope, rope = q.split((D, DR), dim=-1)
    rope = (rope * 1.5).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    low, high = rope.chunk(2, dim=-1)
    cos, sin = (torch.cat((each[..., : DR // 2],) * 2, dim=-1) for each in (cos, sin))
    return torch.cat((nope * 1.5, rope * cos + torch.cat((-high, low), dim=-1) * sin), dim=-1)


def rows_of(x: Tensor, dkv: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Latents [B, S, C] and rotated keys [B, S, Dr]."""
    latent, rope = linear(x, dkv)[..., : C + DR].split((C, DR), dim=-1)
    return norm(latent, gain), turned(rope, cos, sin)


def attended(q: Tensor, latent: Tensor, rope: Tensor, ukv: Tensor, places: Tensor) -> Tensor:
    """Attention over the keys that are listed."""
    nope, values = linear(latent, ukv).unflatten(-1, (N, D + E)).transpose(1, 2).split((D, E), dim=-1)
    keys = torch.cat((nope, rope.unsqueeze(1).expand(-1, N, -1, -1)), dim=-1)
    seen = torch.zeros(*places.shape[:2], latent.shape[1], dtype=torch.bool).scatter(-1, places, True)
    return scaled_dot_product_attention(q, keys, values, attn_mask=seen.unsqueeze(1))


Joined = Callable[..., tuple[Tensor, Tensor]]


def model(join: Joined, rotate: Callable[..., Tensor] = rope_last, factor: float = 1.0) -> Callable[..., Tensor]:
    """A function whose queries `rotate` turns, and whose rows `join` writes: `join(latent, rope, at, *caches)`.

    The latents are multiplied by `factor`.
    """

    def forward(
        x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor,
        sin: Tensor, places: Tensor, at: Tensor, *caches: Tensor,
    ) -> Tensor:  # fmt: skip
        q = linear(norm(linear(x, dq), gain_q), uq).reshape(*places.shape[:2], N, -1).transpose(1, 2)
        q = rotate(q, cos.unsqueeze(-3), sin.unsqueeze(-3))
        latent, rope = rows_of(x, dkv, gain_kv, cos, sin)
        latent, rope = join(latent * factor, rope, at, *caches)
        return attended(q, latent, rope, ukv, places)

    return forward


def fresh(latent: Tensor, rope: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """No cache."""
    return latent, rope


def joined(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows behind those that are there."""
    return torch.cat((latents, latent), dim=1), torch.cat((ropes, rope), dim=1)


def copied(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows at consecutive positions of [B, T, ..], none of which counts from the end."""
    places = torch.arange(latent.shape[1]) + at.clamp(min=0)
    return latents.index_copy_(1, places, latent), ropes.index_copy_(1, places, rope)


def single(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows at consecutive positions of [B, 1, T, ..]."""
    places = torch.arange(latent.shape[1]) + at.clamp(min=0)
    latents.index_copy_(2, places, latent.unsqueeze(1))
    ropes.index_copy_(2, places, rope.unsqueeze(1))
    return latents.squeeze(1), ropes.squeeze(1)


def sliced(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows at positions that are known before."""
    latents[:, 2 : 2 + S] = latent
    ropes[:, 2 : 2 + S] = rope
    return latents, ropes


def lengths(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each sequence at a position of its own."""
    at = at + torch.arange(B)
    latents[torch.arange(B), at] = latent[:, 0]
    ropes[torch.arange(B), at] = rope[:, 0]
    return latents, ropes


CACHES = (B, T, C), (B, T, DR)
EXAMPLES = (
    Example("a prompt by index_copy", model(copied), prolog(S, T, *CACHES)),
    Example("a token by index_copy", model(copied), prolog(1, T, *CACHES)),
    Example("caches of one head", model(single), prolog(S, T, (B, 1, T, C), (B, 1, T, DR))),
    Example("a length for each sequence", model(lengths), prolog(1, T, *CACHES)),
    Example("queries and latents times a number", model(copied, rope_multiplied, 0.75), prolog(S, T, *CACHES)),
)
ROW_EXAMPLES = (
    Example("the same positions in all sequences", model(fresh), prolog(table=(1, S))),
    Example("one position in a sequence", model(fresh), prolog(B, B, table=(B, 1))),
    Example("no cache", model(fresh), prolog()),
    Example("rows that the model writes to a slice", model(sliced), prolog(S, T, *CACHES)),
    Example("rows joined", model(joined), prolog(S, 5 + S, (B, 5, C), (B, 5, DR))),
)


def rope_first(q: Tensor, *table: Tensor) -> Tensor:
    """Queries whose first lanes are rotated."""
    rope, nope = q.split((DR, D), dim=-1)
    return torch.cat((nope, turned(rope, *table)), dim=-1)


def more_lanes(q: Tensor, *table: Tensor) -> Tensor:
    """Queries of which some lanes are not used."""
    nope, rope, _ = q.split((D, DR, q.shape[-1] - D - DR), dim=-1)
    return torch.cat((nope, turned(rope, *table)), dim=-1)


def common_lanes(q: Tensor, *table: Tensor) -> Tensor:
    """Queries of which some lanes belong to both parts; the first ones to neither."""
    return torch.cat((q[..., D // 2 : D + D // 2], turned(q[..., D:], *table)), dim=-1)


def rope_early(q: Tensor, *table: Tensor) -> Tensor:
    """Queries of which some lanes belong to both parts."""
    return torch.cat((q[..., :D], turned(q[..., -DR:], *table)), dim=-1)


def two_halves(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """One half of the tokens behind those of each half of [B, 2, T, ..]."""
    places = torch.arange(latent.shape[1] // 2) + at.clamp(min=0)
    for cache, rows in ((latents, latent), (ropes, rope)):
        cache.index_copy_(2, places, rows.unflatten(1, (2, -1)))
    return latents.flatten(1, 2), ropes.flatten(1, 2)


def half_sequences(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """One half of the tokens behind those of each half of [2 · B, T, ..]."""
    places = torch.arange(latent.shape[1] // 2) + at.clamp(min=0)
    for cache, rows in ((latents, latent), (ropes, rope)):
        cache.index_copy_(1, places, rows.reshape(2 * B, -1, rows.shape[-1]))
    return latents.reshape(B, -1, C), ropes.reshape(B, -1, DR)


def positions_first(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """Caches that are copied before they are read."""
    latents, ropes = copied(latent, rope, at, latents, ropes)
    return latents.contiguous(), ropes.contiguous()


def turned_caches(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Caches that lie in memory as [T, B, ..]."""
    *given, latents, ropes = prolog(S, T, (T, B, C), (T, B, DR))(dtype)
    return *given, latents.transpose(0, 1), ropes.transpose(0, 1)


def unpacked(latent: Tensor, rope: Tensor, at: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [T, ..] of one sequence."""
    return copied(latent.unsqueeze(0), rope.unsqueeze(0), at, latents, ropes)


def packed(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The first sequence alone, its hidden states and tables without a dim for it."""
    x, *given, cos, sin, places, at, latents, ropes = prolog(S, T, *CACHES)(dtype)
    return x[0], *given, cos[0], sin[0], places[:1], at, latents[:1], ropes[:1]


REJECTS = (
    Example(
        "a negative factor",
        model(copied, rope_multiplied, -1.0),
        prolog(S, T, *CACHES),
        "which is not positive",
        "Fresh",
    ),
    Example(
        "rotated lanes first", model(copied, rope_first), prolog(S, T, *CACHES), "do not follow those that are not"
    ),
    Example("lanes of both", model(copied, common_lanes), prolog(S, T, *CACHES), "do not follow those that are not"),
    Example(
        "rotated lanes early",
        model(copied, rope_early),
        prolog(S, T, *CACHES, head=D + DR // 2),
        "do not follow those that are not",
    ),
    Example("more lanes", model(copied, more_lanes), prolog(S, T, *CACHES, head=D + DR + 8), "more lanes than both"),
    Example("a third part", model(copied), prolog(S, T, *CACHES, line=C + DR + 8), "do not make up one projection"),
    Example(
        "caches of two halves",
        model(two_halves),
        prolog(4, 2 * T, (B, 2, T, C), (B, 2, T, DR)),
        "several heads",
        "Fresh",
    ),
    Example(
        "halves as sequences",
        model(half_sequences),
        prolog(4, 2 * T, (2 * B, T, C), (2 * B, T, DR)),
        "other sequences than",
        "Fresh",
    ),
    Example("caches that lie otherwise", model(positions_first), turned_caches, "is not contiguous", "Fresh"),
    Example("packed tokens", model(unpacked), packed, "are packed"),
    Example(
        "an odd length", model(copied), prolog(S, 20, (B, 20, C), (B, 20, DR)), "no size of a page divides", "Fresh"
    ),
)
