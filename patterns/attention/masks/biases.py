"""Facet of attention: a bias of each head, added to the scaled scores besides the mask, or none.

softmax(scale · q kᵀ + bias, masked) v        bias [B or 1, N, S, T], in the dtype of the queries
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion import Group, attribute, require, tensor

_EMPTY = {"zero": 0.0, "nan": torch.nan}


@dataclass(frozen=True)
class Bias(Group):
    """A bias that is added to the scaled scores.

    Attributes:
        values: the bias [B or 1, N, S, T]; None for no bias.
        empty: "zero" or "nan", the result of a query all of whose keys are hidden by -inf of the bias or by a mask;
            None if the bias is finite.
    """

    values: Any = tensor("Bb N S T", optional=True)
    empty: Any = attribute()

    def captures(self) -> dict[str, Any]:
        """Return the captures of the bias, named as the readers name them."""
        return dict(bias=self.values, empty_bias=self.empty)

    def refuse(self, why: str) -> None:
        """Refuse any bias, for the reason `why`."""
        require(self.values is None, why)

    def refuse_with_mask(self, seen: Any, paged: bool) -> None:
        """Refuse a bias if the mask `seen` has queries without a visible key that give the mean of all values.

        The lowering sets such queries to 0 so that all their scores are equal, but the operator adds the bias to them.
        It does so where keys are `paged`, or the mask is given by a number of keys; else the mean is computed
        afterwards.
        """
        posed = seen.fully_masked_row == "mean" and (paged or seen.count is not None)
        require(
            self.values is None or not posed,
            "bias: beside it, a query without visible keys gives the mean of all values; "
            "npu_fused_infer_attention_score requires 0 or NaN there; hide keys by -inf, or show each query a "
            "key",
        )

    def arguments(self, keys: Any) -> dict[str, Any]:
        """Return `pse_shift`: the bias, padded to `keys` keys, with -inf clamped to the lowest finite number."""
        if self.values is None:
            return {}
        bias = self.values if self.empty is None else self.values.clamp(min=torch.finfo(self.values.dtype).min)
        room = keys - bias.shape[3]
        return dict(pse_shift=bias if room == 0 else pad(bias, (0, room)))

    def restored(self, y: Tensor, seen: Any) -> Tensor:
        """Set the rows of `y` [B, N, S, E] all of whose keys the bias or the mask `seen` hides to 0 or NaN, by
        `self.empty`.
        """
        if self.empty is None:
            return y
        shown = seen.mask is not None or seen.hides_nothing()
        require(
            shown,
            "bias: it may be -inf, and the mask beside it has no tensor; npu_fused_infer_attention_score "
            "requires a finite bias beside such a mask; give the bias finite numbers",
        )
        hidden = self.values == -torch.inf
        blind = (hidden if seen.mask is None else hidden | seen.mask).all(-1, keepdim=True)
        return y.masked_fill(blind, _EMPTY[self.empty])


UNBIASED = Bias(None, None)
