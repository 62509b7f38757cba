"""Symbolic sizes that a rewrite needs: made from those of the inputs, wherever the graph computes them itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sympy import Symbol
from torch.utils._sympy.functions import FloorDiv, PowByNatural

import fusion
from fusion import Rule, lowering, pattern, tensor
from fusion.frontend.library import installed
from fusion.graph.dims import Dim, is_nonnegative, plain, quotient, without_divisions

from .graphs import norm

S, P = (Symbol(name, positive=True, integer=True) for name in "sp")
N, D, R, C, E = 4, 16, 8, 32, 16


def attended(q, latent, rope, up):
    """Attention over a latent, and the latent with its tokens in one dim: their number stands behind the scores."""
    seen = torch.ones(q.shape[-2], latent.shape[-2], dtype=torch.bool).tril()
    k, v = (latent @ up.t()).unflatten(-1, (N, D + E)).transpose(1, 2).split((D, E), dim=-1)
    nope, turned = q.split((D, R), -1)
    scores = (nope @ k.mT + turned @ rope[:, None].mT).masked_fill(~seen, -1e4)
    return scores.softmax(-1) @ v, latent.flatten(0, 1)


@pytest.mark.rotates(4)
def test_a_number_of_tokens_that_is_computed_last_is_made_before_it_is_needed():
    shapes = (5, N, 3, D + R), (5, 3, C), (5, 3, R), (N * (D + E), C)
    inputs = [torch.randn(shape) for shape in shapes]
    inputs[3] = torch.nn.Parameter(inputs[3], requires_grad=False)
    for each in inputs[:3]:
        torch._dynamo.maybe_mark_dynamic(each, 0)
    for each, dim in zip(inputs[:3], (2, 1, 1), strict=True):
        torch._dynamo.maybe_mark_dynamic(each, dim)
    report = fusion.explain(attended, *inputs, options={"target": "host", "lower": "eager"})
    assert "latent_attention" in [each.rule for each in report.matches]


def gathered(q, cache, table):
    """Attention over rows [B, pages · page size, D] that a table names; as many sequences as pages of each."""
    rows = cache[table].reshape(table.shape[0], -1, cache.shape[-1])
    scores = torch.einsum("bnd,btd->bnt", q, rows) * 0.05
    return torch.einsum("bnt,btd->bnd", scores.softmax(-1), rows)


@pytest.mark.rotates(3)
def test_a_product_of_equal_sizes_that_is_divided_by_one_is_made():
    q, cache, table = torch.randn(4, 2, 16), torch.randn(20, 8, 16), torch.arange(16).view(4, 4)
    for each, dims in ((q, (0,)), (cache, (0, 1)), (table, (0, 1))):
        for dim in dims:
            torch._dynamo.maybe_mark_dynamic(each, dim)
    report = fusion.explain(gathered, q, cache, table, options={"target": "host", "lower": "eager"})
    assert [each.rule for each in report.matches] == ["attention"], report
    fused = torch.compile(gathered, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    torch.testing.assert_close(fused(q, cache, table), gathered(q, cache, table), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (FloorDiv(8 * S**2, S), 8 * S),
        (FloorDiv(S * P + S, S), P + 1),
        (FloorDiv(S, 2), FloorDiv(S, 2)),
        (FloorDiv(S * P, 2 * S), FloorDiv(S * P, 2 * S)),
        (2 * FloorDiv(S**3 * P, S * P), 2 * S**2),
        (S + P, S + P),
        (PowByNatural(S * P, S), PowByNatural(S * P, S)),
    ],
)
def test_a_division_goes_where_nothing_can_be_left_over(expr: Any, expected: Any):
    assert without_divisions(expr) == expected


@pytest.mark.parametrize(
    ("whole", "part", "expected"),
    [
        (6, 3, 2),
        (6, 4, None),
        (0, 3, 0),
        (6, 0, None),
        (S, 0, None),
        (8 * S, S, 8),
        (8 * S, 8, S),
        (S * P + S, S, P + 1),
        (S, S, 1),
        (S, 2, None),
        (8, S, None),
        (S + 8, 8, None),
        (S, P, None),
    ],
)
def test_how_often_one_size_is_in_another_is_known_for_all_or_not_at_all(whole: Dim, part: Dim, expected: Any):
    assert quotient(whole, part) == expected
    assert expected is None or isinstance(quotient(whole, part), int) == isinstance(expected, int)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, True), (-1, False), (S - 1, True), (S - 2, False), (S + P - 2, True), (S - P, False), (S * P - 1, True),
     (1 - S, False), (FloorDiv(S, 2), True), (Symbol("u", integer=True), False)],
)  # fmt: skip
def test_a_difference_is_not_negative_where_no_size_makes_it_so(size: Dim, expected: bool):
    assert is_nonnegative(size) is expected


def test_a_size_that_is_no_longer_symbolic_is_a_number():
    assert isinstance(plain((S + 8) - S), int)
    assert plain(S + 8) is not None
    assert plain(0.5) == 0.5


@dataclass(frozen=True)
class InPairs(Rule):
    """A sigmoid, with a zero for each pair of rows, of which nobody knows how many there are."""

    @pattern
    def written(self, p, x=tensor("T D")):
        return p.sigmoid(x)

    @lowering
    def run(self, x):
        return torch.sigmoid(x) + x.new_zeros(x.shape[0] // 2).sum()


def test_a_size_that_cannot_be_made_refuses_its_match_alone():
    x, w = torch.randn(6, 16), torch.ones(16)
    torch._dynamo.mark_dynamic(x, 0)

    def model(x, w):
        return torch.sigmoid(x), norm(x, w)

    rules = [InPairs(), *(each for each in installed().rules if each.name == "rms_norm")]
    report = fusion.explain(model, x, w, rules=rules, options={"target": "host", "lower": "eager"})
    assert [each.rule for each in report.matches] == ["rms_norm"], report
    assert any("is not among the sizes of the graph" in each.reason for each in report.refusals), report
