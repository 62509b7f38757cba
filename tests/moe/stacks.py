"""Experts that are all computed for every token by products of stacked matrices, weighed by zeros off the list.

Every form takes tokens [T, H], logits [T, E], gate_up [E, 2 · I, H] and down [E, H, I].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.moe.experts import EXPERTS, INNER, WIDTH, Form, halves, routed


def every(logits: Tensor) -> Tensor:
    """The weights of all experts [.., E], 0 where one was not chosen."""
    weights, experts = routed(logits)
    return torch.zeros_like(logits).scatter(-1, experts, weights)


def one_hot(logits: Tensor) -> Tensor:
    weights, experts = routed(logits)
    return (F.one_hot(experts, EXPERTS).to(weights.dtype) * weights.unsqueeze(-1)).sum(-2)


def one_hot_by_einsum(logits: Tensor) -> Tensor:
    weights, experts = routed(logits)
    return torch.einsum("tk,tke->te", weights, F.one_hot(experts, EXPERTS).to(weights.dtype))


def repeated(tokens, logits, gate_up, down):
    """Qwen3-VL: tokens repeated for every expert, the sum over the first dim."""
    hidden = halves(torch.bmm(tokens.repeat(EXPERTS, 1).view(EXPERTS, -1, WIDTH), gate_up.mT))
    given = torch.bmm(hidden, down.mT).reshape(EXPERTS, tokens.shape[0], -1, WIDTH)
    given = given * every(logits).transpose(0, 1).view(EXPERTS, tokens.shape[0], -1)[..., None]
    return given.sum(dim=0).reshape(-1, WIDTH)


def expanded(tokens, logits, gate_up, down):
    hidden = halves(torch.bmm(tokens.unsqueeze(0).expand(EXPERTS, -1, -1), gate_up.mT))
    return (torch.bmm(hidden, down.mT) * one_hot(logits).t().unsqueeze(-1)).sum(0)


def broadcast(tokens, logits, gate_up, down):
    given = halves(tokens.unsqueeze(0) @ gate_up.mT) @ down.mT
    return torch.einsum("eth,te->th", given, one_hot_by_einsum(logits))


def two_einsums(tokens, logits, gate_up, down):
    gate, up = (torch.einsum("th,eih->tei", tokens, each) for each in gate_up.chunk(2, dim=1))
    return torch.einsum("te,teh->th", every(logits), torch.einsum("tei,ehi->teh", F.silu(gate) * up, down))


def one_einsum(tokens, logits, gate_up, down):
    hidden = halves(torch.einsum("th,ejh->tej", tokens, gate_up))
    return torch.einsum("tei,ehi,te->th", hidden, down, every(logits))


def one_layer_for_all(tokens, logits, gate_up, down):
    hidden = halves(F.linear(tokens, gate_up.flatten(0, 1)).view(-1, EXPERTS, 2 * INNER))
    return (torch.einsum("tei,ehi->teh", hidden, down) * every(logits).unsqueeze(-1)).sum(1)


def in_batches(tokens, logits, gate_up, down):
    tokens, weights = tokens.unflatten(0, (1, -1)), every(logits.unflatten(0, (1, -1)))
    given = torch.einsum("bsei,ehi->bseh", halves(torch.einsum("bsh,ejh->bsej", tokens, gate_up)), down)
    return torch.einsum("bse,bseh->bsh", weights, given).flatten(0, 1)


def experts_before_batches(tokens, logits, gate_up, down):
    tokens, weights = tokens.unflatten(0, (1, -1)), every(logits.unflatten(0, (1, -1)))
    given = torch.einsum("ebsi,ehi->ebsh", halves(torch.einsum("bsh,ejh->ebsj", tokens, gate_up)), down)
    return (given * weights.permute(2, 0, 1).unsqueeze(-1)).sum(0).flatten(0, 1)


def gathered_results(tokens, logits, gate_up, down):
    """What all experts give, of which the rows of the list are gathered."""
    weights, experts = routed(logits)
    given = torch.einsum("tei,ehi->teh", halves(torch.einsum("th,ejh->tej", tokens, gate_up)), down)
    return (given.gather(1, experts.unsqueeze(-1).expand(-1, -1, WIDTH)) * weights.unsqueeze(-1)).sum(1)


def gathered_results_of_layers(tokens, logits, gate_up, down):
    weights, experts = routed(logits)
    given = torch.stack([F.linear(halves(F.linear(tokens, gate_up[e])), down[e]) for e in range(EXPERTS)], dim=1)
    return (given.gather(1, experts.unsqueeze(-1).expand(-1, -1, WIDTH)) * weights.unsqueeze(-1)).sum(1)


STACKS: tuple[Form, ...] = (
    repeated, expanded, broadcast, two_einsums, one_einsum, one_layer_for_all, in_batches, experts_before_batches,
    gathered_results, gathered_results_of_layers,
)  # fmt: skip


# biases -------------------------------------------------------------------------------------------------------------


def with_biases(tokens, logits, gate_up, down):
    """Lines of the matrices for biases, behind both products."""
    hidden = halves(tokens.unsqueeze(0) @ gate_up.mT + down.flatten(1)[:, None, : 2 * INNER])
    given = hidden @ down.mT + gate_up[:, 0][:, None]
    return (given * every(logits).t().unsqueeze(-1)).sum(0)


def biased(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same in float64, token by token."""
    rows = []
    for token, weights in zip(tokens.double(), every(logits).double(), strict=True):
        parts = (
            weights[e] * (down[e].double() @ _hidden(token, gate_up[e], down[e]) + gate_up[e, 0].double())
            for e in weights.nonzero().flatten().tolist()
        )
        rows.append(sum(parts))
    return torch.stack(rows)


def _hidden(token: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return halves(gate_up.double() @ token + down.flatten()[: 2 * INNER].double())


# look-alikes --------------------------------------------------------------------------------------------------------


def mixing_tokens(tokens, logits, gate_up, down):
    """A softmax over tokens takes part of those that did not choose the expert."""
    gate, up = (tokens.unsqueeze(0) @ gate_up.mT).chunk(2, -1)
    return (((F.silu(gate.softmax(1)) * up) @ down.mT) * every(logits).t().unsqueeze(-1)).sum(0)


def mixing_experts(tokens, logits, gate_up, down):
    """Hidden rows of the next expert."""
    hidden = halves(tokens.unsqueeze(0) @ gate_up.mT).roll(1, 0)
    return ((hidden @ down.mT) * every(logits).t().unsqueeze(-1)).sum(0)


def tokens_of_each_expert(tokens, logits, gate_up, down):
    """Every expert is given tokens of its own."""
    shares = torch.linspace(0.5, 1.5, EXPERTS, dtype=tokens.dtype)[:, None, None]
    return ((halves((tokens * shares) @ gate_up.mT) @ down.mT) * every(logits).t().unsqueeze(-1)).sum(0)


def choices_of_another(tokens, logits, gate_up, down):
    """Weights of all experts, those of the next one."""
    return ((halves(tokens @ gate_up.mT) @ down.mT) * every(logits).roll(1, -1).t().unsqueeze(-1)).sum(0)


def shares_of_all(tokens, logits, gate_up, down):
    """No expert counts 0."""
    return ((halves(tokens @ gate_up.mT) @ down.mT) * logits.softmax(-1).t().unsqueeze(-1)).sum(0)


_DENSE = "all of them are computed for every token"
OTHERS: dict[Form, str] = {
    mixing_tokens: _DENSE,
    mixing_experts: _DENSE,
    tokens_of_each_expert: _DENSE,
    choices_of_another: "",
    shares_of_all: "",
}
