"""Rows quantised to int8 and products of int8, and what the operators do not take.

Rows are multiples of 1 / 32 whose largest is odd: no quotient is halfway between two integers, so that every way
to write it gives the same ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion import Example
from tests.examples.inputs import Inputs, fixed, normal, tensors

K, N = 48, 24


def grid(seed: int, *shape: int) -> Tensor:
    """Float64 [*shape], about normal, the largest of each row odd / 32."""
    numbers = (normal(seed, *shape) * 32).clamp(-120, 120)
    largest = numbers.abs().amax(-1, keepdim=True)
    return numbers.scatter(-1, numbers.abs().argmax(-1, keepdim=True), largest + 1 - largest % 2) / 32


def weights(seed: int, *shape: int) -> Tensor:
    """int8."""
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def scales(seed: int, *shape: int) -> Tensor:
    """Multiples of 2⁻¹², about 2⁻⁷."""
    return torch.randint(16, 64, shape, generator=torch.Generator().manual_seed(seed)).float() / 2**12


def int8_layer(seed: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A weight and its scales."""
    return weights(seed, rows, columns), scales(seed + 1, rows) / 8


def layer(*rows: int, bias: bool = False, parameters: bool = True, k: int = K, n: int = N) -> Inputs:
    """x [*rows, K], weight [N, K] of int8, scale [N], a bias if asked for."""
    given = weights(1, n, k), scales(2, n), *([normal(3, n).float()] if bias else [])
    return tensors(grid(0, *rows, k), *(fixed(each) if parameters else each for each in given))


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 and its scale, computed in float32."""
    return divided(x, by_row(x))


def product(numbers: Tensor, weight: Tensor) -> Tensor:
    """Sums in int32."""
    return torch.ops.aten._int_mm(numbers.reshape(-1, numbers.shape[-1]), weight.t()).reshape(*numbers.shape[:-1], -1)


Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]


def scaled(finish: Callable[..., Tensor], quantise: Quantise = quantised) -> Callable[..., Tensor]:
    """`finish` of int8 rows, their scales, and the layer's tensors."""
    return lambda x, *layer: finish(*quantise(x), *layer)


def by(quantise: Quantise) -> Callable[..., Tensor]:
    """A linear layer behind this quantisation, with a result of float32."""
    return scaled(lambda rows, tokens, weight, scale: product(rows, weight).float() * tokens * scale, quantise)


def int8(x: Tensor, low: int = -128, high: int = 127) -> Tensor:
    """The nearest whole numbers."""
    return x.round().clamp(low, high).to(torch.int8)


def by_row(x: Tensor, largest: int = 127) -> Tensor:
    """A scale of each row."""
    return x.float().abs().amax(-1, keepdim=True) / largest


def divided(x: Tensor, scale: Tensor, low: int = -128, high: int = 127) -> tuple[Tensor, Tensor]:
    """Rows by their scale."""
    return int8(x.float() / scale, low, high), scale


def bounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale with a lower bound; multiplied by its inverse."""
    scale = x.abs().max(dim=-1, keepdim=True).values.float().clamp(min=1e-5) / 127.0
    return torch.round(x.float() * (1.0 / scale)).to(torch.int8), scale


def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """In the dtype of the model."""
    scale = x.abs().amax(dim=-1) / 127
    return int8(x / scale.unsqueeze(-1), -127), scale.unsqueeze(-1)


def shifted(x: Tensor) -> tuple[Tensor, Tensor]:
    """A number is added to the scale."""
    scale = by_row(x) + 1e-3
    return (x.float() / scale).round().to(torch.int8), scale


def without_last_dim(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale [*B], bounded before it divides."""
    scale = by_row(x).squeeze(-1)
    return int8(x.float() / scale.clamp(min=1e-8).unsqueeze(-1)), scale


def of_largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest magnitude in place of the scale; an inverse that is 1 for rows of zeros."""
    largest = by_row(x, 1)
    inverse = torch.where(largest == 0, 1.0, torch.tensor(127.0) / largest)
    return int8(x.float() * inverse), largest


def in_floats(x: Tensor) -> Tensor:
    """Rounded, and multiplied by its scale again."""
    scale = by_row(x)
    return (x.float() / scale).round() * scale


def joined(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two of the same, their scales joined."""
    scale = torch.cat((by_row(x), by_row(x)))
    return int8(torch.cat((x, x)).float() / scale), scale


ROW = tensors(grid(0, 5, K))
OF_OTHERS = by(lambda x: divided(x, by_row(x.roll(1, 0))))
FOUR_BITS = by(lambda x: divided(x, by_row(x, 7), -8, 7))
ROWS = (
    Example("divided by its scale", by(quantised), layer(5)),
    Example("a bound, and the inverse", by(bounded), layer(2, 3)),
    Example("in the model's dtype", by(narrow), layer(5)),
    Example("a shifted scale", by(shifted), layer(5), "a number is added to it"),
    Example("a scale without the last dim", without_last_dim, ROW),
    Example("the largest magnitudes", of_largest, ROW),
    Example("rounded in floats", in_floats, ROW, "stay floats"),
    Example("joined scales", joined, ROW, "they are joined, or repeated, before they"),
    Example("the scale of others", OF_OTHERS, layer(5), "rows are divided by that of others"),
    Example("four bits", FOUR_BITS, layer(5), "becomes 7; npu_dynamic_quant requires 127"),
)


