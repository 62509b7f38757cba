"""Guesses: values of numbers that Python reads from tensors while nothing is run, so that later code is traced as well.

Numbers that follow from the integers given to the call are computed, not guessed (`known_ints`).
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
from fusion._torch.nested import leaves, map_only
from fusion._torch.operators import higher_order
from fusion.errors import FusionError
from fusion.inputs.known_ints import GivenNumbers, Numbers

MOST = 2**16
"""Number of guesses after which tracing ends with an error."""
_PYTHON = f"{sysconfig.get_path('stdlib')}/"
_LIBRARIES = tuple(
    f"{each}/" for each in (*(Path(str(m.__file__)).parent for m in (torch, numpy)), Path(__file__).parents[1])
)


class Guesses(FakeTensorMode):
    """Fake mode in which sizes and numbers that depend on data are guessed: mostly 1, and True.

    Attributes:
        places: the number of guesses by `file:line` of the model's code.
        given: the known numbers, and a sample of others.

    Raises:
        FusionError: more than `MOST` guesses were made, as in a loop that waits for another number.
    """

    supports_higher_order_operators = True

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.places: Counter[str] = Counter()
        self.given = GivenNumbers()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` on fake tensors, taking numbers and sizes that depend on data from `given`, or guessing them.

        No result has a symbol.
        """
        if higher_order(func):  # its body is traced in this mode as well
            return in_fake_mode(func, self, args, kwargs or {})
        known = self.given.result(func, args, kwargs or {})
        if known is not None and isinstance(known.values, (bool, int, float)):
            self._note(known.sampled)
            return known.values
        if func is torch.ops.aten.equal.default:
            self._note()
            return True
        if known is not None:
            return self._shaped_by_numbers(known, func, types, args, kwargs or {})
        func, args = self._by_positions(func, args)
        if func is torch.ops.aten.bincount.default:
            result: Any = self._counts(*args, **(kwargs or {}))
        else:
            result = super().__torch_dispatch__(func, types, args, kwargs or {})
        settled = map_only((FakeTensor, torch.SymInt, torch.SymFloat, torch.SymBool), self._settled, result)
        self.given.sample(func, args, kwargs or {}, settled)
        return settled

    def _shaped_by_numbers(
        self, known: Numbers, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run `func`, whose results have the numbers `known`, and return its fake results in the shapes of these
        numbers.

        Fake mode alone would guess a shape that depends on data. The numbers are recorded for the fake results.
        """
        places = self.places.copy()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.places = places  # guesses within the call have no effect on its result
        sized = map_only(FakeTensor, partial(self._sized, iter(leaves(known.values)), known.sampled), result)
        self.given.keep(sized, known)
        return sized

    def _by_positions(self, func: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Replace an index by a mask with known numbers by a gather at the positions where the mask is true: operator
        and arguments.

        `masked_select` becomes an index first; other operators are returned unchanged.
        """
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
        """Return a fake result of `bincount` of `x` with unknown numbers: `minlength` counts, at least one."""
        self._note()
        return self._fake((max(minlength, 1),), torch.int64 if weights is None else weights.dtype, x)

    def _fake(self, shape: Sequence[int], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.empty(shape, dtype=dtype, device=like.device)

    def _sized(self, numbers: Iterator[Any], sampled: bool, result: FakeTensor) -> torch.Tensor:
        """Return the fake `result`, in the shape of the next of the known `numbers` if that differs.

        If they are `sampled`, a different shape counts as a guess.
        """
        known = next(numbers)
        if result.shape == known.shape:
            return result
        self._note(sampled)
        return self._fake(known.shape, result.dtype, result)

    def _settled(self, result: Any) -> Any:
        """Replace each unbacked symbol of `result` by 1, or by True."""
        if isinstance(result, FakeTensor):
            if not any(isinstance(each, torch.SymInt) for each in (*result.shape, result.storage_offset())):
                return result
            self._note()
            return self._fake([_size(each) for each in result.shape], result.dtype, result)
        self._note()
        return True if isinstance(result, torch.SymBool) else 1.0 if isinstance(result, torch.SymFloat) else 1

    def _note(self, guessed: bool = True) -> None:
        """Count a guess at the innermost line of the model, unless `guessed` is False."""
        if not guessed:
            return
        self.places[_place()] += 1
        if self.places.total() > MOST:
            raise FusionError(
                f"explaining: {MOST} numbers that depend on data were read, the last at {_place()}; each was taken for "
                "1, as nothing is run, and a loop that ends by them does not end; explain the part that you mean"
            )


def _size(size: int | torch.SymInt) -> int:
    """Evaluate `size` with 1 in place of each symbol."""
    if isinstance(size, int):
        return size
    expression: Any = size.node.expr
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, 1)))


def innermost(stack: Iterable[traceback.FrameSummary]) -> str:
    """Return `file:line` of the innermost frame in the model's code; "" where there is none."""
    places = [f"{each.filename}:{each.lineno}" for each in stack if is_of_model(each.filename)]
    return places[-1] if places else ""


def is_of_model(file: str) -> bool:
    """Return True if `file` belongs neither to torch, numpy or Python itself nor to this package."""
    return not file.startswith(_LIBRARIES) and not (file.startswith(_PYTHON) and "-packages" not in file)


def _place() -> str:
    return innermost(traceback.extract_stack())
