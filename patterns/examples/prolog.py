"""How the prologue of latent attention is tried: the examples of every store, and of the cells of all parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fusion import Example
from patterns.examples import (
    mla_prolog,
    mla_prolog_channels,
    mla_prolog_paged,
    mla_prolog_quantised,
    mla_prolog_quantised_paged,
    mla_prolog_tiles,
    mla_prolog_whole,
    prolog_cells,
)


def _under(name: str, examples: Iterable[Example]) -> Iterator[Example]:
    """Examples under a common name; where a store is refused, rows are left to the model."""
    for each in examples:
        yield replace(each, name=f"{name}: {each.name}", instead="Fresh" if each.refusal else "")


EXAMPLES = (
    *mla_prolog.EXAMPLES,
    *mla_prolog.ROW_EXAMPLES,
    *_under("pages", mla_prolog_paged.EXAMPLES),
    *_under("W8A8", mla_prolog_quantised.EXAMPLES),
    *_under("W8A8", mla_prolog_quantised.ROW_EXAMPLES),
    *_under("W8A8 pages", mla_prolog_quantised_paged.EXAMPLES),
    *_under("packed", mla_prolog_tiles.EXAMPLES),
    *_under("int8 by channel", mla_prolog_channels.EXAMPLES),
    *_under("int8 by tensor", mla_prolog_whole.EXAMPLES),
    *prolog_cells.EXAMPLES,
)
REJECTS = (
    *mla_prolog.REJECTS,
    *_under("pages", mla_prolog_paged.REJECTS),
    *_under("W8A8 pages", mla_prolog_quantised_paged.REJECTS),
    *_under("packed", mla_prolog_tiles.REJECTS),
    *_under("int8 by channel", mla_prolog_channels.REJECTS),
    *_under("int8 by tensor", mla_prolog_whole.REJECTS),
    *prolog_cells.REJECTS,
)

TRIED = {"mla_prolog": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
