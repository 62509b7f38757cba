"""Numbers of fake tensors: those that follow from the integers given to a call, and samples of those that data decides.

They are computed on copies of the given tensors, so that Python reads their true values: tokens, masks, sizes of
images, lengths of caches. Integers and booleans that depend on other data are sampled consistently: every row of a
top-k chooses alike, comparisons hold, other numbers are 1. So the counts of choices add up, and rows that are split by
such counts are as many as there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion._torch.fakes import FakeTensor, without_fakes
from fusion._torch.nested import leaves, map_only
from fusion._torch.operators import OpOverload, arguments_of, is_random, schema_of, short_name
from fusion._torch.tensors import WeakTensors, storage_of

MOST = 2**16
"""Most elements of a tensor whose numbers are computed."""


@dataclass(frozen=True)
class Numbers:
    """Result of a call on known numbers.

    Attributes:
        values: the results: real tensors, or Python numbers.
        sampled: True if they depend on a sample.
    """

    values: Any
    sampled: bool


class GivenNumbers:
    """Known numbers of fake tensors; those of views share memory as the views do, so that writes reach all."""

    def __init__(self) -> None:
        self._known = WeakTensors()
        self._sampled = WeakTensors()

    def give(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add the numbers of integer tensors, from pairs of a fake copy and the original."""
        for fake, real in copies:
            known = isinstance(fake, FakeTensor) and not isinstance(real, FakeTensor) and _is_integral(real)
            if known and real.numel() <= MOST:
                self._known[fake] = real.detach().cpu().clone()

    def values_of(self, x: Any) -> torch.Tensor | None:
        """Return the numbers of `x` as a real tensor; None where they are not known."""
        if not isinstance(x, FakeTensor):
            return x if (_is_integral(x) or x.numel() <= 1) and x.numel() <= MOST else None
        return self._known.get(x)

    def is_sampled(self, x: Any) -> bool:
        """Return True if the numbers of `x` follow from a sample of the data, not from the call's numbers."""
        return isinstance(x, FakeTensor) and x in self._sampled

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Numbers | None:
        """Compute a call on known numbers, writes included; None where the numbers of an argument are not known."""
        if not isinstance(func, OpOverload):
            return None
        written = [each for each in _written(func, args, kwargs) if isinstance(each, torch.Tensor)]
        tensors = [each for each in leaves(args, kwargs) if isinstance(each, torch.Tensor)]
        values = self._computed(func, args, kwargs, tensors, written)
        if values is None:
            self._forget(written)
            return None
        sampled = any(map(self.is_sampled, tensors))
        self._note_writes(written, sampled)
        return Numbers(values, sampled)

    def _computed(
        self,
        func: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> Any:
        if func.namespace not in ("aten", "prims") or is_random(func):
            return None
        if any(isinstance(each, _SYMBOLS) for each in leaves(args, kwargs)):
            return None
        if any(self.values_of(each) is None for each in tensors) or not (tensors or _makes_few(func, args)):
            return None
        if not all(isinstance(each, FakeTensor) for each in written):  # real tensors are the caller's
            return None
        on_host = {
            name: torch.device("cpu") if isinstance(each, torch.device) else each for name, each in kwargs.items()
        }
        try:
            with without_fakes():
                return func(
                    *map_only(torch.Tensor, self.values_of, tuple(args)),
                    **map_only(torch.Tensor, self.values_of, on_host),
                )
        except Exception:  # the call on fake tensors raises the error that the model would see
            return None

    def _note_writes(self, written: Sequence[torch.Tensor], sampled: bool) -> None:
        """Update the numbers of all tensors that share memory with the tensors `written`, after a write computed their
        numbers.

        Numbers that share memory with those of the written tensor have changed with them, and become sampled if
        `sampled`. Numbers in memory of their own miss the write, and are dropped.
        """
        memory = {storage_of(each): storage_of(self._known[each]) for each in written}
        for each in [each for each in self._known if storage_of(each) in memory]:
            if storage_of(self._known[each]) != memory[storage_of(each)]:
                del self._known[each]
            elif sampled:
                self._sampled[each] = True

    def _forget(self, written: Sequence[torch.Tensor]) -> None:
        """Drop the numbers of all tensors that share memory with `written`."""
        places = {storage_of(each) for each in written}
        for each in [each for each in self._known if storage_of(each) in places] if places else ():
            del self._known[each]

    def keep(self, result: Any, numbers: Numbers) -> None:
        """Record the `numbers` of the fake `result` of a call."""
        for fake, real in zip(leaves(result), leaves(numbers.values), strict=False):
            few = isinstance(real, torch.Tensor) and real.numel() <= MOST
            if few and isinstance(fake, FakeTensor) and fake.shape == real.shape:
                self._known[fake] = real
                self._sampled.pop(fake, None)
                if numbers.sampled:
                    self._sampled[fake] = True

    def sample(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Sample the integers and booleans of the fake `result` of a call that depend on data."""
        if not isinstance(func, OpOverload) or schema_of(func).is_mutable or _makes_none(func):
            return
        for fake in leaves(result):
            if isinstance(fake, FakeTensor) and _is_integral(fake) and fake.numel() <= MOST and fake not in self._known:
                with without_fakes():
                    sampled = _sample(func, arguments_of(func, args, kwargs), tuple(fake.shape))
                    self._known[fake] = sampled.to(fake.dtype)
                self._sampled[fake] = True

    def positions(self, mask: Any) -> tuple[torch.Tensor, ...] | None:
        """Return the positions of true entries of a boolean `mask`, an index tensor for each dim.

        None where the numbers are not known.
        """
        numbers = self.values_of(mask) if isinstance(mask, torch.Tensor) and mask.dtype is torch.bool else None
        with without_fakes():
            return None if numbers is None else numbers.nonzero(as_tuple=True)


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_integral(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not (x.is_floating_point() or x.is_complex() or x.is_quantized or x.is_meta)


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """List the arguments that a call writes to."""
    if not schema_of(func).is_mutable:
        return []
    given = arguments_of(func, args, kwargs)
    return leaves([given[each.name] for each in schema_of(func).arguments if each.is_write])


def _makes_none(func: OpOverload) -> bool:
    """Return True if `func` returns memory without defined contents; fake mode calls such operators itself."""
    return "empty" in schema_of(func).name


def _makes_few(func: OpOverload, args: Sequence[Any]) -> bool:
    """Return True if a call without tensor arguments makes at most `MOST` numbers."""
    if _makes_none(func):
        return False
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    counted = "arange" in schema_of(func).name or "linspace" in schema_of(func).name
    return math.prod(sizes) <= MOST and not (counted and any(abs(each) > MOST for each in args))


def _sample(func: OpOverload, given: Mapping[str, Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Make numbers of `shape` for a result of `func`, called with `given`, that depends on unknown data.

    Indices of a sort or top-k are 0, 1, … along its dim; counts of `bincount` add up to the number of elements; any
    others are 1.
    """
    name, ones = short_name(func), torch.ones(shape, dtype=torch.int64)
    if name == "bincount":
        return _shares(given["self"].numel(), shape[0])
    if name not in _ORDERS or "dim" not in given or not given["self"].numel():
        return ones
    x, dim = given["self"], given["dim"]
    if dim is None or x.dim() == 0 or len(shape) < x.dim():
        return ones % (x.numel() if dim is None else x.shape[dim] if x.dim() else 1)
    return ones.cumsum(dim) % x.shape[dim]


_ORDERS = ("topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "median", "mode")
"""Operators that return positions in an order along a dim."""


def _shares(total: int, count: int) -> torch.Tensor:
    """Split `total` into `count` integers, as evenly as possible."""
    return (torch.arange(count) < total % count) + torch.full((count,), total // count)
