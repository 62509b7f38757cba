"""Attention of any number of sequences, queries or keys, whose sizes are products, differences or parts of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.testing import capture, trial_of
from tests.engine.graphs import numbers
from tests.support.one_graph import one_graph

N, D = 4, 16

Given = Callable[[int], tuple[Tensor, ...]]


def marked(axis: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    for each in inputs:
        torch._dynamo.mark_dynamic(each, axis)
    return inputs


def positions_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[S, B, N · D] each: sequences and heads are one dim of the products, as in fairseq and Megatron."""
    s, b = q.shape[:2]
    q, k, v = (each.reshape(s, b * N, D).transpose(0, 1) for each in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, N, s, s) * D**-0.5
    weights = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf).softmax(-1)
    y = torch.bmm(weights.view(b * N, s, s), v).view(b, N, s, D)
    return y.permute(2, 0, 1, 3).reshape(s, b, N * D)


def others_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same where values are those of another head or sequence."""
    s, b = q.shape[:2]
    q, k = (each.reshape(s, b * N, D).transpose(0, 1) for each in (q, k))
    v = v.view(s, b, N, D).transpose(1, 2).reshape(s, b * N, D).transpose(0, 1)
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, N, s, s) * D**-0.5
    return torch.bmm(scores.softmax(-1).view(b * N, s, s), v).view(b, N, s, D)


def of_sequences(batch: int) -> tuple[Tensor, ...]:
    return marked(1, *(numbers(6, batch, N * D, seed=seed) for seed in range(3)))


def behind_others(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, N, S, D] behind a prompt: the causal order is added to the last keys, as in minimind."""
    scores, s = q @ k.mT * D**-0.5, q.shape[2]
    scores[..., -s:] += torch.full((s, s), -torch.inf).triu(1)
    return scores.softmax(-1) @ v


