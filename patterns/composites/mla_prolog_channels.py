"""The quantised prolog of latent attention over caches of whole numbers by channel (see `mla_prolog_quantised`).

    kv_cache[slot] = int8(norm(k) / c)      kr_cache[slot] = int8(rope(k_r) / r), with a scale of each channel

*Matches* what `mla_prolog_quantised` does with the heads of the queries quantised, both rows quantised by fixed scales
where they are written to pages, or to pages in lines of NZ. *Replaces with* `npu_mla_prolog_v3`, which quantises the
latent before it would be rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusion import attribute, lowering, pattern, scalar, tensor
from patterns.composites.mla_prolog import Prolog
from patterns.composites.mla_prolog_quantised import prolog, queries, rows
from patterns.primitives import latent_calls
from patterns.primitives.whole_latent_calls import multipliers


@dataclass(frozen=True)
class MlaPrologChannels(Prolog):
    """The prolog with the writes into both caches of whole numbers."""

    @pattern
    def heads_alone(
        self, p, x=tensor("*B He"), dq=tensor("Hcq He"), uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"),
        up=tensor("N D Hckv"), dkv=tensor("Nk He"), gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"),
        cos=tensor("T U Dr"), sin=tensor("T U Dr"), kv_cache=tensor("*P"), kr_cache=tensor("*Q"),
        slots=tensor("Rows", optional=True), kv_scale=tensor("C", optional=True), kr_scale=tensor("R", optional=True),
        beside_q=tensor("*E", optional=True), beside_kv=tensor("*F", optional=True), kv_by=scalar(), kr_by=scalar(),
        eps_cq=scalar(), eps_ckv=scalar(), width=attribute(), begin=attribute(), first=attribute(), split=attribute(),
        end=attribute(), heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(),
        scale_dtype=attribute(), layer_dtype=attribute(), line=attribute(),
    ):  # fmt: skip
        """The layer of the queries' heads is quantised."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed)
        low = p.linear(x=x, weight=dq, fixed=fixed, beside=beside_q)
        q = queries(p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first,
                    dtype_q, how)  # fmt: skip
        both = p.linear(x=x, weight=dkv, fixed=fixed, beside=beside_kv)
        kv, kr = rows(p, both, gamma_cq, gamma_ckv, eps_ckv, cos, sin, split, end, dtype_kv)
        kv = p.fixed_quantised(x=p.reshaped(kv), scale=kv_scale, by=kv_by)
        kr = p.fixed_quantised(x=p.reshaped(kr), scale=kr_scale, by=kr_by)
        return *q, *latent_calls.written(p, (kv_cache, kr_cache), (kv, kr), slots, line)

    def guard(
        self, x: Any, up: Any, dkv: Any, width: int, begin: int, first: int, split: int, end: int, kv_cache: Any,
        slots: Any, line: Any,
    ):  # fmt: skip
        """As for `MlaProlog`; and how the pages are laid out."""
        Prolog.guard(self, x, up, dkv, width, begin, first, split, end, None, None, 0)
        latent_calls.of_pages(kv_cache, slots, line, latent_calls.WHOLE_LINE)

    @lowering
    def run(self, x, dq, uq, uq_scale, up, dkv, gamma_cq, gamma_ckv, cos, sin, eps_cq, eps_ckv, heads_first, kv_cache,
            kr_cache, slots, line, split, end, kv_scale, kv_by, kr_scale, kr_by, scale_dtype):  # fmt: skip
        """One call."""
        pages, where = latent_calls.into_pages((kv_cache, kr_cache), slots, line, x)
        *found, kv, kr = prolog(
            x, None, (dq, uq, dkv), (None, uq_scale, None), up, (gamma_cq, gamma_ckv), cos, sin, pages, heads_first,
            scale_dtype, rmsnorm_epsilon_cq=eps_cq, rmsnorm_epsilon_ckv=eps_ckv,
            kv_cache_quant_mode=2,
            quant_scale_ckv=multipliers(kv_scale, kv_by, split, x.device).reshape(1, -1),
            quant_scale_ckr=multipliers(kr_scale, kr_by, end - split, x.device).reshape(1, -1), **where,
        )  # fmt: skip
        return *found, kv.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)
