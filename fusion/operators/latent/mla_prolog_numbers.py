"""Decomposition of the MLA prolog, in floats and in int8.

    weight_quant_mode     0: floats    1: c int8 with a scale per token, W_uq_qr int8    2: x, W_dq, W_dkv_kr int8, too
    kv_cache_quant_mode   0: floats    1: int8(norm(k) · scale)    2: int8 with a scale per channel, rope(k_rope) too
                          3: packed rows of bytes: norm(k) in int8, rope(k_rope), and a scale per run of 128 lanes
    query_quant_mode      0: floats    1: int8 with a scale per token and head; query_rope · quant_scale_ckv / scale

Sums of int8 products become float32, and are rounded only where they are stored or multiplied by the next matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators import encodings
from fusion.operators.cache.pages import Put, by_lines, stored
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import compute_dtype
from fusion.operators.linear.transpose_batchmatmul import transpose_batchmatmul
from fusion.operators.norm.norms import normalised
from fusion.operators.quant.quantisation import int8_product
from fusion.operators.rotary.rope import interleave_half, rotated

RUN = 128
"""Number of lanes of a packed row that share a scale."""
FAINTEST = 1e-8
"""Lower bound of the largest magnitude of such a run, so that no scale is 0."""


def computed(put: Put, given: Given) -> tuple[Tensor, ...]:
    """Compute the five results that are no caches, and write both caches by `put`."""
    return *_queries(given), *_caches(put, given)


def _queries(given: Given) -> tuple[Tensor, ...]:
    """Compute query, query_rope, scales of the query, and with `query_norm_flag` the latent of the queries and its
    scales."""
    up, sin, cos = (given[name] for name in ("weight_uk", "rope_sin", "rope_cos"))
    latent, norm, scale = _latent(given)
    heads = latent.unflatten(-1, (up.shape[0], -1))
    nope, rope = heads.split([up.shape[1], sin.shape[-1]], dim=-1)
    query = transpose_batchmatmul(nope.to(up.dtype).flatten(0, -3), up, perm_x1=(1, 0, 2))
    query_rope = rotated(interleave_half, rope, cos.unsqueeze(-2), sin.unsqueeze(-2), up.dtype)
    query, query_scale = query.reshape(*nope.shape[:-1], up.shape[-1]), _no_scale(up)
    if given["query_quant_mode"]:
        query, scales = encodings.INT8.quantised(query.to(compute_dtype(up)))
        factor = given["quant_scale_ckv"].to(scales.dtype) / scales.masked_fill(scales == 0, 1.0)
        query_rope = (query_rope.to(scales.dtype) * factor.unsqueeze(-1)).to(up.dtype)
        query_scale = scales.reshape(-1, up.shape[0], 1)
    if not given["query_norm_flag"]:
        return query, query_rope, query_scale, norm.new_zeros([1]), _no_scale(up)
    return query, query_rope, query_scale, norm, _no_scale(up) if scale is None else scale.reshape(-1, 1)


def _no_scale(like: Tensor) -> Tensor:
    """Return the placeholder for missing scales, a 0 [1] in float32."""
    return like.new_zeros([1], dtype=torch.float32)


def _latent(given: Given) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute the heads of the queries [.., N · (D + Dr)], the latent from which they are projected, and the scales of
    the latent if it is int8, else None."""
    scale, epsilon = given["qc_qr_scale"], given["rmsnorm_epsilon_cq"]
    norm = _times(normalised(_projected(given, "weight_dq"), given["rmsnorm_gamma_cq"], epsilon), scale)
    if not given["weight_quant_mode"]:
        norm = norm.to(given["token_x"].dtype)
        return norm @ given["weight_uq_qr"], norm, None
    smooth = given["smooth_scales_cq"]
    latent, tokens = encodings.INT8.quantised(norm if smooth is None else norm * smooth.to(norm.dtype).flatten())
    return _scaled(latent, given["weight_uq_qr"], tokens, given["dequant_scale_w_uq_qr"]), latent, tokens


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def _projected(given: Given, weight: str) -> Tensor:
    """Multiply `token_x` by the argument `weight`: rounded if both are floats, not rounded if both are int8."""
    x, matrix = given["token_x"], given[weight]
    if given["weight_quant_mode"] != 2:
        return x @ matrix
    tokens = given["dequant_scale_x"].reshape(x.shape[:-1])
    return _scaled(x, matrix, tokens, given[f"dequant_scale_{weight.replace('weight', 'w')}"])


def _scaled(x: Tensor, weight: Tensor, tokens: Tensor, channels: Tensor) -> Tensor:
    """Multiply int8 `x` by the int8 `weight`, then by the scales of rows, `tokens`, then by those of columns,
    `channels`."""
    return int8_product(x, weight).to(tokens.dtype) * tokens.unsqueeze(-1) * channels.to(tokens.dtype).flatten()


def _caches(put: Put, given: Given) -> tuple[Tensor, Tensor]:
    """Compute the new rows of both caches, write them by `put`, and return the caches or their copies."""
    width, sin, cos = given["rmsnorm_gamma_ckv"].shape[0], given["rope_sin"], given["rope_cos"]
    latent, rope = _projected(given, "weight_dkv_kr").split([width, sin.shape[-1]], dim=-1)
    norm = _times(normalised(latent, given["rmsnorm_gamma_ckv"], given["rmsnorm_epsilon_ckv"]), given["kc_scale"])
    key_rope = rotated(interleave_half, rope, cos, sin, given["weight_uk"].dtype)
    lines = {"kv_cache": norm.to(key_rope.dtype), "kr_cache": key_rope}
    mode = given["kv_cache_quant_mode"]
    if mode in (1, 2):
        lines["kv_cache"] = encodings.INT8.stored(norm * given["quant_scale_ckv"].to(norm.dtype).flatten())
    if mode == 2:
        lines["kr_cache"] = encodings.INT8.stored(
            key_rope.to(norm.dtype) * given["quant_scale_ckr"].to(norm.dtype).flatten()
        )
    if mode == 3:
        lines = {"kv_cache": packed(norm, key_rope, given["k_nope_clip_alpha"], RUN)}
    filled = {name: _cached(put, given[name], rows.unsqueeze(-2), given) for name, rows in lines.items()}
    left: Tensor = given["kr_cache"]
    return filled["kv_cache"], filled.get("kr_cache", left)


def packed(norm: Tensor, key_rope: Tensor, alpha: Tensor, tile: int) -> Tensor:
    """Pack rows of bytes [.., bytes]: `norm` in int8, the rotated key in bfloat16, and a float32 scale for each run of
    `tile` lanes of `norm`, whose values are clipped to `alpha` times the largest magnitude of the run."""
    runs = norm.unflatten(-1, (-1, tile))
    largest = runs.abs().amax(-1, keepdim=True).clamp(min=FAINTEST) * alpha.to(norm.dtype)
    scale = largest / encodings.INT8.bound
    latent = (runs.clamp(-largest, largest) / scale).round().to(torch.int8)
    parts = (key_rope.to(torch.bfloat16).contiguous(), scale.squeeze(-1).to(torch.float32).contiguous())
    return torch.cat((latent.flatten(-2), *(each.view(torch.int8) for each in parts)), dim=-1)


def _cached(put: Put, cache: Tensor, rows: Tensor, given: Given) -> Tensor:
    mode, slots = given["cache_mode"], given["cache_index"]
    if slots is None:
        return put(cache, None, rows)
    pages = by_lines(cache) if mode == "PA_NZ" else cache
    return put(pages, *stored(pages, rows.flatten(0, -3), slots.flatten(), mode)).view(cache.shape)
