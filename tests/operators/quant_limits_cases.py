"""Both sides of the limits of the operators on int8."""

from __future__ import annotations

from typing import Any

import torch

from fusion.operators import CHIPS, HOST
from tests.operators.limit_cases import starts, t

Edge = tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], str]
A2, A3, A5 = CHIPS
EVERY = (HOST, *CHIPS)
ON_ALL = (HOST, A2, A3)
F16, F32, BF16, INT = torch.float16, torch.float32, torch.bfloat16, torch.int32


def quant(*shape: int, **more: Any) -> dict[str, Any]:
    return {"input": t(*(shape or (7, 48)))} | more


_OF_GROUPS = {"smooth_scales": t(2, 48), "group_index": t(2, dtype=INT)}
QUANT: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    ((A2, A3), quant(dst_type=1), quant(dst_type=24), "dst_type in (None, 1, 16)"),
    (("ascend950",), quant(dst_type=24), quant(dst_type=23), "dst_type in (None, 1, 16, 24)"),
    *starts(
        quant(**_OF_GROUPS),
        quant(smooth_scales=t(48)),
        quant(quant_mode="perchannel", smooth_scales=t(7)),
        quant(dst_type=16),
    ),
    (EVERY, quant(1, 48), quant(48), "requires input as [*B S D]"),
]


def gated(*shape: int, **more: Any) -> dict[str, Any]:
    return {"x": t(*(shape or (7, 48))), "activate_left": True, "quant_mode": 1} | more


def smoothed(*scales: int, **more: Any) -> dict[str, Any]:
    return gated(smooth_scales=t(*scales, dtype=F32), **more)


_GROUPS_OF_2 = {"group_index": t(2, dtype=INT)}
_STATIC = {"quant_mode": 0, "offsets": t(1, dtype=F32)}
GATED: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(gated(), smoothed(1, quant_mode=0), smoothed(2, **_GROUPS_OF_2), smoothed(1, 24)),
    (EVERY, smoothed(1, **_STATIC), smoothed(2, **_STATIC), "requires offsets as [G]"),
]


def fixed(of: torch.dtype = BF16, **more: Any) -> dict[str, Any]:
    x, scales = t(7, 48, dtype=of), t(48, dtype=of)
    return {"input": x, "scales": scales, "zero_points": None, "dtype": 12, "axis": -1} | more


def zeros(dtype: torch.dtype, *shape: int) -> dict[str, Any]:
    return {"zero_points": t(*(shape or (48,)), dtype=dtype)}


_TIMES: dict[str, Any] = {"div_mode": False}
_NARROW = {"input": t(7, 44), "scales": t(44)}
FIXED: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(
        fixed(dtype=16, **_TIMES),
        fixed(scales=t(1, 48)),
        fixed(scales=t(1, 48), **_TIMES),
        fixed(**zeros(BF16)),
        fixed(**zeros(BF16), **_TIMES),
    ),
    (ON_ALL, fixed(), fixed(dtype=16), "dtype in (0, 1, 3, 12, 13, 14)"),
    (ON_ALL, fixed(**_TIMES), fixed(dtype=13, **_TIMES), "dtype in (1, 12, 16)"),
    ((A2, A3), fixed(), fixed(dtype=1), "dtype == 12"),
    ((A2, A3), fixed(F16, **_TIMES), fixed(F16), "dtype(input) in ('float32', 'bfloat16')"),
]


def product(m: int = 5, k: int = 48, n: int = 24, **more: Any) -> dict[str, Any]:
    whole = {"x1": t(m, k, dtype=torch.int8), "x2": t(k, n, dtype=torch.int8), "scale": t(n, dtype=F32)}
    return whole | {"pertoken_scale": t(m, dtype=F32), "output_dtype": 15} | more


def narrow(**more: Any) -> dict[str, Any]:
    """A product whose result is in int8."""
    return product() | {"pertoken_scale": None, "output_dtype": None} | more


_ABSENT = {"group_sizes": [1], "y_scale": t(24, dtype=F32), "x1_dtype": 1, "x2_dtype": 1,
           "scale_dtype": 6, "pertoken_scale_dtype": 6}  # fmt: skip
