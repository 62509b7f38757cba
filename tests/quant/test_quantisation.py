"""Why rows and products that resemble quantised ones are left as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import capture, trial
from patterns.quant.read_dynamic_scales import UNSCALED
from tests.engine.graphs import numbers, read_graph
from tests.examples.inputs import fixed
from tests.examples.quantisation import by, by_row, int8, layer, product, quantised, scaled
from tests.support.tried import tried


def whole_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for all tokens."""
    scale = (x.float().abs().amax() / 127).reshape(1, 1)
    return (x.float() / scale).round().to(torch.int8), scale.expand(x.shape[0], 1)


def bounded_above(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale that does not grow beyond a bound."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(1e-5, 0.02)
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def cut(x: Tensor) -> tuple[Tensor, Tensor]:
    """Without rounding."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).to(torch.int8), scale


def tight(x: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds that cut off the largest."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().clamp(-100, 100).to(torch.int8), scale


def open_narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """A rounded scale, and no bound."""
    scale = x.bfloat16().abs().amax(-1, keepdim=True) / 127
    return (x.bfloat16() / scale).round().to(torch.int8), scale


def faint(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales that stay large."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 127).clamp(min=0.01)
    return (x.float() / scale).round().to(torch.int8), scale


def static(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale that does not come from the row."""
    scale = x.float().square().mean(-1, keepdim=True).sqrt() / 32
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def no_channels(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A scale of each token alone."""
    return (product(whole, weight).float() * tokens).bfloat16()


def early_bias(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A bias that is scaled, too."""
    return ((product(whole, weight).float() * scale + bias) * tokens).bfloat16()


def unscaled_bias(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A bias before any scale."""
    return ((product(whole, weight).float() + bias) * tokens * scale).bfloat16()


def residual(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A number of each token and channel before any scale."""
    return ((product(whole, weight).float() + tokens * scale) * tokens * scale).bfloat16()


def experts(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Two weights for the same rows."""
    return (whole.float() @ weight.unflatten(0, (2, -1)).float().mT) * tokens * scale[: len(scale) // 2]


def cast_early(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Sums cast to float16."""
    return product(whole, weight).half() * tokens.half() * scale.half()


def cut_between(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Cut to whole numbers between the scales."""
    return (product(whole, weight).float() * tokens).int().float() * scale


ROWS: tuple[tuple[Callable[..., Any], str], ...] = (
    (whole_tensor, "several tokens share one"),
    (bounded_above, "it is clamped from above"),
    (cut, "numbers are cut off toward zero"),
    (tight, "clamped to -100 and 100"),
    (open_narrow, "it is in 16 bits and may be rounded down"),
    (faint, "clamped from below at 0.01"),
    (static, "it is not the largest of each row"),
)
PRODUCTS: tuple[tuple[Callable[..., Any], bool, str], ...] = (
    (no_channels, False, "the int8 product has none of each output"),
    (early_bias, True, "before all scales are multiplied"),
    (unscaled_bias, True, "it is torch.float32 and added before all scales"),
    (residual, False, "more than one vector [N] is added before"),
    (experts, False, "by 2 int8 weights in one product"),
    (cast_early, False, "cast to float16, which ends at 65504"),
    (cut_between, False, "the int8 product has none of each output"),
)


OTHERS = "rows are divided by that of others"
ZERO = "they are multiplied or divided by 0"
QUOTIENTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a scale cut to a whole number": (lambda x: x / by_row(x).int(), UNSCALED),
    "multiplied by the largest but 1": (lambda x: x * 127 * (by_row(x, 1) - 1), UNSCALED),
    "another scale where it is 1": (lambda x: x / torch.where(by_row(x) == 1, 1.0, by_row(x)), UNSCALED),
    "a tensor where it is 0": (lambda x: x / torch.where(by_row(x) == 0, x.sum(-1, keepdim=True), by_row(x)), UNSCALED),
    "a sum where the scale is 0": (lambda x: x / torch.where(by_row(x) == 0, 1.0, x.sum(-1, keepdim=True)), UNSCALED),
    "another scale where a sum is 0": (lambda x: x / torch.where(x.sum(-1, True) == 0, 1.0, by_row(x)), UNSCALED),
    "another scale where some lanes are 0": (
        lambda x: x / torch.where(by_row(x[:, :8]) == 0, 1.0, by_row(x)), UNSCALED,
    ),
    "another scale where a difference is 0": (lambda x: x / torch.where(by_row(x) - 1 == 0, 1.0, by_row(x)), UNSCALED),
    "an upper bound of the negative scale": (lambda x: x / -(-by_row(x)).clamp(min=-0.02), "it is clamped from above"),
    "divided by the root of the scale": (lambda x: x / by_row(x).sqrt(), UNSCALED),
    "by the smallest of each row": (lambda x: x / (x.amin(-1, keepdim=True) / -127), UNSCALED),
    "by the larger of the smallest and the largest": (
        lambda x: x * (127 / torch.maximum(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))), UNSCALED,
    ),
    "by the largest of two tensors": (
        lambda x: x * (127 / torch.maximum(-(x + 1).amin(-1, keepdim=True), x.amax(-1, keepdim=True))), UNSCALED,
    ),
    "by the smallest bounded by 1": (
        lambda x: x * (127 / torch.maximum(-x.amin(-1, True).clamp(max=1), x.amax(-1, True))), UNSCALED,
    ),
    "by twice the smallest": (
        lambda x: x * (127 / torch.maximum(-2 * x.amin(-1, keepdim=True), x.amax(-1, keepdim=True))), UNSCALED,
    ),
    "by the smallest along other dims": (
        lambda x: x * (127 / torch.maximum(-x.amin(-2, keepdim=True), x.amax(-1, keepdim=True))), UNSCALED,
    ),
    "whole before it is rounded": (lambda x: (x / by_row(x)).int().float(), "cut off toward zero"),
    "without fractions before it is rounded": (lambda x: (x / by_row(x)).trunc(), "cut off toward zero"),
    "times 0": (lambda x: x * 0.0 / by_row(x), ZERO),
    "divided by 0": (lambda x: x / (by_row(x) * 0.0), ZERO),
    "the scale of zeros": (lambda x: x / by_row(x * 0.0), OTHERS),
    "one scale of two rows": (lambda x: x / by_row(x.view(-1, 96)).expand(-1, 2).reshape(-1, 1), OTHERS),
    "a lower bound": (lambda x: (x / by_row(x)).clamp(min=-100), "clamped to -100 and 127"),
    "an upper bound": (lambda x: (x / by_row(x)).clamp(max=100), "clamped to -127 and 100"),
}  # fmt: skip


def test_of_a_layer_in_w8a8_no_limit_of_the_weight_alone_is_told():
    """It reads as both; that its scales are wide stands in the way of what would have saved less."""
    rule = next(each for each in installed().rules if each.name == "quantised_linear")
    example = next(each for each in tried()[rule.name] if each.name == "scales first")
    for target in ("ascend910_93", "host"):
        outcome = trial(rule, example, torch.bfloat16, options=Options(target=target, lower="eager")).outcome
        assert [each.lowering for each in outcome.chosen if each.match.rule.name == rule.name] == ["int8[W8A8]"]
        assert not [each for each in outcome.refusals if each.rule == rule.name]


def misses(function: Callable[..., Any], bias: bool = False) -> set[tuple[str, str]]:
    graph = read_graph(capture(function, layer(5, bias=bias)(torch.bfloat16)).graph.graph)
    return {(each.rule, each.reason) for _, each in graph.readings.missed()}


@pytest.mark.parametrize(("quantise", "reason"), ROWS, ids=lambda each: getattr(each, "__name__", ""))
def test_rows_that_are_none(quantise: Callable[..., Any], reason: str):
    assert any(name == "quantisation" and reason in why for name, why in misses(by(quantise)))


@pytest.mark.rotates(8)
@pytest.mark.parametrize(("quotient", "reason"), QUOTIENTS.values(), ids=QUOTIENTS)
def test_quotients_that_are_none(quotient: Callable[[Tensor], Tensor], reason: str):
    def rows(x: Tensor) -> Tensor:
        return quotient(x.float()).round().clamp(-127, 127).to(torch.int8)

    graph = read_graph(capture(rows, layer(6)(torch.bfloat16)[:1]).graph.graph)
    assert any(reason in each.reason for _, each in graph.readings.missed("quantisation"))
    assert not graph.readings.all("token_scale")


def test_rows_by_the_scale_of_zeros_are_none():
    def rows(x: Tensor) -> Tensor:
        return (x / by_row(x * 0.0)).round().to(torch.int8)

    graph = read_graph(capture(rows, layer(6)(torch.float32)[:1]).graph.graph)
    assert not graph.readings.all("quantise")


def test_rows_and_their_scale_may_be_negated_alike():
    def rows(x: Tensor) -> Tensor:
        return (x * -2 / by_row(x * -2)).round().to(torch.int8)

    graph = read_graph(capture(rows, layer(6)(torch.float32)[:1]).graph.graph)
    [(_, found)] = graph.readings.all("quantise")
    assert (found.captures["scheme"], found.captures["x"].attrs) == ("dynamic", (-2.0,))


@pytest.mark.parametrize(("finish", "bias", "reason"), PRODUCTS, ids=lambda each: getattr(each, "__name__", ""))
def test_products_that_are_none(finish: Callable[..., Any], bias: bool, reason: str):
    assert any(name == "quantised_linear" and reason in why for name, why in misses(scaled(finish), bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "a bias"])
def test_what_is_added_to_a_whole_product_or_gates_it_leaves_it_one(bias: bool, dtype: torch.dtype):
    def gated(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, *biases: Tensor) -> Tensor:
        y = product(whole, weight).float() * tokens * scale
        y = sum(biases, y).to(dtype)
        return y + torch.sigmoid(y) * y

    graph = read_graph(capture(scaled(gated), layer(5, bias=bias)(torch.bfloat16)).graph.graph)
    [(value, found)] = graph.readings.all("int8_matmul")
    assert (value.dtype, "bias" in found.captures) == (dtype, bias)
    assert not graph.readings.missed("quantised_linear")


def test_a_product_that_goes_on_says_once_why_it_is_none():
    assert [why for name, why in misses(scaled(unscaled_bias), bias=True) if name == "quantised_linear"] == [
        "bias: it is torch.float32 and added before all scales are multiplied; npu_quant_matmul requires int32 there; "
        "add the bias behind the scales, or store it as int32"
    ]


def layers(finish: Callable[..., Tensor], rows: int = 6, *more: Tensor) -> list[Mapping[str, Any]]:
    """What is read of products."""
    captured = capture(finish, (*layer(rows)(torch.float32), *more))
    graph = read_graph(captured.graph.graph, captured.facts)
    return [each.captures for _, each in graph.readings.all("int8_matmul")]


ONES: dict[str, Callable[..., Tensor]] = {
    "a number": lambda y, c, one: y * 0.01 * c,
    "a scale [1]": lambda y, c, one: y * one * c,
    "a scale [1] behind that of channels": lambda y, c, one: y * c * one,
    "two scales [1]": lambda y, c, one: y * one * c * one.sin(),
    "a scale [1] times those of channels": lambda y, c, one: y * (one * c),
    "a scale []": lambda y, c, one: y * one[0] * c,
}


@pytest.mark.parametrize("by", ONES.values(), ids=ONES)
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.rotates(3)
def test_a_scale_of_the_whole_tensor_is_one_of_each_channel(by: Callable[..., Tensor], rows: int):
    def finish(x: Tensor, weight: Tensor, scale: Tensor, one: Tensor) -> Tensor:
        return by(product(int8(x * 8), weight).float(), scale, one).bfloat16()

    [found] = layers(finish, rows, fixed(ONE.clone()))
    assert found["scale"].shape == (24,)
    assert "tokens" not in found
    assert found["scale"].op in ("mul", "scale")


def test_the_scale_of_the_only_token_is_its_own():
    [found] = layers(lambda x, w, s, one: (product(int8(x * 8), w).float() * one * s).bfloat16(), 1, ONE)
    assert found["tokens"].shape == (1, 1)


def test_scales_of_tokens_and_of_the_whole_tensor_stand_side_by_side():
    def finish(x: Tensor, weight: Tensor, scale: Tensor, one: Tensor) -> Tensor:
        whole, tokens = quantised(x)
        return (product(whole, weight).float() * tokens * one * scale).bfloat16()

    [found] = layers(finish, 6, ONE)
    assert (found["tokens"].shape, found["scale"].op) == ((6, 1), "mul")


def test_scales_of_tokens_that_the_model_holds_are_those_of_tokens():
    tokens = fixed(COLUMN.clone())
    [found] = layers(lambda x, w, s, t: (product(int8(x * 8), w).float() * t * s).bfloat16(), 6, tokens)
    assert found["tokens"].shape == (6, 1)


def test_a_product_without_scales_of_tokens_is_read_below_a_sum():
    [found] = layers(lambda x, w, s: product(int8(x * 8), w).float() * s + x[:, : len(s)])
    assert not {"tokens", "bias"} & {*found}


HOLDERS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "int32": (lambda x: x.int().float(), True),
    "int16, as rows": (lambda x: x.to(torch.int16).view(-1, x.shape[-1]).float(), True),
    "float16": (lambda x: x.half().float(), True),
    "uint8": (lambda x: x.to(torch.uint8).float(), False),
    "truths": (lambda x: x.bool().float(), False),
}


@pytest.mark.parametrize(("held", "found"), HOLDERS.values(), ids=HOLDERS)
def test_int8_may_pass_through_what_holds_it(held: Callable[[Tensor], Tensor], found: bool):
    def finish(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return ((held(int8(x * 8)) @ weight.float().t()) * scale).bfloat16()

    assert bool(layers(finish)) == found


def test_products_of_batches_on_both_sides_are_told_nothing():
    def finish(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        heads = int8(x * 8).unflatten(-1, (2, -1)).transpose(0, 1).float()
        return (heads @ weight.unflatten(-1, (2, -1)).permute(1, 2, 0).float()) * scale

    graph = read_graph(capture(finish, layer(6)(torch.float32)).graph.graph)
    assert not graph.readings.missed("quantised_linear")


UNDER_SCALES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "a weight in floats": (lambda x, t, s: x * t, lambda w, s: w.exp()),
    "rows without a scale, by a weight in floats": (lambda x, t, s: x, lambda w, s: w.exp()),
    "rows in floats": (lambda x, t, s: x.exp(), lambda w, s: w * s[:, None]),
    "a weight without a scale": (lambda x, t, s: x * t, lambda w, s: w),
    "a scale of the whole weight besides": (lambda x, t, s: x * t, lambda w, s: w * s[:, None] * s[:1]),
}


@pytest.mark.parametrize(("left", "right"), UNDER_SCALES.values(), ids=UNDER_SCALES)
def test_operands_by_other_scales_are_left_alone(left: Callable[..., Tensor], right: Callable[..., Tensor]):
    def finish(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return left(whole.float(), tokens, scale) @ right(weight.float(), scale).t()

    graph = read_graph(capture(scaled(finish), layer(5)(torch.float32)).graph.graph)
    assert not graph.readings.all("int8_matmul")


OTHER_PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "floats": lambda x, t, w, s: (x.float().exp().bfloat16().float() @ w.float().t()) * t * s,
    "rows by their scale before": lambda x, t, w, s: (x.float() * t) @ w.float().t() * s,
    "a number that is added between": lambda x, t, w, s: (product(x, w).float() + 1) * t * s,
    "two scales of each token": lambda x, t, w, s: product(x, w).float() * t * t * s,
    "a factor of each number": lambda x, t, w, s: product(x, w).float() * (t + s) * s,
    "a matrix for each sequence": lambda x, t, w, s: (
        (x.float().view(2, -1, x.shape[-1]) @ w.float().view(2, -1, w.shape[-1]).mT)
        * t.view(2, -1, 1)
        * s[: len(s) // 2]
    ),
}


@pytest.mark.parametrize("finish", OTHER_PRODUCTS.values(), ids=OTHER_PRODUCTS)
def test_other_products_are_left_alone(finish: Callable[..., Tensor]):
    graph = read_graph(capture(scaled(finish), layer(6)(torch.float32)).graph.graph)
    assert not graph.readings.all("int8_matmul")


def test_a_product_ends_where_its_channels_are_taken_apart():
    def finish(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return (product(whole, weight).float() * tokens * scale).unflatten(-1, (2, -1)) * scale[: len(scale) // 2]

    given = layer(6)(torch.float32)
    graph = read_graph(capture(scaled(finish), given).graph.graph)
    [(value, _)] = graph.readings.all("int8_matmul")
    assert value.shape == (6, given[1].shape[0])


BOUNDED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "behind int32": (lambda x: x.round().int().clamp(-128, 127), False),
    "behind int16 and half": (lambda x: x.round().to(torch.int16).half().clamp(-128, 127), False),
    "above alone before int32": (lambda x: x.round().clamp(max=127).int().clamp(-128, 127), False),
    "below alone before int32": (lambda x: x.round().clamp(min=-128).int().clamp(-128, 127), False),
    "before int32": (lambda x: x.round().clamp(-128, 127).int(), True),
    "before and behind int32": (lambda x: x.round().clamp(-1000, 1000).int().half().clamp(-128, 127), True),
    "before a trunc": (lambda x: x.round().trunc().clamp(-128, 127), True),
}


@pytest.mark.parametrize(("bounded", "found"), BOUNDED.values(), ids=BOUNDED)
def test_numbers_by_a_constant_are_bounded_before_they_become_whole(bounded: Callable[[Tensor], Tensor], found: bool):
    def rows(x: Tensor, scale: Tensor) -> Tensor:
        return bounded(x / scale).to(torch.int8)

    graph = read_graph(capture(rows, (X, ONE)).graph.graph)
    assert bool(graph.readings.all("quantise")) == found
    reasons = [each.reason for _, each in graph.readings.missed("quantise")]
    assert found == (not any("numbers are cast to int32 before they are" in each for each in reasons))


def static_rows(quotient: Callable[..., Tensor], *inputs: Tensor) -> list[dict[str, Any]]:
    """What is read of static rows, and the reasons why they are none."""

    def rows(*given: Tensor) -> Tensor:
        return quotient(*given).clamp(-128, 127).to(torch.int8)

    graph = read_graph(capture(rows, inputs).graph.graph)
    assert not graph.readings.missed("quantise")
    assert all(each.reason for _, each in graph.readings.missed())
    return [each.captures for _, each in graph.readings.all("quantise")]


X, LINE, COLUMN, ONE = numbers(6, 8), numbers(8, seed=1), numbers(6, 1, seed=2), numbers(1, seed=3)
UNREAD: dict[str, tuple[Any, ...]] = {
    "a number is added alone": (lambda x: (x + 3).round(), X),
    "rows of scales of their own, cut": (lambda x, s: x / s + 3, X, COLUMN),
    "rows of factors of their own": (lambda x, s: (x * s + 3).round(), X, COLUMN),
    "a sum with a quotient": (lambda x, s: (x + 1 / s + 3).round(), X, COLUMN),
    "rows of tokens and heads by factors of their own": (
        lambda x, s: (x * s).round(), X.view(1, 3, 2, 8), numbers(1, 3, 2, 1),
    ),
    "a zero point of each channel": (lambda x, z, s: (x / s + z).round(), X, LINE.to(torch.int8), ONE),
    "times 0": (lambda x: (x * 0.0).round(), X),
    "an outer product": (lambda x, line: (x * line).round(), COLUMN, LINE),
    "heads by factors, cut": (lambda x, s: x * s, X.view(1, 3, 2, 8), numbers(3, 1, 1)),
    "heads of whole numbers by whole factors": (
        lambda x, s: (x * s).round(), X.view(1, 3, 2, 8).int(), numbers(3, 1, 1).int(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREAD.values(), ids=UNREAD)
def test_rows_that_no_constant_divides_are_left_alone(case: tuple[Any, ...]):
    assert not static_rows(*case)


def test_rows_in_other_whole_numbers_are_left_alone():
    def rows(x: Tensor, s: Tensor) -> Tensor:
        return (x / s).round().clamp(-128, 127).to(torch.int32)

    assert not read_graph(capture(rows, (X, ONE)).graph.graph).readings.all("quantise")


def test_the_scale_of_a_quotient_in_16_bits_is_as_the_model_holds_it():
    [found] = static_rows(lambda x, s: (x / s).round(), X.bfloat16(), ONE.bfloat16())
    assert found["scale"].op == "input"


UNBIASED: dict[str, tuple[Any, ...]] = {
    "a number for each token": (lambda x, more, s: ((x + more) / s).round(), X, COLUMN),
    "an outer sum": (lambda x, more, s: ((x + more) / s).round(), COLUMN, LINE),
    "a rotated token": (lambda x, more, s: ((x * more + x.flip(-1) * more.sin()) / s).round(), X[:1], LINE),
}


@pytest.mark.parametrize("case", UNBIASED.values(), ids=UNBIASED)
def test_what_is_no_number_of_each_channel_is_no_bias(case: tuple[Any, ...]):
    [found] = static_rows(*case, ONE)
    assert "bias" not in found
    assert found["x"].op == "add"


@pytest.mark.parametrize("tokens", [1, 6])
def test_numbers_of_each_channel_are_a_bias_of_any_tokens(tokens: int):
    [found] = static_rows(lambda x, line, s: ((x * 2 + line) / s).round(), X[:tokens], LINE, ONE)
    assert found["x"].shape == (tokens, 8)
    assert found["bias"].op == "input"


def test_products_of_whole_numbers_are_no_linear_layers():
    graph = read_graph(capture(by(quantised), layer(5)(torch.float32)).graph.graph)
    linear = [value for value, _ in graph.readings.all("linear")]
    assert not [value for value in linear if not value.dtype.is_floating_point]
