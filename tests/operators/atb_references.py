"""What the operators of atb for latent attention compute, in float64, row by row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.operators.undocumented import Undocumented


def row(cache: Tensor, table: Tensor, j: int, mode: str) -> Tensor:
    """The key at place j of a sequence."""
    size = cache.shape[1] if mode == "krope_ctkv" else cache.shape[2]
    page = cache[table[j // size]]
    return page[j % size, 0].double() if mode == "krope_ctkv" else page[:, j % size].flatten().double()


def added(mask: Tensor | None, kind: str | None, token: int, i: int, j: int, length: int, size: int) -> float:
    """What a mask adds to the score of row i (number `token` of all) and key j."""
    if mask is None:
        return 0.0
    if kind == "mask_type_spec":
        return mask[token, j].item()
    rows = (mask.shape[0] - size + 3) // 2
    return -10000.0 if j > length - rows + i else 0.0


def latent(
    q_nope: Tensor, q_rope: Tensor, ctkv: Tensor, k_rope: Tensor, block_tables: Tensor, context_lens: Any,
    q_headnum: int, qk_scale: float, kv_headnum: int, cache_mode: str, mask: Tensor | None = None,
    qseqlen: list[int] | None = None, qk_descale: Tensor | None = None, pv_descale: Tensor | None = None,
    mask_type: str | None = None, calc_type: str | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    lengths = [int(each) for each in context_lens]
    if sum(qseqlen or [1] * len(lengths)) != len(q_nope):
        raise Undocumented("rows that belong to no sequence")
    out, lse = torch.zeros(q_nope.shape).double(), torch.full((*q_nope.shape[:2], 1), -math.inf).double()
    size, token = (ctkv.shape[1] if cache_mode == "krope_ctkv" else ctkv.shape[2]), 0
    for b, length in enumerate(lengths):
        keys = [row(ctkv, block_tables[b], j, cache_mode) for j in range(length)]
        ropes = [row(k_rope, block_tables[b], j, cache_mode) for j in range(length)]
        for i in range(qseqlen[b] if qseqlen else 1):
            for h in range(q_headnum if length else 0):
                scale = 1.0 if qk_descale is None else qk_descale[h].double()
                products = [q_nope[token, h].double() @ k * scale for k in keys]
                scores = [(p + q_rope[token, h] @ r) * qk_scale for p, r in zip(products, ropes, strict=True)]
                scores = [s + added(mask, mask_type, token, i, j, length, size) for j, s in enumerate(scores)]
                top = max(scores)
                weights = torch.stack([(s - top).exp() for s in scores])
                kept = weights if pv_descale is None else (weights * 127).round() / 127 * pv_descale[h].double()
                out[token, h] = sum(w * k for w, k in zip(kept, keys, strict=True)) / weights.sum()
                lse[token, h] = top + weights.sum().log()
            token += 1
    return (out, lse) if return_lse else out


def ring(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, value: Tensor, mask: Tensor, seqlen: Tensor,
    head_num: int, kv_head_num: int, qk_scale: float, mask_type: str = "no_mask", pre_out: Tensor | None = None,
    prev_lse: Tensor | None = None, calc_type: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    query, key = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)
    rows, keys = seqlen.tolist() if seqlen.dim() == 2 else (seqlen.tolist(),) * 2
    out, lse = torch.zeros(q_nope.shape).double(), torch.zeros(head_num, len(q_nope)).double()
    t = first = 0
    for count, length in zip(rows, keys, strict=True):
        for i in range(count):
            seen = range(first, first + (i + 1 if mask_type == "mask_type_triu" else length))
            for h in range(head_num if length else 0):
                m = h * kv_head_num // head_num
                scores = torch.stack([query[t, h] @ key[j, m] * qk_scale for j in seen])
                new, values = scores.logsumexp(0), value[list(seen), m]
                out[t, h], lse[h, t] = scores.softmax(0) @ values, new
                if pre_out is not None:
                    shares = torch.stack((prev_lse[h, t], new)).softmax(0)
                    out[t, h] = shares[0] * pre_out[t, h] + shares[1] * out[t, h]
                    lse[h, t] = torch.stack((prev_lse[h, t], new)).logsumexp(0)
            t += 1
        first += length
    return out, lse


def preprocess(
    input: Tensor, wdqkv: Tensor, wuq: Tensor, gamma2: Tensor, cos: Tensor, sin: Tensor, wuk: Tensor,
    slotmapping: Tensor, cache_mode: str, kv_cache_out0: Tensor, kv_cache_out1: Tensor, q_out0: Tensor,
    quant_mode: str = "per_token_quant_symm",
    ctkv_scale: Tensor | None = None, q_nope_scale: Tensor | None = None, stored: torch.dtype = torch.float64,
    **more: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`stored`: the dtype to which the kernel rounds what it stores."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(stored).double()

    def norm(x: Tensor, gamma: Tensor) -> Tensor:
        return x / math.sqrt(sum(v * v for v in x.tolist()) / len(x) + 1e-6) * gamma.double()

    def product(x: Tensor, number: int, weight: Tensor) -> Tensor:
        matrix = torch.cat(list(weight[0].double()), dim=-1)
        scale = more[f"descale{number}"]
        scale = (
            torch.tensor([torch.tensor(s, dtype=torch.int32).view(torch.float32) for s in scale.tolist()])
            if (scale.dtype == torch.int64)
            else scale
        )
        n = norm(x, more[f"gamma{number}"]) + more[f"beta{number}"].double()
        if quant_mode == "per_tensor_quant_asymm":
            n = n / more[f"quant_scale{number}"].double() + more[f"quant_offset{number}"].double()
            return rounded((matrix @ n.round().clamp(-128, 127) + more[f"bias{number}"]) * scale.double())
        n = rounded(n)
        top = n.abs().max()
        return rounded(matrix @ (n * (127 / top)).round() * scale.double() * top / 127)

    def rope(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
        half = len(x) // 2
        turned = torch.cat((-x[half:], x[:half]))
        return rounded(x * c + turned * s)

    heads, dn, width = wuk.shape
    latents, ropes = kv_cache_out0.clone(), kv_cache_out1.clone()
    query, turned = torch.zeros(q_out0.shape).double(), torch.zeros(len(input), heads, cos.shape[1]).double()
    for t, x in enumerate(input):
        k, k_rope, c = product(x, 0, wdqkv).split([width, cos.shape[1], len(more["gamma1"])])
        q = product(c, 1, wuq).reshape(heads, -1)
        for n in range(heads):
            query[t, n] = rounded(q[n, :dn] @ wuk[n])
            turned[t, n] = rope(q[n, dn:], cos[t], sin[t])
        line = rounded(norm(k, gamma2))
        if q_nope_scale is not None and ctkv_scale is not None:
            query[t] = (query[t] * q_nope_scale[:, None]).round().clamp(-128, 127)
            line = (line / ctkv_scale).round().clamp(-128, 127)
        slot = slotmapping[t].item()
        for cache, new in ((latents, line), (ropes, rope(k_rope, cos[t], sin[t]))):
            size = cache.shape[1] if cache_mode == "krope_ctkv" else cache.shape[2]
            if slot >= 0:
                page = cache[slot // size]
                where = page[slot % size] if cache_mode == "krope_ctkv" else page[:, slot % size]
                where.copy_(new.reshape(where.shape))
    return query, latents, turned, ropes
