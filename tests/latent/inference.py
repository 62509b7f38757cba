"""Blocks of latent attention as published inference code has them: caches of whole models, complex rotation, slices.

What is rotated stays in pairs of neighbouring lanes, in the cache too; keys are expanded ("naive") or absorbed. Sizes
are the smallest that the kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Widths of one block, and the sequences and positions that its caches hold."""

    hidden: int = 1024
    inter: int = 512
    heads: int = 4
    q_rank: int = 1536
    rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    batch: int = 4
    length: int = 128
    index_heads: int = 8
    index_width: int = 128
    topk: int = 32

    @property
    def scale(self) -> float:
        """Of the scores."""
        return (self.nope + self.rope) ** -0.5


SIZES = Sizes()


def frequencies(length: int, width: int) -> Tensor:
    """exp(i · position · θ) [length, width / 2]."""
    angles = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(0, width, 2) / width))
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """x [B, S, N, R] in pairs of neighbours, which stay neighbours."""
    pairs = torch.view_as_complex(wide(x).view(*x.shape[:-1], -1, 2))
    freqs = freqs.view(1, x.size(1), 1, pairs.size(-1))
    return torch.view_as_real(pairs * freqs).flatten(3).to(x.dtype)


def wide(x: Tensor) -> Tensor:
    """In float32; what is exact stays so."""
    return x if x.dtype == torch.float64 else x.float()


class Norm(nn.Module):
    """Its gain in the dtype of the model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(width) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class WideNorm(nn.Module):
    """Its gain in float32; the sum with a residual is normalised before it is rounded."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(1 + torch.randn(width, dtype=torch.float32) / 8)

    def forward(self, x: Tensor, residual: Tensor | None = None):
        both = wide(x) if residual is None else wide(x) + wide(residual)
        normed = both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + self.eps)
        y = (self.weight * normed).to(x.dtype)
        return y if residual is None else (y, both.to(x.dtype))


class WideLayerNorm(nn.Module):
    """In float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(width, dtype=torch.float32) / 8)
        self.bias = nn.Parameter(torch.randn(width, dtype=torch.float32) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(wide(x), self.weight.shape, self.weight, self.bias, 1e-6).type_as(x)


class Linear(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Attention(nn.Module):
    """Dense; `absorbs` keeps the latent in the cache, else keys and values of all heads."""

    def __init__(self, absorbs: bool = True, of: Sizes = SIZES, norm: Any = Norm, lora: bool = True) -> None:
        super().__init__()
        self.absorbs, self.of, self.lora = absorbs, of, lora
        if lora:
            self.wq_a, self.q_norm = Linear(of.hidden, of.q_rank), norm(of.q_rank)
        self.wq_b = Linear(of.q_rank if lora else of.hidden, of.heads * (of.nope + of.rope))
        self.wkv_a, self.kv_norm = Linear(of.hidden, of.rank + of.rope), norm(of.rank)
        self.wkv_b = Linear(of.rank, of.heads * (of.nope + of.value))
        self.wo = Linear(of.heads * of.value, of.hidden)
        widths = ((of.rank,), (of.rope,)) if absorbs else ((of.heads, of.nope + of.rope), (of.heads, of.value))
        for name, width in zip(("kv_cache", "pe_cache"), widths, strict=True):
            self.register_buffer(name, torch.randn(of.batch, of.length, *width), persistent=False)

    def forward(self, x: Tensor, start_pos: int, freqs: Tensor, mask: Tensor | None) -> Tensor:
        of, (bsz, seqlen, _) = self.of, x.size()
        end_pos = start_pos + seqlen
        q = self.wq_b(self.q_norm(self.wq_a(x)) if self.lora else x).view(bsz, seqlen, of.heads, -1)
        q_nope, q_pe = torch.split(q, [of.nope, of.rope], dim=-1)
        q_pe = rotated(q_pe, freqs)
        kv, k_pe = torch.split(self.wkv_a(x), [of.rank, of.rope], dim=-1)
        k_pe = rotated(k_pe.unsqueeze(2), freqs)
        if not self.absorbs:
            kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, of.heads, -1)
            k_nope, v = torch.split(kv, [of.nope, of.value], dim=-1)
            self.kv_cache[:bsz, start_pos:end_pos] = torch.cat([k_nope, k_pe.expand(-1, -1, of.heads, -1)], dim=-1)
            self.pe_cache[:bsz, start_pos:end_pos] = v
            q = torch.cat([q_nope, q_pe], dim=-1)
            scores = torch.einsum("bshd,bthd->bsht", q, self.kv_cache[:bsz, :end_pos]) * of.scale
        else:
            wkv_b = self.wkv_b.weight.view(of.heads, -1, of.rank)
            q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : of.nope])
            self.kv_cache[:bsz, start_pos:end_pos] = self.kv_norm(kv)
            self.pe_cache[:bsz, start_pos:end_pos] = k_pe.squeeze(2)
            scores = torch.einsum("bshc,btc->bsht", q_nope, self.kv_cache[:bsz, :end_pos])
            scores = (scores + torch.einsum("bshr,btr->bsht", q_pe, self.pe_cache[:bsz, :end_pos])) * of.scale
        if mask is not None:
            scores += mask.unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=wide(scores).dtype).type_as(x)
        if not self.absorbs:
            return self.wo(torch.einsum("bsht,bthd->bshd", scores, self.pe_cache[:bsz, :end_pos]).flatten(2))
        y = torch.einsum("bsht,btc->bshc", scores, self.kv_cache[:bsz, :end_pos])
        return self.wo(torch.einsum("bshc,hdc->bshd", y, wkv_b[:, -of.value :]).flatten(2))


class Gate(nn.Module):
    """The dense feed-forward layer; `widens` multiplies in float32."""

    def __init__(self, of: Sizes = SIZES, widens: bool = False) -> None:
        super().__init__()
        self.widens = widens
        self.w1, self.w3 = (Linear(of.hidden, of.inter) for _ in range(2))
        self.w2 = Linear(of.inter, of.hidden)

    def forward(self, x: Tensor) -> Tensor:
        if not self.widens:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))
        return self.w2((F.silu(wide(self.w1(x))) * wide(self.w3(x))).type_as(x))


class Block(nn.Module):
    """A layer whose residual is added behind each half."""

    def __init__(self, absorbs: bool = True, of: Sizes = SIZES, lora: bool = True) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(absorbs, of, lora=lora), Gate(of)
        self.attn_norm, self.ffn_norm = Norm(of.hidden), Norm(of.hidden)

    def forward(self, x: Tensor, start_pos: int, freqs: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), start_pos, freqs, mask)
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    """Layers without an embedding."""

    def __init__(self, layers: int = 2, absorbs: bool = True, of: Sizes = SIZES, lora: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(absorbs, of, lora) for _ in range(layers))
        self.norm = Norm(of.hidden)
        self.register_buffer("freqs", frequencies(of.length, of.rope), persistent=False)

    def forward(self, x: Tensor, start_pos: int) -> Tensor:
        seqlen = x.size(1)
        freqs = self.freqs[start_pos : start_pos + seqlen]
        mask = torch.full((seqlen, seqlen), float("-inf")).triu_(1) if seqlen > 1 else None
        for layer in self.layers:
            x = layer(x, start_pos, freqs, mask)
        return self.norm(x)


# the sparse one -------------------------------------------------------------------------------------------------------


def hadamard(width: int) -> Tensor:
    """H / √width [width, width]."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix * width**-0.5


