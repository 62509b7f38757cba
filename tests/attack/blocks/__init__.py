"""The vocabulary: small pieces of plain torch, each in the many ways that people write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..writer import Writer
from . import attention, caches, norms, plumbing, rotary

Block = Callable[[Writer], None]
DOMAINS: Mapping[str, tuple[Block, ...]] = {
    "norms": norms.BLOCKS,
    "rotary": rotary.BLOCKS,
    "attention": attention.BLOCKS,
    "caches": caches.BLOCKS,
    "plumbing": plumbing.BLOCKS,
}
