"""Segments of packed tokens, given by segment ids that never decrease."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_ends(ids: Tensor, segments: int) -> Tensor:
    """Return the end of each of `segments` segments, int64 [segments], from the segment id of each token, `ids`.

    A segment ends behind the tokens with its id or a lower one, also if the segment is empty.
    """
    return (ids.reshape(-1, 1) <= torch.arange(segments, device=ids.device)).sum(0)
