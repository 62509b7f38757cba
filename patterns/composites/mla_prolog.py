"""Queries and latents of multi-head latent attention, from the hidden states to the cache, in one operator.

    c = s norm(x W_dq)    [q, q_r] = c W_uq, per head      query = q W_uk        query_rope = rope(q_r)
    [k, k_r] = x W_dkv    latent = t norm(k)               key_rope = rope(k_r)

*Matches* the projections of both latents, their norms, the rotation of pairs to halves, and (in `MlaProlog`) the writes
of consecutive rows into contiguous caches, beside an attention that reads absorbed queries (DeepSeek-V2, 2024).
*Replaces with* `npu_mla_prolog_v3`; a contiguous cache is read as pages in their own order.
Where that is left out, with its older versions, launched one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.primitives import latent_calls
from patterns.primitives.quant_matmul import prepared


def queries(p, x, dq, uq, up, gamma, eps, factor, cos, sin, width, begin, first, heads_first, dtype, fixed, beside):
    """Rotated queries, absorbed queries, and the latent that both come from, which may be multiplied by a number."""
    norm = p.rms_norm(x=p.linear(x=x, weight=dq, fixed=fixed, beside=beside), gamma=gamma, eps=eps)
    lanes = p.head_lanes(x=p.reshaped(norm), weight=uq, width=width, start=first, heads_first=heads_first)
    # A factor of the lanes is read as one of the tables.
    turned = rotated_lanes(p, lanes, cos, sin, dtype, x, heads_first, factor)
    latent = p.maybe_scaled(norm, factor)
    return turned, p.absorbed_query(x=p.reshaped(latent), weight=uq, width=width, start=begin, up=up), latent


def rows(p, x, dkv, gamma, eps, factor, cos, sin, split, end, dtype, fixed, beside):
    """The rows of both caches; the latent may be multiplied by a number."""
    both = p.linear(x=x, weight=dkv, fixed=fixed, beside=beside)
    norm = p.rms_norm(x=p.lanes(p.reshaped(both), 0, split), gamma=gamma, eps=eps)
    return p.maybe_scaled(norm, factor), rotated_lanes(p, p.lanes(p.reshaped(both), split, end), cos, sin, dtype, x)


def rotated_lanes(p, x, cos, sin, dtype, like, heads_first=None, factor=1.0, source="interleaved"):
    """Computed in float32, as by the operator, or in the dtype of the model."""
    tables = (p.per_token(p.maybe_cast(each, to=torch.float32), x, heads_first) for each in (cos, sin))
    cos, sin = (each if factor == 1 else p.maybe_scaled(each, factor) for each in tables)
    wide = p.maybe_cast(x, to=torch.float32)
    return p.as_dtype(p.rotation(x=wide, cos=cos, sin=sin, source=source, result="half", dtype=dtype), like)


def prolog(
    x: Tensor, dq: Tensor, uq: Tensor, up: Tensor, dkv: Tensor, gamma_cq: Tensor, gamma_ckv: Tensor, cos: Tensor,
    sin: Tensor, eps_cq: float, eps_ckv: float, factor_q: float, factor_kv: float, heads_first: bool,
    caches: tuple[Tensor, Tensor], **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rotated and absorbed queries [B, N, S, C] or [T, N, C], their latent [.., Q], and both caches with new rows."""
    lowest = min(factor_q, factor_kv)
    require(lowest > 0, "a latent is multiplied by {factor}, which is not positive", factor=lowest)
    query, q_rope, _, latent, _, *written = torch.ops.npu.npu_mla_prolog_v3_functional(
        *_read(x, dq, uq, up, dkv, gamma_cq, gamma_ckv, cos, sin), *caches,
        rmsnorm_epsilon_cq=eps_cq, rmsnorm_epsilon_ckv=eps_ckv, query_norm_flag=True, qc_qr_scale=factor_q,
        kc_scale=factor_kv, **how,
    )  # fmt: skip
    return q_rope.transpose(1, 2) if heads_first else q_rope, latent_calls.heads_before(query), latent, *written


