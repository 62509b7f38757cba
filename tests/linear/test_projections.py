"""Linear layers of one input: which stand together, what joining them costs, and how much work it is to find them."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusion.frontend.library import installed
from fusion.pipeline import fuse_graph
from fusion.stages.match import match
from fusion.testing import capture
from tests.engine.graphs import HOST, names, numbers, read_graph

X = numbers(2, 3, 64)
A, B, C, D, E = (nn.Parameter(numbers(64, 64, seed=seed) / 8) for seed in range(1, 6))
SMALL = nn.Parameter(numbers(64, seed=7))


def fused(function, *args):
    """The fused graph, the rules that were applied with their forms, and the outcome; numbers are compared."""
    captured = capture(function, args)
    gm = captured.graph
    with torch.no_grad():
        expected = gm(*captured.inputs)
    named = dict(zip((n.name for n in gm.graph.find_nodes(op="placeholder")), captured.inputs, strict=True))
    outcome = fuse_graph(gm.graph, installed(), HOST, captured.facts)
    gm.recompile()
    with torch.no_grad():
        further = [each.module(*(named[name] for name in each.sources)) for each in outcome.prepared]
        for have, want in zip(gm(*captured.inputs, *further), expected, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)
    return gm, Counter((each.match.rule.name, each.match.form) for each in outcome.chosen), outcome


def test_a_copy_that_a_view_of_the_users_needs_is_counted():
    def flat(x, *weights):
        first, *rest = (F.linear(x, each) for each in weights)
        return first.view(-1, 32).exp(), *(each.exp() for each in rest)

    gm, applied, _ = fused(flat, X, A, B)
    assert not applied, "one launch less and one copy more is no gain"
    gm, applied, outcome = fused(flat, X, A, B, C)
    assert applied == {("joined_projections", "three"): 1}
    assert outcome.chosen[0].launches == 1
    assert names(gm).count("aten.clone.default") == 1


def test_a_result_that_the_caller_gets_is_no_part_of_a_larger_tensor():
    _, applied, _ = fused(
        lambda x, a, b, c: (F.linear(x, a).mT, F.linear(x, b).exp(), F.linear(x, c).exp()), X, A, B, C
    )
    assert applied == {("joined_projections", "two"): 1}


@pytest.mark.parametrize("count", [5, 6, 9, 14])
def test_more_than_four_are_joined_in_groups(count):
    weights = [nn.Parameter(numbers(32, 64, seed=seed) / 8) for seed in range(count)]
    gm, applied, _ = fused(lambda x, *weights: tuple(F.linear(x, each).exp() for each in weights), X, *weights)
    assert sum(applied.values()) == (count + 3) // 4 - (count % 4 == 1)
    assert sum("mm" in name or "linear" in name for name in names(gm)) == (count + 3) // 4


def test_only_those_of_one_kind_are_joined():
    def mixed(x, a, b, c, d, bias):
        return tuple(y.exp() for y in (F.linear(x, a), F.linear(x, b, bias), F.linear(x, c), F.linear(x, d, bias)))

    _, applied, _ = fused(mixed, X, A, B, C, D, SMALL)
    assert applied == {("joined_projections", "two"): 2}, "those with a bias, and those without"
    _, applied, outcome = fused(mixed, X, A, B, C.detach(), D.detach(), SMALL)
    assert not applied, "one Parameter and one plain tensor of each kind"
    assert not outcome.refusals, "nothing that could be joined"


def test_what_comes_behind_an_attention_does_not_wait_for_it():
    def parallel(x, q, k, v, gate, up):
        heads = [F.linear(x, each).view(2, 3, 2, 32).transpose(1, 2) for each in (q, k, v)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        return (y + F.silu(F.linear(x, gate)) * F.linear(x, up),)

    _, applied, _ = fused(parallel, X, A, B, C, D, E)
    assert applied["joined_projections", "three"] == 1
    assert applied["activation", "gated[Projected, Unbounded, Plain]"] == 1


def test_gate_and_up_beside_a_router():
    def moe(x, router, gate, up):
        return F.linear(x, router).softmax(-1), F.silu(F.linear(x, gate)) * F.linear(x, up)

    _, applied, _ = fused(moe, X, A, B, C)
    assert applied == {("activation", "gated[Projected, Unbounded, Plain]"): 1}


def test_a_layer_that_is_read_without_its_bias_is_joined_without_it():
    def both(x, a, b, bias):
        y = F.linear(x, a)
        return y.exp(), (y + bias).exp(), F.linear(x, b).exp()

    def twice(x, a, b, bias):
        return F.linear(x, a).exp(), (F.linear(x, a) + bias).exp(), F.linear(x, b).exp()

    for function in (both, twice):
        _, applied, _ = fused(function, X, A, B, SMALL)
        assert applied == {("joined_projections", "two"): 1}


def test_layers_behind_a_layer_are_joined():
    def behind(x, a, b, c):
        y = F.linear(x, a)
        return F.linear(y, b).exp(), F.linear(y, c).exp()

    _, applied, _ = fused(behind, X, A, B, C)
    assert applied == {("joined_projections", "two"): 1}


@pytest.mark.rotates(6)
def test_the_work_of_matching_grows_with_the_layers_not_with_their_pairs():
    def calls(count):
        weights = [numbers(8, 64, seed=seed) for seed in range(count)]
        captured = capture(lambda x, *weights: tuple(F.linear(x, each).exp() for each in weights), (X, *weights))
        graph = read_graph(captured.graph.graph)
        rule = next(each for each in installed().rules if each.name == "joined_projections")
        made = Counter()
        sys.setprofile(lambda frame, event, _: made.update((event,)))
        try:
            found = match(graph, (rule,))
        finally:
            sys.setprofile(None)
        assert len(found.refusals) == count - 1, "each that has a next one says why it stays apart"
        return made["call"]

    calls(8)
    assert calls(160) < 15 * calls(16), "ten times as many"
