"""What stands before latent attention, in one kernel: queries in the latent space, and the latent line of the caches.

    c = norm(x · W_dq), [q ‖ q_rope] = c · W_uq_qr  →  query = q · W_uk, query_rope = rope(q_rope)
    [k ‖ k_rope] = x · W_dkv_kr                     →  kv_cache[slot] = norm(k), kr_cache[slot] = rope(k_rope)

The kernel wants weight_dq, weight_uq_qr and weight_dkv_kr in the storage format FRACTAL_NZ, which no shape shows, and
weight_uk in ND.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# Parts of PyTorch's Python are untyped.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion.operators.contract import Limit, Operator, by_schema
from fusion.operators.dtypes import compute_dtype
from fusion.operators.flops import count, hint
from fusion.operators.pages import stored, write, written
from fusion.operators.rope import interleave_half
from fusion.operators.transpose_batchmatmul import TRANSPOSE_BATCHMATMUL

_LINE = 16
"""Elements of a line of NZ in caches of floating-point numbers of two bytes."""
Given = Mapping[str, Any]


def _normalised(x: Tensor, gamma: Tensor, epsilon: float, scale: float) -> Tensor:
    """round(x / sqrt(mean(x²) + epsilon) · gamma · scale)."""
    wide = compute_dtype(x)
    mean = x.to(wide).square().mean(-1, keepdim=True)
    return (x.to(wide) / (mean + epsilon).sqrt() * gamma.to(wide) * scale).to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [.., Dr] rotated by pairs, the even components first."""
    wide = compute_dtype(x)
    return interleave_half(x.to(wide), cos.to(wide), sin.to(wide)).to(x.dtype)


def _queries(given: Given) -> tuple[Tensor, ...]:
    """The five results that are no caches."""
    x, up, sin, cos = (given[name] for name in ("token_x", "weight_uk", "rope_sin", "rope_cos"))
    latent = _normalised(
        x @ given["weight_dq"], given["rmsnorm_gamma_cq"], given["rmsnorm_epsilon_cq"], given["qc_qr_scale"]
    )
    heads = (latent @ given["weight_uq_qr"]).unflatten(-1, (up.shape[0], -1))
    nope, rope = heads.split([up.shape[1], sin.shape[-1]], dim=-1)
    query = TRANSPOSE_BATCHMATMUL.fallback(nope.flatten(0, -3), up, perm_x1=(1, 0, 2))
    query_rope = _turned(rope, cos.unsqueeze(-2), sin.unsqueeze(-2))
    none, zero = x.new_zeros([1], dtype=torch.float32), x.new_zeros([1], dtype=torch.float32)
    norm = latent if given["query_norm_flag"] else latent.new_zeros([1])
    return query.reshape(*nope.shape[:-1], up.shape[-1]), query_rope, none, norm, zero


