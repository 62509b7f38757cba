"""Guesses: what Python reads from tensors where nothing is run, so that the code behind it is traced as well.

What follows from the whole numbers that the call is given is no guess (`given_numbers`).
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusion._torch.fakes import FakeTensor, FakeTensorMode, in_fake_mode
from fusion._torch.operators import higher_order
from fusion._torch.tensors import leaves, map_only
from fusion.errors import FusionError
from fusion.given_numbers import GivenNumbers

MOST = 2**16
_LIBRARIES = tuple(f"{Path(str(module)).parent}/" for module in (torch.__file__, __file__))


class Guesses(FakeTensorMode):
    """A fake mode in which a size or a number that depends on other data than whole numbers which are given is 1, and
    a truth value True.

    Attributes:
        places: how often a guess was made, by `file:line` of the model's code.
        given: the numbers that are known.

    Raises:
        FusionError: more than `MOST` guesses were made, as where a loop waits for another number.
    """

    supports_higher_order_operators = True

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.places: Counter[str] = Counter()
        self.given = GivenNumbers()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator; no symbol is left in what it gives."""
        if higher_order(func):  # its body is traced in this mode, too
            return in_fake_mode(func, self, args, kwargs or {})
        numbers = self.given.result(func, args, kwargs or {})
        if isinstance(numbers, (bool, int, float)):
            return numbers
        if func is torch.ops.aten.equal.default:
            self._note()
            return True
        noted = self.places if numbers is None else self.places.copy()
        result = super().__torch_dispatch__(func, types, args, kwargs or {})
        if numbers is not None:
            self.places = noted  # what a size within the call was taken for is no matter
            result = map_only(FakeTensor, partial(self._sized, iter(leaves(numbers))), result)
            self.given.keep(result, numbers)
            return result
        return map_only((FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool), self._settled, result)

    def _sized(self, numbers: Iterator[Any], result: FakeTensor) -> torch.Tensor:
        """A result in the shape that its numbers have."""
        known = next(numbers)
        if result.shape == known.shape:
            return result
        with self:
            return torch.empty(known.shape, dtype=result.dtype, device=result.device)

    def _settled(self, result: Any) -> Any:
        if isinstance(result, FakeTensor):
            if not any(isinstance(each, torch.SymInt) for each in (*result.shape, result.storage_offset())):
                return result
            self._note()
            with self:
                return torch.empty([_size(each) for each in result.shape], dtype=result.dtype, device=result.device)
        self._note()
        return True if isinstance(result, torch.SymBool) else 1.0 if isinstance(result, torch.SymFloat) else 1

    def _note(self) -> None:
        self.places[_place()] += 1
        if self.places.total() > MOST:
            raise FusionError(
                f"explaining: {MOST} numbers that depend on data were read, the last at {_place()}; each was taken for "
                "1, as nothing is run, and a loop that ends by them does not end; explain the part that you mean"
            )


def _size(size: int | torch.SymInt) -> int:
    """A size with 1 for every number that depends on data."""
    if isinstance(size, int):
        return size
    expression: Any = size.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, 1)))


def _place() -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    frames = (each for each in reversed(traceback.extract_stack()) if not each.filename.startswith(_LIBRARIES))
    return next((f"{each.filename}:{each.lineno}" for each in frames), "")
