"""Sparse attention over packed tokens of several sequences, whose ends data says (cu_seqlens), as serving code has it.

Every form takes queries [T, N, C], rotated lanes [T, N, R], a latent [T, C] and its rotated lanes [T, R]; queries
[T, H, D], keys [T, D] and weights [T, H] of an indexer; and where sequences start and end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.base import activations

TOKENS, HEADS, LATENT, ROPE, INDEX_HEADS, INDEX, LISTED, SCALE = 24, 4, 512, 64, 8, 128, 4, 0.1
BOUNDS = torch.tensor([0, 9, 11, 11, TOKENS], dtype=torch.int32)
Form = Callable[..., Any]


def inputs() -> tuple[Tensor, ...]:
    """Float64 inputs; no two scores of the indexer are equal in any dtype, as each key counts a lane."""
    shapes = ((TOKENS, HEADS, LATENT), (TOKENS, HEADS, ROPE), (TOKENS, LATENT), (TOKENS, ROPE))
    parts = [activations(seed, *shape) / 4 for seed, shape in enumerate(shapes)]
    order = torch.rand(TOKENS, 1, INDEX, generator=torch.Generator().manual_seed(7)).argsort(-1) + 1.0
    index = F.pad(order.double(), (0, 0, 0, INDEX_HEADS - 1))
    return *parts, index, torch.eye(TOKENS, INDEX).double(), torch.ones(TOKENS, INDEX_HEADS).double(), BOUNDS


def positions() -> Tensor:
    return torch.arange(TOKENS)


def searched(bounds: Tensor) -> Tensor:
    return torch.searchsorted(bounds[1:], positions(), right=True)


def bucketed(bounds: Tensor) -> Tensor:
    return torch.bucketize(positions(), bounds[1:], right=True)


def repeated(bounds: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(4), bounds.diff(), output_size=TOKENS)


def counted(bounds: Tensor) -> Tensor:
    return (bounds[1:] <= positions()[:, None]).sum(-1)


def causal_blocks(segment: Tensor) -> Tensor:
    """Which keys each token sees [T, T]."""
    return (segment[:, None] == segment) & (positions() <= positions()[:, None])


def scores(index: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    products = torch.einsum("shd,td->sht", index, keys).relu()
    return torch.einsum("sht,sh->st", products, weights)


def best(index: Tensor, keys: Tensor, weights: Tensor, seen: Tensor) -> Any:
    return scores(index, keys, weights).masked_fill(~seen, -math.inf).topk(LISTED, -1)


def behind_a_mask(q, turned, latent, rope, index, keys, weights, bounds, segments=searched):
    seen = causal_blocks(segments(bounds))
    places = best(index, keys, weights, seen).indices
    seen = seen & torch.zeros_like(seen).scatter(-1, places, True)
    given = (torch.einsum("snc,tc->snt", q, latent) + torch.einsum("snr,tr->snt", turned, rope)) * SCALE
    shares = given.masked_fill(~seen.unsqueeze(1), -math.inf).softmax(-1)
    return torch.einsum("snt,tc->snc", shares, latent)


def bucketed_bounds(*given):
    return behind_a_mask(*given, segments=bucketed)


def repeated_numbers(*given):
    return behind_a_mask(*given, segments=repeated)


def counted_bounds(*given):
    return behind_a_mask(*given, segments=counted)


def gathered(q, turned, latent, rope, index, keys, weights, bounds):
    """The rows that are listed are gathered."""
    found, places = best(index, keys, weights, causal_blocks(searched(bounds)))
    rows, lanes = latent[places], rope[places]
    given = (torch.einsum("snc,skc->snk", q, rows) + torch.einsum("snr,skr->snk", turned, lanes)) * SCALE
    shares = given.masked_fill((found == -math.inf).unsqueeze(1), -math.inf).softmax(-1)
    return torch.einsum("snk,skc->snc", shares, rows)


def by_own_list(q, turned, latent, rope, index, keys, weights, bounds):
    """A list that no indexer makes, of which each token attends to what it sees, itself at least."""
    seen = causal_blocks(searched(bounds))
    places = torch.cat((positions()[:, None], (positions()[:, None] + torch.arange(1, LISTED)) % TOKENS), -1)
    seen = seen & torch.zeros_like(seen).scatter(-1, places, True)
    given = (torch.einsum("snc,tc->snt", q, latent) + torch.einsum("snr,tr->snt", turned, rope)) * SCALE
    shares = given.masked_fill(~seen.unsqueeze(1), -math.inf).softmax(-1)
    return torch.einsum("snt,tc->snc", shares, latent)


ATTENDED: tuple[Form, ...] = (behind_a_mask, bucketed_bounds, repeated_numbers, counted_bounds, gathered)


def listed(q, turned, latent, rope, index, keys, weights, bounds):
    """The list alone, numbers of all tokens, -1 for what is not seen."""
    found, places = best(index, keys, weights, causal_blocks(searched(bounds)))
    return places.masked_fill(found == -math.inf, -1)


# look-alikes --------------------------------------------------------------------------------------------------------


def without_an_order(q, turned, latent, rope, index, keys, weights, bounds):
    """All tokens of the segment, those behind a query as well."""
    segment = searched(bounds)
    seen = segment[:, None] == segment
    found, places = best(index, keys, weights, seen)
    return places.masked_fill(found == -math.inf, -1)


def by_ranges(q, turned, latent, rope, index, keys, weights, bounds):
    """From a start to an end that data names for each token, as kernels in FP8 take them."""
    seen = (positions() >= bounds[searched(bounds)][:, None]) & (positions() <= positions()[:, None])
    found, places = best(index, keys, weights, seen)
    return places.masked_fill(found == -math.inf, -1)


def numbers_that_may_fall(q, turned, latent, rope, index, keys, weights, bounds):
    """Nothing says that tokens of a segment stand side by side."""
    segment = (positions() * bounds[1]) % 5
    found, places = best(index, keys, weights, causal_blocks(segment))
    return places.masked_fill(found == -math.inf, -1)


def strictly_before(q, turned, latent, rope, index, keys, weights, bounds):
    """No token sees itself."""
    segment = searched(bounds)
    seen = (segment[:, None] == segment) & (positions() < positions()[:, None])
    found, places = best(index, keys, weights, seen)
    return places.masked_fill(found == -math.inf, -1)


def segments_of_others(q, turned, latent, rope, index, keys, weights, bounds):
    """Queries and keys are numbered by different bounds."""
    seen = (searched(bounds)[:, None] == searched(bounds + 1)) & (positions() <= positions()[:, None])
    found, places = best(index, keys, weights, seen)
    return places.masked_fill(found == -math.inf, -1)


_MASK = "not proven to be a causal order or a length"
LOOKALIKES: dict[Form, str] = {
    without_an_order: _MASK,
    by_ranges: "starts at a key which data names",
    numbers_that_may_fall: _MASK,
    strictly_before: _MASK,
    segments_of_others: _MASK,
}
