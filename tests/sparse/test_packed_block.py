"""A block of sparse attention over packed tokens and pages is the same operators in whatever words it is written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fusion
from fusion.runtime.verification import relative_error

from .packed_block import EACH, PLAIN, Model, Sizes, Spelling, any_spelling, inputs

pytestmark = pytest.mark.rotates(6)

OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}
OPERATORS = {"npu::npu_mla_prolog_v3", "npu::npu_lightning_indexer", "npu::npu_sparse_flash_attention"}
EXTRA = {("index_rotation", "pairs_to_halves"): 1, ("index_rotation", "pairs"): 1, ("rotation", "complex_pairs"): 4,
         ("index_lanes", "written"): 2, ("weights", "wide"): 2}  # fmt: skip
"""Launches beside thirteen: pairs are rotated apart, a cache of pairs is written apart, `clone` copies queries and the
key, and weights in float32 are a product of their own of a cast matrix."""


def explained(layers: int, spelling: Spelling) -> fusion.Report:
    torch.manual_seed(0)
    model = Model(layers, spelling).bfloat16().eval()
    with torch.inference_mode():
        return fusion.explain(model, *inputs(model), options=OPTIONS)


def said(spelling: Spelling) -> str:
    return "-".join(spelling.values())


def by_turns() -> Iterator[Any]:
    """Yield the plainest, and every spelling of a part."""
    yield from (pytest.param(spelling, id=said(spelling)) for spelling in (PLAIN, *EACH))


@pytest.mark.rotates(12)
@pytest.mark.parametrize("spelling", by_turns())
def test_every_spelling_of_a_part_is_the_same_operators(spelling: Spelling):
    report = explained(1, spelling)
    assert set(report.ops) >= OPERATORS
    assert all("interleaved" in str(each) or "in pairs" in str(each) for each in report.refusals)


@pytest.mark.rotates
@pytest.mark.parametrize("spelling", [PLAIN, *EACH], ids=said)
def test_a_block_is_thirteen_launches(spelling: Spelling):
    """What is made once for all blocks apart, as tables are."""
    one, three = (explained(layers, spelling).launches[1] for layers in (1, 3))
    assert (three - one) / 2 <= 13 + sum(EXTRA.get(each, 0) for each in spelling.items())


@pytest.mark.parametrize("seed", [7, 8, *(pytest.param(each, marks=pytest.mark.rotates) for each in range(9, 40))])
def test_any_spelling_of_all_parts_is_the_same_operators(seed: int):
    spelling = any_spelling(seed)
    one, three = explained(1, spelling), explained(3, spelling)
    assert set(one.ops) >= OPERATORS
    assert all(three.ops[each] == 3 for each in OPERATORS)
    extra = sum(EXTRA.get(each, 0) for each in spelling.items())
    assert (three.launches[1] - one.launches[1]) / 2 <= 13 + extra


@pytest.mark.rotates(4)
def test_tables_of_all_layers_are_no_price_of_one():
    """Equal tables that many ropes turn are gone with all of these, and count for each by its share alone."""
    spelling = {"index_rotation": "pairs", "rotation": "complex_pairs", "tables": "looked_up"}
    assert explained(3, spelling).ops["npu::npu_mla_prolog_v3"] == 3


@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(each, marks=pytest.mark.rotates) for each in range(4, 24))])
def test_what_runs_is_as_exact_as_the_block(seed: int):
    """Outputs and caches; lists of all keys are equal, however their scores are rounded."""
    torch.manual_seed(seed)
    model = Model(1, any_spelling(seed), Sizes(listed=48)).bfloat16().eval()
    exact = copy.deepcopy(model).double()
    given: list[Any] = [inputs(model), inputs(model), inputs(exact, torch.float64)]
    torch.compiler.reset()
    with torch.inference_mode():
        plain = model(*given[0])
        fused = torch.compile(model, backend="cann_fusion", options=OPTIONS, dynamic=False)(*given[1])
        truth = exact(*given[2])
    results = [(*out, *each[3][0]) for out, each in zip((plain, fused, truth), given, strict=True)]
    for old, new, true in zip(*results, strict=True):
        assert relative_error(new, true) <= 1.5 * relative_error(old, true) + torch.finfo(torch.bfloat16).eps
