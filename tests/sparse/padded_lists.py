"""Sparse attention behind a mask that no words can say: padding on any side, masks that are passed in, and look-alikes.

Every form takes queries, latents, keys' rotated lanes and their projection, the parts of an indexer, and then a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tests.examples.masks import added, causal
from tests.examples.sparse_attention import LISTED, B, N, S, by_eager, by_matmul, keys_values

Form = Callable[..., Any]


def over_latent(form: Form) -> Form:
    """Over keys and values that are expanded from a latent."""

    @wraps(form)
    def attended(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *given: Tensor) -> Any:
        return form(q, *keys_values(latent, rope, up), *given)

    return attended


def seen(valid: Tensor) -> Tensor:
    """Where query i of [B, S, S] sees key j, of keys that are valid [B, S]."""
    return causal(S, S) & valid.bool()[:, None]


def best(index: tuple[Tensor, ...], shown: Tensor, count: int = LISTED, **how: Any) -> Tensor:
    """The places of the best keys that are shown."""
    return by_matmul(*index).masked_fill(~shown, -math.inf).topk(count, dim=-1, **how).indices


def listing(places: Tensor) -> Tensor:
    """True at the keys that are listed [B, S, S]."""
    return torch.zeros(*places.shape[:2], S, dtype=torch.bool).scatter(-1, places, True)


def by_matmuls(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """By a mask [B, S, T] of booleans, or one that is added; a query that sees none gives 0, as by sdpa."""
    scores, mask = q @ k.mT * q.shape[-1] ** -0.5, mask.unsqueeze(1)
    scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.float().softmax(-1).nan_to_num().to(q.dtype) @ v


# spellings: how padding is written, one mask [B, S] of 0 and 1 each ---------------------------------------------------


@over_latent
def booleans(q, k, v, *given):
    """As transformers gives them to attention."""
    *index, valid = given
    shown = seen(valid)
    return by_matmuls(q, k, v, listing(best(index, shown)) & shown)


@over_latent
def a_mask_of_hidden_keys(q, k, v, *given):
    *index, valid = given
    hidden = ~seen(valid)
    left = torch.ones(B, S, S, dtype=torch.bool).scatter(-1, best(index, ~hidden), False)
    return by_matmuls(q, k, v, ~(left | hidden))


@over_latent
def filled_in(q, k, v, *given):
    """A mask that is added, -inf where a key is hidden or not listed."""
    *index, valid = given
    mask = added(~seen(valid), q.dtype)
    places = (by_matmul(*index) + mask).topk(LISTED, dim=-1).indices
    left = torch.ones(B, S, S, dtype=torch.bool).scatter(-1, places, False)
    return by_matmuls(q, k, v, mask.masked_fill(left, -math.inf))


@over_latent
def written_out(q, k, v, *given):
    """Where no key is left, the softmax gives NaN."""
    *index, valid = given
    shown = seen(valid)
    return by_eager(q, k, v, listing(best(index, shown)) & shown)


@over_latent
def lowest(q, k, v, *given):
    """As eager attention of transformers: where no key is left, the mean of all values."""
    *index, valid = given
    lowest = torch.finfo(q.dtype).min
    mask = torch.zeros(B, S, S, dtype=q.dtype).masked_fill(~seen(valid), lowest)
    places = (by_matmul(*index) + mask).topk(LISTED, dim=-1).indices
    left = torch.ones(B, S, S, dtype=torch.bool).scatter(-1, places, False)
    mask = mask.masked_fill(left, lowest).unsqueeze(1)
    return (((q @ k.mT) * 0.25 + mask).softmax(-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


@over_latent
def in_no_order(q, k, v, *given):
    """The list says nothing of the order in which hidden keys stand."""
    *index, valid = given
    shown = seen(valid)
    return by_matmuls(q, k, v, listing(best(index, shown, sorted=False)) & shown)


@over_latent
def narrow_places(q, k, v, *given):
    *index, valid = given
    shown = seen(valid)
    return by_matmuls(q, k, v, listing(best(index, shown).to(torch.int32).long()) & shown)


@over_latent
def hidden_from_attention_alone(q, k, v, *given):
    """Keys that are listed and hidden stand anywhere among those that are seen."""
    *index, valid = given
    return by_matmuls(q, k, v, listing(best(index, causal(S, S))) & seen(valid))


@over_latent
def hidden_from_scores_as_well(q, k, v, *given):
    """The scores' mask hides another key."""
    *index, valid = given
    others = seen(valid) & (torch.arange(S) != 2)
    return by_matmuls(q, k, v, listing(best(index, others)) & seen(valid))


