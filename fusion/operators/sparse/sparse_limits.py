"""Dims, dtypes and limits that the operators of sparse attention share: layouts, lengths in tensors, and pages.

The argument `keys` is "key" or "kv", as in the operator's `layout_key` or `layout_kv`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion.operators.dtype_sets import INT32
from fusion.operators.limits import LOWERINGS, Limit, only

_PAGED = "PA_BSND"
_LAYOUTS = (("BSND", "BSND"), ("TND", "TND"), ("BSND", _PAGED), ("TND", _PAGED))
_KEYS = {"BSND": "B U 1", "TND": "U 1", _PAGED: "Blocks Size 1"}


def by_layout(batched: str, packed: str) -> str:
    """Return the dims of a tensor in the layout of the query, with an alternative for each pair of layouts of query and
    keys: `batched` for BSND, `packed` for TND."""
    kinds = {"BSND": batched, "TND": packed}
    return " / ".join(f"layout_query={query}:{kinds[query]}" for query, _ in _LAYOUTS)


def dims(keys: str, widths: Mapping[str, str]) -> dict[str, str]:
    """Return argument -> declared dims for the arguments in the layout of the keys, the block table and the lengths.

    `widths` maps an argument in the layout of the keys to its last dim; `keys` is "key" or "kv".
    """
    key_dims = {
        name: " / ".join(f"layout_{keys}={layout}:{_KEYS[layout]} {width}" for _, layout in _LAYOUTS)
        for name, width in widths.items()
    }
    return key_dims | {"block_table": "B Pages", f"actual_seq_lengths_query actual_seq_lengths_{keys}": "B"}


def dtypes(keys: str) -> dict[str, frozenset[torch.dtype]]:
    """Return argument -> dtypes of the block table and the lengths: int32."""
    return {f"block_table actual_seq_lengths_query actual_seq_lengths_{keys}": INT32}


def host(keys: str) -> tuple[Limit, ...]:
    """Return the limits of every machine: no window, a block table exactly for paged keys, and lengths for packed
    queries and for keys that are packed or paged."""
    layout = f"layout_{keys}"
    everything = "no window is decomposed, and no kernel has one"
    return (
        Limit("sparse_mode in (0, 3)"),
        Limit("pre_tokens == 9223372036854775807", because=everything),
        Limit("next_tokens == 9223372036854775807", because=everything),
        *only(("block_table",), f"{layout} == '{_PAGED}'"),
        Limit("given(actual_seq_lengths_query)", when="layout_query == 'TND'"),
        Limit(f"given(actual_seq_lengths_{keys})", when=f"{layout} != 'BSND'"),
    )


def kernel(keys: str) -> tuple[Limit, ...]:
    """Return the limits of the kernels of every chip: dtypes of keys and sizes of pages."""
    return Limit("dtype(key) == dtype(query)"), *pages(keys)


def pages(keys: str) -> tuple[Limit, ...]:
    """Return the limits of the kernels on the sizes of pages."""
    return (Limit("Size % 16 == 0 and Size <= 1024", when=f"layout_{keys} == '{_PAGED}'"),)


def in_graphs(text: str, because: str) -> tuple[Limit, ...]:
    """Return the limit `text`, with the reason `because`, for every lowering but eager, where a call is launched as it
    is.
    """
    return tuple(Limit(text, lowering=lowering, because=because) for lowering in LOWERINGS if lowering != "eager")
