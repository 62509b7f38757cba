"""Walk: choose the layers to search, so that each other layer has the kind and the neighbours of one of them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field


def contexts(kinds: Sequence[Hashable]) -> list[Hashable]:
    """Return for each layer a key of the kinds of the layer before it, of itself, and of the one behind it."""
    return [(place > 0, *kinds[max(place - 1, 0) : place + 2]) for place in range(len(kinds))]


def retained(contexts: Sequence[Hashable]) -> list[int]:
    """Return, in order, the indices that remain once every loop is cut out that has no new context.

    The layers behind an index, up to another one of equal context, can be left out: the layer behind the later index
    then follows the earlier one, whose kind and neighbours are the same. Each context is retained at least once, and
    retained layers have neighbours of the same kinds as before. Example: of A A A A B A A A A B .. about seven are
    retained, however long the sequence is.
    """
    walk = _Walk()
    for place, context in enumerate(contexts):
        walk.step(place, context)
    return walk.places


@dataclass
class _Walk:
    """The indices retained so far, as a stack.

    Attributes:
        places: the indices.
        contexts: their contexts.
        at: for each context, the heights of the stack at which it occurs.
        fresh: height of the last context that was new; nothing below it may be cut out.
    """

    places: list[int] = field(default_factory=list[int])
    contexts: list[Hashable] = field(default_factory=list[Hashable])
    at: dict[Hashable, list[int]] = field(default_factory=dict[Hashable, list[int]])
    fresh: int = 0

    def step(self, place: int, context: Hashable) -> None:
        """Add the index `place`; or, if an earlier index has the same `context`, cut out all above that one instead."""
        heights = self.at.setdefault(context, [])
        if not heights:
            self.fresh = len(self.places)
        height = next((each for each in heights if each >= self.fresh), None)
        if height is None:
            heights.append(len(self.places))
            self.places.append(place)
            self.contexts.append(context)
            return
        while len(self.places) > height + 1:
            self.places.pop()
            self.at[self.contexts.pop()].pop()


def stand_ins(contexts: Sequence[Hashable], places: Sequence[int]) -> Iterator[int]:
    """Yield for each index the retained index that stands for it: itself, or the first of the same context."""
    first: dict[Hashable, int] = {}
    for place in places:
        first.setdefault(contexts[place], place)
    itself = set(places)
    return (place if place in itself else first[context] for place, context in enumerate(contexts))