@over_latent
def lowered_before(q, k, v, *given):
    """Of what is hidden from the indexer alone, some is listed among what is hidden from attention."""
    *index, valid = given
    lowered = by_matmul(*index).masked_fill(torch.arange(S) == 3, -math.inf).masked_fill(~seen(valid), -math.inf)
    return by_matmuls(q, k, v, listing(lowered.topk(LISTED, dim=-1).indices) & seen(valid))


@over_latent
def passed_in(q, k, v, *given):
    """A list that was made elsewhere."""
    query, _, _, valid = given
    places = query[..., 0, :LISTED].long() % S
    return by_matmuls(q, k, v, listing(places) & seen(valid))


@over_latent
def by_a_window(q, k, v, *given):
    """A window has words, but not beside a list."""
    *index, valid = given
    shown = seen(valid) & (torch.arange(S) > torch.arange(S)[:, None] - 4)
    return by_matmuls(q, k, v, listing(best(index, shown)) & shown)


@over_latent
def beside_first_keys(q, k, v, *given):
    """The first key is seen whether it is listed or not, if it is there."""
    *index, valid = given
    shown = seen(valid)
    return by_matmuls(q, k, v, (listing(best(index, shown)) | (torch.arange(S) < 1)) & shown)


SORTED = (booleans, a_mask_of_hidden_keys, filled_in, narrow_places, by_a_window, written_out, lowest)
UNSORTED = (
    beside_first_keys,
    in_no_order,
    hidden_from_attention_alone,
    hidden_from_scores_as_well,
    lowered_before,
    passed_in,
)
PADDINGS = {
    "none": [[1] * S, [1] * S],
    "left": [[0, 0, *[1] * (S - 2)], [1] * S],
    "all but the last": [[*[0] * (S - 1), 1], [0, *[1] * (S - 1)]],
    "right": [[*[1] * (S - 3), 0, 0, 0], [1] * S],
    "between": [[1, 0, 1, 0, *[1] * (S - 4)], [1] * S],
    "whole": [[0] * S, [1] * S],
}


# look-alikes ---------------------------------------------------------------------------------------------------------


@over_latent
def beside_a_window(q, k, v, *given):
    *index, valid = given
    shown = seen(valid)
    own = torch.arange(S) > torch.arange(S)[:, None] - 2
    return by_matmuls(q, k, v, (listing(best(index, shown)) | own) & shown)


@over_latent
def blocks(q, k, v, *given):
    """Two keys each, of which the best scores are compared."""
    *index, valid = given
    shown = seen(valid)
    scores = by_matmul(*index).masked_fill(~shown, -math.inf).unflatten(-1, (-1, 2)).amax(-1)
    places = scores.topk(2, dim=-1).indices
    listed = torch.zeros(B, S, S // 2, dtype=torch.bool).scatter(-1, places, True).repeat_interleave(2, -1)
    return by_matmuls(q, k, v, listed & shown)


@over_latent
def beside_a_sink(q, k, v, *given):
    """A number for each head takes a part of the weights."""
    *index, valid = given
    shown = seen(valid)
    mask = added(~(listing(best(index, shown)) & shown), q.dtype).unsqueeze(1)
    sink = torch.arange(N, dtype=q.dtype).view(1, N, 1, 1).expand(B, -1, S, -1)
    weights = torch.cat(((q @ k.mT) * 0.25 + mask, sink), -1).softmax(-1)[..., :-1]
    return (weights @ v).transpose(1, 2)


LOOKALIKES: dict[Form, str] = {
    beside_a_window: "it shows keys that the list has not, and",
    blocks: "its entries are blocks of keys, or numbers",
    beside_a_sink: "it stands beside scores of listed rows",
}
