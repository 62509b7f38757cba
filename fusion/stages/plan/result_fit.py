"""Compare what a plan gives with what it replaces: shape, dtype and, where fakes are unreliable, order in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fusion.graph import dims_of, is_dense
from fusion.graph.aliasing import memory_of
from fusion.language import Refused
from fusion.records import Match, Plan


def mismatch(match: Match, plan: Plan) -> Refused | None:
    """Return a refusal if `plan` gives another shape or dtype than `match`, or strides are unreliable; else None."""
    for result, fake in zip(match.results, plan.fakes, strict=True):
        if (dims_of(fake.shape), fake.dtype) != (result.shape, result.dtype):
            return Refused(
                "result: the rewrite gives {have}, the model has {want}; a rewrite requires the same; cast "
                "or reshape the result so in the model",
                {"have": f"{fake.dtype}{list(fake.shape)}", "want": f"{result.dtype}{list(result.shape)}"},
            )
    if has_unreliable_strides(match):
        return Refused(
            "result: its memory has the order of its indices, which is not that of its dims; a rewrite "
            "requires the same strides; make the indices contiguous",
            {},
        )
    return None


def has_unreliable_strides(match: Match) -> bool:
    """Return True if strides of the fakes of the results of `match` are unreliable."""
    return any(map(follows_index_strides, match.makers))


def follows_index_strides(node: fx.Node) -> bool:
    """Return True if the memory of `node` comes from `aten.index` with an index of permuted strides.

    Its real result follows the strides of the indices; torch's fake tensor does not.
    """
    made: Any = memory_of(node)
    if made.target is not torch.ops.aten.index.Tensor:
        return False
    return any(not is_in_order(each.meta["val"]) for each in made.args[1] if each is not None)


def is_in_order(val: torch.Tensor) -> bool:
    """Return True if the strides of `val` fall from dim to dim, dims of size 1 or stride 0 aside."""
    strides = [each for size, each in zip(dims_of(val.shape), dims_of(val.stride()), strict=True) if size != 1 and each]
    known = all(isinstance(each, int) for each in strides)
    return is_dense(val) or (known and strides == sorted(strides, reverse=True))
