"""Connections in every spelling become the operators of each chip, and mean the same; what resembles one is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.options import Options
from fusion.testing import Trial
from fusion.testing.capturing import capture
from fusion.testing.trials import trial_of

from . import connections as written
from .connections import HC_EPS, NORM_EPS, Connection, Form, N, balanced

BF16, F32 = torch.bfloat16, torch.float32
CANN, RECIPES = "cann_ops_transformer", "custom_ops"
ON_950 = {"npu::npu_mhc_pre", "npu::npu_mhc_sinkhorn", "npu::npu_mhc_post"}
ON_A3 = {"cann_ops_transformer::mhc_pre_sinkhorn", "cann_ops_transformer::mhc_post"}


def fused(model: Any, *inputs: Tensor, target: str = "ascend950", **options: Any) -> Trial:
    """The model, captured and rewritten for an eager launch on the chip `target`."""
    given = {"packages": frozenset([CANN])} | options
    return trial_of(capture(model, inputs), Options(target=target, lower="eager", plan_lower="eager", **given))


def streams(dtype: torch.dtype = BF16, d: int = 128, n: int = N) -> Tensor:
    return torch.randn(2, 3, n, d, generator=torch.Generator().manual_seed(0)).to(dtype)


def called(t: Trial) -> set[str]:
    """The operators of a rewritten graph that are none of torch's."""
    names = (str(node.target._schema.name) for node in t.fused.graph.nodes if hasattr(node.target, "_schema"))
    return {name for name in names if not name.startswith(("aten::", "prims::"))}


def reasons(t: Trial, rule: str = "") -> str:
    return "\n".join(each.reason for each in t.outcome.refusals if rule in ("", each.rule))


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", [*written.FORMS, *written.FORMS_950], ids=lambda form: form.__name__)
def test_every_spelling_is_fused_on_ascend_950(form: Form):
    t = fused(Connection(form, d=128, times=3), streams())
    assert called(t) == ON_950
    testing.means_what_it_says(t)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", written.FORMS, ids=lambda form: form.__name__)
def test_every_spelling_with_a_weight_from_bfloat16_is_fused_on_a3(form: Form):
    t = fused(Connection(form, phi=BF16, d=128), streams(), target="ascend910_93")
    assert called(t) == ON_A3
    testing.means_what_it_says(t)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("form", written.FORMS, ids=lambda form: form.__name__)
def test_one_token_alone_is_fused(form: Form):
    """A row of streams has as many numbers as a gain then, and the logits of a matrix as many as its bias."""
    t = fused(Connection(form, phi=BF16, d=128), streams()[:1, :1], target="ascend910_93")
    assert called(t) == ON_A3
    testing.means_what_it_says(t)


@pytest.mark.rotates(2)
@pytest.mark.parametrize("form", written.FORMS, ids=lambda form: form.__name__)
def test_as_many_tokens_as_a_call_has(form: Form):
    """Batch and tokens are symbols."""
    x = streams()
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    source = capture(Connection(form, d=128, times=2), (x,), dynamic=None)
    t = trial_of(source, Options(target="ascend950", lower="eager", plan_lower="eager"))
    assert called(t) == ON_950


@pytest.mark.parametrize("form", [written.inference, written.transformers], ids=lambda form: form.__name__)
def test_the_streams_of_the_next_layer_are_those_that_an_update_rounds(form: Form):
    layers = [Connection(form, d=128, times=2) for _ in range(2)]
    t = fused(lambda x: layers[1](layers[0](x)), streams())
    assert called(t) == ON_950
    assert sum("mhc" in str(node.target) for node in t.fused.graph.nodes) == 6
    testing.means_what_it_says(t)


def test_a_matrix_that_is_normalised_transposed():
    def transposed(x: Tensor) -> Tensor:
        y = (x.softmax(-1) + HC_EPS).mT
        for axis in (-1, -2, -1):
            y = y / (y.sum(axis, keepdim=True) + HC_EPS)
        return y.mT * 2

    t = fused(transposed, streams(F32, 4))
    assert called(t) == {"npu::npu_mhc_sinkhorn"}
    testing.means_what_it_says(t)


