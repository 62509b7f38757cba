"""Inputs of examples: small multiples of a power of two, so that every dtype holds the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fusion import Example

Inputs = Callable[[torch.dtype], tuple[Tensor, ...]]


def normal(seed: int, *shape: int) -> Tensor:
    """Float64 [*shape], about normal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 32).round().clamp(-127, 127) / 32


def tensors(*shapes: tuple[int, ...]) -> Inputs:
    """One tensor of each shape."""
    return lambda dtype: tuple(normal(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))


def rotated(*shapes: tuple[int, ...], table: tuple[int, ...]) -> Inputs:
    """Tensors to rotate, then cos and sin of one shape whose halves are equal."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        angles = normal(len(shapes), *table[:-1], table[-1] // 2)
        angles = torch.cat((angles, angles), dim=-1)
        return *tensors(*shapes)(dtype), angles.cos().to(dtype), angles.sin().to(dtype)

    return make


def with_parameters(*shapes: tuple[int, ...], leading: int = 1) -> Inputs:
    """One tensor of each shape; those behind the `leading` ones are Parameters."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        values = tensors(*shapes)(dtype)
        weights = (torch.nn.Parameter(each / 8, requires_grad=False) for each in values[leading:])
        return *values[:leading], *weights

    return make


def under(name: str, examples: Iterable[Example]) -> tuple[Example, ...]:
    """Examples of one mode of a rule, whose names begin with that of the mode."""
    return tuple(replace(each, name=f"{name}, {each.name}") for each in examples)
