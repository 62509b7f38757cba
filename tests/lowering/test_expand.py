"""expand takes composites apart, and keeps everything else about a graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fusion._torch.operators import COMPOSITES
from fusion.errors import FusionError
from fusion.routes import cpu_gpu
from fusion.routes.expand import attention, expand, rms_norm
from tests.lowering.models import LIBRARY, TABLE, Block, aten, inputs, operators, scaled_silu
from tests.support.capture import compiled

pytestmark = pytest.mark.rotates(8)

LIBRARY.define("write_(Tensor(a!) x, Tensor y) -> ()")
LIBRARY.define("put_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
for key in ("CPU", "Meta"):
    LIBRARY.impl("write_", lambda x, y: None, key)
    LIBRARY.impl("put_", lambda x, y: x, key)


@pytest.fixture(scope="module")
def model() -> Block:
    torch.manual_seed(0)
    return Block().eval()


def captured(function: Callable[..., Any], values: list[Any], *, dynamic: bool | None = False) -> fx.GraphModule:
    run, backend = compiled(function, cpu_gpu.eager, dynamic=dynamic)
    with torch.no_grad():
        run(*values)
    return backend.graphs[0]


def rms(x: Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def test_composites_and_table_operators_are_gone(model: Block):
    gm = captured(model, inputs())
    before, after = operators(gm), operators(expand(gm, TABLE))
    whole = {*COMPOSITES, scaled_silu}
    assert whole <= before.keys()
    assert not whole & after.keys()


def test_without_a_table_other_operators_stay(model: Block):
    assert operators(expand(captured(model, inputs()), {}))[scaled_silu] == 1


def test_a_decomposition_may_decline(model: Block):
    assert operators(expand(captured(model, inputs()), {scaled_silu: lambda *_: NotImplemented}))[scaled_silu] == 1


def test_the_graph_itself_is_not_changed(model: Block):
    gm = captured(model, inputs())
    before = str(gm.graph)
    expand(gm, TABLE)
    assert str(gm.graph) == before


@pytest.mark.rotates(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_exact_as_the_captured_graph(model: Block, dtype: torch.dtype):
    torch.manual_seed(1)
    block = Block().eval().to(dtype)
    exact_block = Block().eval().double()
    exact_block.load_state_dict(block.state_dict())
    values = inputs(batch=3, length=5, dtype=dtype)
    exact_values = [value.double() if value.is_floating_point() else value for value in values]
    outputs, caches = [], []
    for inner in (cpu_gpu.eager, lambda gm, example: cpu_gpu.eager(expand(gm, TABLE), example)):
        run, _ = compiled(block, inner)
        given = [value.clone() for value in values]
        with torch.no_grad():
            outputs.append(run(*given))
        caches.append(given[1])
    with torch.no_grad():
        exact = exact_block(*exact_values)
    whole, expanded = (rms(output - exact) for output in outputs)
    assert expanded <= 1.5 * whole
    assert rms(caches[1] - exact_values[1]) <= 1.5 * rms(caches[0] - exact_values[1])


@pytest.mark.rotates(8)
def test_symbolic_sizes_survive_and_serve_other_sizes(model: Block):
    run, backend = compiled(model, lambda gm, values: cpu_gpu.eager(expand(gm, TABLE), values), dynamic=None)
    for batch, length in ((3, 5), (5, 7)):
        ours, plain = inputs(batch, length), inputs(batch, length)
        mark_dynamic(ours)
        with torch.no_grad():
            torch.testing.assert_close(run(*ours), model(*plain))
        torch.testing.assert_close(ours[1], plain[1])
    assert len(backend.graphs) == 1
    expanded = expand(backend.graphs[0], TABLE)
    values = [node.meta["val"] for node in expanded.graph.find_nodes(op="placeholder")]
    assert any(isinstance(value, torch.SymInt) for value in values)
    returned = expanded.graph.output_node().args[0][-1].meta["val"]
    assert all(isinstance(size, torch.SymInt) for size in returned.shape[:2])


def mark_dynamic(values: list[Tensor]) -> None:
    hidden, cache, position = values
    for tensor, dim in ((hidden, 0), (hidden, 1), (cache, 0), (position, 0)):
        torch._dynamo.mark_dynamic(tensor, dim)


def test_the_epilogue_stays_last_and_writes_the_input(model: Block):
    expanded = expand(captured(model, inputs()), TABLE)
    copies = expanded.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert [copy.args[0].op for copy in copies] == ["placeholder"]
    assert list(expanded.graph.nodes)[-2] is copies[0]


@pytest.mark.parametrize("name", ["write_", "put_"])
def test_a_mutating_operator_whose_result_is_unused_stays(name: str):
    gm = captured(lambda x, y: (x + y).relu(), [torch.ones(3), torch.ones(3)])
    x, y = gm.graph.find_nodes(op="placeholder")
    write = getattr(torch.ops.lowering_test, name).default
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(write, (x, y))
    gm.recompile()
    assert operators(expand(gm, {}))[write] == 1


def test_placeholders_keep_their_names_whatever_they_are(model: Block):
    gm = captured(model, inputs())
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), ("mul", "view", "mm"), strict=False):
        node.name = node.target = name
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    expanded = expand(gm, TABLE)
    assert [node.name for node in expanded.graph.find_nodes(op="placeholder")] == names
    assert [node.target for node in expanded.graph.find_nodes(op="placeholder")][:3] == ["mul", "view", "mm"]


def test_constants_stay_references():
    gm = captured(lambda x: x * torch.tensor([1.0, 2.0, 3.0]), [torch.ones(3)])
    expanded = expand(gm, {})
    names = [node.target for node in expanded.graph.find_nodes(op="get_attr")]
    assert names == [node.target for node in gm.graph.find_nodes(op="get_attr")]
    assert names
    x = torch.arange(3.0)
    torch.testing.assert_close(expanded(x)[0], gm(x)[0], rtol=0, atol=0)


def test_parts_know_the_line_of_the_model(model: Block):
    expanded = expand(captured(model, inputs()), TABLE)
    calls = [node for node in expanded.graph.nodes if node.op == "call_function"]
    assert all("in forward" in node.meta["stack_trace"] and "val" in node.meta for node in calls)
    softmax = expanded.graph.find_nodes(op="call_function", target=aten._softmax.default)
    assert ["torch.softmax(scores" in node.meta["stack_trace"] for node in softmax] == [False, True]
    for node in expanded.graph.find_nodes(op="call_function", target=aten.mm.default):
        assert any(kind.endswith("Linear") for _, kind in map(_path_and_class, node.meta["nn_module_stack"].values()))


def _path_and_class(entry: tuple[str, Any]) -> tuple[str, str]:
    path, kind = entry
    return path, kind if isinstance(kind, str) else kind.__name__


def test_a_graph_without_values_is_refused():
    gm = fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(FusionError, match=r"Replacing .* input 'x' .* no meta\['val'\] .* fake tensors"):
        expand(gm, {})


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


MASKS = {
    "none": None,
    "bool": torch.tensor([[True] * 7, [False] * 7, [True, False] * 3 + [True], [False] * 6 + [True], [True] * 7]),
    "additive": random(5, 7),
    "additive with an empty row": random(5, 7).masked_fill(torch.arange(5)[:, None] == 3, -math.inf),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_is_torchs(mask: Tensor | None, kv_heads: int, scale: float | None):
    query, key, value = random(2, 4, 5, 8), random(2, kv_heads, 7, 8), random(2, kv_heads, 7, 6)
    options: dict[str, Any] = {"attn_mask": mask, "scale": scale, "enable_gqa": kv_heads != 4}
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    torch.testing.assert_close(attention(query, key, value, **options), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (4, 5, 8), (5, 8)])
def test_causal_attention_is_torchs_for_every_rank(shape: tuple[int, ...]):
    query, key = random(*shape), random(*shape[:-2], 7, 8)
    expected = F.scaled_dot_product_attention(query, key, key, is_causal=True)
    torch.testing.assert_close(attention(query, key, key, is_causal=True), expected, rtol=0, atol=1e-12)


def test_attention_with_dropout_is_left_alone():
    assert attention(random(5, 8), random(5, 8), random(5, 8), dropout_p=0.1) is NotImplemented


@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("weight", [None, random(3, 8)])
def test_rms_norm_is_torchs(weight: Tensor | None, eps: float | None):
    x = random(2, 3, 8)
    expected = F.rms_norm(x, [3, 8], weight, eps)
    torch.testing.assert_close(rms_norm(x, [3, 8], weight, eps), expected, rtol=0, atol=1e-12)
