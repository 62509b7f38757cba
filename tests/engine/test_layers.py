"""Equal layers: searched once, and fused as if each had been; layers that differ are not taken for equal."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention, silu

import fusion
from fusion.facts import Facts
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.planning.fake_execution import Fakes
from fusion.stages.layers import divide, fold
from fusion.stages.layers.signatures import calls_of
from fusion.testing import Captured, capture

from .folding import CHIP, calls, check_as_searched_in_full, fused, ran
from .graphs import memory, norm, numbers, rotate

B, S, N, D, T = 2, 3, 2, 64, 8
HIDDEN = N * D


class Block(torch.nn.Module):
    """A decoder layer over a cache that it writes; `scale` tells it from others."""

    def __init__(self, scale: float = 0.125) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (torch.nn.Linear(HIDDEN, 96, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(96, HIDDEN, bias=False)
        self.before, self.after = (torch.nn.Parameter(torch.rand(HIDDEN)) for _ in range(2))
        self.keys, self.values = (torch.nn.Buffer(torch.zeros(B, N, T, D)) for _ in range(2))
        self.scale = scale

    def heads(self, x: Tensor) -> Tensor:
        return x.view(B, S, N, D).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        h = norm(x, self.before)
        q, k = (rotate(self.heads(of(h)), cos, sin) for of in (self.q, self.k))
        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, self.heads(self.v(h)))
        y = scaled_dot_product_attention(q, self.keys, self.values, mask, scale=self.scale)
        x = x + self.o(y.transpose(1, 2).reshape(B, S, HIDDEN))
        h = norm(x, self.after)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Model(torch.nn.Module):
    """Layers between an embedding and a head, with a table of rotations that they share."""

    def __init__(self, blocks: list[Block], states: bool = False) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, HIDDEN)
        self.layers = torch.nn.ModuleList(blocks)
        self.last = torch.nn.Parameter(torch.rand(HIDDEN))
        self.states = states

    def forward(self, ids: Tensor, positions: Tensor) -> Any:
        angles = positions[:, None] * torch.exp(-torch.arange(D // 2) / 8.0)
        cos, sin = (
            of(torch.cat((angles, angles), -1))[None, None].to(self.last.dtype) for of in (torch.cos, torch.sin)
        )
        mask = torch.arange(T)[None] <= positions[:, None]
        x = self.embedding(ids)
        found = [x := layer(x, cos, sin, positions, mask) for layer in self.layers]
        return (norm(x, self.last), *(found if self.states else ()))


def model(count: int, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    torch.manual_seed(count)
    return Model([Block() for _ in range(count)], **options).requires_grad_(False).to(dtype)


def captured(of: torch.nn.Module) -> Captured:
    ids = torch.arange(B * S).view(B, S) % 16
    return capture(of, (ids, torch.arange(2, 2 + S)))


@pytest.mark.rotates(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("count", "states"), [(4, True), (5, False), (9, True)])
def test_equal_layers_become_what_each_would(
    count: int, states: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    of = captured(model(count, dtype, states=states))
    check_as_searched_in_full(of, monkeypatch)
    if dtype == torch.float32:
        graph, outcome = fused(of, False, monkeypatch)
        expected = fx.Interpreter(of.graph).run(*(each.clone() for each in of.inputs))
        torch.testing.assert_close(ran(of, graph, outcome)[: len(expected)], list(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.rotates(12)
def test_many_layers_cost_what_few_do(monkeypatch: pytest.MonkeyPatch):
    record, asked = Fakes.record, Counter[int]()

    def counted(*args: Any) -> Any:
        asked[count] += 1
        return record(*args)

    monkeypatch.setattr(Fakes, "record", counted)
    for count in (6, 20):
        _, outcome = fused(captured(model(count)), False, monkeypatch)
        assert sum(each.match.rule.name == "activation" for each in outcome.chosen) == count
    assert asked[20] == asked[6]


def _other_scale(blocks: list[Block]) -> None:
    for number, block in enumerate(blocks):
        block.scale = 0.125 + number / 64


def _one_gain(blocks: list[Block]) -> None:
    for number, block in enumerate(blocks[1:]):
        block.before = blocks[number].after


def _other_widths(blocks: list[Block]) -> None:
    for number, block in enumerate(blocks):
        block.gate, block.up = (torch.nn.Linear(HIDDEN, 64 + 16 * number, bias=False) for _ in range(2))
        block.down = torch.nn.Linear(64 + 16 * number, HIDDEN, bias=False)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("change", [_other_scale, _other_widths])
def test_layers_that_differ_are_not_equal(change: Callable[[list[Block]], None]):
    different = model(6)
    change(list(different.layers))  # type: ignore[arg-type]
    of = captured(different.requires_grad_(False))
    assert divide(of.graph.graph, of.facts) is None


@pytest.mark.rotates(6)
def test_layers_begin_where_they_share_no_weight(monkeypatch: pytest.MonkeyPatch):
    """The second norm of each layer has the gain of the first one of the next: layers begin between the two."""
    tied = model(6)
    _one_gain(list(tied.layers))  # type: ignore[arg-type]
    of = captured(tied)
    assert divide(of.graph.graph, of.facts) is not None
    check_as_searched_in_full(of, monkeypatch)


@pytest.mark.rotates(6)
def test_a_layer_of_another_kind_is_searched_itself(monkeypatch: pytest.MonkeyPatch):
    mixed = model(9)
    _other_scale(list(mixed.layers)[:1])  # type: ignore[arg-type]
    mixed.layers[4].scale = 0.25  # type: ignore[assignment]
    of = captured(mixed)
    division = divide(of.graph.graph, of.facts)
    assert division is not None
    folded = fold(of.graph.graph, of.facts, division)
    assert folded is not None
    assert len(folded.graph.nodes) < len(of.graph.graph.nodes)
    assert scales(folded.graph) == scales(of.graph.graph)
    check_as_searched_in_full(of, monkeypatch)


def scales(graph: fx.Graph) -> set[float]:
    return {node.args[1] for node in graph.nodes if node.target is torch.ops.aten.mul.Scalar}  # type: ignore[misc]


def doubled_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    for _ in range(6):
        found = rotate(x, cos, sin)
        x[0].mul_(2)
    return found


def doubled_and_read(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    found = rotate(x, cos, sin)
    for _ in range(7):
        x = x * 2
        found = found + rotate(x.tanh(), cos, sin) + rotate(x, cos, sin)
    return found


def counted(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    factor = torch.ones(())
    for _ in range(7):
        x = norm(x, cos[0, 0]) + rotate(x * factor, cos, sin)
        factor = factor * 2
    return x


@pytest.mark.parametrize("target", ["host", "ascend910_93"])
@pytest.mark.parametrize("function", [doubled_in_place, doubled_and_read, counted])
@pytest.mark.rotates(4)
def test_what_layers_add_up_to_is_not_what_three_do(function: Callable[..., Tensor], target: str):
    """A factor of 2 in each layer is 2 to the number of layers behind them."""
    table = torch.rand(2, 1, 1, S, D)
    of = capture(function, (torch.rand(1, 1, S, D), table[0], table[1]))
    graph = fx.GraphModule(of.graph, copy.deepcopy(of.graph.graph))
    fuse_graph(graph.graph, installed(), Options(target=target, lower="eager"), replace(of.facts, extensible=False))
    graph.recompile()
    first, again = ([each.clone() for each in of.inputs] for _ in range(2))
    for have, want in zip((*graph(*first), *first), (*of.graph(*again), *again), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.rotates(3)
def test_results_of_layers_are_told_apart():
    """What the graph computes from every layer holds them all."""

    def stacked(ids: Tensor, positions: Tensor) -> Tensor:
        return torch.stack(several(ids, positions)[1:])

    several = model(6, states=True)
    of = capture(stacked, (torch.zeros(B, S, dtype=torch.long), torch.arange(S)))
    assert divide(of.graph.graph, Facts()) is None


@pytest.mark.parametrize("alike", [True, False])
def test_layers_that_return_something_else_are_not_equal(alike: bool):
    def several(x: Tensor, w: Tensor) -> list[Tensor]:
        found = []
        for number in range(6):
            inner = norm(x, w).sin()
            x = x + inner.cos()
            found.append(inner if alike or number % 2 else x)
        return found

    of = capture(several, (torch.randn(4, 64), torch.rand(64)))
    assert (divide(of.graph.graph, Facts()) is not None) == alike


def with_masks() -> tuple[Captured, list[str]]:
    """Five layers with a mask of its own each, and the names of these inputs."""

    def masked(x: Tensor, *masks: Tensor) -> Tensor:
        for mask in masks:
            x = x + scaled_dot_product_attention(x, x, x, mask)
        return x

    of = capture(masked, (torch.randn(B, N, S, D), *(torch.zeros(B, 1, S, S) for _ in range(5))))
    return of, [node.name for node in of.graph.graph.find_nodes(op="placeholder")][1:]


def test_what_is_assumed_of_each_layers_input_is_relied_on_for_each():
    of, names = with_masks()
    facts = Facts(assumed=dict.fromkeys(names, "causal"))
    assert divide(of.graph.graph, facts) is not None
    outcome = fuse_graph(of.graph.graph, installed(), Options(target="host", lower="eager"), facts)
    assert [each.match.rule.name for each in outcome.chosen] == ["attention"] * 5
    assert outcome.assumed == frozenset(names)


@pytest.mark.parametrize("what", ["assumed", "parameters"])
def test_layers_of_whose_inputs_other_things_are_known_are_not_equal(what: str):
    """One of five of which nothing is assumed, or which is no Parameter."""
    of, names = with_masks()
    for known, folds in ((names, True), ([*names[:2], *names[3:]], False)):
        facts = {
            "assumed": Facts(assumed=dict.fromkeys(known, "causal")),
            "parameters": Facts(parameters=frozenset(known)),
        }
        assert (divide(of.graph.graph, facts[what]) is not None) == folds


@pytest.mark.parametrize("explained", [False, True])
def test_numbers_that_layers_write_down_are_compared(explained: bool):
    def scaled(x: Tensor, w: Tensor, *, alike: bool) -> Tensor:
        for number in range(5):
            x = norm(x, w) * torch.tensor([1.5, 2.5 if alike else 2.5 + number]).repeat(32)
        return x

    x, w = torch.randn(4, 64), torch.rand(64)
    if explained:
        report = fusion.explain(scaled, x, w, alike=True, options={"target": "host", "lower": "eager"})
        assert [each.rule for each in report.matches] == ["rms_norm"] * 5
        return
    alike, other = (capture(scaled, (x, w), alike=each) for each in (True, False))
    assert divide(alike.graph.graph, Facts()) is not None
    assert divide(other.graph.graph, Facts()) is None


def test_constants_are_known_by_their_numbers_where_they_hold_any():
    root = torch.nn.Module()
    root.one, root.other, root.meta = (torch.nn.Buffer(torch.ones(2, device=each)) for each in ("cpu", "cpu", "meta"))
    graph = fx.Graph(root)
    nodes = [graph.get_attr(name) for name in ("one", "other", "meta")]
    graph.output(tuple(nodes))
    one, other, meta = map(calls_of(graph, Facts()).look, nodes)
    assert one == other != meta


def _residual(x: Tensor, w: Tensor) -> Tensor:
    x, w = x.cos(), w.sin() + 1
    for _ in range(6):
        x = x + norm(x, w).sin()
    return x


def _one_of_all(x: Tensor, w: Tensor) -> Tensor:
    """All layers read what the first reads as the result of the layer before."""
    start = x = norm(x, w)
    for _ in range(6):
        x = norm(x + start, w)
    return x


def _runs(x: Tensor, w: Tensor) -> Tensor:
    """Two runs of layers, each without anything that closes it."""
    for _ in range(5):
        x = norm(norm(x, w).sin(), w).cos()
    for _ in range(6):
        x = norm(x, w).exp().tanh()
    return x


def _swapped(x: Tensor, w: Tensor, *caches: Tensor) -> Tensor:
    """One layer writes the other way round."""
    for number in range(6):
        one, other = caches[2 * number : 2 * number + 2]
        h = norm(x + one + other, w)
        written = (h.cos(), h.exp())
        for cache, each in zip((one, other), written[::-1] if number == 3 else written, strict=True):
            cache.copy_(each)
        x = x + h.sin()
    return x


def _one_value(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Every layer returns what all of them compute alike, each in memory of its own."""
    found = []
    for _ in range(6):
        x = norm(x, w).sin()
        found.append(norm(w[None], w))
    return (x, *found)


