"""torch.gather as rows of own positions, exponentials of base 2, and what a row without keys makes of a softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.graph import Value
from fusion.stages.canonicalise import canonicalise
from fusion.testing import capture

X, PLACES = torch.randn(2, 3, 8, 4), torch.randint(0, 8, (2, 3, 5))
SCORES, SEEN = torch.randn(2, 3, 8), torch.rand(2, 1, 8) > 0.5
SQUARE = torch.randn(8, 8)


def result(form: Any, *args: Tensor) -> Value:
    graph = capture(form, args).graph.graph
    held = canonicalise(graph).value_of[graph.output_node().args[0][0]]
    assert isinstance(held, Value)
    return held


def every(places: Tensor, lanes: int = 4) -> Tensor:
    return places.unsqueeze(-1).expand(*places.shape, lanes)


TAKEN: dict[str, tuple[Any, tuple[Tensor, ...], tuple[int, ...]]] = {
    "rows of all dims": (lambda x, i: x.gather(2, every(i)), (X, PLACES), (2, 3, 8, 4)),
    "rows of the first": (
        lambda x, i: x[:, :1].expand(-1, 3, -1, -1).gather(2, every(i)), (X, PLACES), (2, 8, 4),
    ),
    "rows of the last": (lambda x, i: x[:1].expand(2, -1, -1, -1).gather(2, every(i)), (X, PLACES), (2, 3, 8, 4)),
    "single numbers": (lambda x, i: x[..., 0].gather(2, i), (X, PLACES), (2, 3, 8)),
    "one row for all places": (
        lambda x, i: x[:, :, :1].expand(-1, -1, 8, -1).gather(2, every(i)), (X, PLACES), (2, 3, 8, 4),
    ),
    "the same for all": (lambda x, i: x.gather(2, every(i[:1, :1].expand(2, 3, -1))), (X, PLACES), (2, 3, 8, 4)),
}  # fmt: skip
NOT_TAKEN: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "a place of each lane": (lambda x, i: x.gather(2, (every(i) + torch.arange(4)) % 8), (X, PLACES)),
    "fewer lanes": (lambda x, i: x.gather(2, every(i, 3)), (X, PLACES)),
    "of columns, where rows are largest": (lambda x: x.gather(0, x.topk(8)[1]), (SQUARE,)),
    "fewer sequences": (lambda x, i: x.gather(2, every(i[:1])), (X, PLACES)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_rows_are_taken(name: str):
    form, args, source = TAKEN[name]
    found = result(form, *args)
    assert found.op == "take"
    assert (found.args[0].shape, found.args[1].shape) == (source, (2, 3, 5))


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_other_gathers_stay_what_they_are(name: str):
    form, args = NOT_TAKEN[name]
    assert result(form, *args).op == "aten.gather.default"


def safe(x: Tensor, least: float = -math.inf, most: float = math.inf, of: Tensor | None = None) -> Tensor:
    lse = x.logsumexp(-1, keepdim=True)
    return torch.exp(x - torch.where((lse if of is None else of) == least, most, lse))


def in_twos(x: Tensor) -> Tensor:
    lse = (x * math.log(2)).logsumexp(-1, keepdim=True) * math.log2(math.e)
    return torch.exp2(x - lse)


def shown(x: Tensor, seen: Tensor, blank: Any) -> Tensor:
    weights = x.masked_fill(~seen, -math.inf).softmax(-1)
    return weights.masked_fill(blank(seen), 0)


def blanked(x: Tensor, hidden: Tensor, by: float, blank: Tensor) -> Tensor:
    return x.masked_fill(hidden, by).softmax(-1).masked_fill(blank, 0)


SOFTMAXES: dict[str, tuple[Any, tuple[Tensor, ...], str]] = {
    "base 2": (in_twos, (SCORES,), "nan"),
    "without a row of nothing": (safe, (SCORES,), "zero"),
    "no key is seen": (
        lambda x, seen: shown(x, seen, lambda seen: ~seen.any(-1, keepdim=True)), (SCORES, SEEN), "zero",
    ),
    "all are hidden": (
        lambda x, seen: shown(x, seen, lambda seen: (~seen).all(-1, keepdim=True)), (SCORES, SEEN), "zero",
    ),
    "what is hidden": (lambda x, hidden: blanked(x, hidden, -math.inf, hidden), (SQUARE, SQUARE > 0), "zero"),
}  # fmt: skip
NO_SOFTMAXES: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "another bound": (lambda x: safe(x, -1.0), (SCORES,)),
    "another number": (lambda x: safe(x, most=0.0), (SCORES,)),
    "where another is infinite": (lambda x: safe(x, of=x[..., :1]), (SCORES,)),
    "a key is seen": (lambda x, seen: shown(x, seen, lambda seen: seen.any(-1, keepdim=True)), (SCORES, SEEN)),
    "not all are seen": (
        lambda x, seen: shown(x, seen, lambda seen: ~seen.all(-1, keepdim=True)), (SCORES, SEEN),
    ),
    "of the sequences": (
        lambda x, seen: shown(x, seen, lambda seen: ~seen.any(0, keepdim=True)), (SCORES, SEEN),
    ),
    "of the keys": (lambda x, seen: shown(x, seen, lambda seen: ~seen.any(0)[:, None]), (SQUARE, SQUARE > 0)),
    "of other rows": (
        lambda x, seen: shown(x, seen.view(2, 2, 4), lambda _: ~seen.any(-1).view(1, 2, 1)),
        (SQUARE[:4, :4].view(2, 2, 4), SQUARE[:2] > 0),
    ),
    "of another mask": (lambda x, seen: shown(x, seen, lambda _: ~(x < 0).any(-1, keepdim=True)), (SQUARE, SQUARE > 0)),
    "not hidden, of another mask": (
        lambda x, hidden: blanked(x, hidden, -math.inf, ~(x < 0).any(-1, keepdim=True)), (SQUARE, SQUARE > 0),
    ),
    "hidden by a number": (lambda x, hidden: blanked(x, hidden, -1.0, hidden), (SQUARE, SQUARE > 0)),
    "what is seen": (lambda x, hidden: blanked(x, hidden, -math.inf, ~hidden), (SQUARE, SQUARE > 0)),
    "without a mask": (
        lambda x, seen: x.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0), (SQUARE, SQUARE > 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes(name: str):
    form, args, empty = SOFTMAXES[name]
    found = result(form, *args)
    assert (found.op, found.attrs[:2]) == ("softmax", (-1, empty))


@pytest.mark.parametrize("name", NO_SOFTMAXES)
@pytest.mark.rotates(3)
def test_what_is_no_softmax(name: str):
    form, args = NO_SOFTMAXES[name]
    assert result(form, *args).op != "softmax"


def test_all_is_not_any_that_is_not():
    found = result(lambda seen: seen.all(-1), SEEN)
    assert (found.op, found.arg.below("reshape").op, found.arg.below("reshape").arg.op) == ("not", "any", "not")
