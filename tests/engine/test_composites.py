"""A composite operator without a translation of its own means what torch makes of it, in a graph of torch.export."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.stages.canonicalise import canonicalise

from .graphs import Build, Function, exported, names, norm, numbers

aten = torch.ops.aten
A3 = Options(target="ascend910_93")
f32, bf16, i64 = torch.float32, torch.bfloat16, torch.int64


def half(*shape: int) -> Tensor:
    return numbers(*shape).to(bf16)


def type_as(x: Tensor, w: Tensor) -> Tensor:
    h = x.float()
    return w * (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)


def detached(x: Tensor, w: Tensor) -> Tensor:
    return norm(x.detach(), w).detach()


def tensor_split(x: Tensor) -> Tensor:
    gate, up = x.tensor_split(2, -1)
    return F.silu(gate) * up


def transposed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * 0.125).softmax(-1) @ v


def variance(x: Tensor, w: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + 1e-5) * w


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.complex(cos, sin)
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


HEADS = half(1, 4, 8, 64), half(1, 4, 8, 64), half(1, 4, 8, 64)
FORMS: list[tuple[Callable[..., Tensor], tuple[Tensor, ...], str]] = [
    (type_as, (half(2, 64), half(64)), "npu.npu_rms_norm.default"),
    (detached, (half(2, 64), half(64)), "npu.npu_rms_norm.default"),
    (tensor_split, (half(2, 128),), "npu.npu_swiglu.default"),
    (transposed, HEADS, "npu.npu_fused_infer_attention_score_v2.default"),
    (variance, (numbers(2, 64), numbers(64)), "aten.native_layer_norm.default"),
    (rotated, (half(2, 3, 8, 64), numbers(8, 32), numbers(8, 32)), "npu.npu_interleave_rope.default"),
]


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.rotates)])
@pytest.mark.parametrize(("form", "args", "wanted"), FORMS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_graph_of_export_fuses_as_one_of_compile(
    form: Callable[..., Tensor], args: tuple[Tensor, ...], wanted: str, dynamic: bool
):
    sizes = ({0: torch.export.Dim("B", min=2)}, *[None] * (len(args) - 1)) if dynamic and args[0].shape[0] > 1 else None
    with torch.no_grad():
        program = torch.export.export(Function(form), args, dynamic_shapes=sizes and (sizes,))
    fuse_graph(program.graph, installed(), A3)
    assert wanted in names(program.graph_module)


def held(made: Callable[[Build], Any]) -> Any:
    build = Build()
    node = made(build)
    return canonicalise(build.graph).value_of[node]


@pytest.mark.parametrize(
    ("composite", "parts"),
    [
        (lambda b, x: b(aten.type_as.default, x, b.input(2)), lambda b, x: b(aten._to_copy.default, x, dtype=f32)),
        (lambda b, x: b(aten.mT.default, x), lambda b, x: b(aten.transpose.int, x, -2, -1)),
        (lambda b, x: b(aten.numpy_T.default, x), lambda b, x: b(aten.permute.default, x, [1, 0])),
        (lambda b, x: b(aten.max.other, x, b.input(4, 6)), lambda b, x: b(aten.maximum.default, x, b.input(4, 6))),
        (lambda b, x: b(aten.clip.default, x, 0.0, 1.0), lambda b, x: b(aten.clamp.default, x, 0.0, 1.0)),
    ],
)
def test_a_composite_is_its_parts(composite: Callable[..., Any], parts: Callable[..., Any]):
    def of(made: Callable[..., Any]) -> Any:
        return lambda build: made(build, build.input(4, 6, dtype=bf16 if made in (composite, parts) else f32))

    one, other = held(of(composite)), held(of(parts))
    assert (one.op, one.attrs, one.shape, one.dtype) == (other.op, other.attrs, other.shape, other.dtype)


def test_a_reshape_that_copies_is_a_launch_of_an_exported_graph():
    from fusion.report.outcome import counted

    gm = exported(lambda x: (x.transpose(0, 1).reshape(-1), x.reshape(-1), x.transpose(0, 1).flatten()), numbers(2, 3))
    assert sum(each.launches for each in counted(gm.graph).values()) == 2


UNDER_AUTOCAST: dict[str, Function] = {
    "einsum": lambda x, w: torch.einsum("bd,ed->be", x, w),
    "matmul": lambda x, w: x @ w.mT,
    "linear": F.linear,
    "sdpa": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], w[None]),
    "softmax": lambda x, w: (x @ w.mT).softmax(-1),
    "layer_norm": lambda x, w: F.layer_norm(x @ w.mT, (4,)),
    "rms_norm": lambda x, w: F.rms_norm(x @ w.mT, (4,)),
    "repeat_interleave": lambda x, w: (x @ w.mT).repeat_interleave(2, 0),
}


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
@pytest.mark.rotates(4)
def test_autocast_casts_inside_of_composites_as_in_eager_code(name: str, around: bool):
    def inside(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", bf16):
            return UNDER_AUTOCAST[name](x, w)

    function = UNDER_AUTOCAST[name] if around else inside
    x, w = numbers(3, 64), numbers(4, 64, seed=1)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    with torch.no_grad(), torch.autocast("cpu", bf16) if around else nullcontext():
        want, have = function(x, w), compiled(x, w)
    assert have.dtype == want.dtype
    torch.testing.assert_close(have.float(), want.float(), atol=2e-2, rtol=2e-2)
