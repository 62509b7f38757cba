"""How tensors in the layouts of attention are read: by sizes alone, and from pages."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion.operators.layouts import LAYOUTS, heads_first, paged_heads, sizes_of

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


@pytest.mark.parametrize("shape", [(9, 4, 12), (9, 3, 4, 4), (9, 3, 2, 4, 2)], ids=["flat", "heads", "NZ"])
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_pages_lie_as_their_fakes_say_whatever_the_order_of_the_table(shape: tuple[int, ...], layout: str):
    def read() -> torch.Tensor:
        return paged_heads(torch.zeros(shape), layout, 3, torch.zeros(3, 2, dtype=torch.int32).t())

    with FakeTensorMode():
        fake = read()
    assert (fake.shape, fake.stride()) == (read().shape, read().stride())
