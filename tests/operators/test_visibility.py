"""What a query sees: which of the limits of a band count in which mode."""

from __future__ import annotations

import pytest
import torch

from fusion.operators.attention.visibility import Band, visible

QUERY, KEY = torch.rand(1, 1, 3, 4), torch.rand(1, 1, 5, 4)
SHOWN = torch.zeros(3, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("band", "counts"),
    [
        (Band(0, SHOWN, 1, 1), True),
        (Band(0, None, 1, 1), False),
        (Band(1, SHOWN, 1, 1), False),
        (Band(4, SHOWN, 1, 1), True),
    ],
)
def test_limits_count_beside_a_mask_in_mode_0_and_always_in_mode_4(band, counts):
    seen = visible(QUERY, KEY, (None, None), band, packed=False, table=None)
    hidden = seen.keys is not None and not bool(seen.keys.all())
    assert hidden == counts
