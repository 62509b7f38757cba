"""One expert for each token, named by argmax, max or topk(1), and fewer experts than the router has scores for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.moe.experts import EMITTED, EXPERTS, Form, by_group, ends_of, halves, inputs
from tests.moe.test_experts import distance, left_alone, operators, run

Route = Callable[[Tensor], tuple[Tensor, Tensor]]
Sum = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
BF16 = torch.bfloat16


def by_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    experts = logits.argmax(-1)
    return logits.softmax(-1, dtype=torch.float32).amax(-1, keepdim=True).to(logits.dtype), experts[:, None]


def by_argmax_of_sigmoids(logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    experts = scores.argmax(-1, keepdim=True)
    return scores.gather(-1, experts), experts


def by_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1, dtype=torch.float32).max(-1, keepdim=True)
    return weights.to(logits.dtype), experts


def by_topk(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(1, dim=-1)
    return weights.to(logits.dtype), experts


def gathered(tokens: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    hidden = halves(torch.einsum("th,tkih->tki", tokens, gate_up[experts]))
    return (torch.einsum("tki,tkhi->tkh", hidden, down[experts]) * weights[..., None]).sum(1)


def sorted_rows(tokens: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    listed = experts.reshape(-1)
    order = listed.argsort()
    given = by_group(tokens[order // experts.shape[1]], ends_of(listed), gate_up, down)
    return (given[order.argsort()].view(*experts.shape, -1) * weights[..., None]).sum(1)


def looped(tokens: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    y = torch.zeros_like(tokens)
    for e in range(EXPERTS):
        share = (weights * (experts == e)).sum(-1, keepdim=True)
        y = y + F.linear(halves(F.linear(tokens, gate_up[e])), down[e]) * share
    return y


def scattered(tokens: Tensor, weights: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    shares = torch.zeros(tokens.shape[0], EXPERTS, dtype=weights.dtype).scatter(1, experts, weights)
    every = torch.bmm(halves(torch.bmm(tokens.expand(EXPERTS, -1, -1), gate_up.mT)), down.mT)
    return (every * shares.t()[..., None]).sum(0)


def form_of(route: Route, total: Sum) -> Form:
    def form(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return total(tokens, *route(logits), gate_up, down)

    return form


@pytest.mark.parametrize("total", [gathered, sorted_rows, looped, scattered], ids=lambda each: each.__name__)
@pytest.mark.parametrize("route", [by_argmax, by_argmax_of_sigmoids, by_max, by_topk], ids=lambda each: each.__name__)
@pytest.mark.rotates(6)
def test_one_expert_of_each_token_is_the_vendors_sequence(route: Route, total: Sum):
    args = inputs(BF16)
    plain, fused, gm, _ = run(form_of(route, total), args)
    assert operators(gm) == EMITTED
    tokens, logits, gate_up, down = (each.double() for each in args)
    weights, experts = route(logits)
    hidden = halves(torch.einsum("th,tih->ti", tokens, gate_up[experts[:, 0]]))
    exact = torch.einsum("ti,thi->th", hidden, down[experts[:, 0]]) * weights.double()
    assert distance(fused, exact) < max(1e-2, 1.5 * distance(plain, exact))


@pytest.mark.parametrize("route", [by_argmax, by_topk], ids=lambda each: each.__name__)
def test_fewer_experts_than_the_router_chooses_from_are_left(route: Route):
    """A token that chose an expert of another device has no row here."""

    def local(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weights, experts = route(logits)
        shares = (weights[..., None] * (experts[..., None] == torch.arange(EXPERTS - 2))).sum(1)
        outputs = [F.linear(halves(F.linear(tokens, gate_up[e])), down[e]) for e in range(EXPERTS - 2)]
        return sum((each * shares[:, e, None] for e, each in enumerate(outputs)), torch.zeros_like(tokens))

    left_alone(local, inputs(BF16))


@pytest.mark.parametrize("route", [by_argmax, by_topk], ids=lambda each: each.__name__)
def test_a_loop_over_experts_that_do_not_follow_on_each_other_is_left_with_the_reason(route: Route):
    def some(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weights, experts = route(logits)
        y = torch.zeros_like(tokens)
        for e in (1, 2, 4):
            share = (weights * (experts == e)).sum(-1, keepdim=True)
            y = y + F.linear(halves(F.linear(tokens, gate_up[e])), down[e]) * share
        return y

    parts = [each for each in left_alone(some, inputs(BF16)) if "of the 6 experts" in each]
    assert parts
    assert all(" 3 of the 6 experts" in each for each in parts)
