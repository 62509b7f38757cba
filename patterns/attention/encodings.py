"""The facet of attention for the encoding of keys and values: floats, or stored numbers (C8).

    Floats      keys and values in the dtype of the queries
    Encoded     k = (x + offset) · scale, and v likewise: the operator dequantises x as it reads x

Scales are per tensor, per head, per channel or per token: the granularity of the `Encoding`, which the reader proves.
Scales per token are passed in float32; all others in the dtype of the queries, and refused if that dtype rounds them,
which would change all tokens alike. An offset of keys adds one number to all scores of a query and cancels in the
softmax: the operator gets none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Encoding, Group, attribute, require, rounding, scalar, tensor
from patterns.attention.calls import Call
from patterns.cache import pages
from patterns.kit.int8_scales import exact_scale, scale_of

_OPERATOR = "npu_fused_infer_attention_score"
ALONE = (
    "int8 keys: the call is of packed sequences; npu_fused_infer_attention_score_v2 requires layout BNSD or "
    "BSND for int8 keys"
)
_MODES = {"token": (1, (1, 0, 2)), "token and head": (3, (0, 1, 2))}
"""Granularity -> key_quant_mode of the operator, and the order in which it takes the dims of scales [B, M or 1, T]."""


@dataclass(frozen=True)
class Floats(Group):
    """Keys and values in floats, without scales."""

    def terms(self, p, k, v) -> tuple[Any, Any]:
        """Return the terms of keys and values, given the terms `k` and `v` that a source gives."""
        return k, v

    def captures(self) -> dict[str, Any]:
        """Return the captures that the encoding adds to the words of attention."""
        return {}

    def refuse(self, source: Any, result: Any, sink: Any) -> None:
        """Refuse pages of `source` in NZ blocks of another width than floats have; any `result` and `sink` are
        taken.
        """
        source.refuse_blocks(_OPERATOR, pages.NZ, pages.NZ)

    def refuse_stored(self, operator: str) -> None:
        """Refuse stored numbers for an operator that reads floats alone; `operator` ends its name in the reason."""

    def with_scales(self, call: Call, q: Tensor, source: Any) -> Call:
        """Return `call` with the scales of the keys and values of `source`; floats have none."""
        return call


@dataclass(frozen=True)
class Encoded(Floats):
    """Keys and values of one encoding, with the captures of the words `encoded_keys` and `encoded_values`.

    Attributes:
        encoding: the Encoding of both; its granularity is that of the scales.
        k_scale, v_scale: [1, M or 1, 1, D or 1], or [B, M or 1, T, 1] per token; None for 1.
        v_offset: [1, M or 1, 1, D or 1]; None for 0.
        k_by, v_by, v_offset_by: numbers that multiply the tensors above.
        v_shift: a number that is added to stored values in addition to the offset.
        shifted: True if keys have an offset.
        mixed: True if the model dequantises to another dtype than that of the queries.
    """

    encoding: Any = attribute()
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
        """Return the terms of dequantised keys and values, given the terms `k` and `v` that a source gives."""
        offset = dict(offset=self.v_offset, offset_by=self.v_offset_by, shift=self.v_shift)
        keys = p.encoded_keys(x=k, encoding=self.encoding, scale=self.k_scale, by=self.k_by, shifted=self.shifted)
        values = p.encoded_values(x=v, encoding=self.encoding, scale=self.v_scale, by=self.v_by, **offset)
        return keys, values

    def captures(self) -> dict[str, Any]:
        """Return `mixed`, the capture that the encoding adds to the words of attention."""
        return dict(mixed=self.mixed)

    def refuse(self, source: Any, result: Any, sink: Any) -> None:
        """Refuse pages of `source` in NZ blocks of another width than a line of the encoding has.

        An offset of keys is refused with a `sink`, or with a `result` that has the log-sum-exp: it does not cancel
        there.
        """
        require(
            not self.shifted or (sink is None and not result.lse),
            "{name} keys: their offset stands beside a sink or a log-sum-exp, where it does not cancel; "
            "npu_fused_infer_attention_score requires keys without an offset there; quantise keys symmetrically",
            name=self.encoding.name,
        )
        source.refuse_blocks(_OPERATOR, self.encoding.line, self.encoding.line)

    def refuse_stored(self, operator: str) -> None:
        """Refuse the encoding for the operator with the name `operator`."""
        require(
            False,
            "keys, values: they are {name}; {operator} requires floats",
            operator=operator,
            name=self.encoding.name,
        )

    def with_scales(self, call: Call, q: Tensor, source: Any) -> Call:
        """Return `call` with the scales of the keys and values of `source`, in the dtype of queries `q`.

        A dtype of dequantised values that the operator narrows to that of `q` is declared as rounding, or refused.
        """
        wide = torch.float32 if self.mixed else q.dtype  # the operator dequantises to the dtype of the queries
        with rounding(f"the keys and values that {self.encoding.name} stands for", wide, q.dtype):
            return replace(call, encoded=self._scales(q, source))

    def _scales(self, q: Tensor, source: Any) -> TokenScales | Scales:
        """Return the scales as `TokenScales` if they are per token, else as `Scales` in the dtype of `q`.

        `source` has the keys, for their number of heads.
        """
        if self.encoding.granularity in _MODES:
            key, value = scale_of(self.k_scale, self.k_by, q.device), scale_of(self.v_scale, self.v_by, q.device)
            return TokenScales(self.encoding, key, value)
        scales = ((self.k_scale, self.k_by), (self.v_scale, self.v_by))
        key, value = (exact_scale(*each, q, _OPERATOR) for each in scales)
        return Scales(key, value, self._offset(q), source.first.shape[1])

    def _offset(self, q: Tensor) -> Tensor | None:
        """Return the offset of values in the dtype of `q`, which must represent it exactly; None for 0."""
        shift, offset = float(self.v_shift), self.v_offset
        require(
            shift == round(shift) and abs(shift) <= 256,
            "int8 keys, values: the offset is {whole:g}; npu_fused_infer_attention_score requires an "
            "integer from -128 to 127; round it",
            whole=shift,
        )
        if offset is None:
            return q.new_full((1,), shift) if shift else None
        exact = offset.dtype in (self.encoding.torch_dtype, q.dtype) and self.v_offset_by in (1, -1) and not shift
        require(
            exact,
            "{name} values: the dtype of the queries rounds their offset; npu_fused_infer_attention_score "
            "requires it exact in that dtype; store the offset in the dtype of the values, or of the queries",
            name=self.encoding.name,
        )
        return offset.to(q.dtype) * self.v_offset_by


@dataclass(frozen=True)
class Scales:
    """The scales of stored keys and values per tensor, head or channel, as arguments of the operator.

    Attributes:
        key, value: the scales, which broadcast to [1, M, 1, D].
        offset: the offset of values, which broadcasts likewise; None for 0.
        heads: M.
    """

    key: Tensor
    value: Tensor
    offset: Tensor | None
    heads: Any

    def arguments(self, q: Tensor, k: Tensor, layout: str) -> dict[str, Any]:
        """Return scales, offsets and their modes as arguments of version 2 of the operator, for queries `q` in
        `layout`.

        One query of each sequence over keys `k` in rows: [1] for one scale, [M] with mode 2 for scales of heads, [1, M,
        1, D] for others. Several queries: [M, D]. Keys in pages in NZ, of five dims: [M, 1, D] for BNSD, [M, D] for
        BSND. Wider scales are expanded.
        """
        require(layout in ("BSND", "BNSD"), ALONE)
        scales = {"dequant_scale_key": self.key, "dequant_scale_value": self.value}
        if self.offset is not None:
            scales |= {"dequant_offset_key": torch.zeros_like(self.offset), "dequant_offset_value": self.offset}
        nz, one = k.dim() == 5, q.shape[1 if layout == "BSND" else 2] == 1
        if one and not nz and all(each.numel() == 1 for each in scales.values()):
            return {name: each.reshape(1) for name, each in scales.items()}
        if one and not nz and all(each.shape[-1] == 1 for each in scales.values()):
            by_head = {name: each.expand(1, self.heads, 1, 1).flatten() for name, each in scales.items()}
            return dict(by_head, key_quant_mode=2, value_quant_mode=2)
        width = q.shape[-1]
        alike = all(each.shape[-1] in (1, width) for each in scales.values())
        require(
            alike,
            "int8 values: they have fewer channels than keys, and a scale of each channel; "
            "npu_fused_infer_attention_score_v2 requires as many channels as keys have, or one scale for each "
            "head",
        )
        lead = (1, self.heads, 1) if one else (self.heads,)
        if nz:
            lead = (self.heads, 1) if layout == "BNSD" else (self.heads,)
        wide = {name: each.expand(1, self.heads, 1, width) for name, each in scales.items()}
        fast = dict(inner_precise=1) if nz else {}
        return {name: each.reshape(*lead, width) for name, each in wide.items()} | fast


@dataclass(frozen=True)
class TokenScales:
    """The scales of stored keys and values per token, [B, M or 1, T, 1] in float32, as arguments of the operator."""

    encoding: Encoding
    key: Tensor
    value: Tensor

    def arguments(self, q: Tensor, k: Tensor, layout: str) -> dict[str, Any]:
        """Return scales, [1, B, T] if heads share them, else [B, M, T], and their modes as arguments of version 2.

        They are the same for all queries `q` and keys `k`, in the only layouts that are taken: BSND and BNSD.
        """
        require(layout in ("BSND", "BNSD"), ALONE)
        mode, dims = _MODES[self.encoding.granularity]
        scales = [each.squeeze(-1).permute(dims).contiguous() for each in (self.key, self.value)]
        named = zip(("dequant_scale_key", "dequant_scale_value"), scales, strict=True)
        return dict(named, key_quant_mode=mode, value_quant_mode=mode)
