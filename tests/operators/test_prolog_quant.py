"""What the laws of all operators do not say of the latent prolog in int8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.operators import OPERATORS
from tests.operators.cases import described, flat
from tests.operators.prolog_quant_cases import quantised
from tests.operators.prolog_quant_references import norm
from tests.operators.sparse_cases import DR
from tests.operators.sparse_references import rope

PROLOG = OPERATORS["npu::npu_mla_prolog_v3_functional"]
WIDTH = 256
SLOTS = (3, 7, 0, -1, 6)


def made(choice: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16, **more: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    return quantised(choice, 5, slots=SLOTS, **more)(dtype)


@pytest.mark.parametrize("choice", [(1, 3, 0), (2, 3, 0)])
def test_lines_of_bytes_hold_runs_of_whole_numbers_the_rotated_key_and_their_scales(choice: tuple[int, int, int]):
    call = made(choice, hckv=WIDTH)
    call["k_nope_clip_alpha"] = torch.tensor([0.75])
    results = PROLOG.fallback(**call)
    assert list(map(described, flat(results))) == list(map(described, flat(PROLOG.meta(**call))))
    lines, kept = results[5].flatten(0, 2), call["kv_cache"].flatten(0, 2)
    assert torch.equal(results[6], call["kr_cache"])
    product = call["token_x"].double() @ call["weight_dkv_kr"].double()
    if choice[0] == 2:
        product = product * call["dequant_scale_x"].double() * call["dequant_scale_w_dkv_kr"].double()
    for token, slot in enumerate(SLOTS):
        if slot < 0:
            continue
        key = rope(product[token, WIDTH:], call["rope_sin"][token].double(), call["rope_cos"][token].double())
        latent = norm(product[token, :WIDTH], call["rmsnorm_gamma_ckv"].double(), 1e-5, 1.0).reshape(-1, 128)
        whole, turned, scales = lines[slot].split((WIDTH, 2 * DR, WIDTH // 32))
        largest = latent.abs().amax(-1, keepdim=True) * 0.75
        read = scales.clone().view(torch.float32).double()[:, None]
        torch.testing.assert_close(read, largest / 127, rtol=2e-2, atol=0)
        assert (whole.reshape(-1, 128) * read - latent.clamp(-largest, largest)).abs().max() <= largest.max() / 80
        torch.testing.assert_close(turned.clone().view(torch.bfloat16).double(), key, rtol=2e-2, atol=2e-2)
    others = torch.ones(len(lines), dtype=torch.bool).index_fill(0, torch.tensor([s for s in SLOTS if s >= 0]), False)
    assert torch.equal(lines[others], kept[others])


def wide(call: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}


@pytest.mark.parametrize("choice", [(1, 0, 0), (2, 0, 0)])
def test_products_of_whole_numbers_are_not_rounded_before_norm_and_rope(choice: tuple[int, int, int]):
    """Of float32 arithmetic nothing is left in what is stored in bfloat16: it is the exact number, rounded once."""
    call = made(choice)
    got, exact = PROLOG.fallback(**call), PROLOG.fallback(**wide(call))
    same = [(a == b.bfloat16()).double().mean().item() for a, b in zip(got, exact, strict=True)]
    assert same[1] > (0.98 if choice[0] == 2 else 0.2), "the rotated queries"
    if choice[0] == 2:
        assert min(same[5:]) > 0.98, "the caches"


def test_whole_queries_times_their_scale_are_the_queries_and_their_rope_is_divided_by_it():
    call = made((2, 1, 1))
    whole, rope_whole, scale, _, _, _, _ = PROLOG.fallback(**call)
    names = dict(kv_cache_quant_mode=0, query_quant_mode=0, quant_scale_ckv=None)
    floats = call | names | {"kv_cache": torch.zeros(3, 4, 1, 32).bfloat16()}
    query, rope_query, *_ = PROLOG.fallback(**floats)
    assert whole.dtype == torch.int8
    assert (whole * scale - query.float()).abs().max() <= scale.max() * 0.51
    expected = rope_query.float() * (call["quant_scale_ckv"] / scale)
    torch.testing.assert_close(rope_whole.float(), expected, rtol=1e-2, atol=1e-2)
