"""Cuts: where a sequence of calls can be divided into layers, judged by the labels of the calls alone.

Whatever occurs once in each layer marks layers. So each label that occurs often is tried as such a mark, and the
division is preferred that has the fewest kinds of layers among those that leave little to search.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

from fusion.stages.layers.walk import contexts, retained

FEWEST = 4
"""Layers from which on some can be left out: the first, one for those in the middle, and the last stay."""
_MARKS = 32
"""How many different ways to mark layers are compared."""


@dataclass(frozen=True)
class Cut:
    """A way to divide calls into layers.

    Attributes:
        starts: where the layers begin, and where what stands behind the last one begins.
        kinds: how many kinds of layers there are, judged by labels.
        left: how many calls are left to search, judged by labels.
    """

    starts: tuple[int, ...]
    kinds: int
    left: int


def cuts(labels: Sequence[int], crossing: Sequence[int]) -> Iterator[Cut]:
    """Yield ways to divide calls with these `labels` into layers, the best first.

    `crossing` counts, for each place between two calls, the results that are read across it: layers begin where it is
    low.
    """
    text = _Text(labels)
    found = [(text.cut(marks), marks) for marks in islice(_marks(labels), _MARKS)]
    gain = max((len(labels) - cut.left for cut, _ in found), default=0)
    able = [(cut, marks) for cut, marks in found if 0 < gain <= 2 * (len(labels) - cut.left)]
    able.sort(key=lambda each: (each[0].kinds, each[0].left, each[0].starts))
    return (text.cut(_moved(labels, crossing, marks)) for _, marks in able)


def crossing(last_read: Sequence[int]) -> list[int]:
    """Count for each place between calls the results that are read across it, given where each is read last."""
    steps = [0] * (len(last_read) + 1)
    for place, last in enumerate(last_read):
        if last > place:
            steps[place + 1] += 1
            steps[last + 1] -= 1
    return list(accumulate(steps))


def _marks(labels: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the places of each label that occurs `FEWEST` times, widest span first; of equal distances one."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, label in enumerate(labels):
        places[label].append(place)
    often = [each for each in places.values() if len(each) >= FEWEST]
    apart = {tuple(two - one for one, two in pairwise(each)): each for each in reversed(often)}
    return map(tuple, sorted(apart.values(), key=lambda each: (each[0] - each[-1], each[0])))


class _Text:
    """Labels as text, in which equal layers are equal pieces."""

    def __init__(self, labels: Sequence[int]) -> None:
        self._bytes = array("q", labels).tobytes()
        self._length = len(labels)

    def cut(self, starts: Sequence[int]) -> Cut:
        """Judge the division at `starts`, cut further where a layer that occurs elsewhere begins a longer one."""
        pieces = [self._piece(*each) for each in pairwise((*starts, self._length))]
        counts = Counter(pieces)
        again = sorted((each for each, count in counts.items() if count > 1), key=len, reverse=True)
        edges = set(starts)
        for start, piece in zip(starts, pieces, strict=True):
            if counts[piece] == 1 or start == starts[-1]:
                edges.update(islice((start + len(each) // 8 for each in again if piece.startswith(each)), 1))
        edges = sorted(edges)
        layers = [self._piece(*each) for each in pairwise(edges)]
        left = sum(len(layers[place - 1]) for place in retained(contexts([0, *layers, 1]))[1:-1]) // 8
        outside = edges[0] + self._length - edges[-1]
        return Cut(tuple(edges), len(set(layers)), left + outside)

    def _piece(self, start: int, stop: int) -> bytes:
        return self._bytes[8 * start : 8 * stop]


def _moved(labels: Sequence[int], crossing: Sequence[int], marks: Sequence[int]) -> tuple[int, ...]:
    """Move all marks by one distance, over calls that are the same at each, to where the fewest results cross them."""
    room = min(two - one for one, two in pairwise((*marks, len(labels))))
    before = range(min(room, marks[0]))
    left = next((by for by in before if len({labels[each - by - 1] for each in marks}) > 1), len(before))
    right = next((by for by in range(room) if len({labels[each + by] for each in marks}) > 1), room - 1)
    moved = [tuple(each + by for each in marks) for by in range(-left, right + 1)]
    return min(moved, key=lambda each: (sum(crossing[place] for place in each), each))
