"""What values mean that are caches with new rows, or rows that a block table names."""

from fusion import word

_WRITE = {"cache": "as it was", "rows": "what is written", "axis": "of positions"}

WRITE = word("write", "rows from one position on, or from one of each sequence", **_WRITE, start="[] or [B]")
WRITE_ROWS = word("write_rows", "each row at a position of its own", **_WRITE, index="[S]")
WRITE_PLACES = word(
    "write_places", "each row at two positions", **_WRITE, index="of `axis`", inner="of the axis behind"
)
WRITE_SLICE = word("write_slice", "rows from a position that is known", **_WRITE, start="a number")
WRITE_INSIDE = word("write_inside", "a row at a position, nothing where it is outside", **_WRITE, position="[] or [B]")
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
