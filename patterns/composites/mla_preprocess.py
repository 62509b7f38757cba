"""What stands before latent attention with weights of 8 bits, from the hidden states to the pages, in one call of atb.

    x' = int8(norm(x))    [q, q_r] = int8(norm(x' W_dq)) W_uq, per head      [k, k_r] = x' W_dkv
    query = q W_uk        query_rope = rope(q_r)      pages[slot] = norm(k)      rope_pages[slot] = rope(k_r)

*Matches* three layers in whole numbers with a scale of each token and of each channel, the norms before them, and rows
written to the pages of both caches at the same slots, whole or in lines of NZ, beside an attention that reads absorbed
queries. *Replaces with* `npu_mla_preprocess`, whose norms add 1e-6; weights are prepared once: both that x is
multiplied by joined, rotated rows of pairs put in halves, in lines of 32 in FRACTAL_NZ. It keeps the latent of the
queries for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, scalar, tensor
from patterns.latent.prolog import MlaProlog, of_heads
from patterns.latent.terms import rotated_lanes
from patterns.primitives import latent_calls
from patterns.primitives import preprocess_calls as calls


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


def front(p, x, gamma, eps, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, eps_cq, eps_ckv, cos,
          sin, width, begin, first, split, end, heads_first, dtype_q, dtype_kv, how):  # fmt: skip
    """Rotated and absorbed queries, and the rows of both caches."""
    norm = p.rms_norm(x=x, gamma=gamma, eps=eps)
    tokens = p.token_scale(x=norm, dtype=how["scale_dtype"])
    whole = p.token_quantised(x=norm, scale=tokens, dtype=how["scale_dtype"])
    low, line = (
        layer(p, whole, weight, scale, tokens, how["layer_dtype"], how["fixed"])
        for weight, scale in ((dq, dq_scale), (dkv, dkv_scale))
    )
    rotated, absorbed, *_ = queries(
        p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first, dtype_q, how
    )
    kv = rows(p, line, gamma_cq, gamma_ckv, eps_ckv, cos, sin, split, end, dtype_kv, how["source"])
    return (rotated, absorbed), kv


class Preprocess(Rule):
    """What the rules of whole fronts share."""

    def beside(self) -> frozenset[str]:
        """The attention that reads absorbed queries."""
        return frozenset({"paged_latent_attention", "latent_attention_atb", "latent_attention"})

    def reference(
        self, x: Tensor, gamma: Tensor, dq: Tensor, uq: Tensor, up: Tensor, dkv: Tensor, gamma_cq: Tensor,
        gamma_ckv: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The meaning without rotation or quantisation: absorbed queries [B, N, S, C], their latent, rows [B, S, C]."""
        h = torch.nn.functional.rms_norm(x, gamma.shape, gamma, calls.EPSILON)
        return MlaProlog().reference(h, dq, uq, up, dkv, gamma_cq, gamma_ckv)

    def guard(
        self, x: Any, up: Any, dkv: Any, width: int, begin: int, first: int, split: int, end: int, kv_cache: Any,
        slots: Any, line: Any, eps: float, eps_cq: float, eps_ckv: float,
    ):  # fmt: skip
        """As for `MlaProlog`; and what the kernel takes no argument for."""
        of_heads(up, dkv, width, begin, first, split, end)
        calls.epsilons(eps, eps_cq, eps_ckv)
        latent_calls.of_pages(kv_cache, slots, line)


@dataclass(frozen=True)
class MlaPreprocess(Preprocess):
    """The whole front of latent attention in whole numbers, up to both caches."""

    @pattern
    def written(
        self, p, x=tensor("*B He"), gamma=tensor("He"), dq=tensor("Hcq He"), dq_scale=tensor("Hcq"),
        uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"), up=tensor("N D Hckv"), dkv=tensor("Nk He"), dkv_scale=tensor("Nk"),
        gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*P"), kr_cache=tensor("*Q"), slots=tensor("Rows", optional=True), eps=scalar(),
        eps_cq=scalar(), eps_ckv=scalar(), width=attribute(), begin=attribute(), first=attribute(), split=attribute(),
        end=attribute(), heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(),
        scale_dtype=attribute(), layer_dtype=attribute(), source=attribute(), line=attribute(),
    ):  # fmt: skip
        """Rows of all pages by their number, or by a block and a place in it; whole, or in lines of NZ."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed, source=source)
        q, kv = front(
            p, x, gamma, eps, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, eps_cq, eps_ckv,
            cos, sin, width, begin, first, split, end, heads_first, dtype_q, dtype_kv, how,
        )  # fmt: skip
        return *q, *latent_calls.written(p, (kv_cache, kr_cache), kv, slots, line)

    @lowering
    def run(self, x, gamma, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, cos, sin, source,
            heads_first, kv_cache, kr_cache, slots, line):  # fmt: skip
        """One call, that writes to the pages and to fresh memory."""
        weights, scales = calls.joined((dq, dkv, uq), (dq_scale, dkv_scale, uq_scale), up, cos, source)
        betas = (torch.zeros_like(gamma), torch.zeros_like(gamma_cq))
        return calls.called(
            x, (gamma, gamma_cq, gamma_ckv), betas, weights, scales, up, (cos, sin), (kv_cache, kr_cache), slots,
            heads_first, "krope_ctkv" if line is None else "nzcache", quant_mode="per_token_quant_symm",
        )  # fmt: skip
