"""Facts about the inputs of a graph that the graph itself does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx.immutable_collections import immutable_dict

KINDS = ("causal", "padding", "window:n")
"""Kinds of attention masks that can be assumed; n is a positive number of keys."""
ONES = ":ones"
"""Suffix of the kind of a float mask of 0 and 1: 1 where a key is visible, which an additive mask has as 0."""
LOWERED = ":lowered"
"""Suffix of the kind of a padding mask that may mask all keys of a query: a float mask by finite numbers, not only by
-inf, and a mask [B, T] all keys of a sequence."""
FORMATS = ("ND", "FRACTAL_NZ")
"""Storage formats of a tensor, without and with blocks: see `fusion.inputs.nz_format`."""


@dataclass(frozen=True)
class Band:
    """A matrix [R, C] of two numbers, one of them in a diagonal band low ≤ j − i ≤ high.

    Attributes:
        low: the least j − i in the band; None where the band includes the lower left corner.
        high: the largest j - i in the band; None where the band includes the upper right corner.
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
    """Facts from the caller of the pass; inputs have the names of the placeholders of the graph.

    Attributes:
        parameters: inputs that hold Parameters of the model: computations from them alone are prepared once.
        assumed: kind of mask of an input that the user declares, to be checked at every call: {"arg7_1": "causal"};
            with `ONES` or `LOWERED` appended, {"arg7_1": "causal:ones"}, for floats that the graph uses as 0 and 1.
        fractal: for each input that may be in the storage format FRACTAL_NZ, True if it is; True as well where nothing
            can tell. Checked at every call.
        bands: the band in each buffer that was one when the model was compiled (`fusion.inputs.mask_buffers`); checked
            at every call.
        arguments: path of an input in the arguments of the compiled function, {"arg7_1":
            "attention_mask.full_attention"}: the name for the option `assume`.
        strides: strides of each result in the uncompiled model, None where they are not known; empty if none is known.
            A functional graph may have others: a result computed from a cache that is written in place has the strides
            of a copy of that cache.
        extensible: True if the graph may be given further inputs even if none of its own holds a Parameter.
        wrapped: names of the Parameters that wrap other tensors: nothing is prepared from these.
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
        """Return True if prepared tensors can be passed to the graph."""
        return self.extensible or bool(self.parameters)

    def assumption(self, name: str) -> tuple[str, str | Band]:
        """Return the path of an input in the arguments, and its assumed kind of mask, band or storage format."""
        known = self.assumed.get(name) or self.bands.get(name) or FORMATS[self.fractal[name]]
        return self.arguments.get(name, name), known


def plain(kind: str) -> str:
    """Return `kind` as the user declares it, without `ONES` and `LOWERED`."""
    return kind.removesuffix(ONES).removesuffix(LOWERED)


def window(kind: str) -> int | None:
    """Return the keys that each query sees at most, its own among them: n of "window:n", None for any other kind."""
    match = re.fullmatch(r"window:0*([1-9][0-9]*)", plain(kind))
    return int(match[1]) if match else None
