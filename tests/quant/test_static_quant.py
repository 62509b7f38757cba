"""Rows in int8 by scales that the model holds: on a chip one call, and what is left as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion
from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import Trial, means_what_it_says, trial
from tests.examples import static_quant as examples
from tests.examples.inputs import fixed, tensors
from tests.examples.quantisation import grid, int8, weights
from tests.examples.static_quant import CHANNELS, ZERO, cut_off, divided, inputs, multiplied, shifted
from tests.support.tried import tried

RULE = next(each for each in installed().rules if each.name == "quantisation")
QUANTIZE = "npu.npu_quantize.default"


def fused(function: Callable[..., Tensor], make: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype) -> Trial:
    t = trial(RULE, Example("rows", function, make), dtype, options=Options(target="ascend910_93", lower="eager"))
    means_what_it_says(t)
    return t


def calls(t: Trial) -> list[torch.fx.Node]:
    return [node for node in t.fused.graph.nodes if str(node.target) == QUANTIZE]


@pytest.mark.parametrize("example", examples.EXAMPLES, ids=lambda each: each.name)
def test_one_call_on_a_chip(example: Example):
    assert len(calls(fused(example.function, example.inputs, torch.bfloat16))) == 1


def test_only_scales_that_are_held_are_a_part_of_a_norm_that_quantises():
    """Why the norm did not quantise is told beside them; rows by a scale of each token stand for themselves."""
    of_tokens = next(each for each in tried()["quantisation"] if not each.refusal)
    for example, within in ((examples.EXAMPLES[0], {"encoded_norm"}), (of_tokens, set[str]())):
        t = trial(RULE, example, torch.bfloat16)
        assert [each.match.within for each in t.outcome.chosen] == [within]


def test_scales_of_heads_and_channels_are_those_of_whole_rows():
    (call,) = calls(fused(divided, inputs(*CHANNELS), torch.bfloat16))
    rows, scale = (call.args[place].meta["val"].shape for place in (0, 1))  # type: ignore[union-attr]
    assert (rows[-1], *scale) == (64, 64)


def _dtypes(t: Trial) -> list[torch.dtype]:
    """Dtypes of what the one call is given."""
    (call,) = calls(t)
    return [each.meta["val"].dtype for each in call.all_input_nodes]


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(divided, torch.float32), (multiplied, torch.float16)],
    ids=("divided", "multiplied"),
)
def test_scales_in_float16_multiply_alone(function: Callable[..., Tensor], dtype: torch.dtype):
    assert set(_dtypes(fused(function, inputs(*examples.ALL), torch.float16))) == {dtype}


@pytest.mark.parametrize("scale", [CHANNELS, examples.ALL, ()], ids=["channels", "one element", "no dims"])
def test_rows_are_cast_where_the_scale_is_in_float32(scale: tuple[int, ...]):
    float32 = fixed(inputs(*scale)(torch.float32)[1].detach())
    t = fused(lambda x, s: int8(x.float() / s), lambda dtype: (*inputs(*CHANNELS)(dtype)[:1], float32), torch.bfloat16)
    assert set(_dtypes(t)) == {torch.float32}


INT8_BY_A_NUMBER: dict[str, Callable[[Tensor], Tensor]] = {
    "multiplied": lambda x: torch.round(x * 16.0).clamp(-128, 127).to(torch.int8),
    "divided": lambda x: torch.round(x / 0.0625).clamp(-128, 127).to(torch.int8),
    "bounded first": lambda x: (16.0 * x).clamp(-128, 127).round().char(),
    "bounded by tensors": lambda x: torch.minimum(
        torch.maximum((x * 16).round(), torch.tensor(-128.0)), torch.tensor(127.0)
    ).to(torch.int8),
    "by the inverse": lambda x: (x * (1 / 0.0625)).round().clip(-128, 127).to(torch.int8),
    "of a function": lambda x: (torch.relu(x) * 16).round().clamp(-128, 127).to(torch.int8),
    "whole zero point": lambda x: (x.float() * 16 - 5).round().clamp(-128, 127).to(torch.int8),
    "whole zero point behind": lambda x: ((x.float() * 16.1).round() + 5).clamp(-128, 127).to(torch.int8),
    "even zero point behind": lambda x: ((x * 16).round() - 4).clamp(-128, 127).to(torch.int8),
    "zero point with a fraction": lambda x: (x.float() * 16 + 0.3).round().clamp(-128, 127).to(torch.int8),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", INT8_BY_A_NUMBER.values(), ids=INT8_BY_A_NUMBER)
@pytest.mark.rotates(4)
def test_numbers_of_the_source_are_scales(form: Callable[[Tensor], Tensor], dtype: torch.dtype):
    assert len(calls(fused(form, tensors(grid(0, 2, 5, 48)), dtype))) == 1


def test_a_number_that_the_dtype_does_not_hold_is_multiplied_in_float32():
    rows = tensors(grid(0, 2, 5, 48))
    in_float32 = lambda x: int8(x.float() * 16.0625)  # noqa: E731
    assert _dtypes(fused(in_float32, rows, torch.bfloat16))[0] == torch.float32
    assert _dtypes(fused(in_float32, rows, torch.float16))[0] == torch.float16


NO_NUMBER: dict[str, Callable[[Tensor], Tensor]] = {
    "cut off": lambda x: (x * 16).clamp(-128, 127).to(torch.int8),
    "fraction behind": lambda x: ((x * 16).round() + 0.5).clamp(-128, 127).to(torch.int8),
    "bounded before": lambda x: ((x * 16).clamp(-20, 20).round() + 4).clamp(-128, 127).to(torch.int8),
    "unbounded": lambda x: (x * 16).round().to(torch.int32).clamp(-128, 127).to(torch.int8),
    "other bounds": lambda x: (x * 16).round().clamp(-127, 127).to(torch.int8),
    "uint8": lambda x: (x * 16 + 128).round().clamp(0, 255).to(torch.uint8),
}


@pytest.mark.parametrize("form", NO_NUMBER.values(), ids=NO_NUMBER)
def test_other_roundings_by_a_number_are_left(form: Callable[[Tensor], Tensor]):
    assert not calls(fused(form, tensors(grid(0, 2, 5, 48)), torch.bfloat16))


def test_a_number_before_scales_of_tokens_is_one_of_them():
    def form(x: Tensor) -> Tensor:
        return int8(x * (127 / x.abs().amax(-1, keepdim=True)))

    assert not calls(fused(form, tensors(grid(0, 2, 5, 48)), torch.bfloat16))


def test_fractions_that_are_cut_off_are_left():
    assert not calls(fused(cut_off, inputs(*CHANNELS), torch.bfloat16))


def test_a_zero_point_behind_the_rounding_must_be_whole():
    behind = lambda x, scale, zero: ((x / scale).round() + zero).clamp(-128, 127).to(torch.int8)  # noqa: E731
    whole = fixed(torch.arange(CHANNELS[0] * CHANNELS[-1], dtype=torch.int8).reshape(CHANNELS))
    assert calls(fused(behind, inputs(*CHANNELS, more=(whole,)), torch.bfloat16))
    assert not calls(fused(behind, inputs(*CHANNELS, more=(ZERO,)), torch.bfloat16))
    assert calls(fused(shifted, inputs(*CHANNELS, more=(ZERO,)), torch.bfloat16))


@pytest.mark.parametrize("shift", [3, 3.0, -128])
def test_a_number_is_a_zero_point_beside_scales_of_channels(shift: float):
    form = lambda x, scale: ((x / scale).round() + shift).clamp(-128, 127).to(torch.int8)  # noqa: E731
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert calls(fused(form, inputs(*CHANNELS), dtype))
    between = lambda x, scale: int8(x / scale + 0.25)  # noqa: E731
    assert not calls(fused(between, inputs(*CHANNELS), torch.bfloat16))


def test_a_scale_of_each_token_is_left():
    t = fused(divided, inputs(examples.B, 1, examples.S, 1), torch.bfloat16)
    assert not calls(t)


def test_operands_that_are_dequantised_first_are_a_product_of_int8():
    def layer(x: Tensor, scale: Tensor, weight: Tensor, channels: Tensor) -> Tensor:
        rows = (x / scale).clamp(-128, 127).round().to(torch.int8).to(scale.dtype) * scale
        return torch.nn.functional.linear(rows, weight.to(channels.dtype) * channels)

    args = (torch.full((1,), 0.25), weights(1, 40, 64), torch.full((40, 1), 0.125))
    args = (
        torch.randn(5, 64).bfloat16(),
        *(fixed(each.bfloat16() if each.is_floating_point() else each) for each in args),
    )
    report = fusion.explain(layer, *args, options={"target": "ascend910_93", "lower": "eager"})
    assert {"npu::npu_quantize", "npu::npu_quant_matmul"} <= set(report.ops)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_of_heads_are_expanded_for_the_operator_and_run(dtype: torch.dtype):
    args = inputs(*examples.HEADS)(dtype)
    compiled = torch.compile(divided, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    exact = divided(*(each.double() for each in args))
    with torch.no_grad():
        wrong, before = ((each.int() - exact.int()).abs() for each in (compiled(*args), divided(*args)))
    assert wrong.max() <= 1
    assert wrong.sum() <= before.sum()
