"""Every entry that stands with its domain: norms, residual adds, rotations, gates, caches; and what resembles them."""

from __future__ import annotations

from tests.cache import cache_write, lookalikes_cache_write
from tests.linear import (
    clipped_swiglu,
    clipped_swiglu_projections,
    geglu,
    lookalikes_swiglu,
    swiglu,
    swiglu_projections,
)
from tests.moe import expert_gating, expert_routing
from tests.norm import (
    add_layer_norm,
    add_rms_norm,
    encoded_norm,
    layer_norm,
    lookalikes_norm,
    lookalikes_rms_norm,
    rms_norm,
)
from tests.quant import quantisation, weight_only
from tests.rotary import (
    lookalikes_rope,
    rope_half,
    rope_half_partial,
    rope_interleaved,
    rope_interleaved_to_half,
    rope_signs,
)

from .base import LookAlike, Spelling

SPELLINGS: tuple[Spelling, ...] = (
    *rms_norm.SPELLINGS,
    *layer_norm.SPELLINGS,
    *add_rms_norm.SPELLINGS,
    *add_layer_norm.SPELLINGS,
    *encoded_norm.SPELLINGS,
    *rope_half.SPELLINGS,
    *rope_half_partial.SPELLINGS,
    *rope_signs.SPELLINGS,
    *rope_interleaved.SPELLINGS,
    *rope_interleaved_to_half.SPELLINGS,
    *swiglu.SPELLINGS,
    *swiglu_projections.SPELLINGS,
    *geglu.SPELLINGS,
    *clipped_swiglu.SPELLINGS,
    *clipped_swiglu_projections.SPELLINGS,
    *expert_routing.SPELLINGS,
    *expert_gating.SPELLINGS,
    *cache_write.SPELLINGS,
    *quantisation.SPELLINGS,
    *weight_only.SPELLINGS,
)
LOOKALIKES: tuple[LookAlike, ...] = (
    *lookalikes_rms_norm.LOOKALIKES,
    *lookalikes_norm.LOOKALIKES,
    *add_layer_norm.LOOKALIKES,
    *encoded_norm.LOOKALIKES,
    *lookalikes_rope.LOOKALIKES,
    *lookalikes_swiglu.LOOKALIKES,
    *swiglu_projections.LOOKALIKES,
    *geglu.LOOKALIKES,
    *clipped_swiglu.LOOKALIKES,
    *clipped_swiglu_projections.LOOKALIKES,
    *expert_routing.LOOKALIKES,
    *expert_gating.LOOKALIKES,
    *lookalikes_cache_write.LOOKALIKES,
    *quantisation.LOOKALIKES,
    *weight_only.LOOKALIKES,
)
