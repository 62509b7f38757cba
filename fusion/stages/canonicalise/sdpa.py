"""Attention operators of aten, decomposed: softmax(scale · q kᵀ + mask) v, with the softmax in float32."""

from __future__ import annotations

import math

import torch

from fusion.graph import Algebra, Value
from fusion.graph.comparisons import compare, constant, positions, where
from fusion.graph.contractions import matmul, swapped
from fusion.graph.proof_steps import must, proven
from fusion.stages.canonicalise.translators import Out, Translated, translates


@translates("aten.scaled_dot_product_attention.default")
def attention(
    a: Algebra,
    out: Out,
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Translated:
    """Decompose attention of q [.., N, S, D], k [.., M, T, D], v [.., M, T, E]; rows that see no key give 0.

    Unproven where `k` and `v` differ in T: torch then ignores values, or reads beyond them.
    """
    must(not dropout and q.rank >= 3 and isinstance(q.shape[-1], int) and q.shape[-1])
    must(k.rank == v.rank and k.shape[-2] == v.shape[-2])
    if enable_gqa:
        k, v = _repeated(a, k, q), _repeated(a, v, q)
    scores = a.scale(proven(matmul(a, q, swapped(a, k))), 1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        rank = scores.rank
        mask = compare(a, "le", positions(a, scores.shape[-1], rank), positions(a, scores.shape[-2], rank, -2))
    if mask is not None:
        scores = proven(_masked(a, scores, mask))
    wide = torch.float64 if out.dtype is torch.float64 else torch.float32
    weights = a.softmax(a.cast(scores, wide), -1, "zero")
    return matmul(a, a.cast(weights, out.dtype), v)


def _masked(a: Algebra, scores: Value, mask: Value) -> Value | None:
    if mask.dtype is torch.bool:
        return where(a, mask, scores, constant(a, -math.inf, (), scores.dtype), scores.dtype)
    return a.add(scores, a.cast(mask, scores.dtype))


def _repeated(a: Algebra, kv: Value, q: Value) -> Value:
    """Repeat each head of `kv` for its group of query heads; return it as is where their number is no multiple."""
    heads, wanted = kv.shape[-3] if kv.rank > 2 else 0, q.shape[-3]
    if heads == wanted or not isinstance(heads, int) or not isinstance(wanted, int) or not heads or wanted % heads:
        return kv
    lead, rest = kv.shape[:-2], kv.shape[-2:]
    opened = a.expand(a.reshape(kv, (*lead, 1, *rest)), (*lead, wanted // heads, *rest))
    return a.reshape(opened, (*kv.shape[:-3], wanted, *rest))


@translates("aten._scaled_dot_product_flash_attention_for_cpu.default")
def _flash_for_cpu(
    a: Algebra, out: Out, q: Value, k: Value, v: Value, dropout: float = 0.0, is_causal: bool = False,
    *, attn_mask: Value | None = None, scale: float | None = None,
) -> Translated:  # fmt: skip
    y = attention(a, Out(q.shape, q.dtype), q, k, v, attn_mask, dropout, is_causal, scale=scale, enable_gqa=True)
    return (y, None) if isinstance(y, Value) else None
