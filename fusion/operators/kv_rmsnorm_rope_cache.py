"""The latent line of the caches in one kernel: norm, rotation by pairs and both writes.

    [c ‖ r] = kv   →   ckv_cache[slot] = norm(c), k_cache[slot] = rope(r)

A slot is a position of its sequence ("Norm"), a token of all pages ("PA", "PA_BNSD", "PA_NZ"), or the first token of
the page that a run of tokens fills ("PA_BLK_BNSD", "PA_BLK_NZ").
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Parts of PyTorch's Python are untyped.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion.operators.contract import Limit, Operator, by_schema
from fusion.operators.dtypes import HALVES, compute_dtype
from fusion.operators.pages import stored, write, written
from fusion.operators.rope import interleave_half

_LINE = 16
"""Elements of a line of NZ in caches of floating-point numbers of two bytes."""
_TOKENS = ("PA", "PA_BNSD", "PA_NZ")
_BLOCKS = ("PA_BLK_BNSD", "PA_BLK_NZ")
_BY_LINES = ("PA_NZ", "PA_BLK_NZ")
Given = Mapping[str, Any]


def _rows(given: Given) -> tuple[Tensor, Tensor]:
    """Rotated keys [B, 1, S, Dr] and normalised latents [B, 1, S, Hckv], each rounded once."""
    kv, gamma, cos, sin = (given[name] for name in ("kv", "gamma", "cos", "sin"))
    wide = compute_dtype(kv)
    latent, rope = kv.to(wide).split([gamma.shape[0], cos.shape[-1]], dim=-1)
    root = (latent.square().mean(-1, keepdim=True) + given["epsilon"]).sqrt()
    turned = interleave_half(rope, cos.to(wide), sin.to(wide))
    return turned.to(kv.dtype), (latent / root * gamma.to(wide)).to(kv.dtype)


def _slots(given: Given) -> Tensor:
    """Where the tokens [B · S] go among all places of a cache; negative for those that are skipped."""
    index, mode, cache = given["index"], given["cache_mode"], given["k_cache"]
    batch, _, count, _ = given["kv"].shape
    if mode in _TOKENS:
        return index
    if mode in _BLOCKS:
        size, token = cache.shape[1], torch.arange(count, device=index.device)
        start = index.reshape(batch, -1).index_select(1, token // size)
        return torch.where(start < 0, -1, start // size * size + token % size).flatten()
    size = cache.shape[2]
    places = index + torch.arange(batch, device=index.device)[:, None] * size
    inside = torch.where(index < size, places, batch * size)  # beyond its sequence: never a row of the next one
    return torch.where(index < 0, -1, inside).flatten()


def _cached(cache: Tensor, rows: Tensor, slots: Tensor, mode: str, in_place: bool) -> Tensor:
    """The cache itself, or a copy, with `rows` [B, 1, S, D]."""
    pages = cache.transpose(1, 2) if mode == "Norm" else cache
    if mode in _BY_LINES:
        pages = cache.view(cache.shape[0], cache.shape[3] // _LINE, cache.shape[1], _LINE)
    form = "PA_NZ" if mode in _BY_LINES else "Norm"
    tokens = rows.reshape(-1, 1, rows.shape[-1])
    filled = (write if in_place else written)(pages, *stored(pages, tokens, slots, form))
    return filled.reshape(cache.shape)


def _computed(given: Given, *, in_place: bool) -> tuple[Tensor, ...]:
    """Rotated keys and latents, zeros if nobody asked for them, and both caches."""
    rows, slots = _rows(given), _slots(given)
    caches = (
        _cached(given[name], each, slots, given["cache_mode"], in_place)
        for name, each in zip(("k_cache", "ckv_cache"), rows, strict=True)
    )
    keys, latents = caches
    return *(each if given["is_output_kv"] else torch.zeros_like(each) for each in rows), keys, latents


def _in_place(given: Given) -> tuple[Tensor, ...]:
    return _computed(given, in_place=True)[:2]


def _functional(given: Given) -> tuple[Tensor, ...]:
    return _computed(given, in_place=False)


def _meta(given: Given) -> tuple[Tensor, ...]:
    kv = given["kv"]
    return tuple(kv.new_empty([*kv.shape[:-1], given[name].shape[-1]]) for name in ("cos", "gamma"))


def _functional_meta(given: Given) -> tuple[Tensor, ...]:
    return *_meta(given), torch.empty_like(given["k_cache"]), torch.empty_like(given["ckv_cache"])


def _dims(norm: str, tokens: str, blocks: str) -> str:
    """Dims in each mode."""
    paged = (f"cache_mode={mode}:{tokens}" for mode in _TOKENS), (f"cache_mode={mode}:{blocks}" for mode in _BLOCKS)
    return " / ".join((f"cache_mode=Norm:{norm}", *paged[0], *paged[1]))


_DIMS = {
    "gamma": "Hckv",
    "kv": "B 1 S W",
    "cos": "B 1 1|S Dr",
    "sin": "B 1 1|S Dr",
    "index": _dims("B S", "I", "I"),
    "k_cache": _dims("B 1 Length Dr", *["Blocks Size 1 Dr"] * 2),
    "ckv_cache": _dims("B 1 Length Hckv", *["Blocks Size 1 Hckv"] * 2),
}
_OF_KV = ("gamma", "cos", "sin", "k_cache", "ckv_cache")
_QUANTISED = ("k_rope_scale", "c_kv_scale", "k_rope_offset", "c_kv_offset", "k_cache_dtype", "ckv_cache_dtype")
_HOST = (
    *(Limit(f"not given({name})", because="quantisation is not decomposed") for name in _QUANTISED),
    Limit("not given(v)", because="values beside the keys are not decomposed"),
    Limit("is_output_kv == False", when="cache_mode == 'Norm'", because="rows are given beside pages alone"),
    "W == Hckv + Dr",
    "Dr % 2 == 0",
    "shape(sin) == shape(cos)",
    Limit("S <= Length", when="cache_mode == 'Norm'"),
    Limit("I == B * S", when=f"cache_mode in {_TOKENS}"),
    Limit("I == B * ((S + Size - 1) // Size)", when=f"cache_mode in {_BLOCKS}", because="each page has one index"),
    Limit("Hckv % 16 == 0 and Dr % 16 == 0", when=f"cache_mode in {_BY_LINES}", because="a line of NZ holds 16"),
)
_KERNEL = (
    *(f"dtype({name}) == dtype(kv)" for name in _OF_KV),
    Limit("Blocks >= B * ((S + Size - 1) // Size)", when="cache_mode != 'Norm'"),
)
_A2 = (*_KERNEL, "Hckv == 512", "Dr == 64")
_SCHEMA = (
    "Tensor kv, Tensor gamma, Tensor cos, Tensor sin, Tensor index, {caches}, *, Tensor? k_rope_scale=None, "
    "Tensor? c_kv_scale=None, Tensor? k_rope_offset=None, Tensor? c_kv_offset=None, Tensor? v=None, "
    'float epsilon=1.0000000000000001e-05, str cache_mode="Norm", bool is_output_kv=False, int? k_cache_dtype=None, '
    "int? ckv_cache_dtype=None"
)
_IN_PLACE_SCHEMA = (
    f"npu::npu_kv_rmsnorm_rope_cache_v2({_SCHEMA.format(caches='Tensor(a!) k_cache, Tensor(b!) ckv_cache')}) "
    "-> (Tensor, Tensor)"
)
_FUNCTIONAL_SCHEMA = (
    f"npu::npu_kv_rmsnorm_rope_cache_v2_functional({_SCHEMA.format(caches='Tensor k_cache, Tensor ckv_cache')}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_DTYPES = {**dict.fromkeys(("kv", *_OF_KV), HALVES), "index": frozenset({torch.int64})}
_LIMITS = {"host": _HOST, "ascend910b": _A2, "ascend910_93": _A2, "ascend950": _KERNEL}
_SOURCE = (
    "op-plugin: torch_npu.npu_kv_rmsnorm_rope_cache, of which this form declares its writes; kernel: ops-transformer "
    "kv_rms_norm_rope_cache (one rounding; a negative index is skipped); the page of aclnnKvRmsNormRopeCache lists "
    "Ascend 950 alone, op-plugin's A2 and A3 as well"
)
_SUMMARY = (
    "[c ‖ r] = kv; k_cache[slot] = round(rope(r)), by pairs, even components first; ckv_cache[slot] = "
    "round(c / sqrt(mean(c²) + epsilon) · gamma); both in float32; both rows are results if is_output_kv"
)

KV_RMSNORM_ROPE_CACHE_V2 = Operator(
    schema=_IN_PLACE_SCHEMA,
    fallback=by_schema(_IN_PLACE_SCHEMA, _in_place),
    meta=by_schema(_IN_PLACE_SCHEMA, _meta),
    dims=_DIMS,
    dtypes=_DTYPES,
    limits=_LIMITS,
    lowerings=frozenset({"eager", "torchair", "npugraph_ex"}),  # torchair's converter is of ours
    source=_SOURCE,
    summary=_SUMMARY,
)
KV_RMSNORM_ROPE_CACHE_V2_FUNCTIONAL = replace(
    KV_RMSNORM_ROPE_CACHE_V2,
    schema=_FUNCTIONAL_SCHEMA,
    fallback=by_schema(_FUNCTIONAL_SCHEMA, _functional),
    meta=by_schema(_FUNCTIONAL_SCHEMA, _functional_meta),
    lowerings=frozenset({"torchair"}),  # its eager kernel writes the caches themselves and returns untouched copies
    summary=f"with copies of the caches as results 2 and 3: {_SUMMARY}",
    in_place="npu::npu_kv_rmsnorm_rope_cache_v2",
)
