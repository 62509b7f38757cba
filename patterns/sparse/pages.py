"""Pages as the operators of sparse attention read them: rows of one head, by one block table for each call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import attribute, require, tensor
from patterns.attention import calls
from patterns.attention.pages import Pages


@dataclass(frozen=True)
class LatentPages(Pages):
    """Pages of a latent and of its rotated lanes, each as the model names them."""

    layout: Any = attribute()
    rope_table: Any = tensor("B Q")
    rope_size: Any = attribute()
    rope_layout: Any = attribute()

    def terms(self, p) -> tuple[Any, Any]:
        """Both, by whatever tables."""
        of_rope = dict(block_table=self.rope_table, size=self.rope_size, layout=self.rope_layout)
        return super().terms(p)[0], p.paged_rows(rows=self.second, pages=self.second_pages, **of_rope)

    def refuse_blocks(self, *widths: int) -> None:
        """Refuse pages that the operator cannot read."""
        of_rows(self.layout, self.rope_layout)
        one = self.block_table is self.rope_table and self.size == self.rope_size
        require(
            one, "the pages of a latent and of its rotated lanes have block tables of their own: the operator has one"
        )

    def read(self, batch: Any, heads: Any = 1) -> list[Tensor]:
        """Both as [Block, Size, 1, D]."""
        return [read(each, self.size) for each in (self.first_pages, self.second_pages)]


def of_rows(*layouts: str) -> None:
    """Refuse blocks of NZ."""
    require(set(layouts) == {"BSND"}, "the operator reads pages as rows of tokens, not in blocks of NZ")


def read(pages: Tensor, size: Any) -> Tensor:
    """Pages as [Block, Size, 1, D]."""
    return calls.laid(pages, size).unsqueeze(2)
