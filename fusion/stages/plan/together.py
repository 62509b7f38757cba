"""Rewrites that leave nodes needless together and neither alone: both halves of a layer that each takes a part of.

y = x W;  f(y[:n]), g(y[n:])   →   F(x, W[:n]), G(x, W[n:])      neither makes y needless, both do
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import torch.fx as fx

from fusion.records import LEAST_BENEFIT, Candidate


def pairs(found: Sequence[Candidate], beside: Callable[[Candidate, Candidate], Candidate]) -> list[Candidate]:
    """For every two of these that save more together, the second as one that needs the first.

    `beside` gives the one candidate with what comes on top of the other. What both save is told of each in halves: they
    are chosen together or not at all.
    """
    offered: list[Candidate] = []
    for one, other in _sharing(found):
        more = beside(other, one)
        total = one.benefit + more.benefit
        if total > sum(max(each.benefit, 0.0) for each in (one, other)) + LEAST_BENEFIT:
            half = replace(one, benefit=total / 2)
            offered.append(replace(more, benefit=total / 2, needs=half))
    return offered


def _sharing(found: Sequence[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
    """Two candidates that replace different nodes, where all that reads some node goes with either of them."""
    alone = [each for each in found if each.needs is None]
    readers: dict[fx.Node, list[int]] = defaultdict(list)
    for number, each in enumerate(alone):
        for source in dict.fromkeys(source for node in each.dying for source in node.all_input_nodes):
            if source.op == "call_function" and source not in each.dying and len(source.users) > 1:
                readers[source].append(number)
    both = {(min(pair), max(pair)) for node, numbers in readers.items() for pair in _covering(node, numbers, alone)}
    return ((alone[one], alone[other]) for one, other in sorted(both))


def _covering(node: fx.Node, numbers: Sequence[int], alone: Sequence[Candidate]) -> Iterator[tuple[int, int]]:
    """Pairs with which all readers of a node go; what many share, as tables of rotations, no two of them cover."""
    users = frozenset(node.users)
    gone = {number: users.intersection(alone[number].dying) for number in numbers}
    most = max(map(len, gone.values()))
    able = [number for number in numbers if len(gone[number]) + most >= len(users)]
    for one, other in combinations(able, 2):
        covered = gone[one] != users and gone[one] | gone[other] == users
        if covered and not _overlap(alone[one], alone[other]):
            yield one, other


def _overlap(one: Candidate, other: Candidate) -> bool:
    """Whether one replaces a node that the other replaces or needs no more."""
    pairs = ((one, other), (other, one))
    return any(not of.dying.isdisjoint(by.match.makers) for by, of in pairs)
