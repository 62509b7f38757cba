"""What the laws of all operators do not say of the operators of atb for latent attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.operators import CHIPS, OPERATORS, refusal
from tests.operators.atb_cases import LSE, MLA, MODES, PREPROCESS, RING, TENSORS, Latent, latent, preprocess, ring
from tests.operators.atb_limits_cases import attending, preparing, returning, stepping, t
from tests.operators.atb_references import preprocess as reference
from tests.operators.test_sparse import LOW, agreeing, made, widened

OUT, FUNCTIONAL = PREPROCESS


@pytest.mark.parametrize("mode", MODES[:2])
def test_both_masks_of_rows_are_causal_and_no_mask_sees_all(mode: str):
    free = made(latent(Latent((21, 9, 16), (4,) * 3, mode, "free")))
    spec = made(latent(Latent((21, 9, 16), (4,) * 3, mode, "spec")))
    bare = {name: value for name, value in free.items() if name not in ("mask", "mask_type")}
    fallback = OPERATORS[MLA].fallback
    torch.testing.assert_close(fallback(**free), fallback(**spec))
    whole = fallback(**bare)
    torch.testing.assert_close(whole[3::4], fallback(**free)[3::4])
    assert not torch.allclose(whole[0], fallback(**free)[0], atol=1e-3)
    alone = {name: value for name, value in bare.items() if name not in ("qseqlen", "calc_type")}
    first = {name: alone[name][::4] for name in ("q_nope", "q_rope")}
    torch.testing.assert_close(whole[::4], fallback(**alone | first))


@pytest.mark.parametrize("mode", MODES)
def test_what_no_row_reaches_may_be_anything(mode: str):
    call = made(latent(Latent((11, 6), mode=mode)))
    clean = OPERATORS[MLA].fallback(**call)
    name, axis = "k_rope", 1 if mode == "krope_ctkv" else 2
    used = torch.zeros(call[name].shape[0], call[name].shape[axis], dtype=torch.bool)
    for table, length in zip(call["block_tables"].tolist(), (11, 6), strict=True):
        for token in range(length):
            used[table[token // 8], token % 8] = True
    hidden = ~used[:, :, None, None] if axis == 1 else ~used[:, None, :, None]
    spoiled = OPERATORS[MLA].fallback(**call | {name: call[name].masked_fill(hidden, 1e4)})
    assert torch.equal(clean, spoiled)


def test_the_weights_of_int8_are_rounded_to_steps():
    call = made(latent(Latent((24, 17), mode="int8_nzcache")))
    fallback = OPERATORS[MLA].fallback
    fine = made(latent(Latent((24, 17), mode="nzcache")))
    scale = call["qk_descale"][:, None]
    fine |= {"q_rope": call["q_rope"], "k_rope": call["k_rope"], "block_tables": call["block_tables"]}
    fine |= {"q_nope": call["q_nope"] * scale, "ctkv": call["ctkv"].float()}
    exact = fallback(**fine) * call["pv_descale"][:, None]
    error = (fallback(**call) - exact).norm() / exact.norm()
    assert 1e-4 < error < 2e-2


def test_lengths_in_tensors_are_told_in_numbers():
    tensors, numbers = made(latent(Latent(in_tensors=True))), made(latent(Latent()))
    assert torch.equal(OPERATORS[TENSORS].fallback(**tensors), OPERATORS[MLA].fallback(**numbers))
    call = attending() | {"context_lens": t(3, dtype=torch.int64)}
    assert "lengths='host'" in str(refusal(OPERATORS[TENSORS], "ascend910b", (), call, "eager"))
    assert refusal(OPERATORS[TENSORS], "ascend910b", (), call, "eager", host_reads=True) is None


@pytest.mark.parametrize(
    ("name", "call"), [(MLA, attending()), (LSE, returning()), (RING, stepping()), (OUT, preparing())]
)
def test_no_graph_of_the_vendor_takes_them(name: str, call: dict[str, Any]):
    for lowering in ("torchair", "npugraph_ex"):
        assert f"cannot be lowered by {lowering}" in str(refusal(OPERATORS[name], "ascend910_93", (), call, lowering))
    assert refusal(OPERATORS[name], "ascend910_93", (), call, "eager") is None
    assert "does not exist on ascend950" in str(refusal(OPERATORS[name], CHIPS[2], (), call))


@pytest.mark.parametrize("dtype", [*LOW, torch.float64], ids=str)
def test_steps_over_parts_of_the_keys_give_the_whole(dtype: torch.dtype):
    whole = made(ring((3,), (12,)), dtype)
    fallback = OPERATORS[RING].fallback
    expected, total = fallback(**widened(whole))
    before: dict[str, Any] = {}
    for part in (slice(0, 5), slice(5, 6), slice(6, 12)):
        keys = {name: whole[name][part] for name in ("k_nope", "k_rope", "value")}
        lengths = torch.tensor([[3], [part.stop - part.start]], dtype=torch.int32)
        out, lse = fallback(**whole | keys | {"seqlen": lengths} | before)
        before = {"pre_out": out, "prev_lse": lse, "calc_type": "calc_type_default"}
    limit = {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-14}[dtype]
    assert (out.double() - expected).norm() / expected.norm() < limit
    torch.testing.assert_close(lse.double(), total.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("static", [True, False], ids=["static", "of each token"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_preprocessing_rounds_every_product_norm_and_rope_once(dtype: torch.dtype, static: bool):
    call = made(preprocess(tuple(range(8)), static=static), dtype)
    got = OPERATORS[FUNCTIONAL].fallback(**call)
    rounded = reference(**widened(call), stored=dtype)
    for index, (a, b) in enumerate(zip(got, rounded, strict=True)):
        assert agreeing(a, b) > 0.95, f"result {index}"


@pytest.mark.parametrize("mode", MODES)
def test_preprocessing_touches_no_row_but_those_of_its_slots(mode: str):
    call = made(preprocess((6, -1, 2, -7), mode))
    before = {name: call[name].clone() for name in ("kv_cache_out0", "kv_cache_out1")}
    OPERATORS[OUT].fallback(**call)
    for name, old in before.items():
        changed = (call[name] != old).any(-1)
        changed = changed.any(2) if mode == "krope_ctkv" else changed.any(1)
        assert changed.flatten().nonzero().flatten().tolist() == [2, 6]


def test_preprocessing_refuses_a_slot_beyond_the_cache():
    call = made(preprocess((12,)))
    before: Tensor = call["kv_cache_out0"].clone()
    with pytest.raises(IndexError):
        OPERATORS[OUT].fallback(**call)
    assert torch.equal(call["kv_cache_out0"], before)


def test_scales_may_be_the_bits_of_floats():
    plain, packed = (made(preprocess((9, 3), packed=bits)) for bits in (False, True))
    for a, b in zip(OPERATORS[FUNCTIONAL].fallback(**plain), OPERATORS[FUNCTIONAL].fallback(**packed), strict=True):
        assert torch.equal(a, b)
