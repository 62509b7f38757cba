"""Dense latent attention as people write it by hand: a block with caches, and its core in many forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import activations

B, T, N, D, R, C, E, HIDDEN, Q = 2, 32, 4, 16, 16, 32, 16, 48, 40
SCALE = (D + R) ** -0.5


# a block in the style of published inference code: complex rotation, caches assigned by slices ------------------------


def turned(x: Tensor, freqs: Tensor) -> Tensor:
    """x [B, S, N, R] in pairs of neighbours times freqs [S, R / 2]; neighbours stay neighbours."""
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs.view(1, x.shape[1], 1, -1)).flatten(3).to(x.dtype)


class Block(nn.Module):
    """x [B, S, H], freqs [S, R / 2]; `absorbs` attends to the latent itself, else keys and values are cached whole."""

    def __init__(self, absorbs: bool, dtype: torch.dtype, lora: bool = True) -> None:
        super().__init__()
        self.absorbs = absorbs
        shapes = {"wkv_a": (C + R, HIDDEN), "wkv_b": (N * (D + E), C), "wo": (HIDDEN, N * E)}
        shapes |= {"wq_a": (Q, HIDDEN), "wq_b": (N * (D + R), Q)} if lora else {"wq": (N * (D + R), HIDDEN)}
        for seed, (name, shape) in enumerate(shapes.items()):
            setattr(self, name, nn.Parameter(activations(seed, *shape) * shape[-1] ** -0.5, requires_grad=False))
        widths = ((C,), (R,)) if absorbs else ((N, D + R), (N, E))
        for number, (name, width) in enumerate(zip(("kv_cache", "pe_cache"), widths, strict=True)):
            self.register_buffer(name, activations(20 + number, B, T, *width), persistent=False)
        self.to(dtype)

    def forward(self, x: Tensor, start: int, freqs: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        mask = torch.full((tokens, tokens), -math.inf).triu_(1) if tokens > 1 else None
        end = start + tokens
        q = F.linear(x, self.wq) if hasattr(self, "wq") else F.linear(normed(F.linear(x, self.wq_a)), self.wq_b)
        q_nope, q_pe = q.view(batch, tokens, N, D + R).split([D, R], dim=-1)
        q_pe = turned(q_pe, freqs)
        latent, k_pe = F.linear(x, self.wkv_a).split([C, R], dim=-1)
        k_pe, latent = turned(k_pe.unsqueeze(2), freqs), normed(latent)
        if not self.absorbs:
            kv = F.linear(latent, self.wkv_b).view(batch, tokens, N, D + E)
            k_nope, v = kv.split([D, E], dim=-1)
            self.kv_cache[:batch, start:end] = torch.cat([k_nope, k_pe.expand(-1, -1, N, -1)], dim=-1)
            self.pe_cache[:batch, start:end] = v
            q = torch.cat([q_nope, q_pe], dim=-1)
            scores = torch.einsum("bshd,bthd->bsht", q, self.kv_cache[:batch, :end]) * SCALE
            values = self.pe_cache[:batch, :end]
        else:
            wkv_b = self.wkv_b.view(N, -1, C)
            q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, :D])
            self.kv_cache[:batch, start:end] = latent
            self.pe_cache[:batch, start:end] = k_pe.squeeze(2)
            scores = torch.einsum("bshc,btc->bsht", q_nope, self.kv_cache[:batch, :end])
            scores += torch.einsum("bshr,btr->bsht", q_pe, self.pe_cache[:batch, :end])
            scores = scores * SCALE
        if mask is not None:
            scores += mask.unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        if not self.absorbs:
            return F.linear(torch.einsum("bsht,bthd->bshd", scores, values).flatten(2), self.wo)
        y = torch.einsum("bsht,btc->bshc", scores, self.kv_cache[:batch, :end])
        return F.linear(torch.einsum("bshc,hdc->bshd", y, wkv_b[:, -E:]).flatten(2), self.wo)


def normed(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def freqs(first: int, tokens: int) -> Tensor:
    angles = torch.arange(first, first + tokens)[:, None] / 30.0 ** (torch.arange(R // 2) * 2 / R)
    return torch.polar(torch.ones_like(angles), angles)


# the core alone: q [B, N, S, D + R], latent [B, T, C], rope [B, T, R], up [N (D + E), C] ------------------------------


def ups(up: Tensor) -> tuple[Tensor, ...]:
    return up.view(N, D + E, C).split((D, E), 1)


def causal(q: Tensor, keys: int) -> Tensor:
    """The last query sees the last key."""
    return torch.arange(keys) <= torch.arange(q.shape[2])[:, None] + keys - q.shape[2]


def shares(scores: Tensor, seen: Tensor | None, dtype: torch.dtype) -> Tensor:
    scores = scores.float() * SCALE
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1).to(dtype)


def expanded_by_expand(q, latent, rope, up, seen):
    k, v = F.linear(latent, up).view(B, -1, N, D + E).transpose(1, 2).split((D, E), -1)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1)
    return shares(q @ k.mT, seen, q.dtype) @ v


def expanded_by_repeat(q, latent, rope, up, seen):
    k, v = F.linear(latent, up).view(B, -1, N, D + E).split((D, E), -1)
    k = torch.cat((k, rope.unsqueeze(2).repeat(1, 1, N, 1)), -1)
    p = shares(torch.einsum("bnsd,btnd->bnst", q, k), seen, q.dtype)
    return torch.einsum("bnst,btne->bsne", p, v)


def expanded_by_two_sums(q, latent, rope, up, seen):
    nope, turn = q.split((D, R), -1)
    k, v = F.linear(latent, up).view(B, -1, N, D + E).transpose(1, 2).split((D, E), -1)
    return shares(nope @ k.mT + turn @ rope[:, None].mT, seen, q.dtype) @ v


def expanded_by_bmm(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    k = torch.einsum("btc,ndc->bntd", latent, up_k)
    v = torch.einsum("btc,nec->bnte", latent, up_v)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1).flatten(0, 1)
    scores = torch.bmm(q.flatten(0, 1), k.mT).view(B, N, q.shape[2], -1)
    p = shares(scores, seen, q.dtype).flatten(0, 1)
    return torch.bmm(p, v.flatten(0, 1)).view(B, N, q.shape[2], E)


def absorbed_by_matmul(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    nope, turn = q.split((D, R), -1)
    scores = (nope @ up_k) @ latent[:, None].mT + turn @ rope[:, None].mT
    return (shares(scores, seen, q.dtype) @ latent[:, None]) @ up_v.mT


def absorbed_by_einsum(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    nope, turn = q.transpose(1, 2).split((D, R), -1)
    scores = torch.einsum("bsnc,btc->bsnt", torch.einsum("bsnd,ndc->bsnc", nope, up_k), latent)
    scores = scores + torch.einsum("bsnr,btr->bsnt", turn, rope)
    if seen is not None:
        seen = seen.transpose(1, 2) if seen.dim() == 4 else seen[:, None]
    p = shares(scores, seen, q.dtype)
    return torch.einsum("bsnc,nec->bsne", torch.einsum("bsnt,btc->bsnc", p, latent), up_v)


def absorbed_and_joined(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    nope, turn = q.split((D, R), -1)
    query = torch.cat((nope @ up_k, turn), -1)
    keys = torch.cat((latent, rope), -1).unsqueeze(1)
    return (shares(query @ keys.mT, seen, q.dtype) @ keys[..., :C]) @ up_v.mT


def absorbed_and_scaled_on_both_sides(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    nope, turn = q.transpose(1, 2).split((D, R), -1)
    query = torch.cat((torch.einsum("bsnd,ndc->bsnc", nope, up_k), turn), -1) * SCALE**0.5
    keys = torch.cat((latent, rope), -1)
    scores = torch.einsum("bsnc,btc->bsnt", query, keys * SCALE**0.5)
    if seen is not None:
        seen = seen.transpose(1, 2) if seen.dim() == 4 else seen[:, None]
        scores = torch.where(seen, scores, torch.tensor(-1e30, dtype=q.dtype))
    y = torch.einsum("bsnt,btc->bsnc", scores.softmax(-1), keys[..., :C])
    return torch.einsum("bsnc,nec->bsne", y, up_v)


def absorbed_by_sdpa(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    query = torch.cat((q[..., :D] @ up_k, q[..., D:]), -1)
    keys = torch.cat((latent, rope), -1)[:, None]
    y = F.scaled_dot_product_attention(query, keys, keys[..., :C], seen, scale=SCALE, enable_gqa=True)
    return y @ up_v.mT


def by_sdpa(q, latent, rope, up, seen):
    k, v = F.linear(latent, up).view(B, -1, N, D + E).transpose(1, 2).split((D, E), -1)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=SCALE)


def absorbed_and_widened_once(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    keys = torch.cat((latent, rope), -1).float()
    query = torch.cat((q[..., :D] @ up_k, q[..., D:]), -1).float()
    scores = torch.einsum("bnsc,btc->bnst", query, keys)
    return torch.einsum("bnst,btc->bnsc", shares(scores, seen, torch.float32), keys[..., :C]).to(q.dtype) @ up_v.mT


def absorbed_and_joined_for_all_heads(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    query = torch.cat((q[..., :D] @ up_k, q[..., D:]), -1)
    keys = torch.cat([each.unsqueeze(1).expand(-1, N, -1, -1) for each in (latent, rope)], -1)
    return (shares(query @ keys.mT, seen, q.dtype) @ keys[..., :C]) @ up_v.mT


def absorbed_with_a_scale_of_each_head(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    nope, turn = q.split((D, R), -1)
    scores = (nope @ up_k) @ latent[:, None].mT + turn @ rope[:, None].mT
    scores = scores * torch.arange(1, N + 1).to(q.dtype).view(N, 1, 1)
    return (shares(scores, seen, q.dtype) @ latent[:, None]) @ up_v.mT


def absorbed_keys_alone(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    query = torch.cat((q[..., :D] @ up_k, q[..., D:]), -1)
    keys = torch.cat((latent, rope), -1)[:, None]
    return shares(query @ keys.mT, seen, q.dtype) @ torch.einsum("btc,nec->bnte", latent, up_v)


def absorbed_keys_beside_a_layer(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    nope, turn = q.split((D, R), -1)
    scores = torch.einsum("bnsc,btc->bnst", nope @ up_k, latent) + torch.einsum("bnsr,btr->bnst", turn, rope)
    v = F.linear(latent, up_v.flatten(0, 1)).view(B, -1, N, E).transpose(1, 2)
    return shares(scores, seen, q.dtype) @ v


def absorbed_values_alone(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    k = torch.einsum("btc,ndc->bntd", latent, up_k)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1)
    return (shares(q @ k.mT, seen, q.dtype) @ latent[:, None]) @ up_v.mT


SPELLINGS: tuple[Callable[..., Tensor], ...] = (
    expanded_by_expand, expanded_by_repeat, expanded_by_two_sums, expanded_by_bmm, absorbed_by_matmul,
    absorbed_by_einsum, absorbed_and_joined, absorbed_and_scaled_on_both_sides, absorbed_by_sdpa, by_sdpa,
    absorbed_and_widened_once, absorbed_and_joined_for_all_heads, absorbed_with_a_scale_of_each_head,
    absorbed_keys_alone, absorbed_keys_beside_a_layer, absorbed_values_alone,
)  # fmt: skip


@dataclass(frozen=True)
class Mode:
    """So many queries and keys, and what masks them."""

    queries: int
    keys: int
    seen: Callable[[Tensor], Tensor | None]

    def run(self, form: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, latent, rope, up: form(q, latent, rope, up, self.seen(q))

    def inputs(self, dtype: torch.dtype) -> tuple[Any, ...]:
        shapes = ((B, N, self.queries, D + R), (B, self.keys, C), (B, self.keys, R))
        data = (activations(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))
        return *data, nn.Parameter((activations(9, N * (D + E), C) * C**-0.5).to(dtype), requires_grad=False)


def padded(q: Tensor) -> Tensor:
    """Causal; the first sequence is padded by two on the right."""
    there = torch.arange(T) < torch.tensor([T - 2, T])[:, None]
    return causal(q, T) & there[:, None, None]


MODES = {
    "step": Mode(1, T, lambda q: None),
    "prompt": Mode(T, T, lambda q: causal(q, T)),
    "speculative": Mode(4, T, lambda q: causal(q, T)),
    "padded": Mode(T, T, padded),
}


# what only looks like it ---------------------------------------------------------------------------------------------


def values_of_another_latent(q, latent, rope, up, seen):
    _, v = F.linear(latent.flip(-1), up).view(B, -1, N, D + E).transpose(1, 2).split((D, E), -1)
    k, _ = F.linear(latent, up).view(B, -1, N, D + E).transpose(1, 2).split((D, E), -1)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1)
    return shares(q @ k.mT, seen, q.dtype) @ v


def up_of_each_position(q, latent, rope, up, seen):
    growing = latent * torch.arange(1, latent.shape[1] + 1).to(latent.dtype)[:, None]
    k, _ = F.linear(growing, up).view(B, -1, N, D + E).transpose(1, 2).split((D, E), -1)
    _, v = F.linear(latent, up).view(B, -1, N, D + E).transpose(1, 2).split((D, E), -1)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1)
    return shares(q @ k.mT, seen, q.dtype) @ v


def scale_of_each_key(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    nope, turn = q.split((D, R), -1)
    scores = (nope @ up_k) @ latent[:, None].mT + turn @ rope[:, None].mT
    scores = scores * torch.arange(1, latent.shape[1] + 1).to(q.dtype)
    return (shares(scores, seen, q.dtype) @ latent[:, None]) @ up_v.mT


def softmax_over_queries(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    nope, turn = q.split((D, R), -1)
    scores = (nope @ up_k) @ latent[:, None].mT + turn @ rope[:, None].mT
    return ((scores * SCALE).softmax(-2) @ latent[:, None]) @ up_v.mT


def values_of_other_sequences(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    nope, turn = q.split((D, R), -1)
    scores = (nope @ up_k) @ latent[:, None].mT + turn @ rope[:, None].mT
    return (shares(scores, seen, q.dtype) @ latent.flip(0)[:, None]) @ up_v.mT


def values_of_another_latent_beside_absorbed_keys(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    query = torch.cat((q[..., :D] @ up_k, q[..., D:]), -1)
    keys = torch.cat((latent, rope), -1)[:, None]
    return shares(query @ keys.mT, seen, q.dtype) @ torch.einsum("btc,nec->bnte", latent.flip(-1), up_v)


def absorbed_values_of_another_latent(q, latent, rope, up, seen):
    up_k, up_v = ups(up)
    k = torch.einsum("btc,ndc->bntd", latent, up_k)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1)
    return (shares(q @ k.mT, seen, q.dtype) @ latent.flip(1)[:, None]) @ up_v.mT


LOOKALIKES: tuple[tuple[Callable[..., Tensor], str], ...] = (
    (values_of_another_latent, "different latents"),
    (up_of_each_position, "different latents"),
    (scale_of_each_key, "they are multiplied by a tensor that"),
    (softmax_over_queries, "taken over the queries"),
    (values_of_other_sequences, ""),
    (values_of_another_latent_beside_absorbed_keys, ""),
    (absorbed_values_of_another_latent, ""),
)
