"""The prolog of latent attention with layers in whole numbers of 8 bits, in one operator (see `mla_prolog`).

    c = norm(x W_dq)      [q, q_r] = int8(c) W_uq, per head      [k, k_r] = x W_dkv      (one of three layers quantised)
    c = norm(x' W_dq)     [q, q_r] = int8(c) W_uq, per head      [k, k_r] = x' W_dkv     (all three, x' = int8(x))

*Matches* the projections of both latents and the heads of the queries, where the heads, or all three, multiply whole
numbers with a scale of each token and of each channel. *Replaces with* `npu_mla_prolog_v3`, which quantises c before it
would be rounded, and rotates queries before they would be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import attribute, lowering, pattern, scalar, tensor
from patterns.composites.mla_prolog import Prolog, rotated_lanes
from patterns.primitives import latent_calls
from patterns.primitives.quant_matmul import prepared


def layer(p, x, weight, scale, tokens, dtype, fixed):
    """A linear layer in whole numbers."""
    return p.whole_linear(
        x=p.reshaped(x), weight=weight, scale=scale, tokens=p.reshaped(tokens), dtype=dtype, fixed=fixed
    )


def queries(p, both, uq, uq_scale, up, gamma, eps, cos, sin, width, begin, first, heads_first, dtype, how):
    """Rotated and absorbed queries, and their latent in whole numbers with its scale; `both` projects x to it."""
    latent = p.rms_norm(x=both, gamma=gamma, eps=eps)
    scale = p.token_scale(x=p.reshaped(latent), dtype=how["scale_dtype"])
    whole = p.token_quantised(x=p.reshaped(latent), scale=scale, dtype=how["scale_dtype"])
    heads = layer(p, whole, uq, uq_scale, scale, how["layer_dtype"], how["fixed"])
    lanes = p.layer_lanes(layer=heads, width=width, start=first, heads_first=heads_first)
    source = how.get("source", "interleaved")
    rotated = rotated_lanes(p, lanes, cos, sin, dtype, gamma, heads_first, source=source)
    return rotated, p.layer_query(layer=heads, width=width, start=begin, up=up), whole, scale


def rows(p, both, like, gamma, eps, cos, sin, split, end, dtype, source="interleaved"):
    """The rows of both caches; `both` projects x to them."""
    latent = p.rms_norm(x=p.lanes(p.reshaped(both), 0, split), gamma=gamma, eps=eps)
    return latent, rotated_lanes(p, p.lanes(p.reshaped(both), split, end), cos, sin, dtype, like, source=source)


def prolog(
    x: Tensor, tokens: Tensor | None, weights: tuple[Tensor, Tensor, Tensor], scales: tuple[Any, Tensor, Any],
    up: Tensor, gammas: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, caches: tuple[Tensor, Tensor],
    heads_first: bool, scale_dtype: torch.dtype, **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rotated and absorbed queries, their latent in whole numbers with its scale, and both caches with new rows."""
    query, rope, _, latent, scale, kv, kr = called(x, tokens, weights, scales, up, gammas, cos, sin, caches, **how)
    rope = rope.transpose(1, 2) if heads_first else rope
    scale = scale.reshape(*x.shape[:-1], 1).to(scale_dtype)
    return rope, latent_calls.heads_before(query), latent, scale, kv, kr


