"""Both sides of the limits of the operators on whole numbers of 8 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST

Edge = tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any], str]
A2, A3, A5 = CHIPS
EVERY = (HOST, *CHIPS)
ON_ALL = (HOST, A2, A3)
F16, F32, BF16, INT = torch.float16, torch.float32, torch.bfloat16, torch.int32


def t(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def quant(*shape: int, **more: Any) -> dict[str, Any]:
    return {"input": t(*(shape or (7, 48)))} | more


QUANT: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    (EVERY, quant(1, 48), quant(48), "rank(input) >= 2"),
    (EVERY, quant(), quant(quant_mode="pertensor"), "quant_mode == 'pertoken'"),
    (EVERY, quant(), quant(group_index=t(2, dtype=INT)), "not given(group_index)"),
    (EVERY, quant(), quant(dst_type=1), "not given(dst_type)"),
    (EVERY, quant(), quant(dst_type_max=15.0), "dst_type_max == 0"),
    (EVERY, quant(smooth_scales=t(48)), quant(smooth_scales=t(47)), "needs smooth_scales as [D]"),
    (CHIPS, quant(smooth_scales=t(48)), quant(smooth_scales=t(48, dtype=F16)), "dtype(smooth_scales) == dtype(input)"),
    (CHIPS, quant(), quant() | {"input": t(7, 48, dtype=F32)}, "needs input in bfloat16, float16"),
]


def product(m: int = 5, k: int = 48, n: int = 24, **more: Any) -> dict[str, Any]:
    whole = {"x1": t(m, k, dtype=torch.int8), "x2": t(k, n, dtype=torch.int8), "scale": t(n, dtype=F32)}
    return whole | {"pertoken_scale": t(m, dtype=F32), "output_dtype": 15} | more


_ABSENT = {"offset": t(24, dtype=F32), "group_sizes": [1], "y_scale": t(24, dtype=F32), "x1_dtype": 1, "x2_dtype": 1,
           "scale_dtype": 6, "pertoken_scale_dtype": 6}  # fmt: skip
PRODUCTS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *((ON_ALL, product(), product(**{name: value}), f"not given({name})") for name, value in _ABSENT.items()),
    (ON_ALL, product(), product(output_dtype=None), "output_dtype in (5, 15)"),
    (ON_ALL, product(output_dtype=5), product(output_dtype=3), "output_dtype in (5, 15)"),
    (ON_ALL, product(), product(x2=t(47, 24, dtype=torch.int8)), "needs x1 as [*B M K]"),
    (ON_ALL, product(scale=t(1, dtype=F32)), product(scale=t(2, dtype=F32)), "needs scale as [1|N]"),
    (ON_ALL, product(), product(pertoken_scale=t(4, dtype=F32)), "needs pertoken_scale as [M]"),
    (ON_ALL, product(bias=t(24, dtype=INT)), product(bias=t(23, dtype=INT)), "needs bias as [N]"),
    ((A2, A3), product(k=65535), product(k=65536), "K <= 65535 and N <= 65535"),
    ((A2, A3), product(n=65535), product(n=65536), "K <= 65535 and N <= 65535"),
    (
        (A2, A3),
        product(x1=t(1, 1, 1, 2, 5, 48, dtype=torch.int8)),
        product(x1=t(1, 1, 1, 1, 2, 5, 48, dtype=torch.int8)),
        "rank(x1) <= 6",
    ),
    ((A2, A3), product(scale=t(24)), product(scale=t(24), output_dtype=5), "dtype(scale) == 'float32'"),
    ((A2, A3), product(bias=t(24)), product(bias=t(24), output_dtype=5), "dtype(bias) != 'bfloat16'"),
    ((A2, A3), product(), product(x1=t(5, 48)), "needs x1 in int8"),
    ((A2, A3), product(), product(scale=t(24, dtype=F16)), "needs scale in bfloat16, float32"),
    ((A2, A3), product(), product(pertoken_scale=t(5)), "needs pertoken_scale in float32"),
]


def norm(*shape: int, **more: Any) -> dict[str, Any]:
    shape = shape or (7, 48)
    return {"x1": t(*shape), "x2": t(*shape), "gamma": t(shape[-1])} | more


_ONE, _OTHER = {"smooth_scale1": t(48)}, {"smooth_scale2": t(48)}
NORMS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    (EVERY, norm(), norm(y_dtype=1), "not given(y_dtype)"),
    (EVERY, norm(**_ONE, **_OTHER), norm(**_OTHER), "given(smooth_scale1)"),
    (EVERY, norm(output_mask=[False, True]), norm(output_mask=[False, False]), "output_mask != (False, False)"),
    (
        EVERY,
        norm(output_mask=[True, False], **_ONE),
        norm(output_mask=[False, True], **_ONE),
        "output_mask in ((True, False), (True, True))",
    ),
    (
        EVERY,
        norm(output_mask=[False, True], **_OTHER),
        norm(output_mask=[True, False], **_OTHER),
        "output_mask in ((False, True), (True, True))",
    ),
    (EVERY, norm(), norm(x2=t(1, 48)), "B is [1], not [7] in [1, 48]"),
    (CHIPS, norm(*(1,) * 7, 48), norm(*(1,) * 8, 48), "rank(x1) >= 2 and rank(x1) <= 8"),
    (CHIPS, norm(1, 48), norm(48), "rank(x1) >= 2 and rank(x1) <= 8"),
    (CHIPS, norm(epsilon=0.0), norm(epsilon=-1e-6), "epsilon >= 0"),
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
    (CHIPS, norm(), {"x1": t(7, 48, dtype=F32), "x2": t(7, 48), "gamma": t(48)}, "needs x1 in bfloat16, float16"),
]
EDGES: list[Edge] = [
    *(("npu_dynamic_quant", *edge) for edge in QUANT),
    *(("npu_quant_matmul", *edge) for edge in PRODUCTS),
    *(("npu_add_rms_norm_dynamic_quant", *edge) for edge in NORMS),
]
