"""Facts: what is known of a graph's inputs beyond what the graph itself shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx.immutable_collections import immutable_dict

KINDS = ("causal", "padding", "window:n")
"""What can be assumed of an attention mask; n is a positive number of keys."""
ONES = ":ones"
"""Ends the kind of a float mask of 0 and 1: 1 where a key is seen, and not 0, as where the mask is added to scores."""
LOWERED = ":lowered"
"""Ends the kind of a float mask of padding that may hide all keys of a query by finite numbers, not by -inf alone."""
FORMATS = ("ND", "FRACTAL_NZ")
"""Storage formats of a tensor, without and with blocks: see `fusion.inputs.nz_format`."""


@dataclass(frozen=True)
class Band:
    """A matrix of two numbers.

    Attributes:
        low: the least j − i of what lies in the band; None where it reaches every corner below.
        high: the largest; None where it reaches every corner above.
        inside: the number in the band.
        outside: the number elsewhere.
    """

    low: int | None
    high: int | None
    inside: bool | float
    outside: bool | float

    def __str__(self) -> str:
        low, high = ("" if self.low is None else f"{self.low} <= ", "" if self.high is None else f" <= {self.high}")
        return f"{self.inside} where {low}column - row{high}, else {self.outside}"


@dataclass(frozen=True)
class Facts:
    """Known by whoever hands the graph over; inputs are named as the graph's placeholders are.

    Attributes:
        parameters: inputs that hold Parameters of the model: what is computed from them alone is prepared once.
        assumed: what the user says of an input, to be checked at every call, e.g. {"arg7_1": "causal"}; with `ONES`
            or `LOWERED` behind it, e.g. {"arg7_1": "causal:ones"}, of floats that the graph uses as 0 and 1.
        fractal: of each input that may lie in the storage format FRACTAL_NZ, whether it does; where nothing can tell,
            it is supposed to, and to be checked at every call.
        bands: the band in each buffer that holds one when the model is compiled (`fusion.inputs.mask_buffers`); checked
            at every call.
        arguments: where an input is found in the arguments of the compiled function, e.g. {"arg7_1":
            "attention_mask.full_attention"}: the name by which something can be assumed of it.
        strides: how each result of the graph lies when the model runs without a compiler, None where it is not known;
            empty if it is known of none. A functional graph may say otherwise: what it computes from a cache that is
            written in place lies like a copy of that cache.
        extensible: whether the graph may be given further inputs even if none of its own holds a Parameter.
        wrapped: where in the model the Parameters are that wrap other tensors: nothing is prepared from these.
    """

    parameters: frozenset[str] = frozenset()
    assumed: Mapping[str, str] = immutable_dict()
    fractal: Mapping[str, bool] = immutable_dict()
    bands: Mapping[str, Band] = immutable_dict()
    arguments: Mapping[str, str] = immutable_dict()
    strides: tuple[tuple[Any, ...] | None, ...] = ()
    extensible: bool = False
    wrapped: tuple[str, ...] = ()

    @property
    def prepares(self) -> bool:
        """Whether what is prepared can be handed to the graph."""
        return self.extensible or bool(self.parameters)

    def assumption(self, name: str) -> tuple[str, str | Band]:
        """Where an input is found in the arguments, and what is assumed of it."""
        known = self.assumed.get(name) or self.bands.get(name) or FORMATS[self.fractal[name]]
        return self.arguments.get(name, name), known


def plain(kind: str) -> str:
    """Return a kind as the user gives it, without `ONES` and `LOWERED`."""
    return kind.removesuffix(ONES).removesuffix(LOWERED)


def window(kind: str) -> int | None:
    """Return how many keys each query sees at most, its own among them: n of "window:n", None for any other kind."""
    found = re.fullmatch(r"window:0*([1-9][0-9]*)", plain(kind))
    return int(found[1]) if found else None