class Indexer(nn.Module):
    """Which keys each query attends to."""

    def __init__(self, of: Sizes = SIZES) -> None:
        super().__init__()
        self.of = of
        self.wq_b, self.wk = Linear(of.q_rank, of.index_heads * of.index_width), Linear(of.hidden, of.index_width)
        self.k_norm, self.weights_proj = WideLayerNorm(of.index_width), Linear(of.hidden, of.index_heads)
        self.register_buffer("k_cache", torch.randn(of.batch, of.length, of.index_width), persistent=False)
        self.register_buffer("turn", hadamard(of.index_width), persistent=False)

    def forward(self, x: Tensor, qr: Tensor, start_pos: int, freqs: Tensor, mask: Tensor | None) -> Tensor:
        of, (bsz, seqlen, _) = self.of, x.size()
        end_pos, rest = start_pos + seqlen, of.index_width - of.rope
        q_pe, q_nope = torch.split(self.wq_b(qr).unflatten(-1, (of.index_heads, -1)), [of.rope, rest], dim=-1)
        q = torch.cat([rotated(q_pe, freqs), q_nope], dim=-1) @ self.turn
        k_pe, k_nope = torch.split(self.k_norm(self.wk(x)), [of.rope, rest], dim=-1)
        k = torch.cat([rotated(k_pe.unsqueeze(2), freqs).squeeze(2), k_nope], dim=-1) @ self.turn
        self.k_cache[:bsz, start_pos:end_pos] = k
        weights = self.weights_proj(x) * of.index_heads**-0.5 * of.index_width**-0.5
        products = torch.einsum("bshd,btd->bsht", wide(q), wide(self.k_cache[:bsz, :end_pos]))
        scores = (products.relu() * weights.unsqueeze(-1)).sum(dim=2)
        if mask is not None:
            scores += mask
        return scores.topk(min(of.topk, end_pos), dim=-1, sorted=False)[1]


