"""The quantised prolog of latent attention whose rows are written to the pages of both caches.

*Matches* what `mla_prolog_quantised` matches, with rows written to pages at the same slots, whole or in lines of NZ,
beside an attention that reads absorbed queries. *Replaces with* `npu_mla_prolog_v3`, which writes to the pages.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion import attribute, lowering, pattern, scalar, tensor
from patterns.composites.mla_prolog_paged import PagedProlog
from patterns.composites.mla_prolog_quantised import layer, prolog, queries, rows
from patterns.primitives import latent_calls


@dataclass(frozen=True)
class MlaPrologQuantisedPaged(PagedProlog):
    """The quantised prolog with the writes into the pages of both caches."""

    @pattern
    def heads_alone(
        self, p, x=tensor("*B He"), dq=tensor("Hcq He"), uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"),
        up=tensor("N D Hckv"), dkv=tensor("Nk He"), gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"),
        cos=tensor("T U Dr"), sin=tensor("T U Dr"), kv_cache=tensor("*P"), kr_cache=tensor("*Q"),
        slots=tensor("Rows", optional=True), beside_q=tensor("*E", optional=True),
        beside_kv=tensor("*F", optional=True), eps_cq=scalar(), eps_ckv=scalar(), width=attribute(), begin=attribute(),
        first=attribute(), split=attribute(), end=attribute(), heads_first=attribute(), dtype_q=attribute(),
        dtype_kv=attribute(), fixed=attribute(), scale_dtype=attribute(), layer_dtype=attribute(), line=attribute(),
    ):  # fmt: skip
        """The layer of the queries' heads is quantised."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed)
        low = p.linear(x=x, weight=dq, fixed=fixed, beside=beside_q)
        q = queries(p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first,
                    dtype_q, how)  # fmt: skip
        both = p.linear(x=x, weight=dkv, fixed=fixed, beside=beside_kv)
        kv = rows(p, both, gamma_cq, gamma_ckv, eps_ckv, cos, sin, split, end, dtype_kv)
        return *q, *latent_calls.written(p, (kv_cache, kr_cache), kv, slots, line)

    @pattern
    def all_layers(
        self, p, x=tensor("*B He"), tokens=tensor("*B 1"), dq=tensor("Hcq He"), dq_scale=tensor("Hcq"),
        uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"), up=tensor("N D Hckv"), dkv=tensor("Nk He"), dkv_scale=tensor("Nk"),
        gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*P"), kr_cache=tensor("*Q"), slots=tensor("Rows", optional=True), eps_cq=scalar(),
        eps_ckv=scalar(), width=attribute(), begin=attribute(), first=attribute(), split=attribute(), end=attribute(),
        heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(), scale_dtype=attribute(),
        layer_dtype=attribute(), line=attribute(),
    ):  # fmt: skip
        """All three layers are quantised."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed)
        low = layer(p, x, dq, dq_scale, tokens, layer_dtype, fixed)
        q = queries(p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first,
                    dtype_q, how)  # fmt: skip
        both = layer(p, x, dkv, dkv_scale, tokens, layer_dtype, fixed)
        kv = rows(p, both, gamma_cq, gamma_ckv, eps_ckv, cos, sin, split, end, dtype_kv)
        return *q, *latent_calls.written(p, (kv_cache, kr_cache), kv, slots, line)

    @lowering
    def run(self, x, tokens, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, cos, sin, eps_cq,
            eps_ckv, heads_first, kv_cache, kr_cache, slots, scale_dtype, line):  # fmt: skip
        """One call."""
        pages, where = latent_calls.into_pages((kv_cache, kr_cache), slots, line, x)
        *found, kv, kr = prolog(
            x, tokens, (dq, uq, dkv), (dq_scale, uq_scale, dkv_scale), up, (gamma_cq, gamma_ckv), cos, sin, pages,
            heads_first, scale_dtype, rmsnorm_epsilon_cq=eps_cq, rmsnorm_epsilon_ckv=eps_ckv, **where,
        )  # fmt: skip
        return *found, kv.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)
