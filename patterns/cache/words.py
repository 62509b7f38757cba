"""What values mean that are caches with new rows, or rows that a block table names."""

from fusion import word

_WRITE = {"cache": "as it was", "rows": "what is written", "axis": "of positions"}

WRITE = word(
    "write",
    "rows along an axis, where one of these says",
    **_WRITE,
    start="[] or [B]: from one position on, or from one of each sequence", number="from this position on",
    index="[S]: each at a position of its own", inner="[S]: with `index` of `axis`, each at two: of the axis behind",
    position="[] or [B]: a row at a position, nothing where it is outside",
)  # fmt: skip
WRITE_PAGES = word(
    "write_pages",
    "rows at slots that count the rows of all pages",
    cache="[Block, Size, ..], or in NZ [Block, .., A, Size, L] where a row is A blocks", rows="what is written",
    slots="[Rows], missing where a place is not proven to lie in its page", nz_block="L, None for whole rows",
)  # fmt: skip
SLIDE = word("slide", "the last rows of a cache, and new ones behind them", **_WRITE)
PAGED_ROWS = word(
    "paged_rows",
    "rows[b, p · Size + o] = pages[block_table[b, p], o]",
    rows="the value, perhaps with other dims", pages="[Block, ..]", block_table="[B, P]", size="rows of a page",
    layout='"BSND", "BNSD" or "NZ": how a page lies',
)  # fmt: skip
GATHERED_PAGES = word(
    "gathered_pages",
    "the first rows of each sequence, one sequence behind the other",
    pages="[Block, Size, ..]", table="[B, P]", size="rows of a page",
    lengths="how many rows of every sequence are kept, one number or one for each", shape="of the value",
)  # fmt: skip
