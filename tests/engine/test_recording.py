"""What is recorded of an operator is found again for equal inputs alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.recording import frozen


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, 1.0),
        (1, True),
        (complex(0.0, 0.0), complex(0.0, -0.0)),
        (slice(0, 4), slice(0, 4, 2)),
        (slice(0.0), slice(-0.0)),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        ([1, [2]], [1, [2.0]]),
        ({"alpha": 1}, {"beta": 1}),
    ],
)
def test_calls_that_may_differ_are_told_apart(one: Any, other: Any):
    assert frozen(one) != frozen(other)


@pytest.mark.parametrize(
    "given",
    [float("nan"), [slice(None, 2), 1.5], {"b": torch.zeros(2, 3), "a": None}, (torch.float32, torch.device("cpu"))],
)
def test_equal_calls_are_equal(given: Any):
    again = {name: given[name] for name in reversed(given)} if isinstance(given, dict) else given
    assert frozen(again) == frozen(given)
    assert hash(frozen(again)) == hash(frozen(given))
