"""The gain [D] of an RMS norm: γ, 1 + weight, or none; for operators that take it in the dtype of x alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, rounding, tensor

f32 = torch.float32
GAIN = tensor("D", optional=True)


@dataclass(frozen=True)
class Gain(Group):
    """The gain of a norm; ones where both fields are None.

    Attributes:
        gamma: the gain.
        weight: the gain minus 1; models compute 1 + weight in float32.
    """

    gamma: Any = GAIN
    weight: Any = GAIN

    def like(self, x: Tensor) -> Tensor:
        """Return the gain [D], rounded once to the dtype of x [.., D].

        Raises:
            Refused: that dtype has less range than the gain.
        """
        given = self.gamma if self.weight is None else self.weight
        if given is None:
            return unit_gain(x)
        with rounding("the gain", given.dtype, x.dtype):  # 1 + w of a float16 w is at most 65504
            if self.weight is None:
                return given.to(x.dtype)
            return (1.0 + (given if given.dtype == x.dtype else given.to(f32))).to(x.dtype)

    def remark(self, x: Any, operator: str) -> str:
        """Describe the rounding of the gain to the dtype of `x` for `operator`; "" where it is not rounded.

        Relative to a lane, that is no more than the rounding of the result.
        """
        given = next((each.dtype for each in (self.gamma, self.weight) if each is not None), x.dtype)
        if x.dtype == f32 or (self.weight is None and given == x.dtype):
            return ""
        gain = "gamma" if self.weight is None else "1 + weight"
        most, dtype = torch.finfo(x.dtype).eps / 2, str(x.dtype).removeprefix("torch.")
        return (
            f"the gain {gain} is rounded once to {dtype}, as {operator} takes no float32 beside it: "
            f"lanes change by at most {most:.1g} of themselves, no more than by the rounding of the result"
        )


def unit_gain(x: Tensor) -> Tensor:
    """Build the gain [D] of ones, for a norm of `x` [.., D] without gain."""
    return torch.ones(x.shape[-1:], dtype=x.dtype, device=x.device)