def one_less(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same where a query does not see its own key."""
    scores, s = q @ k.mT * D**-0.5, q.shape[2]
    scores[..., -s:] += torch.full((s, s), -torch.inf).triu(0)
    return scores.softmax(-1) @ v


def of_keys(keys: int) -> tuple[Tensor, ...]:
    k, v = marked(2, *(numbers(2, N, keys + 5, D, seed=seed) for seed in range(2)))
    return numbers(2, N, 5, D, seed=2), k, v


def of_queries(queries: int) -> tuple[Tensor, ...]:
    return marked(2, *(numbers(2, N, queries + more, D, seed=more) for more in (0, 7, 7)))


def up_to_a_position(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """One query [B, N, 1, D] of each sequence in a cache of any length, as a step of decoding reads it."""
    seen = torch.arange(k.shape[2]) <= at[:, None, None, None]
    return (q @ k.mT * D**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def of_cache(keys: int) -> tuple[Tensor, ...]:
    k, v = marked(2, *(numbers(2, N, keys + 2, D, seed=seed) for seed in range(2)))
    return numbers(2, N, 1, D, seed=2), k, v, torch.tensor([keys, 1])


MASKS: dict[str, Callable[[int, int], Tensor]] = {
    "offset": lambda s, t: torch.arange(t) <= torch.arange(s)[:, None] + (t - s),
    "taken": lambda s, t: torch.arange(t) - (t - s) <= torch.arange(s)[:, None],
    "first position": lambda s, t: torch.arange(t - s, t)[:, None] >= torch.arange(t),
    "triangle above": lambda s, t: ~torch.ones(s, t).triu(t - s + 1).bool(),
    "triangle below": lambda s, t: torch.ones(s, t, dtype=torch.bool).tril(t - s),
}
ORDERS = {
    **MASKS,
    "window": lambda s, t: MASKS["triangle below"](s, t) & torch.ones(s, t).triu(t - s - 2).bool(),
    "one more": lambda s, t: torch.ones(s, t, dtype=torch.bool).tril(t - s + 1),
    "of the first keys": lambda s, t: torch.arange(t) <= torch.arange(s)[:, None],
}


class Behind(torch.nn.Module):
    """A prompt [B, S, 3 · N · D] behind keys and values [B, N, P, D], under an order of queries and all keys."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = ORDERS[order]

    def forward(self, x: Tensor, old_k: Tensor, old_v: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (N, D)).transpose(1, 2) for each in x.chunk(3, -1))
        k, v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
        seen = self.order(q.shape[2], k.shape[2])
        return (q @ k.mT * D**-0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def of_both(size: int) -> tuple[Tensor, ...]:
    return *marked(1, numbers(2, size, 3 * N * D)), *marked(2, *(numbers(2, N, size + 4, D, seed=n) for n in (1, 2)))


POSITIONS: dict[str, Callable[[int], Tensor]] = {
    "from the first": lambda s: torch.arange(s)[None],
    "from another": lambda s: torch.arange(s).add(40)[None].expand(2, -1),
    "begun anew": lambda s: (torch.arange(s) % 3)[None],
    "every second": lambda s: torch.arange(0, 2 * s, 2)[None],
    "backwards": lambda s: torch.arange(s)[None].flip(-1),
}


class Packed(torch.nn.Module):
    """Documents [B, N, S, D] behind each other, told by where positions do not go on by one, as in transformers."""

    def __init__(self, positions: str, before: int = 1) -> None:
        super().__init__()
        self.positions, self.before = POSITIONS[positions], before

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = self.positions(q.shape[2])
        number = (torch.diff(at, prepend=at[:, :1] - self.before, dim=-1) != 1).cumsum(-1)
        seen = (number[:, :, None] == number[:, None]) & torch.ones(at.shape[-1], at.shape[-1]).tril().bool()
        return (q @ k.mT * D**-0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v


def of_prompt(size: int) -> tuple[Tensor, ...]:
    return marked(2, *(numbers(2, N, size, D, seed=seed) for seed in range(3)))


ONE_DOCUMENT = [Packed("from the first"), Packed("from another")]
DOCUMENTS = [Packed("begun anew"), Packed("every second"), Packed("backwards"), Packed("from the first", 2)]


class Sloped(torch.nn.Module):
    """Queries [B, N, S, D] with slopes (ALiBi) beside an order: repeated for each sequence as in BLOOM, or of distances
    that are counted in floats as in OLMo.
    """

    def __init__(self, repeated: bool, steep: float = 1.0) -> None:
        super().__init__()
        self.repeated, self.steep = repeated, steep

    def bias(self, b: int, s: int) -> Tensor:
        slopes = 0.5 ** torch.arange(1, N + 1) * self.steep
        if self.repeated:
            return (slopes[:, None, None] * torch.arange(s)).repeat(b, 1, 1).view(b, N, 1, s)
        at = torch.arange(1 - s, 1, dtype=torch.float)
        return (at - at[:, None]).abs().mul(-1) * slopes.view(1, N, 1, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, s, _ = q.shape
        bias = self.bias(b, s) * self.steep + torch.full((s, s), torch.finfo(q.dtype).min).triu(1)
        return (q @ k.mT * D**-0.5 + bias).softmax(-1) @ v


def of_sequences_and_tokens(size: int) -> tuple[Tensor, ...]:
    return marked(0, *marked(2, *(numbers(size + 1, N, size, D, seed=seed) for seed in range(3))))


SLOPED = [(Sloped(repeated), of_sequences_and_tokens) for repeated in (True, False)]

FUSED = [(positions_first, of_sequences), (behind_others, of_keys), (behind_others, of_queries)]
CACHED = [*SLOPED, (up_to_a_position, of_cache)]
UNDER = [(Behind(order), of_both) for order in ORDERS]
PACKED = [(each, of_prompt) for each in (*ONE_DOCUMENT, *DOCUMENTS)]
OTHERS = [(others_values, of_sequences), (one_less, of_keys)]


@pytest.mark.rotates(11)
@pytest.mark.parametrize(("form", "given"), [*FUSED, *CACHED, *UNDER[:1], *UNDER[-3:], *PACKED, *OTHERS])
def test_one_graph_gives_what_plain_code_does_for_every_size(form: Callable[..., Tensor], given: Given):
    with one_graph(form) as compiled:
        for size in (3, 2, 9):
            torch.testing.assert_close(compiled(*given(size)), form(*given(size)))


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("form", "given"), [*FUSED, *UNDER])
def test_it_becomes_what_it_does_with_sizes_that_are_known(form: Callable[..., Tensor], given: Given):
    known, symbolic = (becomes(form, given(3), dynamic) for dynamic in (False, None))
    assert known == symbolic
    ((_, mode, _),) = known
    assert mode == 3 or form not in [each for each, _ in UNDER[: len(MASKS)]]


@pytest.mark.rotates(6)
def test_a_position_in_a_cache_of_any_length_is_a_length():
    known, symbolic = (becomes(up_to_a_position, of_cache(6), dynamic) for dynamic in (False, None))
    assert known == symbolic
    ((operator, *_),) = symbolic
    assert "tensor_lengths" in str(operator)


@pytest.mark.parametrize("repeated", [True, False])
@pytest.mark.rotates(4)
def test_slopes_are_a_bias_of_any_number_of_tokens(repeated: bool):
    assert becomes(Sloped(repeated), of_sequences_and_tokens(5), None)
    steep = trial_of(capture(Sloped(repeated, 1e35), of_sequences_and_tokens(5), dynamic=None)).outcome
    assert not steep.chosen
    assert any("may hide keys" in each.reason for each in steep.refusals)


@pytest.mark.rotates(12)
@pytest.mark.parametrize("form", [*ONE_DOCUMENT, *DOCUMENTS])
def test_positions_that_go_on_by_one_are_one_document_of_any_length(form: Callable[..., Tensor]):
    ((_, mode, _),) = becomes(form, of_prompt(7), None)
    assert (mode == 2) == (form in ONE_DOCUMENT)


def becomes(form: Callable[..., Tensor], inputs: tuple[Tensor, ...], dynamic: bool | None) -> list[tuple[Any, ...]]:
    """The operators that the code becomes, and the order that each is told."""
    found = trial_of(capture(form, inputs, dynamic=dynamic))
    assert [each.match.rule.name for each in found.outcome.chosen] == ["attention"]
    calls = (node for node in found.fused.graph.nodes if "npu." in str(node.target))
    return [(each.target, each.kwargs.get("sparse_mode"), each.kwargs.get("pre_tokens")) for each in calls]


def under_a_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5 + mask).softmax(-1) @ v


@pytest.mark.parametrize("queries", [2, 5])
def test_of_a_mask_of_any_number_of_rows_the_first_is_read(queries: int):
    q, k, v = numbers(2, N, queries, D), *(numbers(2, N, 12, D, seed=seed) for seed in (1, 2))
    mask = torch.full((queries, 12), -1e9).triu(12 - queries + 1).expand(2, 1, -1, -1).clone()
    captured = capture(under_a_mask, (*marked(2, q), k, v, *marked(2, mask)), dynamic=None)
    names = [node.name for node in captured.graph.graph.find_nodes(op="placeholder")]
    assumed = {name: "causal" for name, each in zip(names, captured.inputs, strict=True) if each is mask}
    outcome = trial_of(replace(captured, assumed=assumed)).outcome
    assert not outcome.failures
    assert [each.match.rule.name for each in outcome.chosen] == ["attention"]