PRODUCTS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(
        product(output_dtype=5),
        narrow(offset=t(24, dtype=F32)),
        narrow(bias=t(24, dtype=INT)),
        product(x1=t(2, 5, 48, dtype=torch.int8), bias=t(2, 1, 24, dtype=INT)),
        product(x2=t(2, 48, 24, dtype=torch.int8), bias=t(2, 1, 24, dtype=INT)),
    ),
    (ON_ALL, product(), product(x2=t(47, 24, dtype=torch.int8)), "requires x1 as [*B M K]"),
    (ON_ALL, product(scale=t(1, dtype=F32)), product(scale=t(2, dtype=F32)), "requires scale as [1|N]"),
    (ON_ALL, product(), product(pertoken_scale=t(4, dtype=F32)), "requires pertoken_scale as [M]"),
    (ON_ALL, product(bias=t(24, dtype=INT)), product(bias=t(23, dtype=INT)), "requires bias as [N]"),
    ((A2, A3), product(bias=t(24)), product(bias=t(24), output_dtype=5), "dtype(bias) != 'bfloat16'"),
]


def norm(*shape: int, **more: Any) -> dict[str, Any]:
    shape = shape or (7, 48)
    return {"x1": t(*shape), "x2": t(*shape), "gamma": t(shape[-1])} | more


_ONE, _OTHER = {"smooth_scale1": t(48)}, {"smooth_scale2": t(48)}
NORMS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(
        norm(y_dtype=1),
        norm(y_dtype=16),
        norm(**_ONE, **_OTHER),
        norm(output_mask=[False, True]),
        norm(output_mask=[True, False], **_ONE),
        norm(output_mask=[False, True], **_OTHER),
    ),
    (EVERY, norm(), norm(x2=t(1, 48)), "B is [1], not [7] in [1, 48]"),
    (CHIPS, norm(*(1,) * 7, 48), norm(*(1,) * 8, 48), "rank(x1) >= 2 and rank(x1) <= 8"),
    (CHIPS, norm(1, 48), norm(48), "rank(x1) >= 2 and rank(x1) <= 8"),
    *(
        (CHIPS, norm(**given), norm(**given | {name: t(*shape, dtype=F16)}), f"dtype({name}) == dtype(x1)")
        for name, shape, given in (
            ("x2", (7, 48), {}),
            ("gamma", (48,), {}),
            ("beta", (48,), {}),
            ("smooth_scale1", (48,), {}),
            ("smooth_scale2", (48,), _ONE),
        )
    ),
]


def added_static(*shape: int, dtype: torch.dtype = BF16, **more: Any) -> dict[str, Any]:
    shape = shape or (7, 48)
    x = {name: t(*shape, dtype=dtype) for name in ("x1", "x2")} | {"gamma": t(shape[-1], dtype=dtype)}
    scale, zero = (BF16, BF16) if dtype == BF16 else (F32, INT)
    return x | {"scales1": t(shape[-1], dtype=scale), "zero_points1": t(shape[-1], dtype=zero)} | more


_SECOND = {"scales2": t(48), "zero_points2": t(48)}
_SECOND_F16 = {"scales2": t(48, dtype=F32), "zero_points2": t(48, dtype=INT)}
ADDED_STATIC: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(added_static(scales2=t(48)), added_static(dtype=F16)),
    (ON_ALL, added_static(), added_static(scales1=t(1)), "requires scales1 as [D]"),
    (ON_ALL, added_static(), added_static(zero_points1=t(1)), "requires zero_points1 as [D]"),
    (ON_ALL, added_static(), added_static(x2=t(1, 48)), "B is [1], not [7] in [1, 48]"),
    ((A2, A3), added_static(*(1,) * 7, 48), added_static(*(1,) * 8, 48), "rank(x1) <= 8"),
    *(
        ((A2, A3), added_static(**{name: t(*shape)}), added_static(**{name: t(*shape, dtype=F16)}), said)
        for name, shape, said in (
            ("x2", (7, 48), "dtype(x2) == dtype(x1)"),
            ("gamma", (48,), "dtype(gamma) == dtype(x1)"),
            ("beta", (48,), "dtype(beta) == dtype(x1)"),
        )
    ),
    *(
        (
            (A2, A3),
            added_static(dtype=of, **legal),
            added_static(dtype=of, **(legal | {name: t(48, dtype=wrong)})),
            said,
        )
        for of, legal, name, wrong, said in (
            (BF16, _SECOND, "scales2", F32, "dtype(scales2) == 'bfloat16'"),
            (BF16, _SECOND, "zero_points2", INT, "dtype(zero_points2) == 'bfloat16'"),
            (F16, _SECOND_F16, "scales2", BF16, "dtype(scales2) == 'float32'"),
            (F16, _SECOND_F16, "zero_points2", BF16, "dtype(zero_points2) == 'int32'"),
        )
    ),
]


