"""The operators that the pass emits: operator name -> contract and plain decomposition."""

from __future__ import annotations

from fusion.operators.contract import CHIPS, HOST, LOWERINGS, Limit, Operator
from fusion.operators.legality import refusal
from fusion.operators.library import OPERATORS, Origin, decompositions, ensure, operator_of

__all__ = [
    "CHIPS",
    "HOST",
    "LOWERINGS",
    "OPERATORS",
    "Limit",
    "Operator",
    "Origin",
    "decompositions",
    "ensure",
    "operator_of",
    "refusal",
]
