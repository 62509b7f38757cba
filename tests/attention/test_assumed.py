"""Masks that are passed in: what is assumed of one is what the operator is told, and it is noted as relied on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sympy import Symbol
from torch import Tensor

from fusion import testing
from fusion.analysis.affine import Affine, Leaf
from fusion.analysis.constant_folding import Folder
from fusion.analysis.mask_formulas import Positions
from fusion.facts import LOWERED, Facts
from fusion.frontend.library import installed
from fusion.graph import Algebra, Value
from fusion.inputs.assumptions import holds
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.report.trace import emitted
from patterns.attention.masks.assumed import Assumed

HOST = Options(target="host", lower="eager")


def attend_by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention with a mask [S, T] or [B, S, T]."""
    each = mask if mask.dim() < 3 else mask[:, None]
    scores = q @ k.repeat_interleave(2, 1).mT / 8
    scores = scores.masked_fill(~each, -torch.inf) if mask.dtype == torch.bool else scores + each
    return scores.softmax(-1) @ v.repeat_interleave(2, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def mask_of(kind: str, queries: int, keys: int, lengths: list[int], dtype: torch.dtype) -> Tensor:
    """[B, 1, S, T] for the last `queries` of the first `lengths[b]` keys."""
    key, query = torch.arange(keys), torch.arange(queries)[:, None]
    place = query + torch.tensor(lengths)[:, None, None, None] - queries
    seen = key <= place
    if kind.startswith("window"):
        seen = seen & (key > place - int(kind.split(":")[1]))
    if kind == "padding":
        seen = seen & (key >= torch.arange(len(lengths))[:, None, None, None])
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def fused(
    kind: str, mask: Tensor, queries: int, keys: int, batch: int = 0, form: Any = attend
) -> tuple[dict[str, Any] | None, Any]:
    """The arguments of the operator that attention becomes, and the outcome; its numbers are eager's."""
    g = torch.Generator().manual_seed(0)
    batch = batch or mask.shape[0]
    shapes = ((batch, 4, queries, 64), (batch, 2, keys, 64), (batch, 2, keys, 64))
    inputs = (*(torch.randn(shape, generator=g) for shape in shapes), mask)
    assert holds(mask, kind), "the test's own mask"
    captured = testing.capture(form, inputs, "composite")
    graph = captured.graph
    places = graph.graph.find_nodes(op="placeholder")
    name = next(node.name for node in places if node.meta["val"].shape == mask.shape)
    outcome = fuse_graph(graph.graph, installed(), HOST, Facts(assumed={name: kind}))
    graph.recompile()
    torch.testing.assert_close(graph(*captured.inputs)[0], form(*inputs), rtol=1e-5, atol=1e-5)
    assert outcome.assumed <= {name}
    calls = [node for node in graph.graph.nodes if emitted(node)]
    return (dict(calls[0].kwargs) if calls else None), outcome


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("kind", ["causal", "window:3"])
def test_a_whole_sequence_needs_no_mask(kind, dtype):
    given, outcome = fused(kind, mask_of(kind, 8, 8, [8, 8], dtype), 8, 8)
    assert given["sparse_mode"] == (4 if kind == "window:3" else 2)
    assert given.get("pre_tokens", 2) == 2
    assert list(given["atten_mask"].meta["val"].shape) == [2048, 2048]
    assert len(outcome.assumed) == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("lengths", [[9], [5, 16, 9]], ids=["S T", "B S T"])
@pytest.mark.parametrize("queries", [3, 16])
@pytest.mark.rotates(3)
def test_a_mask_without_heads_is_told_as_well(queries, lengths, dtype):
    lengths = [16] * len(lengths) if queries == 16 else lengths
    mask = mask_of("causal", queries, 16, lengths, dtype)[:, 0]
    given, outcome = fused("causal", mask[0] if len(lengths) == 1 else mask, queries, 16, 3, attend_by_hand)
    assert ("actual_seq_kvlen" in given and given["actual_seq_kvlen"] is not None) == (queries == 3)
    assert given["sparse_mode"] == (3 if queries == 3 else 2)
    assert len(outcome.assumed) == 1


def test_a_mask_of_another_length_for_each_head_is_not_told():
    def by_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.repeat_interleave(2, 1).mT + mask).softmax(-1) @ v.repeat_interleave(2, 1)

    mask = mask_of("causal", 3, 16, [5, 16, 9, 7], torch.float32)[:, 0]
    given, outcome = fused("causal", mask, 3, 16, 2, by_heads)
    assert given is None
    assert any("differs from head to head" in each.reason for each in outcome.refusals)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_causal_mask_over_a_cache_becomes_lengths(queries, dtype):
    given, outcome = fused(
        "causal", mask_of("causal", queries, 16, [5, 16, 9], dtype)[:, 0], queries, 16, 3, attend_by_hand
    )
    assert isinstance(given["actual_seq_kvlen"], torch.fx.Node)
    assert given.get("sparse_mode", 0) == (0 if queries == 1 else 3)
    assert len(outcome.assumed) == 1


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", ["padding", "window:3"])
def test_an_added_mask_is_shown_where_it_cannot_be_told(kind, queries):
    mask = mask_of(kind, queries, 16, [5, 16, 9], torch.float32)[:, 0]
    given, outcome = fused(kind, mask, queries, 16, 3, attend_by_hand)
    assert given["atten_mask"].meta["val"].dtype == torch.bool
    assert len(outcome.assumed) == 1


