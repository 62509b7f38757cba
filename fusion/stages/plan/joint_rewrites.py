"""Joint rewrites: candidates that make nodes dead which none makes dead alone, as the two halves of a fused projection.

y = x W;  f(y[:n]), g(y[n:])   →   F(x, W[:n]), G(x, W[n:])      y dies if both are rewritten

k, v = writes of sequence after sequence, each read between     all but the last write die if attention reads that
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import torch.fx as fx

from fusion.records import LEAST_BENEFIT, Candidate

OnTop = Callable[[Candidate, Sequence[Candidate]], Candidate]
"""Prices a candidate if others are rewritten as well."""


def groups(candidates: Sequence[Candidate], on_top: OnTop) -> list[Candidate]:
    """Return a joint candidate for every pair of `candidates` that saves more jointly than apart, and for every
    candidate with all its partners in such pairs.

    A joint candidate is the last of its members, which `needs` the member before, and so on; each has an equal share
    of the benefit of all.
    """
    partners = dict[int, list[Candidate]]()
    offered: list[Candidate] = []
    for pair in sharing_pairs(candidates):
        joined = _jointly(pair, on_top)
        if joined is None:
            continue
        offered.append(joined)
        for one, other in (pair, pair[::-1]):
            partners.setdefault(id(one), [one]).append(other)
    several = (_apart(members) for members in partners.values())
    more = (_jointly(each, on_top) for each in several if len(each) > 2)
    return [*offered, *filter(None, more)]


def _jointly(members: Sequence[Candidate], on_top: OnTop) -> Candidate | None:
    """Return the last of `members` as one that needs the others in turn; None if all save no more than each alone."""
    first, *others = members
    priced = [first]
    for each in others:
        priced.append(on_top(each, priced))
    total = sum(each.benefit for each in priced)
    if total <= sum(max(each.benefit, 0.0) for each in members) + LEAST_BENEFIT:
        return None
    needed: Candidate | None = None
    for each in priced:
        needed = replace(each, benefit=total / len(priced), needs=needed)
    return needed


def _apart(members: Sequence[Candidate]) -> list[Candidate]:
    """Return the first of `members` and those of the others that overlap with none before them."""
    chosen: list[Candidate] = []
    for each in members:
        if not any(_overlap(each, other) for other in chosen):
            chosen.append(each)
    return chosen


def sharing_pairs(candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    """Yield pairs of candidates that replace different nodes and jointly make a node dead.

    All users of such a node die with one candidate or the other.
    """
    alone = [each for each in candidates if each.needs is None]
    readers: dict[fx.Node, list[int]] = defaultdict(list)
    for number, each in enumerate(alone):
        for source in dict.fromkeys(source for node in each.dying for source in node.all_input_nodes):
            if source.op == "call_function" and source not in each.dying and len(source.users) > 1:
                readers[source].append(number)
    both = {(min(pair), max(pair)) for node, numbers in readers.items() for pair in _covering(node, numbers, alone)}
    return ((alone[one], alone[other]) for one, other in sorted(both))


def _covering(node: fx.Node, numbers: Sequence[int], alone: Sequence[Candidate]) -> Iterator[tuple[int, int]]:
    """Yield the pairs among the candidates `numbers` that together make all users of `node` dead, and neither alone.

    `alone` are all candidates. Those that make too few users dead to be one of two are skipped: no pair covers a node
    with many users, such as a table of rotations.
    """
    users = frozenset(node.users)
    gone = {number: users.intersection(alone[number].dying) for number in numbers}
    most = max(map(len, gone.values()))
    able = [number for number in numbers if len(gone[number]) + most >= len(users)]
    for one, other in combinations(able, 2):
        covered = gone[one] != users and gone[one] | gone[other] == users
        if covered and not _overlap(alone[one], alone[other]):
            yield one, other


def _overlap(one: Candidate, other: Candidate) -> bool:
    """Return True if one candidate replaces a node that the other replaces or makes dead."""
    pairs = ((one, other), (other, one))
    return any(not dead.dying.isdisjoint(root.match.makers) for root, dead in pairs)
