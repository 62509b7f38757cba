"""What stands before latent attention with weights of 8 bits and one scale of all tokens, in one call of atb.

    x' = int8(n / s + z), n = norm(x) + b      [k, k_r, c] = d · (x' W + w)      likewise from norm(c) to the heads

*Matches* what `mla_preprocess` does, where numbers are quantised by a scale and a zero point that the model holds, and
a layer adds a bias in int32, in which the zero point may be made up for, before it multiplies by its scales.
*Replaces with* `npu_mla_preprocess`, which takes scales in the dtype of x, zero points in int8, and norms with a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusion import attribute, lowering, pattern, scalar, tensor
from patterns.composites.mla_preprocess import Preprocess, rows
from patterns.latent.terms import rotated_lanes
from patterns.primitives import latent_calls
from patterns.primitives import preprocess_calls as calls


def front(p, x, layers, gammas, betas, epsilons, scales, up, cos, sin, lanes, split, end, dtypes, how):
    """Rotated and absorbed queries, and the rows of both caches."""
    (dq, uq, dkv), (gamma, gamma_cq, gamma_ckv), (eps, eps_cq, eps_ckv) = layers, gammas, epsilons
    norm = p.rms_norm(x=x, gamma=gamma, eps=eps)
    whole = p.shifted_quantised(x=norm, bias=betas[0], **scales[0])
    low, line = (_layer(p, whole, each, how) for each in (dq, dkv))
    latent = p.shifted_quantised(
        x=p.reshaped(p.rms_norm(x=low, gamma=gamma_cq, eps=eps_cq)), bias=betas[1], **scales[1]
    )
    heads = _layer(p, latent, uq, how)
    first = p.layer_lanes(layer=heads, width=lanes["width"], start=lanes["first"], heads_first=lanes["heads_first"])
    rotated = rotated_lanes(p, first, cos, sin, dtypes[0], gamma_cq, lanes["heads_first"], source=how["source"])
    absorbed = p.layer_query(layer=heads, width=lanes["width"], start=lanes["begin"], up=up)
    kv = rows(p, line, gamma_cq, gamma_ckv, eps_ckv, cos, sin, split, end, dtypes[1], how["source"])
    return (rotated, absorbed), kv


def _layer(p, x, layer, how):
    weight, scale, bias = layer
    return p.whole_linear(
        x=p.reshaped(x), weight=weight, scale=scale, bias=bias, dtype=how["layer_dtype"], fixed=how["fixed"]
    )


@dataclass(frozen=True)
class MlaPreprocessFixed(Preprocess):
    """The whole front with scales and zero points that are constants."""

    @pattern
    def written(
        self, p, x=tensor("*B He"), gamma=tensor("He"), beta=tensor("He", optional=True), dq=tensor("Hcq He"),
        dq_scale=tensor("Hcq"), dq_bias=tensor("Hcq", optional=True), uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"),
        uq_bias=tensor("Nq", optional=True), up=tensor("N D Hckv"), dkv=tensor("Nk He"), dkv_scale=tensor("Nk"),
        dkv_bias=tensor("Nk", optional=True), gamma_cq=tensor("Hcq"), beta_cq=tensor("Hcq", optional=True),
        gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"), kv_cache=tensor("*P"),
        kr_cache=tensor("*Q"), slots=tensor("Rows", optional=True), scale=tensor("1", optional=True),
        zero=tensor("1", optional=True), scale_cq=tensor("1", optional=True), zero_cq=tensor("1", optional=True),
        by=scalar(), shift=scalar(), by_cq=scalar(), shift_cq=scalar(), eps=scalar(), eps_cq=scalar(),
        eps_ckv=scalar(), width=attribute(), begin=attribute(), first=attribute(), split=attribute(), end=attribute(),
        heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(),
        layer_dtype=attribute(), source=attribute(), line=attribute(),
    ):  # fmt: skip
        """Rows of all pages by their number, or by a block and a place in it; whole, or in lines of NZ."""
        layers = ((dq, dq_scale, dq_bias), (uq, uq_scale, uq_bias), (dkv, dkv_scale, dkv_bias))
        scales = (
            dict(scale=scale, by=by, zero=zero, shift=shift),
            dict(scale=scale_cq, by=by_cq, zero=zero_cq, shift=shift_cq),
        )
        lanes = dict(width=width, begin=begin, first=first, heads_first=heads_first)
        q, kv = front(
            p, x, layers, (gamma, gamma_cq, gamma_ckv), (beta, beta_cq), (eps, eps_cq, eps_ckv), scales, up, cos, sin,
            lanes, split, end, (dtype_q, dtype_kv), dict(layer_dtype=layer_dtype, fixed=fixed, source=source),
        )  # fmt: skip
        return *q, *latent_calls.written(p, (kv_cache, kr_cache), kv, slots, line)

    def guard(
        self, x: Any, up: Any, dkv: Any, width: int, begin: int, first: int, split: int, end: int, kv_cache: Any,
        slots: Any, line: Any, eps: float, eps_cq: float, eps_ckv: float, dq_bias: Any, uq_bias: Any, dkv_bias: Any,
    ):  # fmt: skip
        """As for every front; and where a bias is added."""
        Preprocess.guard(self, x, up, dkv, width, begin, first, split, end, kv_cache, slots, line, eps, eps_cq, eps_ckv)
        calls.of_int32(dq_bias, uq_bias, dkv_bias)

    @lowering
    def run(self, x, gamma, beta, dq, dq_scale, dq_bias, uq, uq_scale, uq_bias, up, dkv, dkv_scale, dkv_bias, gamma_cq,
            beta_cq, gamma_ckv, cos, sin, source, heads_first, kv_cache, kr_cache, slots, scale, zero, scale_cq,
            zero_cq, by, shift, by_cq, shift_cq, line):  # fmt: skip
        """One call, that writes to the pages and to fresh memory."""
        weights, scales = calls.joined((dq, dkv, uq), (dq_scale, dkv_scale, uq_scale), up, cos, source)
        biases = calls.biases((dq_bias, dq), (dkv_bias, dkv), (uq_bias, uq), up, cos, source)
        return calls.called(
            x, (gamma, gamma_cq, gamma_ckv), (calls.beta_of(beta, gamma), calls.beta_of(beta_cq, gamma_cq)), weights,
            scales, up, (cos, sin), (kv_cache, kr_cache), slots, heads_first,
            "krope_ctkv" if line is None else "nzcache",
            **calls.told(x, biases, (scale, by, zero, shift), (scale_cq, by_cq, zero_cq, shift_cq)),
        )  # fmt: skip
