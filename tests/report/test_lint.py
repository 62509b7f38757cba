"""Linters: each finds its fault at its line; the mended model has none, and saves the launches that were promised."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

import fusion
from fusion.frontend.cli import app
from fusion.frontend.hf import Request, calls
from fusion.operators import ensure
from fusion.records import Refusal
from fusion.report.lint import LINTERS, Finding, findings, lint
from fusion.report.lint.near_misses import close_sizes
from fusion.report.report import Report

NARROW = torch.bfloat16
OPTIONS = {"target": "ascend910_93", "progress": False}


def tensor(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=NARROW)


def explained(model: Callable[..., Any], *inputs: Any) -> Report:
    return fusion.explain(model, *inputs, options=OPTIONS)


def product_in_float32(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.float() @ w.float()).to(x.dtype).relu()


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).relu()


def softmax_in_float32(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype) + x


def softmax(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x, dim=-1) + x


def island(x: torch.Tensor, y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return ((x.float() * y.float()).tanh() * gain.float()).to(x.dtype)


def narrow_island(x: torch.Tensor, y: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return (x * y).tanh() * gain


def promoted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * torch.sigmoid(y.float())).to(x.dtype)


def not_promoted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(y)


class Layers(nn.Module):
    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False, dtype=NARROW) for _ in range(3))
        self.shares = shares

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.mask(x) if self.shares else None
        for layer in self.layers:
            mask = self.mask(x) if shared is None else shared
            x = x + (layer(x) @ x.mT).masked_fill(mask, 0.0) @ x
        return x

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[-2])
        return places[:, None] < places


def accumulated(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    cache.copy_(cache.index_put((places,), rows, accumulate=True))
    return rows.relu()


def chosen(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    cache.copy_(torch.where((places > 2)[:, None], rows, cache))
    return rows.relu()


def norm(x: torch.Tensor, gain: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


def norm_without_eps(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype) * gain


def norms(between: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def model(x: torch.Tensor, gain: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for each in (norm, between, norm):
            x = each(x, gain) @ w
        return x

    return model


PAIRS = {
    "product": ("casts_around", product_in_float32, product, (tensor(8, 64), tensor(64, 64)), 3),
    "softmax": ("casts_around", softmax_in_float32, softmax, (tensor(8, 64),), 1),
    "island": ("float32_islands", island, narrow_island, (tensor(8, 64), tensor(8, 64), tensor(64)), 4),
    "promoted": ("float32_islands", promoted, not_promoted, (tensor(8, 64), tensor(8, 64)), 2),
    "norms": ("unfused_norms", norms(norm_without_eps), norms(norm), (tensor(8, 64), tensor(64), tensor(64, 64)), 6),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.rotates(3)
def test_a_fault_is_found_and_its_cure_saves_what_it_says(name: str):
    linter, faulty, mended, inputs, launches = PAIRS[name]
    before, after = explained(faulty, *inputs), explained(mended, *inputs)
    (finding,) = lint(before)
    assert finding.linter == linter
    assert Path(finding.where.rpartition(":")[0]) == Path(__file__)
    assert not lint(after)
    assert before.launches[1] - after.launches[1] == launches == finding.saves


def test_a_mask_of_each_layer_is_one_finding():
    reports = [explained(Layers(shares), tensor(1, 16, 64)) for shares in (False, True)]
    (finding,) = lint(reports[0])
    assert (finding.linter, finding.module) == ("rebuilt_masks", "")
    assert "3 times" in finding.what
    assert not lint(reports[1])
    before, after = (sum(each.after.bookkeeping for each in report.layers.values()) for report in reports)
    assert before - after == finding.saves == 4


@pytest.mark.parametrize("write", [accumulated, chosen])
def test_a_functional_write_of_a_cache_is_found(write: Callable[..., Any]):
    places = torch.arange(32) if write is chosen else torch.arange(4)
    rows = tensor(32, 64) if write is chosen else tensor(4, 64)
    report = explained(write, tensor(32, 64), rows, places)
    (finding,) = lint(report)
    assert finding.linter == "functional_writes"
    assert finding.cure in [each.reason for each in report.refusals]


def test_a_write_in_place_has_no_finding():
    def written(cache: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(2, places, rows)
        return rows.relu()

    assert not lint(explained(written, tensor(1, 4, 64, 64), tensor(1, 4, 1, 64), torch.tensor([3])))


def returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.float().softmax(-1)
    return wide, wide.to(x.dtype)


def table(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[:, None].float() * frequencies * 2
    return (angles.cos() * 1.5).to(NARROW), (angles.sin() * 1.5).to(NARROW)


def counter(steps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    steps.add_(1)
    state.mul_(0.5).add_(1.0)
    return state * 2


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (returned, (tensor(8, 64),)),
        (table, (torch.arange(8), torch.ones(32))),
        (counter, (torch.zeros(()), tensor(2, 4, 64))),
        (norm_without_eps, (tensor(8, 64), tensor(64))),
    ],
)
def test_what_no_change_makes_cheaper_has_no_finding(model: Callable[..., Any], inputs: tuple[Any, ...]):
    assert not lint(explained(model, *inputs))


@pytest.mark.parametrize(("width", "next_width"), [(40, 48), (48, None), (520, None)])
def test_the_next_multiple_is_named_where_it_fuses(width: int, next_width: int | None):
    heads = [tensor(1, 8, 128, width) for _ in range(3)]
    found = lint(explained(F.scaled_dot_product_attention, *heads))
    assert [each.linter for each in found] == ["close_sizes"] * (next_width is not None)
    assert all(f"make D {next_width}" in each.cure for each in found)
    if next_width is not None:
        wider = explained(F.scaled_dot_product_attention, *(tensor(1, 8, 128, next_width) for _ in range(3)))
        assert not list(close_sizes(wider.graphs[0].graph, wider.refusals))


@pytest.mark.parametrize(
    ("reason", "sizes"),
    [
        ("query: D (last dim) is 40; npu_x on ascend910b requires D % 16 == 0: D is the width", ["make D 48"]),
        ("x: N (dim 1) is 8, D is s27; npu_x on ascend910b requires (N + D) % 16 == 0, which is not proven: rows", []),
        (
            "block_size: 12; npu_x.y on ascend910b requires block_size % 16 == 0 and block_size <= 512",
            ["block_size 16"],
        ),
        ("x: D is 24; npu_x on ascend910b requires D % 16 == 0 and D <= 24", []),
        ("x: D is 24; npu_x on ascend910b requires D % 16 == 0 and N == 8", []),
        ("x: it is float64; npu_x on ascend910b requires x in float16, bfloat16", []),
    ],
)
def test_sizes_are_read_from_reasons(reason: str, sizes: list[str]):
    graph = torch.fx.Graph()
    found = list(close_sizes(graph, [Refusal("rule", reason, graph.placeholder("x"))]))
    assert len(found) == len(sizes)
    assert all(size in each.cure for size, each in zip(sizes, found, strict=True))


def test_a_layout_copy_between_fused_operators_is_found():
    ensure()

    def model(q: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        made = torch.ops.npu.npu_fused_infer_attention_score_v2(
            q, q, q, num_query_heads=4, num_key_value_heads=4, input_layout="BNSD"
        )[0]
        return torch.ops.npu.npu_rms_norm(made.transpose(1, 2).contiguous(), gain)[0]

    graph = make_fx(model, tracing_mode="fake")(tensor(1, 4, 32, 64), tensor(64)).graph
    (finding,) = findings(graph, ())
    assert (finding.linter, finding.saves) == ("layout_copies", 1)
    assert "npu_fused_infer_attention_score_v2 takes the layout" in finding.cure


def test_layers_alike_are_one_finding():
    layers = nn.Sequential(*(Cast() for _ in range(3)))
    (finding,) = lint(explained(layers, tensor(8, 64)))
    assert (finding.module, finding.times, finding.saves) == ("*", 3, 2)
    assert str(finding).endswith("(× 3)")


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().sigmoid().to(x.dtype) @ x.mT @ x


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_findings_and_exits_by_them(as_json: bool, tmp_path: Path):
    source = (
        "import torch\n\ndef wide(x):\n    return x.float().sigmoid().to(x.dtype)\n\ndef narrow(x):\n    return x * 2\n"
    )
    (tmp_path / "linted.py").write_text(source)
    arguments = ["--input", "bf16[8,64]", "--no-progress", *(["--json"] if as_json else [])]
    done = CliRunner().invoke(app, ["lint", f"{tmp_path}/linted.py:wide", *arguments])
    assert done.exit_code == 1
    if as_json:
        (found,) = [Finding(**each) for each in json.loads(done.stdout)]
        assert found.linter in LINTERS
        assert found.where == f"{tmp_path}/linted.py:4"
    else:
        assert "casts_around" in done.stdout
    done = CliRunner().invoke(app, ["lint", f"{tmp_path}/linted.py:narrow", *arguments])
    assert done.exit_code == 0, done.output


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v3", "gpt_oss"])
def test_models_that_fuse_wholly_have_no_finding(model_type: str, mode: str):
    call = next(iter(calls(Request(model_type, mode), [])))
    report = fusion.explain(call.model, *call.args, options=OPTIONS, **call.kwargs)
    assert report.launches[1] < report.launches[0]
    assert not lint(report)