def _read(
    x: Tensor, dq: Tensor, uq: Tensor, up: Tensor, dkv: Tensor, gamma_cq: Tensor, gamma_ckv: Tensor, cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What every version reads first."""
    weights = [prepared(each) for each in (dq, uq, dkv)]
    tables = [latent_calls.of_tokens(each, x).contiguous() for each in (sin, cos)]
    return x, weights[0], weights[1], up.contiguous(), weights[2], gamma_cq, gamma_ckv, *tables


class Prolog(Rule):
    """What both rules share."""

    def beside(self) -> frozenset[str]:
        """The attention that reads absorbed queries."""
        return frozenset({"sparse_attention", "latent_attention"})

    def reference(
        self, x: Tensor, dq: Tensor, uq: Tensor, up: Tensor, dkv: Tensor, gamma_cq: Tensor, gamma_ckv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The meaning without rotation: absorbed queries [B, N, S, C], their latent, rows [B, S, C]."""
        heads, width, rank = up.shape
        c = torch.nn.functional.rms_norm(x @ dq.T, gamma_cq.shape, gamma_cq)
        q = (c @ uq.T).unflatten(-1, (heads, -1))[..., :width].transpose(1, 2)
        return q @ up, c, torch.nn.functional.rms_norm((x @ dkv.T)[..., :rank], gamma_ckv.shape, gamma_ckv)

    def guard(
        self, x: Any, up: Any, dkv: Any, width: int, begin: int, first: int, split: int, end: int, kv_cache: Any,
        start: Any, axis: int,
    ):  # fmt: skip
        """How the tokens, the weights and the caches are laid out."""
        require(kv_cache is None or len(x.shape) == 3, "the tokens of all sequences are packed")
        require(begin == 0 and first == up.shape[1], "the lanes that are rotated do not follow those that are not")
        require(end == dkv.shape[0], "latent and rotated key do not make up one projection")
        require(width == first + end - split, "the heads have more lanes than both parts of the queries")
        written = kv_cache is None or x.shape[0] == latent_calls.sequences(kv_cache, start, axis)
        require(written, "the caches hold other sequences than the hidden states")


@dataclass(frozen=True)
class MlaProlog(Prolog):
    """The prolog with the writes into both caches."""

    @pattern
    def written(
        self, p, x=tensor("*B He"), dq=tensor("Hcq He"), uq=tensor("Nq Hcq"), up=tensor("N D Hckv"),
        dkv=tensor("Nk He"), gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"),
        sin=tensor("T U Dr"), kv_cache=tensor("*C Hckv"), kr_cache=tensor("*C Dr"), start=tensor("*S"),
        beside_q=tensor("*E", optional=True), beside_kv=tensor("*F", optional=True), eps_cq=scalar(), eps_ckv=scalar(),
        factor_q=scalar(), factor_kv=scalar(), width=attribute(), begin=attribute(), first=attribute(),
        split=attribute(), end=attribute(), heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(),
        fixed=attribute(), axis=attribute(),
    ):  # fmt: skip
        """Rows go to consecutive positions of every sequence."""
        how = dict(width=width, begin=begin, first=first, heads_first=heads_first, dtype=dtype_q)
        q = queries(p, x, dq, uq, up, gamma_cq, eps_cq, factor_q, cos, sin, fixed=fixed, beside=beside_q, **how)
        kv = rows(p, x, dkv, gamma_ckv, eps_ckv, factor_kv, cos, sin, split, end, dtype_kv, fixed, beside_kv)
        caches = zip((kv_cache, kr_cache), kv, strict=True)
        return *q, *(p.write(cache=c, rows=p.reshaped(row), start=start, axis=axis) for c, row in caches)

    @lowering
    def paged(self, x, dq, uq, up, dkv, gamma_cq, gamma_ckv, cos, sin, eps_cq, eps_ckv, factor_q, factor_kv,
              heads_first, kv_cache, kr_cache, start, axis):  # fmt: skip
        """One call, that writes to pages."""
        pages = (latent_calls.pages(kv_cache, axis), latent_calls.pages(kr_cache, axis))
        slots = latent_calls.slots(start, x.shape[0], x.shape[1], kv_cache.shape[axis], x.device)
        *found, kv, kr = prolog(
            x, dq, uq, up, dkv, gamma_cq, gamma_ckv, cos, sin, eps_cq, eps_ckv, factor_q, factor_kv, heads_first,
            pages, cache_mode="PA_BSND", cache_index=slots,
        )  # fmt: skip
        return *found, kv.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)

    @lowering
    @variants(version=("npu_mla_prolog_v2", "npu_mla_prolog"))
    def older(self, x, dq, uq, up, dkv, gamma_cq, gamma_ckv, cos, sin, eps_cq, eps_ckv, factor_q, factor_kv,
              heads_first, kv_cache, kr_cache, start, axis, version):  # fmt: skip
        """The same where the third version is left out: the others keep the latent of the queries for themselves."""
        require(factor_q == factor_kv == 1, "the older versions of the operator multiply no latent by a number")
        slots = latent_calls.slots(start, x.shape[0], x.shape[1], kv_cache.shape[axis], x.device)
        query, q_rope, kv, kr = getattr(torch.ops.npu, version).functional(
            *_read(x, dq, uq, up, dkv, gamma_cq, gamma_ckv, cos, sin), slots,
            latent_calls.pages(kv_cache, axis), latent_calls.pages(kr_cache, axis),
            rmsnorm_epsilon_cq=eps_cq, rmsnorm_epsilon_ckv=eps_ckv, cache_mode="PA_BSND",
        )  # fmt: skip
        latent = torch.ops.npu.npu_rms_norm(torch.nn.functional.linear(x, dq), gamma_cq, eps_cq)[0]
        found = q_rope.transpose(1, 2) if heads_first else q_rope, query.transpose(1, 2), latent
        return *found, kv.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)


