"""keys[slot // Size, slot % Size] = key; values[slot // Size, slot % Size] = value, in one call.

*Matches* two writes to pages [Block, Size, N, D] at the same slots. *Replaces with* atb's `_npu_reshape_and_cache`
where calls are launched one by one, with `npu_scatter_pa_kv_cache` for GE. Slots are never negative here: what counts
from the end has been made explicit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, tensor


@dataclass(frozen=True)
class PagedWrite(Rule):
    """New keys and values of a paged cache."""

    def reference(
        self, key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The meaning: caches [Block, Size, N, D|E], key [T, N, D], value [T, N, E], slots [T] of all pages."""
        key_cache, value_cache = key_cache.clone(), value_cache.clone()
        for cache, rows in ((key_cache, key), (value_cache, value)):
            cache.flatten(0, 1).index_copy_(0, slots, rows)
        return key_cache, value_cache

    @pattern
    def written(
        self, p, key_cache=tensor("Block Size N D"), key=tensor("T N D"), slots=tensor("T", optional=True),
        value_cache=tensor("Block Size N E"), value=tensor("T N E"), line=attribute(),
    ):  # fmt: skip
        """Rows of all pages by their number, or by a block and a place in it."""
        keys = p.write_pages(cache=key_cache, rows=key, slots=slots, line=line)
        return keys, p.write_pages(cache=value_cache, rows=value, slots=slots, line=line)

    def guard(self, slots: Any, line: Any):
        """Whole rows, by slots that are proven."""
        require(line is None, "the pages hold rows in lines")
        require(slots is not None, "the place is not proven to lie in its page: slot % Size is")

    @lowering
    def by_atb(self, key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor):
        """One call for both, of the transformer library."""
        _together(key_cache, value_cache)
        return torch.ops.atb._npu_reshape_and_cache.functional(key, value, key_cache, value_cache, slots.int())

    @lowering
    def run(self, key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor):
        """One call for both."""
        _together(key_cache, value_cache)
        write = torch.ops.npu.npu_scatter_pa_kv_cache_functional
        return write(key, value, key_cache, value_cache, slots, cache_mode="Norm")


def _together(*caches: Tensor) -> None:
    """Refuse caches whose memory has gaps or another order: a kernel finds a row by its slot alone."""
    require(all(each.is_contiguous() for each in caches), "the pages are not contiguous")
