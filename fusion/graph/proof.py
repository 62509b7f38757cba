"""Proofs in steps: each goes on from what the step before it found, and the first that finds nothing ends all of them.

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
    """A step of a proof found nothing."""


def proven(found: T | None) -> T:
    """What a step found, on which the next one builds."""
    if found is None:
        raise Unproven
    return found


def must(condition: object) -> None:
    """End the proof unless `condition` holds."""
    if not condition:
        raise Unproven


def proof(function: Callable[P, T | None]) -> Callable[P, T | None]:
    """The function, which gives None where a step of it is not proven."""

    @wraps(function)
    def attempt(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return function(*args, **kwargs)
        except Unproven:
            return None

    return attempt
