"""Group norms: each group of channels of an image is normalised by its own mean and variance."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from fusion.operators.dtype_sets import FLOATS, compute_dtype
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator


def _group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    x = input.to(compute_dtype(input)).reshape(input.shape[0], group, -1)
    mean = x.mean(-1, keepdim=True)
    root = ((x - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    y = ((x - mean) * root).view(input.shape)
    channels = (-1, *(1,) * (input.ndim - 2))
    y = y if weight is None else y * weight.to(y.dtype).view(channels)
    y = y if bias is None else y + bias.to(y.dtype).view(channels)
    mean, root = (each.squeeze(-1).to(input.dtype) for each in (mean, root))
    return silu(y).to(input.dtype).contiguous(), mean, root


def _outputs(input: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    groups = (input.shape[0], group)
    return input.new_empty(input.shape), input.new_empty(groups), input.new_empty(groups)


GROUP_NORM_SILU = Operator(
    schema=(
        "npu::npu_group_norm_silu(Tensor input, Tensor? weight, Tensor? bias, int group, "
        "float eps=1.0000000000000001e-05) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_group_norm_silu,
    outputs=_outputs,
    dims={"input": "B C *S", "weight": "C", "bias": "C"},
    dtypes={"input": FLOATS, "weight": FLOATS, "bias": FLOATS},
    limits={
        "host": ("group > 0", "C % group == 0"),
        **dict.fromkeys(
            A2_A3,
            (
                "rank(input) <= 8",
                "eps > 0",
                Limit("dtype(weight) in (dtype(input), 'float32')", when="given(weight)"),
                Limit("dtype(bias) == dtype(weight)", when="given(weight) and given(bias)"),
                Limit("dtype(bias) in (dtype(input), 'float32')", when="given(bias)"),
            ),
        ),
    },
    source=(
        "op-plugin: torch_npu.npu_group_norm_silu, which names A2; CANN 8.3: aclnnGroupNormSilu, which names A3 as well"
    ),
    summary=(
        "mean, rstd = 1/sqrt(var + eps) of each group of C / group channels [B, group], in float32; "
        "n = (x - mean) · rstd · weight + bias; y = round(n · sigmoid(n))"
    ),
)
