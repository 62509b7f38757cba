"""Feed-forward networks: gated activations, and the routing of tokens to experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from fusion.operators.contract import A2_A3, CHIPS, Limit, Operator, unused
from fusion.operators.dtypes import FLOATS, compute_dtype
from fusion.operators.quantisation import quantised


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


def _swiglu_quant(x: Tensor, activate_left: bool) -> tuple[Tensor, Tensor]:
    gate, value = x.to(compute_dtype(x)).chunk(2, -1)[:: 1 if activate_left else -1]
    return quantised(silu(gate) * value)


SWIGLU_QUANT = Operator(
    schema=(
        "npu::npu_swiglu_quant(Tensor x, *, Tensor? smooth_scales=None, Tensor? offsets=None, "
        "Tensor? group_index=None, bool activate_left=False, int quant_mode=0, int group_list_type=0, "
        "ScalarType? dst_type=None) -> (Tensor, Tensor)"
    ),
    compute=_swiglu_quant,
    outputs=lambda x: (
        x.new_empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.int8),
        x.new_empty(x.shape[:-1], dtype=compute_dtype(x)),
    ),
    dims={"x": "*B D"},
    dtypes={"x": FLOATS},
    limits={
        "host": (
            "D % 2 == 0",
            Limit("quant_mode == 1", because="rows are quantised by a scale of their own"),
            Limit("group_list_type == 0", because="it is read for groups alone"),
            *unused(("smooth_scales", "offsets", "group_index"), "groups with factors of their own are not decomposed"),
            *unused(("dst_type",), "other results than int8 are not decomposed"),
        ),
        **dict.fromkeys(CHIPS, ("rank(x) > 1", "D <= 8192")),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source="op-plugin: torch_npu.npu_swiglu_quant and its test; CANN: aclnnSwiGluQuantV2",
    summary=(
        "a, b = halves of x, the first or, without activate_left, the second activated; "
        "y, scale = dynamic quantisation of a · sigmoid(a) · b in float32"
    ),
)


GELU = Operator(
    schema='npu::npu_gelu(Tensor input, *, str approximate="none") -> Tensor',
    compute=lambda input, approximate: gelu(input.to(compute_dtype(input)), approximate=approximate).to(input.dtype),
    outputs=lambda input: torch.empty_like(input),
    dims={"input": "*S"},
    dtypes={"input": FLOATS},
    limits={"host": ("approximate in ('none', 'tanh')",), CHIPS[0]: ("rank(input) <= 8",)},
    source="op-plugin: torch_npu.npu_gelu, whose table names A2 and not A3; there gelu of torch is that of tanh",
    summary=(
        "approximate none: y = x · (1 + erf(x / √2)) / 2; tanh: y = x · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) / 2; "
        "in float32"
    ),
)


def _clipped_swiglu(x: Tensor, dim: int, alpha: float, limit: float, bias: float, interleaved: bool) -> Tensor:
    wide = x.to(compute_dtype(x))
    gate, value = wide.unflatten(dim, (-1, 2)).unbind(dim + (dim >= 0)) if interleaved else wide.chunk(2, dim)
    gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (value + bias)).to(x.dtype).contiguous()


CLIPPED_SWIGLU = Operator(
    schema=(
        "npu::npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, "
        "float limit=7., float bias=1., bool interleaved=True) -> Tensor"
    ),
    compute=_clipped_swiglu,
    outputs=lambda x, dim: _halved(x, dim),
    dims={"x": "*S"},
    dtypes={"x": FLOATS},
    limits={
        "host": (
            "-rank(x) <= dim and dim < rank(x)",
            "size(x, dim) % 2 == 0",
            Limit("not given(group_index)", because="what stands in the rows that no group counts is not documented"),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                "rank(x) > 1",
                Limit(
                    "dim in (-1, rank(x) - 1) or not interleaved",
                    because="its page pairs elements of the dim joined with those behind it, where they are no pairs",
                ),
            ),
        ),
    },
    source="torch_npu 2.13.0: docstring of npu_clipped_swiglu; CANN: aclnnClippedSwiglu",
    summary="a, b = every second element, or the halves, of x along dim, a ≤ limit, |b| ≤ limit; "
    "out = round(a · sigmoid(alpha · a) · (b + bias)), in float32",
)


def _gating_top_k_softmax(
    x: Tensor, k: int, renorm: int | None, output_softmax: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = compute_dtype(x)
    shares = x if renorm else x.to(wide).softmax(-1)  # a wider dtype would not change what is largest
    best, index = shares.topk(k, dim=-1)
    y = best.to(wide).softmax(-1) if renorm else best
    whole = shares.to(torch.float32) if output_softmax and not renorm else x.new_empty([0], dtype=torch.float32)
    return y.to(x.dtype), index.to(torch.int32), whole.contiguous()


def _outputs(x: Tensor, k: int, renorm: int | None, output_softmax: bool | None) -> tuple[Tensor, Tensor, Tensor]:
    chosen = (*x.shape[:-1], k)
    whole = x.shape if output_softmax and not renorm else [0]
    return x.new_empty(chosen), x.new_empty(chosen, dtype=torch.int32), x.new_empty(whole, dtype=torch.float32)


MOE_GATING_TOP_K_SOFTMAX_V2 = Operator(
    schema=(
        "npu::npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, "
        "bool? output_softmax=False) -> (Tensor, Tensor, Tensor)"
    ),
    compute=_gating_top_k_softmax,
    outputs=_outputs,
    dims={"x": "*B E"},
    dtypes={"x": FLOATS},
    limits={
        "host": (
            "rank(x) in (2, 3)",
            "0 < k and k <= E",
            "renorm in (0, 1)",
            Limit("not given(finished)", because="what it gives for finished rows is not documented"),
            Limit("rank(x) == 2", when="output_softmax == True", because="its Meta kernel forgets a dim of three"),
        ),
        **dict.fromkeys(A2_A3, ("k <= 1024",)),
    },
    source="op-plugin: torch_npu.npu_moe_gating_top_k_softmax(_v2); CANN: aclnnMoeGatingTopKSoftmaxV2",
    summary="renorm 0: y, index = top-k of softmax(x); renorm 1: y = softmax of the k largest x; in float32",
)


def _gating_top_k(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.to(compute_dtype(x))
    scores = wide.sigmoid() if norm_type else wide.softmax(-1)
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if group_count > 1:
        grouped = choice.unflatten(-1, (group_count, -1))
        best = grouped.topk(2, dim=-1)[0].sum(-1) if group_select_mode else grouped.amax(-1)
        out = torch.ones_like(best, dtype=torch.bool).scatter(-1, _first(best, k_group), False)
        choice = grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)
    index = _first(choice, k)
    y = scores.gather(-1, index)
    y = y / (y.sum(-1, keepdim=True) + eps) if norm_type or renorm else y
    return (y * routed_scaling_factor).to(x.dtype), index.to(torch.int32), scores


def _first(x: Tensor, count: int) -> Tensor:
    """Places of the largest; of equal ones the first."""
    return x.sort(stable=True, dim=-1, descending=True)[1][..., :count].contiguous()


MOE_GATING_TOP_K = Operator(
    schema=(
        "npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
        "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, "
        "int norm_type=0, bool out_flag=False, float routed_scaling_factor=1., float eps=9.9999999999999995e-21) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_gating_top_k,
    outputs=lambda x, k: (
        x.new_empty([x.shape[0], k]),
        x.new_empty([x.shape[0], k], dtype=torch.int32),
        x.new_empty(x.shape, dtype=compute_dtype(x)),
    ),
    dims={"x": "T E", "bias": "E"},
    dtypes={"x bias": FLOATS},
    limits={
        "host": (
            "group_count > 0 and E % group_count == 0",
            "0 < k_group and k_group <= group_count",
            "0 < k and k * group_count <= E * k_group",
            "group_select_mode in (0, 1)",
            "group_select_mode == 0 or group_count == 1 or E >= 2 * group_count",
            "renorm in (0, 1)",
            "norm_type in (0, 1)",
            *unused(
                ("input_ids", "tid2eid"), "experts that a table lists for each token of the vocabulary are not chosen"
            ),
        ),
        **dict.fromkeys(
            CHIPS,
            (
                "E <= 2048",
                "E > 2 * group_count",
                "(E // group_count + 31) // 32 * 32 * group_count <= 2048",
                Limit("renorm == 0", because="torch_npu documents this alone, CANN 1 of a softmax as well"),
                Limit("not given(bias) or dtype(bias) == dtype(x)"),
            ),
        ),
    },
    source="torch_npu 2.13.0: docstring of npu_moe_gating_top_k; CANN: aclnnMoeGatingTopK",
    summary="s = softmax(x) or, norm_type 1, sigmoid(x); of s + bias the k largest, of the k_group groups alone whose "
    "best, or two best together, are the largest; y = s there, with a sigmoid divided by (its sum + eps), "
    "· routed_scaling_factor; in float32",
)