@pytest.mark.parametrize("count", [6, 8])
def test_as_many_streams_as_the_operators_of_950_take(count: int):
    t = fused(Connection(written.inference, n=count, d=32, times=2), streams(d=32, n=count))
    assert called(t) == ON_950
    testing.means_what_it_says(t)


def test_streams_that_begin_as_one_tensor():
    """The first layer of a model has N times the embedding."""
    connection = Connection(written.transformers, d=128, times=3)
    embedded = streams()[:, :, 0]
    t = fused(lambda x: connection(x.unsqueeze(2).expand(-1, -1, N, -1).contiguous()), embedded)
    assert called(t) == ON_950
    testing.means_what_it_says(t)


def test_the_recipes_operators_are_planned_for_a_converted_graph_where_their_package_is_named():
    model, options = Connection(written.transformers, phi=BF16, d=4096), {"packages": frozenset([RECIPES])}
    source = capture(model, (streams(d=4096)[:1],))
    for target in ("ascend910_93", "ascend950"):
        t = trial_of(source, Options(target=target, lower="eager", plan_lower="torchair", **options))
        assert called(t) == {"custom::npu_hc_pre", "custom::npu_hc_post"}


def test_a_float32_weight_is_rounded_on_a3_only_where_that_is_opted_in():
    source = capture(Connection(written.transformers, d=128), (streams(),))
    options = Options(target="ascend910_93", lower="eager", plan_lower="eager", packages=frozenset([CANN]))
    exact = trial_of(source, options)
    assert "mhc_pre_sinkhorn multiplies in HF32" in reasons(exact, "stream_gates")
    assert "cann_ops_transformer::mhc_pre_sinkhorn" not in called(exact)
    rounded = trial_of(source, Options(**{**vars(options), "opt_in": frozenset(["stream_gates_hf32"])}))
    assert called(rounded) == ON_A3


def test_a_package_that_is_not_named_is_the_reason():
    t = fused(Connection(written.transformers, phi=BF16, d=128), streams(), target="ascend910_93", packages=frozenset())
    assert "needs the package cann_ops_transformer" in reasons(t)
    assert not called(t) & ON_A3


def test_a_converted_graph_takes_none_of_the_operators_of_torch_npu():
    source = capture(Connection(written.transformers, d=128, times=3), (streams(),))
    t = trial_of(source, Options(target="ascend950", lower="eager", plan_lower="torchair"))
    assert not called(t) & ON_950
    assert "cannot be lowered by torchair" in reasons(t)


def gates(m: Connection, x: Tensor, flat: Tensor, by: Tensor | None = None) -> Tensor:
    """A connection in which `flat`, perhaps not the streams, are normalised, by the mean square of `by`."""
    squares = (flat if by is None else by).square().mean(-1, keepdim=True)
    pre, post, comb = written.split_by_index(m, F.linear(flat, m.fn) * torch.rsqrt(squares + NORM_EPS))
    return written.with_matmul(x, post, comb, written.layer((pre.unsqueeze(-1) * x).sum(2).to(x.dtype)))


def of_other_streams(m: Connection, x: Tensor) -> Tensor:
    return gates(m, x, x.flip(2).flatten(2).float())


def of_another_norm(m: Connection, x: Tensor) -> Tensor:
    return gates(m, x, x.flatten(2).float(), x[:, :1].flatten(2).float())


def of_lanes_first(m: Connection, x: Tensor) -> Tensor:
    return gates(m, x, x.transpose(2, 3).flatten(2).float())


def of_each_stream(m: Connection, x: Tensor) -> Tensor:
    """A norm over the lanes of each stream, before the layer."""
    normalised = F.rms_norm(x.float(), x.shape[-1:], eps=NORM_EPS)
    pre, post, comb = written.split_by_index(m, F.linear(normalised.flatten(2), m.fn))
    return written.with_matmul(x, post, comb, written.layer((pre.unsqueeze(-1) * x).sum(2).to(x.dtype)))


LIKE_GATES = (of_other_streams, of_another_norm, of_lanes_first, of_each_stream)


@pytest.mark.parametrize("form", LIKE_GATES, ids=lambda form: form.__name__)
@pytest.mark.rotates(3)
def test_gates_of_something_else_are_not_those_of_the_streams(form: Form):
    t = fused(Connection(form, d=128, times=3), streams())
    assert called(t) & ON_950 == ON_950 - {"npu::npu_mhc_pre"}
    testing.means_what_it_says(t)


