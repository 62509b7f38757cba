"""Both sides of the limits of the operators of atb for latent attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST
from tests.operators.atb_cases import LSE, MLA, PREPROCESS, RING, TENSORS

Edge = tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], str]
A2, A3, A5 = CHIPS
BF16, F16, F32, INT, LONG, I8 = torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.int8
ALL, KERNEL = (HOST, A2, A3), (A2, A3)


def t(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


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
    (ALL, attending(), attending(q_headnum=4), "q_headnum == N"),
    (ALL, attending(), attending(kv_headnum=2), "kv_headnum == 1"),
    (ALL, attending(), attending(context_lens=[7]), "length(context_lens) == B"),
    (ALL, NZ, NZ | {"ctkv": t(9, 16, 128, 16)}, "A * L == C and R * M == Dr"),
    (ALL, attending(), attending(cache_mode=None), "requires cache_mode='krope_ctkv' or"),
    (ALL, attending(), attending(k_rope=t(9, 64, 1, 64)), "requires k_rope as [Blocks Size 1 Dr]"),
    (KERNEL, attending(n=128), attending(n=4), "N in (8, 16, 32, 64, 128)"),
    (KERNEL, attending(), attending(c=256), "C == 512"),
    (KERNEL, attending(), attending(dr=32), "Dr == 64"),
    (KERNEL, attending(), attending(size=64), "Size == 128"),
    (KERNEL, attending(tokens=8192, b=8192), attending(tokens=8193, b=8193), "B <= 8192"),
    (KERNEL, attending(qk_scale=1.0), attending(qk_scale=1.5), "qk_scale > 0 and qk_scale <= 1"),
    (KERNEL, attending(), attending() | {"q_rope": t(3, 8, 64, dtype=F16)}, "dtype(q_nope) == dtype(q_rope)"),
    (KERNEL, attending(), attending() | {"k_rope": t(9, 128, 1, 64, dtype=F16)}, "dtype(k_rope) == dtype(q_rope)"),
    (KERNEL, attending(), attending(dtype=F32), "requires q_nope in"),
]
_MODES = [
    (ALL, INT8, INT8 | {"qk_descale": None}, "given(qk_descale) and given(pv_descale)"),
    (ALL, NZ, NZ | {"pv_descale": t(8, dtype=F32)}, "not given(qk_descale) and not given(pv_descale)"),
    (KERNEL, INT8, INT8 | {"q_nope": t(3, 8, 512)}, "dtype(q_nope) == 'int8' and dtype(ctkv) == 'int8'"),
    (KERNEL, NZ, NZ | {"ctkv": t(9, 64, 128, 8)}, "L * itemsize(ctkv) == 32 and M * itemsize(k_rope) == 32"),
    (KERNEL, attending("int8_nzcache", n=64), attending("int8_nzcache", n=128), "N != 128"),
]  # fmt: skip
_SPECULATIVE = [
    (ALL, speculative(mask="spec"), speculative(mask="spec", mask_type="mask_type_swa"), "mask_type in (None, 'und"),
    (ALL, speculative(mask="spec"), speculative(mask="spec") | {"mask": None}, "given(mask)"),
    (ALL, speculative(), speculative(mask="spec") | {"mask_type": None}, "not given(mask)"),
    (ALL, speculative(mask="spec"), speculative(mask="spec") | {"mask": t(5, 7)}, "Rows == T"),
    (ALL, speculative(mask="free"), speculative(mask="free") | {"mask": t(129, 64)}, "Columns == Size"),
    (ALL, speculative(mask="free"), speculative(mask="free") | {"mask": t(128, 128)}, "Rows >= Size - 1 and"),
    (ALL, speculative(), speculative() | {"calc_type": "calc_type_ring"}, "calc_type in (None, 'calc_type_und"),
    (ALL, speculative(), speculative() | {"qseqlen": [2]}, "given(qseqlen) and length(qseqlen) == B"),
    (ALL, attending(), attending(qseqlen=[1] * 3), "not given(qseqlen)"),
    (ALL, attending(), attending(tokens=6), "T == B"),
    (ALL, speculative(mask="spec"), attending(mask=t(3, 7), mask_type="mask_type_spec"), "mask_type in (None, 'und"),
    (KERNEL, speculative(mask="spec"), speculative(mask="spec") | {"mask": t(6, 7, dtype=F16)}, "dtype(mask) == dt"),
    (KERNEL, speculative(mask="free", n=128), speculative(n=128), "N != 128"),
    (KERNEL, speculative(mask="free", n=128), speculative(mask="spec", n=128), "N != 128"),
    (KERNEL, speculative("int8_nzcache", "free"), speculative("int8_nzcache"), "cache_mode != 'int8_nzcache'"),
    (KERNEL, speculative(mask="free"), speculative(mask="free") | {"mask": t(135, 128)}, "Rows <= 133"),
]
_RETURNING = [
    (ALL, returning(), returning(calc_type=None), "calc_type == 'calc_type_ring'"),
    (ALL, returning(), returning(return_lse=False), "return_lse == True"),
    (ALL, returning(), returning(mask_type="mask_type_spec"), "mask_type in (None, 'undefined')"),
    (ALL, returning(), returning() | {"q_nope": t(6, 8, 512), "q_rope": t(6, 8, 64)}, "T == B"),
    (ALL, returning(), returning() | NZ, "cache_mode == 'krope_ctkv'"),
    (ALL, returning(), returning() | NZ | {"ctkv": t(9, 16, 128, 16)}, "A * L == C and R * M == Dr"),
    (ALL, returning(), returning(workspace=t(4)), "not given(workspace)"),
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
    (ALL, stepping(), stepping(head_num=4), "head_num == N"),
    (ALL, stepping(m=4), stepping(kv_head_num=4), "kv_head_num == M"),
    (ALL, stepping(m=2), stepping(m=3), "N % M == 0"),
    (ALL, stepping(**BOTH), stepping(**BOTH | {"seqlen": t(1, 2, 3, dtype=INT)}), "rank(seqlen) in (1, 2)"),
    (ALL, stepping(**BOTH), stepping(**BOTH | {"seqlen": t(3, 3, dtype=INT)}), "size(seqlen, 0) == 2"),
    (ALL, stepping(), stepping(kernel_type="kernel_type_default"), "kernel_type in"),
    (ALL, stepping(input_layout="type_bsnd"), stepping(input_layout="type_bnsd"), "input_layout in"),
    (ALL, stepping(), stepping(mask_type="mask_type_swa"), "mask_type in"),
    (ALL, stepping(), stepping(calc_type="calc_type_max"), "calc_type in"),
    (ALL, merging(), merging(prev_lse=None), "given(pre_out) and given(prev_lse)"),
    (ALL, stepping(), stepping(pre_out=t(5, 8, 128)), "not given(pre_out) and not given(prev_lse)"),
    (ALL, stepping(), stepping(seqlen=BOTH["seqlen"]), "rank(seqlen) == 1 and T == K"),
    (KERNEL, stepping(), stepping(d=64), "D == 128"),
    (KERNEL, stepping(), stepping(dr=32), "Dr == 64"),
    (KERNEL, stepping(), stepping(e=64), "E == 128"),
    (KERNEL, stepping(), stepping(mask=t(2048, 2048)), "H == 512 and W == 512"),
    *(
        (KERNEL, stepping(), stepping() | {name: t(*stepping()[name].shape, dtype=F16)}, f"dtype({name}) == dt")
        for name in ("q_rope", "k_nope", "k_rope", "value", "mask")
    ),
    (KERNEL, merging(), merging(pre_out=t(5, 8, 128, dtype=F16)), "dtype(pre_out) == dtype(q_nope)"),
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
    (ALL, preparing(), preparing(quant_mode="per_token_quant_asymm"), "quant_mode in (None,"),
    *((ALL, preparing(), preparing() | {name: None}, f"given({name})") for name in _STATIC),
    *((ALL, _DYNAMIC, _DYNAMIC | {name: x}, f"not given({name})") for name, x in _STATIC.items()),
    *((ALL, _I8, _I8 | {name: None}, f"given({name})") for name in ("ctkv_scale", "q_nope_scale")),
    (ALL, preparing(), preparing(ctkv_scale=t(1)), "not given(ctkv_scale)"),
    (ALL, preparing(), preparing(q_nope_scale=t(32)), "not given(q_nope_scale)"),
    (ALL, preparing(), preparing() | {"wdqkv": t(1, 112, 2112, 32, dtype=I8)}, "A * L == He and Q * L == Hcq"),
    (ALL, preparing(), preparing() | SHORT, "Nk == Hckv + Dr + Hcq"),
    (ALL, preparing(), preparing() | {"wuk": t(32, 64, 512)}, "Nq == N * (D + Dr)"),
    ((HOST,), preparing(dr=2), preparing(dr=3), "Dr % 2 == 0"),
    (KERNEL, preparing(), preparing(dr=63), "Dr % 2 == 0"),
    (ALL, _LINES, _LINES | caches(9, 31, 128, 16), "C * Lc == Hckv"),
    ((HOST,), preparing(), preparing() | {"wuq": t(1, 48, 6144, 32)}, "dtype(wdqkv) == 'int8' and dtype(wuq) == "),
    (KERNEL, preparing(), preparing() | {"wuq": t(1, 48, 6144, 32)}, "requires wuq in int8"),
    (ALL, _I8, _I8 | {"q_out0": t(5, 32, 512)}, "dtype(kv_cache) == 'int8' and dtype(q_out0) == 'int8'"),
    (ALL, preparing(), preparing() | {"q_out0": t(5, 32, 512, dtype=I8)}, "dtype(kv_cache) == dtype(input) and"),
    (ALL, preparing(), preparing(kv_cache_out0=t(9, 128, 1, 512, dtype=I8)), "dtype(kv_cache_out0) =="),
    (KERNEL, preparing(tokens=1024), preparing(tokens=1025), "T >= 1 and T <= 1024"),
    (KERNEL, preparing(), preparing(he=6144), "He == 7168"),
    (KERNEL, preparing(), preparing(hcq=2048), "Hcq == 1536"),
    (KERNEL, preparing(), preparing(hckv=256), "Hckv == 512"),
    (KERNEL, preparing(), preparing(d=192), "D == 128"),
    (KERNEL, preparing(), preparing(dr=32), "Dr == 64"),
    (KERNEL, preparing(n=128), preparing(n=48), "N in (32, 64, 128)"),
    (KERNEL, preparing(), preparing(line=16), "L == 32"),
    (KERNEL, preparing(size=256), preparing(size=192), "Size <= 128 or Size == 256"),
    (KERNEL, preparing("nzcache"), preparing("nzcache", size=64), "Size == 128"),
    (KERNEL, _LINES, _LINES | caches(9, 64, 128, 8), "Lc * items"),
    *(
        (KERNEL, preparing(), preparing() | {name: t(*preparing()[name].shape, dtype=F16)}, f"dtype({name}) == dt")
        for name in ("gamma0", "cos", "wuk", "kv_cache_rope")
    ),
    (KERNEL, preparing(), preparing(descale0=t(2112, dtype=LONG)), "dtype(descale0) == 'float32'"),
    (KERNEL, preparing(dtype=F16), preparing(dtype=F16, descale1=t(6144, dtype=F32)), "dtype(descale0) == 'int64'"),
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
