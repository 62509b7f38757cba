"""Break-even number of queries, from which expanding keys and values of a latent costs less than absorption.

    absorbed, for each key:  queries · 2N (2C + Dr) flops, and its row [C + Dr] read once
    expanded, for each key:  2N C (D + E) flops to expand it, and queries · 2N (D + Dr + E) flops

A cost is the longer of computing and moving, as in the cost model; launches and the causal half are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from fusion import Target

MOST = 1 << 20
"""More queries than any sequence has: the end of the search."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention over a latent.

    Attributes:
        heads: N.
        rank: lanes C of the latent.
        width, rope: unrotated lanes D and rotated lanes Dr of a key.
        values: lanes E of a value.
        item: bytes of an element.
    """

    heads: int
    rank: int
    width: int
    rope: int
    values: int
    item: int = 2


def break_even(machine: Target, sizes: Sizes) -> int | None:
    """Return the least number of queries of a sequence from which expanding costs less on `machine`; None: never."""
    numbers = range(1, MOST + 1)
    place = bisect_left(numbers, True, key=lambda n: _expanded(machine, sizes, n) < _absorbed(machine, sizes, n))
    return numbers[place] if place < MOST else None


def _absorbed(machine: Target, sizes: Sizes, queries: int) -> float:
    """Estimate the microseconds on `machine` for each key, if `queries` queries absorb W_UK and W_UV."""
    row = sizes.rank + sizes.rope
    flops = 2.0 * queries * sizes.heads * (row + sizes.rank)
    return max(flops / machine.compute, row * sizes.item / machine.bandwidth)


def _expanded(machine: Target, sizes: Sizes, queries: int) -> float:
    """Estimate the microseconds on `machine` for each key, if keys and values of all heads are expanded, written, and
    read by `queries` queries.
    """
    made, read = sizes.width + sizes.values, sizes.width + sizes.rope + sizes.values
    making = max(
        2.0 * sizes.heads * sizes.rank * made / machine.compute, sizes.heads * made * sizes.item / machine.bandwidth
    )
    flops = 2.0 * queries * sizes.heads * read
    return making + max(flops / machine.compute, sizes.heads * read * sizes.item / machine.bandwidth)