def _norms_of_norms(x: Tensor, w: Tensor) -> Tensor:
    """The first norm reads what stands before the first layer, through a cast that the layers begin behind."""
    x, w = x.exp().bfloat16(), w.bfloat16()
    for _ in range(6):
        x = norm(x, w)
    return x


def _constants(x: Tensor, w: Tensor) -> Tensor:
    """Every layer makes a constant of its own that stands before them too."""
    x = x * torch.full((64,), 2.0)
    for _ in range(6):
        x = norm(x, torch.full((64,), 2.0)).sin()
    return x + w


@pytest.mark.rotates(6)
@pytest.mark.parametrize("several", [_residual, _one_of_all, _runs, _swapped, _one_value, _norms_of_norms, _constants])
def test_small_layers_become_what_each_would(several: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    def listed(*given: Tensor) -> tuple[Tensor, ...]:
        results = several(*given)
        return results if isinstance(results, tuple) else (results,)

    caches = [torch.zeros(4, 64) for _ in range(12)] if several is _swapped else []
    of = capture(listed, (torch.randn(4, 64), torch.rand(64), *caches))
    check_as_searched_in_full(of, monkeypatch, rtol=1e-5, atol=1e-6)


def _columns(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """Return of every layer a rotation whose result `torch.cat` makes contiguous, of transposed heads."""
    found: list[Tensor] = []
    for _ in range(6):
        a, b = x.transpose(1, 2).chunk(2, -1)
        c, s = cos[..., : D // 2], sin[..., : D // 2]
        found.append(torch.cat((a * c - b * s, b * c + a * s), -1))
        x = x + found[-1].transpose(1, 2).sin()
    return (x, *found)


def test_copies_for_the_caller_are_made_in_every_layer(monkeypatch: pytest.MonkeyPatch):
    x, angles = numbers(2, 16, 4, D), numbers(2, 1, 1, 16, D)
    of = capture(_columns, (x, *angles))
    outcome = check_as_searched_in_full(of, monkeypatch)
    assert outcome.result_copies == 6


def test_memory_that_rewrites_reserve_is_each_layers_own():
    def gathered(x: Tensor, w: Tensor, table: Tensor, *pages: Tensor) -> tuple[Tensor, ...]:
        found = []
        for keys, values in zip(pages[::2], pages[1::2], strict=True):
            found += [each[table].flatten(1, 2) for each in (keys, values)]
            x = norm(x, w).sin()
        return (x, *found)

    table, pages = torch.tensor([[3, 6, 0], [5, 3, 2]]), [numbers(8, 4, 2, 64, seed=each) for each in range(10)]
    of = capture(gathered, (numbers(4, 64), numbers(64), table, *(each.bfloat16() for each in pages)))
    assert divide(of.graph.graph, of.facts) is not None
    graph = fx.GraphModule(of.graph, copy.deepcopy(of.graph.graph))
    outcome = fuse_graph(graph.graph, installed(), replace(CHIP, plan_lower="eager"), of.facts)
    assert sum(each.match.rule.name == "page_gather" for each in outcome.chosen) == 5
    assert calls(graph.graph)["aten.empty.memory_format"] == 10
    have, want = ran(of, graph.graph, outcome), of.graph(*of.inputs)
    torch.testing.assert_close(have[: len(want)], list(want), rtol=2e-2, atol=2e-2)
    assert memory(*have[: len(want)]) == list(range(len(want)))