class SparseAttention(Attention):
    """Beside an indexer: a prompt attends to expanded keys, a token to the latent."""

    def __init__(self, of: Sizes = SIZES) -> None:
        super().__init__(True, of, WideNorm)
        self.indexer = Indexer(of)

    def forward(self, x: Tensor, start_pos: int, freqs: Tensor, mask: Tensor | None) -> Tensor:
        of, (bsz, seqlen, _) = self.of, x.size()
        end_pos = start_pos + seqlen
        qr = self.q_norm(self.wq_a(x))
        q_nope, q_pe = torch.split(self.wq_b(qr).view(bsz, seqlen, of.heads, -1), [of.nope, of.rope], dim=-1)
        q_pe = rotated(q_pe, freqs)
        kv, k_pe = torch.split(self.wkv_a(x), [of.rank, of.rope], dim=-1)
        kv, k_pe = self.kv_norm(kv), rotated(k_pe.unsqueeze(2), freqs)
        self.kv_cache[:bsz, start_pos:end_pos] = kv
        self.pe_cache[:bsz, start_pos:end_pos] = k_pe.squeeze(2)
        if mask is not None:
            q = torch.cat([q_nope, q_pe], dim=-1)
            k_nope, v = torch.split(self.wkv_b(kv).view(bsz, seqlen, of.heads, -1), [of.nope, of.value], dim=-1)
            k = torch.cat([k_nope, k_pe.expand(-1, -1, of.heads, -1)], dim=-1)
            scores = torch.einsum("bshd,bthd->bsht", wide(q), wide(k)) * of.scale
            listed = self.indexer(x, qr, start_pos, freqs, mask)
            shown = torch.full((bsz, seqlen, seqlen), float("-inf")).scatter_(-1, listed, 0)
            shown += mask
            scores += shown.unsqueeze(2)
            scores = scores.softmax(dim=-1, dtype=wide(scores).dtype)
            return self.wo(torch.einsum("bsht,bthd->bshd", scores.type_as(x), v).flatten(2))
        wkv_b = self.wkv_b.weight.view(of.heads, -1, of.rank)
        q_nope = torch.einsum("bshd,hdc->bshc", q_nope, wkv_b[:, : of.nope])
        scores = torch.einsum("bshc,btc->bsht", wide(q_nope), wide(self.kv_cache[:bsz, :end_pos]))
        scores = scores + torch.einsum("bshr,btr->bsht", wide(q_pe), wide(self.pe_cache[:bsz, :end_pos]))
        listed = self.indexer(x, qr, start_pos, freqs, mask)
        shown = torch.full((bsz, 1, end_pos), float("-inf")).scatter_(-1, listed, 0)
        scores = (scores * of.scale + shown.unsqueeze(2)).softmax(dim=-1, dtype=wide(scores).dtype)
        y = torch.einsum("bsht,btc->bshc", scores.type_as(x), self.kv_cache[:bsz, :end_pos])
        return self.wo(torch.einsum("bshc,hdc->bshd", y, wkv_b[:, -of.value :]).flatten(2))


class SparseBlock(nn.Module):
    """A layer that hands its residual on."""

    def __init__(self, of: Sizes = SIZES) -> None:
        super().__init__()
        self.attn, self.ffn = SparseAttention(of), Gate(of, widens=True)
        self.attn_norm, self.ffn_norm = WideNorm(of.hidden), WideNorm(of.hidden)

    def forward(self, x: Tensor, residual: Tensor | None, start_pos: int, freqs: Tensor, mask: Tensor | None):
        x, residual = (self.attn_norm(x), x) if residual is None else self.attn_norm(x, residual)
        x, residual = self.ffn_norm(self.attn(x, start_pos, freqs, mask), residual)
        return self.ffn(x), residual


class SparseModel(nn.Module):
    """Layers without an embedding."""

    def __init__(self, layers: int = 2, of: Sizes = SIZES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SparseBlock(of) for _ in range(layers))
        self.norm = WideNorm(of.hidden)
        self.register_buffer("freqs", frequencies(of.length, of.rope), persistent=False)

    def forward(self, x: Tensor, start_pos: int) -> Tensor:
        seqlen, residual = x.size(1), None
        freqs = self.freqs[start_pos : start_pos + seqlen]
        mask = torch.full((seqlen, seqlen), float("-inf")).triu_(1) if seqlen > 1 else None
        for layer in self.layers:
            x, residual = layer(x, residual, start_pos, freqs, mask)
        return self.norm(x, residual)[0]


def in_dtype(model: nn.Module, dtype: torch.dtype, gains: torch.dtype | None = None) -> nn.Module:
    """What is complex stays so; gains that are in float32 become `gains`, by default as they are."""
    for held in (*model.parameters(), *model.buffers()):
        if not held.is_complex():
            held.requires_grad_(False)
    for module in model.modules():
        is_wide = isinstance(module, WideNorm | WideLayerNorm)
        for held in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if not held.is_complex():
                held.data = held.data.to((gains or held.dtype) if is_wide else dtype)
    return model.eval()
