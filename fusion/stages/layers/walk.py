"""Walk: which layers of a sequence have to be searched, so that each of the others meets the same neighbours as one."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field


def contexts(kinds: Sequence[Hashable]) -> list[Hashable]:
    """List for each layer the kinds of the one before it, its own, and that of the one behind it."""
    return [(place > 0, *kinds[max(place - 1, 0) : place + 2]) for place in range(len(kinds))]


def retained(contexts: Sequence[Hashable]) -> list[int]:
    """List the places, in order, that are left once every loop is cut out which has no context for the first time.

    Between two places of equal context everything can be left out: what stands behind the later one meets the earlier
    one as it met the later one. Each context is retained at least once, and each retained place has neighbours as
    before. Example: of A A A A B A A A A B, with one neighbour on each side, some seven are left, however many come.
    """
    walk = _Walk()
    for place, context in enumerate(contexts):
        walk.step(place, context)
    return walk.places


@dataclass
class _Walk:
    """The places retained so far, as a stack.

    Attributes:
        places: the places.
        contexts: their contexts.
        at: for each context the heights of the stack at which it stands.
        fresh: the height of the last context that was new; nothing below it can be left out any more.
    """

    places: list[int] = field(default_factory=list[int])
    contexts: list[Hashable] = field(default_factory=list[Hashable])
    at: dict[Hashable, list[int]] = field(default_factory=dict[Hashable, list[int]])
    fresh: int = 0

    def step(self, place: int, context: Hashable) -> None:
        """Add a place, or leave it out together with everything behind an earlier place of the same context."""
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
    """Yield for each place the retained place that is searched for it: itself, or the first of the same context."""
    first: dict[Hashable, int] = {}
    for place in places:
        first.setdefault(contexts[place], place)
    itself = set(places)
    return (place if place in itself else first[context] for place, context in enumerate(contexts))