def rows_first(x: Tensor) -> Tensor:
    return balanced((x.softmax(-2) + HC_EPS).mT, 3).mT


def one_eps_less(x: Tensor) -> Tensor:
    y = x.softmax(-1) + HC_EPS
    y = y / y.sum(-2, keepdim=True)
    return y / (y.sum(-1, keepdim=True) + HC_EPS)


def clamped(x: Tensor) -> Tensor:
    y = x.softmax(-1) + HC_EPS
    for axis in (-2, -1, -2):
        y = y / y.sum(axis, keepdim=True).clamp(min=HC_EPS)
    return y


def means(x: Tensor) -> Tensor:
    y = x.softmax(-1) + HC_EPS
    for axis in (-2, -1, -2):
        y = y / (y.mean(axis, keepdim=True) + HC_EPS)
    return y


def in_logarithms(x: Tensor) -> Tensor:
    for axis in (-1, -2, -1, -2):
        x = x - x.logsumexp(axis, keepdim=True)
    return x.exp()


LIKE_MATRICES: dict[Callable[[Tensor], Tensor], str] = {
    rows_first: "softmax of columns",
    one_eps_less: "rows last",
    clamped: "another term",
    means: "another term",
    in_logarithms: "without a softmax as the first",
}


@pytest.mark.parametrize("form", LIKE_MATRICES, ids=lambda form: form.__name__)
def test_matrices_in_another_order_are_refused_by_name(form: Callable[[Tensor], Tensor]):
    t = fused(form, streams(F32, 4))
    assert not called(t)
    assert LIKE_MATRICES[form] in reasons(t, "sinkhorn")


@pytest.mark.parametrize("times", [2, 3, 20, pytest.param(100, marks=pytest.mark.rotates(8))])
def test_matrices_of_any_length(times: int):
    t = fused(lambda x: balanced(x.softmax(-1) + HC_EPS, times), streams(F32, 4))
    assert called(t) == {"npu::npu_mhc_sinkhorn"}
    (call,) = [node for node in t.fused.graph.nodes if "sinkhorn" in str(node.target)]
    assert call.kwargs.get("num_iters", 20) == times
    if times < 100:
        testing.means_what_it_says(t)


@pytest.mark.rotates(8)
def test_more_iterations_than_the_operator_takes():
    t = fused(lambda x: balanced(x.softmax(-1) + HC_EPS, 101), streams(F32, 4))
    assert "num_iters <= 100" in reasons(t, "sinkhorn")


def test_a3_takes_twenty_iterations_alone():
    t = fused(Connection(written.transformers, phi=BF16, d=128, times=19), streams(), target="ascend910_93")
    assert called(t) & ON_A3 == {"cann_ops_transformer::mhc_post"}
    assert "mhc_pre_sinkhorn on ascend910_93 requires numIters == 20" in reasons(t, "stream_gates")


def test_streams_that_are_not_mixed_have_an_operator_on_950_alone():
    def apart(x: Tensor, out: Tensor, gate: Tensor) -> Tensor:
        return (x + gate.unsqueeze(-1) * out.unsqueeze(-2)).to(x.dtype)

    given = streams(), streams()[:, :, 0].clone(), streams(F32)[..., 0].clone()
    t = fused(apart, *given)
    assert called(t) == {"npu::npu_mhc_post"}
    testing.means_what_it_says(t)
    t = fused(apart, *given, target="ascend910_93")
    assert not called(t)
    assert "matrix: there is none that mixes the streams; mhc_post requires one" in reasons(t, "stream_update")


def test_a_gate_that_is_returned_stays_right():
    def with_gate(m: Connection, x: Tensor) -> Any:
        flat = x.flatten(2).float()
        mixes = F.linear(flat, m.fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + NORM_EPS)
        pre, post, comb = written.split_by_index(m, mixes)
        return (pre.unsqueeze(-1) * x).sum(2).to(x.dtype), pre, post, comb, mixes

    t = fused(Connection(with_gate, d=128, times=3), streams())
    testing.means_what_it_says(t)
