"""Recurrences over tokens and Sinkhorn iterations are reported by what they compute, with no other reason beside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from tests.engine.graphs import numbers

B, N, K, V = 2, 3, 16, 8
STATE = (B, N, K, V)


def explained(function: Callable[..., object], *args: Tensor) -> list[tuple[str, str]]:
    report = fusion.explain(function, *args, options={"target": "ascend910_93"})
    return [(each.rule, each.reason) for each in report.refusals]


def by_sums(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Add an outer product and read the state, both elementwise."""
    state = state + k[..., None] * (beta * v)[..., None, :]
    return (state * q[..., None]).sum(-2), state


def by_products(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state = state + k[..., None] @ (beta * v)[..., None, :]
    return (q[..., None, :] @ state)[..., 0, :], state


def by_einsum(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    state = state + torch.einsum("bnk,bnv->bnkv", k, beta * v)
    return torch.einsum("bnk,bnkv->bnv", q, state), state


HEADS, KEYS, VALUES = numbers(N, 1, 1).sigmoid(), numbers(K, 1).sigmoid(), numbers(V).sigmoid()
WAYS = {each.__name__: each for each in (by_sums, by_products, by_einsum)}
DECAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda state: state,
    "a number": lambda state: state * 0.9,
    "of heads": lambda state: state * HEADS,
    "of keys": lambda state: state * KEYS,
    "of values": lambda state: state * VALUES,
}
INPUTS = (numbers(*STATE), numbers(B, N, K), numbers(B, N, K), numbers(B, N, V), numbers(B, N, 1))


@pytest.mark.rotates(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("decay", DECAYS)
def test_a_step_of_linear_attention_is_reported(way: str, decay: str):
    ((rule, reason),) = explained(lambda state, *rest: WAYS[way](DECAYS[decay](state), *rest), *INPUTS)
    assert rule == "linear_attention"
    assert ("gated" in reason) == (decay != "none")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("decay", ["none", "of heads", "of keys"])
@pytest.mark.rotates(4)
def test_a_step_of_a_delta_rule_is_reported(way: str, decay: str):
    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor):
        state = DECAYS[decay](state)
        return WAYS[way](state, q, k, v - (k[..., None, :] @ state)[..., 0, :], beta)

    ((rule, reason),) = explained(step, *INPUTS)
    assert rule == "delta_rule"
    assert ("requires its logarithm" in reason) == (decay != "none")
    assert ("opt_in={'delta_rule'}" in reason) == (decay == "none")


def selective(state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Make one step of Mamba, with a decay of each entry."""
    state = state * (dt[..., None] * a).exp() + dt[..., None] * b[:, None] * x[..., None]
    return (state * c[:, None]).sum(-1), state


def test_a_step_of_a_state_space_is_reported():
    ((rule, _),) = explained(
        selective, numbers(B, K, V), numbers(B, K), numbers(B, K), numbers(K, V), numbers(B, V), numbers(B, V)
    )
    assert rule == "state_space"


def test_the_steps_of_a_loop_have_one_place():
    def loop(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor):
        results: list[Tensor] = []
        for step in range(4):
            result, state = by_sums(DECAYS["of heads"](state), *(each[:, :, step] for each in (q, k, v, beta)))
            results.append(result)
        return torch.stack(results, 2), state

    inputs = (each[:, :, None].expand(-1, -1, 4, -1).clone() for each in INPUTS[1:])
    ((rule, _),) = explained(loop, INPUTS[0], *inputs)
    assert rule == "linear_attention"


def test_chunks_of_tokens_are_reported():
    def chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor):
        result = (q @ k.mT).tril() @ v + q @ state
        return result, state * 0.9 + k.mT @ v

    tokens = numbers(B, N, 4, K), numbers(B, N, 4, K), numbers(B, N, 4, V)
    assert [rule for rule, _ in explained(chunk, numbers(*STATE), *tokens)] == ["linear_attention"]


OTHERS: dict[str, Callable[..., object]] = {
    "a state that nothing reads": lambda state, q, k, v, beta: by_sums(state, q, k, v, beta)[1],
    "streams that are mixed": lambda state, q, k, v, beta: by_sums(
        q[..., None, :].mT @ (q[..., None, :] @ state), q, k, v, beta
    ),
    "streams around a layer": lambda state, q, k, v, beta: by_sums(
        state, q, k, F.linear((state * q[..., None]).sum(-2), LAYER), beta
    ),
    "scores with a bias": lambda state, q, k, v, beta: (
        (state + k[..., None] * v[..., None, :]).softmax(-1) @ state.mT
    ),
}  # fmt: skip
LAYER = torch.nn.Parameter(numbers(V, V), requires_grad=False)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_recurrence_is_not_called_one(name: str):
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LAYER

        def forward(self, *args: Tensor) -> object:
            return OTHERS[name](*args)

    rules = {rule for rule, _ in explained(Module(), *INPUTS)}
    assert rules.isdisjoint({"linear_attention", "delta_rule", "state_space"})


def divided(x: Tensor, times: int, eps: float = 1e-6) -> Tensor:
    for number in range(times):
        x = x / (x.sum(-1 - number % 2, keepdim=True) + eps)
    return x


def in_logarithms(x: Tensor, times: int) -> Tensor:
    for number in range(times):
        x = x - x.logsumexp(-1 - number % 2, keepdim=True)
    return x.exp()


ITERATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "exponentials": lambda x, times: divided(x.exp(), times, 0.0),
    "exponentials with eps": lambda x, times: divided(x.exp(), times),
    "softmax first": lambda x, times: divided((x.softmax(-1) + 1e-6).mT, times - 1).mT,
    "logarithms": in_logarithms,
}


@pytest.mark.parametrize("name", ITERATIONS)
def test_a_sinkhorn_iteration_has_one_reason(name: str):
    def mixed(x: Tensor, y: Tensor) -> Tensor:
        return ITERATIONS[name](x, 6) @ y

    ((rule, reason),) = explained(mixed, numbers(B, N, 4, 4), numbers(B, N, 4, V))
    assert rule == "sinkhorn"
    assert "npu_mhc_sinkhorn" in reason


@pytest.mark.parametrize("name", ITERATIONS)
def test_weights_that_are_normalised_twice_are_no_iteration(name: str):
    assert "sinkhorn" not in {rule for rule, _ in explained(lambda x: ITERATIONS[name](x, 2), numbers(B, N, 4, 4))}
