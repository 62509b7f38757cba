"""The facet of attention that says in which numbers keys and values lie: in floats, or in int8 (C8).

    Floats      in the dtype of the queries
    Int8        k = (x + offset) · scale and v likewise, which the operator computes as it reads x

Scales are those of each channel, of each head or of all, or those of each token. What the dtype of the queries does not
hold as it is would be rounded, for all tokens alike: it is refused; scales of tokens are told in float32. An offset of
keys adds one number to all scores of a query, which a softmax does not see: the operator is not told it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, rounding, scalar, tensor
from patterns.attention.calls import Call
from patterns.cache import pages
from patterns.kit.int8_scales import exact_scale, scale_of

ALONE = "int8 keys are read with one sequence beside the other"


@dataclass(frozen=True)
class Floats(Group):
    """Floats, of which the operator is told nothing."""

    def terms(self, p, k, v) -> tuple[Any, Any]:
        """Keys and values, of the rows of a source."""
        return k, v

    def said(self) -> dict[str, Any]:
        """What the words for attention say of them: nothing."""
        return {}

    def refuse(self, source: Any, result: Any, sink: Any) -> None:
        """Refuse pages in other blocks of NZ."""
        source.refuse_blocks(pages.NZ, pages.NZ)

    def refuse_int8(self, operator: str) -> None:
        """Every operator reads them."""

    def told(self, call: Call, q: Tensor, source: Any) -> Call:
        """The call with what the operator is told of the numbers of a source."""
        return call


@dataclass(frozen=True)
class Int8(Floats):
    """int8, as the words `int8_keys` and `int8_values` say.

    Attributes:
        mixed: whether the model computes with them in another dtype than that of the queries.
    """

    k_scale: Any = tensor("One Mk Row Dk", optional=True)
    v_scale: Any = tensor("One Mv Row Dv", optional=True)
    v_offset: Any = tensor("One Mo Row Do", optional=True)
    k_by: Any = scalar()
    v_by: Any = scalar()
    v_offset_by: Any = scalar()
    v_shift: Any = scalar()
    shifted: Any = attribute()
    mixed: Any = attribute()

    def terms(self, p, k, v) -> tuple[Any, Any]:
        """As of floats."""
        offset = dict(offset=self.v_offset, offset_by=self.v_offset_by, shift=self.v_shift)
        keys = p.int8_keys(x=k, scale=self.k_scale, by=self.k_by, shifted=self.shifted)
        return keys, p.int8_values(x=v, scale=self.v_scale, by=self.v_by, **offset)

    def said(self) -> dict[str, Any]:
        """In which dtype the model computes with them."""
        return dict(mixed=self.mixed)

    def refuse(self, source: Any, result: Any, sink: Any) -> None:
        """Refuse offsets of keys where more than a softmax sees them, and pages in other blocks of NZ."""
        require(not self.shifted or (sink is None and not result.lse), "the offset of int8 keys does not cancel")
        source.refuse_blocks(pages.NZ_INT8, pages.NZ_INT8)

    def refuse_int8(self, operator: str) -> None:
        """Some do not."""
        require(False, "the operator {operator} reads no int8", operator=operator)

    def told(self, call: Call, q: Tensor, source: Any) -> Call:
        """Return the call with the scales; the operator gives keys and values in the dtype of the queries."""
        wide = torch.float32 if self.mixed else q.dtype
        with rounding("the keys and values that int8 stands for", wide, q.dtype):
            return replace(call, int8=self._scales(q, source))

    def _scales(self, q: Tensor, source: Any) -> TokenScales | Scales:
        """Return what the operator is told of keys and values."""
        if self.k_scale is not None and (self.k_scale.shape[0] != 1 or self.k_scale.shape[2] != 1):
            key, value = scale_of(self.k_scale, self.k_by, q.device), scale_of(self.v_scale, self.v_by, q.device)
            return TokenScales(key, value)
        key, value = exact_scale(self.k_scale, self.k_by, q), exact_scale(self.v_scale, self.v_by, q)
        return Scales(key, value, self._offset(q), source.first.shape[1])

    def _offset(self, q: Tensor) -> Tensor | None:
        """That of values, in the dtype of the queries."""
        whole, offset = float(self.v_shift), self.v_offset
        require(
            whole == round(whole) and abs(whole) <= 256,
            "the offset {whole:g} is no whole number of 8 bits",
            whole=whole,
        )
        if offset is None:
            return q.new_full((1,), whole) if whole else None
        held = offset.dtype in (torch.int8, q.dtype) and self.v_offset_by in (1, -1) and not whole
        require(held, "the dtype of the queries does not hold the offset of int8 values as it is")
        return offset.to(q.dtype) * self.v_offset_by


@dataclass(frozen=True)
class Scales:
    """What the operator is told of int8 keys and values.

    Attributes:
        key, value: scales that broadcast to [1, M, 1, D].
        offset: that of values, None without one.
        heads: M.
    """

    key: Tensor
    value: Tensor
    offset: Tensor | None
    heads: Any

    def arguments(self, q: Tensor, k: Tensor, layout: str) -> dict[str, Any]:
        """For queries and keys of a layout, by the names of the second version of the operator."""
        require(layout in ("BSND", "BNSD"), ALONE)
        told = {"dequant_scale_key": self.key, "dequant_scale_value": self.value}
        if self.offset is not None:
            told |= {"dequant_offset_key": torch.zeros_like(self.offset), "dequant_offset_value": self.offset}
        lines, one = k.dim() == 5, q.shape[1 if layout == "BSND" else 2] == 1
        if one and not lines and all(each.numel() == 1 for each in told.values()):
            return {name: each.reshape(1) for name, each in told.items()}
        if one and not lines and all(each.shape[-1] == 1 for each in told.values()):
            of_heads = {name: each.expand(1, self.heads, 1, 1).flatten() for name, each in told.items()}
            return dict(of_heads, key_quant_mode=2, value_quant_mode=2)
        width = q.shape[-1]
        alike = all(each.shape[-1] in (1, width) for each in told.values())
        require(alike, "int8 values are narrower than keys, and have scales of each channel")
        lead = (1, self.heads, 1) if one else (self.heads,)
        if lines:
            lead = (self.heads, 1) if layout == "BNSD" else (self.heads,)
        wide = {name: each.expand(1, self.heads, 1, width) for name, each in told.items()}
        fast = dict(inner_precise=1) if lines else {}
        return {name: each.reshape(*lead, width) for name, each in wide.items()} | fast


@dataclass(frozen=True)
class TokenScales:
    """What the operator is told of int8 keys and values with scales [B, M or 1, T, 1] of each token, in float32."""

    key: Tensor
    value: Tensor

    def arguments(self, q: Tensor, k: Tensor, layout: str) -> dict[str, Any]:
        """As of `Scales`."""
        require(layout in ("BSND", "BNSD"), ALONE)
        mode, dims = (1, (1, 0, 2)) if self.key.shape[1] == 1 else (3, (0, 1, 2))
        scales = [each.squeeze(-1).permute(dims).contiguous() for each in (self.key, self.value)]
        named = zip(("dequant_scale_key", "dequant_scale_value"), scales, strict=True)
        return dict(named, key_quant_mode=mode, value_quant_mode=mode)
