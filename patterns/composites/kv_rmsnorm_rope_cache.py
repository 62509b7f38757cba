"""The latent line of multi-head latent attention, from its projection to both caches, in one operator.

    [.., c, r] = kv      ckv_cache[position] = s norm(c)      k_cache[position] = rope(r)

*Matches* the norm of the latent lanes, the rotation of the lanes behind them from pairs to halves, and the writes of
both, to consecutive positions of contiguous caches or by slot to pages (DeepSeek-V2, 2024). *Replaces with*
`npu_kv_rmsnorm_rope_cache_v2`; the caches keep their layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.latent.terms import rotated_lanes
from patterns.primitives import latent_calls


def rows(p, kv, gamma, eps, factor, cos, sin, begin, split, end, dtype):
    """The rows of both caches, from one projection; the latent may be multiplied by a number."""
    norm = p.rms_norm(x=p.lanes(p.reshaped(kv), begin, split), gamma=gamma, eps=eps)
    return p.maybe_scaled(norm, factor), rotated_lanes(p, p.lanes(p.reshaped(kv), split, end), cos, sin, dtype, kv)


def called(
    kv: Tensor, gamma: Tensor, eps: float, factor: float, cos: Tensor, sin: Tensor, index: Tensor,
    caches: tuple[Tensor, Tensor], **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rotated keys and latents [B, 1, S, ..] of lines [B, S, W], and their caches, with tables [B or 1, S or 1, Dr]."""
    tables = [latent_calls.per_token(each, *kv.shape[:2]).unsqueeze(1).contiguous() for each in (cos, sin)]
    return torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional(
        kv.unsqueeze(1).contiguous(),
        gamma if factor == 1 else gamma * factor,
        *tables,
        index,
        *caches,
        epsilon=eps,
        **how,
    )


