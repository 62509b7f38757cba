"""Inputs of examples: small multiples of a power of two, so that every dtype holds the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from fusion import Example

Inputs = Callable[[torch.dtype], tuple[Tensor, ...]]
Part = tuple[int, ...] | Tensor | Callable[[], Tensor]
"""A shape, a tensor, or what makes one."""


def normal(seed: int, *shape: int) -> Tensor:
    """Float64 [*shape], about normal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 32).round().clamp(-127, 127) / 32


def fixed(x: Tensor) -> torch.nn.Parameter:
    """A Parameter for inference."""
    return torch.nn.Parameter(x, requires_grad=False)


def weight(seed: int, *shape: int) -> Callable[[], Tensor]:
    """Makes a Parameter, about normal / 8."""
    return lambda: fixed(normal(seed, *shape) / 8)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy, in the dtype if it is of float64."""
    copy = x.detach().clone().to(dtype if x.dtype == torch.float64 else x.dtype)
    return fixed(copy) if isinstance(x, torch.nn.Parameter) else copy


def tensors(*parts: Part) -> Inputs:
    """One tensor of each shape, whose place is its seed, and copies of other tensors, of which float64 is narrowed."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        made = (
            normal(seed, *part) if isinstance(part, tuple) else part() if callable(part) else part
            for seed, part in enumerate(parts)
        )
        return tuple(in_dtype(each, dtype) for each in made)

    return make


def symbolic(inputs: Inputs, places: Iterable[int], dims: Iterable[int]) -> Inputs:
    """The same, with these dims of the tensors at these places not known before a call."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        made = inputs(dtype)
        for place, dim in product(places, dims):
            torch._dynamo.mark_dynamic(made[place], dim)  # pyright: ignore[reportPrivateUsage]
        return made

    return make


def tables(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """cos and sin [*shape], whose halves are equal."""
    angles = normal(seed, *shape[:-1], shape[-1] // 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotated(*shapes: tuple[int, ...], table: tuple[int, ...]) -> Inputs:
    """Tensors to rotate, then cos and sin of one shape."""
    return tensors(*shapes, *tables(len(shapes), *table))


def with_parameters(*shapes: tuple[int, ...], leading: int = 1) -> Inputs:
    """One tensor of each shape; those behind the `leading` ones are Parameters."""
    return tensors(*shapes[:leading], *(weight(seed, *shape) for seed, shape in enumerate(shapes[leading:], leading)))


def under(name: str, examples: Iterable[Example]) -> tuple[Example, ...]:
    """Examples of one mode of a rule, whose names begin with that of the mode."""
    return tuple(replace(each, name=f"{name}, {each.name}") for each in examples)
