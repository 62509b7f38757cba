"""Named dims: `"*B S 1|N D"` read against the sizes of a tensor, with `/` between alternatives.

`N` is one dim, `*B` any number of dims, `1|N` is 1 or N, a number is itself. An alternative that begins with
`layout=TND:` is meant for calls whose argument `layout` is `"TND"`; the others are told apart by their rank. The
alternatives of several tensors belong together by position. A name means the same size everywhere; arguments are read
in the order of the mapping, so a name comes unaccompanied before `1|N` uses it. The dims of a list are those of every
tensor in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fusion.errors import OperatorError
from fusion.operators.predicates import same, tensors

Size = int | torch.SymInt
Bound = dict[str, Any]
"""Dim -> its size, or the tuple of its sizes for `*B`."""


@dataclass(frozen=True)
class Layout:
    """One alternative: the dims of one tensor, and the attribute value that selects it."""

    text: str
    dims: tuple[str, ...]
    when: tuple[str, str] | None

    def selected(self, values: Mapping[str, Any]) -> bool:
        """Whether the call's attributes allow this alternative."""
        return self.when is None or values.get(self.when[0]) == self.when[1]

    def fits(self, rank: int) -> bool:
        """Whether a tensor of `rank` dims can have this layout."""
        variadic = sum(dim.startswith("*") for dim in self.dims)
        fixed = len(self.dims) - variadic
        return rank >= fixed if variadic else rank == fixed


@cache
def layouts(text: str) -> tuple[Layout, ...]:
    """The alternatives written in `text`."""
    return tuple(_layout(part.strip()) for part in text.split("/"))


def _layout(text: str) -> Layout:
    condition, colon, dims = text.rpartition(":")
    attribute, _, value = condition.partition("=")
    return Layout(dims.strip(), tuple(dims.split()), (attribute.strip(), value.strip()) if colon else None)


@cache
def names(text: str) -> frozenset[str]:
    """The dims that `text` gives a size to, without those that stand for several."""
    dims = {dim for layout in layouts(text) for dim in layout.dims}
    return frozenset(dim for dim in dims if dim.isidentifier())


def bind(declared: Mapping[str, str], values: Mapping[str, Any]) -> Bound | str:
    """Sizes of the dims that `declared` (argument -> layouts) names, or what is wrong with the tensors in `values`."""
    shapes = [(name, tuple(each.shape)) for name in declared for each in tensors(values[name])]
    choices = _choices(declared, values)
    if not choices:
        return f"needs {_conditions(declared)}"
    fitting = (choice for choice in choices if all(choice[name].fits(len(shape)) for name, shape in shapes))
    choice = next(fitting, choices[0])
    bound: Bound = {}
    for name, shape in shapes:
        problem = _match(choice[name], shape, bound)
        if problem:
            return f"needs {name} as [{choice[name].text}]: {problem}"
    return bound


def _choices(declared: Mapping[str, str], values: Mapping[str, Any]) -> list[dict[str, Layout]]:
    count = max(len(layouts(text)) for text in declared.values())
    choices: list[dict[str, Layout]] = []
    for index in range(count):
        choice = {name: layouts(text)[index % len(layouts(text))] for name, text in declared.items()}
        if all(layout.selected(values) for layout in choice.values()):
            choices.append(choice)
    return choices


def _conditions(declared: Mapping[str, str]) -> str:
    pairs = {layout.when: None for text in declared.values() for layout in layouts(text) if layout.when}
    return " or ".join(f"{attribute}={value!r}" for attribute, value in pairs)


def _match(layout: Layout, shape: Sequence[Size], bound: Bound) -> str | None:
    """Read `shape` as `layout`, adding to `bound`; the result says what is wrong."""
    free = len(shape) - sum(_width(dim, bound) for dim in layout.dims)
    if free < 0:
        return f"there are only {len(shape)} dims in {list(shape)}"
    position = 0
    for dim in layout.dims:
        width = _width(dim, bound)
        if dim.startswith("*") and dim not in bound:
            width, free = free, 0
        sizes = tuple(shape[position : position + width])
        position += width
        problem = _read(dim, sizes, bound)
        if problem:
            return f"{problem} in {list(shape)}"
    return f"there are {len(shape)} dims in {list(shape)}" if position < len(shape) else None


def _width(dim: str, bound: Bound) -> int:
    if not dim.startswith("*"):
        return 1
    return len(bound[dim]) if dim in bound else 0


def _read(dim: str, sizes: tuple[Size, ...], bound: Bound) -> str | None:
    value = sizes if dim.startswith("*") else sizes[0]
    expected = _expected(dim, bound)
    if not expected:
        bound[dim] = value
        return None
    truths = [same(value, size) for size in expected]
    if True in truths:
        return None
    wanted = " or ".join(str(list(size) if isinstance(size, tuple) else size) for size in expected)  # pyright: ignore[reportUnknownArgumentType]
    found = list(value) if isinstance(value, tuple) else value
    return f"{dim} is {found}, not {wanted}" if None not in truths else f"{dim} is {found}, not proven to be {wanted}"


def _expected(dim: str, bound: Bound) -> list[Any]:
    """Sizes that `dim` may have, none when this is where its name is given a size."""
    parts = dim.split("|")
    if len(parts) == 1 and not dim.isdigit():
        return [bound[dim]] if dim in bound else []
    unknown = [part for part in parts if not part.isdigit() and part not in bound]
    if unknown:
        raise OperatorError(f"reading the dims {dim!r}: {unknown[0]} has no size yet; name it alone in a tensor before")
    return [int(part) if part.isdigit() else bound[part] for part in parts]
