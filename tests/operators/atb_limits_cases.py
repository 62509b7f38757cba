"""Both sides of the limits of the operators of atb for latent attention."""

from __future__ import annotations

from typing import Any

import torch

from fusion.operators import CHIPS, HOST
from tests.operators.atb_cases import LSE, MLA, PREPROCESS, RING, TENSORS
from tests.operators.limit_cases import starts, t

Edge = tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], str]
A2, A3, A5 = CHIPS
BF16, F16, F32, INT, LONG, I8 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.int8
ALL, KERNEL = (HOST, A2, A3), (A2, A3)


def attending(
    mode: str = "krope_ctkv", *, tokens: int = 3, n: int = 8, c: int = 512, dr: int = 64, size: int = 128, b: int = 3,
    dtype: torch.dtype = BF16, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    narrow = mode == "int8_nzcache"
    kind, line = (I8, 32) if narrow else (dtype, 16)
    caches = [(9, size, 1, c), (9, size, 1, dr)]
    if mode != "krope_ctkv":
        caches = [(9, c // line, size, line), (9, dr // 16, size, 16)]
    call: dict[str, Any] = {
        "q_nope": t(tokens, n, c, dtype=kind), "q_rope": t(tokens, n, dr, dtype=dtype),
        "ctkv": t(*caches[0], dtype=kind), "k_rope": t(*caches[1], dtype=dtype),
        "block_tables": t(b, 4, dtype=INT), "context_lens": [7] * b,
        "q_headnum": n, "qk_scale": 0.1, "kv_headnum": 1, "cache_mode": mode,
    }  # fmt: skip
    scales = {name: t(n, dtype=F32) for name in ("qk_descale", "pv_descale")} if narrow else {}
    return call | scales | more


def speculative(mode: str = "krope_ctkv", mask: str | None = None, n: int = 8, **more: Any) -> dict[str, Any]:
    call = attending(mode, tokens=6, n=n) | {"calc_type": "calc_type_spec", "qseqlen": [2] * 3}
    masks = {"spec": t(6, 7), "free": t(129, 128)}
    return call | ({"mask_type": f"mask_type_{mask}", "mask": masks[mask]} if mask else {}) | more


def returning(**more: Any) -> dict[str, Any]:
    return attending() | {"return_lse": True, "calc_type": "calc_type_ring"} | more


INT8, NZ = attending("int8_nzcache"), attending("nzcache")
_SHARED = [
    (ALL, attending(), attending(cache_mode=None), "requires cache_mode='krope_ctkv' or"),
    (ALL, attending(), attending(k_rope=t(9, 64, 1, 64)), "requires k_rope as [Blocks Size 1 Dr]"),
    (KERNEL, attending(tokens=8192, b=8192), attending(tokens=8193, b=8193), "B <= 8192"),
]
_MODES = [
    *starts(INT8),
    (KERNEL, NZ, NZ | {"ctkv": t(9, 64, 128, 8)}, "L * itemsize(ctkv) == 32 and M * itemsize(k_rope) == 32"),
]  # fmt: skip
_SPECULATIVE = [
    *starts(speculative(mask="free"), attending()),
    (ALL, speculative(mask="spec"), attending(mask=t(3, 7), mask_type="mask_type_spec"), "mask_type in (None, 'und"),
    (KERNEL, speculative("int8_nzcache", "free"), speculative("int8_nzcache"), "cache_mode != 'int8_nzcache'"),
]
_RETURNING = [
    (ALL, returning(), returning() | NZ, "cache_mode == 'krope_ctkv'"),
    (ALL, returning(), returning() | NZ | {"ctkv": t(9, 16, 128, 16)}, "A * L == C and R * M == Dr"),
]


def as_returning(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"return_lse": True, "calc_type": "calc_type_ring"}


def as_tensors(call: dict[str, Any]) -> dict[str, Any]:
    return call | {"context_lens": t(len(call["context_lens"]), dtype=LONG)}


def stepping(
    t_: int = 5, k: int = 5, m: int = 8, d: int = 128, dr: int = 64, e: int = 128, **more: Any
) -> dict[str, Any]:
    call = {
        "q_nope": t(t_, 8, d), "q_rope": t(t_, 8, dr), "k_nope": t(k, m, d), "k_rope": t(k, m, dr), "value": t(k, m, e),
        "mask": t(512, 512), "seqlen": t(2, dtype=INT), "head_num": 8, "kv_head_num": m, "mask_type": "mask_type_triu",
    }  # fmt: skip
    return call | more


def merging(**more: Any) -> dict[str, Any]:
    before = {"pre_out": t(5, 8, 128), "prev_lse": t(8, 5, dtype=F32), "calc_type": "calc_type_default"}
    return stepping() | before | more


BOTH = {"seqlen": t(2, 3, dtype=INT), "mask_type": "no_mask"}
_STEPPING = [
    *starts(stepping(), stepping(**BOTH), merging()),
]


def preparing(
    mode: str = "krope_ctkv", *, tokens: int = 5, he: int = 7168, hcq: int = 1536, n: int = 32, d: int = 128,
    dr: int = 64, hckv: int = 512, size: int = 128, static: bool = True, dtype: torch.dtype = BF16,
    line: int = 32, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    nk, nq, narrow = hckv + dr + hcq, n * (d + dr), mode == "int8_nzcache"
    kind, scale, lane = (I8 if narrow else dtype), (F32 if dtype == BF16 else LONG), 32 if narrow else 16
    latents, ropes = (9, size, 1, hckv), (9, size, 1, dr)
    if mode != "krope_ctkv":
        latents, ropes = (9, hckv // lane, size, lane), (9, dr // 16, size, 16)
    halves = {
        "input": (tokens, he), "gamma0": (he,), "beta0": (he,), "gamma1": (hcq,), "beta1": (hcq,), "gamma2": (hckv,),
        "cos": (tokens, dr), "sin": (tokens, dr), "wuk": (n, d, hckv), "kv_cache_rope": ropes, "kv_cache_out1": ropes,
        "q_out1": (tokens, n, dr),
    }  # fmt: skip
    call: dict[str, Any] = {name: t(*shape, dtype=dtype) for name, shape in halves.items()}
    call |= {
        "wdqkv": t(1, he // line, nk, line, dtype=I8), "wuq": t(1, hcq // line, nq, line, dtype=I8),
        "descale0": t(nk, dtype=scale), "descale1": t(nq, dtype=scale), "kv_cache": t(*latents, dtype=kind),
        "kv_cache_out0": t(*latents, dtype=kind), "q_out0": t(tokens, n, hckv, dtype=kind),
        "slotmapping": t(tokens, dtype=INT), "cache_mode": mode,
        "quant_mode": "per_tensor_quant_asymm" if static else "per_token_quant_symm",
    }  # fmt: skip
    if static:
        call |= {f"quant_scale{i}": t(1, dtype=dtype) for i in (0, 1)} | {
            f"quant_offset{i}": t(1, dtype=I8) for i in (0, 1)
        }
        call |= {"bias0": t(nk, dtype=INT), "bias1": t(nq, dtype=INT)}
    scales = {"ctkv_scale": t(1, dtype=dtype), "q_nope_scale": t(n, dtype=dtype)} if narrow else {}
    return call | scales | more


_STATIC = {
    **{f"quant_scale{i}": t(1) for i in (0, 1)}, **{f"quant_offset{i}": t(1, dtype=I8) for i in (0, 1)},
    "bias0": t(2112, dtype=INT), "bias1": t(32 * 192, dtype=INT),
}  # fmt: skip
SHORT = {"gamma1": t(1504), "beta1": t(1504), "wuq": t(1, 47, 6144, 32, dtype=I8)}
_I8, _LINES, _DYNAMIC = preparing("int8_nzcache"), preparing("nzcache"), preparing(static=False)


def caches(*shape: int) -> dict[str, Any]:
    return dict.fromkeys(("kv_cache", "kv_cache_out0"), t(*shape))


_BEFORE = [
    *starts(preparing(dtype=F16)),
    *((ALL, _DYNAMIC, _DYNAMIC | {name: x}, f"not given({name})") for name, x in _STATIC.items()),
    *((ALL, _I8, _I8 | {name: None}, f"given({name})") for name in ("ctkv_scale", "q_nope_scale")),
    (KERNEL, preparing(), preparing(he=6144), "He == 7168"),
    (KERNEL, preparing(), preparing(hcq=2048), "Hcq == 1536"),
    (KERNEL, preparing(), preparing(line=16), "L == 32"),
    (KERNEL, _LINES, _LINES | caches(9, 64, 128, 8), "Lc * items"),
]  # fmt: skip
EDGES: list[Edge] = [
    *((MLA, *edge) for edge in (*_SHARED, *_MODES, *_SPECULATIVE)),
    *(
        (TENSORS, c, as_tensors(good), as_tensors(bad), text)
        for c, good, bad, text in (*_SHARED, *_MODES, *_SPECULATIVE)
    ),
    *(
        (LSE, c, as_returning(good), as_returning(bad), text)
        for c, good, bad, text in _SHARED
        if good["cache_mode"] != "nzcache"
    ),
    *((LSE, *edge) for edge in _RETURNING),
    *((RING, *edge) for edge in _STEPPING),
    *((name, *edge) for name in PREPROCESS for edge in _BEFORE),
]
