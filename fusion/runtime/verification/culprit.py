"""The wrong rewrite: the first one, in the order of the graph, with which a graph computes something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.fx as fx

from fusion.records import Candidate
from fusion.report.outcome import Outcome
from fusion.runtime.verification.runs import standalone

Again = Callable[[int | None], tuple[fx.GraphModule, Outcome]]
"""Function that rewrites a copy of the plain graph, with a given number of rewrites at most; None for all."""


@dataclass(frozen=True)
class Culprit:
    """A wrong rewrite.

    Attributes:
        candidate: the rewrite.
        number: number of rewrites up to and with it, in the order of the graph.
        count: number of all rewrites.
        without: the graph with the rewrites before it, which is right; takes the inputs of the plain graph.
        guilty: the graph with it as well.
    """

    candidate: Candidate
    number: int
    count: int
    without: fx.GraphModule
    guilty: fx.GraphModule


def culprit(again: Again, is_wrong: Callable[[fx.GraphModule], bool]) -> Culprit | None:
    """Bisect the number of rewrites for which `is_wrong` holds of the graph; None where even all of them are right.

    `again` rewrites the plain graph with at most a given number of rewrites.
    """
    count = len(again(None)[1].chosen)
    right, wrong = 0, count
    if not count:
        return None
    last, first = _trial(again, count), None  # the trials of `wrong` and `right`
    if not is_wrong(last[0]):
        return None
    while wrong - right > 1:
        middle = (right + wrong) // 2
        tried = _trial(again, middle)
        if is_wrong(tried[0]):
            wrong, last = middle, tried
        else:
            right, first = middle, tried
    (without, before), (guilty, after) = first or _trial(again, 0), last
    known = set(map(_key, before.chosen))
    candidate = next((each for each in after.chosen if _key(each) not in known), after.chosen[-1])
    return Culprit(candidate, wrong, count, without, guilty)


def _trial(again: Again, fuel: int) -> tuple[fx.GraphModule, Outcome]:
    gm, outcome = again(fuel)
    return standalone(gm, outcome.prepared), outcome


def _key(candidate: Candidate) -> tuple[str, str, str]:
    return candidate.match.rule.name, candidate.match.form, candidate.match.node.name
