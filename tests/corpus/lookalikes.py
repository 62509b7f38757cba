"""Plausible mistakes and different functions that resemble a family."""

from __future__ import annotations

from . import (
    expert_routing,
    lookalikes_cache_write,
    lookalikes_norm,
    lookalikes_rms_norm,
    lookalikes_rope,
    lookalikes_swiglu,
    quantisation,
    swiglu_projections,
)

LOOKALIKES = (
    *lookalikes_rms_norm.LOOKALIKES,
    *lookalikes_norm.LOOKALIKES,
    *lookalikes_rope.LOOKALIKES,
    *lookalikes_swiglu.LOOKALIKES,
    *swiglu_projections.LOOKALIKES,
    *expert_routing.LOOKALIKES,
    *lookalikes_cache_write.LOOKALIKES,
    *quantisation.LOOKALIKES,
)
