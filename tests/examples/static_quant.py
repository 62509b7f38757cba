"""Rows that become int8 by scales which the model holds, as those of a cache (C8), and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, Part, fixed, tensors
from tests.examples.quantisation import grid, int8, scales, weights

B, M, S, D = 2, 2, 3, 32
CHANNELS, HEADS, ALL = (M, 1, D), (M, 1, 1), (1,)


def inputs(*scale: int, rows: tuple[int, ...] = (B, M, S, D), more: tuple[Part, ...] = ()) -> Inputs:
    """Rows, and a scale that is a Parameter in their dtype."""
    return tensors(grid(0, *rows), fixed(scales(1, *scale).double() * 4), *more)


def divided(x: Tensor, scale: Tensor) -> Tensor:
    """By the scale."""
    return int8(x / scale)


def multiplied(x: Tensor, scale: Tensor) -> Tensor:
    """By what is the inverse of one."""
    return int8(x * scale)


def wide(x: Tensor, scale: Tensor) -> Tensor:
    """In float32, bounded before it is rounded."""
    return (x.float() / scale.float()).clamp(-128, 127).round().to(torch.int8)


def shifted(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """With a zero point."""
    return int8(x / scale + zero)


def of_whole_rows(x: Tensor, scale: Tensor) -> Tensor:
    """Heads and channels in one dim, as a projection gives them."""
    return int8(x / scale.flatten()).unflatten(-1, (M, D))


def by_number(x: Tensor) -> Tensor:
    """Multiply by a number that every dtype holds."""
    return int8(x * 16.0)


def by_number_with_zero(x: Tensor) -> Tensor:
    """Multiply by a number that bfloat16 does not hold, in float32, and add a zero point."""
    return int8(x.float() * 16.0625 + 3.0)


def cut_off(x: Tensor, scale: Tensor) -> Tensor:
    """Without rounding."""
    return (x / scale).clamp(-128, 127).to(torch.int8)


ZERO = fixed((weights(3, *CHANNELS) // 8).double())
EXAMPLES = (
    Example("channels", divided, inputs(*CHANNELS)),
    Example("channels, multiplied", multiplied, inputs(*CHANNELS)),
    Example("channels, float32", wide, inputs(*CHANNELS)),
    Example("channels, zero points", shifted, inputs(*CHANNELS, more=(ZERO,))),
    Example("heads", divided, inputs(*HEADS)),
    Example("one scale", divided, inputs(*ALL)),
    Example("a number", by_number, tensors(grid(0, B, S, D))),
    Example("a number and a zero point", by_number_with_zero, tensors(grid(0, B, S, D))),
    Example("whole rows", of_whole_rows, inputs(*CHANNELS, rows=(B, S, M * D))),
)
BOUNDED: Callable[[Tensor, Tensor], Tensor] = lambda x, scale: int8(x / scale, -127)  # noqa: E731
REJECTS = (
    Example("other bounds", BOUNDED, inputs(*CHANNELS), "they are clamped to -127 and 127"),
    Example(
        "a number, other bounds", lambda x: int8(x * 16.0, -127), tensors(grid(0, B, S, D)), "clamped to -127 and 127"
    ),
)

TRIED = {"quantisation": (*EXAMPLES, *REJECTS)}
