"""Keys that are seen beside a list, the first ones or the last ones, in every way to write that; and what is none."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .sparse_attention_base import HEADS, UNFUSED, Block, K, X, entry

FIRST, LAST = 2, 3


def listing(places: Tensor, seen: Tensor) -> Tensor:
    return torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool).scatter(-1, places, True)


class Beside(Block):
    """A block whose mask, or whose list, shows other keys too."""

    def kept(self, rows, state):
        found = super().kept(rows, state)
        self.start = found[-1]
        return found

    def ahead(self, seen: Tensor) -> Tensor:
        """How far each key lies before its query [S, T]."""
        return (torch.arange(seen.shape[0]) + self.start)[:, None] - torch.arange(seen.shape[1])

    def places(self, x, c, key, cos, sin, seen):
        query = self.index_turned(F.linear(c, self.iq).view(*x.shape[:2], HEADS, X), cos, sin)
        scores = self.parts.score(query, key, F.linear(x, self.iw))
        places = self.chosen(scores, seen)
        self.mask = self.shown(places, seen).unsqueeze(1)
        return places

    def chosen(self, scores, seen):
        return self.parts.choose(scores, seen)

    def shown(self, places, seen):
        return listing(places, seen) & seen

    def attended(self, q, latent, rope, mask):
        return super().attended(q, latent, rope, self.mask)


# masks of both -------------------------------------------------------------------------------------------------------


class First(Beside):
    def shown(self, places, seen):
        return (listing(places, seen) | (torch.arange(seen.shape[1]) < FIRST)) & seen


class Last(Beside):
    def shown(self, places, seen):
        return (listing(places, seen) | (self.ahead(seen) < LAST)) & seen


class Both(Beside):
    """Last ones by where they begin."""

    def shown(self, places, seen):
        first = torch.arange(seen.shape[1]) <= FIRST - 1
        return seen & (first | listing(places, seen) | (self.ahead(seen) <= LAST - 1))


class Added(Beside):
    """As numbers that are added."""

    def shown(self, places, seen):
        return (listing(places, seen) | (torch.arange(seen.shape[1]) < FIRST)) & seen

    def attended(self, q, latent, rope, mask):
        lowered = torch.zeros(self.mask.shape, dtype=q.dtype).masked_fill(~self.mask, -math.inf)
        return Block.attended(self, q, latent, rope, lowered)


class Unseen(Beside):
    """The first keys of the queries that see none of them, too."""

    def shown(self, places, seen):
        return (listing(places, seen) & seen) | (torch.arange(seen.shape[1]) < FIRST)


# lists of both -------------------------------------------------------------------------------------------------------


def best(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -math.inf).topk(min(K, scores.shape[-1]), -1).indices


class FirstAlways(Beside):
    """Their scores are infinite."""

    def chosen(self, scores, seen):
        return best(scores.masked_fill(torch.arange(seen.shape[1]) < 1, math.inf), seen)


class LastAlways(Beside):
    def chosen(self, scores, seen):
        return best(scores.masked_fill(self.ahead(seen) < 2, math.inf), seen)


class Joined(Beside):
    """Behind the list; the scores of the first ones are lowered."""

    def chosen(self, scores, seen):
        first = torch.arange(seen.shape[1]) < FIRST
        places = best(scores.masked_fill(first, -math.inf), seen)
        return torch.cat((torch.arange(FIRST).expand(*places.shape[:2], -1), places), -1)


class JoinedAnyway(Beside):
    """Behind the list, which may name them too."""

    def chosen(self, scores, seen):
        places = best(scores, seen)
        return torch.cat((places, torch.arange(FIRST).expand(*places.shape[:2], -1)), -1)


# look-alikes ---------------------------------------------------------------------------------------------------------


class Between(Beside):
    """Keys neither at one end nor at the other."""

    def shown(self, places, seen):
        at = torch.arange(seen.shape[1])
        return (listing(places, seen) | ((at >= 2) & (at < 4))) & seen


class AllButLast(Beside):
    """Those that lie farther back."""

    def shown(self, places, seen):
        return (listing(places, seen) | (self.ahead(seen) > LAST)) & seen


class OfEachQuery(Beside):
    """As many first ones as the number of the query says."""

    def shown(self, places, seen):
        return (listing(places, seen) | (torch.arange(seen.shape[1]) < torch.arange(seen.shape[0])[:, None])) & seen


class OrAnother(Beside):
    """Two lists."""

    def shown(self, places, seen):
        return (listing(places, seen) | listing(places.flip(1), seen)) & seen


LISTED = {"indexer": 0}
SPELLINGS = (
    entry("first", ("chunk", "step"), block=First, **LISTED),
    entry("last", ("chunk", "step"), block=Last, **LISTED),
    entry("both", ("chunk", "step"), block=Both, **LISTED),
    entry("added", ("chunk", "step"), block=Added, **LISTED),
    entry("first_always", ("chunk", "step"), block=FirstAlways, **LISTED),
    entry("last_always", ("chunk", "step"), block=LastAlways, **LISTED),
    entry("joined", ("chunk", "step"), block=Joined, **LISTED),
    entry("joined_anyway", ("chunk", "step"), block=JoinedAnyway, **LISTED),
    entry("unseen", ("chunk", "step"), block=Unseen, **LISTED),
)
LOOKALIKES = (
    entry("between", ("chunk",), block=Between, **UNFUSED, reason="it shows keys that the list has not, and"),
    entry("all_but_last", ("chunk",), block=AllButLast, **UNFUSED, reason="it shows keys that the list has not, and"),
    entry("of_each_query", ("chunk",), block=OfEachQuery, **UNFUSED, reason="not proven to be the first or the last"),
    entry("or_another", ("chunk",), block=OrAnother, **UNFUSED),
)
