"""What stands before latent attention with a latent cache and queries in whole numbers too, in one call of atb.

    q8 = int8(query · s[head])      pages[slot] = int8(norm(k) / c)

*Matches* what `mla_preprocess` and `mla_preprocess_fixed` do, where absorbed queries are quantised by one factor of
each head and the latent by one scale where it is written, into pages in lines of NZ of 32 and of 16 numbers, beside an
attention that reads both. *Replaces with* `npu_mla_preprocess`, which takes both scales in the dtype of x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusion import attribute, lowering, pattern, require, scalar, tensor
from patterns.composites import mla_preprocess_fixed as by_constants
from patterns.composites.mla_preprocess import Preprocess, front
from patterns.latent.prolog import of_heads
from patterns.primitives import latent_calls
from patterns.primitives import preprocess_calls as calls

MODE = "int8_nzcache"


def whole(p, found, stored, query_scale, caches, slots, *lines):
    """Queries and latent rows of a front, quantised; both caches with new rows."""
    (rotated, absorbed), (latent, rope) = found
    latent = p.shifted_quantised(x=p.reshaped(latent), **stored)
    query = p.heads_quantised(x=absorbed, scale=query_scale)
    return rotated, query, *latent_calls.written(p, caches, (latent, rope), slots, *lines)


@dataclass(frozen=True)
class MlaPreprocessWhole(Preprocess):
    """The whole front with queries and a latent cache in whole numbers."""

    def beside(self) -> frozenset[str]:
        """The attention that reads whole queries and a whole latent."""
        return frozenset({"latent_attention_atb_whole"})

    @pattern
    def of_tokens(
        self, p, x=tensor("*B He"), gamma=tensor("He"), dq=tensor("Hcq He"), dq_scale=tensor("Hcq"),
        uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"), up=tensor("N D Hckv"), dkv=tensor("Nk He"), dkv_scale=tensor("Nk"),
        gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*P"), kr_cache=tensor("*Q"), slots=tensor("Rows", optional=True),
        stored=tensor("1", optional=True), query_scale=tensor("N"), stored_by=scalar(), stored_shift=scalar(),
        eps=scalar(), eps_cq=scalar(), eps_ckv=scalar(), width=attribute(), begin=attribute(), first=attribute(),
        split=attribute(), end=attribute(), heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(),
        fixed=attribute(), scale_dtype=attribute(), layer_dtype=attribute(), source=attribute(), line=attribute(),
        rope_line=attribute(),
    ):  # fmt: skip
        """Layers with a scale of each token."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed, source=source)
        found = front(
            p, x, gamma, eps, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, eps_cq, eps_ckv,
            cos, sin, width, begin, first, split, end, heads_first, dtype_q, dtype_kv, how,
        )  # fmt: skip
        kept = dict(scale=stored, by=stored_by, shift=stored_shift)
        return whole(p, found, kept, query_scale, (kv_cache, kr_cache), slots, line, rope_line)

    @pattern
    def of_constants(
        self, p, x=tensor("*B He"), gamma=tensor("He"), beta=tensor("He", optional=True), dq=tensor("Hcq He"),
        dq_scale=tensor("Hcq"), dq_bias=tensor("Hcq", optional=True), uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"),
        uq_bias=tensor("Nq", optional=True), up=tensor("N D Hckv"), dkv=tensor("Nk He"), dkv_scale=tensor("Nk"),
        dkv_bias=tensor("Nk", optional=True), gamma_cq=tensor("Hcq"), beta_cq=tensor("Hcq", optional=True),
        gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"), kv_cache=tensor("*P"),
        kr_cache=tensor("*Q"), slots=tensor("Rows", optional=True), scale=tensor("1", optional=True),
        zero=tensor("1", optional=True), scale_cq=tensor("1", optional=True), zero_cq=tensor("1", optional=True),
        stored=tensor("1", optional=True), query_scale=tensor("N"), stored_by=scalar(), stored_shift=scalar(),
        by=scalar(), shift=scalar(), by_cq=scalar(), shift_cq=scalar(), eps=scalar(), eps_cq=scalar(),
        eps_ckv=scalar(), width=attribute(), begin=attribute(), first=attribute(), split=attribute(), end=attribute(),
        heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(),
        layer_dtype=attribute(), source=attribute(), line=attribute(), rope_line=attribute(),
    ):  # fmt: skip
        """Layers with scales and zero points that are constants."""
        layers = ((dq, dq_scale, dq_bias), (uq, uq_scale, uq_bias), (dkv, dkv_scale, dkv_bias))
        scales = (
            dict(scale=scale, by=by, zero=zero, shift=shift),
            dict(scale=scale_cq, by=by_cq, zero=zero_cq, shift=shift_cq),
        )
        lanes = dict(width=width, begin=begin, first=first, heads_first=heads_first)
        found = by_constants.front(
            p, x, layers, (gamma, gamma_cq, gamma_ckv), (beta, beta_cq), (eps, eps_cq, eps_ckv), scales, up, cos, sin,
            lanes, split, end, (dtype_q, dtype_kv), dict(layer_dtype=layer_dtype, fixed=fixed, source=source),
        )  # fmt: skip
        kept = dict(scale=stored, by=stored_by, shift=stored_shift)
        return whole(p, found, kept, query_scale, (kv_cache, kr_cache), slots, line, rope_line)

    def guard(
        self, x: Any, up: Any, dkv: Any, width: int, begin: int, first: int, split: int, end: int, kv_cache: Any,
        slots: Any, line: Any, rope_line: Any, eps: float, eps_cq: float, eps_ckv: float, dq_bias: Any, uq_bias: Any,
        dkv_bias: Any, stored_shift: float,
    ):  # fmt: skip
        """As for every front; and how whole numbers are stored."""
        of_heads(up, dkv, width, begin, first, split, end)
        calls.epsilons(eps, eps_cq, eps_ckv)
        calls.of_int32(dq_bias, uq_bias, dkv_bias)
        require(None not in (line, rope_line), "the pages hold whole rows, not lines of NZ")
        latent_calls.of_pages(kv_cache, slots, line, latent_calls.WHOLE_LINE)
        latent_calls.of_line(rope_line)
        require(stored_shift == 0, "the latent is stored with a zero point")

    @lowering
    def run(self, x, gamma, beta, dq, dq_scale, dq_bias, uq, uq_scale, uq_bias, up, dkv, dkv_scale, dkv_bias, gamma_cq,
            beta_cq, gamma_ckv, cos, sin, source, heads_first, kv_cache, kr_cache, slots, scale, zero, scale_cq,
            zero_cq, by, shift, by_cq, shift_cq, stored, stored_by, query_scale):  # fmt: skip
        """One call, that writes to the pages and to fresh memory."""
        weights, scales = calls.joined((dq, dkv, uq), (dq_scale, dkv_scale, uq_scale), up, cos, source)
        how = dict(quant_mode="per_token_quant_symm")
        if by is not None:
            biases = calls.biases((dq_bias, dq), (dkv_bias, dkv), (uq_bias, uq), up, cos, source)
            how = calls.told(x, biases, (scale, by, zero, shift), (scale_cq, by_cq, zero_cq, shift_cq))
        betas = (calls.beta_of(beta, gamma), calls.beta_of(beta_cq, gamma_cq))
        return calls.called(
            x, (gamma, gamma_cq, gamma_ckv), betas, weights, scales, up, (cos, sin), (kv_cache, kr_cache), slots,
            heads_first, MODE, ctkv_scale=calls.scale_of(stored, stored_by, x),
            q_nope_scale=calls.scale_of(query_scale, 1, x), **how,
        )  # fmt: skip
