"""The few numbers that a tensor consists of, each with the formula of where it stands."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from fusion.analysis.affine import Formula, disjunction, negation
from fusion.analysis.dtypes import held_number

MOST = 8  # different constants that a mask of floats may have


def of_truth(dtype: torch.dtype | None, formula: Formula) -> dict[float, Formula] | None:
    """1 where the formula holds, else 0."""
    return merged([(1, formula), (0, negation(formula))], dtype)


def merged(pairs: Iterable[tuple[float, Formula]], dtype: torch.dtype | None) -> dict[float, Formula] | None:
    """One formula for each number as the dtype holds it; NaN, as of 0 · ∞, is one of them."""
    found: dict[float, Formula] = {}
    for value, formula in pairs:
        if formula is False:
            continue
        kept = held_number(value, dtype)
        if kept is None:
            return None
        kept = math.nan if math.isnan(kept) else kept
        found[kept] = disjunction(found.get(kept, False), formula)
    return found if len(found) <= MOST else None
