"""Gated activations: out = silu(a) · b, with a and b the halves of the input."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from fusion.operators.contract import Operator
from fusion.operators.dtypes import FLOATS, compute_dtype


def _swiglu(input: Tensor, dim: int = -1) -> Tensor:
    gate, value = input.to(compute_dtype(input)).chunk(2, dim)
    return (silu(gate) * value).to(input.dtype).contiguous()


def _swiglu_meta(input: Tensor, dim: int = -1) -> Tensor:
    shape = list(input.shape)
    shape[dim] = shape[dim] // 2
    return input.new_empty(shape)


SWIGLU = Operator(
    schema="npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    fallback=_swiglu,
    meta=_swiglu_meta,
    dims={"input": "*S"},
    dtypes={"input": FLOATS},
    limits={
        "host": ("-rank(input) <= dim and dim < rank(input)", "size(input, dim) % 2 == 0"),
        "ascend910b": ("rank(input) <= 8",),
        "ascend910_93": ("rank(input) <= 8",),
        "ascend950": ("rank(input) <= 8",),
    },
    lowerings=frozenset({"eager", "torchair", "npugraph_ex"}),
    source="op-plugin: torch_npu.npu_swiglu; CANN: aclnnSwiGlu",
    summary="a, b = halves of input along dim; out = round(a · sigmoid(a) · b), in float32",
)
