"""Masks that are passed in: what is assumed of one is what the operator is told, and it is noted as relied on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.assumptions import holds
from fusion.facts import Facts
from fusion.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.report import emitted

HOST = Options(target="host", lower="eager")


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


def fused(kind: str, mask: Tensor, queries: int, keys: int) -> tuple[dict[str, Any] | None, Any]:
    """The arguments of the operator that attention becomes, and the outcome; its numbers are eager's."""
    g = torch.Generator().manual_seed(0)
    batch = mask.shape[0]
    shapes = ((batch, 4, queries, 64), (batch, 2, keys, 64), (batch, 2, keys, 64))
    inputs = (*(torch.randn(shape, generator=g) for shape in shapes), mask)
    assert holds(mask, kind), "the test's own mask"
    graph = testing.capture(attend, inputs, "composite").graph
    name = graph.graph.find_nodes(op="placeholder")[3].name
    outcome = fuse_graph(graph.graph, installed(), HOST, Facts(assumed={name: kind}))
    graph.recompile()
    torch.testing.assert_close(graph(*inputs)[0], attend(*inputs), rtol=1e-5, atol=1e-5)
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
@pytest.mark.parametrize("queries", [1, 3])
def test_a_causal_mask_over_a_cache_becomes_lengths(queries, dtype):
    given, outcome = fused("causal", mask_of("causal", queries, 16, [5, 16, 9], dtype), queries, 16)
    assert isinstance(given["actual_seq_kvlen"], torch.fx.Node)
    assert given.get("sparse_mode", 0) == (0 if queries == 1 else 3)
    assert len(outcome.assumed) == 1


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", ["padding", "window:3"])
def test_an_added_mask_is_shown_where_it_cannot_be_told(kind, queries):
    given, outcome = fused(kind, mask_of(kind, queries, 16, [5, 16, 9], torch.float32), queries, 16)
    assert given["atten_mask"].meta["val"].dtype == torch.bool
    assert len(outcome.assumed) == 1


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
    assert any("not proven to be a mask" in each.reason for each in outcome.refusals)


def test_half_of_what_hides_a_key_hides_it_too():
    def halved(q: Tensor, mask: Tensor) -> Tensor:
        return attend(q, q, q, mask * 0.5)

    inputs = (torch.randn(1, 2, 8, 64), mask_of("causal", 8, 8, [8], torch.float32))
    graph = testing.capture(halved, inputs, "composite").graph
    name = next(n.name for n in graph.graph.find_nodes(op="placeholder") if n.meta["val"].shape == (1, 1, 8, 8))
    outcome = fuse_graph(graph.graph, installed(), HOST, Facts(assumed={name: "causal"}))
    assert outcome.chosen
    assert outcome.assumed == {name}
