"""The quantised prolog of latent attention whose rows are written to the pages of both caches.

*Matches* what `mla_prolog_quantised` matches, with rows written to pages at the same slots, whole or in lines of NZ,
beside an attention that reads absorbed queries. *Replaces with* `npu_mla_prolog_v3`, which writes to the pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusion import Example, attribute, lowering, pattern, require, scalar, tensor
from patterns.composites.mla_prolog import Prolog
from patterns.composites.mla_prolog_quantised import layer, prolog, queries, rows
from patterns.examples import mla_prolog_quantised_paged
from patterns.primitives import latent_calls


@dataclass(frozen=True)
class MlaPrologQuantisedPaged(Prolog):
    """The quantised prolog with the writes into the pages of both caches."""

    def beside(self) -> frozenset[str]:
        """The attention that reads absorbed queries."""
        return frozenset({"paged_latent_attention", "latent_attention"})

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
        caches = zip((kv_cache, kr_cache), kv, strict=True)
        return *q, *(p.write_pages(cache=c, rows=p.reshaped(row), slots=slots, line=line) for c, row in caches)

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
        caches = zip((kv_cache, kr_cache), kv, strict=True)
        return *q, *(p.write_pages(cache=c, rows=p.reshaped(row), slots=slots, line=line) for c, row in caches)

    def guard(
        self, x: Any, up: Any, dkv: Any, width: int, begin: int, first: int, split: int, end: int, kv_cache: Any,
        slots: Any, line: Any,
    ):  # fmt: skip
        """As for `MlaProlog`; and how the pages are laid out."""
        Prolog.guard(self, x, up, dkv, width, begin, first, split, end, None, None, 0)
        latent_calls.of_pages(kv_cache, slots, line)

    @lowering
    def run(self, x, tokens, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, cos, sin, eps_cq,
            eps_ckv, heads_first, kv_cache, kr_cache, slots, scale_dtype, line):  # fmt: skip
        """One call."""
        both = (kv_cache, kr_cache)
        require(all(each.is_contiguous() for each in both), "the pages are not contiguous")
        pages = (latent_calls.in_rows(kv_cache, line), latent_calls.in_rows(kr_cache, line))
        *found, kv, kr = prolog(
            x, tokens, (dq, uq, dkv), (dq_scale, uq_scale, dkv_scale), up, (gamma_cq, gamma_ckv), cos, sin, pages,
            heads_first, scale_dtype, rmsnorm_epsilon_cq=eps_cq, rmsnorm_epsilon_ckv=eps_ckv,
            cache_mode="PA_BSND" if line is None else "PA_NZ",
            cache_index=slots.to(torch.int64).reshape(x.shape[:-1]),
        )  # fmt: skip
        return *found, kv.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)

    def examples(self) -> Iterator[Example]:
        """Functions that must be recognised."""
        return iter(mla_prolog_quantised_paged.EXAMPLES)

    def rejects(self) -> Iterator[Example]:
        """Functions that must be refused."""
        return iter(mla_prolog_quantised_paged.REJECTS)
