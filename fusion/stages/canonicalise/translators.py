"""Translation: registry of functions that build the canonical value of an aten call, with aten's argument names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusion._torch.operators import OpOverload, schema_of
from fusion.graph import Algebra, Dim, Value

Translated = Value | tuple[Value | None, ...] | None


class Out(NamedTuple):
    """Shape and dtype of the result of the user's node."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype | None


Translator = Callable[..., Translated]
TRANSLATORS: dict[OpOverload, Translator] = {}
_BY_NAME: dict[str, Translator] = {}
"""Translators of operators that exist only once Inductor is imported, as `prims.fma`, Dynamo's addcmul(value=)."""
COMPLEX_MODES: dict[Translator, str] = {}
"""For each translator, its `complex_mode`."""
_WITH_DIMS: set[OpOverload] = set()
_NAMES_A_DIM = ("dim", "axis", "source", "destination")


def translates(*names: str, any_rank: bool = False, complex_mode: str = "") -> Callable[[Translator], Translator]:
    """Register a translator for operators such as "aten.add.Tensor".

    A translator takes `(algebra, out, *args, **kwargs)` with the operator's own arguments, tensors as `Value`. It
    returns the canonical value (a tuple for several results). None, or a step that is not `proven`, means that the call
    has no canonical form.

    Args:
        names: the operators.
        any_rank: True if the translator of an operator with a dim argument accepts tensors without dims, for which
            torch
            takes the dims -1 and 0; other such translators are not called for them.
        complex_mode: "" if the translator takes no complex tensors, "whole" if it takes them as they are, "parts" if it
            may be applied to real and imaginary parts separately.
    """

    def register(translator: Translator) -> Translator:
        COMPLEX_MODES[translator] = complex_mode
        for name in names:
            namespace, packet, overload = name.split(".")
            given = getattr(getattr(torch.ops, namespace), packet, None)
            if given is None:
                _BY_NAME[name] = translator
                continue
            op = getattr(given, overload)
            TRANSLATORS[op] = translator
            if not any_rank and any(each.name.startswith(_NAMES_A_DIM) for each in schema_of(op).arguments):
                _WITH_DIMS.add(op)
        return translator

    return register


def translations(table: Mapping[str, Translator], any_rank: bool = False, complex_mode: str = "") -> None:
    """Register the translators of `table`; each key names one operator or several, separated by spaces."""
    for names, translator in table.items():
        translates(*names.split(), any_rank=any_rank, complex_mode=complex_mode)(translator)


def translator_of(op: OpOverload, args: Sequence[Any]) -> Translator | None:
    """Return the translator of the operator `op` for the operands `args`, None if it has none."""
    dimless = op in _WITH_DIMS and bool(args) and isinstance(args[0], Value) and not args[0].rank
    return None if dimless else TRANSLATORS.get(op) or _BY_NAME.get(str(op))


def promote(algebra: Algebra, out: Out, *operands: Any) -> tuple[Any, ...]:
    """Cast the tensors among `operands` to the dtype of `out`, as aten's type promotion does implicitly."""
    return tuple(algebra.cast(each, out.dtype) if isinstance(each, Value) else each for each in operands)


def is_number(operand: Any) -> bool:
    """Return True if `operand` is an int or a float, and no bool."""
    return isinstance(operand, (int, float)) and not isinstance(operand, bool)
