"""Named dims: `"*B S 1|N D"` matched against the sizes of a tensor, with `/` between alternatives.

`N` is one dim, `*B` any number of dims, `1|N` a dim of size 1 or N, and an integer a dim of that size. An alternative
that begins with `layout=TND:` is for calls whose argument `layout` is `"TND"`; alternatives without a condition differ
in their rank. The n-th alternatives of all tensors form one choice. A name has the same size in all tensors. Arguments
are read in the order of the mapping, and `1|N` must come after a tensor that has `N` as a dim of its own. The dims of a
list of tensors are those of each tensor in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fusion.errors import OperatorError
from fusion.operators.limit_texts import Decide, proven, same, tensors

Size = int | torch.SymInt
Bound = dict[str, Any]
"""Dim -> its size, or for a dim like `*B` the tuple of its sizes."""


@dataclass(frozen=True)
class Layout:
    """One alternative: the dims of one tensor, and the pair (argument, value) that selects it, None for any call."""

    text: str
    dims: tuple[str, ...]
    when: tuple[str, str] | None

    def selected(self, values: Mapping[str, Any]) -> bool:
        """Return True if the arguments `values` of a call satisfy the condition of this alternative."""
        return self.when is None or values.get(self.when[0]) == self.when[1]

    def fits(self, rank: int) -> bool:
        """Return True if a tensor of `rank` dims can have this layout."""
        variadic = sum(dim.startswith("*") for dim in self.dims)
        fixed = len(self.dims) - variadic
        return rank >= fixed if variadic else rank == fixed


@cache
def layouts(text: str) -> tuple[Layout, ...]:
    """Parse `text` into its alternatives, in order."""
    return tuple(_layout(part.strip()) for part in text.split("/"))


def _layout(text: str) -> Layout:
    condition, colon, dims = text.rpartition(":")
    attribute, _, value = condition.partition("=")
    return Layout(dims.strip(), tuple(dims.split()), (attribute.strip(), value.strip()) if colon else None)


@cache
def names(text: str) -> frozenset[str]:
    """Return the names that are a single dim in `text`, and so get their size from it: neither `*B` nor `1|N`."""
    dims = {dim for layout in layouts(text) for dim in layout.dims}
    return frozenset(dim for dim in dims if dim.isidentifier())


@dataclass(frozen=True)
class Misfit:
    """Mismatch of a call and its declared dims, as texts: the `problem` of an argument, and what is `required`."""

    problem: str
    required: str


def bind(declared: Mapping[str, str], values: Mapping[str, Any], decide: Decide = proven) -> Bound | Misfit:
    """Return dim -> size for the tensors of a call, or the first `Misfit` of a tensor and its declared dims.

    A symbolic comparison that `decide` leaves undecided counts as a misfit if `decide` is `proven`, else as a fit.

    Args:
        declared: argument -> text with the alternatives of its dims.
        values: argument -> value of the call.
        decide: how comparisons of symbolic sizes are decided.
    """
    shapes = [(name, tuple(each.shape)) for name in declared for each in tensors(values[name])]
    choices = _choices(declared, values)
    if not choices:
        return Misfit(_selectors(declared, values), _conditions(declared))
    fitting = (choice for choice in choices if all(choice[name].fits(len(shape)) for name, shape in shapes))
    reader = _Reader(decide)
    choice = next(fitting, choices[0])
    for name, shape in shapes:
        problem = reader.read(name, choice[name], shape)
        if problem:
            return Misfit(f"{name}: {problem}", f"{name} as [{choice[name].text}]{_where(choice)}")
    return reader.bound


def _choices(declared: Mapping[str, str], values: Mapping[str, Any]) -> list[dict[str, Layout]]:
    """List, as argument -> layout, the n-th alternatives of all texts for each n, if the conditions of all hold in the
    call.

    A text with fewer alternatives than another one begins again at its first.
    """
    count = max(len(layouts(text)) for text in declared.values())
    choices: list[dict[str, Layout]] = []
    for index in range(count):
        choice = {name: layouts(text)[index % len(layouts(text))] for name, text in declared.items()}
        if all(layout.selected(values) for layout in choice.values()):
            choices.append(choice)
    return choices


def _where(choice: Mapping[str, Layout]) -> str:
    """Format the conditions of the layouts in `choice` as " where layout is TND and ..", "" if there are none."""
    conditions = dict.fromkeys(layout.when for layout in choice.values() if layout.when)
    pairs = " and ".join(f"{attribute} is {value}" for attribute, value in conditions)
    return f" where {pairs}" if pairs else ""


def _conditions(declared: Mapping[str, str]) -> str:
    pairs = {layout.when: None for text in declared.values() for layout in layouts(text) if layout.when}
    return " or ".join(f"{attribute}={value!r}" for attribute, value in pairs)


def _selectors(declared: Mapping[str, str], values: Mapping[str, Any]) -> str:
    """Format the arguments that select among the layouts in `declared`, with their values."""
    attributes = {layout.when[0]: None for text in declared.values() for layout in layouts(text) if layout.when}
    return "; ".join(f"{each}: {values.get(each)!r}" for each in attributes)


class _Reader:
    """Reader that matches shapes against layouts, one tensor after the other; `bound` has one size for each name."""

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self._sources: dict[str, str] = {}
        self.bound: Bound = {}

    def read(self, name: str, layout: Layout, shape: Sequence[Size]) -> str | None:
        """Match the `shape` of the tensor `name` against `layout`, and add new sizes to `bound`; return the mismatch as
        text, or None."""
        free = len(shape) - sum(map(self._width, layout.dims))
        if free < 0:
            return f"there are only {len(shape)} dims in {list(shape)}"
        position = 0
        for dim in layout.dims:
            width = self._width(dim)
            if dim.startswith("*") and dim not in self.bound:
                width, free = free, 0
            sizes = tuple(shape[position : position + width])
            position += width
            problem = self._compare(name, dim, sizes)
            if problem:
                return problem.format(list(shape))
        return f"there are {len(shape)} dims in {list(shape)}" if position < len(shape) else None

    def _width(self, dim: str) -> int:
        if not dim.startswith("*"):
            return 1
        return len(self.bound[dim]) if dim in self.bound else 0

    def _compare(self, name: str, dim: str, sizes: tuple[Size, ...]) -> str | None:
        """Bind `dim` to `sizes`, sizes in the tensor `name`; if `dim` has a size already, compare.

        Returns the mismatch as text, with `{}` for the shape of the tensor; None if there is none.
        """
        value = sizes if dim.startswith("*") else sizes[0]
        expected = self._expected(dim)
        if not expected:
            self.bound[dim], self._sources[dim] = value, name
            return None
        truths = [same(value, size, self._decide) for size in expected.values()]
        if True in truths or (None in truths and self._decide is not proven):
            return None
        wanted = " or ".join(map(_listed, expected.values()))
        sources = "".join(
            f"; {part} of {self._sources[part]} is {_listed(size)}"
            for part, size in expected.items()
            if part in self._sources
        )
        what = "a dim" if dim.isdigit() else dim
        return f"{what} is {_listed(value)}, not {'proven to be ' if None in truths else ''}{wanted} in {{}}{sources}"

    def _expected(self, dim: str) -> dict[str, Any]:
        """Return name or number -> size for each alternative of `dim`, such as `1|N`; {} if `dim` is a name without a
        size yet.

        Raises:
            OperatorError: an alternative is a name without a size.
        """
        parts = dim.split("|")
        if len(parts) == 1 and not dim.isdigit():
            return {dim: self.bound[dim]} if dim in self.bound else {}
        unknown = [part for part in parts if not part.isdigit() and part not in self.bound]
        if unknown:
            raise OperatorError(
                f"reading the dims {dim!r}: {unknown[0]} has no size yet; name it alone in a tensor before"
            )
        return {part: int(part) if part.isdigit() else self.bound[part] for part in parts}


def _listed(size: Any) -> str:
    return str(list(size) if isinstance(size, tuple) else size)  # pyright: ignore[reportUnknownArgumentType]
