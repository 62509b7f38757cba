"""The latent line of multi-head latent attention, quantised where it is written to pages (see `kv_rmsnorm_rope_cache`).

    [.., c, r] = kv      ckv_cache[slot] = int8(s norm(c) / a)      k_cache[slot] = int8(rope(r) / b), or rope(r)

*Matches* the norm and the rotation of lanes of one projection, the latent or both rows quantised by fixed scales, of
each channel or of all, and written to pages, or to pages in lines of NZ. *Replaces with*
`npu_kv_rmsnorm_rope_cache_v2`, which quantises both rows before they would be rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.composites.kv_rmsnorm_rope_cache import KvRmsnormRopeCache, paged, rows
from patterns.primitives import latent_calls
from patterns.primitives.whole_latent_calls import multipliers


@dataclass(frozen=True)
class KvRmsnormRopeCacheWhole(Rule):
    """Both writes, of which one or both take whole numbers."""

    def reference(self, kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The rows before they are quantised, as for `KvRmsnormRopeCache`."""
        return KvRmsnormRopeCache().reference(kv, gamma, cos, sin, eps)

    @pattern
    def both(
        self, p, kv=tensor("*B W"), gamma=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*C"), kr_cache=tensor("*D"), slots=tensor("R", optional=True),
        kv_scale=tensor("V", optional=True), kr_scale=tensor("K", optional=True), kv_by=scalar(), kr_by=scalar(),
        eps=scalar(), factor=scalar(), begin=attribute(), split=attribute(), end=attribute(), dtype=attribute(),
        line=attribute(),
    ):  # fmt: skip
        """The latent and the rotated key."""
        latent, rope = rows(p, kv, gamma, eps, factor, cos, sin, begin, split, end, dtype)
        latent = p.fixed_quantised(x=p.reshaped(latent), scale=kv_scale, by=kv_by)
        rope = p.fixed_quantised(x=p.reshaped(rope), scale=kr_scale, by=kr_by)
        return tuple(latent_calls.written(p, (kv_cache, kr_cache), (latent, rope), slots, line))

    @pattern
    def latent_alone(
        self, p, kv=tensor("*B W"), gamma=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*C"), kr_cache=tensor("*D"), slots=tensor("R", optional=True),
        kv_scale=tensor("V", optional=True), kv_by=scalar(), eps=scalar(), factor=scalar(), begin=attribute(),
        split=attribute(), end=attribute(), dtype=attribute(), line=attribute(), kr_line=attribute(),
    ):  # fmt: skip
        """The latent, beside a rotated key in floats."""
        latent, rope = rows(p, kv, gamma, eps, factor, cos, sin, begin, split, end, dtype)
        latent = p.fixed_quantised(x=p.reshaped(latent), scale=kv_scale, by=kv_by)
        return tuple(latent_calls.written(p, (kv_cache, kr_cache), (latent, rope), slots, line, kr_line))

    def guard(self, kv_cache: Any, slots: Any, line: Any, kr_line: Any, kr_by: Any):
        """How the pages hold their rows."""
        latent_calls.of_pages(kv_cache, slots, line, latent_calls.WHOLE_LINE)
        if kr_by is None:
            latent_calls.of_line(kr_line)
            require((line is None) == (kr_line is None), "one cache holds rows in lines, the other whole ones")

    @lowering
    def by_page(self, kv, gamma, eps, factor, cos, sin, begin, split, end, kv_cache, kr_cache, slots, line, kv_scale,
                kv_by, kr_scale, kr_by):  # fmt: skip
        """One call."""
        of_rope = None if kr_by is None else multipliers(kr_scale, kr_by, end - split, kv.device)
        _, _, kr, latents = paged(
            kv, gamma, eps, factor, cos, sin, slice(begin, end), slots, (kv_cache, kr_cache), line,
            k_rope_scale=of_rope, c_kv_scale=multipliers(kv_scale, kv_by, split - begin, kv.device),
        )  # fmt: skip
        return latents.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)
