"""q = round(x / s + z): rows in int8, by a scale of each token or by scales that the model holds.

    of tokens     s = max|x| / 127 of each
    held          s and z of each head, of each channel or of all (C8), tensors or numbers of the source

*Matches* the quotient, or the product with the inverse, and its rounding, with or without bounds that change nothing;
of tokens their largest magnitude as well, with rows as they are, or turned by a matrix such as Hadamard's, where
nothing else reads them. *Replaces with* `npu_dynamic_quant` or `npu_quantize`, which compute in float32, or
`npu_rotate_quant`, which rounds the product as the layer does. A quotient halfway between two whole numbers, or one
that the model rounds to 16 bits before, may go to the other of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.quant.constant_scales import HeldScales, KnownScale

INT8 = 1
"""The number by which the operator is told the dtype of its result."""


def quantised_rows(p, x, dtype, scheme="dynamic", **more):
    """Return the terms of rows `x` in int8, and of their scales in `dtype`; `more` is a factor, or the dims of rows."""
    scale = p.token_scale(x=x, dtype=dtype, **more)
    return p.quantise(x=x, scale=scale, dtype=dtype, scheme=scheme, **more), scale


class OneDim:
    """A row is the last dim."""

    def dims(self) -> dict[str, Any]:
        """Return which dims of x are a row, if not the last alone."""
        return {}


class Unturned:
    """Rows as they are."""

    x: Any

    def terms(self, p) -> Any:
        """Return x, which is quantised."""
        return self.x

    def refuse(self) -> None:
        """Accept any rows."""


@dataclass(frozen=True)
class Rows(OneDim, Unturned, Group):
    """Rows as they are."""

    x: Any = tensor("*B D")

    def quantised(self) -> tuple[Tensor, Tensor]:
        """Return int8 [*B, D] and float32 scales [*B, 1]."""
        whole, scale = torch.ops.npu.npu_dynamic_quant(self.x)
        return whole, scale.unsqueeze(-1)


@dataclass(frozen=True)
class RowsOfSeveralDims(Unturned, Group):
    """Rows of several dims `axes` of x, such as the heads and lanes of a token."""

    x: Any = tensor("*B D")
    axes: Any = attribute()

    def dims(self) -> dict[str, Any]:
        """Return which dims of x are a row, and the scheme of such rows."""
        return {"axes": self.axes, "scheme": "several dims"}

    def quantised(self) -> tuple[Tensor, Tensor]:
        """Return int8 of the shape of x and float32 scales with 1 in place of `axes`."""
        order = [*(axis for axis in range(self.x.dim()) if axis not in self.axes), *self.axes]
        turned = self.x.permute(order)
        whole, scale = torch.ops.npu.npu_dynamic_quant(turned.flatten(-len(self.axes)))
        back = [order.index(axis) for axis in range(self.x.dim())]
        return whole.reshape(turned.shape).permute(back), scale[(..., *(None for _ in self.axes))].permute(back)


@dataclass(frozen=True)
class RotatedRows(OneDim, Group):
    """Rows times a matrix [D, D], the weight of a layer, and perhaps times a positive number."""

    x: Any = tensor("*B D")
    rotation: Any = tensor("D D")
    is_parameter_only: Any = attribute()
    factor: Any = scalar()

    def terms(self, p) -> Any:
        """What is quantised."""
        y = p.linear(x=self.x, weight=self.rotation, is_parameter_only=self.is_parameter_only)
        return p.maybe_scaled(y, self.factor)

    def refuse(self) -> None:
        """A factor of all lanes is one of the scale alone, if it turns no sign."""
        why = "the turned rows are multiplied by {factor}, which is not positive"
        require(self.factor > 0, why, factor=self.factor)


@dataclass(frozen=True)
class Quantisation(Rule):
    """Quantisation of rows to int8."""

    aliases = ("quantization", "quantise", "quantize", "dynamic_quant", "static_quant", "rotate_quant")

    def reference(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The meaning: x [*B, D], a scale that broadcasts to it, None for max|x| / 127 of each token.

        Returns whole numbers [*B, D] and the scale, of tokens [*B, 1].
        """
        scale = x.float().abs().amax(-1, keepdim=True) / 127 if scale is None else scale
        return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale

    def within(self, rows: Any) -> frozenset[str]:
        """The norm before scales that are the same for all tokens."""
        return frozenset({"encoded_norm"} if isinstance(rows, HeldScales | KnownScale) else ())

    @pattern
    @variants(rows=(Rows, RowsOfSeveralDims, RotatedRows))
    def per_token(self, p, rows, dtype=attribute()):
        """Whole numbers and their scale."""
        return quantised_rows(p, rows.terms(p), dtype, **rows.dims())

    @pattern
    @variants(rows=(Rows, RowsOfSeveralDims, RotatedRows))
    def largest(self, p, rows, dtype=attribute(), times=scalar()):
        """Whole numbers, and of their scale a multiple, such as the largest magnitude itself."""
        return quantised_rows(p, rows.terms(p), dtype, times=times, **rows.dims())

    @pattern
    @variants(rows=(HeldScales,))
    def by_channel(self, p, rows):
        """By scales that are the same for all tokens, with or without a zero point."""
        return p.int8_rows(**vars(rows))

    @pattern
    @variants(rows=(KnownScale,))
    def by_number(self, p, rows):
        """Multiply by one number of the source, with or without a zero point."""
        return p.int8_by_number(**vars(rows))

    def guard(self, rows: Any):
        """What the rows are multiplied by."""
        rows.refuse()

    @lowering
    @variants(rows=(Rows, RowsOfSeveralDims))
    def dynamic(self, rows: Rows | RowsOfSeveralDims, dtype: torch.dtype, times: float | None):
        """One operator; a scale in 16 bits is cast, another multiple of it computed."""
        whole, scale = rows.quantised()
        return whole, _kept(scale, dtype, times)

    @lowering
    @variants(rows=(RotatedRows,))
    def rotated(self, rows: RotatedRows, dtype: torch.dtype, times: float | None):
        """One operator, which turns them as well."""
        lines = rows.x.reshape(-1, rows.x.shape[-1])
        whole, scale = torch.ops.npu.npu_rotate_quant(lines, rows.rotation.t(), dst_dtype=INT8)
        scale = scale if rows.factor == 1 else scale * rows.factor
        return whole.reshape(rows.x.shape), _kept(scale.reshape(*rows.x.shape[:-1], 1), dtype, times)

    @lowering
    @variants(rows=(HeldScales, KnownScale))
    def static(self, rows: HeldScales | KnownScale):
        """One operator, over rows whose scales are those of their last dim: heads and channels in one."""
        return rows.quantised()

    @lowering
    @variants(rows=(HeldScales,))
    def static_in_float32(self, rows: HeldScales):
        """The same over rows that are cast: scales have the dtype of `x`, which in float16 they do not divide."""
        dtypes = (rows.x.dtype, rows.scale.dtype)
        require(torch.float64 not in dtypes, "x or its scale is in float64; npu_quantize computes in float32")
        return rows.quantised(torch.float32)


def _kept(scale: Tensor, dtype: torch.dtype, times: float | None) -> Tensor:
    """Return the scales [*B, 1] of the model, of those in float32 that the operator gives."""
    return rounded_scale(scale if times is None else scale * times, dtype)


def rounded_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 scales in the dtype of the model.

    Raises:
        Refused: the model divides by scales of float16, of which faint ones are other numbers than the operator's.
    """
    require(
        dtype != torch.float16,
        "the scales of tokens: the model divides by them in float16, which thins out below 6e-5; the operator requires "
        "float32; compute them in float32",
    )
    return scale.to(dtype)
