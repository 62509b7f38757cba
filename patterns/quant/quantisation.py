"""q = round(x / s + z): rows in int8, by a scale of each token or by constant scales.

    dynamic     s = max|x| / bound of each token, 127 for int8
    static      constant s and z of each head, of each channel or of all (C8), tensors or numbers

*Matches* the quotient, or the product with the inverse, and its rounding, with or without bounds that change nothing;
of dynamic scales also the maximum of |x|, and a rotation of x by a matrix such as Hadamard's, if nothing else reads the
rotated rows. *Replaces with* `npu_dynamic_quant` or `npu_quantize`, which compute in float32, or `npu_rotate_quant`,
which rounds the product as the layer does. A quotient halfway between two integers, or one that the model rounds to 16
bits before, may be rounded to the other of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Encoding, Group, Rule, attribute, encodings, lowering, pattern, require, scalar, tensor, variants
from patterns.quant.static_scales import ConstantScales, KnownScale


def quantised_rows(p, x, dtype, scheme="dynamic", encoding=encodings.INT8, **more):
    """Return the terms of `x` in `encoding`, and of its dynamic scales in `dtype`.

    `more` are captures of both words: `times`, a factor of the scales, and `axes`, the dims that share one.
    """
    scale = p.token_scale(x=x, encoding=encoding, dtype=dtype, **more)
    return p.quantise(x=x, scale=scale, encoding=encoding, dtype=dtype, scheme=scheme, **more), scale


class OneDim:
    """Mixin of rows that are the last dim of x alone."""

    encoding: Any

    def how(self) -> dict[str, Any]:
        """Return the capture of the encoding; the last dim is the default."""
        return {"encoding": self.encoding}


class Unrotated:
    """Mixin of rows `x` that the model does not rotate before it quantises them."""

    x: Any

    def terms(self, p) -> Any:
        """Return the term of the rows before they are quantised."""
        return self.x

    def refuse(self) -> None:
        """Accept any rows."""


@dataclass(frozen=True)
class Rows(OneDim, Unrotated, Group):
    """Rows that are not rotated, of the last dim alone."""

    x: Any = tensor("*B D")
    encoding: Any = attribute()

    def quantised(self) -> tuple[Tensor, Tensor]:
        """Emit npu_dynamic_quant: numbers [*B, D] and float32 scales [*B, 1]."""
        numbers, scale = _dynamic_quant(self.x, self.encoding)
        return numbers, scale.unsqueeze(-1)


@dataclass(frozen=True)
class RowsOfSeveralDims(Unrotated, Group):
    """Rows of several dims, `axes` of x, such as the heads and lanes of a token."""

    x: Any = tensor("*B D")
    axes: Any = attribute()
    encoding: Any = attribute()

    def how(self) -> dict[str, Any]:
        """Return the captures of rows of several dims: the dims, the scheme, and the encoding."""
        return {"axes": self.axes, "scheme": "several dims", "encoding": self.encoding}

    def quantised(self) -> tuple[Tensor, Tensor]:
        """Emit npu_dynamic_quant: numbers of the shape of x, and float32 scales of size 1 along `axes`."""
        order = [*(axis for axis in range(self.x.dim()) if axis not in self.axes), *self.axes]
        permuted = self.x.permute(order)
        numbers, scale = _dynamic_quant(permuted.flatten(-len(self.axes)), self.encoding)
        back = [order.index(axis) for axis in range(self.x.dim())]
        return numbers.reshape(permuted.shape).permute(back), scale[(..., *(None for _ in self.axes))].permute(back)


@dataclass(frozen=True)
class RotatedRows(OneDim, Group):
    """Rows multiplied by a matrix `rotation` [D, D], the weight of a linear layer, and by the number `factor`."""

    x: Any = tensor("*B D")
    rotation: Any = tensor("D D")
    is_parameter_only: Any = attribute()
    factor: Any = scalar()
    encoding: Any = attribute(encodings.INT8)

    def terms(self, p) -> Any:
        """Return the term of the rotated rows before they are quantised."""
        y = p.linear(x=self.x, weight=self.rotation, is_parameter_only=self.is_parameter_only)
        return p.maybe_scaled(y, self.factor)

    def refuse(self) -> None:
        """Refuse a `factor` that is not positive; a positive one multiplies the scale alone."""
        reason = (
            "rows: they are multiplied by {factor} behind the rotation; npu_rotate_quant requires a positive factor"
        )
        require(self.factor > 0, reason, factor=self.factor)


@dataclass(frozen=True)
class Quantisation(Rule):
    """Quantisation of rows to int8."""

    aliases = ("quantization", "quantise", "quantize", "dynamic_quant", "static_quant", "rotate_quant")

    def reference(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute `x` [*B, D] in int8 by `scale`, which broadcasts to x, or by max|x| / 127 of each token [*B, 1].

        Returns the int8 rows and the scale.
        """
        scale = x.float().abs().amax(-1, keepdim=True) / 127 if scale is None else scale
        return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale

    def within(self, rows: Any) -> frozenset[str]:
        """Name the norm before a static quantisation."""
        return frozenset({"encoded_norm"} if isinstance(rows, ConstantScales | KnownScale) else ())

    @pattern
    @variants(rows=(Rows, RowsOfSeveralDims, RotatedRows))
    def per_token(self, p, rows, dtype=attribute()):
        """round(x / s) in the encoding, and s = max|x| / bound of each row"""
        return quantised_rows(p, rows.terms(p), dtype, **rows.how())

    @pattern
    @variants(rows=(Rows, RowsOfSeveralDims, RotatedRows))
    def largest(self, p, rows, dtype=attribute(), times=scalar()):
        """round(x / s) in the encoding, and a multiple of s = max|x| / bound of each row, such as max|x| itself"""
        return quantised_rows(p, rows.terms(p), dtype, times=times, **rows.how())

    @pattern
    @variants(rows=(ConstantScales,))
    def by_channel(self, p, rows):
        """int8(round(x / scale + zero)), or x · scale + zero, of constants of each head or channel"""
        return p.int8_rows(**vars(rows))

    @pattern
    @variants(rows=(KnownScale,))
    def by_number(self, p, rows):
        """int8(round(x · by + shift)), of constant numbers"""
        return p.int8_by_number(**vars(rows))

    def guard(self, rows: Any):
        """Refuse rotated rows with a factor that is not positive."""
        rows.refuse()

    @lowering
    @variants(rows=(Rows, RowsOfSeveralDims))
    def dynamic(self, rows: Rows | RowsOfSeveralDims, dtype: torch.dtype, times: float | None):
        """Emit npu_dynamic_quant, rows as the last dim; multiply its scale by a factor, and cast it, if need be."""
        int8, scale = rows.quantised()
        return int8, _model_scale(scale, dtype, times)

    @lowering
    @variants(rows=(RotatedRows,))
    def rotated(self, rows: RotatedRows, dtype: torch.dtype, times: float | None):
        """Emit npu_rotate_quant on rows [T, D]; multiply its scale by a factor, and cast it, if need be."""
        lines = rows.x.reshape(-1, rows.x.shape[-1])
        int8, scale = torch.ops.npu.npu_rotate_quant(lines, rows.rotation.t(), dst_dtype=encodings.INT8.code)
        scale = scale if rows.factor == 1 else scale * rows.factor
        return int8.reshape(rows.x.shape), _model_scale(scale.reshape(*rows.x.shape[:-1], 1), dtype, times)

    @lowering
    @variants(rows=(ConstantScales, KnownScale))
    def static(self, rows: ConstantScales | KnownScale):
        """Emit npu_quantize on rows [*B, D] with constant scales; heads and channels are one dim."""
        return rows.quantised()

    @lowering
    @variants(rows=(ConstantScales,))
    def static_in_float32(self, rows: ConstantScales):
        """Emit npu_quantize on rows and scales cast to float32, for dtypes that it does not take."""
        dtypes = (rows.x.dtype, rows.scale.dtype)
        require(
            torch.float64 not in dtypes,
            "x: it or its scale is float64; npu_quantize requires less, float32 at most; cast both to float32",
        )
        return rows.quantised(torch.float32)


def _dynamic_quant(x: Tensor, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Emit npu_dynamic_quant of `x` [.., D] for results of `encoding`, int8 being the default of the operator."""
    return torch.ops.npu.npu_dynamic_quant(x, **({} if encoding == encodings.INT8 else {"dst_type": encoding.code}))


def _model_scale(scale: Tensor, dtype: torch.dtype, times: float | None) -> Tensor:
    """Return the scales [*B, 1] of the model: the operator's float32 `scale` times the factor `times`, in `dtype`."""
    return rounded_scale(scale if times is None else scale * times, dtype)


def rounded_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the operator's float32 `scale` to the dtype that the model holds its scale in.

    Raises:
        Refused: the model divides by scales in float16, in which small scales differ from the operator's.
    """
    require(
        dtype != torch.float16,
        "scales of tokens: the model divides by them in float16, which rounds below 6e-5; "
        "npu_dynamic_quant requires float32; compute them in float32",
    )
    return scale.to(dtype)
