"""Why rows and products that resemble quantised ones are left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.testing import capture
from patterns.examples.quantisation import by, layer, product, quantised, scaled
from tests.engine.graphs import read_graph


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


def number(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A number in place of the tokens' scales."""
    return (product(whole, weight).float() * 0.01 * scale).bfloat16()


def early_bias(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A bias that is scaled, too."""
    return ((product(whole, weight).float() * scale + bias) * tokens).bfloat16()


def residual(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A bias before any scale."""
    return ((product(whole, weight).float() + bias) * tokens * scale).bfloat16()


def cast_early(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Sums cast to float16."""
    return product(whole, weight).half() * tokens.half() * scale.half()


ROWS: tuple[tuple[Callable[..., Any], str], ...] = (
    (whole_tensor, "one scale is shared by several tokens"),
    (bounded_above, "the scale has an upper bound"),
    (cut, "numbers are cut off toward zero"),
    (tight, "bounded by -100 and 100"),
    (open_narrow, "without a bound a row may leave int8"),
    (faint, "scales are at least 0.01"),
    (static, "without a scale that is the largest of their row"),
)
PRODUCTS: tuple[tuple[Callable[..., Any], bool, str], ...] = (
    (no_channels, False, "no scale for each output channel"),
    (number, False, "a scale of the whole tensor"),
    (early_bias, True, "before all scales are in the product"),
    (residual, True, "something else than one bias"),
    (cast_early, False, "cast to float16, which ends at 65504"),
)


def misses(function: Callable[..., Any], bias: bool = False) -> set[tuple[str, str]]:
    graph = read_graph(capture(function, layer(5, bias=bias)(torch.bfloat16)).graph.graph)
    return {(each.rule, each.reason) for _, each in graph.readings.missed()}


@pytest.mark.parametrize(("quantise", "reason"), ROWS, ids=lambda each: getattr(each, "__name__", ""))
def test_rows_that_are_none(quantise: Callable[..., Any], reason: str):
    assert any(name == "dynamic_quant" and reason in why for name, why in misses(by(quantise)))


@pytest.mark.parametrize(("finish", "bias", "reason"), PRODUCTS, ids=lambda each: getattr(each, "__name__", ""))
def test_products_that_are_none(finish: Callable[..., Any], bias: bool, reason: str):
    assert any(name == "quant_matmul" and reason in why for name, why in misses(scaled(finish), bias))


def test_what_is_added_to_a_whole_product_or_gates_it_leaves_it_one():
    def gated(whole: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        y = (product(whole, weight).float() * tokens * scale).bfloat16()
        return y + torch.sigmoid(y) * y

    graph = read_graph(capture(scaled(gated), layer(5)(torch.bfloat16)).graph.graph)
    found = [value for value, _ in graph.readings.all("int8_matmul")]
    assert [value.dtype for value in found] == [torch.bfloat16]
    assert not graph.readings.missed("quant_matmul")


def test_products_of_whole_numbers_are_no_linear_layers():
    graph = read_graph(capture(by(quantised), layer(5)(torch.float32)).graph.graph)
    linear = [value for value, _ in graph.readings.all("linear")]
    assert not [value for value in linear if not value.dtype.is_floating_point]
