"""The operators that the pass emits: operator name -> contract and plain decomposition."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from fusion.errors import OperatorError
from fusion.operators.contract import CHIPS, HOST, LOWERINGS, Limit, Operator, refusal
from fusion.operators.library import OPERATORS, Origin, decompositions, ensure, operator_of

__all__ = [
    "CHIPS",
    "HOST",
    "LOWERINGS",
    "Limit",
    "Operator",
    "Origin",
    "decompositions",
    "ensure",
    "operator",
    "operator_of",
    "operators",
    "refusal",
]


def operators() -> Mapping[str, Operator]:
    """Every operator that the pass can emit, by qualified name (`npu::npu_rms_norm`)."""
    return OPERATORS


def operator(name: str) -> Operator:
    """The operator with a qualified name; `OperatorError` with the nearest names when there is none."""
    if name in OPERATORS:
        return OPERATORS[name]
    nearest = get_close_matches(name, OPERATORS, n=3, cutoff=0.4) or list(OPERATORS)
    raise OperatorError(f"looking up an operator: there is no {name!r}; did you mean {' or '.join(nearest)}?")
