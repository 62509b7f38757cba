"""Rotations as matrices [2, 2] of each pair of lanes, and by tables that are joined before they are rounded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion import testing
from fusion.testing import Trial, capture
from tests.engine.graphs import numbers

B, S, N, D = 2, 6, 3, 16
LANES = numbers(B, S, N, D)

Form = Callable[[Tensor], Tensor]


def angles(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.outer(torch.arange(S).to(dtype), 100.0 ** (-torch.arange(0, D, 2).to(dtype) / D))


def matrices(signs: tuple[int, ...] = (1, -1, 1, 1), dtype: torch.dtype = torch.float32) -> Tensor:
    """[[cos, -sin], [sin, cos]] of each position and pair, [1, S, 1, D / 2, 2, 2]."""
    cos, sin = angles(dtype).cos(), angles(dtype).sin()
    entries = [sign * each for sign, each in zip(signs, (cos, sin, sin, cos), strict=True)]
    return torch.stack(entries, -1).float().view(1, S, 1, D // 2, 2, 2)


def pairs(x: Tensor) -> Tensor:
    return x.float().unflatten(-1, (-1, 2))


def summed(x):
    return (pairs(x).unsqueeze(-2) * matrices()).sum(-1).flatten(-2).type_as(x)


def summed_over_rows(x):
    return (pairs(x).unsqueeze(-1) * matrices((1, 1, -1, 1))).sum(-2).flatten(-2).type_as(x)


def mean(x):
    return (pairs(x).unsqueeze(-2) * matrices()).mean(-1).flatten(-2).type_as(x)


def by_einsum(x):
    return torch.einsum("...ij,...j->...i", matrices(), pairs(x)).flatten(-2).type_as(x)


def by_matmul(x):
    return (matrices() @ pairs(x).unsqueeze(-1)).flatten(-3).type_as(x)


def row_times_matrix(x):
    return (pairs(x).unsqueeze(-2) @ matrices((1, 1, -1, 1))).flatten(-3).type_as(x)


def rounded_tables(x):
    table, pair = matrices(dtype=torch.float64), pairs(x).unsqueeze(-2)
    return (table[..., 0] * pair[..., 0] + table[..., 1] * pair[..., 1]).flatten(-2).type_as(x)


def negated_tables(x):
    """A table is negated before it is rounded."""
    cos, sin = angles(torch.float64).cos()[:, None], angles(torch.float64).sin()[:, None]
    both = torch.cat((-sin, sin), -1).float(), torch.cat((cos, cos), -1).float()
    return (x.float() * both[1] + x.float().roll(D // 2, -1) * both[0]).type_as(x)


AXES = (4, 6, 6)
"""How many lanes are turned by each of three positions."""


def of_axes(x):
    """Matrices of each position for some of the pairs, joined."""
    made = [
        torch.outer(torch.arange(S) * (n + 1) % 5, 100.0 ** (-torch.arange(0, m, 2) / m)) for n, m in enumerate(AXES)
    ]
    entries = [torch.stack([t.cos(), -t.sin(), t.sin(), t.cos()], -1).unflatten(-1, (2, 2)) for t in made]
    table, pair = torch.cat(entries, dim=-3)[:, None], pairs(x).unsqueeze(-2)
    return (table[..., 0] * pair[..., 0] + table[..., 1] * pair[..., 1]).flatten(-2).type_as(x)


def of_axes_in_halves(x):
    """Each half of the lanes by parts of several tables, which are never joined."""
    one, two = (each.split([m // 2 for m in AXES], -1) for each in x.float().chunk(2, -1))
    made = [
        torch.outer(torch.arange(S) * (n + 1) % 5, 100.0 ** (-torch.arange(0, m, 2) / m)) for n, m in enumerate(AXES)
    ]
    both = [(t.cos()[:, None], t.sin()[:, None]) for t in made]
    low = [a * cos - b * sin for a, b, (cos, sin) in zip(one, two, both, strict=True)]
    high = [b * cos + a * sin for a, b, (cos, sin) in zip(one, two, both, strict=True)]
    return torch.cat([*low, *high], -1).type_as(x)


ROTATIONS = [
    summed, summed_over_rows, mean, by_einsum, by_matmul, row_times_matrix, rounded_tables, negated_tables, of_axes,
    of_axes_in_halves,
]  # fmt: skip


def tried(form: Form, dtype: torch.dtype, level: testing.Level = "composite") -> Trial:
    t = testing.trial_of(capture(form, (LANES.to(dtype),), level))
    assert not t.outcome.failures, t.outcome.failures
    return t


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", ROTATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    ("dtype", "level"),
    [
        (torch.bfloat16, "composite"),
        *(
            pytest.param(dtype, level, marks=pytest.mark.rotates)
            for dtype in (torch.bfloat16, torch.float32)
            for level in ("composite", "decomposed", "core")
        ),
    ],
    ids=str,
)
def test_it_is_one_rotation(form: Form, dtype: torch.dtype, level: testing.Level):
    trial = tried(form, dtype, level)
    if form is by_einsum and level != "composite":  # of which the positions and pairs are one batch then
        assert not trial.outcome.chosen
        return
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["rope"]
    testing.means_what_it_says(trial)


def of_one_sign(x):
    return (pairs(x).unsqueeze(-2) * matrices((1, 1, 1, 1))).sum(-1).flatten(-2).type_as(x)


def of_one_sign_by_matmul(x):
    return (matrices((1, 1, 1, 1)) @ pairs(x).unsqueeze(-1)).flatten(-3).type_as(x)


def over_pairs(x):
    """The sum is over the pairs, not over the lanes of one."""
    return (pairs(x).unsqueeze(-2) * matrices()).sum(-3).flatten(-2).repeat(1, 1, 1, D // 4).type_as(x)


def of_three(x):
    """Lanes by threes, of which each matrix turns two."""
    turn = torch.eye(3).repeat(S, 1, 1)
    turn[:, :2, :2] = matrices()[0, :, 0, 0]
    return (turn[:, None, None] * x[..., :15].float().unflatten(-1, (5, 1, 3))).sum(-1).flatten(-2).type_as(x)


def negated_once(x):
    """The tables are rounded, but not those of a rotation."""
    table, pair = matrices((1, -1, -1, 1), torch.float64), pairs(x).unsqueeze(-2)
    return (table[..., 0] * pair[..., 0] + table[..., 1] * pair[..., 1]).flatten(-2).type_as(x)


_SIGNS = "its terms do not have one plus and one"
OTHERS = {of_one_sign: _SIGNS, of_one_sign_by_matmul: _SIGNS, negated_once: _SIGNS, over_pairs: "", of_three: ""}


@pytest.mark.parametrize("form", OTHERS, ids=lambda each: each.__name__)
def test_other_matrices_are_none(form: Form):
    outcome = tried(form, torch.bfloat16).outcome
    assert not outcome.chosen
    assert not OTHERS[form] or any(OTHERS[form] in each.reason for each in outcome.refusals)


def test_matrices_that_are_passed_in_are_not_proven_to_turn():
    def form(x, table):
        return (pairs(x).unsqueeze(-2) * table).sum(-1).flatten(-2).type_as(x)

    outcome = testing.trial_of(capture(form, (LANES.bfloat16(), matrices()), "composite")).outcome
    assert not outcome.chosen
    (reason,) = {each.reason for each in outcome.refusals}
    assert "each pair is multiplied by its own, which" in reason


def lanes_by_turns(x):
    """Pairs beside each other have tables of their own."""
    one, two = x.float().chunk(2, -1)
    tables = [angles()[:, n::2] for n in range(2)]
    cos, sin = (torch.stack([each(t) for t in tables], -1).flatten(-2)[:, None] for each in (torch.cos, torch.sin))
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).type_as(x)


def test_tables_whose_lanes_take_turns_are_one_table():
    t = tried(lanes_by_turns, torch.bfloat16)
    assert [each.match.rule.name for each in t.outcome.chosen] == ["rope"]
    testing.means_what_it_says(t)
