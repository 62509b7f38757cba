"""Where the latent lies that few queries attend to by atb.

Rows            [.., C] and rotated lanes [.., Dr]
Pages           those that a block table names, BSND or NZ
PagesInOrder    pages in NZ, in their own order, as many for each sequence
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusion import Group, attribute, require, tensor
from patterns.latent import attention_atb_call as atb
from patterns.latent import latent_calls

MODES = {"rows": "krope_ctkv", "heads": "krope_ctkv", "lines": "nzcache"}
"""How the operator is told in what layout pages lie; those of an int8 latent are "int8_nzcache"."""


@dataclass(frozen=True)
class Rows(Group):
    """The rows of a latent and of its rotated lanes, as they lie."""

    first: Any = tensor("*L C")
    second: Any = tensor("*R Dr")

    def latent_terms(self, p):
        """The latent and its rotated lanes."""
        return self.first, self.second

    def pages(self, batch: Any, int8: bool) -> atb.Pages:
        """As the operator reads them."""
        return atb.in_rows(batch, self.first, self.second)


@dataclass(frozen=True)
class Pages(Group):
    """Pages that a block table [B, P] names; `first` and `second` are the rows that the model gathers from them."""

    first: Any = tensor("*L")
    second: Any = tensor("*R")
    first_pages: Any = tensor("*P")
    second_pages: Any = tensor("*Q")
    block_table: Any = tensor("B P")
    size: Any = attribute()
    layout: Any = attribute()

    def latent_terms(self, p):
        """The latent and its rotated lanes."""
        return latent_calls.gathered(
            p, self.first, self.second, self.first_pages, self.second_pages, self.block_table, self.size, self.layout
        )

    def refuse_others(self) -> None:
        """Refuse pages that hold no int8 latent as the operator reads it."""
        require(self.layout == "lines", "the pages do not hold rows in lines of NZ")
        _refuse_blocks(self.first_pages, self.second_pages)

    def pages(self, batch: Any, int8: bool) -> atb.Pages:
        """As the operator reads them."""
        mode = "int8_nzcache" if int8 else MODES[self.layout]
        return atb.by_table((self.first_pages, self.second_pages), self.block_table, self.size, mode)


@dataclass(frozen=True)
class PagesInOrder(Group):
    """Pages in NZ, in their own order, as many for each sequence."""

    first: Any = tensor("Blocks A Size L")
    second: Any = tensor("Blocks R Size M")

    def latent_terms(self, p):
        """The latent and its rotated lanes."""
        return [p.reshaped(p.permuted(each, atb.LINES)) for each in (self.first, self.second)]

    def refuse_others(self) -> None:
        """Refuse pages that hold no int8 latent as the operator reads it."""
        _refuse_blocks(self.first, self.second)

    def pages(self, batch: Any, int8: bool) -> atb.Pages:
        """As the operator reads them."""
        return atb.in_nz(batch, self.first, self.second, "int8_nzcache" if int8 else "nzcache")


def _refuse_blocks(latents: Any, ropes: Any) -> None:
    latent_calls.of_line(latents.shape[-1], latent_calls.WHOLE_LINE)
    latent_calls.of_line(ropes.shape[-1])


Source = Rows | Pages | PagesInOrder
