"""The vendor's own compilers take what lowering hands them: torchair converts it, npugraph_ex runs it."""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fusion._torch.operators import arguments_of
from fusion.errors import FusionError
from fusion.operators import OPERATORS, ensure
from fusion.routes import vendor
from fusion.routes.ge_operators import GE_OPERATORS
from tests.support import torch_npu_host
from tests.support.torch_npu_host import requires_torch_npu

FUSED = {
    "npu_rms_norm": "RmsNorm",
    "npu_add_rms_norm": "AddRmsNorm",
    "npu_add_layer_norm": "AddLayerNorm",
    "npu_rotary_mul": "RotaryMul",
    "npu_apply_rotary_pos_emb": "ApplyRotaryPosEmb",
    "npu_interleave_rope": "InterleaveRope",
    "npu_swiglu": "SwiGlu",
}


@cache
def report(route: str, shapes: str) -> dict[str, Any]:
    return torch_npu_host.answer(f"from tests.lowering import vendor_child\nvendor_child.main({route!r}, {shapes!r})")


@requires_torch_npu
@pytest.mark.parametrize(
    ("route", "shapes"),
    [
        ("torchair", "dynamic"),
        ("npugraph_ex", "static"),
        pytest.param("torchair", "static", marks=pytest.mark.rotates),
        pytest.param("npugraph_ex", "dynamic", marks=pytest.mark.rotates),
    ],
)
def test_the_vendor_graph_runs_and_agrees_with_eager(route: str, shapes: str):
    result = report(route, shapes)
    assert result["graphs"] == 1
    assert len(result["differences"]) == 2
    for output, cache_written in result["differences"]:
        assert output < 1e-5
        assert cache_written == 0.0


@requires_torch_npu
@pytest.mark.parametrize("shapes", ["static", "dynamic"])
@pytest.mark.rotates(12)
def test_torchair_converts_each_fused_operator_to_its_ge_operator(shapes: str):
    (graph,) = report("torchair", shapes)["converted"]
    after = Counter(graph["after"])
    # The second RmsNorm is npu_gemma_rms_norm; an interleaved npu_rotary_mul must not become a RotaryMul of halves.
    expected = Counter(FUSED.values()) + Counter(["RmsNorm"])
    assert {name: after[name] for name in expected} == dict(expected)


@requires_torch_npu
@pytest.mark.parametrize("shapes", ["static", "dynamic"])
def test_the_cache_is_written_in_place(shapes: str):
    (graph,) = report("torchair", shapes)["converted"]
    before, after = Counter(graph["before"]), Counter(graph["after"])
    # The copy of the cache and the write back of it are gone; the copies that stay are of query and key.
    assert before - after >= Counter({"TensorMove": 1, "Assign": 1})
    assert after["ScatterNdUpdate"] == 1
    assert after["Assign"] == 0
    assert after["TensorMove"] == 2
    assert len(graph["written"]) == 1


@cache
def attention() -> dict[str, tuple[float, dict[str, int]]]:
    return torch_npu_host.answer("from tests.lowering import attention_child\nattention_child.main()")


@requires_torch_npu
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("lengths", ["list", "tensor"])
@pytest.mark.rotates(12)
def test_attention_is_one_ge_operator_whatever_holds_its_lengths(version: int, lengths: str):
    far, operators = attention()[f"v{version} {lengths}"]
    assert far < 1e-6
    assert operators["FusedInferAttentionScore"] == 1
    # query, cache, table, and the lengths if they are a tensor
    assert operators["Data"] == (4 if lengths == "tensor" else 3)


@requires_torch_npu
def test_symbolic_sizes_reach_ge():
    (graph,) = report("torchair", "dynamic")["converted"]
    assert graph["after"]["Shape"] > 0


