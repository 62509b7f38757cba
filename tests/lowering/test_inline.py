"""inline replaces the operators of a table, and no other node."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion._torch import COMPOSITES
from fusion.routes import host
from fusion.routes.inline import inline
from tests.lowering.models import LIBRARY, TABLE, Block, inputs, operators, scaled_silu
from tests.support.capture import compiled

LIBRARY.define("halves(Tensor x) -> (Tensor, Tensor)")
for key in ("CPU", "Meta"):
    LIBRARY.impl("halves", lambda x: (x[..., ::2].clone(), x[..., 1::2].clone()), key)
halves = torch.ops.lowering_test.halves.default


@pytest.fixture(scope="module")
def graph() -> torch.fx.GraphModule:
    torch.manual_seed(0)
    run, backend = compiled(Block().eval(), host.eager)
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


def test_several_results_and_constants_of_a_decomposition():
    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        even, odd = torch.tensor([0, 2]), torch.tensor([1, 3])
        return x.index_select(-1, even), x.index_select(-1, odd)

    def model(x: Tensor) -> Tensor:
        even, odd = halves(x)
        again, _ = halves(x * torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return even - odd + again

    run, backend = compiled(model, lambda gm, values: host.eager(inline(gm, {halves: parts}), values))
    x = torch.randn(3, 4)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert not operators(inline(backend.graphs[0], {halves: parts}))[halves]
