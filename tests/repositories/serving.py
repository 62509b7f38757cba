"""In the manner of the native paths of vllm-project/vllm and sgl-project/sglang, and of their references."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from .base import Made, Piece, angles, linear, normal, of_experts

HEADS, GROUPS, D, PAGE, DIM = 8, 2, 64, 16, 512


def paged(q, keys, values, of_queries, of_keys, table, scale, window=None, cap=None):
    """vLLM's: q [tokens, n, d], pages [p, 16, m, d], table [b, blocks], lengths as integers."""
    outputs, start = [], 0
    for i, (s, t) in enumerate(zip(of_queries, of_keys, strict=True)):
        one = q[start : start + s]
        one = one * scale
        blocks = table[i, : (t + PAGE - 1) // PAGE]
        k, v = keys[blocks].view(-1, GROUPS, D)[:t], values[blocks].view(-1, GROUPS, D)[:t]
        k = torch.repeat_interleave(k, one.shape[1] // k.shape[1], dim=1)
        v = torch.repeat_interleave(v, one.shape[1] // v.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", one, k).float()
        every = torch.ones(s, t)
        hidden = torch.triu(every, diagonal=t - s + 1).bool()
        if window is not None:
            hidden |= torch.triu(every, diagonal=t - (s + window) + 1).bool().logical_not()
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores.masked_fill_(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1).to(v.dtype)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        start += s
    return torch.cat(outputs, dim=0)


def of_paged(dtype: torch.dtype, of_queries: tuple[int, ...], of_keys: tuple[int, ...], *how) -> Made:
    pages = normal(dtype, 32, PAGE, GROUPS, D), normal(dtype, 32, PAGE, GROUPS, D)
    table = torch.randperm(32)[: 2 * 8].view(2, 8).int()
    return paged, (normal(dtype, sum(of_queries), HEADS, D), *pages, of_queries, of_keys, table, D**-0.5, *how)


class Norm(nn.Module):
    """vLLM's and SGLang's native norm: with a residual it gives both sums."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, residual: Tensor | None = None):
        dtype = x.dtype
        x = x.to(torch.float32)
        if residual is not None:
            x = x + residual.to(torch.float32)
            residual = x.to(dtype)
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        x = x.to(dtype) * self.weight
        return x if residual is None else (x, residual)


class Rotary(nn.Module):
    """The native rotation of both: a table of cosines and sines, halves ("neox") or pairs, some lanes or all."""

    def __init__(self, lanes: int, neox: bool) -> None:
        super().__init__()
        self.lanes, self.neox = lanes, neox
        turned = angles(256, lanes)
        self.register_buffer("cos_sin_cache", torch.cat((turned.cos(), turned.sin()), dim=-1))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
        one, two = torch.chunk(x, 2, dim=-1) if self.neox else (x[..., ::2], x[..., 1::2])
        first, second = one * cos - two * sin, two * cos + one * sin
        if self.neox:
            return torch.cat((first, second), dim=-1)
        return torch.stack((first, second), dim=-1).flatten(-2)

    def forward(self, positions: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.flatten()
        tokens = positions.shape[0]
        cos, sin = self.cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
        results = []
        for each in (q, k):
            heads = each.view(tokens, -1, D)
            turned = self.turned(heads[..., : self.lanes], cos, sin)
            results.append(torch.cat((turned, heads[..., self.lanes :]), dim=-1).reshape(each.shape))
        return results[0], results[1]


class Extend(nn.Module):
    """SGLang's torch-native backend: rows are stored by slot, read by request, a queue of queries in front."""

    def __init__(self, decode: bool) -> None:
        super().__init__()
        self.decode = decode

    def forward(self, q, k, v, k_cache, v_cache, slots, of_requests, requests, of_keys, of_prefix):
        k_cache[slots], v_cache[slots] = k.view(-1, GROUPS, D), v.view(-1, GROUPS, D)
        out = torch.empty_like(q)
        o, query, start = out.view(-1, HEADS, D), q.view(-1, HEADS, D).movedim(0, 1), 0
        for i, t in enumerate(of_keys):
            s = 1 if self.decode else t - of_prefix[i]
            one = query[:, start : start + s, :]
            if not self.decode:
                longer = torch.empty((HEADS, t, D), dtype=q.dtype, device=q.device)
                longer[:, of_prefix[i] :, :] = one
                one = longer
            rows = torch.index_select(of_requests, 0, requests[i].view(1)).squeeze(0)[:t]
            key, value = k_cache[rows].movedim(0, 1), v_cache[rows].movedim(0, 1)
            y = scaled_dot_product_attention(
                one.unsqueeze(0),
                key.unsqueeze(0),
                value.unsqueeze(0),
                enable_gqa=True,
                scale=D**-0.5,
                is_causal=not self.decode,
            )
            y = y.squeeze(0).movedim(1, 0)
            o[start : start + s, :, :] = y if self.decode else y[of_prefix[i] :, :, :]
            start += s
        return out


def extend(dtype: torch.dtype, decode: bool, of_keys: tuple[int, ...], of_prefix: tuple[int, ...]) -> Made:
    tokens = len(of_keys) if decode else sum(of_keys) - sum(of_prefix)
    rows = torch.randperm(256)
    fresh = [
        row for i, t in enumerate(of_keys) for row in range(64 * i + (t - 1 if decode else of_prefix[i]), 64 * i + t)
    ]
    caches = normal(dtype, 256, GROUPS, D), normal(dtype, 256, GROUPS, D)
    projected = normal(dtype, tokens, HEADS * D), normal(dtype, tokens, GROUPS * D), normal(dtype, tokens, GROUPS * D)
    requests = torch.arange(len(of_keys))
    return Extend(decode), (*projected, *caches, rows[fresh], rows.view(4, 64), requests, of_keys, of_prefix)


def grouped_topk(logits: Tensor, bias: Tensor | None, top: int = 6, groups: int = 8, kept: int = 4):
    """The native router of both, with and without a bias that only chooses."""
    tokens = logits.shape[0]
    scores = torch.softmax(logits, dim=-1) if bias is None else logits.sigmoid()
    choice = scores if bias is None else scores + bias.unsqueeze(0)
    if bias is None:
        of_group = choice.view(tokens, groups, -1).max(dim=-1).values
    else:
        of_group = choice.view(tokens, groups, -1).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(of_group, k=kept, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(of_group)
    mask.scatter_(1, best, 1)
    mask = mask.unsqueeze(-1).expand(tokens, groups, scores.size(-1) // groups).reshape(tokens, -1)
    choice = choice.masked_fill(~mask.bool(), 0.0 if bias is None else float("-inf"))
    shares, chosen = torch.topk(choice, k=top, dim=-1, sorted=False)
    if bias is not None:
        shares = scores.gather(1, chosen)
    shares = (shares / shares.sum(dim=-1, keepdim=True)).to(torch.float32)
    return of_experts(shares, chosen.to(torch.int32), scores.shape[-1])


class Layer(nn.Module):
    """A decoder layer between two that hand on `residual`: norms of sums, one projection, a gate of halves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = linear(DIM, (HEADS + 2 * GROUPS) * D), linear(HEADS * D, DIM)
        self.gate_up_proj, self.down_proj = linear(DIM, 512), linear(256, DIM)
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.q_norm, self.k_norm, self.rotary_emb = Norm(D), Norm(D), Rotary(D, True)

    def forward(self, positions: Tensor, x: Tensor, residual: Tensor, keys: Tensor, values: Tensor, slots: Tensor):
        x, residual = self.input_layernorm(x, residual)
        q, k, v = self.qkv_proj(x).split([HEADS * D, GROUPS * D, GROUPS * D], dim=-1)
        q = self.q_norm(q.view(*q.shape[:-1], HEADS, D)).view(q.shape)
        k = self.k_norm(k.view(*k.shape[:-1], GROUPS, D)).view(k.shape)
        q, k = self.rotary_emb(positions, q, k)
        flat_keys, flat_values = keys.view(-1, GROUPS, D), values.view(-1, GROUPS, D)
        flat_keys.index_copy_(0, slots, k.view(-1, GROUPS, D))
        flat_values.index_copy_(0, slots, v.view(-1, GROUPS, D))
        x = self.o_proj(q)
        x, residual = self.post_attention_layernorm(x, residual)
        gate_up = self.gate_up_proj(x)
        d = gate_up.shape[-1] // 2
        return self.down_proj(F.silu(gate_up[..., :d]) * gate_up[..., d:]), residual


def layer(dtype: torch.dtype) -> Made:
    pages = normal(dtype, 8, PAGE, GROUPS, D), normal(dtype, 8, PAGE, GROUPS, D)
    slots, positions = torch.randperm(128)[:6], torch.arange(6)
    return Layer().to(dtype), (positions, normal(dtype, 6, DIM), normal(dtype, 6, DIM), *pages, slots)


def rotary(dtype: torch.dtype, lanes: int, neox: bool) -> Made:
    inputs = torch.arange(6), normal(dtype, 6, HEADS * D), normal(dtype, 6, GROUPS * D)
    return Rotary(lanes, neox), inputs


VLLM, SGLANG = "vllm-project/vllm", "sgl-project/sglang"
PIECES = (
    Piece(VLLM, "ref_paged_attn, decode", lambda d: of_paged(d, (1, 1), (100, 37)), attentions=2),
    Piece(VLLM, "ref_paged_attn, prompts", lambda d: of_paged(d, (5, 20), (18, 90)), attentions=2),
    Piece(VLLM, "ref_paged_attn, window", lambda d: of_paged(d, (1, 20), (100, 90), 32), attentions=2),
    Piece(
        VLLM,
        "ref_paged_attn, soft caps",
        lambda d: of_paged(d, (1, 20), (100, 90), None, 50.0),
        attentions=2,
        why="tanh",
    ),
    Piece(VLLM, "decoder layer, all but attention", layer, attentions=0),
    Piece(VLLM, "rotation of halves", lambda d: rotary(d, D, True), attentions=0),
    Piece(VLLM, "rotation of pairs", lambda d: rotary(d, D, False), attentions=0),
    Piece(VLLM, "rotation of half the lanes", lambda d: rotary(d, 32, True), attentions=0),
    Piece(VLLM, "grouped_topk", lambda d: (grouped_topk, (normal(torch.float32, 16, 64), None)), attentions=0),
    Piece(
        VLLM,
        "grouped_topk with a bias",
        lambda d: (grouped_topk, (normal(torch.float32, 16, 64), torch.randn(64))),
        attentions=0,
    ),
    Piece(SGLANG, "torch-native extend", lambda d: extend(d, False, (20, 40), (0, 24)), attentions=2),
    Piece(SGLANG, "torch-native decode", lambda d: extend(d, True, (20, 40), (0, 0)), attentions=2),
)
