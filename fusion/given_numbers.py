"""Numbers that follow from the whole numbers that a call is given: tokens, masks, sizes of images, lengths of caches.

They are computed beside fake tensors, on copies, so that what Python reads of them is what it would read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fusion._torch.fakes import FakeTensor, without_fakes
from fusion._torch.operators import OpOverload, schema_of
from fusion._torch.tensors import WeakTensors, leaves, map_only, storage_of

MOST = 2**16
"""Elements of a tensor whose numbers are followed."""


class GivenNumbers:
    """Which fake tensors hold known numbers; what is written to holds none."""

    def __init__(self) -> None:
        self._known = WeakTensors()

    def give(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take over the whole numbers of tensors: of each fake copy with what it is a copy of."""
        for fake, real in copies:
            known = isinstance(fake, FakeTensor) and not isinstance(real, FakeTensor) and _is_whole(real)
            if known and real.numel() <= MOST:
                self._known[fake] = real.detach().cpu().clone()

    def of(self, x: Any) -> torch.Tensor | None:
        """The numbers of a tensor; None where they are not known."""
        if not isinstance(x, FakeTensor):
            return x if (_is_whole(x) or x.numel() <= 1) and x.numel() <= MOST else None
        return self._known.get(x)

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives of known numbers alone; None where that is not known."""
        if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags or _makes_none(func):
            return None
        tensors = [each for each in leaves(args, kwargs) if isinstance(each, torch.Tensor)]
        if schema_of(func).is_mutable:
            self._forget(tensors)
            return None
        if any(isinstance(each, _SYMBOLS) for each in leaves(args, kwargs)):
            return None
        if any(self.of(each) is None for each in tensors) or not (tensors or _makes_few(func, args)):
            return None
        on_host = {
            name: torch.device("cpu") if isinstance(each, torch.device) else each for name, each in kwargs.items()
        }
        try:
            with without_fakes():
                return func(*map_only(torch.Tensor, self.of, tuple(args)), **map_only(torch.Tensor, self.of, on_host))
        except Exception:  # the model's own call says why
            return None

    def _forget(self, written: Sequence[torch.Tensor]) -> None:
        """Know nothing more of what shares memory with tensors that are written to."""
        places = {storage_of(each) for each in written}
        for each in [each for each in self._known if storage_of(each) in places]:
            del self._known[each]

    def keep(self, result: Any, numbers: Any) -> None:
        """Remember the numbers of what a call gave."""
        for fake, real in zip(leaves(result), leaves(numbers), strict=False):
            few = isinstance(real, torch.Tensor) and real.numel() <= MOST
            if few and isinstance(fake, FakeTensor) and fake.shape == real.shape:
                self._known[fake] = real


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_whole(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not (x.is_floating_point() or x.is_complex() or x.is_quantized or x.is_meta)


def _makes_none(func: OpOverload) -> bool:
    """Whether a call gives memory with no numbers in it."""
    return "empty" in schema_of(func).name


def _makes_few(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether a call without tensors makes few numbers enough, by the size or the numbers that it is given."""
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    counted = "arange" in schema_of(func).name or "linspace" in schema_of(func).name
    return math.prod(sizes) <= MOST and not (counted and any(abs(each) > MOST for each in args))
