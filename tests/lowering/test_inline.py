"""inline replaces the operators of a table, and no other node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion._torch.operators import COMPOSITES
from fusion.routes import cpu_gpu
from fusion.routes.inline import inline
from tests.lowering.models import LIBRARY, TABLE, Block, inputs, operators, scaled_silu
from tests.support.capture import compiled

LIBRARY.define("halves(Tensor x) -> (Tensor, Tensor)")
for key in ("CPU", "Meta"):
    LIBRARY.impl("halves", lambda x: (x[..., ::2].clone(), x[..., 1::2].clone()), key)
halves = torch.ops.lowering_test.halves.default
LIBRARY.define("second_of(Tensor x, Tensor y) -> Tensor")
for key in ("CPU", "Meta"):
    LIBRARY.impl("second_of", lambda x, y: y * 2 - x, key)
second_of = torch.ops.lowering_test.second_of.default


@pytest.fixture(scope="module")
def graph() -> torch.fx.GraphModule:
    torch.manual_seed(0)
    run, backend = compiled(Block().eval(), cpu_gpu.eager)
    with torch.no_grad():
        run(*inputs(3, 5))
    return backend.graphs[0]


def test_composites_stay_whole(graph: torch.fx.GraphModule):
    before, after = operators(graph), operators(inline(graph, TABLE))
    assert not after[scaled_silu]
    assert {target: after[target] for target in COMPOSITES} == {target: before[target] for target in COMPOSITES}


def test_other_nodes_and_the_graph_itself_are_as_they_were(graph: torch.fx.GraphModule):
    before = str(graph.graph)
    assert str(inline(graph, {}).graph) == before
    inline(graph, TABLE)
    assert str(graph.graph) == before


def test_parts_know_the_line_of_the_model(graph: torch.fx.GraphModule):
    (sigmoid,) = inline(graph, TABLE).graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default)
    assert "scaled_silu(self.layer_norm" in sigmoid.meta["stack_trace"]


@pytest.mark.rotates(8)
def test_equal_calls_that_one_call_reads_stay_two():
    """Their decompositions are traced once, so that one tensor stands for both of their results."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        (first, _), (second, _) = halves(x), halves(y)
        return second_of(first, second)

    table = {halves: lambda x: (x[..., ::2].clone(), x[..., 1::2].clone()), second_of: lambda x, y: y * 2 - x}
    run, _ = compiled(model, lambda gm, values: cpu_gpu.eager(inline(gm, table), values))
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    with torch.no_grad():
        assert torch.equal(run(x, y), model(x, y))


@pytest.mark.rotates(8)
def test_several_results_and_constants_of_a_decomposition():
    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        even, odd = torch.tensor([0, 2]), torch.tensor([1, 3])
        return x.index_select(-1, even), x.index_select(-1, odd)

    def model(x: Tensor) -> Tensor:
        even, odd = halves(x)
        again, _ = halves(x * torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return even - odd + again

    run, backend = compiled(model, lambda gm, values: cpu_gpu.eager(inline(gm, {halves: parts}), values))
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert not operators(inline(backend.graphs[0], {halves: parts}))[halves]


@pytest.mark.rotates(8)
def test_equal_calls_are_traced_once_and_what_nobody_reads_is_left_out():
    traced = []

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        traced.append((x.shape, x.dtype))
        return x.cos(), x.sin()

    def model(x: Tensor) -> tuple[Tensor, ...]:
        first, second = halves(x)
        third, _ = halves(x + 1)  # as the first
        fourth, _ = halves((x + 2).double())
        return first, second, third, fourth

    run, backend = compiled(model, cpu_gpu.eager)
    with torch.no_grad():
        run(torch.randn(3, 4))
    aten, inlined = torch.ops.aten, inline(backend.graphs[0], {halves: parts})
    assert [dtype for _, dtype in traced] == [torch.float32, torch.float64]
    assert [operators(inlined)[each] for each in (aten.cos.default, aten.sin.default)] == [3, 1]
    lines = [node.meta["stack_trace"] for node in inlined.graph.find_nodes(op="call_function", target=aten.cos.default)]
    assert ["third, _ = halves(x + 1)" in line for line in lines] == [False, True, False]


@pytest.mark.rotates(8)
def test_calls_of_one_tensor_and_of_two_are_told_apart():
    def parts(x: Tensor, y: Tensor) -> Tensor:
        return x.sin() if x is y else x.cos()

    def model(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, x) * torch.add(x, y)

    run, backend = compiled(model, cpu_gpu.eager)
    with torch.no_grad():
        run(torch.randn(3), torch.randn(3))
    aten = torch.ops.aten
    counts = operators(inline(backend.graphs[0], {aten.add.Tensor: parts}))
    assert (counts[aten.sin.default], counts[aten.cos.default]) == (1, 1)
