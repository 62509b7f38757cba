"""Keys in pages, k[b, p · Size + o] = pages[block_table[b, p], o] (PagedAttention, Kwon et al., 2023).

    Pages       a page lies as [Size, M, D] or [M, Size, D]
    PagesNZ     a page of one head lies in blocks of NZ, [D / 16, Size, 16]

The operator reads pages in place, up to the length of each sequence: no copy of a cache is made, and what a block table
says beyond a length is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from fusion import Group, attribute, require, tensor
from patterns.attention import calls
from patterns.attention.calls import Call, MaskSpec, Parts
from patterns.attention.masks.biases import UNBIASED, Bias
from patterns.cache.pages import refuse_others


@dataclass(frozen=True)
class Pages(Group):
    """Pages that a block table [B, P] names; `first` and `second` are the rows that the model gathers from them."""

    first: Any = tensor("*F")
    second: Any = tensor("*G")
    first_pages: Any = tensor("*K W")
    second_pages: Any = tensor("*V X")
    block_table: Any = tensor("B P")
    size: Any = attribute()
    layout: Any = attribute("BSND", "BNSD")
    paged = True

    def terms(self, p) -> tuple[Any, Any]:
        """Of keys and values."""
        both = ((self.first, self.first_pages), (self.second, self.second_pages))
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        first, second = (p.paged_rows(rows=rows, pages=pages, **how) for rows, pages in both)
        return first, second

    def latent_terms(self, p) -> tuple[Any, Any]:
        """Of a latent and its rotated lanes, perhaps with other dims."""
        first, second = self.terms(p)
        return p.reshaped(first), p.reshaped(second)

    def refuse_blocks(self, *widths: int) -> None:
        """Refuse blocks of NZ of other widths; these pages have none."""

    def read(self, batch: Any, heads: Any = 1) -> list[Tensor]:
        """Both as the operator reads them, see `calls.laid`."""
        return [calls.laid(each, self.size, self.layout, heads) for each in (self.first_pages, self.second_pages)]

    def keys(self, batch: Any) -> Any:
        """How many keys the model gathers of a latent for each sequence, at most P · Size."""
        page = self.first_pages.shape
        width = prod((*page[1:-2], page[-1])) if self.layout == "NZ" else page[-1]  # NZ: [Blocks, .., A, Size, L]
        return self.first.numel() // width // batch

    def posed(self, queries: Any, seen: Any, keys: Any) -> tuple[Any, Any]:
        """Queries and what they see, for which the operator gives the mean of all values to a query without keys."""
        return seen.posed(queries, keys)

    def spec(self, spec: MaskSpec, queries: Any, keys: Any, latent: bool) -> MaskSpec:
        """A mask as the operator takes it: by a block table it counts causal orders from the last key."""
        return spec.from_last(queries, keys)

    def lengths(self, spec: MaskSpec, q: Tensor) -> Any:
        """How many keys are seen of each sequence: numbers, or a tensor [B]."""
        return calls.each_length(spec, q)

    def widened(self, mask: Tensor, batch: Any, keys: Any) -> Tensor:
        """A mask [B or 1, 1, S, T] for every key that a table names, [B, 1, S, P · Size]."""
        room = self.block_table.shape[1] * self.size
        mask = mask.expand(batch, -1, -1, -1)
        return mask if room == keys else pad(mask, (0, room - keys), value=True)

    def arguments(self) -> dict[str, Any]:
        """The block table as the operator is told."""
        return dict(block_table=self.block_table.int(), block_size=self.size)

    def batched(self, q: Tensor, seen: Any, call: Call, bias: Bias = UNBIASED) -> Parts:
        """One sequence beside the other."""
        heads, keys = self.first.shape[1:3]
        k, v = self.read(q.shape[0], heads)
        (q,), seen = self.posed((q,), seen, keys)
        lengths, asked = seen.asked(self, q, keys)
        asked |= bias.arguments(self.block_table.shape[1] * self.size)
        last = calls.heads_last(q) and k.dim() == 3
        y, lse = calls.fused(
            q.transpose(1, 2) if last else q, k, v, lengths, call, num_query_heads=q.shape[1],
            num_key_value_heads=heads, input_layout="BSND" if last else "BNSD", **asked, **self.arguments(),
        )  # fmt: skip
        y = seen.restored(y, last)
        return y.transpose(1, 2) if last else y, lse

    def by_atb(self, q: Tensor, seen: Any, scale: float) -> Tensor:
        """One query of each sequence, by the operator of the transformer library."""
        require(self.layout == "BSND", "the operator of the transformer library reads whole rows of all heads")
        require(seen.window is None, "the operator of the transformer library sees all keys of a context")
        heads, keys = self.first.shape[1:3]
        k, v = (each.unflatten(-1, (heads, -1)) for each in self.read(q.shape[0], heads))
        (q,), seen = self.posed((q,), seen, keys)
        lengths, _ = seen.asked(self, q, keys)
        return seen.restored(calls.by_atb(q, k, v, self.block_table.int(), lengths, scale))

    def packed(self, q: Tensor, seen: Any, call: Call, **beside: Any) -> Parts:
        """One sequence after the other."""
        heads, keys = self.first.shape[1:3]
        k, v = self.read(q.shape[0], heads)
        (q,), seen = self.posed((q,), seen, keys)
        lengths, asked = seen.asked(self, q, keys)
        y, lse = calls.in_sequence(
            q, k, v, lengths, call, num_key_value_heads=heads, **asked, **self.arguments(), **beside
        )
        return seen.restored(y.transpose(1, 2), last=True).transpose(1, 2), lse

    def as_pages(self, q: Tensor, seen: Any, call: Call, **beside: Any) -> Parts:
        """Pages have a block table."""
        require(False, "a block table names the pages")
        return self.packed(q, seen, call, **beside)

    def encoded(self, q: Tensor, scale: float) -> Tensor:
        """Only rows are read so."""
        require(False, "the operator for encoders reads no pages")
        return q


@dataclass(frozen=True)
class PagesNZ(Pages):
    """The same of pages of one head in blocks of NZ, [Block, .., D / L, Size, L]."""

    layout: Any = attribute("NZ")

    def refuse_blocks(self, *widths: int) -> None:
        """Refuse blocks of NZ of other widths than these, of the first and of the second pages."""
        for pages, width in zip((self.first_pages, self.second_pages), widths, strict=True):
            refuse_others(pages.shape[-1], width)
