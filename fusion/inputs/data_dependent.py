"""Guesses: what Python reads from tensors where nothing is run, so that the code behind it is traced as well.

What follows from the whole numbers that the call is given is no guess (`given_numbers`).
"""

from __future__ import annotations

import sysconfig
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from fusion._torch.fakes import FakeTensor, FakeTensorMode, in_fake_mode
from fusion._torch.operators import higher_order
from fusion._torch.tensors import leaves, map_only
from fusion.errors import FusionError
from fusion.inputs.known_ints import GivenNumbers, Numbers

MOST = 2**16
_PYTHON = f"{sysconfig.get_path('stdlib')}/"
_LIBRARIES = tuple(f"{Path(str(module)).parent}/" for module in (torch.__file__, numpy.__file__, __file__))


class Guesses(FakeTensorMode):
    """Fake mode in which sizes and numbers that data decides come from a sample: mostly 1, and True.

    Attributes:
        places: how often a guess was made, by `file:line` of the model's code.
        given: the numbers that are known, and the sample of others.

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
        known = self.given.result(func, args, kwargs or {})
        if known is not None and isinstance(known.values, (bool, int, float)):
            self._note(known.sampled)
            return known.values
        if func is torch.ops.aten.equal.default:
            self._note()
            return True
        if known is not None:
            return self._of_numbers(known, func, types, args, kwargs or {})
        func, args = self._by_positions(func, args)
        if func is torch.ops.aten.bincount.default:
            result: Any = self._counts(*args, **(kwargs or {}))
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs or {})
        settled = map_only((FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool), self._settled, result)
        self.given.sample(func, args, kwargs or {}, settled)
        return settled

    def _of_numbers(
        self, known: Numbers, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Give a call whose numbers are known fake results of the shapes of these numbers."""
        places = self.places.copy()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.places = places  # what a size within the call was taken for is no matter
        sized = map_only(FakeTensor, partial(self._sized, iter(leaves(known.values)), known.sampled), result)
        self.given.keep(sized, known)
        return sized

    def _by_positions(self, func: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Replace selection by a mask whose numbers are known by a gather at the places where it is true."""
        if func is torch.ops.aten.masked_select.default:
            x, mask = torch.ops.aten.broadcast_tensors(args[:2])
            func, args = torch.ops.aten.index.Tensor, (x, [mask])
        if func is not torch.ops.aten.index.Tensor:
            return func, args
        selected: list[Any] = []
        for each in args[1]:
            places = None if each is None else self.given.positions(each)
            selected += (
                [each] if places is None else [self._fake(place.shape, torch.int64, args[0]) for place in places]
            )
            self._note(places is not None and self.given.is_sampled(each))
        return func, (args[0], selected)

    def _counts(self, x: FakeTensor, weights: Any = None, minlength: int = 0) -> torch.Tensor:
        """Make counts of numbers that are not known, as many as there are at least."""
        self._note()
        return self._fake((max(minlength, 1),), torch.int64 if weights is None else weights.dtype, x)

    def _fake(self, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.empty(shape, dtype=dtype, device=like.device)

    def _sized(self, numbers: Iterator[Any], sampled: bool, result: FakeTensor) -> torch.Tensor:
        """Give a fake result the shape of its numbers."""
        known = next(numbers)
        if result.shape == known.shape:
            return result
        self._note(sampled)
        return self._fake(known.shape, result.dtype, result)

    def _settled(self, result: Any) -> Any:
        """Set each unbacked symbol of a result to 1."""
        if isinstance(result, FakeTensor):
            if not any(isinstance(each, torch.SymInt) for each in (*result.shape, result.storage_offset())):
                return result
            self._note()
            return self._fake([_size(each) for each in result.shape], result.dtype, result)
        self._note()
        return True if isinstance(result, torch.SymBool) else 1.0 if isinstance(result, torch.SymFloat) else 1

    def _note(self, guessed: bool = True) -> None:
        """Count one more guess at the place of the model that reads it."""
        if not guessed:
            return
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


def innermost(stack: Iterable[traceback.FrameSummary]) -> str:
    """Find the last frame in the code of the model, as `file:line`; "" where there is none."""
    places = [f"{each.filename}:{each.lineno}" for each in stack if is_of_model(each.filename)]
    return places[-1] if places else ""


def is_of_model(file: str) -> bool:
    """True if a file of code is neither of torch, numpy or Python itself nor of this package."""
    return not file.startswith(_LIBRARIES) and not (file.startswith(_PYTHON) and "-packages" not in file)


def _place() -> str:
    return innermost(traceback.extract_stack())
