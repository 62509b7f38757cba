"""The vocabulary: small pieces of plain torch, each in the many ways that people write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..writer import Writer
from . import (
    attention,
    caches,
    experts,
    grouped_lines,
    int8,
    int8_experts,
    latent,
    norms,
    pages,
    plumbing,
    prologs,
    quant,
    rotary,
    segments,
    sparse,
)

Block = Callable[[Writer], None]
DOMAINS: Mapping[str, tuple[Block, ...]] = {
    "norms": norms.BLOCKS,
    "rotary": rotary.BLOCKS,
    "attention": attention.BLOCKS,
    "caches": caches.BLOCKS,
    "latent": latent.BLOCKS,
    "pages": pages.BLOCKS,
    "prologs": prologs.BLOCKS,
    "sparse": sparse.BLOCKS,
    "experts": experts.BLOCKS,
    "int8": int8.BLOCKS,
    "int8 experts": int8_experts.BLOCKS,
    "lines": grouped_lines.BLOCKS,
    "segments": segments.BLOCKS,
    "quant": quant.BLOCKS,
    "plumbing": plumbing.BLOCKS,
}
