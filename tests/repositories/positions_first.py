"""In the manner of NVIDIA/Megatron-LM, facebookresearch/fairseq and THUDM/ChatGLM3: positions before sequences.

Heads are flattened into the batch, and scores go into memory that stands ready.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

B, S, HEADS, GROUPS, D = 2, 24, 8, 2, 64
DIM = HEADS * D
NOPE, ROPE, LATENT, QUERY, VALUES = 128, 64, 512, 192, 128
INDEX_HEADS, INDEX_D, CHOSEN = 4, 128, 16


class Core(nn.Module):
    """Attention without its projections; `offset` as what a softmax adds to its sum: none, zeros, or learnt."""

    def __init__(self, offset: str) -> None:
        super().__init__()
        self.offset = None if offset == "none" else nn.Parameter(torch.zeros(HEADS))
        if offset == "learnable":
            nn.init.normal_(self.offset)

    def softmax(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        given = scores.dtype
        scores = scores.float()
        if mask is None:
            s, t = scores.shape[2:]
            mask = torch.ones(s, t, dtype=torch.bool, device=scores.device).tril(t - s).logical_not()
        scores.masked_fill_(mask, -10000.0)
        if self.offset is None:
            return torch.softmax(scores, dim=-1).to(given)
        one = self.offset.reshape(1, -1, 1, 1).expand(scores.size(0), -1, scores.size(2), -1)
        return torch.softmax(torch.cat([scores, one], dim=-1), dim=-1)[..., :-1].to(given)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        s, b, n, d = query.shape
        t = key.size(0)
        if n != key.size(2):
            key = key.repeat_interleave(n // key.size(2), dim=2)
            value = value.repeat_interleave(n // value.size(2), dim=2)
        query = query.reshape(s, b * n, -1)
        key = key.view(t, b * n, -1)
        room = torch.empty(b * n, s, t, dtype=query.dtype, device=query.device)
        scores = torch.baddbmm(
            room, query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=d**-0.5
        )
        shares = self.softmax(scores.view(b, n, s, t), mask)
        value = value.view(t, b * n, -1)
        context = torch.bmm(shares.view(b * n, s, t), value.transpose(0, 1)).view(b, n, s, d)
        return context.permute(2, 0, 1, 3).contiguous().view(s, b, n * d)


def core(dtype: torch.dtype, groups: int = HEADS, offset: str = "none", mask: bool = False) -> Made:
    q, k, v = normal(dtype, S, B, HEADS, D), normal(dtype, S, B, groups, D), normal(dtype, S, B, groups, D)
    hides = (torch.ones(S, S, dtype=torch.bool).triu(1).view(1, 1, S, S).repeat(B, 1, 1, 1),) if mask else ()
    return Core(offset).to(dtype), (q, k, v, *hides)


def turned(x: Tensor, freqs: Tensor) -> Tensor:
    """Halves, [S, B, N, D] by [S, 1, 1, D]; what is behind the rotated lanes passes."""
    lanes = freqs.shape[-1]
    x, rest = x[..., :lanes], x[..., lanes:]
    cos, sin = torch.cos(freqs).to(x.dtype), torch.sin(freqs).to(x.dtype)
    one, two = torch.chunk(x, 2, dim=-1)
    return torch.cat(((x * cos) + (torch.cat((-two, one), dim=-1) * sin), rest), dim=-1)


class Sparse(nn.Module):
    """The latent attention of DeepSeek-V3.2, expanded, and its indexer; hidden by a sum of masks."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_norm = linear(512, QUERY), nn.RMSNorm(QUERY)
        self.q_up = linear(QUERY, HEADS * (NOPE + ROPE))
        self.kv_down, self.kv_norm = linear(512, LATENT + ROPE), nn.RMSNorm(LATENT)
        self.kv_up = linear(LATENT, HEADS * (NOPE + VALUES))
        self.wq_b, self.wk, self.k_norm = (
            linear(QUERY, INDEX_HEADS * INDEX_D),
            linear(512, INDEX_D),
            nn.LayerNorm(INDEX_D),
        )
        self.weights_proj = linear(512, INDEX_HEADS)
        self.proj = linear(HEADS * VALUES, 512)

    def rotated_last(self, x: Tensor, freqs: Tensor) -> Tensor:
        rest, last = torch.split(x, [x.shape[-1] - ROPE, ROPE], dim=-1)
        return torch.cat([rest, turned(last, freqs)], dim=-1)

    def listed(self, x: Tensor, qr: Tensor, freqs: Tensor, mask: Tensor) -> Tensor:
        s, b, _ = x.shape
        q = self.rotated_last(self.wq_b(qr).reshape(s, b, INDEX_HEADS, INDEX_D), freqs)
        k = self.rotated_last(self.k_norm(self.wk(x)).reshape(s, b, 1, INDEX_D), freqs).reshape(s, b, INDEX_D)
        weights = self.weights_proj(x) * (INDEX_HEADS**-0.5) * INDEX_D**-0.5
        scores = torch.relu(torch.einsum("sbhd,tbd->sbht", q.float(), k.float())) * weights.unsqueeze(-1)
        scores = scores.sum(dim=2).transpose(0, 1) + mask
        return scores.topk(min(CHOSEN, s), dim=-1)[1]

    def attended(self, query: Tensor, key: Tensor, value: Tensor, listed: Tensor) -> Tensor:
        s, b, n, d = query.shape
        t, dv = key.size(0), value.size(3)
        query = query.permute(1, 2, 0, 3).reshape(b * n, s, d)
        key = key.permute(1, 2, 3, 0).reshape(b * n, d, t)
        scores = (torch.bmm(query.float(), key.float()) * (NOPE + ROPE) ** -0.5).reshape(b, n, s, t)
        hides = torch.full((b, s, t), float("-inf"), device=scores.device)
        hides.scatter_(-1, listed, 0)
        hides += torch.triu(torch.full((s, t), float("-inf"), device=scores.device), diagonal=1).view(1, s, t)
        scores += hides.unsqueeze(1)
        shares = F.softmax(scores, dim=-1, dtype=torch.float32).reshape(b * n, s, t)
        value = value.permute(1, 2, 0, 3).reshape(b * n, t, dv)
        out = torch.bmm(shares.to(value.dtype), value).reshape(b, n, s, dv).permute(2, 0, 1, 3).contiguous()
        return out.reshape(s, b, n * dv)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        s, b, _ = x.shape
        qr = self.q_norm(self.q_down(x))
        query = self.rotated_last(self.q_up(qr).view(s, b, HEADS, NOPE + ROPE), freqs)
        latent, k_pe = torch.split(self.kv_down(x), [LATENT, ROPE], dim=-1)
        k_pe = turned(k_pe.unsqueeze(2), freqs)
        kv = self.kv_up(self.kv_norm(latent)).view(s, b, HEADS, NOPE + VALUES)
        k_nope, value = torch.split(kv, [NOPE, VALUES], dim=-1)
        key = torch.cat([k_nope, k_pe.expand(-1, -1, HEADS, -1)], dim=-1)
        hides = torch.triu(torch.full((s, s), float("-inf"), device=x.device), diagonal=1)
        return self.proj(self.attended(query, key, value, self.listed(x, qr, freqs, hides)))


