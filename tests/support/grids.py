"""Grids of spellings, levels and dtypes, as parameters of tests that run a share of them at each push."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from fusion.testing import DTYPES, LEVELS


def grid(entries: Mapping[str, Any]) -> list[Any]:
    """Return parameters (entry, level, dtype): every entry of `entries` at every level in every dtype, by name."""
    return [
        pytest.param(entry, level, dtype, id=f"{name}-{level}-{dtype}")
        for (name, entry), level, dtype in product(entries.items(), LEVELS, DTYPES)
    ]


def named(forms: Any) -> dict[str, Any]:
    """Return name -> form for functions or classes."""
    return {each.__name__: each for each in forms}
