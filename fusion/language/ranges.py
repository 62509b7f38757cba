"""What a lowering states of the numbers that its calls round: the model rounds them too, or they are bounded.

float16 ends at 65504 and thins out below 6e-5, where other floats have the range of float32. So the planner refuses
calls that hold in float16 what neither the model does nor one of these statements covers.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from fusion.language.rule import require

_covered: ContextVar[bool] = ContextVar("covered", default=False)


def narrows(held: torch.dtype | None, to: torch.dtype) -> bool:
    """True if rounding floats of `held` to `to` may leave its range (float16), or demotes float64."""
    if held == to:
        return False
    return to is torch.float16 or held is torch.float64


@contextmanager
def rounding(what: str, held: torch.dtype, to: torch.dtype) -> Generator[None]:
    """State that the calls inside round `what`, which the model holds in `held`, to `to`.

    Raises:
        Refused: `to` is narrower than the model's dtype.
    """
    require(
        not narrows(held, to),
        "{what}: the model holds it in {held}; the operator requires it in {to}, which has fewer digits or less range",
        what=what, held=_name(held), to=_name(to),
    )  # fmt: skip
    with bounded():
        yield


@contextmanager
def bounded() -> Generator[None]:
    """State that float16 holds whatever the calls inside round: a comment beside it says why."""
    token = _covered.set(True)
    try:
        yield
    finally:
        _covered.reset(token)


def is_covered() -> bool:
    """True if a statement covers the calls that are recorded now."""
    return _covered.get()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
