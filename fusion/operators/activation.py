"""Gated activations: out = silu(a) · b, with a and b the halves of the input."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from fusion.operators.contract import CHIPS, Operator
from fusion.operators.dtypes import FLOATS, compute_dtype


def _swiglu(input: Tensor, dim: int) -> Tensor:
    gate, value = input.to(compute_dtype(input)).chunk(2, dim)
    return (silu(gate) * value).to(input.dtype).contiguous()


def _halved(input: Tensor, dim: int) -> Tensor:
    shape = list(input.shape)
    shape[dim] = shape[dim] // 2
    return input.new_empty(shape)


SWIGLU = Operator(
    schema="npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    compute=_swiglu,
    outputs=_halved,
    dims={"input": "*S"},
    dtypes={"input": FLOATS},
    limits={
        "host": ("-rank(input) <= dim and dim < rank(input)", "size(input, dim) % 2 == 0"),
        **dict.fromkeys(CHIPS, ("rank(input) <= 8",)),
    },
    source="op-plugin: torch_npu.npu_swiglu; CANN: aclnnSwiGlu",
    summary="a, b = halves of input along dim; out = round(a · sigmoid(a) · b), in float32",
)
