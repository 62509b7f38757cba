"""From how many queries on it costs less to expand keys and values of a latent than to absorb the projections.

    absorbed, for each key:  queries · 2N (2C + Dr) flops, and its line [C + Dr] read once
    expanded, for each key:  2N C (D + E) flops to expand it, and queries · 2N (D + Dr + E) flops

Both as the cost model has it, the longer of computing and moving; launches and the causal half are left out.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from fusion import Target

MOST = 1 << 20
"""More queries than any sequence has."""


@dataclass(frozen=True)
class Sizes:
    """Heads N, lanes of the latent C, of keys D and Dr, and of values E; bytes of a number."""

    heads: int
    rank: int
    width: int
    rope: int
    values: int
    item: int = 2


def break_even(machine: Target, of: Sizes) -> int | None:
    """The least number of queries of a sequence for which expanding costs less; None where it never does."""
    numbers = range(1, MOST + 1)
    place = bisect_left(numbers, True, key=lambda n: _expanded(machine, of, n) < _absorbed(machine, of, n))
    return numbers[place] if place < MOST else None


def _absorbed(machine: Target, of: Sizes, queries: int) -> float:
    """Microseconds for each key."""
    line = of.rank + of.rope
    flops = 2.0 * queries * of.heads * (line + of.rank)
    return max(flops / machine.compute, line * of.item / machine.bandwidth)


def _expanded(machine: Target, of: Sizes, queries: int) -> float:
    made, read = of.width + of.values, of.width + of.rope + of.values
    making = max(2.0 * of.heads * of.rank * made / machine.compute, of.heads * made * of.item / machine.bandwidth)
    flops = 2.0 * queries * of.heads * read
    return making + max(flops / machine.compute, of.heads * read * of.item / machine.bandwidth)
