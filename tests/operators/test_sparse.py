"""What the laws of all operators do not say of the latent prolog, the indexer and attention over listed keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.operators import OPERATORS
from fusion.operators.latent.mla_prolog_numbers import packed
from tests.operators.cases import flat
from tests.operators.sparse_cases import Sparse, attention, indexer, packed_rows, prolog, quant_attention
from tests.operators.sparse_references import prolog as reference

LOW = [torch.bfloat16, torch.float16]
PROLOG = "npu::npu_mla_prolog_v3"
INDEXER = "npu::npu_lightning_indexer"
ATTENTION = "npu::npu_sparse_flash_attention"
QUANT_INDEXER = "npu::npu_quant_lightning_indexer"
QUANT_ATTENTION = "npu::npu_kv_quant_sparse_flash_attention"
DECODE = Sparse(("TND", "PA_BSND"), rows=(1, 1), keys=(11, 6))


def made(make: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(3)
    return make(dtype)


def widened(call: dict[str, Any]) -> dict[str, Any]:
    return {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}


def agreeing(a: Tensor, b: Tensor) -> float:
    return (a.double() == b).double().mean().item()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_the_prolog_rounds_every_product_and_norm_and_rope_once(dtype: torch.dtype):
    call = made(prolog(12, slots=tuple(range(12)), query_norm_flag=True, qc_qr_scale=0.7, kc_scale=1.3), dtype)
    got = OPERATORS[f"{PROLOG}_functional"].fallback(**call)
    rounded, exact = (reference(**widened(call), stored=stored) for stored in (dtype, torch.float64))
    for index in (0, 1, 3, 5, 6):
        assert agreeing(got[index], rounded[index]) > 0.98, f"result {index}"
    for index in (0, 1, 5, 6):
        assert agreeing(rounded[index], exact[index].to(dtype).double()) < 0.9, f"result {index}"


@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
def test_the_prolog_touches_no_row_but_those_of_its_slots(mode: str):
    call = made(prolog(4, slots=(6, -1, 2, -7), mode=mode))
    caches = {name: (call[name], call[name].clone()) for name in ("kv_cache", "kr_cache")}
    OPERATORS[PROLOG].fallback(**call)
    for cache, before in caches.values():
        blocks, size, _, width = cache.shape
        if mode == "PA_NZ":
            cache, before = (
                x.view(blocks, width // 16, size, 16).transpose(1, 2).reshape(blocks * size, width)
                for x in (cache, before)
            )
        changed = (cache != before).reshape(blocks * size, width).any(-1)
        assert changed.nonzero().flatten().tolist() == [2, 6]


@pytest.mark.parametrize("mode", ["PA_BSND", "PA_NZ"])
def test_the_prolog_refuses_a_slot_beyond_the_cache(mode: str):
    call = made(prolog(1, slots=(12,), mode=mode))
    before = call["kv_cache"].clone()
    with pytest.raises(IndexError):
        OPERATORS[PROLOG].fallback(**call)
    assert torch.equal(call["kv_cache"], before)


@pytest.mark.parametrize("mode", ["BSND", "TND"])
def test_the_prolog_writes_the_whole_of_a_contiguous_cache(mode: str):
    call = made(prolog(*((2, 3) if mode == "BSND" else (6,)), mode=mode))
    call["kv_cache"].fill_(torch.nan)
    OPERATORS[PROLOG].fallback(**call)
    assert not call["kv_cache"].isnan().any()


def test_the_prolog_needs_no_norm_that_nobody_asked_for():
    with_norm, without = (
        OPERATORS[PROLOG].fallback(**made(prolog(3, slots=(0, 1, 2), query_norm_flag=flag))) for flag in (True, False)
    )
    assert with_norm[3].shape == (3, 40)
    assert without[3].tolist() == [0.0]
    assert all(torch.equal(with_norm[index], without[index]) for index in (0, 1))


def test_the_indexer_pads_with_no_token_and_no_score():
    call = made(indexer(DECODE, count=9, return_value=True))
    indices, values = OPERATORS[INDEXER].fallback(**call)
    assert (indices[1, 0, 6:] == -1).all()
    assert (values[1, 0, 6:] == -torch.inf).all()
    assert (values[1, 0, :6].diff() < 0).all()
    assert values[:, 0, :6].isfinite().all()


def test_the_indexer_takes_weights_of_another_dtype():
    call = made(indexer(DECODE), torch.bfloat16)
    wide = call | {"weights": call["weights"].float() + 1e-4}
    indices, _ = OPERATORS[INDEXER].fallback(**wide)
    expected, _ = OPERATORS[INDEXER].fallback(**widened(wide))
    assert torch.equal(indices, expected)


def test_rows_apart_and_rows_together_select_the_same():
    few = Sparse(("TND", "PA_BSND"), rows=(2, 3), keys=(9, 6))
    call = made(indexer(few))
    apart, _ = OPERATORS[INDEXER].fallback(**call)
    more = {name: torch.cat([call[name]] * 4) for name in ("query", "weights")}  # 20 rows of 2 sequences
    together, _ = OPERATORS[INDEXER].fallback(**(call | more))
    assert torch.equal(together[:5], apart)
    assert (together[5:] == -1).all()


@pytest.mark.parametrize("name", [INDEXER, ATTENTION])
def test_what_no_row_sees_may_be_anything(name: str):
    make = indexer(DECODE) if name == INDEXER else attention(DECODE)
    call = made(make)
    clean = OPERATORS[name].fallback(**call)
    used = torch.zeros(call["key"].shape[:2], dtype=torch.bool)
    for table, length in zip(call["block_table"].tolist(), (11, 6), strict=True):
        for token in range(length):
            used[table[token // 4], token % 4] = True
    for each in ("key", "key_rope"):
        if each in call:
            call[each] = call[each].masked_fill(~used[..., None, None], torch.nan)
    if name == ATTENTION:
        call["value"] = call["key"]
    spoiled = OPERATORS[name].fallback(**call)
    assert all(map(torch.equal, clean, spoiled))


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_sparse_attention_rounds_the_weights_before_it_divides(dtype: torch.dtype):
    call = made(attention(Sparse(rows=(64,), keys=(64,), n=16, d=64, more={"sparse_mode": 0}), count=24), dtype)
    call["sparse_indices"] = torch.stack([torch.randperm(64)[:24] for _ in range(64)])[None, :, None].int()
    out = OPERATORS[ATTENTION].fallback(**call)[0]
    wide = widened(call)
    keys, ropes = (wide[name][0, :, 0][call["sparse_indices"][0, :, 0].long()] for name in ("key", "key_rope"))
    scores = (wide["query"][0] @ keys.mT + wide["query_rope"][0] @ ropes.mT) * 0.3
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    kernel = (weights.to(dtype).double() @ keys / total).to(dtype).double()
    never = (weights @ keys / total).to(dtype).double()
    late = ((weights / total).to(dtype).double() @ keys).to(dtype).double()
    assert agreeing(out[0], kernel) > 0.99
    assert agreeing(kernel, never) < 0.9
    assert agreeing(kernel, late) < 0.9


def test_sparse_attention_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch):
    call = made(attention(Sparse(("TND", "PA_BSND"), rows=(3, 4), keys=(9, 6)), apart=True))
    whole = OPERATORS[ATTENTION].fallback(**call)
    monkeypatch.setattr("fusion.operators.sparse.sparse_flash_attention._PART", 2 * 6 * 16)  # two rows at once
    torch.testing.assert_close(OPERATORS[ATTENTION].fallback(**call), whole)


def test_the_int8_indexer_rounds_scores_of_heads_and_scaled_weights_to_float16():
    torch.manual_seed(5)
    rows, keys, heads, width = 64, 64, 16, 128
    base = torch.randint(-100, 101, (width,))  # scores that are large, and close to each other
    query, key = (
        (base + torch.randint(-9, 10, (1, n, h, width))).to(torch.int8) for n, h in ((rows, heads), (keys, 1))
    )
    weights, scales = (torch.rand(1, rows, heads).half() for _ in range(2))
    of_keys = torch.ones(1, keys, 1).half()
    call = dict(query=query, key=key, weights=weights, query_dequant_scale=scales, key_dequant_scale=of_keys)
    modes = dict(query_quant_mode=0, key_quant_mode=0, sparse_mode=0)
    found = OPERATORS[QUANT_INDEXER].fallback(**call, **modes, sparse_count=8)[0, :, 0].long()
    dots = torch.einsum("rnd,td->rnt", query[0].double(), key[0, :, 0].double()).relu() / 1024

    def best(heads: Tensor, weights: Tensor) -> Tensor:
        return (torch.einsum("rn,rnt->rt", weights, heads) * of_keys[0, :, 0].double()).topk(8).indices

    exact = weights[0].double() * scales[0].double()
    assert agreeing(found, best(dots.half().double(), (weights[0] * scales[0]).double())) > 0.99
    assert agreeing(found, best(dots, exact)) < 0.99


def test_rotated_keys_of_packed_rows_have_the_dtype_of_the_query():
    call = made(quant_attention(Sparse()), torch.float16)
    out = OPERATORS[QUANT_ATTENTION].fallback(**call)
    latent, rope, scale = call["key"].split([16, 16, 16], dim=-1)
    keys = latent.float() * scale.contiguous().view(torch.float32).repeat_interleave(4, dim=-1)
    q, q_rope = call["query"].split([16, 8], dim=-1)
    plain = {
        name: call[name] for name in ("sparse_indices", "scale_value", "attention_mode", "layout_query", "layout_kv")
    }
    latents = dict.fromkeys(("key", "value"), keys.half())
    ropes = {"query_rope": q_rope, "key_rope": rope.contiguous().view(torch.float16)}
    assert torch.equal(out, OPERATORS[ATTENTION].fallback(q, **latents, **ropes, **plain)[0])


def test_packed_rows_are_those_that_the_prolog_writes():
    rows, rope = torch.randn(5, 256), torch.randn(5, 64).bfloat16()
    assert torch.equal(packed_rows(rows, rope, 128), packed(rows, rope, torch.ones(1), 128))


@pytest.mark.parametrize("name", [ATTENTION, QUANT_ATTENTION])
@pytest.mark.parametrize("apart", [False, True], ids=["one cache", "pages of two caches in turn"])
def test_sparse_attention_reads_no_row_that_is_not_listed(name: str, apart: bool):
    a = Sparse(("TND", "PA_BSND"), rows=(4,), keys=(40,))
    call = made(attention(a, count=3) if name == ATTENTION else quant_attention(a))
    call["sparse_indices"] = call["sparse_indices"][..., :3]
    expected = OPERATORS[name].fallback(**call)
    if apart:
        between = torch.stack([call["key"], torch.zeros_like(call["key"])], dim=1)
        call["key"] = call["value"] = between[:, 0]  # no view gives these pages one dim of tokens
    given = {each.untyped_storage().data_ptr() for each in call.values() if isinstance(each, Tensor)}
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
                sizes.append(result.numel())
            return result

    with Watch():
        got = OPERATORS[name].fallback(**call)
    assert all(map(torch.equal, flat(got), flat(expected)))
    assert max(sizes) <= 4 * 3 * call["key"].shape[-1] + 4 * 8 * 24, "the listed keys, or the queries"
