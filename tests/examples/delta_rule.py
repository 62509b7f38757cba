"""Steps of gated delta rules, as models write them, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, normal, symbolic

B, N, K, V = 2, 4, 16, 8
wide = torch.float32


def unit(seed: int, *shape: int) -> Tensor:
    return torch.nn.functional.normalize(normal(seed, *shape), dim=-1)


def numbers(
    heads: int = N, state: tuple[int, ...] = (K, V), lanes: tuple[int, ...] = (), narrow: bool = False
) -> Inputs:
    """q, k [B, heads, K], v [B, N, V], log decays [B, N, *lanes] and beta [B, N], a state [B, N, *state]; the logs, and
    the state but for a `narrow` one, in float32 at least."""
    decays, before = -normal(4, B, N, *lanes).abs(), normal(5, B, N, *state)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        wider = torch.promote_types(dtype, wide)
        vectors = (unit(0, B, heads, K), unit(1, B, heads, K), normal(2, B, N, V), normal(3, B, N).sigmoid())
        q, k, v, beta = (each.to(dtype) for each in vectors)
        return q, k, v, decays.to(wider), beta, before.to(dtype if narrow else wider)

    return make


def by_sums(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """A decay of heads, everything elementwise; the state of the caller is written."""
    kind = v.dtype
    q, k, v, beta = (each.to(state.dtype) for each in (q, k, v, beta))
    s = state * g.exp()[..., None, None]
    delta = (v - (s * k[..., None]).sum(-2)) * beta[..., None]
    s = s + k[..., None] * delta[..., None, :]
    state.copy_(s)
    return (s * (q * K**-0.5)[..., None]).sum(-2).to(kind)


def by_einsum(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A decay of key lanes, as in KDA, beta on the key."""
    kind = v.dtype
    q, k, v, beta = (each.to(state.dtype) for each in (q, k, v, beta))
    s = state * g[..., None].exp()
    s = s + torch.einsum("bnk,bnv->bnkv", beta[..., None] * k, v - torch.einsum("bnk,bnkv->bnv", k, s))
    return torch.einsum("bnk,bnkv->bnv", q, s).mul(K**-0.5).to(kind), s


def by_products(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A state with values first, and beta on both terms: the product, and the state after it."""
    kind = v.dtype
    q, k, v, beta = (each.to(state.dtype)[..., None] for each in (q, k, v, beta))
    s = state * g.exp()[..., None, None]
    beta = beta[..., None]
    s = s + (beta * v - beta * (s @ k)) @ k.mT
    return (s @ q)[..., 0].to(kind), s


def shared(step: Callable[..., Any]) -> Callable[..., Any]:
    """Two heads of the state for each head of queries and keys."""
    return lambda q, k, *rest: step(*(each.repeat_interleave(2, 1) for each in (q, k)), *rest)


def stored(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The step of `by_products` on the state of the caller, computed in the dtype of the decay."""
    y, s = by_products(q, k, v, g, beta, state.to(g.dtype))
    state.copy_(s)
    return y


def unrounded(*args: Tensor) -> Tensor:
    """A product with the state that a norm in its dtype reads."""
    q, k, v, g, beta, state = args
    q, k, wide_v, beta = (each.to(state.dtype) for each in (q, k, v, beta))
    s = state * g.exp()[..., None, None]
    s = s + k[..., None] * ((wide_v - (s * k[..., None]).sum(-2)) * beta[..., None])[..., None, :]
    state.copy_(s)
    y = (s * q[..., None]).sum(-2)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(v.dtype)


def ungated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """No decay, and twice beta."""
    kind = v.dtype
    q, k, v, beta = (each.to(state.dtype) for each in (q, k, v, beta))
    s = state + k[..., None] * ((v - (state * k[..., None]).sum(-2)) * (2.0 * beta)[..., None]).unsqueeze(-2)
    return (s * q[..., None]).sum(-2).to(kind), s


def other_key(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """What is subtracted is not read by the key that is written."""
    s = state * g.exp()[..., None, None]
    delta = (v.to(s.dtype) - (s * q.to(s.dtype)[..., None]).sum(-2)) * beta.to(s.dtype)[..., None]
    s = s + k.to(s.dtype)[..., None] * delta[..., None, :]
    return (s * q.to(s.dtype)[..., None]).sum(-2).to(v.dtype), s


def plain_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """A sigmoid decays the state."""
    q, k, wide_v, beta = (each.to(state.dtype) for each in (q, k, v, beta))
    s = state * g.sigmoid()[..., None, None]
    s = s + k[..., None] * ((wide_v - (s * k[..., None]).sum(-2)) * beta[..., None])[..., None, :]
    return (s * q[..., None]).sum(-2).to(v.dtype), s


def decay_of_values(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The lanes of the values decay differently."""
    q, k, wide_v, beta = (each.to(state.dtype) for each in (q, k, v, beta))
    s = state * g.exp()[..., None, :]
    s = s + k[..., None] * ((wide_v - (s * k[..., None]).sum(-2)) * beta[..., None])[..., None, :]
    return (s * q[..., None]).sum(-2).to(v.dtype), s


FIRST = (V, K)
EXAMPLES = (
    Example("by sums", by_sums, numbers()),
    Example("decays of key lanes, by einsum", by_einsum, numbers(lanes=(K,))),
    Example("values first, by products", stored, numbers(state=FIRST)),
    Example("shared heads of keys", shared(by_sums), numbers(heads=N // 2)),
    Example("a state of 16 bits", stored, numbers(state=FIRST, narrow=True)),
    Example("no decay, twice beta", ungated, numbers()),
    Example("a product in float32", unrounded, numbers()),
    Example("a symbolic batch", by_sums, symbolic(numbers(), range(6), (0,))),
    Example("another key", other_key, numbers(), "key: the state is read by another vector than"),
    Example("a decay that is no exponential", plain_decay, numbers(), "g: the decay of the state is no exponential"),
    Example(
        "decays of value lanes", decay_of_values, numbers(lanes=(V,)), "g: the decay of the state differs by lanes"
    ),
)

TRIED = {"delta_rule": EXAMPLES}
