"""The facet of attention for the storage of keys and values: rows, or cache pages that a block table names.

    Rows            keys [B, M, T, D] and values [B, M, T, E]; or a latent [.., C] and its rotated lanes [.., Dr]
    Pages           the same operands gathered from pages, see `patterns.attention.varlen.pages`
    PagesNZ         the same operands gathered from pages in NZ blocks
    Segments        packed rows of segments, each of which attends to itself, with ends that are known when compiling
    PagedSegments   such segments, the keys and values of each in pages of its own
    SegmentsById    packed rows of segments by a tensor of segment ids

A source has two operands: `first` is keys or a latent, `second` is values or rotated lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion import Group, attribute, require, tensor
from patterns.attention import calls
from patterns.attention.calls import Call, MaskSpec, Parts
from patterns.attention.masks.biases import UNBIASED, Bias
from patterns.attention.masks.visibility import Dense
from patterns.attention.varlen.pages import Pages, PagesNZ
from patterns.kit.segments import segment_ends

LSE_BATCHED = (
    "log-sum-exp: the call is of packed sequences; npu_fused_infer_attention_score requires layout BNSD or "
    "BSND for the log-sum-exp of rows"
)
IN_SEQUENCE = "queries: they are packed tokens; this call requires batches [B, N, S, D]"


@dataclass(frozen=True)
class Rows(Group):
    """Keys `first` and values `second`, or a latent and its rotated lanes, as rows."""

    first: Any = tensor("*F W")
    second: Any = tensor("*G X")
    paged = False

    def terms(self, p) -> tuple[Any, Any]:
        """Return the terms of keys and values."""
        return self.first, self.second

    def latent_terms(self, p) -> tuple[Any, Any]:
        """Return the terms of a latent and its rotated lanes."""
        return self.terms(p)

    def refuse_blocks(self, operator: str, *widths: int) -> None:
        """Accept any `widths` of NZ blocks, which sources in pages require of both operands: rows have no blocks."""

    def read(self, batch: Any, heads: Any = 1) -> list[Tensor]:
        """Return the latent [B, T, 1, C] and its rotated lanes [B, T, 1, Dr], if any, as operands in layout BSND.

        `batch` is B; a latent has one head, so that `heads` is not used.
        """
        parts = (each for each in (self.first, self.second) if each is not None)
        return [each.reshape(batch, -1, 1, each.shape[-1]) for each in parts]

    def keys(self, batch: Any) -> Any:
        """Return the number of keys of each of `batch` sequences of a latent [B, .., T, C] or, packed, [B · T, C]."""
        lead: Any = self.first.shape[:-1]
        return prod(lead[1:]) if len(lead) > 1 and lead[0] == batch else prod(lead) // batch

    def posed(self, queries: Any, seen: Any, keys: Any) -> tuple[Any, Any]:
        """Prepare `queries` and `seen` so that a query without keys gives a mean of values, if it does in the model.

        Under a dense mask without levels nothing changes: `seen.restored` computes the mean.
        """
        means = isinstance(seen, Dense) and seen.levels is None
        return (queries, seen) if means else seen.posed(queries, keys)

    def spec(self, spec: MaskSpec, queries: Any, keys: Any, latent: bool) -> MaskSpec:
        """Return the mask `spec` as the operator takes it for `queries` queries and `keys` keys.

        Over a `latent`, an upper-left causal order becomes lower-right; else `spec` is returned.
        """
        return spec.from_last(queries, keys) if latent and spec.kind == "causal_upper_left" else spec

    def lengths(self, spec: MaskSpec, q: Tensor) -> Any:
        """Return the lengths of keys by the mask `spec`: [number] for all sequences, a number for each, a tensor [B],
        or None for all keys.
        """
        own = [*spec.kv_len] if isinstance(spec.kv_len, tuple) else [spec.kv_len]
        return spec.kv_lens if spec.kv_len is None else own

    def widened(self, mask: Tensor, batch: Any, keys: Any) -> Tensor:
        """Return `mask` padded to all keys that the operator reads; of rows it reads no others."""
        return mask

    def arguments(self) -> dict[str, Any]:
        """Return the block table as arguments of the operator; rows have none."""
        return {}

    def batched(self, q: Tensor, seen: Any, call: Call, bias: Bias = UNBIASED) -> Parts:
        """Call the operator on `q` [B, N, S, D] and its own keys and values, with the mask `seen` and `bias`.

        Returns the output [B, N, S, E] and its log-sum-exp [B, N, S, 1]. The layout is BSND if keys and values have it
        in memory; BNSD_BSND if queries alone have it; else BNSD. Values narrower than keys are padded.
        """
        k, v = self.first, self.second
        width, queries = v.shape[3], q.shape[2]
        if k.shape[3] != width:
            require(
                isinstance(width, int) and width < k.shape[3],
                "values: they have more lanes than keys; npu_fused_infer_attention_score requires at most as "
                "many; pad queries and keys with zeros",
            )
            v = pad(v, (0, k.shape[3] - width))
        keys = k.shape[2]
        (q,), seen = self.posed((q,), seen, keys) if call.encoded is None else seen.posed((q,), keys)
        lengths, masking = seen.lengths_and_mask(self, q, keys)
        heads = dict(num_query_heads=q.shape[1], num_key_value_heads=k.shape[1])
        last = calls.heads_last(k) and calls.heads_last(v)
        if last:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = not last and queries != 1 and calls.heads_last(q) and call.encoded is None
        layout = "BSND" if last else "BNSD_BSND" if mixed else "BNSD"
        masking |= bias.arguments(self.first.shape[2])
        y, lse = calls.fused(q, k, v, lengths, call, input_layout=layout, **heads, **masking)
        y = seen.restored(y[..., :width], last or mixed, self.second)
        return y.transpose(1, 2) if last or mixed else y, lse

    def as_heads(self, q: Tensor, seen: Any, call: Call) -> Parts:
        """Call the operator with batch 1 and B · N heads, where `q`, keys and values have the memory layout [S, B, N,
        D].

        The mask `seen` must be the same for all sequences.
        """
        batch, heads = q.shape[:2]
        parts = (q, self.first, self.second)
        is_outermost = all(each.shape[0] == batch != 1 and calls.positions_first(each) for each in parts)
        require(
            is_outermost,
            "queries, keys, values: memory is not [S, B, N, D]; a call with batch 1 and B * N heads requires "
            "that order",
        )
        seen.refuse_own()
        q, k, v = map(calls.batch_as_heads, parts)
        y, lse = replace(self, first=k, second=v).batched(q, seen, call)
        y = y.unflatten(1, (batch, heads)).squeeze(0)
        return y, lse.unflatten(1, (batch, heads)).squeeze(0) if call.lse else lse

    def packed(self, q: Tensor, seen: Any, call: Call, **extra: Any) -> Parts:
        """Call the operator on queries `q`, keys and values packed to [B · T, M, D] (layout TND), with the mask `seen`.

        The end of each sequence is given.
        """
        batch, queries, keys = q.shape[0], q.shape[2], self.first.shape[2]
        require(not call.lse, LSE_BATCHED)
        spec = seen.spec()
        require(
            spec.kv_lens is None and spec.kv_len is None,
            "keys: a window or a length leaves some out; a call of packed sequences requires all keys of each",
        )
        require(
            spec.kind != "causal_upper_left" or queries == keys,
            "mask: it is upper-left causal with other numbers of queries and keys; "
            "npu_fused_infer_attention_score requires lower-right causal for packed sequences; drop the "
            "keys behind the last query",
        )
        k, v = (each.transpose(1, 2).flatten(0, 1) for each in (self.first, self.second))
        ends, heads = calls.ends_of(batch, keys, q.device), self.first.shape[1]
        return calls.in_sequence(
            q, k, v, ends, call, num_key_value_heads=heads, **spec.towards_last().arguments(q.device, queries),
            **extra,
        )  # fmt: skip

    def as_pages(self, q: Tensor, seen: Any, call: Call, **extra: Any) -> Parts:
        """Call the operator on packed queries `q`, with the mask `seen` and the keys [B, M, T, D] in place, as B pages
        of T rows.
        """
        k, v = self.first, self.second
        batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        require(not call.lse, LSE_BATCHED)
        is_page = isinstance(keys, int) and not calls.heads_last(k) and not calls.heads_last(v)
        require(
            is_page,
            "keys: those of a head are not contiguous, or their number is symbolic; a call that reads them as "
            "a page requires both",
        )
        (q,), seen = self.posed((q,), seen, keys)
        spec = seen.spec().from_last(queries, keys)
        table = torch.arange(batch, dtype=torch.int32, device=q.device).unsqueeze(1)
        y, lse = calls.in_sequence(
            q, k, v, calls.each_length(spec, q), call, num_key_value_heads=k.shape[1], block_table=table,
            block_size=keys, **spec.arguments(q.device, queries), **extra,
        )  # fmt: skip
        return seen.restored(y.transpose(1, 2), last=True).transpose(1, 2), lse

    def encoded(self, q: Tensor, scale: float) -> Tensor:
        """Call npu_fusion_attention on full sequences, queries `q` [B, N, S, D], without a mask."""
        return calls.encoder(q, self.first, self.second, scale)


class InSequence:
    """Mixin of sources of packed segments, each of which attends to its own keys alone.

    Attributes:
        ends, key_ends: the end of each segment in the packed queries, and in the packed keys.
    """

    ends: Any
    key_ends: Any

    def attended(self, p) -> Any:
        """Return the builder of the term segmented_attention, with the ends of this source."""
        return partial(p.segmented_attention, ends=self.ends, key_ends=self.key_ends)

    def batched(self, q: Tensor, seen: Any, call: Call, bias: Bias = UNBIASED) -> Parts:
        """Refuse every call: packed segments are no batch."""
        require(False, IN_SEQUENCE)
        return q, q

    def as_pages(self, q: Tensor, seen: Any, call: Call, **extra: Any) -> Parts:
        """Refuse every call: the keys of packed segments are no pages."""
        require(False, IN_SEQUENCE)
        return q, q

    def encoded(self, q: Tensor, scale: float) -> Tensor:
        """Refuse every call: packed segments are no full sequences."""
        require(False, IN_SEQUENCE)
        return q

    def segment_arguments(self, q: Tensor, seen: Any) -> dict[str, Any]:
        """Return as arguments for queries `q` the ends of the segments in them, and the mask `seen` within each
        segment.
        """
        return self.mask_arguments(q, seen) | dict(ends=list(self.ends))

    def mask_arguments(self, q: Tensor, seen: Any) -> dict[str, Any]:
        """Return as arguments for queries `q` the mask `seen` within each segment; a causal order is lower-right."""
        return seen.spec().towards_last().arguments(q.device, q.shape[2])


@dataclass(frozen=True)
class Segments(InSequence, Rows):
    """Packed segments in rows, keys [1, M, T, D] and values [1, M, T, E], with ends that are known when compiling."""

    ends: Any = attribute()
    key_ends: Any = attribute()

    def packed(self, q: Tensor, seen: Any, call: Call, **extra: Any) -> Parts:
        """Call the operator in layout TND on `q` and packed keys and values, with the mask `seen` within each segment.

        `self.key_ends` are the ends of the segments.
        """
        k, v = (each.transpose(1, 2).flatten(0, 1) for each in (self.first, self.second))
        heads = self.first.shape[1]
        return calls.in_sequence(
            q, k, v, list(self.key_ends), call, num_key_value_heads=heads, **self.segment_arguments(q, seen), **extra
        )


@dataclass(frozen=True)
class SegmentsById(InSequence, Rows):
    """Packed segments in rows, keys [1, M, T, D] and values [1, M, T, E], given by segment ids.

    Attributes:
        segment: the segment id of each token, T elements that never decrease.
        segments: the number of segments; ids are less.
    """

    segment: Any = tensor("*T")
    segments: Any = attribute()

    def attended(self, p) -> Any:
        """Return the builder of the term for attention by segment ids, with the ids of this source."""
        return partial(p.numbered_attention, segment=self.segment, segments=self.segments)

    def packed(self, q: Tensor, seen: Any, call: Call, **extra: Any) -> Parts:
        """Call the operator in layout TND on `q` and packed keys and values, with the mask `seen` within each segment.

        The ends of the segments are counted from `self.segment`.
        """
        k, v = (each.transpose(1, 2).flatten(0, 1) for each in (self.first, self.second))
        ends = segment_ends(self.segment, self.segments)
        heads = self.first.shape[1]
        return calls.in_sequence(
            q, k, v, ends, call, ends, num_key_value_heads=heads, **self.mask_arguments(q, seen), **extra
        )


@dataclass(frozen=True)
class PagedSegments(InSequence, Pages):
    """Packed segments, the keys and values of each in pages of its own: row n of the block table [Segment, P] names
    those of segment n.

    `first` and `second` are the packed rows of all segments, as the model gathers them.
    """

    ends: Any = attribute()
    key_ends: Any = attribute()

    def terms(self, p) -> tuple[Any, Any]:
        """Return the terms of keys and values gathered from pages."""
        both = ((self.first, self.first_pages), (self.second, self.second_pages))
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        k, v = (p.paged_segments(rows=rows, pages=pages, **how) for rows, pages in both)
        return k, v

    def packed(self, q: Tensor, seen: Any, call: Call, **extra: Any) -> Parts:
        """Call the operator on packed queries `q`, with the mask `seen`, the pages in place, and the number of keys of
        each segment.
        """
        heads = self.first.shape[1]
        k, v = self.read(1, heads)
        lengths = [end - start for start, end in pairwise((0, *self.key_ends))]
        return calls.in_sequence(
            q, k, v, lengths, call, num_key_value_heads=heads, **self.segment_arguments(q, seen),
            **self.arguments(), **extra,
        )  # fmt: skip


SOURCES: tuple[Any, ...] = (Rows, Pages, PagesNZ)
