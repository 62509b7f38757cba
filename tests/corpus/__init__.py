"""How people write norms, residual adds, rotary embeddings, gates and caches; what resembles them."""

from __future__ import annotations

from . import (
    add_rms_norm,
    cache_write,
    expert_routing,
    layer_norm,
    lookalikes,
    quantisation,
    rms_norm,
    rope_half,
    rope_half_partial,
    rope_interleaved,
    rope_interleaved_to_half,
    swiglu,
    swiglu_projections,
)
from .base import LookAlike, Spelling

SPELLINGS: tuple[Spelling, ...] = (
    *rms_norm.SPELLINGS,
    *layer_norm.SPELLINGS,
    *add_rms_norm.SPELLINGS,
    *rope_half.SPELLINGS,
    *rope_half_partial.SPELLINGS,
    *rope_interleaved.SPELLINGS,
    *rope_interleaved_to_half.SPELLINGS,
    *swiglu.SPELLINGS,
    *swiglu_projections.SPELLINGS,
    *expert_routing.SPELLINGS,
    *cache_write.SPELLINGS,
    *quantisation.SPELLINGS,
)
LOOKALIKES: tuple[LookAlike, ...] = lookalikes.LOOKALIKES

__all__ = ["LOOKALIKES", "SPELLINGS", "LookAlike", "Spelling"]