def sparse(dtype: torch.dtype, batch: int = B) -> Made:
    table = angles(S, ROPE)
    return Sparse().to(dtype), (normal(dtype, S, batch, 512), torch.cat((table, table), dim=-1)[:, None, None])


class Translation(nn.Module):
    """fairseq's attention of a sequence to itself; queries scaled before, both masks in scores of their own dtype."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (linear(DIM, DIM, True) for _ in range(4))

    def forward(self, query: Tensor, padding: Tensor | None = None) -> Tensor:
        t, b, _ = query.size()
        q = self.q_proj(query) * D**-0.5
        q = q.contiguous().view(t, b * HEADS, D).transpose(0, 1)
        k, v = (each(query).contiguous().view(-1, b * HEADS, D).transpose(0, 1) for each in (self.k_proj, self.v_proj))
        scores = torch.bmm(q, k.transpose(1, 2))
        if self.causal:
            future = torch.triu(torch.zeros(t, t, device=scores.device).float().fill_(float("-inf")), 1)
            scores = scores + future.type_as(scores).unsqueeze(0)
        if padding is not None:
            scores = scores.view(b, HEADS, t, -1)
            scores = scores.masked_fill(padding.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf"))
            scores = scores.view(b * HEADS, t, -1)
        shares = F.softmax(scores.float(), dim=-1).type_as(scores)
        return self.out_proj(torch.bmm(shares, v).transpose(0, 1).contiguous().view(t, b, DIM))


def translation(dtype: torch.dtype, causal: bool, padded: bool) -> Made:
    padding = (torch.arange(S)[None] >= torch.tensor([[S], [S - 5]]),) if padded else ()
    return Translation(causal).to(dtype), (normal(dtype, S, B, DIM), *padding)


def turned_pairs(x: Tensor, table: Tensor) -> Tensor:
    """The first lanes in pairs of neighbours, by cosines and sines beside each other."""
    s, _, n, _ = x.shape
    lanes = table.shape[-2] * 2
    x, rest = x[..., :lanes], x[..., lanes:]
    pairs = x.reshape(s, -1, n, lanes // 2, 2)
    table = table[:s].view(s, -1, 1, pairs.size(3), 2)
    one = pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1]
    two = pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1]
    return torch.cat((torch.stack([one, two], -1).flatten(3), rest), dim=-1)


class Chat(nn.Module):
    """ChatGLM's attention: half of the lanes rotated; scores divided by the layer's number, then multiplied by it."""

    def __init__(self, by_torch: bool, number: int = 3) -> None:
        super().__init__()
        self.by_torch, self.number = by_torch, number
        self.query_key_value, self.dense = linear(DIM, DIM + 2 * GROUPS * D, True), linear(DIM, DIM)

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, b, n, d = q.shape
        t = k.size(0)
        if self.by_torch:
            q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=s == t)
            return out.permute(2, 0, 1, 3).reshape(s, b, DIM)
        q, k = q.view(s, b * n, -1), k.view(t, b * n, -1)
        room = torch.empty(b * n, s, t, dtype=q.dtype, device=q.device)
        alpha = 1.0 / (d**0.5 * self.number)
        scores = torch.baddbmm(room, q.transpose(0, 1), k.transpose(0, 1).transpose(1, 2), beta=0.0, alpha=alpha)
        scores = scores.view(b, n, s, t).float() * self.number
        if s == t:
            mask = torch.ones(b, 1, s, t, device=scores.device, dtype=torch.bool)
            mask.tril_()
            scores = scores.masked_fill(~mask, float("-inf"))
        shares = F.softmax(scores, dim=-1).type_as(v).view(b * n, s, -1)
        out = torch.bmm(shares, v.view(t, b * n, -1).transpose(0, 1)).view(b, n, s, d)
        return out.permute(2, 0, 1, 3).contiguous().view(s, b, DIM)

    def forward(self, x: Tensor, table: Tensor, past: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, ...]:
        q, k, v = self.query_key_value(x).split([DIM, GROUPS * D, GROUPS * D], dim=-1)
        q = turned_pairs(q.view(*q.shape[:-1], HEADS, D), table)
        k, v = turned_pairs(k.view(*k.shape[:-1], GROUPS, D), table), v.view(*v.shape[:-1], GROUPS, D)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=0), torch.cat((past[1], v), dim=0)
        wide = (each.unsqueeze(-2).expand(-1, -1, -1, HEADS // GROUPS, -1).contiguous() for each in (k, v))
        keys, values = (each.view(*each.shape[:2], HEADS, D) for each in wide)
        return self.dense(self.attended(q, keys, values)), k, v


def chat(dtype: torch.dtype, by_torch: bool, decode: bool) -> Made:
    turned_by = angles(S + 1, D // 2)
    table = torch.stack([turned_by.cos(), turned_by.sin()], dim=-1).to(dtype)[:, None]
    if not decode:
        return Chat(by_torch).to(dtype), (normal(dtype, S, B, DIM), table)
    past = normal(dtype, S, B, GROUPS, D), normal(dtype, S, B, GROUPS, D)
    return Chat(by_torch).to(dtype), (normal(dtype, 1, B, DIM), table[S:], past)


MEGATRON, FAIRSEQ, CHATGLM = "NVIDIA/Megatron-LM", "facebookresearch/fairseq", "THUDM/ChatGLM3"
PIECES = (
    Piece(MEGATRON, "core attention", core),
    Piece(MEGATRON, "core attention of groups", lambda dtype: core(dtype, groups=GROUPS)),
    Piece(MEGATRON, "core attention, its mask passed in", lambda dtype: core(dtype, mask=True)),
    Piece(MEGATRON, "core attention, softmax off by one", lambda dtype: core(dtype, offset="off-by-one")),
    Piece(MEGATRON, "core attention, a learnt sink", lambda dtype: core(dtype, groups=GROUPS, offset="learnable")),
    Piece(MEGATRON, "sparse attention, prefill", sparse),
    Piece(MEGATRON, "sparse attention, prefill of one sequence", lambda dtype: sparse(dtype, batch=1)),
    Piece(FAIRSEQ, "attention, causal", lambda dtype: translation(dtype, causal=True, padded=False)),
    Piece(FAIRSEQ, "attention, padded", lambda dtype: translation(dtype, causal=False, padded=True)),
    Piece(FAIRSEQ, "attention, causal and padded", lambda dtype: translation(dtype, causal=True, padded=True)),
    Piece(CHATGLM, "attention by hand, prefill", lambda dtype: chat(dtype, by_torch=False, decode=False)),
    Piece(CHATGLM, "attention by hand, decode", lambda dtype: chat(dtype, by_torch=False, decode=True)),
    Piece(
        CHATGLM, "attention by the operator of torch, prefill", lambda dtype: chat(dtype, by_torch=True, decode=False)
    ),
    Piece(CHATGLM, "attention by the operator of torch, decode", lambda dtype: chat(dtype, by_torch=True, decode=True)),
)