def paged(
    kv: Tensor, gamma: Tensor, eps: float, factor: float, cos: Tensor, sin: Tensor, lanes: slice, slots: Tensor,
    caches: tuple[Tensor, Tensor], line: Any = None, **how: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Rotated keys and latents [T, 1, 1, ..], and both caches, lines going to slots [T] of all pages."""
    lead = kv.shape[:-1] if kv.dim() == 3 else (1, slots.shape[0])
    cos, sin = (latent_calls.per_token(each, *lead).reshape(-1, 1, each.shape[-1]) for each in (cos, sin))
    lines = kv[..., lanes].reshape(slots.shape[0], 1, -1)
    pages = (latent_calls.in_rows(caches[1], line), latent_calls.in_rows(caches[0], line))
    mode = "PA_BNSD" if line is None else "PA_NZ"
    return called(lines, gamma, eps, factor, cos, sin, slots.long(), pages, cache_mode=mode, **how)


def positions(start: Tensor, tokens: Tensor, size: Any) -> Tensor:
    """Where `tokens` [B, S, ..] go in their sequences, [B, S]; -1 for what is beyond the end."""
    first = start.reshape(-1, 1).long().expand(tokens.shape[0], 1)
    index = first + torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(index < size, index, -1)


class _Line(Rule):
    """What both rules share."""

    def reference(self, kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The rows: latents [*B, C] and, behind the lanes of kv [*B, C + Dr] that they are, rotated keys [*B, Dr]."""
        latent, rope = kv.split((gamma.shape[0], cos.shape[-1]), dim=-1)
        low, high = rope[..., ::2], rope[..., 1::2]
        turned = torch.cat((low, high), dim=-1) * cos + torch.cat((-high, low), dim=-1) * sin
        return torch.nn.functional.rms_norm(latent, gamma.shape, gamma, eps), turned


@dataclass(frozen=True)
class KvRmsnormRopeCache(_Line):
    """Both writes."""

    @pattern
    def written(
        self, p, kv=tensor("*B W"), gamma=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*C Hckv"), kr_cache=tensor("*C Dr"), start=tensor("*S"), eps=scalar(), factor=scalar(),
        begin=attribute(), split=attribute(), end=attribute(), dtype=attribute(), axis=attribute(),
    ):  # fmt: skip
        """Rows go to consecutive positions of every sequence."""
        lines = rows(p, kv, gamma, eps, factor, cos, sin, begin, split, end, dtype)
        caches = zip((kv_cache, kr_cache), lines, strict=True)
        return tuple(p.write(cache=c, rows=p.reshaped(row), start=start, axis=axis) for c, row in caches)

    @pattern
    def by_slot(
        self, p, kv=tensor("*B W"), gamma=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*C"), kr_cache=tensor("*D"), slots=tensor("R", optional=True), eps=scalar(), factor=scalar(),
        begin=attribute(), split=attribute(), end=attribute(), dtype=attribute(), line=attribute(),
    ):  # fmt: skip
        """Rows go to slots of all pages, which hold them whole or in lines of NZ."""
        new = rows(p, kv, gamma, eps, factor, cos, sin, begin, split, end, dtype)
        return tuple(latent_calls.written(p, (kv_cache, kr_cache), new, slots, line))

    def guard(self, kv: Any, slots: Any, kv_cache: Any, start: Any, axis: int, line: Any):
        """How the tokens and the caches are laid out."""
        if start is None:
            latent_calls.of_pages(kv_cache, slots, line)
            return
        require(len(kv.shape) == 3, "the tokens of all sequences are packed")
        written = latent_calls.sequences(kv_cache, start, axis)
        require(kv.shape[0] == written, "the caches hold other sequences than the tokens")

    @lowering
    def by_position(self, kv, gamma, eps, factor, cos, sin, begin, end, kv_cache, kr_cache, start, slots, axis):
        """One call, into sequences that lie one behind the other."""
        require(slots is None, "the rows go to pages")
        batch = kv_cache.shape[0] if axis else 1
        shapes = [(batch, 1, each.shape[axis], each.shape[-1]) for each in (kr_cache, kv_cache)]
        caches = [
            latent_calls.of_one_head(each, axis).reshape(shape)
            for each, shape in zip((kr_cache, kv_cache), shapes, strict=True)
        ]
        lines = kv[..., begin:end]
        index = positions(start, lines, kv_cache.shape[axis])
        _, _, kr, latents = called(
            lines, gamma, eps, factor, cos, sin, index, (caches[0], caches[1]), cache_mode="Norm"
        )
        return latents.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)

    @lowering
    def by_page(self, kv, gamma, eps, factor, cos, sin, begin, end, kv_cache, kr_cache, start, slots, axis, line):
        """One call, into pages, which may be those of a contiguous cache of more sequences than there are tokens of."""
        caches = (kv_cache, kr_cache)
        if slots is None:
            slots = latent_calls.slots(start, kv.shape[0], kv.shape[1], kv_cache.shape[axis], kv.device).flatten()
            caches = (latent_calls.pages(kv_cache, axis), latent_calls.pages(kr_cache, axis))
        _, _, kr, latents = paged(kv, gamma, eps, factor, cos, sin, slice(begin, end), slots, caches, line)
        return latents.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)


@dataclass(frozen=True)
class KvRmsnormRopeCacheRows(_Line):
    """Both writes to pages, and the rows themselves, which a prompt attends to."""

    @pattern
    def by_slot(
        self, p, kv=tensor("*B W"), gamma=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*C"), kr_cache=tensor("*D"), slots=tensor("R", optional=True), eps=scalar(), factor=scalar(),
        begin=attribute(), split=attribute(), end=attribute(), dtype=attribute(), line=attribute(),
    ):  # fmt: skip
        """Rows go to slots of all pages, which hold them whole or in lines of NZ."""
        new = rows(p, kv, gamma, eps, factor, cos, sin, begin, split, end, dtype)
        return *new, *latent_calls.written(p, (kv_cache, kr_cache), new, slots, line)

    def guard(self, kv_cache: Any, slots: Any, line: Any):
        """How the pages hold their rows."""
        latent_calls.of_pages(kv_cache, slots, line)

    @lowering
    def by_page(self, kv, gamma, eps, factor, cos, sin, begin, split, end, kv_cache, kr_cache, slots, line):
        """One call."""
        rope, latent, kr, latents = paged(
            kv, gamma, eps, factor, cos, sin, slice(begin, end), slots, (kv_cache, kr_cache), line, is_output_kv=True
        )
        found = latent.reshape(*kv.shape[:-1], split - begin), rope.reshape(*kv.shape[:-1], end - split)
        return *found, latents.reshape(kv_cache.shape), kr.reshape(kr_cache.shape)