def left_padded(lengths: list[int], keys: int, low: float, high: float) -> Tensor:
    """[B, T], `low` at the keys before the last `lengths[b]`, else `high`."""
    padded = torch.arange(keys) < keys - torch.tensor(lengths)[:, None]
    return torch.where(padded, low, high)


def test_a_key_that_another_mask_hides_is_lowered_by_the_assumed_one():
    """Left padding hides by a finite number, and the causal order by -inf: of padded queries the first remain."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        causal = torch.full((8, 8), -torch.inf).triu(1)
        scores = q @ k.repeat_interleave(2, 1).mT / 8 + causal + mask
        return scores.softmax(-1) @ v.repeat_interleave(2, 1)

    mask = left_padded([5, 8], 8, torch.finfo(torch.float32).min, 0.0)[:, None, None]
    given, _ = fused("padding", mask, 8, 8, form=attend)
    assert given is not None


@pytest.mark.parametrize("bound", [torch.finfo(torch.float32).min, -5.0])
def test_a_clamped_sum_of_masks_hides_if_its_bound_does(bound: float):
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        least = torch.finfo(torch.float32).min
        causal = torch.full((8, 8), least).triu(1)
        added = ((1 - mask[:, None, None]) * least + causal).clamp(min=bound)
        return attend_by_hand(q, k, v, added[:, 0])

    given, _ = fused("padding", left_padded([5, 8], 8, 0.0, 1.0), 8, 8, form=attend)
    assert given is not None
    assert (given.get("pse_shift") is not None) == (bound > -1e4)


@pytest.mark.parametrize("kind", ["padding", "window:3"])
def test_of_booleans_that_are_shown_nothing_is_relied_on(kind):
    given, outcome = fused(kind, mask_of(kind, 3, 16, [5, 16, 9], torch.bool), 3, 16)
    assert given["atten_mask"].meta["val"].dtype == torch.bool
    assert not outcome.assumed


def test_without_an_assumption_an_added_mask_is_any_bias():
    mask = mask_of("causal", 8, 8, [8], torch.float32)
    graph = testing.capture(attend, (*(torch.randn(1, 2, 8, 64) for _ in range(3)), mask), "composite").graph
    outcome = fuse_graph(graph.graph, installed(), HOST)
    assert not outcome.chosen
    assert any("what is added to the scores is not proven" in each.reason for each in outcome.refusals)


def padded(added: Callable[[Tensor], Tensor], q: Tensor, mask: Tensor) -> Tensor:
    """Attention to the keys of sequences [B, T], by numbers that are `added` to the scores."""
    return (q @ q.mT / 8 + added(mask)[:, None, None]).softmax(-1) @ q


def turned(mask: Tensor) -> Tensor:
    return (1.0 - mask) * -1e4


def captures_of_padding(added: Callable[[Tensor], Tensor], kind: str, *lengths: int) -> dict[str, Any]:
    """The captures of attention under a mask [B, T] of so many ones that is assumed to be of a kind; right numbers."""
    inputs = (torch.randn(2, 2, 8, 64), (torch.arange(8) < torch.tensor(lengths)[:, None]).float())
    assert holds(inputs[1], kind), "the test's own mask"
    graph = testing.capture(partial(padded, added), inputs, "composite").graph
    name = next(n.name for n in graph.graph.find_nodes(op="placeholder") if n.meta["val"].shape == (2, 8))
    fused = copy.deepcopy(graph)
    outcome = fuse_graph(fused.graph, installed(), HOST, Facts(assumed={name: kind}))
    fused.recompile()
    assert [each.match.rule.name for each in outcome.chosen] == ["attention"]
    torch.testing.assert_close(fused(*inputs), graph(*inputs))
    assert outcome.assumed == {name}
    return dict(outcome.chosen[0].match.captures)


@pytest.mark.parametrize("added", [lambda mask: mask, turned], ids=["as it is", "turned"])
def test_ones_of_keys_are_known_to_be_finite(added):
    """Added as they are they are a bias; turned into numbers of which attention has the sum, another one."""
    assert "bias.values" in captures_of_padding(added, "padding" + LOWERED, 0, 5)


def test_padding_with_a_key_in_each_sequence_is_a_mask_alone():
    captures = captures_of_padding(turned, "padding", 3, 5)
    assert "bias.values" not in captures
    assert captures["seen.fully_masked_row"] == "zero"
    hidden = captures["seen.mask"].below("expand", "reshape")
    assert (hidden.op, hidden.below("below", "expand", "reshape").op) == ("below", "input")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding_of_keys_has_a_key_in_each_sequence(dtype):
    some, none = ((torch.arange(8) < torch.tensor([[n], [5]])).to(dtype) for n in (3, 0))
    assert holds(some, "padding")
    assert holds(some, "padding" + LOWERED)
    assert not holds(none, "padding")
    assert holds(none, "padding" + LOWERED)


@pytest.mark.parametrize(
    ("shape", "region", "known"),
    [((2, 1, 4, 4), 0, True), ((1, 4, 4), 0, True), ((4, 4), 0, True), ((4,), 0, False), ((1, 4, 4), 1, False)],
)
def test_nothing_is_assumed_of_a_mask_of_other_dims_or_that_was_written_to(shape, region, known):
    a = Algebra()
    mask = a.make("input", (), ("mask", region), shape, torch.float32)
    at = Positions((2, 3, 4, 4), Folder()).origin[-len(shape) :]
    assert (Assumed(a, kinds={"mask": "causal"}).visible(mask, at) is not None) == known


S, SIZE = 4, Symbol("size", integer=True)


def write(a: Algebra, rows: int, size: Any) -> Value:
    """As many rows from a position on."""
    cache, source, start = (a.make("input", (), (name, 0), shape, dtype) for name, shape, dtype in (
        ("cache", (2, size, 8), torch.float32), ("source", (2, rows, 8), torch.float32), ("start", (), torch.int64),
    ))  # fmt: skip
    return a.make("write", (cache, source, start), (1,), cache.shape, cache.dtype)


def write_rows(a: Algebra, rows: int, size: Any) -> Value:
    """The same at positions that count on from it."""
    cache, source, start = write(a, rows, size).args
    places = a.add(a.make("arange", (), (0, 1), (rows,), torch.int64), start)
    assert places is not None
    return a.make("write_rows", (cache, source, places), (1,), cache.shape, cache.dtype)


@pytest.mark.parametrize("written", [write, write_rows])
@pytest.mark.parametrize(
    ("rows", "size", "keys", "inside"),
    [(S, 16, 16, True), (1, 16, 16, False), (S, 16, 8, False), (S, SIZE, 16, False), (S, 16, SIZE, False)],
)
def test_queries_stand_inside_where_as_many_rows_are_written_among_as_many_keys(written, rows, size, keys, inside):
    a = Algebra()
    start = a.make("input", (), ("start", 0), (), torch.int64)
    masks = Assumed(a, written=[written(a, rows, size)]).masks((2, 3, S, keys), (), (2, 3, S, keys))
    assert (Affine({Leaf(start, ()): 1}) in masks.begins) == inside


def test_rows_that_are_written_at_known_places_say_nothing():
    a = Algebra()
    cache, source, _ = write(a, S, 16).args
    places = a.make("arange", (), (0, 1), (S,), torch.int64)
    written = a.make("write_rows", (cache, source, places), (1,), cache.shape, cache.dtype)
    assert not Assumed(a, written=[written]).masks((2, 3, S, 16), (), (2, 3, S, 16)).begins


def test_half_of_what_hides_a_key_hides_it_too():
    def halved(q: Tensor, mask: Tensor) -> Tensor:
        return attend(q, q, q, mask * 0.5)

    inputs = (torch.randn(1, 2, 8, 64), mask_of("causal", 8, 8, [8], torch.float32))
    graph = testing.capture(halved, inputs, "composite").graph
    name = next(n.name for n in graph.graph.find_nodes(op="placeholder") if n.meta["val"].shape == (1, 1, 8, 8))
    outcome = fuse_graph(graph.graph, installed(), HOST, Facts(assumed={name: "causal"}))
    assert outcome.chosen
    assert outcome.assumed == {name}
