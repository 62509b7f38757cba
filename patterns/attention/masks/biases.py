"""The facet of attention that says what is added to the scaled scores beside a mask: nothing, or a bias of each head.

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
    """What is added.

    Attributes:
        values: the bias; None where there is none.
        empty: "zero" or "nan", what a query gives all of whose keys are hidden by -inf of the bias or by a mask; None
            where the bias is finite.
    """

    values: Any = tensor("Bb N S T", optional=True)
    empty: Any = attribute()

    def said(self) -> dict[str, Any]:
        """As the reader says it."""
        return dict(bias=self.values, empty_bias=self.empty)

    def refuse(self, why: str) -> None:
        """Refuse any, as something else of a call does not go with it."""
        require(self.values is None, why)

    def refuse_beside(self, seen: Any, paged: bool) -> None:
        """Refuse masks of which a query that sees no key gives the mean of all values: the operator adds the bias."""
        posed = seen.fully_masked_row == "mean" and (paged or seen.count is not None)
        require(self.values is None or not posed, "a query without keys gives the mean of all values, beside a bias")

    def arguments(self, keys: Any) -> dict[str, Any]:
        """What the operator is told, of so many keys as it reads: -inf as the least number, which hides as well."""
        if self.values is None:
            return {}
        bias = self.values if self.empty is None else self.values.clamp(min=torch.finfo(self.values.dtype).min)
        room = keys - bias.shape[3]
        return dict(pse_shift=bias if room == 0 else pad(bias, (0, room)))

    def restored(self, y: Tensor, seen: Any) -> Tensor:
        """The result [B, N, S, E] with what plain attention gives for a query without keys."""
        if self.empty is None:
            return y
        shown = seen.mask is not None or seen.hides_nothing()
        require(shown, "beside a bias that may hold -inf, what a mask hides cannot be shown")
        hidden = self.values == -torch.inf
        blind = (hidden if seen.mask is None else hidden | seen.mask).all(-1, keepdim=True)
        return y.masked_fill(blind, _EMPTY[self.empty])


UNBIASED = Bias(None, None)
"""Nothing is added."""
