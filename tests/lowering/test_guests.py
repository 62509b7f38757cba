"""FusionPass as a guest of Inductor: what it adds is what Inductor lowers, and the numbers are those of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config

from tests.engine.graphs import norm, numbers
from tests.lowering.guests import HOOKS, Guest
from tests.lowering.models import LIBRARY
from tests.lowering.test_inductor_results import AT, CACHE, FORMS, ROWS, follow_the_cache

every_hook = pytest.mark.parametrize(
    "hook", [HOOKS[0], *(pytest.param(each, marks=pytest.mark.rotates) for each in HOOKS[1:])]
)
LIBRARY.define("double_(Tensor(a!) x) -> ()")


@torch.library.impl(LIBRARY, "double_", "CPU")
def double_(x: Tensor) -> None:
    x.mul_(2)


LIBRARY.impl("double_", lambda x: None, "Meta")


def by_guest(function: Callable[..., Any], hook: str = HOOKS[0], target: str = "host", **given: Any) -> Any:
    """Return `function` compiled by Inductor, which calls torch's kernels, and its guest."""
    torch._dynamo.reset()
    guest = Guest({"target": target})
    options = {"fallback_by_default": True, "fx_graph_cache": False, hook: guest}
    return torch.compile(function, options=options, fullgraph=True, **given), guest


@every_hook
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_results_of_a_guest_do_not_follow_the_cache(form: Callable[..., tuple[Tensor, ...]], hook: str):
    """A plain compile gives the memory of the cache for some of these, and all that a rewrite changes must not."""
    run, guest = by_guest(form, hook, dynamic=False)
    with torch.no_grad():
        follow = follow_the_cache(run)
        cache, expected = CACHE.clone(), CACHE.clone()
        torch.testing.assert_close((*run(cache, AT, ROWS), cache), (*form(expected, AT, ROWS), expected))
    assert not any(follow) or not guest.fused_rules


def step(x: Tensor, w: Tensor, cache: Tensor, at: Tensor) -> Tensor:
    """x [B, S, H], cache [B, T, H], at [S] → [B, S, H]."""
    y = norm(x, w)
    cache.index_copy_(1, at, y)
    return norm(x + cache.sum(1, keepdim=True), w)


@every_hook
def test_one_graph_serves_every_batch_and_length(hook: str):
    run, guest = by_guest(step, hook)
    w = numbers(64)
    with torch.inference_mode():
        for batch, length in ((3, 5), (5, 7)):
            x, at = numbers(batch, length, 64), torch.arange(length) + 2
            ours, plain = numbers(batch, 16, 64, seed=1), numbers(batch, 16, 64, seed=1)
            for tensor, dim in ((x, 0), (x, 1), (ours, 0), (at, 0)):
                torch._dynamo.mark_dynamic(tensor, dim)
            torch.testing.assert_close((run(x, w, ours, at), ours), (step(x, w, plain, at), plain))
    assert "rms_norm" in guest.fused_rules


@every_hook
def test_a_write_by_an_operator_of_others_stays_between(hook: str):
    """Inductor holds it as a functional call of a higher order until its passes are done."""

    def form(x: Tensor, w: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        cache.index_copy_(0, torch.tensor([1]), norm(x, w)[:1])
        torch.ops.lowering_test.double_(cache)
        first = norm(cache, w)
        cache.index_copy_(0, torch.tensor([2]), first[:1] * 3)
        return first, norm(cache, w)

    run, guest = by_guest(form, hook)
    x, w = numbers(3, 64), numbers(64)
    ours, plain = numbers(8, 64, seed=1), numbers(8, 64, seed=1)
    with torch.no_grad():
        torch.testing.assert_close(run(x, w, ours), form(x, w, plain))
    torch.testing.assert_close(ours, plain)
    assert "rms_norm" in guest.fused_rules


def test_bodies_of_a_guest_are_lowered():
    def form(x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda each: norm(each, w), lambda each: norm(each, w) * 2, (x,))

    run, _ = by_guest(form)
    x, w = numbers(3, 64), numbers(64)
    with torch.no_grad():
        torch.testing.assert_close(run(x, w), form(x, w))
        torch.testing.assert_close(run(-x, w), form(-x, w))


def test_a_graph_of_training_is_fused_and_learns_the_same():
    def form(x: Tensor, w: Tensor) -> Tensor:
        return norm(x, w).square().sum()

    run, _ = by_guest(form)
    ours, plain = (numbers(64).requires_grad_() for _ in range(2))
    x = numbers(3, 64)
    run(x, ours).backward()
    form(x, plain).backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_a_guest_whose_lowering_fails_leaves_the_graph_as_it_came(monkeypatch: pytest.MonkeyPatch):
    from fusion.frontend import passes

    def planted(*_: Any) -> None:
        raise TypeError("planted")

    monkeypatch.setattr(passes, "decompose_added", planted)
    run, _ = by_guest(norm)
    x, w = numbers(3, 64), numbers(64)
    with torch.no_grad(), pytest.warns(UserWarning, match="stage lower failed"):
        torch.testing.assert_close(run(x, w), norm(x, w))


@pytest.mark.rotates(8)
def test_what_is_added_has_the_provenance_of_the_rewrite():
    seen: list[torch.fx.Node] = []

    class Seeing(Guest):
        def __call__(self, graph: torch.fx.Graph, *context: Any) -> None:
            super().__call__(graph, *context)
            seen.extend(copy.copy(node) for node in graph.nodes if "fusion" in node.meta)

    with torch.no_grad(), config.patch(fallback_by_default=True, fx_graph_cache=False):
        torch._dynamo.reset()
        torch.compile(norm, options={HOOKS[0]: Seeing({"target": "host"})})(numbers(3, 64), numbers(64))
    assert seen
    assert all(node.meta["fusion"]["rule"] == "rms_norm" for node in seen)
    assert all("graphs.py" in node.meta["stack_trace"] for node in seen)
