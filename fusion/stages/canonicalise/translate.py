"""Translation: each aten op states, with aten's own argument names, which canonical value it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fusion._torch.operators import OpOverload, schema_of
from fusion.graph import Algebra, Dim, Value

Translated = Value | tuple[Value | None, ...] | None


class Out(NamedTuple):
    """Shape and dtype that the user's node really has."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype | None


Translator = Callable[..., Translated]
TRANSLATORS: dict[OpOverload, Translator] = {}
_OF_INDUCTOR: dict[str, Translator] = {}
"""By name, of operators that exist once Inductor is imported: `prims.fma`, which Dynamo writes for addcmul(value=)."""
OF_COMPLEX: dict[Translator, str] = {}
"""How each translator takes complex tensors."""
_OF_DIMS: set[OpOverload] = set()
_NAMES_A_DIM = ("dim", "axis", "source", "destination")


def translates(*names: str, any_rank: bool = False, of_complex: str = "") -> Callable[[Translator], Translator]:
    """Register a translator for operators such as "aten.add.Tensor".

    A translator takes `(algebra, out, *args, **kwargs)` with the operator's own arguments, tensors as `Value`. It
    returns the value (a tuple for several results); None, or a step that is not `proven`, says that this call has no
    canonical form. Of an operator that names dims it is given tensors with dims only, unless it says that it takes
    `any_rank`: torch lets -1 and 0 stand for the dim that a number has not. Of complex tensors it is given none, unless
    `of_complex` says that it takes them "whole", or that it may be applied to real and imaginary "parts" alone.
    """

    def register(translator: Translator) -> Translator:
        OF_COMPLEX[translator] = of_complex
        for name in names:
            namespace, packet, overload = name.split(".")
            given = getattr(getattr(torch.ops, namespace), packet, None)
            if given is None:
                _OF_INDUCTOR[name] = translator
                continue
            op = getattr(given, overload)
            TRANSLATORS[op] = translator
            if not any_rank and any(each.name.startswith(_NAMES_A_DIM) for each in schema_of(op).arguments):
                _OF_DIMS.add(op)
        return translator

    return register


def translations(table: Mapping[str, Translator], any_rank: bool = False, of_complex: str = "") -> None:
    """Register the translators of a table, each for all the operators that its key names."""
    for names, translator in table.items():
        translates(*names.split(), any_rank=any_rank, of_complex=of_complex)(translator)


def translator_of(op: OpOverload, args: Sequence[Any]) -> Translator | None:
    """What translates a call with these operands, if anything does."""
    dimless = op in _OF_DIMS and bool(args) and isinstance(args[0], Value) and not args[0].rank
    return None if dimless else TRANSLATORS.get(op) or _OF_INDUCTOR.get(str(op))


def promote(algebra: Algebra, out: Out, *operands: Any) -> tuple[Any, ...]:
    """Make aten's silent type promotion explicit: tensor operands are cast to the result's dtype."""
    return tuple(algebra.cast(each, out.dtype) if isinstance(each, Value) else each for each in operands)


def is_number(operand: Any) -> bool:
    """Whether an operand is a plain Python number."""
    return isinstance(operand, (int, float)) and not isinstance(operand, bool)
