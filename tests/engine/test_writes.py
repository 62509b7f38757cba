"""Writes to memory: what stands before one and what stands after it are never one expression."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.stages.canonicalise import canonicalise
from fusion.testing import capture

from .graphs import fuse, names, norm, numbers

X, W = numbers(2, 3, 64), numbers(64, seed=1)
CACHE = numbers(2, 3, 64, seed=2)


def graph_with_writes(function, *args):
    """A graph in which writes stand where they were written, as a guest pass may get it."""
    return make_fx(function, tracing_mode="fake")(*args)


def test_a_value_read_before_and_after_a_write_is_two_values():
    def form(x, cache):
        before = cache.mul(2)
        cache.copy_(x)
        return before, cache.mul(2)

    gm = graph_with_writes(form, X.clone(), CACHE.clone())
    graph = canonicalise(gm.graph)
    held = [graph.value_of[node] for node in gm.graph.output_node().args[0]]
    assert held[0] is not held[1]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.copy_(x.flip(0)),
        lambda x: x.mul_(2),
        lambda x: x.index_put_([torch.tensor([0])], torch.ones(3, 64)),
        lambda x: x.index_copy_(0, torch.tensor([1]), torch.ones(1, 3, 64)),
        lambda x: x[:, :1].fill_(3.0),
    ],
    ids=["copy_", "mul_", "index_put_", "index_copy_", "fill_ of a view"],
)
def test_a_write_in_the_middle_of_a_norm_separates_it(write):
    def form(x, w):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        write(x)
        return x * root * w

    gm = graph_with_writes(form, X.clone(), W)
    before = list(map(str, gm.graph.nodes))
    assert not fuse(gm).chosen, "x is not what it was when its squares were taken"
    assert list(map(str, gm.graph.nodes)) == before


def test_a_norm_on_either_side_of_a_write_fuses_on_its_own_side():
    def form(x, w):
        first = norm(x, w)
        x.copy_(first)
        return first, norm(x, w)

    gm = graph_with_writes(form, X.clone(), W)
    outcome = fuse(gm)
    assert len(outcome.chosen) == 2
    assert names(gm).count("npu.npu_rms_norm.default") == 2, "equal only in their text"
    x = X.clone()
    want = form(X.clone(), W)
    for have, expected in zip(gm(x, W), want, strict=True):
        torch.testing.assert_close(have, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x, want[0], rtol=1e-5, atol=1e-5)


def test_the_writes_that_close_a_functional_graph_separate_nothing_and_stay():
    def form(x, w, cache):
        cache.copy_(norm(x, w))
        return norm(x, w) + cache

    captured = capture(form, (X, W, CACHE.clone()))
    outcome = fuse(captured.graph)
    assert len(outcome.chosen) == 1
    assert names(captured.graph)[-1] == "aten.copy_.default"
    inputs = [each.clone() for each in captured.inputs]
    captured.graph(*inputs)
    assert any(torch.allclose(each, norm(X, W), atol=1e-5) for each in inputs)


def test_writes_keep_their_order_when_nodes_move():
    def form(x, y, w, cache):
        s = x + y
        cache[:, :1].copy_(s[:, :1])
        cache[:, :2].copy_(norm(s, w)[:, :2])
        return s

    args = (X, X + 1, W, CACHE.clone())
    captured = capture(form, args)
    assert fuse(captured.graph).chosen
    inputs = [each.clone() for each in captured.inputs]
    captured.graph(*inputs)
    cache = CACHE.clone()
    form(X, X + 1, W, cache)
    assert any(each.shape == cache.shape and torch.allclose(each, cache, atol=1e-5) for each in inputs)


def test_random_numbers_and_fresh_memory_are_never_equal():
    def form(x):
        return torch.rand_like(x) * 2, torch.rand_like(x) * 2

    graph = canonicalise(capture(form, (X,)).graph.graph)
    left, right = (graph.value_of[node] for node in graph.source.output_node().args[0])
    assert left is not right
