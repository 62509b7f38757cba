"""Cuts: find where a sequence of calls can be divided into layers, judged by the labels of the calls alone.

A call that occurs once in each layer marks layers. So each label that occurs often is tried as a mark, and of the
divisions that leave little to search the one with the fewest kinds of layers is preferred. The steps of an unrolled
loop are no layers: they read no inputs of the graph, as layers read weights, and what they compute depends on their
number.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

from fusion.stages.layers.searched_layers import contexts, retained

FEWEST = 4
"""Least number of layers of which one can be left out: the first, one of those in the middle, and the last stay."""
_MARKS = 32
"""Greatest number of marks that are compared."""


@dataclass(frozen=True)
class Cut:
    """A division of calls into layers.

    Attributes:
        starts: index of the first call of each layer, and of the first call behind the last layer.
        kinds: number of kinds of layers, judged by labels.
        to_search: number of calls left to search, judged by labels.
    """

    starts: tuple[int, ...]
    kinds: int
    to_search: int


def cuts(labels: Sequence[int], crossing: Sequence[int], reading: Sequence[bool]) -> Iterator[Cut]:
    """Yield divisions of calls into layers: fewest kinds of layers first, then fewest calls to search.

    A layer begins at each call with one label that recurs in `labels`, shifted to where the fewest results cross.
    Divisions that save less than half of the most calls saved are dropped.

    Args:
        labels: a number for each call, equal for equal calls.
        crossing: the number of results that are read across each place between two calls.
        reading: for each call, True if it reads an input of the graph.
    """
    text, inputs = _Text(labels), list(accumulate(reading, initial=0))
    able = (marks for marks in _marks(labels) if not text.repeats_steps(marks, inputs))
    tried = [(text.cut(marks), marks) for marks in islice(able, _MARKS)]
    gain = max((len(labels) - cut.to_search for cut, _ in tried), default=0)
    good = [(cut, marks) for cut, marks in tried if 0 < gain <= 2 * (len(labels) - cut.to_search)]
    good.sort(key=lambda each: (each[0].kinds, each[0].to_search, each[0].starts))
    return (text.cut(_moved(labels, crossing, marks)) for _, marks in good)


def crossing(last_read: Sequence[int]) -> list[int]:
    """Count for each place between calls the results that are read across it.

    `last_read` has for each call the index of the last call that reads its result.
    """
    steps = [0] * (len(last_read) + 1)
    for place, last in enumerate(last_read):
        if last > place:
            steps[place + 1] += 1
            steps[last + 1] -= 1
    return list(accumulate(steps))


def _marks(labels: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the places of each label that occurs `FEWEST` times or more, the widest span first.

    Of labels with equal distances between their places only the first counts.
    """
    places: dict[int, list[int]] = defaultdict(list)
    for place, label in enumerate(labels):
        places[label].append(place)
    often = [each for each in places.values() if len(each) >= FEWEST]
    by_distances = {tuple(two - one for one, two in pairwise(each)): each for each in reversed(often)}
    return map(tuple, sorted(by_distances.values(), key=lambda each: (each[0] - each[-1], each[0])))


class _Text:
    """Labels as bytes, so that equal layers are equal substrings."""

    def __init__(self, labels: Sequence[int]) -> None:
        self._bytes = array("q", labels).tobytes()
        self._length = len(labels)

    def cut(self, starts: Sequence[int]) -> Cut:
        """Return the division at `starts`, with the kinds and the number of calls left to search.

        A unique layer that begins with a recurring one is cut in two.
        """
        pieces = [self._piece(*each) for each in pairwise((*starts, self._length))]
        counts = Counter(pieces)
        again = sorted((each for each, count in counts.items() if count > 1), key=len, reverse=True)
        edges = set(starts)
        for start, piece in zip(starts, pieces, strict=True):
            if counts[piece] == 1 or start == starts[-1]:
                edges.update(islice((start + len(each) // 8 for each in again if piece.startswith(each)), 1))
        edges = sorted(edges)
        layers = [self._piece(*each) for each in pairwise(edges)]
        to_search = sum(len(layers[place - 1]) for place in retained(contexts([0, *layers, 1]))[1:-1]) // 8
        outside = edges[0] + self._length - edges[-1]
        return Cut(tuple(edges), len(set(layers)), to_search + outside)

    def repeats_steps(self, marks: Sequence[int], inputs: Sequence[int]) -> bool:
        """Return True if two pieces between `marks` are equal, and no call from the first to the second reads an input.

        `inputs` counts the calls before each place that read one.
        """
        before: dict[bytes, int] = {}
        for start, stop in pairwise(marks):
            piece = self._piece(start, stop)
            if piece in before and inputs[before[piece]] == inputs[stop]:
                return True
            before[piece] = start
        return False

    def _piece(self, start: int, stop: int) -> bytes:
        return self._bytes[8 * start : 8 * stop]


def _moved(labels: Sequence[int], crossing: Sequence[int], marks: Sequence[int]) -> tuple[int, ...]:
    """Shift all `marks` by one distance to where the fewest results cross them.

    Marks are shifted only over calls whose labels agree at all marks.
    """
    room = min(two - one for one, two in pairwise((*marks, len(labels))))
    before = range(min(room, marks[0]))
    left = next((by for by in before if len({labels[each - by - 1] for each in marks}) > 1), len(before))
    right = next((by for by in range(room) if len({labels[each + by] for each in marks}) > 1), room - 1)
    moved = [tuple(each + by for each in marks) for by in range(-left, right + 1)]
    return min(moved, key=lambda each: (sum(crossing[place] for place in each), each))
