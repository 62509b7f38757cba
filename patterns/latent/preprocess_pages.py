"""Pages of a latent and its rotated key as `npu_mla_preprocess` writes them, and the queries that are read beside them.

pages[slot] = k      rope_pages[slot] = k_r              or      pages[slot] = int8(k / s),  query = int8(q · s[head])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fusion import attribute, require, scalar, tensor
from patterns.attention.calls import laid
from patterns.cache.stores import Pages
from patterns.latent import latent_calls
from patterns.latent.preprocess_layers import scale_of


@dataclass(frozen=True)
class FloatPages(Pages):
    """Pages as BSND or in NZ, which the operator takes as their blocks: [Block, D / 16, Size, 16]."""

    def query(self, p, absorbed):
        """Queries as they are."""
        return absorbed

    def caches(self, tokens: Tensor, widths: tuple[Any, Any], like: Tensor) -> tuple[Tensor, Tensor]:
        """As the operator reads them."""
        return self._read(self.kv_cache), self._read(self.kr_cache)

    def _read(self, pages: Tensor) -> Tensor:
        require(pages.is_contiguous(), "the pages are not contiguous")
        if self.nz_block is None:
            return latent_calls.in_rows(pages, None)
        return laid(pages, pages.shape[-2], "lines").squeeze(1)

    def layout(self, tokens: Tensor) -> str:
        """How the pages hold their rows."""
        return "krope_ctkv" if self.nz_block is None else "nzcache"

    def factors(self, like: Tensor) -> dict[str, Any]:
        """Nothing is quantised."""
        return {}


@dataclass(frozen=True)
class Int8Pages(FloatPages):
    """The same in NZ of an int8 latent, by one scale, beside int8 queries, by a factor of each head."""

    kr_block: Any = attribute()
    kv_scale: Any = tensor("1", optional=True)
    kv_by: Any = scalar()
    kv_shift: Any = scalar()
    query_scale: Any = tensor("N")
    lanes: ClassVar[int] = latent_calls.WHOLE_LINE

    def query(self, p, absorbed):
        """int8 queries."""
        return p.quantise(x=absorbed, scale=self.query_scale, scheme="head")

    def written(self, p, latent, rope):
        """Both writes."""
        int8 = p.quantise(
            x=p.reshaped(latent), scale=self.kv_scale, by=self.kv_by, shift=self.kv_shift, scheme="static"
        )
        caches = (self.kv_cache, self.kr_cache)
        return latent_calls.written(p, caches, (int8, rope), self.slots, self.nz_block, self.kr_block)

    def guard(self, tokens: Any) -> None:
        """Refuse other pages than those in NZ, and a zero point of the latent."""
        require(None not in (self.nz_block, self.kr_block), "the pages hold whole rows, not lines of NZ")
        super().guard(tokens)
        latent_calls.of_line(self.kr_block)
        require(self.kv_shift == 0, "the latent is stored with a zero point")

    def layout(self, tokens: Tensor) -> str:
        """Blocks of both caches."""
        return "int8_nzcache"

    def factors(self, like: Tensor) -> dict[str, Any]:
        """What the latent is divided by, and the queries are multiplied by."""
        return dict(
            ctkv_scale=scale_of(self.kv_scale, self.kv_by, like), q_nope_scale=scale_of(self.query_scale, 1, like)
        )