def called(
    x: Tensor, tokens: Tensor | None, weights: tuple[Tensor, Tensor, Tensor], scales: tuple[Any, Tensor, Any],
    up: Tensor, gammas: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor, caches: tuple[Tensor, Tensor], **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the operator gives, and both caches with new rows.

    `weights` and `scales` are those of dq, uq and dkv; only uq has a scale where `tokens`, that of x, is None.
    """
    cast = [prepared(each) for each in weights]
    tables = [latent_calls.of_tokens(each, x).contiguous() for each in (sin, cos)]
    row = [None if each is None else each.float().reshape(1, -1) for each in scales]
    whole: dict[str, Any] = dict(weight_quant_mode=1)
    if tokens is not None:
        rows = tokens.float().reshape(-1, 1)
        whole = dict(
            weight_quant_mode=2, dequant_scale_x=rows, dequant_scale_w_dq=row[0], dequant_scale_w_dkv_kr=row[2]
        )
    return torch.ops.npu.npu_mla_prolog_v3_functional(
        x, cast[0], cast[1], up.contiguous(), cast[2], *gammas, *tables, *caches, query_norm_flag=True,
        dequant_scale_w_uq_qr=row[1], **whole, **how,
    )  # fmt: skip


@dataclass(frozen=True)
class MlaPrologQuantised(Prolog):
    """The quantised prolog with the writes into both caches."""

    @pattern
    def heads_alone(
        self, p, x=tensor("*B He"), dq=tensor("Hcq He"), uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"),
        up=tensor("N D Hckv"), dkv=tensor("Nk He"), gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"),
        cos=tensor("T U Dr"), sin=tensor("T U Dr"), kv_cache=tensor("*C Hckv"), kr_cache=tensor("*C Dr"),
        start=tensor("*S"), beside_q=tensor("*E", optional=True), beside_kv=tensor("*F", optional=True),
        eps_cq=scalar(), eps_ckv=scalar(), width=attribute(), begin=attribute(), first=attribute(), split=attribute(),
        end=attribute(), heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(),
        axis=attribute(), scale_dtype=attribute(), layer_dtype=attribute(),
    ):  # fmt: skip
        """The layer of the queries' heads is quantised."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed)
        low = p.linear(x=x, weight=dq, fixed=fixed, beside=beside_q)
        q = queries(p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first,
                     dtype_q, how)  # fmt: skip
        line = p.linear(x=x, weight=dkv, fixed=fixed, beside=beside_kv)
        kv = rows(p, line, gamma_cq, gamma_ckv, eps_ckv, cos, sin, split, end, dtype_kv)
        caches = zip((kv_cache, kr_cache), kv, strict=True)
        return *q, *(p.write(cache=c, rows=p.reshaped(row), start=start, axis=axis) for c, row in caches)

    @pattern
    def all_layers(
        self, p, x=tensor("*B He"), tokens=tensor("*B 1"), dq=tensor("Hcq He"), dq_scale=tensor("Hcq"),
        uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"), up=tensor("N D Hckv"), dkv=tensor("Nk He"), dkv_scale=tensor("Nk"),
        gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*C Hckv"), kr_cache=tensor("*C Dr"), start=tensor("*S"), eps_cq=scalar(), eps_ckv=scalar(),
        width=attribute(), begin=attribute(), first=attribute(), split=attribute(), end=attribute(),
        heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(), axis=attribute(),
        scale_dtype=attribute(), layer_dtype=attribute(),
    ):  # fmt: skip
        """All three layers are quantised."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed)
        low = layer(p, x, dq, dq_scale, tokens, layer_dtype, fixed)
        q = queries(p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first,
                     dtype_q, how)  # fmt: skip
        line = layer(p, x, dkv, dkv_scale, tokens, layer_dtype, fixed)
        kv = rows(p, line, gamma_cq, gamma_ckv, eps_ckv, cos, sin, split, end, dtype_kv)
        caches = zip((kv_cache, kr_cache), kv, strict=True)
        return *q, *(p.write(cache=c, rows=p.reshaped(row), start=start, axis=axis) for c, row in caches)

    @lowering
    def paged(self, x, tokens, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, cos, sin, eps_cq,
              eps_ckv, heads_first, kv_cache, kr_cache, start, axis, scale_dtype):  # fmt: skip
        """One call, that writes to pages."""
        pages = (latent_calls.pages(kv_cache, axis), latent_calls.pages(kr_cache, axis))
        slots = latent_calls.slots(start, x.shape[0], x.shape[1], kv_cache.shape[axis], x.device)
        *found, kv, kr = prolog(
            x, tokens, (dq, uq, dkv), (dq_scale, uq_scale, dkv_scale), up, (gamma_cq, gamma_ckv), cos, sin, pages,
            heads_first, scale_dtype, rmsnorm_epsilon_cq=eps_cq, rmsnorm_epsilon_ckv=eps_ckv, cache_mode="PA_BSND",
            cache_index=slots,
        )  # fmt: skip
        return *found, kv.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)
