"""The quantised prolog of latent attention over a cache whose rows are lines of bytes (see `mla_prolog_quantised`).

    line = [int8(norm(k) / s) | rope(k_r) | s]      s = max|norm(k)| / 127 of every 128 lanes, in float32

*Matches* what `mla_prolog_quantised` does, with the latent quantised tile by tile, joined as bytes with the rotated key
in bfloat16 and the scales, and written to pages. *Replaces with* `npu_mla_prolog_v3`, which quantises the latent before
it would be rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusion import attribute, lowering, pattern, require, scalar, tensor
from patterns.composites.mla_prolog import Prolog
from patterns.composites.mla_prolog_quantised import layer, prolog, queries, rows
from patterns.primitives import latent_calls

TILE = 128
"""Lanes of which the operator keeps a scale."""


def line(p, both, gammas, eps, cos, sin, parts, dtype, tile):
    """The line of bytes of a token; `both` projects x to it."""
    latent, rope = rows(p, both, gammas[0], gammas[1], eps, cos, sin, parts[0], parts[1], dtype)
    rope = p.reshaped(p.maybe_cast(p.reshaped(rope), to=torch.bfloat16))
    return p.byte_line(latent=p.reshaped(latent), rope=rope, tile=tile)


@dataclass(frozen=True)
class MlaPrologTiles(Prolog):
    """The prolog with the write of lines of bytes."""

    @pattern
    def heads_alone(
        self, p, x=tensor("*B He"), dq=tensor("Hcq He"), uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"),
        up=tensor("N D Hckv"), dkv=tensor("Nk He"), gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"),
        cos=tensor("T U Dr"), sin=tensor("T U Dr"), kv_cache=tensor("*P Line"), slots=tensor("Rows", optional=True),
        beside_q=tensor("*E", optional=True), beside_kv=tensor("*F", optional=True), eps_cq=scalar(), eps_ckv=scalar(),
        width=attribute(), begin=attribute(), first=attribute(), split=attribute(), end=attribute(),
        heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(), scale_dtype=attribute(),
        layer_dtype=attribute(), tile=attribute(),
    ):  # fmt: skip
        """The layer of the queries' heads is quantised."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed)
        low = p.linear(x=x, weight=dq, fixed=fixed, beside=beside_q)
        q = queries(p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first,
                    dtype_q, how)  # fmt: skip
        both = p.linear(x=x, weight=dkv, fixed=fixed, beside=beside_kv)
        new = line(p, both, (gamma_cq, gamma_ckv), eps_ckv, cos, sin, (split, end), dtype_kv, tile)
        return *q, p.write_pages(cache=kv_cache, rows=p.reshaped(new), slots=slots, line=None)

    @pattern
    def all_layers(
        self, p, x=tensor("*B He"), tokens=tensor("*B 1"), dq=tensor("Hcq He"), dq_scale=tensor("Hcq"),
        uq=tensor("Nq Hcq"), uq_scale=tensor("Nq"), up=tensor("N D Hckv"), dkv=tensor("Nk He"), dkv_scale=tensor("Nk"),
        gamma_cq=tensor("Hcq"), gamma_ckv=tensor("Hckv"), cos=tensor("T U Dr"), sin=tensor("T U Dr"),
        kv_cache=tensor("*P Line"), slots=tensor("Rows", optional=True), eps_cq=scalar(), eps_ckv=scalar(),
        width=attribute(), begin=attribute(), first=attribute(), split=attribute(), end=attribute(),
        heads_first=attribute(), dtype_q=attribute(), dtype_kv=attribute(), fixed=attribute(), scale_dtype=attribute(),
        layer_dtype=attribute(), tile=attribute(),
    ):  # fmt: skip
        """All three layers are quantised."""
        how = dict(scale_dtype=scale_dtype, layer_dtype=layer_dtype, fixed=fixed)
        low = layer(p, x, dq, dq_scale, tokens, layer_dtype, fixed)
        q = queries(p, low, uq, uq_scale, up, gamma_cq, eps_cq, cos, sin, width, begin, first, heads_first,
                    dtype_q, how)  # fmt: skip
        both = layer(p, x, dkv, dkv_scale, tokens, layer_dtype, fixed)
        new = line(p, both, (gamma_cq, gamma_ckv), eps_ckv, cos, sin, (split, end), dtype_kv, tile)
        return *q, p.write_pages(cache=kv_cache, rows=p.reshaped(new), slots=slots, line=None)

    def guard(
        self, x: Any, up: Any, dkv: Any, width: int, begin: int, first: int, split: int, end: int, kv_cache: Any,
        slots: Any, tile: int,
    ):  # fmt: skip
        """As for `MlaProlog`; what a line holds, and how the pages are laid out."""
        Prolog.guard(self, x, up, dkv, width, begin, first, split, end, None, None, 0)
        require(tile == TILE, "a line keeps a scale of every {tile} lanes, that of the operator of 128", tile=tile)
        latent_calls.of_pages(kv_cache, slots, None)

    @lowering
    def run(self, x, tokens, dq, dq_scale, uq, uq_scale, up, dkv, dkv_scale, gamma_cq, gamma_ckv, cos, sin, eps_cq,
            eps_ckv, heads_first, kv_cache, slots, scale_dtype):  # fmt: skip
        """One call; there is no cache of rotated keys."""
        pages = latent_calls.in_rows(kv_cache, None)
        none = torch.empty((*pages.shape[:-1], 0), dtype=gamma_ckv.dtype, device=x.device)
        *found, kv, _ = prolog(
            x, tokens, (dq, uq, dkv), (dq_scale, uq_scale, dkv_scale), up, (gamma_cq, gamma_ckv), cos, sin,
            (pages, none), heads_first, scale_dtype, rmsnorm_epsilon_cq=eps_cq,
            rmsnorm_epsilon_ckv=eps_ckv, cache_mode="PA_BSND", cache_index=slots.to(torch.int64).reshape(x.shape[:-1]),
            kv_cache_quant_mode=3, k_nope_clip_alpha=torch.ones(1, dtype=torch.float32, device=x.device),
            ckvkr_repo_mode=1, quant_scale_repo_mode=1, tile_size=TILE,
        )  # fmt: skip
        return *found, kv.reshape(kv_cache.shape)
