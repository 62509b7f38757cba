"""Every argument of every operator is refused in dtypes that no chip is declared to take, and in none that is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.operators import CHIPS, OPERATORS, refusal
from fusion.operators.limit_texts import tensors
from tests.operators.attention_limits_cases import CACHE_HOST_EDGES, HOST_EDGES, KERNEL_EDGES, WHOLE_HOST_EDGES
from tests.operators.limit_cases import DTYPES
from tests.operators.test_attention_limits import V1, V2, in_tensors, renamed
from tests.operators.test_limits import calls as legal_calls
from tests.operators.test_limits import t

F32, INT32 = torch.float32, torch.int32
BESIDE: Mapping[tuple[str, str], Tensor] = {
    ("atb::npu_multi_head_latent_attention.lse", "mask"): t(512, 512),
    ("atb::npu_multi_head_latent_attention.lse", "qk_descale"): t(8, dtype=F32),
    ("atb::npu_multi_head_latent_attention.lse", "pv_descale"): t(8, dtype=F32),
    ("npu::npu_add_rms_norm_dynamic_quant", "beta"): t(48),
    ("npu::npu_gather_pa_kv_cache", "seq_offset"): t(2, dtype=INT32),
    ("npu::npu_gather_pa_kv_cache_functional", "seq_offset"): t(2, dtype=INT32),
    ("cann_ops_transformer::sparse_flash_mla", "seqused_ori_kv"): t(2, dtype=INT32),
    ("cann_ops_transformer::sparse_flash_mla", "metadata"): t(1024, dtype=INT32),
    ("npu::npu_mhc_pre", "gamma"): t(4, 128, dtype=F32),
    ("npu::npu_moe_gating_top_k_softmax", "finished"): t(7, dtype=torch.bool),
    ("npu::npu_moe_re_routing", "per_token_scales"): t(6, dtype=F32),
    **{
        (f"npu::npu_recurrent_gated_delta_rule{form}", name): each
        for form in ("", "_functional")
        for name, each in (("gk", t(3, 4, 8, dtype=F32)), ("num_accepted_tokens", t(2, dtype=INT32)))
    },
    ("npu::npu_mla_prolog_v3", "smooth_scales_cq"): t(1, 1536, dtype=F32),
    ("npu::npu_mla_prolog_v3_functional", "smooth_scales_cq"): t(1, 1536, dtype=F32),
    **{
        (f"npu::npu_qkv_rms_norm_rope_cache{form}", f"{name}_offset"): t(2, 128, dtype=F32)
        for form in ("", "_functional")
        for name in ("k", "v")
    },
}
"""Arguments that stand in no call of the edges: other limits refuse them or what they go with."""
LISTS = {
    (V2, "actual_seq_qlen"),
    (V2, "actual_seq_kvlen"),
    (V1, "actual_seq_lengths"),
    (V1, "actual_seq_lengths_kv"),
    ("npu::npu_incre_flash_attention", "actual_seq_lengths"),
}
"""Arguments that are lists of integers in this overload, and tensors in its twin."""


def calls(name: str) -> Iterator[dict[str, Any]]:
    """Legal calls of the edges of an operator."""
    yield from legal_calls(name)
    version, _, overload = name.partition(".")
    for legal, _, _ in (*HOST_EDGES, *KERNEL_EDGES, *WHOLE_HOST_EDGES, *CACHE_HOST_EDGES):
        call = in_tensors(legal) if overload else legal
        if version in (V1, V2):
            yield renamed(call) if version == V1 else call


def with_tensors(name: str, argument: str) -> dict[str, Any]:
    """A call in which the argument is given as a tensor or as several."""
    known = OPERATORS[name].arguments
    fitting = [call for call in calls(name) if set(call) <= set(known)]
    beside = BESIDE.get((name, argument))
    if beside is not None:
        return fitting[0] | {argument: beside}
    return next(call for call in fitting if list(tensors(call.get(argument))))


ARGUMENTS = [(name, each) for name, op in OPERATORS.items() for each in op.dtypes if (name, each) not in LISTS]


@pytest.mark.rotates(6)
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids="-".join)
def test_an_argument_is_taken_in_its_dtypes_alone(name: str, argument: str):
    op, call = OPERATORS[name], with_tensors(name, argument)
    needs = f"requires {argument} in "
    given = call[argument]
    others = {torch.complex64, *DTYPES} - op.dtypes[argument]
    for chip in (chip for chip in CHIPS if chip in op.limits):
        assert needs not in str(refusal(op, chip, (), call))
        for dtype in others:
            other = given.to(dtype) if isinstance(given, Tensor) else [each.to(dtype) for each in given]
            assert needs in str(refusal(op, chip, (), call | {argument: other})), dtype
