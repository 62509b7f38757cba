"""Published inference code of latent attention: the prolog gives halves, the model's caches keep pairs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusion
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.runtime.verification import relative_error
from fusion.testing import LEVELS, Level, Trial, capture
from tests.models.latents import differences

from .inference import SIZES, Model, SparseModel, in_dtype

TARGET = "ascend910_93"
PROLOG, ATTENTION = "npu::npu_mla_prolog_v3", "npu::npu_fused_infer_attention_score_v2"
SPARSE = ("npu::npu_lightning_indexer", "npu::npu_sparse_flash_attention")
LAYERS = 2
BFLOAT16 = torch.bfloat16
OTHERS = [("core", 1), *((level, 16) for level in LEVELS)]
"""Levels and counts of tokens that are tried at night."""


def built(sparse: bool, dtype: torch.dtype = BFLOAT16, **how: Any) -> nn.Module:
    torch.manual_seed(0)
    return in_dtype(SparseModel(LAYERS) if sparse else Model(LAYERS, **how), dtype)


def tokens(count: int, seed: int = 1, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, SIZES.hidden, generator=torch.Generator().manual_seed(seed)).to(BFLOAT16)


def launches(report: fusion.Report, of: str) -> int:
    """Those of the second layer whose paths hold `of`."""
    return sum(layer.after.launches for path, layer in report.layers.items() if path.startswith(f"layers.1.{of}"))


def explained(model: nn.Module, count: int, at: int, **options: Any) -> fusion.Report:
    return fusion.explain(model, tokens(count), at, options={"target": TARGET, **options})


@pytest.mark.parametrize(
    ("count", "at", "lower"),
    [
        (1, 40, "eager"),
        *(pytest.param(*each, marks=pytest.mark.rotates) for each in [(16, 0, "eager"), (1, 40, "torchair")]),
    ],
)
def test_dense_attention_is_the_prolog_whose_rows_are_put_in_pairs(count: int, at: int, lower: str):
    report = explained(built(False), count, at, plan_lower=lower)
    assert {name: report.ops.get(name) for name in (PROLOG, ATTENTION)} == {PROLOG: LAYERS, ATTENTION: LAYERS}, report
    # norm, prolog, queries and keys in pairs, both writes, attention, W_UV, projection; four of the feed-forward layer
    assert launches(report, "attn") <= 10, report
    assert launches(report, "") <= 15, report


@pytest.mark.rotates
@pytest.mark.parametrize(("count", "at"), [(1, 40), (64, 0)])
def test_sparse_attention_is_the_prolog_beside_an_indexer(count: int, at: int):
    report = explained(built(True), count, at)
    assert report.ops.get(PROLOG) == LAYERS, report
    assert [report.ops.get(name) for name in SPARSE] == [LAYERS] * 2, report
    # norm, prolog, queries and keys in pairs, both writes; the indexer's layers (two are joined), norm, rotations,
    # products by its matrix, write and lists; attention, W_UV, projection; four of the feed-forward layer
    assert launches(report, "attn") <= 18, report
    assert launches(report, "") <= 22, report


@pytest.mark.rotates
def test_without_a_latent_of_queries_or_in_the_cache_there_is_no_prolog():
    for how in (dict(lora=False), dict(absorbs=False)):
        report = explained(built(False, **how), 1, 40)
        assert PROLOG not in report.ops
        assert report.ops[ATTENTION] == LAYERS, report


def stepped(model: nn.Module, run: Any) -> list[Tensor]:
    """A prompt and two tokens; results and caches."""
    dtype, at, results = next(model.parameters()).dtype, 0, []
    with torch.no_grad():
        for seed, count in enumerate((40, 1, 1)):
            results.append(run(tokens(count, seed).to(dtype), at))
            at += count
    return [*results, *(each for name, each in model.named_buffers() if "cache" in name)]


def exact(model: nn.Module) -> nn.Module:
    """The same in float64, tables too."""
    held = in_dtype(copy.deepcopy(model), torch.float64, torch.float64)
    held.register_buffer("freqs", held.get_buffer("freqs").to(torch.complex128), persistent=False)
    return held


@pytest.mark.parametrize("sparse", [False, pytest.param(True, marks=pytest.mark.rotates)])
def test_results_and_caches_are_as_near_as_those_of_the_model(sparse: bool):
    of = built(sparse)
    own, other = copy.deepcopy(of), copy.deepcopy(of)
    torch._dynamo.reset()
    fused = torch.compile(other, backend="cann_fusion", options={"target": TARGET, "lower": "eager"})
    truth = exact(of)
    every = zip(*(stepped(*each) for each in ((truth, truth), (own, own), (other, fused))), strict=True)
    for want, plain, have in every:
        assert relative_error(have, want) <= 1.5 * relative_error(plain, want) + torch.finfo(BFLOAT16).eps


@pytest.mark.parametrize(
    ("level", "count"),
    [("composite", 1), ("decomposed", 1), *(pytest.param(*each, marks=pytest.mark.rotates) for each in OTHERS)],
)
def test_the_formulas_are_the_same_in_float64(level: Level, count: int):
    captured = capture(built(False), (tokens(count), 40 if count == 1 else 0), level)
    fused = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    options = Options(target=TARGET, lower="eager", plan_lower="eager")
    outcome = fuse_graph(fused.graph, installed(), options, captured.facts)
    assert "mla_prolog" in {each.match.rule.name for each in outcome.chosen}
    fused.recompile()
    assert max(differences(Trial(installed(), captured, fused, outcome))) < 1e-12
