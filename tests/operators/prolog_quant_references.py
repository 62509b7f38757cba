"""What the latent prolog computes in int8, in float64, token by token."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.operators.quant_references import rows
from tests.operators.sparse_references import prolog as in_floats
from tests.operators.sparse_references import rope, store


def norm(x: Tensor, gamma: Tensor, epsilon: float, scale: float) -> Tensor:
    return x / math.sqrt(sum(v * v for v in x.tolist()) / len(x) + epsilon) * gamma * scale


def whole(x: Tensor) -> Tensor:
    return torch.tensor([max(-128, min(127, round(v))) for v in x.tolist()]).double()


def bytes_of(line: Tensor, key: Tensor, alpha: float) -> Tensor:
    """Runs of 128 numbers in int8, clipped at alpha times the largest; the key in bfloat16; a scale of each run."""
    numbers, scales = [], []
    for run in line.split(128):
        most = max(1e-8, run.abs().max().item()) * alpha
        scales.append(most / 127)
        numbers += [round(max(-most, min(most, v)) / (most / 127)) for v in run.tolist()]
    parts = key.bfloat16(), torch.tensor(scales, dtype=torch.float64).float()
    return torch.cat([torch.tensor(numbers, dtype=torch.int8), *(each.view(torch.int8) for each in parts)])


def prolog(weight_quant_mode: int = 0, **call: Any) -> tuple[Tensor, ...]:
    if not weight_quant_mode:
        return in_floats(**call)
    x, up = call["token_x"], call["weight_uk"]
    epsilon = [call.get(f"rmsnorm_epsilon_{name}", 1e-5) for name in ("cq", "ckv")]
    heads, dn, width = up.shape
    tokens, sines, cosines = (t.reshape(-1, t.shape[-1]).double() for t in (x, call["rope_sin"], call["rope_cos"]))
    slots = range(len(tokens)) if call.get("cache_index") is None else call["cache_index"].flatten().tolist()
    kv, kr = call["kv_cache"].clone(), call["kr_cache"].clone()
    found: dict[str, list[Tensor]] = {name: [] for name in ("query", "rope", "scale", "norm", "norm_scale")}
    mode, scaled = call.get("kv_cache_quant_mode", 0), call.get("quant_scale_ckv")
    for t, (row, sin, cos, slot) in enumerate(zip(tokens, sines, cosines, slots, strict=True)):

        def projected(name: str, row: Tensor = row, t: int = t) -> Tensor:
            product = row @ call[f"weight_{name}"].double()
            if weight_quant_mode == 2:
                product = product * call["dequant_scale_x"][t, 0] * call[f"dequant_scale_w_{name}"][0]
            return product

        latent = norm(projected("dq"), call["rmsnorm_gamma_cq"], epsilon[0], call.get("qc_qr_scale", 1.0))
        smooth = call.get("smooth_scales_cq")
        q8, s = rows(latent if smooth is None else latent * smooth[0])
        q = (q8 @ call["weight_uq_qr"].double() * s * call["dequant_scale_w_uq_qr"][0]).reshape(heads, -1)
        query = torch.stack([q[n, :dn] @ up[n] for n in range(heads)])
        turned = torch.stack([rope(q[n, dn:], sin, cos) for n in range(heads)])
        if call.get("query_quant_mode"):
            query, s_query = rows(query)
            turned = turned * scaled[0] / s_query[:, None]
            found["scale"].append(s_query)
        for name, value in (("query", query), ("rope", turned), ("norm", q8), ("norm_scale", s.reshape(1))):
            found[name].append(value)
        k = projected("dkv_kr")
        line = norm(k[:width], call["rmsnorm_gamma_ckv"], epsilon[1], call.get("kc_scale", 1.0))
        key = rope(k[width:], sin, cos)
        if mode in (1, 2):
            line = whole(line * scaled.reshape(-1))
        if mode == 2:
            key = whole(key * call["quant_scale_ckr"][0])
        if mode == 3:
            store(kv, bytes_of(line, key, call["k_nope_clip_alpha"].item()), slot, call["cache_mode"])
        for cache, values in ((kv, line), (kr, key)) if mode != 3 else ():
            store(cache, values.to(cache.dtype), slot, call["cache_mode"])
    none, lead, flag = torch.zeros(1).double(), x.shape[:-1], call.get("query_norm_flag", False)
    made = {name: torch.stack(values) for name, values in found.items() if values}
    return (
        made["query"].reshape(*lead, heads, width), made["rope"].reshape(*lead, heads, -1),
        made["scale"][..., None] if "scale" in made else none, made["norm"].reshape(*lead, -1) if flag else none,
        made["norm_scale"] if flag else none, kv, kr,
    )  # fmt: skip
