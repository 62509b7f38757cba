"""Routing of tokens to experts: the k largest gates of each token, and their weights."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fusion.operators.dtype_sets import FLOATS, compute_dtype
from fusion.operators.limits import A2_A3, CHIPS, Limit
from fusion.operators.operator import Operator


def _gating_top_k_softmax(
    x: Tensor, k: int, finished: Tensor | None, renorm: int | None, output_softmax: bool | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = compute_dtype(x)
    shares = x if renorm else x.to(wide).softmax(-1)  # widening x would not change the order of its elements
    best, index = shares.topk(k, dim=-1)
    y = best.to(wide).softmax(-1) if renorm else best
    index = index if finished is None else index.masked_fill(finished.unsqueeze(-1), x.shape[-1])
    softmax = shares.to(torch.float32) if output_softmax and not renorm else x.new_empty([0], dtype=torch.float32)
    return y.to(x.dtype), index.to(torch.int32), softmax.contiguous()


def _outputs(x: Tensor, k: int, renorm: int | None, output_softmax: bool | None) -> tuple[Tensor, Tensor, Tensor]:
    chosen = (*x.shape[:-1], k)
    softmax = x.shape if output_softmax and not renorm else [0]
    return x.new_empty(chosen), x.new_empty(chosen, dtype=torch.int32), x.new_empty(softmax, dtype=torch.float32)


MOE_GATING_TOP_K_SOFTMAX_V2 = Operator(
    schema=(
        "npu::npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, "
        "bool? output_softmax=False) -> (Tensor, Tensor, Tensor)"
    ),
    compute=_gating_top_k_softmax,
    outputs=_outputs,
    dims={"x": "*B E", "finished": "*B"},
    dtypes={"x": FLOATS, "finished": frozenset({torch.bool})},
    limits={
        "host": (
            Limit("rank(x) in (2, 3)", because="x is [tokens, experts] or [B, S, experts]; flatten the leading dims"),
            "0 < k and k <= E",
            "renorm in (0, 1)",
            Limit("rank(x) == 2", when="output_softmax == True", because="its Meta kernel forgets a dim of three"),
        ),
        **dict.fromkeys(A2_A3, ("k <= 1024",)),
    },
    source="op-plugin: torch_npu.npu_moe_gating_top_k_softmax(_v2); CANN: aclnnMoeGatingTopKSoftmaxV2",
    summary="renorm 0: y, index = top-k of softmax(x); renorm 1: y = softmax of the k largest x; in float32; the index "
    "of a finished row is E",
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
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _SCORES[norm_type](x.to(compute_dtype(x)))
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if group_count > 1:
        grouped = choice.unflatten(-1, (group_count, -1))
        best = grouped.topk(2, dim=-1)[0].sum(-1) if group_select_mode else grouped.amax(-1)
        out = torch.ones_like(best, dtype=torch.bool).scatter(-1, largest(best, k_group), False)
        choice = grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)
    return _weighted(x, scores, largest(choice, k), norm_type or renorm, out_flag, routed_scaling_factor, eps)


_SCORES = (
    lambda x: x.softmax(-1),
    lambda x: x.sigmoid(),
    lambda x: softplus(x).sqrt(),
)
"""Function of the logits that gives the scores, for each `norm_type`."""


def _weighted(
    x: Tensor, scores: Tensor, index: Tensor, divided: int, out_flag: bool, routed_scaling_factor: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of the experts `index` [T, K] of `x`, these, and the `scores` of all experts or zeros."""
    y = scores.gather(-1, index)
    y = y / (y.sum(-1, keepdim=True) + eps) if divided else y
    return (
        (y * routed_scaling_factor).to(x.dtype),
        index.to(torch.int32),
        scores.contiguous() if out_flag else scores.new_zeros(scores.shape),
    )


def largest(x: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest elements along the last dim, in descending order, of equal ones the
    first."""
    return x.sort(stable=True, dim=-1, descending=True)[1][..., :count].contiguous()


MOE_GATING_TOP_K = Operator(
    schema=(
        "npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
        "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, "
        "int norm_type=0, bool out_flag=False, float routed_scaling_factor=1., float eps=9.9999999999999995e-21) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_gating_top_k,
    uncomputed={"input_ids tid2eid": "experts that a table lists for each token of the vocabulary are not chosen"},
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


def _gating_top_k_hash(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    input_ids: Tensor | None,
    tid2eid: Tensor | None,
    k_group: int,
    group_count: int,
    routed_scaling_factor: float,
    eps: float,
    group_select_mode: int,
    norm_type: int,
    out_flag: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if input_ids is None or tid2eid is None:
        how = (k_group, group_count, group_select_mode, 0, norm_type, out_flag, routed_scaling_factor, eps)
        return _gating_top_k(x, k, bias, *how)
    scores = _SCORES[norm_type](x.to(compute_dtype(x)))
    index = tid2eid[input_ids.to(torch.int64)].to(torch.int64)
    return _weighted(x, scores, index, norm_type, out_flag, routed_scaling_factor, eps)


MOE_GATING_TOP_K_HASH = Operator(
    schema=(
        "_C_ascend::moe_gating_top_k_hash(Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None, "
        "Tensor? tid2eid=None, int k_group=1, int group_count=1, float routed_scaling_factor=1., "
        "float eps=9.9999999999999995e-21, int group_select_mode=0, int renorm=0, int norm_type=0, "
        "bool out_flag=False) -> (Tensor y, Tensor expert_idx, Tensor out)"
    ),
    compute=_gating_top_k_hash,
    without_effect=frozenset({"renorm"}),  # which its limit leaves at 0
    outputs=lambda x, k: (
        x.new_empty([x.shape[0], k]),
        x.new_empty([x.shape[0], k], dtype=torch.int32),
        x.new_empty(x.shape, dtype=compute_dtype(x)),
    ),
    dims={"x": "T E", "bias": "E", "input_ids": "T", "tid2eid": "V K"},
    dtypes={"x bias": FLOATS, "input_ids tid2eid": frozenset({torch.int32, torch.int64})},
    limits={
        "host": (
            "group_count > 0 and E % group_count == 0",
            "0 < k_group and k_group <= group_count",
            "0 < k and k * group_count <= E * k_group",
            "group_select_mode in (0, 1)",
            "group_select_mode == 0 or group_count == 1 or E >= 2 * group_count",
            "renorm == 0",
            "norm_type in (0, 1, 2)",
            "given(input_ids) and given(tid2eid) or not given(input_ids) and not given(tid2eid)",
            Limit("K == k", when="given(tid2eid)"),
        ),
        **dict.fromkeys(
            A2_A3,
            (
                "E <= 2048",
                "eps > 0",
                "routed_scaling_factor > 0",
                Limit("not given(bias) or dtype(bias) == dtype(x)"),
            ),
        ),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),  # no GE converter
    source="vllm-ascend: csrc/torch_binding.cpp (moe_gating_top_k_hash), and its test of the routing of DeepSeek-V4",
    summary="as npu_moe_gating_top_k, also for scores sqrt(softplus(x)), norm_type 2; with input_ids the experts "
    "tid2eid[input_ids] in the place of the k largest",
)
