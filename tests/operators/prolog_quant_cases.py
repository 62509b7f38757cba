"""Calls of the latent prolog in int8, in every choice of modes that goes together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.operators.sparse_cases import DR, HCKV, HCQ, HE, D, Make, N, prolog

CHOICES = ((1, 0, 0), (1, 2, 0), (2, 0, 0), (2, 1, 1))
"""Modes of weights, caches and queries, without those with lines of bytes."""


def whole(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def scales(*shape: int, wide: torch.dtype, around: float) -> Tensor:
    return ((torch.rand(*shape, dtype=torch.float64) + 0.5) * around).to(wide)


def quantised(choice: tuple[int, int, int], *tokens: int, smooth: bool = False, hckv: int = HCKV, **more: Any) -> Make:
    weight_mode, cache_mode, _ = choice

    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = prolog(*tokens, **more)(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        count = 1
        for each in tokens:
            count *= each
        if hckv != HCKV:
            call |= {"weight_uk": torch.randn(N, D, hckv, dtype=torch.float64).to(dtype) * D**-0.5}
            call |= {"weight_dkv_kr": torch.randn(HE, hckv + DR, dtype=torch.float64).to(dtype) * HE**-0.5}
            call |= {"rmsnorm_gamma_ckv": torch.randn(hckv, dtype=torch.float64).to(dtype)}
        up = N * (D + DR)
        call |= {"weight_uq_qr": whole(HCQ, up)}
        call |= {"dequant_scale_w_uq_qr": scales(1, up, wide=wide, around=HCQ**-0.5 / 70)}
        if smooth:
            call |= {"smooth_scales_cq": scales(1, HCQ, wide=wide, around=1)}
        if weight_mode == 2:
            call |= {"token_x": whole(*tokens, HE), "dequant_scale_x": scales(count, 1, wide=wide, around=1 / 70)}
            for name, width in (("dq", HCQ), ("dkv_kr", hckv + DR)):
                call[f"weight_{name}"] = whole(HE, width)
                call[f"dequant_scale_w_{name}"] = scales(1, width, wide=wide, around=HE**-0.5 / 70)
        lead = call["kv_cache"].shape[:-1]
        if cache_mode in (1, 2):
            call |= {"kv_cache": whole(*lead, hckv)}
            call |= {"quant_scale_ckv": scales(*((1,) if cache_mode == 1 else (1, hckv)), wide=wide, around=30)}
        if cache_mode == 2:
            call |= {"kr_cache": whole(*lead, DR), "quant_scale_ckr": scales(1, DR, wide=wide, around=30)}
        if cache_mode == 3:
            call |= {"kv_cache": whole(*lead, hckv + 2 * DR + hckv // 32), "ckvkr_repo_mode": 1}
            call |= {"quant_scale_repo_mode": 1, "k_nope_clip_alpha": torch.ones(1).to(wide)}
        names = ("weight_quant_mode", "kv_cache_quant_mode", "query_quant_mode")
        return call | dict(zip(names, choice, strict=True))

    return make


def clipped(make: Make) -> Make:
    """The same with lines of bytes that are clipped."""
    return lambda dtype: make(dtype) | {"k_nope_clip_alpha": torch.full((1,), 0.75, dtype=torch.float64)}


LINES: tuple[tuple[str, Make], ...] = (
    ("modes (1, 3, 0)", clipped(quantised((1, 3, 0), 3, slots=(3, 7, -1), hckv=256))),
    ("modes (2, 3, 0), BSND", quantised((2, 3, 0), 2, 3, mode="BSND", hckv=128)),
)
"""Lines of bytes, whose floats have the same bits as those of a reference in float64 alone."""
PROLOG: tuple[tuple[str, Make], ...] = (
    *((f"modes {choice}", quantised(choice, 5, slots=(3, 7, 0, 11, 6), query_norm_flag=True)) for choice in CHOICES),
    ("modes (2, 1, 1), batch", quantised((2, 1, 1), 2, 3, slots=((3, 7, 0), (11, -1, 2)))),
    ("modes (1, 0, 0), smooth, BSND", quantised((1, 0, 0), 2, 3, mode="BSND", smooth=True, query_norm_flag=True)),
    ("modes (1, 0, 0), NZ", quantised((1, 0, 0), 2, slots=(5, 2), mode="PA_NZ", qc_qr_scale=0.5, kc_scale=2.0)),
)
