"""A logarithm of a sum of exponentials is found as models and decompositions write it, and nothing else is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.analysis.logarithms import decomposed, summed
from fusion.analysis.softmax_shares import Exponentials
from fusion.graph import Algebra
from tests.engine.graphs import numbers, value

INF = float("inf")
ROWS, TOP = numbers(2, 3), numbers(2, 1)


def is_finite(x: Tensor) -> Tensor:
    return (x.abs() != INF) * (x == x)


def added(x: Tensor, y: Tensor, z: Tensor, **other: Any) -> Tensor:
    """log(exp(x) + exp(y)) as torch decomposes it, or with something else in a place of it."""
    how = {"order": x >= y, "same": (x == y) & ~is_finite(x), "one": x, **other}
    top = how.get("top", torch.where(how["order"], x, y))
    least = how.get("least", torch.where(how["order"], y, x))
    inner = how.get("inner", lambda top, least: torch.log1p(torch.exp(least - top)))(top, least)
    return torch.where(how["same"], how["one"], top * inner if "product" in how else top + inner)


NO_SUMS = {
    "a product": lambda x, y, z: added(x, y, z, product=True),
    "log": lambda x, y, z: added(x, y, z, inner=lambda top, least: torch.log(torch.exp(least - top))),
    "a sigmoid": lambda x, y, z: added(x, y, z, inner=lambda top, least: torch.log1p(torch.sigmoid(least - top))),
    "an exponential of a product": lambda x, y, z: added(
        x, y, z, inner=lambda top, least: torch.log1p(torch.exp(least * -top))
    ),
    "an exponential of a sum": lambda x, y, z: added(
        x, y, z, inner=lambda top, least: torch.log1p(torch.exp(least + top))
    ),
    "one that may be the least": lambda x, y, z: added(x, y, z, top=x, least=torch.where(x >= y, y, x)),
    "the lesser below": lambda x, y, z: added(x, y, z, order=x <= y),
    "another as the least": lambda x, y, z: added(x, y, z, least=torch.where(x >= y, y, z)),
    "one that is not added": lambda x, y, z: added(x, y, z, one=z),
    "either": lambda x, y, z: added(x, y, z, same=(x == y) | ~is_finite(x)),
    "the same as another": lambda x, y, z: added(x, y, z, same=(x == z) & ~is_finite(x)),
    "the same below another": lambda x, y, z: added(x, y, z, same=(x == y) & (x <= z)),
    "the same and finite": lambda x, y, z: added(x, y, z, same=(x == y) & is_finite(x)),
    "not below another": lambda x, y, z: added(x, y, z, same=(x == y) & ~(x + z <= y)),
    "no infinity, or a number": lambda x, y, z: added(x, y, z, same=(x == y) & ~((x.abs() != INF) | (x == x))),
    "another that is infinite": lambda x, y, z: added(x, y, z, same=(x == y) & ~is_finite(z)),
    "an infinity": lambda x, y, z: added(x, y, z, same=(x == y) & ~((x.abs() == INF) * (x == x))),
    "no number": lambda x, y, z: added(x, y, z, same=(x == y) & ~((x.abs() != INF) * (x != x))),
    "equal to another": lambda x, y, z: added(x, y, z, same=(x == y) & ~((x.abs() != INF) * (x == z))),
    "other than three": lambda x, y, z: added(x, y, z, same=(x == y) & ~((x.abs() != 3) * (x == x))),
    "other than an infinity above": lambda x, y, z: added(x, y, z, same=(x == y) & ~((x != INF) * (x == x))),
}


def test_a_sum_of_two_is_told_when_it_is_decomposed():
    found = value(added, *(numbers(3) for _ in range(3)))
    x, y = decomposed(found)
    assert x is found.args[1]
    assert y.op == "input"
    assert y is not x


def test_a_sum_of_two_of_which_one_is_repeated_is_left_whole():
    for rows, several in ((numbers(2, 3), True), (numbers(3), False)):
        found = value(added, rows, numbers(2, 3), numbers(3))
        share = Exponentials(Algebra()).power(found)
        assert share is not None
        assert bool(share.sums) == several


@pytest.mark.parametrize("name", NO_SUMS)
@pytest.mark.rotates(4)
def test_what_resembles_a_sum_of_two_is_none(name: str):
    found = value(NO_SUMS[name], *(numbers(3) for _ in range(3)))
    assert found.op == "where"
    assert decomposed(found) == ()


def test_a_sum_below_a_number_of_its_row_is_a_log_sum():
    for form in (
        lambda x, top: x.exp().sum(-1, True).log(),
        lambda x, top: (x - top).exp().sum(-1, True).log() + top,
        lambda x, top: top + torch.log(torch.sum(torch.exp(x - top), -1, True)),
    ):
        found = summed(value(form, ROWS, TOP))
        assert found is not None
        assert found.shape == (2, 3)


@pytest.mark.parametrize(
    "form",
    [
        lambda x, top: (x + (top - 1)).exp().sum(-1, True).log() + top,
        lambda x, top: (x - 2 * top).exp().sum(-1, True).log() + top,
        lambda x, top: (x - top.expand(2, 3)).sigmoid().sum(-1, True).log() + top,
        lambda x, top: x.sigmoid().sum(-1, True).log(),
        lambda x, top: x.exp().mean(-1, True).log(),
        lambda x, top: (x - top).exp().sum(-1, True).log() * top,
        lambda x, top: (x - top).exp().sum(-1, True).log() + 2 * top,
        lambda x, top: (x - x[:1]).exp().sum(-1, True).log() + top,
        lambda x, top: (x - x.tanh()).exp().sum(-1, True).log() + x.tanh(),
        lambda x, top: x.logsumexp(0, True),
    ],
)
def test_what_resembles_a_log_sum_is_none(form: Any):
    assert summed(value(form, ROWS, TOP)) is None
