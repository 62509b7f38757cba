"""Statements of a lowering that a float16 value inside its operators is safe: the model has it too, or it is bounded.

float16 overflows above 65504 and loses digits below 6e-5; other floats have the range of float32. So the planner
refuses calls that compute in float16 what the model does not, unless one of these context managers covers the call.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fusion.language.rule import require

_covered: ContextVar[bool] = ContextVar("covered", default=False)


def narrows(have: torch.dtype | None, to: torch.dtype) -> bool:
    """Return True if a cast from `have` (None if unknown) to another dtype `to` may overflow (float16), or demotes
    float64.
    """
    if have == to:
        return False
    return to is torch.float16 or have is torch.float64


@contextmanager
def rounding(what: str, have: torch.dtype, to: torch.dtype) -> Generator[None]:
    """State that the calls inside round `what`, a value that the model has in the dtype `have`, to the dtype `to`.

    Raises:
        Refused: `narrows(have, to)`.
    """
    require(
        not narrows(have, to),
        "{what}: the model holds it in {have}; the operator requires it in {to}, which has fewer digits or less range",
        what=what, have=_name(have), to=_name(to),
    )  # fmt: skip
    with bounded():
        yield


@contextmanager
def bounded() -> Generator[None]:
    """State that no value inside the covered calls can overflow float16; a comment at the call site gives the bound."""
    token = _covered.set(True)
    try:
        yield
    finally:
        _covered.reset(token)


def is_covered() -> bool:
    """Return True if called within `rounding` or `bounded`."""
    return _covered.get()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
