"""How rules are tried: the examples that are installed, and of the products of facets the cells that forms are of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from fusion import Example, Rule
from fusion.frontend.library import examples
from tests import examples as written
from tests.attention import facets
from tests.latent import prolog_cells
from tests.sparse import cells as sparse_cells


@cache
def declared() -> Mapping[str, tuple[Example, ...]]:
    """The examples and rejects of every rule, by its name: of this package, and of others that are installed."""
    return {**examples(), **written.tried()}


@cache
def tried() -> Mapping[str, tuple[Example, ...]]:
    """The examples, rejects and cells of every rule, by its name."""
    found = dict(declared())
    for module in (facets, prolog_cells, sparse_cells):
        found |= {rule: (*found[rule], *cells) for rule, cells in module.TRIED.items()}
    return found


def cases(rules: Iterable[Rule]) -> Iterator[tuple[Rule, Example]]:
    """Every one of these rules."""
    return ((rule, example) for rule in rules for example in tried()[rule.name])
