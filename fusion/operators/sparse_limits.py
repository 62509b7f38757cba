"""What the operators of sparse attention take: layouts, lengths in tensors, and pages, under each operator's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusion.operators.contract import Limit
from fusion.operators.dtypes import INT32

_PAGED = "PA_BSND"
_LAYOUTS = (("BSND", "BSND"), ("TND", "TND"), ("BSND", _PAGED), ("TND", _PAGED))
_KEYS = {"BSND": "B U 1", "TND": "U 1", _PAGED: "Blocks Size 1"}


@dataclass(frozen=True)
class Names:
    """What an operator calls the layout and the lengths of its keys."""

    layout: str
    lengths: str


def by_layout(batched: str, packed: str) -> str:
    """Dims of a tensor that lies like the query, for every pair of layouts."""
    kinds = {"BSND": batched, "TND": packed}
    return " / ".join(f"layout_query={query}:{kinds[query]}" for query, _ in _LAYOUTS)


def dims(names: Names, keys: Sequence[str], rope: str = "") -> dict[str, str]:
    """Dims of `keys` [.., D], of the keys `rope` [.., Dr], of the table, and of both lengths."""
    widths = {**dict.fromkeys(keys, "D"), **({rope: "Dr"} if rope else {})}
    of_keys = {
        name: " / ".join(f"{names.layout}={layout}:{_KEYS[layout]} {width}" for _, layout in _LAYOUTS)
        for name, width in widths.items()
    }
    of_table = {"block_table": "B Pages", "actual_seq_lengths_query": "B", names.lengths: "B"}
    return of_keys | of_table


def dtypes(names: Names) -> dict[str, frozenset[torch.dtype]]:
    """The table and the lengths are int32."""
    of_int = INT32
    return {"block_table": of_int, "actual_seq_lengths_query": of_int, names.lengths: of_int}


def host(names: Names) -> tuple[Limit, ...]:
    """What every machine asks for."""
    layout, lengths = names.layout, names.lengths
    everything = "no window is decomposed, and no kernel has one"
    return (
        Limit("sparse_mode in (0, 3)"),
        Limit("pre_tokens == 9223372036854775807", because=everything),
        Limit("next_tokens == 9223372036854775807", because=everything),
        Limit("given(block_table)", when=f"{layout} == '{_PAGED}'"),
        Limit("not given(block_table)", when=f"{layout} != '{_PAGED}'"),
        Limit("given(actual_seq_lengths_query)", when="layout_query == 'TND'"),
        Limit(f"given({lengths})", when=f"{layout} != 'BSND'"),
    )


def kernel(names: Names) -> tuple[Limit, ...]:
    """What the kernels of every chip ask for."""
    return (
        Limit("dtype(key) == dtype(query)"),
        Limit("Size % 16 == 0 and Size <= 1024", when=f"{names.layout} == '{_PAGED}'"),
    )
