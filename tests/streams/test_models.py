"""The hyper-connections of transformers, as the installed version has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextHyperConnection
from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

from fusion import testing

from .connections import with_matmul
from .test_connections import ON_950, ON_A3, called, fused, reasons, streams

BF16 = torch.bfloat16


class Layer(nn.Module):
    """A connection, what stands for attention or experts, and the update of DeepSeek-V4's decoder layer."""

    def __init__(self, connection: nn.Module) -> None:
        super().__init__()
        self.connection = connection
        for number, each in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            each.data = torch.randn(each.shape, generator=generator) / 16
            each.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        post, comb, collapsed = self.connection(x)
        return with_matmul(x, post, comb, torch.tanh(collapsed))


def deepseek_v4(kind: type[nn.Module] = DeepseekV4HyperConnection) -> nn.Module:
    return kind(transformers.DeepseekV4Config(hidden_size=128))


def glm5_next() -> nn.Module:
    """Its fn is in bfloat16, base and scale in float32."""
    connection = Layer(Glm5NextTextHyperConnection(transformers.Glm5NextTextConfig(hidden_size=128)))
    connection.connection.fn.data = connection.connection.fn.data.to(BF16)
    return connection


@pytest.mark.parametrize(
    ("model", "target", "operators", "options"),
    [
        pytest.param(lambda: Layer(deepseek_v4()), "ascend950", ON_950, {}, id="DeepSeek-V4 on 950"),
        pytest.param(
            lambda: Layer(deepseek_v4()), "ascend910_93", ON_A3, {"opt_in": frozenset(["stream_gates_hf32"])},
            id="DeepSeek-V4 on A3",
        ),
        pytest.param(glm5_next, "ascend910_93", ON_A3, {}, id="GLM-5-Next on A3"),
        pytest.param(glm5_next, "ascend910b", ON_A3, {}, id="GLM-5-Next on A2"),
    ],
)  # fmt: skip
@pytest.mark.rotates(4)
def test_the_gates_and_the_update_of_a_layer_are_fused(
    model: Any, target: str, operators: set[str], options: dict[str, Any]
):
    t = fused(model(), streams(), target=target, **options)
    assert called(t) == operators
    assert sum(node.op == "call_function" for node in t.fused.graph.nodes) < 30
    testing.means_what_it_says(t)


def test_the_collapse_behind_the_last_layer_has_no_operator():
    head = Layer(deepseek_v4(DeepseekV4HyperHead)).connection
    t = fused(head, streams())
    assert not called(t) & ON_950
    assert "collapsed by a gate alone" in reasons(t, "stream_gates")


def test_gates_without_a_matrix_have_no_operator():
    connection = Layer(HYV4HyperConnection(transformers.HYV4Config(hidden_size=128, hc_mult=4))).connection
    t = fused(connection, streams())
    assert not called(t) & ON_950
    assert "no logits of a matrix" in reasons(t, "stream_gates")
