"""Keys in pages, k[b, p · Size + o] = pages[block_table[b, p], o] (PagedAttention, Kwon et al., 2023).

    Pages       a page is [Size, M, D] or [M, Size, D]
    PagesNZ     a page of one head is stored as NZ blocks [D / 16, Size, 16]

The operator reads pages in place, up to the length of each sequence: the cache is not copied, and entries of the block
table beyond a length are not read.
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
from patterns.cache.pages import page_operand, refuse_others


@dataclass(frozen=True)
class Pages(Group):
    """Pages that are gathered by a block table [B, P].

    Attributes:
        first: the rows of keys, or of the latent, that the model gathers.
        second: the rows of values, or of rotated lanes, that the model gathers.
        first_pages: the pages of `first`.
        second_pages: the pages of `second`.
        block_table: the page of each block of each sequence.
        size: the number of rows of a page.
        layout: "BSND" for pages [Size, M, D], "BNSD" for [M, Size, D].
    """

    first: Any = tensor("*F")
    second: Any = tensor("*G")
    first_pages: Any = tensor("*K W")
    second_pages: Any = tensor("*V X")
    block_table: Any = tensor("B P")
    size: Any = attribute()
    layout: Any = attribute("BSND", "BNSD")
    paged = True

    def terms(self, p) -> tuple[Any, Any]:
        """Build the terms of the gathered rows of keys and values."""
        both = ((self.first, self.first_pages), (self.second, self.second_pages))
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        first, second = (p.paged_rows(rows=rows, pages=pages, **how) for rows, pages in both)
        return first, second

    def latent_terms(self, p) -> tuple[Any, Any]:
        """Build the terms of the gathered rows of a latent and of its rotated lanes, which may be reshaped."""
        first, second = self.terms(p)
        return p.reshaped(first), p.reshaped(second)

    def refuse_blocks(self, operator: str, *widths: int) -> None:
        """Refuse nothing: pages in BSND or BNSD have no NZ blocks."""

    def read(self, batch: Any, heads: Any = 1, operator: str = "npu_fused_infer_attention_score") -> list[Tensor]:
        """Return the pages of `first` and `second`, of `heads` heads, in the dims that `operator` takes; see
        `page_operand`.
        """
        both = (self.first_pages, self.second_pages)
        return [page_operand(each, self.size, operator, self.layout, heads) for each in both]

    def keys(self, batch: Any) -> Any:
        """Count the keys of a latent that the model gathers for each of `batch` sequences, at most P · Size."""
        page = self.first_pages.shape
        width = prod((*page[1:-2], page[-1])) if self.layout == "NZ" else page[-1]  # NZ: [Blocks, .., A, Size, L]
        return self.first.numel() // width // batch

    def posed(self, queries: Any, seen: Any, keys: Any) -> tuple[Any, Any]:
        """Set `queries` without a key to 0 and show them all keys, if plain attention gives the mean of all values."""
        return seen.posed(queries, keys)

    def spec(self, spec: MaskSpec, queries: Any, keys: Any, latent: bool) -> MaskSpec:
        """Return the mask `spec` for `queries` queries and `keys` keys with a lower-right causal order, over a `latent`
        or not.

        With a block table, the operator counts causal orders from the last key.
        """
        return spec.from_last(queries, keys)

    def lengths(self, spec: MaskSpec, q: Tensor) -> Any:
        """Return the number of visible keys of each sequence of `q` by the mask `spec`: a list of numbers, or a tensor
        [B].
        """
        return calls.each_length(spec, q)

    def widened(self, mask: Tensor, batch: Any, keys: Any) -> Tensor:
        """Pad `mask` [B or 1, 1, S, T] with True, for hidden, to all keys of the block table and `batch` sequences: [B,
        1, S, P · Size].
        """
        room = self.block_table.shape[1] * self.size
        mask = mask.expand(batch, -1, -1, -1)
        return mask if room == keys else pad(mask, (0, room - keys), value=True)

    def arguments(self) -> dict[str, Any]:
        """Return the block table in int32 and the page size as arguments of the operator."""
        return dict(block_table=self.block_table.int(), block_size=self.size)

    def batched(self, q: Tensor, seen: Any, call: Call, bias: Bias = UNBIASED) -> Parts:
        """Emit attention of queries `q` [B, N, S, D] over the pages, with the mask `seen` and `bias`.

        Returns the result [B, N, S, E] and the log-sum-exp.
        """
        heads, keys = self.first.shape[1:3]
        k, v = self.read(q.shape[0], heads)
        (q,), seen = self.posed((q,), seen, keys)
        lengths, masking = seen.lengths_and_mask(self, q, keys)
        masking |= bias.arguments(self.block_table.shape[1] * self.size)
        last = calls.heads_last(q) and k.dim() == 3
        y, lse = calls.fused(
            q.transpose(1, 2) if last else q, k, v, lengths, call, num_query_heads=q.shape[1],
            num_key_value_heads=heads, input_layout="BSND" if last else "BNSD", **masking, **self.arguments(),
        )  # fmt: skip
        y = seen.restored(y, last)
        return y.transpose(1, 2) if last else y, lse

    def by_atb(self, q: Tensor, seen: Any, scale: float) -> Tensor:
        """Emit attention of one query of each sequence, `q` [B, N, 1, D], by the operator of atb; `seen` gives the
        lengths.
        """
        require(
            self.layout == "BSND", "pages: they are not [Block, Size, N, D]; _npu_paged_attention requires that layout"
        )
        require(
            seen.window is None,
            "mask: it is a window; _npu_paged_attention requires that the query sees every key up to its length",
        )
        heads, keys = self.first.shape[1:3]
        k, v = (each.unflatten(-1, (heads, -1)) for each in self.read(q.shape[0], heads))
        (q,), seen = self.posed((q,), seen, keys)
        lengths, _ = seen.lengths_and_mask(self, q, keys)
        return seen.restored(calls.by_atb(q, k, v, self.block_table.int(), lengths, scale))

    def packed(self, q: Tensor, seen: Any, call: Call, **extra: Any) -> Parts:
        """Emit attention of the packed queries of all sequences over the pages, in layout TND, with the mask `seen`."""
        heads, keys = self.first.shape[1:3]
        k, v = self.read(q.shape[0], heads)
        (q,), seen = self.posed((q,), seen, keys)
        lengths, masking = seen.lengths_and_mask(self, q, keys)
        y, lse = calls.in_sequence(
            q, k, v, lengths, call, num_key_value_heads=heads, **masking, **self.arguments(), **extra
        )
        return seen.restored(y.transpose(1, 2), last=True).transpose(1, 2), lse

    def as_pages(self, q: Tensor, seen: Any, call: Call, **extra: Any) -> Parts:
        """Refuse every call: this lowering reads contiguous keys as pages, and pages have a block table of their
        own.
        """
        require(
            False, "keys: they are pages by a block table; a call that reads rows as pages requires contiguous keys"
        )
        return self.packed(q, seen, call, **extra)

    def encoded(self, q: Tensor, scale: float) -> Tensor:
        """Refuse every call: the operator for encoders reads no pages."""
        require(False, "keys: they are pages; npu_fusion_attention requires contiguous keys")
        return q


@dataclass(frozen=True)
class PagesNZ(Pages):
    """Pages of one head in NZ blocks, [Block, .., D / L, Size, L]."""

    layout: Any = attribute("NZ")

    def refuse_blocks(self, operator: str, *widths: int) -> None:
        """Refuse NZ blocks of other `widths` of lanes, those of the first and of the second pages."""
        for pages, width in zip((self.first_pages, self.second_pages), widths, strict=True):
            refuse_others(pages.shape[-1], operator, width)
