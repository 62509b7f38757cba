"""Facts: what is known of a graph's inputs beyond what the graph itself shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Facts:
    """Known by whoever hands the graph over; inputs are named as the graph's placeholders are.

    Attributes:
        parameters: inputs that hold Parameters of the model: what is computed from them alone is prepared once.
        assumed: what the user says of an input, to be checked at every call, e.g. {"arg7_1": "causal"}.
    """

    parameters: frozenset[str] = frozenset()
    assumed: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
