"""Joint rewrites: pairs that make nodes dead which neither makes dead alone, as the two halves of a fused projection.

y = x W;  f(y[:n]), g(y[n:])   →   F(x, W[:n]), G(x, W[n:])      y dies if both are rewritten
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import torch.fx as fx

from fusion.records import LEAST_BENEFIT, Candidate


def pairs(candidates: Sequence[Candidate], on_top: Callable[[Candidate, Candidate], Candidate]) -> list[Candidate]:
    """Return a candidate for every two of `candidates` that save more together than each alone.

    It is the second of the two as one that needs the first; each has half of what both save. `on_top(second, first)`
    prices the second if the first is rewritten as well.
    """
    offered: list[Candidate] = []
    for one, other in _sharing(candidates):
        more = on_top(other, one)
        total = one.benefit + more.benefit
        if total > sum(max(each.benefit, 0.0) for each in (one, other)) + LEAST_BENEFIT:
            half = replace(one, benefit=total / 2)
            offered.append(replace(more, benefit=total / 2, needs=half))
    return offered


def _sharing(candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Candidate]]:
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