def static(*shape: int, dtype: torch.dtype = BF16, **more: Any) -> dict[str, Any]:
    shape = shape or (7, 48)
    lines = {name: t(shape[-1], dtype=dtype) for name in ("gamma", "beta")}
    return {"x": t(*shape, dtype=dtype), **lines, "scale": t(1, dtype=dtype), "offset": t(1, dtype=torch.int8)} | more


STATIC: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(static(dst_dtype=1)),
    (EVERY, static(), static(scale=t(48)), "requires scale as [1]"),
    (EVERY, static(), static(offset=t(48, dtype=torch.int8)), "requires offset as [1]"),
    (EVERY, static(), static(gamma=t(47)), "D"),
]


def weighted(m: int = 5, k: int = 96, n: int = 24, dtype: torch.dtype = BF16, **more: Any) -> dict[str, Any]:
    given = {"x": t(m, k, dtype=dtype), "weight": t(k, n, dtype=torch.int8), "antiquant_scale": t(n, dtype=dtype)}
    return given | more


def grouped(size: int, k: int = 96, count: int | None = None, **more: Any) -> dict[str, Any]:
    scale = t(-(-k // size) if count is None else count, 24)
    return weighted(k=k, antiquant_scale=scale, antiquant_group_size=size) | more


_PACKED = {"quant_scale": t(24, dtype=F32), "quant_offset": t(24, dtype=F32), "weight_dtype": 1}
WEIGHTED: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(weighted(antiquant_offset=t(24)), weighted(dtype=F16, bias=t(24, dtype=F16))),
    (ON_ALL, weighted(), weighted(weight=t(95, 24, dtype=torch.int8)), "requires x as [M K]"),
    (ON_ALL, weighted(antiquant_scale=t(1)), weighted(antiquant_scale=t(2)), "requires antiquant_scale as"),
    (ON_ALL, weighted(bias=t(24, dtype=F32)), weighted(bias=t(23, dtype=F32)), "requires bias as [N]"),
    ((A2, A3), grouped(32), grouped(16), "antiquant_group_size >= 32 and antiquant_group_size < K"),
    ((A2, A3), grouped(64), grouped(96), "antiquant_group_size >= 32 and antiquant_group_size < K"),
]


def turned(m: int = 5, d: int = 128, k: int = 128, dtype: torch.dtype = BF16, **more: Any) -> dict[str, Any]:
    return {"x": t(m, d, dtype=dtype), "rotation": t(k, k, dtype=dtype), "dst_dtype": 1} | more


TURNED: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(turned(d=256)),
    (ON_ALL, turned(dst_dtype=16), turned(d=132, k=132, dst_dtype=16), "D % 8 == 0"),
    (ON_ALL, turned(), turned(x=t(5, 1, 128)), "requires x as [M D]"),
    (ON_ALL, turned(), turned(rotation=t(128, 64)), "requires rotation as [K K]"),
    ((A2, A3), turned(d=136, k=17 * 8), turned(d=132, k=132), "D % 8 == 0"),
]
EDGES: list[Edge] = [
    *(("npu_dynamic_quant", *edge) for edge in QUANT),
    *(("npu_swiglu_quant", *edge) for edge in GATED),
    *(("npu_quantize", *edge) for edge in FIXED),
    *(("npu_quant_matmul", *edge) for edge in PRODUCTS),
    *(("npu_add_rms_norm_dynamic_quant", *edge) for edge in NORMS),
    *(("npu_add_rms_norm_quant", *edge) for edge in ADDED_STATIC),
    *(("npu_rms_norm_quant", *edge) for edge in STATIC),
    *(("npu_weight_quant_batchmatmul", *edge) for edge in WEIGHTED),
    *(("npu_rotate_quant", *edge) for edge in TURNED),
]