def _caches(given: Given, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """Both caches with the new lines: themselves, or copies."""
    width = given["rmsnorm_gamma_ckv"].shape[0]
    sin, cos = given["rope_sin"], given["rope_cos"]
    latent, rope = (given["token_x"] @ given["weight_dkv_kr"]).split([width, sin.shape[-1]], dim=-1)
    norm = _normalised(latent, given["rmsnorm_gamma_ckv"], given["rmsnorm_epsilon_ckv"], given["kc_scale"])
    turned = _turned(rope, cos, sin)
    keys, ropes = (
        _cached(given[name], rows.unsqueeze(-2), given, in_place)
        for name, rows in (("kv_cache", norm), ("kr_cache", turned))
    )
    return keys, ropes


def _cached(cache: Tensor, rows: Tensor, given: Given, in_place: bool) -> Tensor:
    mode, slots = given["cache_mode"], given["cache_index"]
    if slots is None:
        return torch.ops.aten.copy_.default(cache, rows) if in_place else torch.ops.aten.copy.default(cache, rows)
    pages = _by_lines(cache) if mode == "PA_NZ" else cache
    filled = (write if in_place else written)(pages, *stored(pages, rows.flatten(0, -3), slots.flatten(), mode))
    return filled.view(cache.shape)


def _by_lines(cache: Tensor) -> Tensor:
    """Pages [Blocks, Size, 1, D] as the NZ that they hold: [Blocks, D / 16, Size, 16]."""
    blocks, size, _, width = cache.shape
    return cache.view(blocks, width // _LINE, size, _LINE)


def _in_place(given: Given) -> tuple[Tensor, ...]:
    queries = _queries(given)
    _caches(given, in_place=True)
    return queries


def _functional(given: Given) -> tuple[Tensor, ...]:
    return *_queries(given), *_caches(given, in_place=False)


def _meta(given: Given) -> tuple[Tensor, ...]:
    x, up, rope = given["token_x"], given["weight_uk"], given["rope_sin"].shape[-1]
    heads = [*x.shape[:-1], up.shape[0]]
    norm = [*x.shape[:-1], given["weight_dq"].shape[1]] if given["query_norm_flag"] else [1]
    query, query_rope = x.new_empty([*heads, up.shape[-1]]), x.new_empty([*heads, rope])
    none, zero = x.new_empty([1], dtype=torch.float32), x.new_empty([1], dtype=torch.float32)
    return query, query_rope, none, x.new_empty(norm), zero


def _functional_meta(given: Given) -> tuple[Tensor, ...]:
    return *_meta(given), torch.empty_like(given["kv_cache"]), torch.empty_like(given["kr_cache"])


def _flops(given: Given) -> float:
    """The four products."""
    x = given["token_x"]
    tokens = count(x) / hint(x.shape[-1])
    weights = (count(given[name]) for name in ("weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr"))
    return 2.0 * tokens * sum(weights)


_PAGED = ("PA_BSND", "PA_NZ")
_BLOCKS = ("PA_BLK_BSND", "PA_BLK_NZ")
_CONTIGUOUS = ("BSND", "TND")


def _dims(tokens: str, batch: str, pages: str) -> str:
    """Dims of a tensor for tokens [T, ..], for batches [B, S, ..], and in pages ("" if it lies the same there)."""
    whole = f"cache_mode=BSND:{batch} / cache_mode=TND:{tokens}"
    each = (f"cache_mode={mode}:{pages or kind}" for mode in (*_PAGED, *_BLOCKS) for kind in (tokens, batch))
    return f"{whole} / {' / '.join(each)}"


_INDEX = " / ".join(
    ["*I", "*I", *(f"cache_mode={mode}:{dims}" for mode in _PAGED for dims in ("T", "B S")), *["*I"] * 4]
)
_DIMS = {
    "token_x": _dims("T He", "B S He", ""),
    "weight_dq": "He Hcq",
    "weight_uk": "N D Hckv",
    "rope_sin": _dims("T Dr", "B S Dr", ""),
    "rope_cos": _dims("T Dr", "B S Dr", ""),
    "weight_uq_qr": "Hcq Huq",
    "weight_dkv_kr": "He Hkv",
    "rmsnorm_gamma_cq": "Hcq",
    "rmsnorm_gamma_ckv": "Hckv",
    "kv_cache": _dims("T 1 Hckv", "B S 1 Hckv", "Blocks Size 1 Hckv"),
    "kr_cache": _dims("T 1 Dr", "B S 1 Dr", "Blocks Size 1 Dr"),
    "cache_index": _INDEX,
}
_ROWS = ("token_x", "weight_dq", "weight_uq_qr", "weight_uk", "weight_dkv_kr", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv",
         "rope_sin", "rope_cos", "kv_cache", "kr_cache")  # fmt: skip
_QUANTISED = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr",
              "quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq", "k_nope_clip_alpha")  # fmt: skip
_MODES = ("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode", "ckvkr_repo_mode", "quant_scale_repo_mode")
_NOT = "not decomposed"
_HOST = (
    *(Limit(f"{name} == 0", because=f"quantisation is {_NOT}") for name in _MODES),
    *(Limit(f"not given({name})", because=f"quantisation is {_NOT}") for name in _QUANTISED),
    Limit(f"cache_mode in {(*_PAGED, *_CONTIGUOUS)}", because=f"indices of whole blocks are {_NOT}"),
    Limit("not given(actual_seq_len)", because=f"indices of whole blocks are {_NOT}"),
    Limit("given(cache_index)", when=f"cache_mode in {_PAGED}"),
    Limit("not given(cache_index)", when=f"cache_mode in {_CONTIGUOUS}", because="the whole cache is written"),
    "Huq == N * (D + Dr)",
    "Hkv == Hckv + Dr",
    "Dr % 2 == 0",
    Limit("Hckv % 16 == 0 and Dr % 16 == 0", when="cache_mode == 'PA_NZ'", because="a line of NZ holds 16 elements"),
)
_KERNEL = (
    "He in (1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192)",
    "Hcq in (1536, 2048)",
    "N in (1, 2, 4, 8, 16, 32, 64, 128)",
    "Hckv == 512",
    "D in (128, 192)",
    "Dr == 64",
    Limit("Size % 16 == 0 and Size <= 1024", when=f"cache_mode in {_PAGED}"),
    Limit("B <= 65536", when="rank(token_x) == 3"),
)
_SCHEMA = (
    "Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, Tensor weight_dkv_kr, "
    "Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos, {caches}, *, "
    "Tensor? cache_index=None, Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None, "
    "Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None, Tensor? quant_scale_ckv=None, "
    "Tensor? quant_scale_ckr=None, Tensor? smooth_scales_cq=None, Tensor? actual_seq_len=None, "
    "Tensor? k_nope_clip_alpha=None, float rmsnorm_epsilon_cq=1.0000000000000001e-05, "
    'float rmsnorm_epsilon_ckv=1.0000000000000001e-05, str cache_mode="PA_BSND", bool query_norm_flag=False, '
    "int weight_quant_mode=0, int kv_cache_quant_mode=0, int query_quant_mode=0, int ckvkr_repo_mode=0, "
    "int quant_scale_repo_mode=0, int tile_size=128, float qc_qr_scale=1., float kc_scale=1., "
    "int? token_x_dtype=None, int? weight_dq_dtype=None, int? weight_uq_qr_dtype=None, "
    "int? weight_dkv_kr_dtype=None, int? kv_cache_dtype=None"
)
_RESULTS = ("Tensor",) * 5
_IN_PLACE_SCHEMA = (
    f"npu::npu_mla_prolog_v3({_SCHEMA.format(caches='Tensor(a!) kv_cache, Tensor(b!) kr_cache')}) "
    f"-> ({', '.join(_RESULTS)})"
)
_FUNCTIONAL_SCHEMA = (
    f"npu::npu_mla_prolog_v3_functional({_SCHEMA.format(caches='Tensor kv_cache, Tensor kr_cache')}) "
    f"-> ({', '.join((*_RESULTS, 'Tensor', 'Tensor'))})"
)
_DTYPES = {**dict.fromkeys(_ROWS, frozenset({torch.bfloat16})), "cache_index": frozenset({torch.int64})}
_LIMITS = {"host": _HOST, "ascend910b": _KERNEL, "ascend910_93": _KERNEL, "ascend950": _KERNEL}
_SOURCE = (
    "op-plugin: torch_npu.npu_mla_prolog_v3; kernel: ops-transformer mla_prolog (a negative slot is skipped; every "
    "product is rounded); weight_dq, weight_uq_qr, weight_dkv_kr in FRACTAL_NZ"
)
_SUMMARY = (
    "c = round(norm(x W_dq) · qc_qr_scale), [q ‖ qr] = c W_uq_qr, [k ‖ kr] = x W_dkv_kr; query = q W_uk, "
    "query_rope = rope(qr), query_norm = c; kv_cache[slot] = round(norm(k) · kc_scale), kr_cache[slot] = rope(kr); "
    "every product is rounded, norm and rope are in float32; rope by pairs, even components first"
)

MLA_PROLOG_V3 = Operator(
    schema=_IN_PLACE_SCHEMA,
    fallback=by_schema(_IN_PLACE_SCHEMA, _in_place),
    meta=by_schema(_IN_PLACE_SCHEMA, _meta),
    dims=_DIMS,
    dtypes=_DTYPES,
    limits=_LIMITS,
    lowerings=frozenset({"eager", "torchair", "npugraph_ex"}),
    flops=_flops,
    source=_SOURCE,
    summary=_SUMMARY,
)
MLA_PROLOG_V3_FUNCTIONAL = Operator(
    schema=_FUNCTIONAL_SCHEMA,
    fallback=by_schema(_FUNCTIONAL_SCHEMA, _functional),
    meta=by_schema(_FUNCTIONAL_SCHEMA, _functional_meta),
    dims=_DIMS,
    dtypes=_DTYPES,
    limits=_LIMITS,
    flops=_flops,
    lowerings=frozenset({"torchair"}),  # the in-place form runs in eager and captured graphs
    source=_SOURCE,
    summary=f"with copies of the caches as results 5 and 6: {_SUMMARY}",
    in_place="npu::npu_mla_prolog_v3",
)
