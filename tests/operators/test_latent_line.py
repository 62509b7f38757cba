"""What the laws of all operators do not say of the one that norms, rotates and writes the latent line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.operators import OPERATORS
from tests.operators.latent_line_cases import NAMES, line, reference

IN_PLACE, FUNCTIONAL = (OPERATORS[f"npu::{name}"].fallback for name in NAMES)


def made(make: Any, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    torch.manual_seed(3)
    return make(dtype)


def agreeing(a: Tensor, b: Tensor) -> float:
    return (a.double() == b).double().mean().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norm_and_rope_are_rounded_once(dtype: torch.dtype):
    call = made(line(5, 3, list(range(15)), is_output_kv=True), dtype)
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}
    for got, once in zip(FUNCTIONAL(**call), reference(**wide, stored=dtype), strict=True):
        assert agreeing(got, once) > 0.999


@pytest.mark.parametrize(
    ("mode", "index"), [("PA_BNSD", (6, -1, 2, -7)), ("PA_NZ", (6, -1, 2, -7)), ("Norm", ((-1, 2), (0, -7)))]
)
def test_no_row_is_touched_but_those_of_the_index(mode: str, index: Any):
    call = made(line(2, 2, index, mode))
    before = {name: call[name].clone() for name in ("k_cache", "ckv_cache")}
    IN_PLACE(**call)
    for name, old in before.items():
        changed = call[name] != old
        if mode == "PA_NZ":
            blocks, size, _, width = old.shape
            changed = changed.view(blocks, width // 16, size, 16).transpose(1, 2)
        rows = changed.reshape(-1, old.shape[-1]).any(-1)
        assert rows.nonzero().flatten().tolist() == [2, 6]


@pytest.mark.parametrize(
    "make",
    [line(1, 1, (16,), "PA"), line(1, 1, (16,), "PA_NZ"), line(2, 1, ((6,), (0,)), "Norm")],
    ids=["pages", "NZ", "the row behind is one of the next sequence"],
)
def test_a_place_beyond_the_end_is_an_error_and_never_another_row(make: Any):
    call = made(make)
    before = call["ckv_cache"].clone()
    with pytest.raises(IndexError):
        IN_PLACE(**call)
    assert torch.equal(call["ckv_cache"], before)


def test_rows_that_nobody_asked_for_are_zeros():
    given, kept = (made(line(2, 1, (3, -1), is_output_kv=flag)) for flag in (True, False))
    assert all(each.any(-1).all() for each in FUNCTIONAL(**given)[:2])
    assert not any(each.any() for each in FUNCTIONAL(**kept)[:2])
    assert all(map(torch.equal, FUNCTIONAL(**given)[2:], FUNCTIONAL(**kept)[2:]))
