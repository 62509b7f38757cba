"""Calls for which torch computes something of memory that it was not given, or ends the process: errors here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Defined(TorchFunctionMode):
    """What torch computes from memory that it was not given is an error."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, unless torch would read memory that it was not given.

        Attention of torch reads on behind values of fewer rows than keys; its products of groups leave rows that are in
        no group as they lie in memory; its int8 product reads on behind a matrix that is broadcast.
        """
        if func is F.scaled_dot_product_attention and args[1].shape[-2] != args[2].shape[-2]:
            raise ValueError("there are not as many as keys, so that")
        if func in (torch._grouped_mm, F.grouped_mm) and not _are_groups(args[0], (kwargs or {}).get("offs")):
            raise ValueError("the groups are not all rows in order")
        if func is torch._int_mm and any(0 in each.stride() and each.numel() for each in args):
            raise ValueError("a matrix of the int8 product is broadcast")
        return func(*args, **(kwargs or {}))


def _are_groups(x: Tensor, offs: Tensor | None) -> bool:
    """Return True if groups that end at `offs` are all rows of `x`, one group behind the other."""
    return offs is None or bool((offs.diff() >= 0).all() and offs[:1].ge(0).all() and (offs[-1:] == x.shape[0]).all())
