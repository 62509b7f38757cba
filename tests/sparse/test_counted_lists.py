"""Masks of lists that end before their last entry, and lists of which seen keys count beside first ones, over rows."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot as one_hot_rows

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import LEVELS, Trial, means_what_it_says, refuses, trial

from .listed_rows import SCALE, SMALL, activations, lists

RULE = next(each for each in installed().rules if each.name == "sparse_attention")
HOST = Options(target="host", lower="eager")
Z = SMALL
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def attended(q: Tensor, kv: Tensor, places: Tensor, shown: Form, low: float = -math.inf) -> Tensor:
    """Over latents of which a mask [B, S, T] shows some, of a list [B, S, K], a count [B, S] and a last key."""
    count, last = places[..., 0] % (Z.k + 1), places[..., 1:2] + Z.t // 2
    mask = shown(places.clamp(min=0), count.unsqueeze(-1), last)
    scores = torch.einsum("bsnd,btd->bsnt", q, kv).float() * SCALE
    weights = scores.masked_fill(~mask.unsqueeze(2), low).softmax(-1).to(q.dtype)
    return torch.einsum("bsnt,btc->bsnc", weights, kv[..., : Z.c])


def tailed(places: Tensor, count: Tensor) -> Tensor:
    """-1 behind so many entries, of which there may be none."""
    return torch.where(torch.arange(places.shape[-1]) < count, places, -1)


def none(more: int = 1) -> Tensor:
    return torch.zeros(Z.b, Z.s, Z.t + more, dtype=torch.bool)


def keys() -> Tensor:
    return torch.arange(Z.t)


def behind_the_keys(places, count, last):
    """-1 goes where no key is."""
    places = tailed(places, count)
    return none().scatter(-1, torch.where(places < 0, Z.t, places), True)[..., : Z.t]


def before_the_keys(places, count, last):
    return none().scatter(-1, tailed(places, count) + 1, True)[..., 1:]


def filled_in(places, count, last):
    hidden = torch.arange(places.shape[-1]) >= count
    return none().scatter(-1, places.masked_fill(hidden, -1) + 1, True).narrow(-1, 1, Z.t)


def one_key_further(places, count, last):
    """Each entry names the key behind."""
    return none().scatter(-1, tailed(places, count) + 1, True)[..., : Z.t]


def up_to_the_last(places, count, last):
    return before_the_keys(places, count, last) & (last >= keys())


def or_first(places, count, last):
    return before_the_keys(places, count, last) | (keys() < 2)


def last_or_listed(places, count, last):
    """Every query sees the last two keys."""
    return before_the_keys(places, count, last) | (Z.t - 2 <= keys())


def listed(places: Tensor) -> Tensor:
    return none(0).scatter(-1, places, True)


def seen_or_first(places, count, last):
    return (listed(places) & (last >= keys())) | (keys() < 2)


def first_or_seen(places, count, last):
    return (keys() <= 1) | ~(~listed(places) | (last < keys()) | (keys() % 3 == 1))


def not_later_of_both(places, count, last):
    return ((listed(places) & (keys() % 2 == 0)) | (keys() < 3)) & (last >= keys())


def counted_or_first(places, count, last):
    return (before_the_keys(places, count, last) & (last >= keys())) | (keys() < 2)


def compared(places, count, last):
    """An entry that is no key is equal to none."""
    return (tailed(places, count).unsqueeze(-1) == keys()).any(-2)


def compared_with_each(places, count, last):
    return (keys()[:, None] == tailed(places, count).to(torch.int32)[..., None, :]).any(dim=-1) & (last >= keys())


def further_than_the_last(places, count, last):
    """There are keys of other sequences behind them."""
    return ((tailed(places, count) + Z.t // 2).unsqueeze(-1) == keys()).any(-2)


def equal_ones(places, count, last):
    return (tailed(places, count).unsqueeze(-1) == keys()).sum(-2) > 0


def equal_ones_as_truths(places, count, last):
    return (tailed(places, count).unsqueeze(-1) == keys()).sum(-2, dtype=torch.int32).bool()


def one_hot(places, count, last):
    return (one_hot_rows(places, Z.t).sum(-2) >= 1) & (last >= keys())


def added_up(places, count, last):
    """Keys that a list names twice are counted twice."""
    counts = torch.zeros(Z.b, Z.s, Z.t, dtype=torch.int32)
    return counts.scatter_add(-1, places, torch.ones_like(places, dtype=torch.int32)) > 0


def added_up_as_floats(places, count, last):
    counts = torch.zeros(Z.b, Z.s, Z.t, dtype=torch.bfloat16)
    return ~(counts.scatter_add(-1, places, torch.ones(places.shape, dtype=counts.dtype)) < 0.5) & (last >= keys())


def added_where_there(places, count, last):
    """GLM-5-Next: what is there adds one, and what is not adds nothing."""
    there = torch.arange(places.shape[-1]) < count
    counts = torch.zeros(Z.b, Z.s, Z.t, dtype=torch.int32)
    return counts.scatter_add_(-1, tailed(places, count).clamp(0, Z.t - 1), there.to(torch.int32)) > 0


SPELLINGS = (
    behind_the_keys, before_the_keys, filled_in, one_key_further, up_to_the_last, or_first, last_or_listed,
    seen_or_first, first_or_seen, not_later_of_both, counted_or_first, compared, compared_with_each,
    further_than_the_last, equal_ones, equal_ones_as_truths, one_hot, added_up, added_up_as_floats, added_where_there,
)  # fmt: skip


def seen_or_some(places, count, last):
    """As many first keys as a tensor says."""
    return (listed(places) & (last >= keys())) | (count > keys())


def seen_or_last(places, count, last):
    return (listed(places) & (last >= keys())) | (Z.t - 2 <= keys())


def seen_or_middle(places, count, last):
    return (listed(places) & (last >= keys())) | ((keys() >= 2) & (keys() < 4))


def two_lists(places, count, last):
    return (listed(places) & (last >= keys())) | listed(places.flip(1)) | (keys() < 2)


def twice_at_least(places, count, last):
    counts = torch.zeros(Z.b, Z.s, Z.t, dtype=torch.int32)
    return counts.scatter_add(-1, places, torch.ones_like(places, dtype=torch.int32)) > 1


def once(places, count, last):
    return (tailed(places, count).unsqueeze(-1) == keys()).sum(-2) == 1


def all_equal(places, count, last):
    """A key is every entry."""
    return (tailed(places, count).unsqueeze(-1) == keys()).all(-2) | (keys() < 2)


def of_the_queries(places, count, last):
    """Whether any query of a sequence lists a key."""
    return (places.unsqueeze(-1) == keys()).any(-3).any(-2, keepdim=True).expand(-1, Z.s, -1)


MORE = "it shows keys that the list has not, and"
OTHERS = (once, all_equal, of_the_queries)
"""Of which nothing is known, as of any mask."""
LOOKALIKES = {twice_at_least: MORE, seen_or_some: MORE, seen_or_last: MORE, seen_or_middle: MORE, two_lists: MORE}


def tried(shown: Form, level="composite", dtype=torch.bfloat16, low: float = -math.inf, some: float = 0.0) -> Trial:
    def inputs(of: torch.dtype) -> tuple[Tensor, ...]:
        places = lists(Z, Z.b, Z.s, some=some).abs() % (Z.t - 1)
        places[0, 0, 0] = 0  # of nothing
        return activations(1, Z.b, Z.s, Z.n, Z.d).to(of), activations(2, Z.b, Z.t, Z.d).to(of), places

    def form(q: Tensor, kv: Tensor, places: Tensor) -> Tensor:
        return attended(q, kv, places, shown, low)

    return trial(RULE, Example(shown.__name__, form, inputs), dtype, level, HOST)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("shown", SPELLINGS, ids=lambda each: each.__name__)
def test_such_lists_are_one_list(shown: Form, low: float):
    """Of which a query may see nothing: NaN then, or the mean of all values."""
    t = tried(shown, LEVELS[len(shown.__name__) % 3], low=low)
    assert [each.match.form for each in t.outcome.chosen if each.match.rule is RULE] == ["by_places[LatentRows]"]
    assert not t.outcome.failures
    means_what_it_says(t)


@pytest.mark.parametrize("shown", LOOKALIKES, ids=lambda each: each.__name__)
def test_look_alike_is_refused(shown: Form):
    t = tried(shown)
    refuses(t, LOOKALIKES[shown])
    means_what_it_says(t)


@pytest.mark.parametrize("shown", OTHERS, ids=lambda each: each.__name__)
def test_other_masks_are_no_lists(shown: Form):
    t = tried(shown)
    assert not [each for each in t.outcome.chosen if each.match.rule is RULE]
    means_what_it_says(t)