@dataclass(frozen=True)
class MlaPrologRows(Prolog):
    """The prolog whose rows the model itself joins, writes or attends to."""

    @pattern
    def fresh(
        self, p, x=tensor("*B He"), dq=tensor("Hcq He"), uq=tensor("Nq Hcq"), up=tensor("N D Hckv"),
        dkv=tensor("Nk He"), gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"),
        sin=tensor("T U Dr"), beside_q=tensor("*E", optional=True), beside_kv=tensor("*F", optional=True),
        eps_cq=scalar(), eps_ckv=scalar(), factor_q=scalar(), factor_kv=scalar(), width=attribute(),
        begin=attribute(), first=attribute(), split=attribute(), end=attribute(), heads_first=attribute(),
        dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(),
    ):  # fmt: skip
        """Rows as they are."""
        how = dict(width=width, begin=begin, first=first, heads_first=heads_first, dtype=dtype_q)
        q = queries(p, x, dq, uq, up, gamma_cq, eps_cq, factor_q, cos, sin, fixed=fixed, beside=beside_q, **how)
        return *q, *rows(p, x, dkv, gamma_ckv, eps_ckv, factor_kv, cos, sin, split, end, dtype_kv, fixed, beside_kv)

    @lowering
    def fresh_rows(self, x, dq, uq, up, dkv, gamma_cq, gamma_ckv, cos, sin, eps_cq, eps_ckv, factor_q, factor_kv,
                   heads_first, split, end):  # fmt: skip
        """One call, into memory of its own."""
        made = dict(dtype=x.dtype, device=x.device)
        rows = (*x.shape[:-1], 1)
        buffers = (torch.empty((*rows, split), **made), torch.empty((*rows, end - split), **made))
        *found, kv, kr = prolog(
            x, dq, uq, up, dkv, gamma_cq, gamma_ckv, cos, sin, eps_cq, eps_ckv, factor_q, factor_kv, heads_first,
            buffers, cache_mode="BSND" if x.dim() == 3 else "TND",
        )  # fmt: skip
        return *found, kv, kr
