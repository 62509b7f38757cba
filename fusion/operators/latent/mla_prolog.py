"""Queries and cache rows of latent attention (MLA prolog) in one kernel.

    c = norm(x · W_dq), [q ‖ q_rope] = c · W_uq_qr  →  query = q · W_uk, query_rope = rope(q_rope)
    [k ‖ k_rope] = x · W_dkv_kr                     →  kv_cache[slot] = norm(k), kr_cache[slot] = rope(k_rope)

The kernel reads weight_dq, weight_uq_qr and weight_dkv_kr in the storage format FRACTAL_NZ, which a shape does not
show, and weight_uk in ND.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusion._torch.tensors import count, hint
from fusion.operators.cache.pages import Put
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import BFLOAT16, FLOAT32, INT8, INT64, compute_dtype
from fusion.operators.flops import products
from fusion.operators.latent.mla_prolog_numbers import computed
from fusion.operators.limits import A2_A3, CHIPS, Limit, only
from fusion.operators.operator import Operator, functional


def _outputs(given: Given) -> tuple[Tensor, ...]:
    x, up, rope = given["token_x"], given["weight_uk"], given["rope_sin"].shape[-1]
    heads = [*x.shape[:-1], up.shape[0]]
    quantised, flag = bool(given["query_quant_mode"]), given["query_norm_flag"]
    tokens = math.prod(x.shape[:-1])
    wide = compute_dtype(up) if given["weight_quant_mode"] else torch.float32
    query = up.new_empty([*heads, up.shape[-1]], dtype=torch.int8 if quantised else up.dtype)
    scales = up.new_empty([tokens, up.shape[0], 1] if quantised else [1], dtype=wide if quantised else torch.float32)
    norm = given["weight_uq_qr"].new_empty([*x.shape[:-1], given["weight_dq"].shape[1]] if flag else [1])
    scaled = flag and given["weight_quant_mode"]
    norm_scale = up.new_empty([tokens, 1] if scaled else [1], dtype=wide if scaled else torch.float32)
    return query, up.new_empty([*heads, rope]), scales, norm, norm_scale


_PAGED = ("PA_BSND", "PA_NZ")
_BLOCKS = ("PA_BLK_BSND", "PA_BLK_NZ")
_CONTIGUOUS = ("BSND", "TND")


def _dims(tokens: str, batch: str, pages: str) -> str:
    """Return the declared dims of an argument by `cache_mode`.

    They are `tokens` [T, ..] or `batch` [B, S, ..] for contiguous caches, `pages` for paged ones. If `pages` is "", as
    for an argument that is no cache, paged calls take `tokens` and `batch` as well.
    """
    contiguous = f"cache_mode=BSND:{batch} / cache_mode=TND:{tokens}"
    paged = (f"cache_mode={mode}:{pages or kind}" for mode in (*_PAGED, *_BLOCKS) for kind in (tokens, batch))
    return f"{contiguous} / {' / '.join(paged)}"


_INDEX = " / ".join(
    ["*I", "*I", *(f"cache_mode={mode}:{dims}" for mode in _PAGED for dims in ("T", "B S")), *["*I"] * 4]
)
_INT8_X_SCALES = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_dkv_kr")
_SCALES = {
    "dequant_scale_w_dq": "(1, Hcq)",
    "dequant_scale_w_uq_qr": "(1, Huq)",
    "dequant_scale_w_dkv_kr": "(1, Hkv)",
    "quant_scale_ckr": "(1, Dr)",
    "smooth_scales_cq": "(1, Hcq)",
    "k_nope_clip_alpha": "(1,)",
}
_CHOICE = "(weight_quant_mode, kv_cache_quant_mode, query_quant_mode)"
_CHOICES = ((0, 0, 0), (1, 0, 0), (1, 2, 0), (1, 3, 0), (2, 0, 0), (2, 1, 1), (2, 3, 0))
_WEIGHT, _CACHE = "weight_quant_mode", "kv_cache_quant_mode"
_MODES = (
    "0 is floats; of weights 1 is W_UQ in int8, 2 all in int8; of the cache 1 is int8 with one scale, 2 with a scale "
    "of each lane, 3 of each tile; of queries 1 is int8; quantise weights, cache and queries in one of these ways"
)
_NOT = "not decomposed"
_FLOATS = f"floats of 8 bits are {_NOT}"


_FITTING = (
    "Huq == N * (D + Dr)",
    "Hkv == Hckv + Dr",
    "Dr % 2 == 0",
    Limit("Hckv % 16 == 0 and Dr % 16 == 0", when="cache_mode == 'PA_NZ'", because="a line of NZ holds 16 elements"),
)
_HOST = (
    Limit(f"{_CHOICE} in {_CHOICES}", because=_MODES),
    *only(_INT8_X_SCALES, f"{_WEIGHT} == 2"),
    *only(("dequant_scale_w_uq_qr",), f"{_WEIGHT} in (1, 2)"),
    *only(("quant_scale_ckv",), f"{_CACHE} in (1, 2)"),
    *only(("quant_scale_ckr",), f"{_CACHE} == 2"),
    *only(("k_nope_clip_alpha",), f"{_CACHE} == 3"),
    Limit("not given(smooth_scales_cq)", when=f"{_WEIGHT} == 0"),
    *(Limit(f"shape({name}) == {shape}", when=f"given({name})") for name, shape in _SCALES.items()),
    Limit("shape(dequant_scale_x) == (T, 1)", when="given(dequant_scale_x) and rank(token_x) == 2"),
    Limit("shape(dequant_scale_x) == (B * S, 1)", when="given(dequant_scale_x) and rank(token_x) == 3"),
    Limit("shape(quant_scale_ckv) == (1,)", when=f"{_CACHE} == 1"),
    Limit("shape(quant_scale_ckv) == (1, Hckv)", when=f"{_CACHE} == 2"),
    Limit("ckvkr_repo_mode == 1 and quant_scale_repo_mode == 1", when=f"{_CACHE} == 3"),
    Limit("ckvkr_repo_mode == 0 and quant_scale_repo_mode == 0", when=f"{_CACHE} != 3"),
    Limit("tile_size == 128"),
    Limit("Line == Hckv and Kr == Dr", when=f"{_CACHE} != 3"),
    Limit("Line == Hckv + 2 * Dr + Hckv // 128 * 4", when=f"{_CACHE} == 3"),
    Limit("Hckv % 128 == 0", when=f"{_CACHE} == 3"),
    Limit("cache_mode != 'PA_NZ'", when=f"{_CACHE} == 3", because=f"lines of bytes in NZ are {_NOT}"),
    Limit("dtype(token_x) == 'int8'", when=f"{_WEIGHT} == 2"),
    Limit("dtype(weight_dq) == dtype(token_x) and dtype(weight_dkv_kr) == dtype(token_x)"),
    Limit("dtype(weight_uq_qr) == 'int8'", when=f"{_WEIGHT} in (1, 2)"),
    Limit("dtype(kv_cache) == 'int8'", when=f"{_CACHE} in (1, 2, 3)"),
    Limit("dtype(kr_cache) == 'int8'", when=f"{_CACHE} == 2"),
    Limit(f"cache_mode in {(*_PAGED, *_CONTIGUOUS)}", because=f"indices of whole blocks are {_NOT}"),
    Limit("given(cache_index)", when=f"cache_mode in {_PAGED}"),
    Limit("not given(cache_index)", when=f"cache_mode in {_CONTIGUOUS}", because="the whole cache is written"),
    *_FITTING,
    Limit(
        "Hckv % 32 == 0",
        when=f"cache_mode == 'PA_NZ' and {_CACHE} in (1, 2)",
        because="a line of NZ holds 32 int8",
    ),
    Limit("Dr % 32 == 0", when=f"cache_mode == 'PA_NZ' and {_CACHE} == 2", because="a line of NZ holds 32 of them"),
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
    Limit("dtype(token_x) == 'bfloat16'", when=f"{_WEIGHT} != 2"),
    Limit("dtype(weight_uq_qr) == 'bfloat16'", when=f"{_WEIGHT} == 0"),
    Limit("dtype(kv_cache) == 'bfloat16'", when=f"{_CACHE} == 0"),
    Limit("dtype(kr_cache) == 'bfloat16'", when=f"{_CACHE} != 2"),
)
_BF16, _EITHER = BFLOAT16, BFLOAT16 | INT8
_SUMMARY = (
    "c = round(norm(x W_dq) · qc_qr_scale), [q ‖ qr] = c W_uq_qr, [k ‖ kr] = x W_dkv_kr; query = q W_uk, "
    "query_rope = rope(qr), query_norm = c; kv_cache[slot] = round(norm(k) · kc_scale), kr_cache[slot] = rope(kr); "
    "every product is rounded, norm and rope are in float32; rope by pairs, even components first; in int8: c, or x "
    "and c, quantised token by token, products not rounded before norm and rope"
)

MLA_PROLOG_V3 = Operator(
    schema=(
        "npu::npu_mla_prolog_v3(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, "
        "Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, Tensor rope_cos, "
        "Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, Tensor? cache_index=None, Tensor? dequant_scale_x=None, "
        "Tensor? dequant_scale_w_dq=None, Tensor? dequant_scale_w_uq_qr=None, Tensor? dequant_scale_w_dkv_kr=None, "
        "Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None, Tensor? smooth_scales_cq=None, "
        "Tensor? actual_seq_len=None, Tensor? k_nope_clip_alpha=None, "
        "float rmsnorm_epsilon_cq=1.0000000000000001e-05, float rmsnorm_epsilon_ckv=1.0000000000000001e-05, "
        'str cache_mode="PA_BSND", bool query_norm_flag=False, int weight_quant_mode=0, int kv_cache_quant_mode=0, '
        "int query_quant_mode=0, int ckvkr_repo_mode=0, int quant_scale_repo_mode=0, int tile_size=128, "
        "float qc_qr_scale=1., float kc_scale=1., int? token_x_dtype=None, int? weight_dq_dtype=None, "
        "int? weight_uq_qr_dtype=None, int? weight_dkv_kr_dtype=None, int? kv_cache_dtype=None) -> (Tensor, Tensor, "
        "Tensor, Tensor, Tensor)"
    ),
    compute=computed,
    uncomputed={
        "actual_seq_len": f"indices of whole blocks are {_NOT}",
        "token_x_dtype weight_dq_dtype weight_uq_qr_dtype weight_dkv_kr_dtype kv_cache_dtype": _FLOATS,
    },
    without_effect=frozenset({"ckvkr_repo_mode", "quant_scale_repo_mode", "tile_size"}),
    outputs=_outputs,
    dims={
        "token_x": _dims("T He", "B S He", ""),
        "weight_dq": "He Hcq",
        "weight_uk": "N D Hckv",
        "rope_sin rope_cos": _dims("T Dr", "B S Dr", ""),
        "weight_uq_qr": "Hcq Huq",
        "weight_dkv_kr": "He Hkv",
        "rmsnorm_gamma_cq": "Hcq",
        "rmsnorm_gamma_ckv": "Hckv",
        "kv_cache": _dims("T 1 Line", "B S 1 Line", "Blocks Size 1 Line"),
        "kr_cache": _dims("T 1 Kr", "B S 1 Kr", "Blocks Size 1 Kr"),
        "cache_index": _INDEX,
    },
    dtypes={
        "token_x weight_dq weight_uq_qr weight_dkv_kr kv_cache kr_cache": _EITHER,
        "weight_uk rmsnorm_gamma_cq rmsnorm_gamma_ckv rope_sin rope_cos": _BF16,
        **dict.fromkeys(("dequant_scale_x", *_SCALES, "quant_scale_ckv"), FLOAT32),
        "cache_index": INT64,
    },
    limits={"host": _HOST, **dict.fromkeys(CHIPS, _KERNEL)},
    flops=lambda token_x, weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr: products(
        count(token_x) / hint(token_x.shape[-1]), weight_dq, weight_uq_qr, weight_uk, weight_dkv_kr
    ),
    older="custom::npu_mla_prolog_v3",
    source=(
        "op-plugin: torch_npu.npu_mla_prolog_v3; kernel: ops-transformer mla_prolog (a negative slot is skipped; every "
        "product is rounded); weight_dq, weight_uq_qr, weight_dkv_kr in FRACTAL_NZ"
    ),
    rounds="what each layer gives, and queries times weight_uk",
    summary=_SUMMARY,
    empty=frozenset({"Kr"}),
)
MLA_PROLOG_V3_FUNCTIONAL = functional(
    MLA_PROLOG_V3,
    "npu::npu_mla_prolog_v3_functional",
    f"with copies of the caches as results 5 and 6: {_SUMMARY}",
    frozenset({"torchair"}),  # the in-place form runs in eager and captured graphs
)


# The two older prologs take fewer sizes, and do not return the latent of the queries. Their schemas do not declare that
# they write both caches, so a compiler might drop or reorder the calls. The pass emits overloads of ours instead: one
# that declares the writes, for which a device runs the vendor's own, and a functional one.
_QUANTISED = ("dequant_scale_x", "dequant_scale_w_dq", "dequant_scale_w_uq_qr", "dequant_scale_w_dkv_kr",
              "quant_scale_ckv", "quant_scale_ckr", "smooth_scales_cq")  # fmt: skip


def _older_computed(put: Put, given: Given) -> tuple[Tensor, ...]:
    query, rope, _, _, _, *caches = computed(put, MLA_PROLOG_V3.bind((), given))
    return query, rope, *caches


def _older_outputs(given: Given) -> tuple[Tensor, ...]:
    query, rope, *_ = MLA_PROLOG_V3.meta(**given)
    return query, rope


_DIMS = {
    **MLA_PROLOG_V3.dims,
    "token_x": "T He / B S He",
    "rope_sin rope_cos": "T Dr / B S Dr",
    "kv_cache": "Blocks Size 1 Hckv",
    "kr_cache": "Blocks Size 1 Dr",
    "cache_index": "T / B S",
}
_OLDER_HOST = (
    "cache_mode in ('PA_BSND', 'PA_NZ')",
    *_FITTING,
)
_OLDER_KERNEL = (
    "He == 7168",
    "Hcq == 1536",
    "Hckv == 512",
    "D == 128",
    "Dr == 64",
    "Size in (16, 128)",
    Limit("B <= 65536", when="rank(token_x) == 3"),
)
_ONE_TOKEN = (*_OLDER_KERNEL, "N in (32, 64, 128)", Limit("S <= 1", when="rank(token_x) == 3"))
_FEW_TOKENS = (*_OLDER_KERNEL, "N in (1, 2, 4, 8, 16, 32, 64, 128)", Limit("S <= 16", when="rank(token_x) == 3"))
_OLDER_SUMMARY = (
    "query and query_rope of npu_mla_prolog_v3 without factors, its lines written to both caches; {what} of ours, "
    "because the vendor's schema hides the writes"
)


def _both(name: str, source: str, kernel: tuple[Limit | str, ...]) -> tuple[Operator, Operator]:
    """Declare the in-place and the functional overload of the older prolog `name`, with the limits `kernel` and their
    `source`.
    """
    writing = Operator(
        schema=(
            f"npu::{name}.in_place(Tensor token_x, Tensor weight_dq, Tensor weight_uq_qr, Tensor weight_uk, "
            "Tensor weight_dkv_kr, Tensor rmsnorm_gamma_cq, Tensor rmsnorm_gamma_ckv, Tensor rope_sin, "
            "Tensor rope_cos, Tensor cache_index, Tensor(a!) kv_cache, Tensor(b!) kr_cache, *, "
            "Tensor? dequant_scale_x=None, Tensor? dequant_scale_w_dq=None, Tensor? dequant_scale_w_uq_qr=None, "
            "Tensor? dequant_scale_w_dkv_kr=None, Tensor? quant_scale_ckv=None, Tensor? quant_scale_ckr=None, "
            "Tensor? smooth_scales_cq=None, float rmsnorm_epsilon_cq=1.0000000000000001e-05, "
            'float rmsnorm_epsilon_ckv=1.0000000000000001e-05, str cache_mode="PA_BSND") -> (Tensor, Tensor)'
        ),
        compute=_older_computed,
        uncomputed={" ".join(_QUANTISED): "quantisation is not decomposed"},
        outputs=_older_outputs,
        dims=_DIMS,
        dtypes=dict.fromkeys(_DIMS, BFLOAT16) | {"cache_index": INT64},
        limits={"host": _OLDER_HOST, **dict.fromkeys(A2_A3, kernel)},
        lowerings=frozenset({"eager", "npugraph_ex"}),  # GE sees no order between such a call and what reads its caches
        flops=MLA_PROLOG_V3.flops,
        source=source,
        rounds=MLA_PROLOG_V3.rounds,
        summary=_OLDER_SUMMARY.format(what="an overload"),
        runs_default=True,
    )
    summary = _OLDER_SUMMARY.format(what="copies of the caches are results 2 and 3; an overload")
    return writing, functional(writing, f"npu::{name}.functional", summary)  # only the in-place form is launched


MLA_PROLOG, MLA_PROLOG_FUNCTIONAL = _both(
    "npu_mla_prolog",
    "op-plugin: torch_npu.npu_mla_prolog, whose page allows 32, 64 or 128 heads, one token",
    _ONE_TOKEN,
)
MLA_PROLOG_V2, MLA_PROLOG_V2_FUNCTIONAL = _both(
    "npu_mla_prolog_v2", "op-plugin: torch_npu.npu_mla_prolog_v2, whose page allows 16 tokens", _FEW_TOKENS
)
