"""Encodings: numbers of few bits n that stand for floats x = (n + offset) · scale.

    n = round(x / scale), scale = max|x| / bound        int8, integers of 4 bits packed in int32

An operator, a reader and a facet that speak of stored numbers name an `Encoding`: a format is one row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LINE = 32
"""Bytes in a line of a tensor in FRACTAL_NZ."""


@dataclass(frozen=True)
class Encoding:
    """A format of stored numbers, and which floats share a scale.

    Attributes:
        torch_dtype: dtype of the stored tensor.
        bound: largest number of a symmetric quantisation.
        granularity: floats that share a scale: those of a "token", of a "token and head", or of a "channel" of all
            tokens, which includes one scale for a head or for the tensor.
        axis: dims of the floats over which the scale is computed.
        packing: numbers in one element of `torch_dtype`.
    """

    torch_dtype: torch.dtype
    bound: float
    granularity: str = "token"
    axis: tuple[int, ...] = (-1,)
    packing: int = 1

    @property
    def name(self) -> str:
        """Return the name of the dtype as limits and reasons have it, such as "int8"."""
        return str(self.torch_dtype).removeprefix("torch.")

    @property
    def is_integer(self) -> bool:
        """Return True if the numbers are integers, to which a quotient is rounded before its cast."""
        return not self.torch_dtype.is_floating_point

    @property
    def range(self) -> tuple[float, float]:
        """Return the least and the largest number of the format."""
        if self.packing > 1:
            return -self.bound - 1, self.bound
        numbers = torch.iinfo(self.torch_dtype) if self.is_integer else torch.finfo(self.torch_dtype)
        return numbers.min, numbers.max

    @property
    def line(self) -> int:
        """Return how many elements of `torch_dtype` a line of FRACTAL_NZ has."""
        return LINE // self.torch_dtype.itemsize

    @property
    def code(self) -> int:
        """Return torch's number of the dtype by which a call of an operator asks for results of the encoding."""
        return CODES[self.torch_dtype, self.packing]

    def per(self, granularity: str, *axis: int) -> Encoding:
        """Return the encoding with another `granularity`, and with the dims `axis` if there are any."""
        return replace(self, granularity=granularity, axis=axis or self.axis)

    def scale(self, x: Tensor) -> Tensor:
        """Compute the scale max|x| / bound of `x` over the dims `axis`, which have size 1 in the result."""
        return x.abs().amax(self.axis, keepdim=True) / self.bound

    def stored(self, x: Tensor) -> Tensor:
        """Convert numbers `x` to the format: rounded to the nearest, halves to even, and within its range."""
        rounded = x.round() if self.is_integer else x
        return self._cast(rounded.clamp(*self.range))

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise floats `x`; return the numbers, and the scales without the dims `axis`: 0 for zeros alone."""
        scale = self.scale(x)
        quotient = x / scale.masked_fill(scale == 0, 1.0)
        return self._cast(quotient.round() if self.is_integer else quotient), scale.squeeze(self.axis).contiguous()

    def empty(self, x: Tensor) -> Tensor:
        """Return an empty tensor for the numbers of contiguous `x` [.., D]: packed, [.., D / packing]."""
        return x.new_empty((*x.shape[:-1], x.shape[-1] // self.packing), dtype=self.torch_dtype)

    def dequantised(self, n: Tensor, scale: Tensor, offset: Tensor | None = None) -> Tensor:
        """Compute (n + offset) · scale in the dtype of `scale`, for numbers `n` that are not packed."""
        wide = n.to(scale.dtype)
        return (wide if offset is None else wide + offset) * scale

    def _cast(self, numbers: Tensor) -> Tensor:
        """Cast `numbers` [.., D] of the format to `torch_dtype`; packed, they are [.., D / packing]."""
        if self.packing == 1:
            return numbers.to(self.torch_dtype)
        low, high = (numbers.to(torch.int8) & 15).to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        return (low | (high << 4)).contiguous().view(self.torch_dtype)


INT8 = Encoding(torch.int8, 127.0)
INT4 = Encoding(torch.int32, 7.0, packing=8)
"""Eight integers of 4 bits in an int32, the first in its lowest bits."""
FLOAT8 = Encoding(torch.float8_e4m3fn, 448.0)
CODES: Mapping[tuple[torch.dtype, int], int] = {(torch.int8, 1): 1, (torch.int32, 8): 16, (torch.float8_e4m3fn, 1): 24}
"""Dtype and packing -> torch's number of the dtype by which a call asks for such results: int8, quint4x2."""
STORED: Mapping[torch.dtype, Encoding] = {each.torch_dtype: each for each in (INT8, FLOAT8)}
"""Dtype of numbers that are not packed -> their encoding."""


def encoding_of(dtype: torch.dtype | None) -> Encoding | None:
    """Return the encoding whose numbers have `dtype`; None for the dtypes of floats, indices and masks."""
    return None if dtype is None else STORED.get(dtype)


def results(*among: Encoding) -> Mapping[int | None, Encoding]:
    """Return number of a dtype -> encoding of the results `among` of an operator, for a call without one int8."""
    return {None: INT8} | {each.code: each for each in among}
