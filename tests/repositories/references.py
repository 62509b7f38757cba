"""In the manner of the functions that kernels are held against: flash-attention, FlashMLA, FlashInfer and tilelang."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Made, Piece, normal

B, HEADS, GROUPS, D = 2, 8, 2, 64
C, Dr, N = 512, 64, 16


def hidden_outside(s: int, t: int, window: tuple[int, int], lengths: Tensor | None) -> Tensor:
    """Where keys are out of sight, counted from the last key of each sequence."""
    row, column = torch.arange(s).unsqueeze(-1), torch.arange(t)
    end = t if lengths is None else lengths.view(-1, 1, 1, 1)
    if window[0] < 0:
        return column > row + end - s + window[1]
    limit = torch.full_like(column, t) if lengths is None else end
    beyond = column > torch.minimum(row + end - s + window[1], limit)
    return torch.logical_or(beyond, column < row + end - s - window[0])


def flash(q, k, v, valid=None, causal=False, window=(-1, -1), cap=0.0, bias=None, upcast=True, reorder=False):
    """q [b, s, n, d], k and v [b, t, m, d], valid bool [b, t]."""
    window = (window[0], 0) if causal else window
    dtype = q.dtype
    if upcast:
        q, k, v = q.float(), k.float(), v.float()
    s, t, shared = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k = k[:, :, :, None].expand(-1, -1, -1, shared, -1).reshape(k.shape[0], t, -1, k.shape[-1])
    v = v[:, :, :, None].expand(-1, -1, -1, shared, -1).reshape(v.shape[0], t, -1, v.shape[-1])
    root = math.sqrt(q.shape[-1])
    one, two = (q, k / root) if reorder else (q / root, k)
    scores = torch.einsum("bthd,bshd->bhts", one, two)
    if cap > 0:
        scores = torch.tanh(scores / cap) * cap
    if valid is not None:
        scores.masked_fill_(~valid[:, None, None, :], float("-inf"))
    if window[0] >= 0 or window[1] >= 0:
        lengths = None if valid is None else valid.sum(-1)
        scores.masked_fill_(hidden_outside(s, t, window, lengths), float("-inf"))
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores, dim=-1).to(v.dtype)
    return torch.einsum("bhts,bshd->bthd", weights, v * 1.0).to(dtype)


def of_flash(dtype: torch.dtype, s: int, t: int, valid: bool = False, bias: bool = False, **how) -> Made:
    inputs = normal(dtype, B, s, HEADS, D), normal(dtype, B, t, GROUPS, D), normal(dtype, B, t, GROUPS, D)
    seen = torch.arange(t) < torch.tensor([[t - 5], [t]]) if valid else None
    slopes = normal(torch.float32, B, HEADS, s, t) if bias else None

    def called(q, k, v, seen=None, slopes=None):
        return flash(q, k, v, seen, bias=slopes, **how)

    return called, (*inputs, seen, slopes)


def dense_latent(q: Tensor, blocks: Tensor, table: Tensor, lengths: tuple[int, ...], causal: bool, rounded: bool):
    """FlashMLA's: q [b, s, n, 576], pages of 64 rows; the log-sum-exp beside. Results are rounded last, if ever."""
    b, s, n, d = q.shape
    out, sums = torch.empty(b, s, n, C, dtype=torch.float32), torch.empty(b, n, s, dtype=torch.float32)
    for i, t in enumerate(lengths):
        rows = blocks[table[i][: (t + 63) // 64]].view(-1, 1, d)[:t]
        query, kv = q[i].transpose(0, 1).float(), rows.transpose(0, 1).float()
        if rounded:
            kv[kv != kv] = 0.0
        scores = query @ kv.transpose(-2, -1) / math.sqrt(d)
        if causal:
            bias = torch.zeros(s, t, dtype=query.dtype)
            bias.masked_fill_(torch.ones(s, t, dtype=torch.bool).tril(diagonal=t - s).logical_not(), float("-inf"))
            scores += bias
        lse = scores.logsumexp(dim=-1)
        y = torch.softmax(scores, dim=-1, dtype=torch.float32) @ kv[..., :C]
        if rounded:
            lonely = lse == float("-inf")
            y[lonely.unsqueeze(-1).broadcast_to(y.shape)] = 0.0
            lse[lonely] = float("+inf")
        out[i], sums[i] = y.transpose(0, 1), lse
    return out.to(q.dtype) if rounded else out, sums


def of_dense_latent(dtype: torch.dtype, s: int, causal: bool, rounded: bool = True) -> Made:
    table = torch.randperm(B * 4, dtype=torch.int32).view(B, 4)
    inputs = normal(dtype, B, s, N, C + Dr), normal(dtype, B * 4, 64, 1, C + Dr), table
    return dense_latent, (*inputs, (200, 256), causal, rounded)


def sparse_prefill(q: Tensor, kv: Tensor, indices: Tensor, scale: float):
    """FlashMLA's: q [s, n, 576], kv [t, 576], indices [s, k], those beyond the keys left out."""
    s, k = indices.shape
    wrong = (indices < 0) | (indices >= kv.shape[0])
    rows = kv.index_select(0, indices.masked_fill(wrong, 0).flatten()).reshape(s, k, -1).float()
    scores = q.float() @ rows.transpose(1, 2)
    scores *= scale
    scores.masked_fill_(wrong.unsqueeze(1).broadcast_to(scores.shape), float("-inf"))
    sums = torch.logsumexp(scores, dim=-1)
    kept = sums.clone()
    kept.masked_fill_(kept == float("-inf"), float("+inf"))
    return (torch.exp(scores - kept.unsqueeze(-1)) @ rows[..., :C]).to(q.dtype)


def sparse_decode(q: Tensor, blocks: Tensor, indices: Tensor, scale: float):
    """FlashMLA's: q [b, s, n, 576], pages [p, 64, 1, 576], indices [b, s, k] of rows, -1 for none."""
    b, s, n, d = q.shape
    k = indices.size(-1)
    rows = blocks.view(-1, d).index_select(0, torch.clamp_min(indices, 0).view(-1)).view(b, s, k, d)
    wrong = (indices == -1).view(b * s, 1, k)
    rows = rows.view(b * s, -1, d).float()
    weights = q.float().view(b * s, n, d) @ rows.transpose(-1, -2)
    weights *= scale
    weights[wrong.broadcast_to(b * s, n, k)] = float("-inf")
    sums = weights.logsumexp(dim=-1)
    weights = torch.exp(weights - sums.unsqueeze(-1))
    output = (weights @ rows[..., :C]).view(b, s, n, C)
    sums = sums.view(b, s, n)
    lonely = sums == float("-inf")
    output = output.masked_fill(lonely.unsqueeze(-1), 0.0)
    return output.to(q.dtype), sums.masked_fill(lonely, float("+inf")).transpose(1, 2)


def of_prefill_lists(dtype: torch.dtype) -> Made:
    indices = torch.stack([torch.randperm(4096)[:2048] for _ in range(2)])
    return sparse_prefill, (normal(dtype, 2, N, C + Dr), normal(dtype, 4096, C + Dr), indices, 0.04)


def of_decode_lists(dtype: torch.dtype) -> Made:
    indices = torch.stack([torch.randperm(4096)[:2048] for _ in range(2)]).unsqueeze(1)
    return sparse_decode, (normal(dtype, 2, 1, N, C + Dr), normal(dtype, 64, 64, 1, C + Dr), indices, 0.04)


def flashinfer(batch: int, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float):
    """FlashInfer's: q [b · s, n, d], k and v [b · t, n, d]; the mask compares ranges of positions."""
    s, t, n = q.shape[0] // batch, k.shape[0] // batch, q.shape[1]
    one, two = q.view(batch, s, n, -1).float(), k.view(batch, t, n, -1).float()
    scores = torch.einsum("bmhd,bnhd->bhmn", one, two) * scale
    ordered = torch.arange(t - s, t).unsqueeze(1) >= torch.arange(0, t).unsqueeze(0)
    mask = ordered if causal else torch.ones(s, t)
    scores = scores.masked_fill(mask.unsqueeze(0).unsqueeze(0) == 0, float("-inf"))
    sums = torch.logsumexp(scores, -1).transpose(-1, -2)
    weights = torch.softmax(scores, dim=-1)
    out = torch.einsum("bhmn,bnhd->bmhd", weights, v.view(batch, t, n, -1).float())
    return out.contiguous().view(batch * s, n, -1).to(q), sums * math.log2(math.e)


def of_flashinfer(dtype: torch.dtype, s: int, t: int, keys: int = D, values: int = D) -> Made:
    inputs = normal(dtype, B * s, HEADS, keys), normal(dtype, B * t, HEADS, keys), normal(dtype, B * t, HEADS, values)
    return flashinfer, (B, *inputs, True, keys**-0.5)


def flashinfer_latent(q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor, lengths: Tensor, scale: float):
    """FlashInfer's decode over a latent: one query each, q_nope [b, n, 512], pages of one row in a row of their own."""
    kv = torch.cat([ckv, kpe], dim=-1)
    scores = torch.einsum("bhd,btd->bht", torch.cat([q_nope, q_pe], dim=-1).float(), kv.float()) * scale
    beyond = torch.arange(kv.shape[1])[None, None, :] >= lengths[:, None, None]
    weights = torch.softmax(scores.masked_fill(beyond, float("-inf")), dim=-1)
    return torch.einsum("bht,btd->bhd", weights, ckv.float()).to(q_nope.dtype)


def of_flashinfer_latent(dtype: torch.dtype) -> Made:
    inputs = normal(dtype, B, N, C), normal(dtype, B, N, Dr), normal(dtype, B, 256, C), normal(dtype, B, 256, Dr)
    return flashinfer_latent, (*inputs, torch.tensor([200, 256]), 0.07)


def tiled_latent(q: Tensor, q_pe: Tensor, kv: Tensor, k_pe: Tensor):
    """tilelang's decode over a latent: q [b, n, 512], kv [b, t, 1, 512]; groups stand in front of heads."""
    b, n, d = q.shape
    groups = n // kv.shape[2]
    root = (d + q_pe.shape[-1]) ** 0.5
    q, q_pe = (each.reshape(b, n // groups, groups, -1).transpose(1, 2) for each in (q, q_pe))
    kv, k_pe = kv.transpose(1, 2), k_pe.transpose(1, 2)
    scores = torch.einsum("bghd,bhsd->bghs", torch.concat([q, q_pe], dim=-1), torch.concat([kv, k_pe], dim=-1))
    weights = F.softmax(scores / root, dim=-1)
    return torch.einsum("bghs,bhsd->bghd", weights, kv).transpose(1, 2).reshape(b, n, d)


def of_tiled_latent(dtype: torch.dtype) -> Made:
    kept = normal(dtype, B, 256, 1, C), normal(dtype, B, 256, 1, Dr)
    return tiled_latent, (normal(dtype, B, N, C), normal(dtype, B, N, Dr), *kept)


def tiled_sparse(q: Tensor, kv: Tensor, indices: Tensor):
    """tilelang's: q [b, s, n, 576], kv [b, t, 1, 576], indices [b, s, 1, k]; what no index names is hidden."""
    dtype, (b, s, n, d), (_, t, g, _) = q.dtype, q.shape, kv.shape
    q, kv, indices = q.float(), kv.float(), indices.transpose(1, 2)
    causal = torch.arange(s, dtype=torch.int32).view(-1, 1) >= torch.arange(t, dtype=torch.int32).view(1, -1)
    mask = q.new_zeros(b, g, s, t + 1, dtype=torch.bool).scatter(3, indices.long(), 1)
    mask = (mask[..., :-1] & causal.view(1, 1, s, t)).view(b, g, 1, s, t)
    scores = torch.einsum("bmghd,bngd->bghmn", q.view(b, s, g, -1, d), kv)
    weights = scores.masked_fill(~mask, float("-inf")).mul(d**-0.5).softmax(dim=-1)
    out = torch.einsum("bghmn,bngd->bmghd", weights.type(torch.float32), kv[..., :C])
    return out.reshape(b, s, n, C).to(dtype)


def of_tiled_sparse(dtype: torch.dtype) -> Made:
    t = 64
    indices = torch.full((1, t, 1, 32), t, dtype=torch.int32)
    for row in range(t):
        some = torch.randperm(row + 1)[:32]
        indices[0, row, 0, : len(some)] = some
    return tiled_sparse, (normal(dtype, 1, t, N, C + Dr), normal(dtype, 1, t, 1, C + Dr), indices)


FLASH, MLA, INFER, TILE = (
    "Dao-AILab/flash-attention",
    "deepseek-ai/FlashMLA",
    "flashinfer-ai/flashinfer",
    "tile-ai/tilelang",
)
PIECES = (
    Piece(FLASH, "attention_ref", lambda dtype: of_flash(dtype, 16, 40)),
    Piece(FLASH, "attention_ref, causal", lambda dtype: of_flash(dtype, 16, 40, causal=True)),
    Piece(
        FLASH, "attention_ref, causal, scaled keys", lambda dtype: of_flash(dtype, 16, 40, causal=True, reorder=True)
    ),
    Piece(FLASH, "attention_ref, padded keys", lambda dtype: of_flash(dtype, 16, 40, valid=True)),
    Piece(FLASH, "attention_ref, padded keys, causal", lambda dtype: of_flash(dtype, 16, 40, valid=True, causal=True)),
    Piece(FLASH, "attention_ref, window", lambda dtype: of_flash(dtype, 32, 32, causal=True, window=(8, 0))),
    Piece(FLASH, "attention_ref, soft caps", lambda dtype: of_flash(dtype, 16, 40, cap=15.0), why="tanh"),
    Piece(FLASH, "attention_ref, bias", lambda dtype: of_flash(dtype, 16, 16, bias=True), why="bias"),
    Piece(MLA, "dense decode", lambda dtype: of_dense_latent(dtype, 1, False), attentions=2),
    Piece(MLA, "dense decode of two tokens", lambda dtype: of_dense_latent(dtype, 2, True), attentions=2),
    Piece(
        MLA,
        "dense decode, kept in float32",
        lambda dtype: of_dense_latent(dtype, 1, False, rounded=False),
        attentions=2,
        why="read in float32",
    ),
    Piece(MLA, "sparse prefill", of_prefill_lists),
    Piece(MLA, "sparse decode", of_decode_lists),
    Piece(INFER, "attention_ref, prefill", lambda dtype: of_flashinfer(dtype, 24, 24)),
    Piece(INFER, "attention_ref, a prompt behind another", lambda dtype: of_flashinfer(dtype, 8, 40)),
    Piece(INFER, "attention_ref, keys of 192 lanes", lambda dtype: of_flashinfer(dtype, 24, 24, 192, 128)),
    Piece(INFER, "decode over a latent", of_flashinfer_latent),
    Piece(TILE, "decode over a latent", of_tiled_latent),
    Piece(TILE, "sparse attention over a latent", of_tiled_sparse),
)
