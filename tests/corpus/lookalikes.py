"""Plausible mistakes and different functions that resemble a family."""

from __future__ import annotations

from . import lookalikes_cache_write, lookalikes_norm, lookalikes_rms_norm, lookalikes_rope, lookalikes_swiglu

LOOKALIKES = (
    *lookalikes_rms_norm.LOOKALIKES,
    *lookalikes_norm.LOOKALIKES,
    *lookalikes_rope.LOOKALIKES,
    *lookalikes_swiglu.LOOKALIKES,
    *lookalikes_cache_write.LOOKALIKES,
)
