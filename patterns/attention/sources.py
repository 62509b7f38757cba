"""The facet of attention that says where its keys lie: in rows, or in the pages that a block table names.

    Rows        keys [B, M, T, D] and values [B, M, T, E]; or a latent [.., C] and its rotated lanes [.., Dr]
    Pages       the same gathered from pages, see `patterns.attention.varlen.pages`
    PagesNZ     the same from pages in blocks of NZ
    Segments    rows of several sequences, one after the other, each of which sees itself
    PagedSegments   the same, each in pages of its own
    NumberedSegments    rows of sequences of which data says where each ends

Each is a pair: `first` keys or a latent, `second` values or rotated lanes.
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

BESIDE = "log-sum-exps over rows come with one sequence beside the other"
IN_SEQUENCE = "segments of packed tokens are put to the operator one after the other"


@dataclass(frozen=True)
class Rows(Group):
    """Rows as they lie."""

    first: Any = tensor("*F W")
    second: Any = tensor("*G X")
    paged = False

    def terms(self, p) -> tuple[Any, Any]:
        """Of keys and values."""
        return self.first, self.second

    def latent_terms(self, p) -> tuple[Any, Any]:
        """Of a latent and its rotated lanes."""
        return self.terms(p)

    def refuse_blocks(self, *widths: int) -> None:
        """Refuse blocks of NZ of other widths; rows have none."""

    def read(self, batch: Any, heads: Any = 1) -> list[Tensor]:
        """A latent and its rotated lanes, if any, as the operator reads them: [B, T, 1, C] and [B, T, 1, Dr]."""
        parts = (each for each in (self.first, self.second) if each is not None)
        return [each.reshape(batch, -1, 1, each.shape[-1]) for each in parts]

    def keys(self, batch: Any) -> Any:
        """How many keys each sequence has of a latent [B, .., T, C] or, packed, [B · T, C]."""
        lead: Any = self.first.shape[:-1]
        return prod(lead[1:]) if len(lead) > 1 and lead[0] == batch else prod(lead) // batch

    def posed(self, queries: Any, seen: Any, keys: Any) -> tuple[Any, Any]:
        """Queries and what they see; behind a mask the mean of all values, for a query without keys, is computed."""
        means = isinstance(seen, Dense) and seen.levels is None
        return (queries, seen) if means else seen.posed(queries, keys)

    def spec(self, spec: MaskSpec, queries: Any, keys: Any, latent: bool) -> MaskSpec:
        """A mask as the operator takes it: over a latent it counts causal orders from the last key."""
        return spec.from_last(queries, keys) if latent and spec.kind == "causal_upper_left" else spec

    def lengths(self, spec: MaskSpec, q: Tensor) -> Any:
        """How many keys are seen: one number for every sequence, a tensor [B], or None for all."""
        return spec.kv_lens if spec.kv_len is None else [spec.kv_len]

    def widened(self, mask: Tensor, batch: Any, keys: Any) -> Tensor:
        """A mask for every key that the operator reads."""
        return mask

    def arguments(self) -> dict[str, Any]:
        """What else the operator is told of rows: nothing."""
        return {}

    def batched(self, q: Tensor, seen: Any, call: Call, bias: Bias = UNBIASED) -> Parts:
        """One sequence beside the other; the order of heads and positions is that of the memory."""
        k, v = self.first, self.second
        width, queries = v.shape[3], q.shape[2]
        if k.shape[3] != width:
            require(isinstance(width, int) and width < k.shape[3], "values are wider than keys")
            v = pad(v, (0, k.shape[3] - width))
        keys = k.shape[2]
        (q,), seen = self.posed((q,), seen, keys) if call.int8 is None else seen.posed((q,), keys)
        lengths, asked = seen.asked(self, q, keys)
        heads = dict(num_query_heads=q.shape[1], num_key_value_heads=k.shape[1])
        last = calls.heads_last(k) and calls.heads_last(v)
        if last:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = not last and queries != 1 and calls.heads_last(q) and call.int8 is None
        layout = "BSND" if last else "BNSD_BSND" if mixed else "BNSD"
        asked |= bias.arguments(self.first.shape[2])
        y, lse = calls.fused(q, k, v, lengths, call, input_layout=layout, **heads, **asked)
        y = seen.restored(y[..., :width], last or mixed, self.second)
        return y.transpose(1, 2) if last or mixed else y, lse

    def as_heads(self, q: Tensor, seen: Any, call: Call) -> Parts:
        """The heads of all sequences as those of one, which all see the same."""
        batch, heads = q.shape[:2]
        parts = (q, self.first, self.second)
        lie_so = all(each.shape[0] == batch != 1 and calls.positions_first(each) for each in parts)
        require(lie_so, "sequences do not stand behind positions in memory")
        seen.refuse_own()
        q, k, v = map(calls.of_one, parts)
        y, lse = replace(self, first=k, second=v).batched(q, seen, call)
        y = y.unflatten(1, (batch, heads)).squeeze(0)
        return y, lse.unflatten(1, (batch, heads)).squeeze(0) if call.lse else lse

    def packed(self, q: Tensor, seen: Any, call: Call, **beside: Any) -> Parts:
        """One sequence after the other, told where each ends."""
        batch, queries, keys = q.shape[0], q.shape[2], self.first.shape[2]
        require(not call.lse, BESIDE)
        spec = seen.spec()
        require(spec.kv_lens is None and spec.kv_len is None, "only a part of the keys is seen")
        require(
            spec.kind != "causal_upper_left" or queries == keys, "packed sequences are causal towards their last key"
        )
        k, v = (each.transpose(1, 2).flatten(0, 1) for each in (self.first, self.second))
        ends, heads = calls.ends_of(batch, keys, q.device), self.first.shape[1]
        return calls.in_sequence(
            q, k, v, ends, call, num_key_value_heads=heads, **spec.towards_last().arguments(q.device, queries), **beside
        )

    def as_pages(self, q: Tensor, seen: Any, call: Call, **beside: Any) -> Parts:
        """Keys [B, M, T, D] as B pages of T keys, one for each sequence; queries packed."""
        k, v = self.first, self.second
        batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        require(not call.lse, BESIDE)
        together = isinstance(keys, int) and not calls.heads_last(k) and not calls.heads_last(v)
        require(together, "the keys of a head are no page: as many as are known before, lying together")
        (q,), seen = self.posed((q,), seen, keys)
        spec = seen.spec().from_last(queries, keys)
        table = torch.arange(batch, dtype=torch.int32, device=q.device).unsqueeze(1)
        y, lse = calls.in_sequence(
            q, k, v, calls.each_length(spec, q), call, num_key_value_heads=k.shape[1], block_table=table,
            block_size=keys, **spec.arguments(q.device, queries), **beside,
        )  # fmt: skip
        return seen.restored(y.transpose(1, 2), last=True).transpose(1, 2), lse

    def encoded(self, q: Tensor, scale: float) -> Tensor:
        """A whole sequence that attends to itself, by the operator for encoders."""
        return calls.encoder(q, self.first, self.second, scale)


class InSequence:
    """Segments of packed tokens, each of which sees its own keys alone.

    Attributes:
        ends, key_ends: where each segment of the queries, and of the keys, ends.
    """

    ends: Any
    key_ends: Any

    def attended(self, p) -> Any:
        """The word for attention of such segments."""
        return partial(p.segmented_attention, ends=self.ends, key_ends=self.key_ends)

    def batched(self, q: Tensor, seen: Any, call: Call, bias: Bias = UNBIASED) -> Parts:
        """They do not stand one beside the other."""
        require(False, IN_SEQUENCE)
        return q, q

    def as_pages(self, q: Tensor, seen: Any, call: Call, **beside: Any) -> Parts:
        """Nor are they a page each."""
        require(False, IN_SEQUENCE)
        return q, q

    def encoded(self, q: Tensor, scale: float) -> Tensor:
        """Nor whole sequences."""
        require(False, IN_SEQUENCE)
        return q

    def told(self, q: Tensor, seen: Any) -> dict[str, Any]:
        """Where queries end, and the mask of each segment."""
        return self.masked(q, seen) | dict(ends=list(self.ends))

    def masked(self, q: Tensor, seen: Any) -> dict[str, Any]:
        """The mask of each segment."""
        return seen.spec().towards_last().arguments(q.device, q.shape[2])


@dataclass(frozen=True)
class Segments(InSequence, Rows):
    """Segments in rows: keys [1, M, T, D] and values [1, M, T, E]."""

    ends: Any = attribute()
    key_ends: Any = attribute()

    def packed(self, q: Tensor, seen: Any, call: Call, **beside: Any) -> Parts:
        """As they lie, told where each ends."""
        k, v = (each.transpose(1, 2).flatten(0, 1) for each in (self.first, self.second))
        heads = self.first.shape[1]
        return calls.in_sequence(
            q, k, v, list(self.key_ends), call, num_key_value_heads=heads, **self.told(q, seen), **beside
        )


@dataclass(frozen=True)
class NumberedSegments(InSequence, Rows):
    """Segments in rows, of each token of which a number says the segment.

    Attributes:
        segment: these numbers, of T elements, which never fall from one token to the next.
        segments: below which number they are.
    """

    segment: Any = tensor("*T")
    segments: Any = attribute()

    def attended(self, p) -> Any:
        """The word for attention of such segments."""
        return partial(p.numbered_attention, segment=self.segment, segments=self.segments)

    def packed(self, q: Tensor, seen: Any, call: Call, **beside: Any) -> Parts:
        """As they lie, told where each ends: behind as many tokens as have no larger number. Some may be empty."""
        k, v = (each.transpose(1, 2).flatten(0, 1) for each in (self.first, self.second))
        ends = (self.segment.reshape(-1, 1) <= torch.arange(self.segments, device=q.device)).sum(0)
        heads = self.first.shape[1]
        return calls.in_sequence(q, k, v, ends, call, ends, num_key_value_heads=heads, **self.masked(q, seen), **beside)


@dataclass(frozen=True)
class PagedSegments(InSequence, Pages):
    """Segments in pages, of which each has a row of the block table [Segment, P]; `first` and `second` are all rows."""

    ends: Any = attribute()
    key_ends: Any = attribute()

    def terms(self, p) -> tuple[Any, Any]:
        """Of keys and values."""
        both = ((self.first, self.first_pages), (self.second, self.second_pages))
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        k, v = (p.paged_segments(rows=rows, pages=pages, **how) for rows, pages in both)
        return k, v

    def packed(self, q: Tensor, seen: Any, call: Call, **beside: Any) -> Parts:
        """Pages as they lie, up to the length of each segment."""
        heads = self.first.shape[1]
        k, v = self.read(1, heads)
        lengths = [end - start for start, end in pairwise((0, *self.key_ends))]
        return calls.in_sequence(
            q, k, v, lengths, call, num_key_value_heads=heads, **self.told(q, seen), **self.arguments(), **beside
        )


SOURCES: tuple[Any, ...] = (Rows, Pages, PagesNZ)
