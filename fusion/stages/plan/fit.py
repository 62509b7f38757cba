"""Whether a plan gives what it replaces: shape, dtype and, for results whose fakes do not tell it, order in memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fusion.graph import dims_of, is_dense
from fusion.graph.aliasing import memory_of
from fusion.language import Refused
from fusion.records import Match, Plan


def mismatch(match: Match, plan: Plan) -> Refused | None:
    """A plan must give exactly the shape and dtype of what it replaces."""
    for result, fake in zip(match.results, plan.fakes, strict=True):
        if (dims_of(fake.shape), fake.dtype) != (result.shape, result.dtype):
            return Refused(
                "it would give {have} where the model has {want}",
                {"have": f"{fake.dtype}{list(fake.shape)}", "want": f"{result.dtype}{list(result.shape)}"},
            )
    if lie_as_indices(match):
        return Refused("its result lies in memory as the indices do, which are not in the order of their dims", {})
    return None


def lie_as_indices(match: Match) -> bool:
    """Whether results of a match may lie otherwise than their fakes say."""
    return any(map(_lies_as_its_indices, match.makers))


def _lies_as_its_indices(node: fx.Node) -> bool:
    """Whether a result may lie otherwise than its fake says: torch's own are wrong for indices that lie otherwise."""
    made: Any = memory_of(node)
    if made.target is not torch.ops.aten.index.Tensor:
        return False
    return any(not _in_order(each.meta["val"]) for each in made.args[1] if each is not None)


def _in_order(val: torch.Tensor) -> bool:
    """Whether strides fall from dim to dim; dims of one place, or of one entry, have none."""
    strides = [each for size, each in zip(dims_of(val.shape), dims_of(val.stride()), strict=True) if size != 1 and each]
    known = all(isinstance(each, int) for each in strides)
    return is_dense(val) or (known and strides == sorted(strides, reverse=True))
