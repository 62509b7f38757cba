"""How tensors in the layouts of attention are read: by sizes alone."""

from __future__ import annotations

import pytest
import torch

from fusion.operators.attention.layouts import LAYOUTS, heads_first, sizes_of

SHAPES = {
    "BSH": (2, 5, 12),
    "SBH": (5, 2, 12),
    "BSND": (2, 5, 3, 4),
    "BNSD": (2, 3, 5, 4),
    "TND": (5, 3, 4),
    "NTD": (3, 5, 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_are_those_of_heads_first(layout: str):
    x = torch.empty(SHAPES[LAYOUTS[layout][0]])
    assert sizes_of(x, layout, 3) == tuple(heads_first(x, layout, 3).shape)