@pytest.mark.parametrize("route", [vendor.torchair, vendor.npugraph_ex])
def test_without_torch_npu_the_error_says_what_to_do(route: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    message = (
        rf"While .*, with {route.__name__} of torch_npu: it cannot be imported \(.*\)\. Install .*, or run eagerly"
    )
    with pytest.raises(FusionError, match=message.replace(", or run", ".* or run")):
        route(fx.symbolic_trace(lambda x: x + 1), [torch.ones(2)])


class Gated(nn.Module):
    """x [B, 64] → [B, 64], by two projections that are joined, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.register_buffer("shift", torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.gate(x)) * self.up(x) + self.shift


def test_captured_graphs_copy_no_weight(monkeypatch: pytest.MonkeyPatch):
    """npugraph_ex copies each input that is not marked into the memory of the captured graph, at every call."""
    marked: dict[tuple[int, ...], bool] = {}

    class Recording:
        class CompilerConfig:
            pass

        @staticmethod
        def compile_fx(gm: fx.GraphModule, inputs: list[Tensor], options: dict[str, Any]) -> Any:
            marked.update({tuple(each.shape): hasattr(each, "_torchair_is_parameter") for each in inputs})
            return lambda *given: [torch.zeros(3, 64)]

    monkeypatch.setattr(vendor, "_vendor", lambda name, doing: Recording)
    monkeypatch.setattr(vendor, "_register_in_place", lambda: None)  # with npugraph_ex, which is not there
    torch._dynamo.reset()
    options = {"target": "ascend910_93", "lower": "npugraph_ex", "plan_cache": "off"}
    with torch.inference_mode():
        torch.compile(Gated().eval(), backend="cann_fusion", options=options)(torch.ones(3, 64))
    assert marked == {(3, 64): False, (64, 64): True, (64,): True, (128, 64): True}


def scatter_nd_update(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return x.index_put(tuple(indices.unbind(-1)), updates)


@pytest.fixture
def scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """npu_scatter_nd_update computed by torch, so that the index arithmetic is tried without torch_npu."""
    monkeypatch.setattr(torch.ops.npu, "npu_scatter_nd_update", scatter_nd_update, raising=False)


@pytest.mark.usefixtures("scatter")
@pytest.mark.parametrize("dim", [0, 1, 2, 3, -1, -2])
def test_index_copy_as_scatter(dim: int):
    x = torch.arange(2.0 * 5 * 4 * 6).reshape(2, 5, 4, 6)
    index = torch.tensor([1, 0])
    source = torch.randn(2, 5, 4, 6).index_select(dim, index)
    assert torch.equal(vendor.run_index_copy(x, dim, index, source), x.index_copy(dim, index, source))


INDICES = [
    ([torch.tensor([1, 0])], (2, 4, 6)),
    ([None, torch.tensor([3, 0])], (2, 2, 6)),
    ([None, None, torch.tensor([3, 5, 1])], (3,)),
    ([None, torch.tensor([[3], [0]]), torch.tensor([1, 5, 2])], (2, 2, 3)),
    ([torch.tensor([1, 0]), torch.tensor([3, 2])], (1, 6)),
    ([torch.tensor(1)], (4, 6)),
    ([torch.tensor([1, 0]), None, torch.tensor([3, 5])], (2, 4)),
    ([torch.tensor([[1], [0]]), None, torch.tensor([3, 5, 1])], (2, 3, 4)),
    ([torch.tensor([1, 0]), None, torch.tensor([3, 5])], (4,)),
]


@pytest.mark.usefixtures("scatter")
@pytest.mark.parametrize(("indices", "shape"), INDICES)
def test_index_put_as_scatter(indices: list[Tensor | None], shape: tuple[int, ...]):
    x, values = torch.randn(2, 4, 6), torch.randn(shape)
    assert torch.equal(vendor.run_index_put(x, indices, values), torch.ops.aten.index_put(x, indices, values))


@pytest.mark.parametrize(
    ("indices", "accumulate"),
    [
        ([torch.tensor([0])], True),
        ([torch.ones(2, dtype=torch.bool)], False),
    ],
)
def test_an_index_put_that_is_no_scatter_is_left_alone(indices: list[Tensor | None], accumulate: bool):
    assert vendor.run_index_put(torch.ones(2, 4, 6), indices, torch.ones(()), accumulate) is NotImplemented


class RecordingGe:
    """Stand-in for `torchair.ge` that returns what an operator of GE is given."""

    class attr:
        Bool = Int = Float = Str = staticmethod(lambda value: value)

    @staticmethod
    def custom_op(name: str, *, inputs: dict[str, Any], outputs: list[str], attrs: dict[str, Any]) -> Any:
        return name, inputs, outputs, attrs


@pytest.mark.parametrize("name", GE_OPERATORS)
def test_operators_of_ge_take_each_argument_of_the_schema(name: str):
    ensure()
    operator, contract = GE_OPERATORS[name], OPERATORS[f"npu::{name}"]
    arguments = contract.overload()._schema.arguments
    tensors = {each.name for each in arguments if "Tensor" in str(each.type)}
    assert set(operator.inputs) == tensors
    assert {each.name for each in arguments} - tensors - set(operator.attributes) <= {"dst_type"}  # int8 by default
    assert len(operator.outputs) == len(contract.overload()._schema.returns)


def test_inputs_that_are_not_given_are_left_out_of_a_call_of_ge():
    ensure()
    given = arguments_of(torch.ops.npu.npu_swiglu_quant.default, ("x",), {"quant_mode": 1, "activate_left": True})
    called = GE_OPERATORS["npu_swiglu_quant"].call(RecordingGe, given)
    attrs = {"activate_left": True, "quant_mode": "dynamic", "group_list_type": 0}
    assert called == ("SwiGluQuant", {"x": "x"}, ["y", "scale"], attrs)
