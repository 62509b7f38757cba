"""In the manner of CANN's recipes and examples: references of operators in torch, quantised as the chip does it."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Made, Piece, angles, normal

B, N, C, Dr, Dn, DIM, Q, ROOM = 2, 16, 512, 64, 128, 1024, 256, 64


def norm(x: Tensor, gamma: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.to(torch.float32)
    total = torch.sum(wide * wide * (1.0 / x.shape[-1]), dim=-1, keepdim=True) + eps
    return (wide / torch.sqrt(total) * gamma).to(x.dtype)


def quantised(x: Tensor, smooth: Tensor | None = None) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.float32)
    if smooth is not None:
        wide = wide * smooth
    scale = 127 / torch.max(torch.abs(wide), dim=-1, keepdim=True).values
    whole = torch.round(wide * scale).to(torch.int32)
    return torch.trunc(whole.to(torch.float16)).to(torch.int8), 1 / scale


def swapped(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    results = []
    for x in (q.float(), k.float()):
        b, s, h, d = x.shape
        x = x.reshape(b, s, h, d // 2, 2).transpose(3, 4).reshape(b, s, h, d)
        results.append((x * cos + swapped(x) * sin).to(dtype))
    return results[0], results[1]


def prolog(x, w_dq, w_uqqr, w_uk, w_dkvkr, gamma_cq, gamma_ckv, cos, sin, kv_cache, kr_cache, slots):
    """x [b, s, dim] to absorbed queries; its latent rows go into pages by slot. Weights are [in, out]."""
    b, s, _ = x.shape
    rows = x.reshape(b * s, -1)
    cq = norm(torch.matmul(rows.float(), w_dq.float()).to(x.dtype), gamma_cq)
    q = torch.matmul(cq.float(), w_uqqr.float()).to(x.dtype).reshape(b, s, N, Dn + Dr)
    q_nope = q[..., :Dn].reshape(b * s, N, Dn).transpose(0, 1)
    absorbed = torch.matmul(q_nope.float(), w_uk.float()).to(x.dtype).transpose(0, 1).reshape(b, s, N, C)
    kv = torch.matmul(rows.float(), w_dkvkr.float()).to(x.dtype).reshape(b, s, C + Dr)
    latent = norm(kv[..., :C], gamma_ckv).reshape(b * s, C)
    q_pe, k_pe = rotated(q[..., Dn:], kv[..., C:].reshape(b, s, 1, Dr), cos, sin)
    kv_cache.view(-1, C)[slots] = latent
    kr_cache.view(-1, Dr)[slots] = k_pe.reshape(b * s, Dr)
    return absorbed, q_pe


def of_prolog(dtype: torch.dtype) -> Made:
    weights = (
        normal(dtype, DIM, Q) * DIM**-0.5,
        normal(dtype, Q, N * (Dn + Dr)) * Q**-0.5,
        normal(dtype, N, Dn, C) * Dn**-0.5,
        normal(dtype, DIM, C + Dr) * DIM**-0.5,
    )
    parameters = (torch.nn.Parameter(each, requires_grad=False) for each in weights)
    gammas = torch.nn.Parameter(torch.ones(Q).to(dtype), False), torch.nn.Parameter(torch.ones(C).to(dtype), False)
    turned = angles(B, Dr).repeat(1, 2).unsqueeze(1)
    pages = normal(dtype, 8, 128, 1, C), normal(dtype, 8, 128, 1, Dr)
    tables = turned.cos().to(dtype), turned.sin().to(dtype)
    return prolog, (normal(dtype, B, 1, DIM), *parameters, *gammas, *tables, *pages, torch.tensor([130, 700]))


def int8_product(x: Tensor, weight: Tensor, scales: Tensor, smooth: Tensor | None) -> Tensor:
    """x [t, k] quantised by token times an int8 weight [k, n]."""
    whole, scale = quantised(x, smooth)
    product = torch.matmul(whole.to(torch.int32), weight.to(torch.int32))
    return (product.to(torch.float32) * scale * scales).to(x.dtype)


def of_int8_product(dtype: torch.dtype, smooth: bool) -> Made:
    weight = torch.randint(-127, 128, (DIM, 512), dtype=torch.int8)
    smoothed = torch.rand(1, DIM) + 0.5 if smooth else None
    rows = normal(dtype, 16, DIM).clamp(-1.9, 1.9)
    rows[:, 0] = 251 / 64  # a prime, by which no quotient of 16 bits is halfway between two integers
    return int8_product, (rows, weight, torch.rand(512) * 1e-3, smoothed)


def softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    grown = torch.exp(x - torch.max(x, dim=-1, keepdim=True).values)
    return grown, torch.sum(grown, dim=-1, keepdim=True)


def selected(q: Tensor, k: Tensor, of_keys: tuple[int, ...], scale: float) -> Tensor:
    """q [b, s, n, 576], chosen rows k [b, s, top, 576]: token by token, as many keys as it may see."""
    out = torch.zeros(*q.shape[:3], C, dtype=torch.float32)
    for i in range(q.shape[0]):
        for j in range(q.shape[1]):
            t = min(max(of_keys[i] - q.shape[1] + 1 + j, 0), k.shape[2])
            key, value = k[i, j, :t], k[i, j, :t, :C]
            weights, total = softmax(torch.matmul(q[i, j].float(), key.transpose(1, 0).float()) * scale)
            out[i, j] = torch.matmul(weights / total, value.float())
    return out


def of_selected(dtype: torch.dtype) -> Made:
    return selected, (normal(dtype, B, 1, N, C + Dr), normal(dtype, B, 1, 256, C + Dr), (200, 256), 0.04)


def index(q: Tensor, k: Tensor, weights: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """q [b, s, 64, 128], k [b, t, 128], weights [b, s, 64]: the best keys of each query."""
    scores = torch.maximum(torch.matmul(q.float(), k.float().transpose(1, 2).unsqueeze(1)), torch.tensor(0.0))
    best = torch.topk((scores * weights.float().unsqueeze(-1)).sum(dim=2), k=top, dim=-1)
    return best.values, best.indices.to(torch.int32)


def of_index(dtype: torch.dtype) -> Made:
    return index, (normal(dtype, B, 1, 64, 128), normal(dtype, B, 4096, 128), normal(dtype, B, 1, 64), 2048)


def paged_decode(q, keys, values, table, lengths, scale):
    """atb's example of one query each: q [b, n, d], pages [p, 128, m, d]; heads of a group in one product."""
    outputs = []
    for i, t in enumerate(lengths):
        blocks = table[i, : (t + 127) // 128].long()
        k, v = keys[blocks].reshape(-1, *keys.shape[2:])[:t], values[blocks].reshape(-1, *values.shape[2:])[:t]
        m, n = k.shape[1], q.shape[1]
        one = q[i].view(m, n // m, -1).float()
        weights, total = softmax(torch.matmul(one, k.permute(1, 2, 0).float()) * scale)
        outputs.append(torch.matmul(weights / total, v.permute(1, 0, 2).float()).reshape(n, -1).to(q.dtype))
    return torch.stack(outputs)


def of_paged_decode(dtype: torch.dtype) -> Made:
    pages = normal(dtype, 8, 128, 2, 128), normal(dtype, 8, 128, 2, 128)
    table = torch.randperm(8)[:4].view(2, 2).int()
    return paged_decode, (normal(dtype, B, 8, 128), *pages, table, (200, 130), 128**-0.5)


NAME = "hicann/cann-recipes-infer"
PIECES = (
    Piece(NAME, "prolog of latent attention", of_prolog, attentions=0),
    Piece(NAME, "int8 product by token", lambda dtype: of_int8_product(dtype, False), attentions=0),
    Piece(NAME, "int8 product by token, smoothed", lambda dtype: of_int8_product(dtype, True), attentions=0),
    Piece(NAME, "attention over chosen rows", of_selected, attentions=2, why="read in float32"),
    Piece(NAME, "index of keys", of_index, attentions=0),
    Piece("ascend/ascend-transformer-boost", "paged decode", of_paged_decode),
)
