"""Experts of a mixture: matrices that are gathered for the rows of tokens, and what only looks like their sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, fixed, symbolic

TOKENS, EXPERTS, CHOICES, WIDTH, INNER = 5, 6, 2, 32, 16
Activation = Callable[[Tensor], Tensor]


def _inputs(*shapes: tuple[int, ...], parameters: bool = True) -> Inputs:
    """Tokens [T, H], logits [T, E] in such steps that every dtype chooses the same, and matrices."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(11)
        logits = torch.stack([torch.randperm(EXPERTS, generator=draw) for _ in range(TOKENS)]) / 2
        matrices = [(torch.randn(shape, generator=draw) / 8).to(dtype) for shape in shapes]
        tokens = torch.randn(TOKENS, WIDTH, generator=draw).to(dtype)
        return tokens, logits.to(dtype), *(map(fixed, matrices) if parameters else matrices)

    return make


MERGED = _inputs((EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER))
PLAIN = _inputs((EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
_TWO = ((EXPERTS, INNER, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
TWO = _inputs(*_TWO)
BIASED = _inputs(_TWO[0], (EXPERTS, INNER), _TWO[1], (EXPERTS, INNER), _TWO[2])


def routed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [T, K] in the dtype of the logits, and experts."""
    weights, experts = logits.softmax(-1, dtype=torch.float32).topk(CHOICES, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), experts


def halves(both: Tensor) -> Tensor:
    """The gate first."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def clipped(both: Tensor) -> Tensor:
    """Every second lane, both bounded."""
    gate, up = both[..., ::2].clamp(max=2.0), both[..., 1::2].clamp(min=-2.0, max=2.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


def clipped_halves(both: Tensor) -> Tensor:
    """Both halves bounded."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=2.0)) * up.clamp(min=-2.0, max=2.0)


def gathered(
    tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, activation: Activation = halves,
    chosen: Callable[[Tensor], Tensor] = lambda experts: experts,
) -> Tensor:  # fmt: skip
    """A matrix for each row, as transformers writes `batched_mm`."""
    weights, experts = routed(logits)
    listed = chosen(experts).reshape(-1)
    rows = tokens.repeat_interleave(CHOICES, dim=0)
    hidden = activation(torch.bmm(gate_up[listed], rows.unsqueeze(-1)).squeeze(-1))
    given = torch.bmm(down[listed], hidden.unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
    return given.view(*experts.shape, -1).sum(dim=1).to(tokens.dtype)


def not_put_back(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Rows in order of their experts, summed as if they were in that of the tokens."""
    weights, experts = routed(logits)
    listed, order = experts.reshape(-1).sort()
    both = torch.bmm(gate_up[listed], tokens[order // CHOICES].unsqueeze(-1)).squeeze(-1)
    given = torch.bmm(down[listed], halves(both).unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
    return given.view(*experts.shape, -1).sum(dim=1)


def by_einsum(tokens: Tensor, logits: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Gate and up apart, as gpt-fast writes it."""
    weights, experts = routed(logits)
    hidden = F.silu(torch.einsum("td,tkid->tki", tokens, gate[experts]))
    hidden = hidden * torch.einsum("td,tkid->tki", tokens, up[experts])
    return torch.einsum("tkd,tk->td", torch.einsum("tki,tkdi->tkd", hidden, down[experts]), weights)


def biased_halves(
    tokens: Tensor, logits: Tensor, gate: Tensor, gate_bias: Tensor, up: Tensor, up_bias: Tensor, down: Tensor,
) -> Tensor:  # fmt: skip
    """Gate and up apart, each with a bias of its own."""
    weights, experts = routed(logits)
    hidden = F.silu(torch.einsum("td,tkid->tki", tokens, gate[experts]) + gate_bias[experts])
    hidden = hidden * (torch.einsum("td,tkid->tki", tokens, up[experts]) + up_bias[experts])
    return torch.einsum("tkd,tk->td", torch.einsum("tki,tkdi->tkd", hidden, down[experts]), weights)


def gate_alone(
    tokens: Tensor, logits: Tensor, gate: Tensor, gate_bias: Tensor, up: Tensor, up_bias: Tensor, down: Tensor
) -> Tensor:
    """A bias of the gate, and none of up."""
    weights, experts = routed(logits)
    hidden = F.silu(torch.einsum("td,tkid->tki", tokens, gate[experts]) + gate_bias[experts])
    hidden = hidden * torch.einsum("td,tkid->tki", tokens, up[experts])
    return torch.einsum("tkd,tk->td", torch.einsum("tki,tkdi->tkd", hidden, down[experts]), weights)


def added(tokens: Tensor, logits: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All experts of all tokens, one after the other, as books write it."""
    weights, experts = routed(logits)
    every, y = torch.zeros_like(logits).scatter(-1, experts, weights), torch.zeros_like(tokens)
    for e in range(EXPERTS):
        hidden = F.silu(F.linear(tokens, gate[e])) * F.linear(tokens, up[e])
        y += F.linear(hidden, down[e]) * every[:, e : e + 1]
    return y


def of_one_device(tokens: Tensor, logits: Tensor, gate: Tensor, up: Tensor, down: Tensor, experts: range) -> Tensor:
    """Experts of one device, in a loop."""
    weights, listed = routed(logits)
    y = torch.zeros_like(tokens)
    for e in experts:
        share = (weights * (listed == e)).sum(-1, keepdim=True)
        y = y + share * F.linear(F.silu(F.linear(tokens, gate[e])) * F.linear(tokens, up[e]), down[e])
    return y


def ungated(tokens: Tensor, logits: Tensor, up: Tensor, down: Tensor, activation: Activation = F.relu) -> Tensor:
    """An activation of one product."""
    weights, experts = routed(logits)
    hidden = activation(torch.matmul(up[experts], tokens[:, None, :, None]).squeeze(-1))
    given = torch.matmul(down[experts], hidden.unsqueeze(-1)).squeeze(-1)
    return (given * weights.unsqueeze(-1)).sum(1)


def written(x: Tensor) -> Tensor:
    """Gelu of tanh in primitive operators."""
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def written_halves(both: Tensor) -> Tensor:
    """The gate first, a gelu that is written out of it."""
    gate, up = both.chunk(2, dim=-1)
    return written(gate) * up


def gelu_halves(both: Tensor) -> Tensor:
    """The gate first, gelu of it."""
    gate, up = both.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _given(tokens: Tensor, listed: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    hidden = halves(torch.matmul(gate_up[listed], tokens[:, None, :, None]).squeeze(-1))
    return torch.matmul(down[listed], hidden.unsqueeze(-1)).squeeze(-1).mean(1)


def _listed(dtype: torch.dtype) -> tuple[Tensor, ...]:
    tokens, logits, *matrices = MERGED(dtype)
    return tokens, logits.topk(CHOICES, dim=-1)[1], *matrices


def of_sequences(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Tokens of several sequences, [B, S, H]."""
    weights, experts = routed(logits)
    hidden = halves((gate_up[experts] @ tokens[:, :, None, :, None]).squeeze(-1))
    return ((down[experts] @ hidden.unsqueeze(-1)).squeeze(-1) * weights.unsqueeze(-1)).sum(-2)


def _sequences(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Two sequences of tokens."""
    tokens, logits, *matrices = MERGED(dtype)
    return *(torch.stack((each, each.flip(0))) for each in (tokens, logits)), *matrices


EXAMPLES = (
    Example("gathered matrices", gathered, MERGED),
    Example("gathered matrices, bounded lanes", partial(gathered, activation=clipped), MERGED),
    Example("gathered matrices, bounded halves", partial(gathered, activation=clipped_halves), MERGED),
    Example("gathered matrices, a gate by gelu", partial(gathered, activation=gelu_halves), MERGED),
    Example("a gate by gelu written out", partial(gathered, activation=written_halves), MERGED),
    Example("relu and no gate", ungated, PLAIN),
    Example("silu and no gate", partial(ungated, activation=F.silu), PLAIN),
    Example("gelu and no gate", partial(ungated, activation=F.gelu), PLAIN),
    Example("gelu written out and no gate", partial(ungated, activation=written), PLAIN),
    Example("products by einsum", by_einsum, TWO),
    Example("a loop over all experts", added, TWO),
    Example("experts of one device", partial(of_one_device, experts=range(2, 5)), TWO),
    Example("some experts of one device", partial(of_one_device, experts=range(1, 6, 2)), TWO, "leaves out one"),
    Example("biases of gate and up", biased_halves, BIASED),
    Example("a bias of the gate alone", gate_alone, BIASED, "one of gate and up alone has them"),
    Example(
        "gelu between the products", partial(gathered, activation=lambda both: F.gelu(both)[:, :INNER]), MERGED,
        "between their two products stands something",
    ),
    Example("sorted rows that are not put back", not_put_back, MERGED, "it is not proven to be summed for each"),
    Example("matrices that are computed", by_einsum, _inputs(*_TWO, parameters=False), "are no Parameters"),
    Example("any number of sequences", of_sequences, symbolic(_sequences, (0, 1), (0, 1)), "several symbolic sizes"),
    Example("experts that come from elsewhere", _given, _listed, "nothing in this graph chooses them, so that"),
)  # fmt: skip

TRIED = {"routed_experts": EXAMPLES}
