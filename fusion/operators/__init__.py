"""Operators that the pass emits: schema, decomposition into plain aten, and limits per chip, by qualified name."""

from __future__ import annotations

from fusion.operators.legality import refusal, unchecked
from fusion.operators.limits import CHIPS, HOST, LOWERINGS, Limit
from fusion.operators.operator import Operator
from fusion.operators.packages import PACKAGES, Package, package_of
from fusion.operators.registration import OPERATORS, Origin, decompositions, ensure, operator_of, provide

__all__ = [
    "CHIPS",
    "HOST",
    "LOWERINGS",
    "OPERATORS",
    "PACKAGES",
    "Limit",
    "Operator",
    "Origin",
    "Package",
    "decompositions",
    "ensure",
    "operator_of",
    "package_of",
    "provide",
    "refusal",
    "unchecked",
]