def in_int32(numbers: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """`_int_mm`, then both scales."""
    return (product(numbers, weight).float() * tokens * scale).bfloat16()


def in_float32(numbers: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A linear layer of int8 in float32; the scales multiplied first."""
    return (linear(numbers.float(), weight.float()) * (tokens * scale.view(1, -1)) + bias).half()


def dequantised(numbers: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A linear layer of what was multiplied by its scales before."""
    return linear((numbers.float() * tokens).bfloat16(), (weight.float() * scale.unsqueeze(-1)).bfloat16())


def static_dequantised(x: Tensor, weight: Tensor, scale: Tensor, one: Tensor) -> Tensor:
    """The same of rows that have one scale."""
    return dequantised(int8(x.float() / one), one, weight, scale)


def doubled(numbers: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The same, with a scale of the whole tensor besides."""
    return dequantised(numbers, tokens * scale[:1], weight, scale)


def channels_first(numbers: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A linear layer of a weight that was multiplied by its scales before; rows by theirs behind it."""
    return (linear(numbers.float(), weight.float() * scale.unsqueeze(-1)) * tokens).bfloat16()


def other_dim(numbers: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A scale for each row of the sequence."""
    return in_int32(numbers, tokens, weight, scale[: numbers.shape[-2]].view(-1, 1))


def short(numbers: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Sums in float16."""
    return (linear(numbers.half(), weight.half()) * tokens.half() * scale.half()).half()


def static(x: Tensor, weight: Tensor, scale: Tensor, one: Tensor) -> Tensor:
    """A scale of the whole tensor times those of the channels."""
    return (product(int8(x.float() / one), weight).float() * (one * scale)).bfloat16()


def through_int32(x: Tensor, weight: Tensor, scale: Tensor, one: Tensor) -> Tensor:
    """The same, int8 in int32 before it is in float32, one scale after the other."""
    return (linear(int8(x.float() / one).int().float(), weight.float()) * one * scale).bfloat16()


def biased_before(numbers: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """A bias that is scaled, too."""
    return ((product(numbers, weight).float() + bias) * tokens * scale).bfloat16()


def experts(numbers: Tensor, tokens: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Two weights for the same rows."""
    weights, scales = weight.unflatten(0, (2, -1)), scale.view(2, 1, -1)
    return ((numbers.float()[None] @ weights.float().mT) * tokens * scales).bfloat16()


def whole(seed: int) -> Inputs:
    """x [5, K], weight [N, K] of int8, scale [N], and a scale [1]."""
    return tensors(grid(seed, 5, K), fixed(weights(1, N, K)), fixed(scales(2, N)), fixed(torch.tensor([2.0**-4])))


CHANNELS = scaled(lambda numbers, tokens, weight, scale: (product(numbers, weight) * scale).bfloat16())
PRODUCTS = (
    Example("sums in int32", scaled(in_int32), layer(5)),
    Example("a batch", scaled(in_int32), layer(2, 3, parameters=False)),
    Example("sums in float32, a bias", scaled(in_float32), layer(2, 3, bias=True)),
    Example("scales first", scaled(dequantised), layer(2, 3)),
    Example("scales first, one of all rows", static_dequantised, whole(0)),
    Example("scales first, one besides those of rows", scaled(doubled), layer(2, 3)),
    Example("scales of channels first", scaled(channels_first), layer(2, 3)),
    Example("one channel", scaled(in_int32), layer(5, n=1)),
    Example("channels alone", CHANNELS, layer(5)),
    Example("channels alone, and a number", lambda *given: CHANNELS(*given).float() * 0.3, layer(5)),
    Example("a scale of the whole tensor", static, whole(0)),
    Example("a scale of the whole tensor, through int32", through_int32, whole(0)),
    Example(
        "a bias before the scales",
        scaled(biased_before),
        layer(5, bias=True),
        "and added before all scales are multiplied",
    ),
    Example("two weights", scaled(experts), layer(5), "by 2 int8 weights in one product"),
    Example("a wide result", by(quantised), layer(5), "result: it is torch.float32"),
    Example("scales in the wrong dim", scaled(other_dim), layer(2, 3), "one of the product is neither of each token"),
    Example("sums in float16", scaled(short), layer(5), "computed in float16"),
)


def signs(size: int) -> Tensor:
    """A permutation of so many lanes, with signs."""
    numbers = torch.Generator().manual_seed(5)
    order, sign = torch.randperm(size, generator=numbers), torch.randint(0, 2, (size,), generator=numbers) * 2 - 1
    return torch.eye(size, dtype=torch.float64)[order] * sign


def turned(*rows: int, size: int = 128) -> Inputs:
    """x [*rows, D] and a matrix [D, D] that keeps the numbers of each row."""
    return tensors(grid(0, *rows), signs(size))


ROTATED = (
    Example("turned rows", lambda x, matrix: quantised(x @ matrix), turned(5, 128)),
    Example("turned heads, half as large", lambda x, matrix: quantised(linear(x, matrix) * 0.5), turned(2, 3, 4, 128)),
    Example("the largest magnitudes of turned rows", lambda x, matrix: of_largest(x @ matrix), turned(5, 128)),
    Example(
        "turned, negative",
        lambda x, matrix: quantised((x @ matrix) * -0.5),
        turned(5, 128),
        "multiplied by -0.5",
        instead="[Rows]",
    ),
)

TRIED = {"quantisation": (*ROWS, *ROTATED), "quantised_linear": PRODUCTS}
