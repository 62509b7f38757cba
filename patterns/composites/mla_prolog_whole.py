"""The prolog of latent attention whose layers, latent cache and queries are all in whole numbers of 8 bits.

    k8 = int8(norm(k) / c)      q8 = int8(query / s), s of each token and head      q_rope = rope(q_r) / (s · c)

*Matches* what `mla_prolog_quantised` does with all three layers quantised, the latent quantised by a fixed scale where
it is written, and absorbed queries quantised for each token and head, beside an attention that reads both.
*Replaces with* `npu_mla_prolog_v3`, which quantises before numbers would be rounded, into pages or into lines of NZ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fusion import attribute, lowering, pattern, require, scalar, tensor
from patterns.composites.mla_prolog import Prolog
from patterns.composites.mla_prolog_quantised import called, layer, queries, rows
from patterns.primitives import latent_calls
from patterns.primitives.whole_latent_calls import multipliers


@dataclass(frozen=True)
class MlaPrologWhole(Prolog):
    """The prolog in whole numbers with the writes into both caches."""

    def beside(self) -> frozenset[str]:
        """The attention that reads whole queries and a whole latent."""
        return frozenset({"latent_attention"})

    @pattern
    def written(
        self, p, x=tensor("*B He"), tokens=tensor("*B 1"), dq=tensor("Hcq He"), dq_scale=tensor("Hcq"),
        uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"), up=tensor("N D Hckv"), dkv=tensor("Nk He"), dkv_scale=tensor("Nk"),
        gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*P"), kr_cache=tensor("*Q"), slots=tensor("Rows", optional=True),
        stored=tensor("1", optional=True), read=tensor("1", optional=True), stored_by=scalar(), read_by=scalar(),
        eps_cq=scalar(), eps_ckv=scalar(), width=attribute(), begin=attribute(), first=attribute(), split=attribute(),
        end=attribute(), heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(),
        scale_dtype=attribute(), layer_dtype=attribute(), query_dtype=attribute(), kv_line=attribute(),
        kr_line=attribute(),
    ):  # fmt: skip
        """Rows of all pages by their number, or by a block and a place in it; whole, or in lines of NZ."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed, query_dtype=query_dtype)
        lanes = dict(width=width, begin=begin, first=first, heads_first=heads_first)
        layers = ((dq, dq_scale), (uq, uq_scale), (dkv, dkv_scale))
        found, both = _read(p, x, tokens, layers, up, (gamma_cq, gamma_ckv), (eps_cq, eps_ckv), cos, sin, lanes,
                            (dtype_q, dtype_kv), (split, end), (stored, stored_by), (read, read_by), how)  # fmt: skip
        return *found, *latent_calls.written(p, (kv_cache, kr_cache), both, slots, kv_line, kr_line)

    def guard(
        self, x: Any, up: Any, dkv: Any, width: int, begin: int, first: int, split: int, end: int, kv_cache: Any,
        slots: Any, stored: Any, read: Any, stored_by: float, read_by: float, kv_line: Any, kr_line: Any,
    ):  # fmt: skip
        """As for `MlaProlog`; how the pages are laid out; and that both sides mean one scale."""
        Prolog.guard(self, x, up, dkv, width, begin, first, split, end, None, None, 0)
        latent_calls.of_pages(kv_cache, slots, kv_line, latent_calls.WHOLE_LINE)
        latent_calls.of_line(kr_line)
        require((kv_line is None) == (kr_line is None), "one cache holds rows in lines, the other whole ones")
        one = stored is read and math.isclose(stored_by, read_by, rel_tol=1e-6)
        require(one, "the latent is read with another scale than it is written with")

    @lowering
    def run(self, x, tokens, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, cos, sin, eps_cq,
            eps_ckv, kv_cache, kr_cache, slots, stored, stored_by, scale_dtype, query_dtype, kv_line):  # fmt: skip
        """One call."""
        pages, where = latent_calls.into_pages((kv_cache, kr_cache), slots, kv_line, x)
        query, rope, query_scale, latent, scale, kv, kr = called(
            x, tokens, (dq, uq, dkv), (dq_scale, uq_scale, dkv_scale), up, (gamma_cq, gamma_ckv), cos, sin, pages,
            rmsnorm_epsilon_cq=eps_cq, rmsnorm_epsilon_ckv=eps_ckv,
            **where, kv_cache_quant_mode=1, query_quant_mode=1,
            quant_scale_ckv=multipliers(stored, stored_by, 1, x.device),
        )  # fmt: skip
        rows = (*x.shape[:-1], -1, 1)
        query_scale = query_scale.reshape(rows).transpose(1, 2).to(query_dtype)
        found = query.transpose(1, 2), rope.transpose(1, 2), query_scale, latent
        scale = scale.reshape(*x.shape[:-1], 1).to(scale_dtype)
        return *found, scale, *(new.reshape(old.shape) for new, old in zip((kv, kr), (kv_cache, kr_cache), strict=True))


def _read(p, x, tokens, layers, up, gammas, eps, cos, sin, lanes, dtypes, parts, stored, read, how):
    """Whole absorbed queries, rotated ones, the scale of both, their latent with its scale; the rows of both caches."""
    (dq, dq_scale), (uq, uq_scale), (dkv, dkv_scale) = layers
    query_dtype = how["query_dtype"]
    low = layer(p, x, dq, dq_scale, tokens, how["layer_dtype"], how["fixed"])
    rotated, absorbed, latent, scale = queries(
        p, low, uq, uq_scale, up, gammas[0], eps[0], cos, sin, dtype=dtypes[0], how=how, **lanes
    )
    of_query = p.token_scale(x=p.reshaped(absorbed), dtype=query_dtype)
    query = p.token_quantised(x=p.reshaped(absorbed), scale=of_query, dtype=query_dtype)
    folded = p.folded_query(rope=rotated, tokens=p.reshaped(of_query), of_keys=read[0], by=read[1])
    line = layer(p, x, dkv, dkv_scale, tokens, how["layer_dtype"], how["fixed"])
    kv, kr = rows(p, line, gammas[0], gammas[1], eps[1], cos, sin, parts[0], parts[1], dtypes[1])
    kv = p.fixed_quantised(x=p.reshaped(kv), scale=stored[0], by=stored[1])
    return (query, folded, of_query, latent, scale), (kv, kr)
