"""Tables of rotations: full-width values [.., D] of cosines or sines, indexed by the lane of the result."""

from __future__ import annotations

from collections.abc import Container, Iterator

import numpy as np

from fusion.analysis.lanes import Index, same_lanes
from fusion.graph import Algebra, Value


class KnownTables:
    """The memo of tables of one graph, as all rotations of a model share a few.

    `computed` are the values that the model computes.
    """

    def __init__(self, algebra: Algebra, computed: Container[Value] = ()) -> None:
        self.algebra, self._computed = algebra, computed
        self._known: dict[tuple[Value, bytes], Value | None] = {}

    def scaled(self, flat: Value, index: Index, factor: float) -> Value | None:
        """Return the table [.., D] with lane j = `factor` · lane `index`[j] of `flat`; None if it is no plain slice.

        A slice with any positive step is plain, once, repeated as [part, part], or with each lane twice. A product of
        `flat` and `factor` that the model computes is read instead of `flat`.
        """
        made = self.algebra.scale(flat, factor)
        if made in self._computed:
            return self._table_at(made, index)
        table = self._table_at(flat, index)
        return table and self.algebra.scale(table, factor)

    def factored(self, x: Value, factor: float) -> tuple[Value, float]:
        """Return (`x` · `factor`, `factor`) if the model computes this product, else (`x`, 1): a value, and its part of
        `factor`.
        """
        made = self.algebra.scale(x, factor)
        return (made, factor) if factor != 1 and made in self._computed else (x, 1.0)

    def _table_at(self, flat: Value, index: Index) -> Value | None:
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
        consecutive = np.arange(start, start + size)
        if start + size <= flat.shape[-1] and same_lanes(flat, consecutive, index):
            return a.slice(flat, -1, start, start + size)
        part = a.slice(flat, -1, start, int(base[-1]) + 1, step)
        if part is None or repeated == "no":
            return part
        return _repeated_part(a, part, repeated) if part.op in ("real", "imag") else _repeated(a, part, repeated)
    return None


def _readings_of(index: Index) -> Iterator[tuple[Index, str]]:
    half = len(index) // 2
    if (index[:half] == index[half:]).all():
        yield index[:half], "halves"
    if (index[::2] == index[1::2]).all():
        yield index[::2], "pairs"
    yield index, "no"


def _repeated(a: Algebra, part: Value, how: str) -> Value:
    """Repeat `part` [.., D / 2] to [.., D]: as [part, part] if `how` is "halves", else each entry twice."""
    if how == "halves":
        return a.cat([part, part], -1)
    opened = a.expand(a.reshape(part, (*part.shape, 1)), (*part.shape, 2))
    return a.reshape(opened, (*part.shape[:-1], 2 * part.shape[-1]))


def _repeated_part(a: Algebra, part: Value, how: str) -> Value:
    """Repeat `part` [.., D / 2], the real or imaginary part of a value, to [.., D] by `how`, as `_repeated` does.

    One value repeats both parts, so that the tables of cosines and sines share it.
    """
    both = a.make("parts", part.args, (), (2, *part.shape), part.dtype)
    place = ("real", "imag").index(part.op)
    repeated = _repeated(a, both, how)
    return a.reshape(a.cut(repeated, 0, place, place + 1), repeated.shape[1:])
