"""The k largest of a row: values "largest" and places "largest_index", which share x and k.

Sorted or not: where a model asks for no order, descending is one of those that it may get. Which of equal values are
chosen, and in what order they stand, torch leaves open as well.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.graph import Algebra, Value
from fusion.stages.canonicalise.translate import Out, Translated, translates


@translates("aten.topk.default")
def _topk(
    a: Algebra, out: Out, x: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Translated:
    if not isinstance(k, int) or not largest or not x.rank or dim % x.rank != x.rank - 1:
        return None
    shape = (*x.shape[:-1], k)
    return a.make("largest", (x,), (k,), shape, x.dtype), a.make("largest_index", (x,), (k,), shape, torch.int64)
