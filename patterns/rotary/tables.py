"""Tables of a rotation: a full-width value [.., D] for the lanes at which cosines, or sines, are read."""

from __future__ import annotations

from collections.abc import Container, Iterator

import numpy as np

from fusion.analysis.lanes import Index, same_lanes
from fusion.graph import Algebra, Value


class KnownTables:
    """The tables of one graph that were read so far: all rotations of a model share a few.

    `held` are the values that the model computes.
    """

    def __init__(self, algebra: Algebra, held: Container[Value] = ()) -> None:
        self.algebra, self._held = algebra, held
        self._known: dict[tuple[Value, bytes], Value | None] = {}

    def scaled(self, flat: Value, index: Index, factor: float) -> Value | None:
        """A full-width value whose lane j is lane index[j] of a table times a number, which the model may hold."""
        made = self.algebra.scale(flat, factor)
        if made in self._held:
            return self._of(made, index)
        table = self._of(flat, index)
        return table and self.algebra.scale(table, factor)

    def factored(self, x: Value, factor: float) -> tuple[Value, float]:
        """What is turned with as much of a factor as the model multiplies it by before, and that."""
        made = self.algebra.scale(x, factor)
        return (made, factor) if factor != 1 and made in self._held else (x, 1.0)

    def _of(self, flat: Value, index: Index) -> Value | None:
        key = flat, index.tobytes()
        if key not in self._known:
            self._known[key] = _table(self.algebra, flat, index)
        return self._known[key]


def _table(a: Algebra, flat: Value, index: Index) -> Value | None:
    size = len(index)
    for base, repeated in _readings_of(index):
        step = int(base[1] - base[0]) if len(base) > 1 else 1
        if step < 1 or not (np.diff(base) == step).all():
            continue
        start = int(base[0])
        whole = np.arange(start, start + size)
        if start + size <= flat.shape[-1] and same_lanes(flat, whole, index):
            return a.slice(flat, -1, start, start + size)
        part = a.slice(flat, -1, start, int(base[-1]) + 1, step)
        if part is None or repeated == "no":
            return part
        return _of_parts(a, part, repeated) if part.op in ("real", "imag") else _repeated(a, part, repeated)
    return None


def _readings_of(index: Index) -> Iterator[tuple[Index, str]]:
    half = len(index) // 2
    if (index[:half] == index[half:]).all():
        yield index[:half], "halves"
    if (index[::2] == index[1::2]).all():
        yield index[::2], "pairs"
    yield index, "no"


def _repeated(a: Algebra, part: Value, how: str) -> Value:
    """[.., D / 2] to [.., D], by halves or by pairs."""
    if how == "halves":
        return a.cat([part, part], -1)
    opened = a.expand(a.reshape(part, (*part.shape, 1)), (*part.shape, 2))
    return a.reshape(opened, (*part.shape[:-1], 2 * part.shape[-1]))


def _of_parts(a: Algebra, part: Value, how: str) -> Value:
    """The same of the real or the imaginary parts of a table, which are repeated together."""
    both = a.make("parts", part.args, (), (2, *part.shape), part.dtype)
    place = ("real", "imag").index(part.op)
    whole = _repeated(a, both, how)
    return a.reshape(a.cut(whole, 0, place, place + 1), whole.shape[1:])
