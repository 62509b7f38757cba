"""Proofs in steps: each step builds on the result of the one before; the first step without a result ends the proof.

@proof
def variance(a, x, axes):                              None where a step is not proven
    must(len(axes) == 1)
    centred = proven(a.add(x, a.scale(a.mean(x, axes), -1)))
    return a.mean(a.power(centred, 2), axes)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Unproven(Exception):  # noqa: N818 - a decision, not an error
    """Signal of `proven` and `must` that a step of a proof has no result."""


def proven(result: T | None) -> T:
    """Return `result`; stop the surrounding `proof` where it is None."""
    if result is None:
        raise Unproven
    return result


def must(condition: object) -> None:
    """Stop the surrounding `proof` unless `condition` is truthy."""
    if not condition:
        raise Unproven


def proof(function: Callable[P, T | None]) -> Callable[P, T | None]:
    """Wrap `function` so that it returns None where one of its steps is not proven."""

    @wraps(function)
    def attempt(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Unproven:
            return None

    return attempt
