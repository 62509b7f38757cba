"""Queries and cache rows of latent attention, with int8 weights, in one kernel of atb.

    y = W_dqkv · quant(norm(x) γ0 + β0),  [k ‖ k_rope ‖ c] = y
    [q ‖ q_rope] = W_uq · quant(norm(c) γ1 + β1), per head
    q_out0 = q W_uk      q_out1 = rope(q_rope)      kv_cache[slot] = norm(k) γ2      kv_cache_rope[slot] = rope(k_rope)

RoPE is by halves, and the weights are in NZ: [out, in] as [1, in / 32, out, 32]. The overload of torch_npu that
allocates its results returns caches with nothing but the new rows; only the one that takes the results is launched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators import encodings
from fusion.operators.cache.pages import ATB_NZ, Put, in_pages, stored
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, HALVES, INT8, INT32, INT64, compute_dtype
from fusion.operators.flops import products
from fusion.operators.limits import A2_A3, Limit, only
from fusion.operators.norm.norms import normalised
from fusion.operators.operator import Operator, functional
from fusion.operators.rotary.rope import half, rotated

EPSILON = 1e-6
"""Epsilon of every norm: compiled into the kernel, which ignores the epsilon that the binding passes."""


def _product(x: Tensor, given: Given, number: int, weight: str) -> Tensor:
    """Normalise and quantise `x` by the parameters with the suffix `number`, multiply by the int8 `weight`, and return
    the dequantised product in the dtype of `x`."""
    wide = compute_dtype(x)
    gamma, beta, scale, offset, bias, descale = (
        given[f"{name}{number}"] for name in ("gamma", "beta", "quant_scale", "quant_offset", "bias", "descale")
    )
    norm = normalised(x, gamma, EPSILON) + beta.to(wide)
    lines = given[weight][0].transpose(0, 1).flatten(1).double()  # float64 represents every sum of int8 products
    back = _float_scale(descale, wide)
    if given["quant_mode"] == "per_tensor_quant_asymm":
        rows = (norm / scale.to(wide) + offset.to(wide)).round().clamp(-128, 127)
        return ((rows.double() @ lines.t() + bias).to(wide) * back).to(x.dtype)
    norm = norm.to(x.dtype).to(wide)
    top = norm.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(wide).tiny)
    rows = (norm * (127 / top)).round()
    return ((rows.double() @ lines.t()).to(wide) * back * (top / 127)).to(x.dtype)


def _float_scale(scale: Tensor, wide: torch.dtype) -> Tensor:
    """Decode a scale to `wide`: floats, or the bits of float32 in int64."""
    return (scale.to(torch.int32).view(torch.float32) if scale.dtype == torch.int64 else scale).to(wide)


def _computed(given: Given) -> tuple[Tensor, ...]:
    """Compute the queries [T, N, C] and [T, N, Dr], and the cache rows [T, C] and [T, Dr]."""
    x, up, cos, sin = (given[name] for name in ("input", "wuk", "cos", "sin"))
    wide, narrow = compute_dtype(x), given["cache_mode"] == "int8_nzcache"
    width, rope = given["gamma2"].shape[0], cos.shape[-1]
    latent, k_rope, lora = _product(x, given, 0, "wdqkv").split([width, rope, given["gamma1"].shape[0]], dim=-1)
    heads = _product(lora, given, 1, "wuq").unflatten(-1, (up.shape[0], -1))
    nope, q_rope = heads.split([up.shape[1], rope], dim=-1)
    query = (nope.transpose(0, 1).to(wide) @ up.to(wide)).transpose(0, 1).to(x.dtype)
    line = normalised(latent, given["gamma2"], EPSILON).to(x.dtype)
    if narrow:
        query = encodings.INT8.stored(query.to(wide) * given["q_nope_scale"].to(wide)[:, None])
        line = encodings.INT8.stored(line.to(wide) / given["ctkv_scale"].to(wide))
    q_rope = rotated(half, q_rope, cos.unsqueeze(1), sin.unsqueeze(1), x.dtype)
    return query.contiguous(), q_rope.contiguous(), line, rotated(half, k_rope, cos, sin, x.dtype)


def _places(given: Given, cache: Tensor, rows: Tensor) -> Any:
    mode = "PA_NZ" if given["cache_mode"] in ATB_NZ else "Norm"
    return stored(cache, rows.unsqueeze(1), given["slotmapping"].long(), mode)


def _put(put: Put, given: Given) -> tuple[Tensor, ...]:
    query, q_rope, line, k_rope = _computed(given)
    latents, ropes = given["kv_cache_out0"], given["kv_cache_out1"]
    return (
        put(given["q_out0"], None, query),
        put(latents, *_places(given, latents, line)),
        put(given["q_out1"], None, q_rope),
        put(ropes, *_places(given, ropes, k_rope)),
    )


_STATIC = ("quant_scale0", "quant_offset0", "bias0", "quant_scale1", "quant_offset1", "bias1")
_ASYMMETRIC = "quant_mode == 'per_tensor_quant_asymm'"
_INT8 = "cache_mode == 'int8_nzcache'"
_HOST = (
    Limit("quant_mode in (None, 'per_token_quant_symm', 'per_tensor_quant_asymm')"),
    *only(_STATIC, _ASYMMETRIC, "scales are found for each token"),
    *only(("ctkv_scale", "q_nope_scale"), _INT8),
    "A * L == He and Q * L == Hcq",
    "Nk == Hckv + Dr + Hcq",
    "Nq == N * (D + Dr)",
    "Dr % 2 == 0",
    Limit("C * Lc == Hckv and R * Lr == Dr", when=f"cache_mode in {ATB_NZ}"),
    "dtype(wdqkv) == 'int8' and dtype(wuq) == 'int8'",
    Limit("dtype(kv_cache) == 'int8' and dtype(q_out0) == 'int8'", when=_INT8),
    Limit("dtype(kv_cache) == dtype(input) and dtype(q_out0) == dtype(input)", when="cache_mode != 'int8_nzcache'"),
    "dtype(kv_cache_out0) == dtype(kv_cache)",
)
_KERNEL = (
    "T >= 1 and T <= 1024",
    "He == 7168",
    "Hcq == 1536",
    "Hckv == 512",
    "D == 128",
    "Dr == 64",
    "N in (32, 64, 128)",
    "L == 32",
    Limit("Size <= 128 or Size == 256", when="cache_mode == 'krope_ctkv'"),
    Limit("Size == 128", when=f"cache_mode in {ATB_NZ}"),
    Limit("Lc * itemsize(kv_cache) == 32 and Lr == 16", when=f"cache_mode in {ATB_NZ}", because="so is a line of NZ"),
    *(Limit(f"dtype({name}) == dtype(input)") for name in ("gamma0", "cos", "wuk", "kv_cache_rope")),
    Limit("dtype(descale0) == 'float32' and dtype(descale1) == 'float32'", when="dtype(input) == 'bfloat16'"),
    Limit("dtype(descale0) == 'int64' and dtype(descale1) == 'int64'", when="dtype(input) == 'float16'"),
)
_SUMMARY = (
    "[k ‖ kr ‖ c] = round(descale0 · (W_dqkv q0 + bias0)), q0 = rint((norm(x) γ0 + β0) / quant_scale0 + "
    "quant_offset0), or per token rint(127 n / max|n|); [q ‖ qr] from c likewise; q_out0 = round(q W_uk), q_out1 = "
    "rope(qr), kv_cache_out0[slot] = round(norm(k) γ2), kv_cache_out1[slot] = rope(kr); eps is 1e-6, rope by halves in "
    "float32, a negative slot is skipped; int8_nzcache: rint(q_out0 · q_nope_scale), rint(k / ctkv_scale)"
)

MLA_PREPROCESS = Operator(
    schema=(
        "atb::npu_mla_preprocess.out("
        "Tensor input, Tensor gamma0, Tensor beta0, Tensor wdqkv, Tensor descale0, Tensor gamma1, Tensor beta1, "
        "Tensor wuq, Tensor descale1, Tensor gamma2, Tensor cos, Tensor sin, Tensor wuk, Tensor kv_cache, "
        "Tensor kv_cache_rope, Tensor slotmapping, *, Tensor? quant_scale0=None, Tensor? quant_offset0=None, "
        "Tensor? bias0=None, Tensor? quant_scale1=None, Tensor? quant_offset1=None, Tensor? bias1=None, "
        "Tensor? ctkv_scale=None, Tensor? q_nope_scale=None, str? cache_mode=None, str? quant_mode=None, "
        "Tensor(a!) q_out0, Tensor(b!) kv_cache_out0, Tensor(c!) q_out1, Tensor(d!) kv_cache_out1) "
        "-> (Tensor(a!), Tensor(b!), Tensor(c!), Tensor(d!))"
    ),
    compute=_put,
    without_effect=frozenset({"kv_cache", "kv_cache_rope"}),  # the same tensors as kv_cache_out0 and kv_cache_out1
    dims={
        "input": "T He",
        "gamma0 beta0": "He",
        "descale0": "Nk",
        "wdqkv": "1 A Nk L",
        "gamma1 beta1": "Hcq",
        "descale1": "Nq",
        "wuq": "1 Q Nq L",
        "gamma2": "Hckv",
        "cos sin": "T Dr",
        "wuk": "N D Hckv",
        "kv_cache kv_cache_out0": in_pages("Blocks Size 1 Hckv", "Blocks C Size Lc"),
        "kv_cache_rope kv_cache_out1": in_pages("Blocks Size 1 Dr", "Blocks R Size Lr"),
        "slotmapping": "T",
        "quant_scale0 quant_offset0 quant_scale1 quant_offset1 ctkv_scale": "1",
        "bias0": "Nk",
        "bias1": "Nq",
        "q_nope_scale": "N",
        "q_out0": "T N Hckv",
        "q_out1": "T N Dr",
    },
    dtypes={
        "input gamma0 beta0 gamma1 beta1 gamma2 cos sin wuk kv_cache_rope q_out1 kv_cache_out1": HALVES,
        "quant_scale0 quant_scale1 ctkv_scale q_nope_scale": HALVES,
        "wdqkv wuq quant_offset0 quant_offset1": INT8,
        "descale0 descale1": FLOAT32 | INT64,
        "bias0 bias1 slotmapping": INT32,
        "kv_cache kv_cache_out0 q_out0": HALVES | INT8,
    },
    limits={"host": _HOST, **dict.fromkeys(A2_A3, _KERNEL)},
    flops=lambda input, wdqkv, wuq, wuk: products(input.shape[0], wdqkv, wuq, wuk),
    rounds="what each layer gives, and queries times wuk",
    lowerings=frozenset({"eager"}),
    source=(
        "ATB: MlaPreprocessOperation, its checks, kernel and test_mla_preprocess.py; op-plugin: "
        "ops/atb/MLAPreprocessAtb.cpp, test_atb_mlapo.py; weights in FRACTAL_NZ"
    ),
    summary=f"{_SUMMARY}; the caches must be those that are read",
)
MLA_PREPROCESS_FUNCTIONAL = functional(  # an overload of ours: only the in-place form is launched
    MLA_PREPROCESS, "atb::npu_mla_preprocess.functional", f"with copies of the caches: {_SUMMARY}"
)
