"""The latent line of the caches in one kernel: RMS norm, interleaved RoPE and both cache writes.

    [c ‖ r] = kv   →   ckv_cache[slot] = norm(c), k_cache[slot] = rope(r)

An int8 cache takes int8(norm(c) · scale) or int8(rope(r) · scale), scale per channel, of rows not rounded before.

By `cache_mode` a slot is a position in the sequence ("Norm"), the index of a token over all pages ("PA", "PA_BNSD",
"PA_NZ"), or that of the first token of the page that a run of tokens fills ("PA_BLK_BNSD", "PA_BLK_NZ").
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators import encodings
from fusion.operators.cache.pages import Put, by_lines, stored
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, HALVES, INT8, INT64, compute_dtype
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.norm.norms import normalised
from fusion.operators.operator import Operator, functional
from fusion.operators.rotary.rope import interleave_half, rotated

_STORED = (("k_cache", "k_rope_scale"), ("ckv_cache", "c_kv_scale"))
_TOKENS = ("PA", "PA_BNSD", "PA_NZ")
_BLOCKS = ("PA_BLK_BNSD", "PA_BLK_NZ")
_BY_LINES = ("PA_NZ", "PA_BLK_NZ")


def _rows(given: Given) -> tuple[Tensor, Tensor]:
    """Compute rotated keys [B, 1, S, Dr] and normalised latents [B, 1, S, Hckv], not rounded."""
    kv, gamma, cos, sin = (given[name] for name in ("kv", "gamma", "cos", "sin"))
    wide = compute_dtype(kv)
    latent, rope = kv.to(wide).split([gamma.shape[0], cos.shape[-1]], dim=-1)
    return rotated(interleave_half, rope, cos, sin, wide), normalised(latent, gamma, given["epsilon"])


def _slots(given: Given) -> Tensor:
    """Return the index of each token [B · S] among all rows of a cache, negative for a token that is not written."""
    index, mode, cache = given["index"], given["cache_mode"], given["k_cache"]
    batch, _, count, _ = given["kv"].shape
    if mode in _TOKENS:
        return index
    if mode in _BLOCKS:
        size, token = cache.shape[1], torch.arange(count, device=index.device)
        start = index.reshape(batch, (count + size - 1) // size).index_select(1, token // size)
        return torch.where(start < 0, -1, start // size * size + token % size).flatten()
    size = cache.shape[2]
    places = index + torch.arange(batch, device=index.device)[:, None] * size
    bounded = torch.where(index < size, places, batch * size)  # beyond its sequence: never a row of the next one
    return torch.where(index < 0, -1, bounded).flatten()


def _cached(put: Put, cache: Tensor, rows: Tensor, slots: Tensor, mode: str) -> Tensor:
    """Write `rows` [B, 1, S, D] by `put` to `slots` of the cache, and return it, or its copy, in its own layout."""
    pages = cache.transpose(1, 2) if mode == "Norm" else cache
    if mode in _BY_LINES:
        pages = by_lines(cache)
    tokens = rows.reshape(-1, 1, rows.shape[-1])
    return put(pages, *stored(pages, tokens, slots, "PA_NZ" if mode in _BY_LINES else "Norm")).reshape(cache.shape)


def _computed(put: Put, given: Given) -> tuple[Tensor, ...]:
    """Compute rotated keys and latents, zeros unless `is_output_kv`, and write them to both caches."""
    rows, slots, dtype = _rows(given), _slots(given), given["kv"].dtype
    results, caches = [], []
    for (name, scale), each in zip(_STORED, rows, strict=True):
        rounded, factor = each.to(dtype).contiguous(), given[scale]
        encoded = rounded if factor is None else encodings.INT8.stored(each * factor.to(each.dtype))
        caches.append(_cached(put, given[name], encoded, slots, given["cache_mode"]))
        results.append(rounded if given["is_output_kv"] else torch.zeros_like(rounded))
    return *results, *caches


def _dims(norm: str, paged: str) -> str:
    """Return dims by `cache_mode`: `norm` for "Norm", `paged` for all modes with pages."""
    modes = (f"cache_mode={mode}:{paged}" for mode in (*_TOKENS, *_BLOCKS))
    return " / ".join((f"cache_mode=Norm:{norm}", *modes))


_HOST = (
    *(Limit(f"dtype({cache}) == 'int8'", when=f"given({scale})") for cache, scale in _STORED),
    *(Limit(f"dtype({cache}) != 'int8'", when=f"not given({scale})") for cache, scale in _STORED),
    Limit("is_output_kv == False", when="cache_mode == 'Norm'", because="rows are given beside pages alone"),
    "W == Hckv + Dr",
    "Dr % 2 == 0",
    "shape(sin) == shape(cos)",
    Limit("S <= Length", when="cache_mode == 'Norm'"),
    Limit("I == B * S", when=f"cache_mode in {_TOKENS}"),
    Limit("I == B * ((S + Size - 1) // Size)", when=f"cache_mode in {_BLOCKS}", because="each page has one index"),
    Limit("Hckv % 16 == 0 and Dr % 16 == 0", when=f"cache_mode in {_BY_LINES}", because="a line of NZ holds 16"),
    *(
        Limit(f"{size} % 32 == 0", when=f"cache_mode in {_BY_LINES} and given({scale})", because="one of int8 holds 32")
        for size, (_, scale) in zip(("Dr", "Hckv"), _STORED, strict=True)
    ),
)
_KERNEL = (
    *(f"dtype({name}) == dtype(kv)" for name in ("gamma", "cos", "sin")),
    *(Limit(f"dtype({cache}) == dtype(kv)", when=f"not given({scale})") for cache, scale in _STORED),
    Limit(
        "Size % 32 == 0",
        when="cache_mode != 'Norm' and (given(k_rope_scale) or given(c_kv_scale))",
        because="a column of a page in int8 fills 32 bytes; allocate pages of a multiple of 32 positions",
    ),
    Limit(
        "Blocks >= B * ((S + Size - 1) // Size)",
        when="cache_mode != 'Norm'",
        because="the cache has pages for the new tokens of all B sequences, which share none; allocate more pages",
    ),
)
_A2 = (*_KERNEL, "Hckv == 512", "Dr == 64")
_SUMMARY = (
    "[c ‖ r] = kv; k_cache[slot] = round(rope(r)), by pairs, even components first; ckv_cache[slot] = "
    "round(c / sqrt(mean(c²) + epsilon) · gamma); both in float32; both rows are results if is_output_kv; "
    "whole numbers: k_cache[slot] = int8(rope(r) · k_rope_scale), ckv_cache[slot] = int8(norm · c_kv_scale)"
)

KV_RMSNORM_ROPE_CACHE_V2 = Operator(
    schema=(
        "npu::npu_kv_rmsnorm_rope_cache_v2(Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, "
        "Tensor(a!) k_cache, Tensor(b!) ckv_cache, *, Tensor? k_rope_scale=None, Tensor? c_kv_scale=None, "
        "Tensor? k_rope_offset=None, Tensor? c_kv_offset=None, Tensor? v=None, "
        'float epsilon=1.0000000000000001e-05, str cache_mode="Norm", bool is_output_kv=False, '
        "int? k_cache_dtype=None, int? ckv_cache_dtype=None) -> (Tensor, Tensor)"
    ),
    compute=_computed,
    uncomputed={
        "k_rope_offset c_kv_offset": "the page takes none",
        "k_cache_dtype ckv_cache_dtype": "floats of 8 bits are not decomposed",
        "v": "values beside the keys are not decomposed",
    },
    outputs=lambda kv, cos, gamma: tuple(kv.new_empty([*kv.shape[:-1], each.shape[-1]]) for each in (cos, gamma)),
    dims={
        "gamma": "Hckv",
        "kv": "B 1 S W",
        "cos sin": "B 1 1|S Dr",
        "index": _dims("B S", "I"),
        "k_cache": _dims("B 1 Length Dr", "Blocks Size 1 Dr"),
        "ckv_cache": _dims("B 1 Length Hckv", "Blocks Size 1 Hckv"),
        "k_rope_scale": "Dr",
        "c_kv_scale": "Hckv",
    },
    dtypes={
        "kv gamma cos sin": HALVES,
        "k_cache ckv_cache": HALVES | INT8,
        "k_rope_scale c_kv_scale": FLOAT32,
        "index": INT64,
    },
    limits={"host": _HOST, **dict.fromkeys(A2_A3, _A2), "ascend950": _KERNEL},
    source=(
        "op-plugin: torch_npu.npu_kv_rmsnorm_rope_cache, of which this form declares its writes; kernel: "
        "ops-transformer kv_rms_norm_rope_cache (one rounding; a negative index is skipped); the page of "
        "aclnnKvRmsNormRopeCache lists Ascend 950 alone, op-plugin's A2 and A3 as well"
    ),
    summary=_SUMMARY,
)  # lowered by torchair as well, by a converter of ours
KV_RMSNORM_ROPE_CACHE_V2_FUNCTIONAL = functional(
    KV_RMSNORM_ROPE_CACHE_V2,
    "npu::npu_kv_rmsnorm_rope_cache_v2_functional",
    f"with copies of the caches as results 2 and 3: {_SUMMARY}",
    frozenset({"torchair"}),  # its eager kernel writes the caches themselves and returns untouched copies
)
