"""Every cell of the facets of sparse attention: read in place with right numbers, or gathered for a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import Trial, trial
from tests.support.fused import call, calls, checked

from . import cells as sparse_cells
from .cells import LARGE, SMALL

pytestmark = pytest.mark.rotates(6)

RULE = next(each for each in installed().rules if each.name == "sparse_attention")
TABLES = "the latent and its rotated lanes have one"
NZ = "its pages are lines of NZ"
READ = {"rows": "LatentRows", "pages": "LatentPages"}
REASONS = {"NZ pages": NZ, "two tables": TABLES, "two sizes": TABLES, "NZ indexer": NZ}


def cells(s: sparse_cells.Sizes) -> list[Any]:
    """Return the product as parameters, by name."""
    return [pytest.param(example, id=example.name) for example in sparse_cells.cells(s)]


def tried(example: Example, target: str) -> Trial:
    return checked(trial(RULE, example, torch.bfloat16, options=Options(target=target, lower="eager")))


def fits(t: Trial, name: str) -> None:
    """The form is the one of the cell, and what it gathers has its reason."""
    listing, source, *_ = name.split(", ")
    (form,) = (each.match.form for each in t.outcome.chosen if each.match.rule is RULE)
    paged = "PagedIndexer" if listing == "paged indexer" else "Indexer"
    read = READ.get(source, "LatentRows")
    assert form == (f"by_places[{read}]" if listing == "list" else f"by_indexer[{paged}, {read}]")
    told = [each.reason for each in t.outcome.refusals if each.rule == RULE.name]
    for wanted in (REASONS[each] for each in (listing, source) if each in REASONS):
        assert any(wanted in each for each in told), told


@pytest.mark.rotates(16)
@pytest.mark.parametrize("example", cells(SMALL))
def test_a_cell_on_the_host(example: Example):
    fits(tried(example, "host"), example.name)


@pytest.mark.rotates(12)
@pytest.mark.parametrize("example", cells(LARGE))
def test_a_cell_on_a_chip(example: Example):
    t = tried(example, "ascend910_93")
    fits(t, example.name)
    listing, source, *_ = example.name.split(", ")
    attention = call(t, "npu.npu_sparse_flash_attention.default")
    assert (attention.kwargs.get("layout_kv") == "PA_BSND") == (source == "pages")
    if listing != "list":
        indexer = call(t, "npu.npu_lightning_indexer.default")
        assert (indexer.kwargs.get("layout_key") == "PA_BSND") == (listing == "paged indexer")
    gathers = len(calls(t, "aten.index.")) + len(calls(t, "aten.index_select"))
    assert gathers == (listing == "NZ indexer") + 2 * (source not in READ)
