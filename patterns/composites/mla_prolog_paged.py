"""Queries and latents of multi-head latent attention, from the hidden states to the pages of a cache, in one operator.

*Matches* what `MlaProlog` matches, with rows written to the pages of both caches at the same slots, whole or in lines
of NZ, beside an attention that reads absorbed queries. *Replaces with* `npu_mla_prolog_v3`, which writes to the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusion import attribute, lowering, pattern, scalar, tensor
from patterns.composites.mla_prolog import Prolog, prolog, queries, rows
from patterns.primitives import latent_calls


class PagedProlog(Prolog):
    """A prolog that writes the rows of both caches to pages, beside an attention that reads them."""

    def beside(self) -> frozenset[str]:
        """The attention that reads absorbed queries."""
        return frozenset({"latent_attention"})

    def guard(
        self, x: Any, up: Any, dkv: Any, width: int, begin: int, first: int, split: int, end: int, kv_cache: Any,
        slots: Any, line: Any,
    ):  # fmt: skip
        """As for every prolog; and how the pages are laid out."""
        Prolog.guard(self, x, up, dkv, width, begin, first, split, end, None, None, 0)
        latent_calls.of_pages(kv_cache, slots, line)


@dataclass(frozen=True)
class MlaPrologPaged(PagedProlog):
    """The prolog with the writes into the pages of both caches."""

    @pattern
    def written(
        self, p, x=tensor("*B He"), dq=tensor("Hcq He"), uq=tensor("Nq Hcq"), up=tensor("N D Hckv"),
        dkv=tensor("Nk He"), gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"),
        sin=tensor("T U Dr"), kv_cache=tensor("*P"), kr_cache=tensor("*Q"), slots=tensor("Rows", optional=True),
        beside_q=tensor("*E", optional=True), beside_kv=tensor("*F", optional=True), eps_cq=scalar(), eps_ckv=scalar(),
        factor_q=scalar(), factor_kv=scalar(), width=attribute(), begin=attribute(), first=attribute(),
        split=attribute(), end=attribute(), heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(),
        fixed=attribute(), line=attribute(),
    ):  # fmt: skip
        """Rows of all pages by their number, or by a block and a place in it; whole, or in lines of NZ."""
        how = dict(width=width, begin=begin, first=first, heads_first=heads_first, dtype=dtype_q)
        q = queries(p, x, dq, uq, up, gamma_cq, eps_cq, factor_q, cos, sin, fixed=fixed, beside=beside_q, **how)
        kv = rows(p, x, dkv, gamma_ckv, eps_ckv, factor_kv, cos, sin, split, end, dtype_kv, fixed, beside_kv)
        return *q, *latent_calls.written(p, (kv_cache, kr_cache), kv, slots, line)

    @lowering
    def run(self, x, dq, uq, up, dkv, gamma_cq, gamma_ckv, cos, sin, eps_cq, eps_ckv, factor_q, factor_kv,
            heads_first, kv_cache, kr_cache, slots, line):  # fmt: skip
        """One call."""
        pages, where = latent_calls.into_pages((kv_cache, kr_cache), slots, line, x)
        *found, kv, kr = prolog(
            x, dq, uq, up, dkv, gamma_cq, gamma_ckv, cos, sin, eps_cq, eps_ckv, factor_q, factor_kv, heads_first,
            pages, **where,
        )  # fmt: skip
        return *found, kv.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)
