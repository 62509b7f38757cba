"""What a ring of attention can be told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sympy import Symbol

from fusion.language.rule import Refused
from patterns.attention.masks.visibility import Visibility
from patterns.extras.ring_mla import RingMla


@pytest.mark.parametrize("rows", [4, Symbol("rows", integer=True, positive=True)])
def test_a_ring_is_of_as_many_keys_as_are_known_before(rows: object):
    q, k, v = (SimpleNamespace(shape=(2, 3, rows, width)) for width in (24, 24, 16))
    seen = Visibility(None, None, None, None, "none", None, None, "zero")
    if rows == 4:
        RingMla().guard(q, k, v, seen)
        return
    with pytest.raises(Refused, match="are symbolic"):
        RingMla().guard(q, k, v, seen)
