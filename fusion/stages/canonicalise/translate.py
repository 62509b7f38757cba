"""Translation: each aten op states, with aten's own argument names, which canonical value it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fusion._torch import OpOverload
from fusion.graph import Algebra, Dim, Value

Translated = Value | tuple[Value | None, ...] | None
WHOLE = frozenset({torch.int32, torch.int64})
"""Dtypes of positions."""


class Out(NamedTuple):
    """Shape and dtype that the user's node really has."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype | None


Translator = Callable[..., Translated]
TRANSLATORS: dict[OpOverload, Translator] = {}


def translates(*names: str) -> Callable[[Translator], Translator]:
    """Register a translator for operators such as "aten.add.Tensor".

    A translator takes `(algebra, out, *args, **kwargs)` with the operator's own arguments, tensors as `Value`. It
    returns the value (a tuple for several results), or None where this call has no canonical form.
    """

    def register(translator: Translator) -> Translator:
        for name in names:
            namespace, packet, overload = name.split(".")
            TRANSLATORS[getattr(getattr(getattr(torch.ops, namespace), packet), overload)] = translator
        return translator

    return register


def promote(algebra: Algebra, out: Out, *operands: Any) -> tuple[Any, ...]:
    """Make aten's silent type promotion explicit: tensor operands are cast to the result's dtype."""
    return tuple(algebra.cast(each, out.dtype) if isinstance(each, Value) else each for each in operands)


def is_number(operand: Any) -> bool:
    """Whether an operand is a plain Python number."""
    return isinstance(operand, (int, float)) and not isinstance(operand, bool)
