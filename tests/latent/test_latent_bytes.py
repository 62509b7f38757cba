"""Latent caches in int8 by channel, or in lines of bytes by tile: the prolog writes what plain code would write."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion import testing
from patterns.latent.prolog.kv_write import KvRmsnormRopeCache
from patterns.latent.prolog.prolog import MlaProlog
from tests.support.fused import call, calls
from tests.support.tried import cases

pytestmark = pytest.mark.rotates(8)

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCKS, SIZE, TILE, PROMPT = 8, 128, 128, 20
TABLE = torch.tensor([[3, 6], [0, 5]])
HE, HCQ, C, DR, D = 1024, 1536, 512, 64, 128
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "torchair"}


@pytest.fixture(scope="module")
def blocks() -> Iterator[ModuleType]:
    """Layers in whole numbers, norms and rotations of the examples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("deepseek_r1_w8a8")


class Kind(NamedTuple):
    """How a block stores its latents, which of its layers are quantised, and how it writes."""

    stored: str
    all_layers: bool = False
    by_block: bool = False
    heads: int = 8


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def written(cache: Tensor, rows: Tensor, slots: Tensor, by_block: bool) -> None:
    rows = rows.reshape(-1, *cache.shape[2:])
    if by_block:
        cache[slots // SIZE, slots % SIZE] = rows
    else:
        cache.view(-1, *cache.shape[2:])[slots] = rows


def whole(x: Tensor) -> Tensor:
    return x.round().clamp(-128, 127).to(torch.int8)


class Channels(nn.Module):
    """Pages of int8 by scales of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.latent_scale = nn.Parameter(torch.rand(C) / 64 + 1 / 64, requires_grad=False)
        self.rope_scale = nn.Parameter(torch.rand(DR) / 64 + 1 / 32, requires_grad=False)
        self.register_buffer("latents", torch.zeros(BLOCKS, SIZE, 1, C, dtype=torch.int8))
        self.register_buffer("ropes", torch.zeros(BLOCKS, SIZE, 1, DR, dtype=torch.int8))

    def write(self, latent: Tensor, rope: Tensor, slots: Tensor, by_block: bool) -> None:
        written(self.latents, whole(wide(latent) / self.latent_scale), slots, by_block)
        written(self.ropes, whole(wide(rope) / self.rope_scale), slots, by_block)

    def rows(self, table: Tensor) -> tuple[Tensor, Tensor]:
        both = ((self.latents, self.latent_scale), (self.ropes, self.rope_scale))
        latent, rope = (
            pages[table].reshape(table.shape[0], -1, each.shape[0]).to(each.dtype) * each for pages, each in both
        )
        return latent, rope


class Tiles(nn.Module):
    """Pages of lines of bytes; in float64 every number keeps its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lines", torch.zeros(BLOCKS, SIZE, 1, C + 2 * DR + 4 * (C // TILE), dtype=torch.int8))

    def write(self, latent: Tensor, rope: Tensor, slots: Tensor, by_block: bool) -> None:
        tiles = wide(latent).unflatten(-1, (-1, TILE))
        scale = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
        numbers, scale = whole(tiles / scale).flatten(-2), scale.squeeze(-1)
        parts = (numbers, rope, scale) if rope.dtype == torch.float64 else (
            numbers, rope.view(torch.int8), scale.view(torch.int8))  # fmt: skip
        written(self.lines, torch.cat(parts, dim=-1), slots, by_block)

    def rows(self, table: Tensor) -> tuple[Tensor, Tensor]:
        lines = self.lines[table].flatten(1, 3)
        exact = lines.dtype == torch.float64
        numbers, rope, scale = lines.split((C, DR, C // TILE) if exact else (C, 2 * DR, 4 * (C // TILE)), dim=-1)
        if not exact:
            rope, scale = rope.contiguous().view(torch.bfloat16), scale.contiguous().view(torch.float32)
        return (numbers.to(scale.dtype).unflatten(-1, (-1, TILE)) * scale.unsqueeze(-1)).flatten(-2), rope


class Attention(nn.Module):
    """Absorbed attention over the pages, which hold the tokens themselves already."""

    def __init__(self, blocks: ModuleType, kind: Kind) -> None:
        super().__init__()
        self.kind, self.quantise, self.rotate = kind, blocks.quantise, blocks.rotate
        n = kind.heads
        layer: Callable[..., nn.Module] = blocks.Int8Linear if kind.all_layers else nn.Linear
        how = {} if kind.all_layers else {"bias": False}
        self.norm, self.q_norm, self.kv_norm = (blocks.RMSNorm(size) for size in (HE, HCQ, C))
        self.q_a, self.kv_a = layer(HE, HCQ, **how), layer(HE, C + DR, **how)
        self.q_b, self.out = blocks.Int8Linear(HCQ, n * (D + DR)), blocks.Int8Linear(n * D, HE)
        self.kv_b = nn.Parameter(torch.randn(n, 2 * D, C) * C**-0.5)
        self.cache = {"channels": Channels, "tiles": Tiles}[kind.stored]()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        quantise, rotate, n = self.quantise, self.rotate, self.kind.heads
        x = self.norm(x)
        if self.kind.all_layers:
            rows = quantise(x)
            low, both = self.q_a(rows, x.dtype), self.kv_a(rows, x.dtype)
        else:
            low, both = self.q_a(x), self.kv_a(x)
        q = self.q_b(quantise(self.q_norm(low)), x.dtype)
        nope, turning = q.view(batch, tokens, n, D + DR).transpose(1, 2).split((D, DR), dim=-1)
        q_rope = rotate(turning, cos[:, None], sin[:, None])
        latent, rope = both.split((C, DR), dim=-1)
        self.cache.write(self.kv_norm(latent), rotate(rope, cos, sin), slots, self.kind.by_block)
        latent, rope = (each.to(x.dtype) for each in self.cache.rows(table))
        up_key, up_value = self.kv_b.split((D, D), dim=1)
        query = torch.einsum("bnsd,ndc->bnsc", nope, up_key)
        scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", q_rope, rope)
        at = lengths[:, None, None, None] - tokens + torch.arange(tokens)[:, None]
        seen = torch.arange(latent.shape[1]) <= at
        shares = (
            (wide(scores) * (D + DR) ** -0.5).masked_fill(~seen, torch.finfo(torch.float32).min).softmax(-1).to(x.dtype)
        )
        y = torch.einsum("bnst,btc->bnsc", shares, latent)
        y = torch.einsum("bnsc,nec->bsne", y, up_value).flatten(2)
        return self.out(quantise(y), x.dtype)


def made(blocks: ModuleType, kind: Kind, *dtypes: torch.dtype) -> list[Attention]:
    """The same block in some dtypes, its scales in float32 at least."""
    torch.manual_seed(0)
    state = Attention(blocks, kind).bfloat16().state_dict()
    found: list[Attention] = []
    for dtype in dtypes:
        block = Attention(blocks, kind)
        block.load_state_dict(state)
        block = block.to(dtype).eval().requires_grad_(False)
        for module in block.modules():
            for name, each in list(module._parameters.items()):
                if name.endswith("scale"):
                    setattr(module, name, nn.Parameter(each.to(torch.promote_types(dtype, torch.float32)), False))
        if dtype == torch.float64 and kind.stored == "tiles":
            block.cache.lines = torch.zeros(BLOCKS, SIZE, 1, C + DR + C // TILE, dtype=dtype)
        found.append(block)
    return found


def step(first: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Hidden states from position `first` on, tables, slots, the block table, lengths with these tokens."""
    positions = torch.arange(first, first + tokens).expand(2, -1)
    x = torch.randn(2, tokens, HE, generator=torch.Generator().manual_seed(first))
    angles = (positions[..., None] / 10000.0 ** (torch.arange(0, DR, 2) / DR)).repeat(1, 1, 2)
    slots = (TABLE.gather(1, positions // SIZE) * SIZE + positions % SIZE).flatten()
    floats = (each.bfloat16().to(dtype) for each in (x, angles.cos(), angles.sin()))
    return *floats, slots, TABLE.clone(), positions[:, -1] + 1


def modes(node: Any) -> tuple[int, ...]:
    return tuple(node.kwargs.get(f"{name}_quant_mode", 0) for name in ("weight", "kv_cache", "query"))


KINDS = {
    "(1, 2, 0)": Kind("channels"),
    "(1, 2, 0) by block": Kind("channels", by_block=True),
    "(1, 3, 0)": Kind("tiles"),
    "(1, 3, 0) by block, 16 heads": Kind("tiles", by_block=True, heads=16),
    "(2, 3, 0)": Kind("tiles", all_layers=True),
    "(2, 3, 0) by block": Kind("tiles", all_layers=True, by_block=True),
}


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_chip_runs_the_prolog_in_these_modes(blocks: ModuleType, name: str, tokens: int):
    (block,) = made(blocks, KINDS[name], torch.bfloat16)
    with torch.no_grad():
        report = fusion.explain(block, *step(PROMPT, tokens, torch.bfloat16), options=OPTIONS)
    prolog = call(report, "mla_prolog")
    assert str(modes(prolog)) == name[:9]
    assert prolog.kwargs.get("cache_mode", "PA_BSND") == "PA_BSND"
    before, after = report.launches
    assert before >= 98
    assert after <= 17
    lined = KINDS[name].stored == "tiles"
    assert (prolog.kwargs.get("ckvkr_repo_mode", 0), prolog.kwargs.get("quant_scale_repo_mode", 0)) == (lined, lined)
    assert prolog.kwargs.get("tile_size", 128) == TILE
    cache, keys = (prolog.args[place].meta["val"] for place in (9, 10))
    assert tuple(cache.shape) == (BLOCKS, SIZE, 1, 656 if lined else C)
    assert tuple(keys.shape) == (BLOCKS, SIZE, 1, 0 if lined else DR)
    assert (prolog.kwargs.get("quant_scale_ckr") is None) == lined
    assert (prolog.kwargs.get("k_nope_clip_alpha") is None) != lined


SPLIT = {
    "12 heads": Kind("channels", heads=12),
    "12 heads by block": Kind("channels", by_block=True, heads=12),
}
"""Blocks with caches by channel that the prolog does not take, because of their heads."""
ALL_LAYERS = Kind("channels", all_layers=True)


@pytest.mark.parametrize("name", SPLIT)
def test_where_the_prolog_does_not_fit_the_line_is_written_by_its_own_operator(blocks: ModuleType, name: str):
    (block,) = made(blocks, SPLIT[name], torch.bfloat16)
    with torch.no_grad():
        report = fusion.explain(block, *step(PROMPT, 1, torch.bfloat16), options=OPTIONS)
    assert not calls(report, "mla_prolog")
    written = call(report, "kv_rmsnorm")
    shapes = [tuple(written.kwargs[each].meta["val"].shape) for each in ("k_rope_scale", "c_kv_scale")]
    assert shapes == [(DR,), (C,)]
    assert written.kwargs["cache_mode"] in ("PA", "PA_BNSD")
    assert all(written.args[place].meta["val"].dtype == torch.int8 for place in (5, 6))


@pytest.mark.rotates(3)
def test_with_all_layers_in_int8_the_prolog_gives_rows_that_are_quantised_behind_it(blocks: ModuleType):
    """No mode of the operator goes from int8 layers to caches by channel: it writes rows in floats to fresh memory."""
    (block,) = made(blocks, ALL_LAYERS, torch.bfloat16)
    with torch.no_grad():
        report = fusion.explain(block, *step(PROMPT, 1, torch.bfloat16), options=OPTIONS)
    prolog = call(report, "mla_prolog")
    assert modes(prolog) == (2, 0, 0)
    assert all(prolog.args[place].meta["val"].dtype == torch.bfloat16 for place in (9, 10))
    operators = {
        name: report.ops.get(f"npu::{name}") for name in ("npu_quantize", "npu_scatter_pa_kv_cache_functional")
    }
    assert operators == {
        "npu_quantize": 2,
        "npu_scatter_pa_kv_cache_functional": 1,
    }


BLOCKS_BY_NAME = {**KINDS, **SPLIT, "all layers": ALL_LAYERS, "tiles": Kind("tiles", heads=12)}


@pytest.mark.parametrize(("name", "kind"), BLOCKS_BY_NAME.items())
def test_outputs_and_caches_are_as_exact_as_plain_ones(blocks: ModuleType, name: str, kind: Kind):
    dtypes = (torch.float64, torch.bfloat16, torch.bfloat16)
    exact, plain, fused = made(blocks, kind, *dtypes)
    torch.compiler.reset()
    compiled = torch.compile(fused, backend="cann_fusion", options=OPTIONS, dynamic=False)
    blocks_of = zip((exact, plain, compiled), dtypes, strict=True)
    steps = ((0, PROMPT), (PROMPT, 1), (PROMPT + 1, 3))
    with torch.no_grad():
        truth, before, after = ([block(*step(*each, dtype)) for each in steps] for block, dtype in blocks_of)
    for number, want in enumerate(truth):
        errors = [blocks.error(each[number], want) for each in (after, before)]
        print(f"{name}, {steps[number][1]} tokens: {errors[0]:.2e} fused, {errors[1]:.2e} plain")
        assert errors[0] <= 1.5 * errors[1]
    rows = [block.cache.rows(TABLE) for block in (exact, plain, fused)]
    for part, want, old, new in zip(("latents", "keys"), *rows, strict=True):
        errors = [blocks.error(each, want) for each in (new, old)]
        print(f"{name}, {part}: {errors[0]:.2e} fused, {errors[1]:.2e} plain")
        assert errors[0] <= 1.5 * errors[1]
        assert want.any()


def rejects() -> Iterator[Any]:
    for rule, each in cases((MlaProlog(), KvRmsnormRopeCache())):
        if each.refusal:
            yield pytest.param(rule, each, id=f"{rule.name} {each.name}")


@pytest.mark.rotates(24)
@pytest.mark.parametrize(("rule", "reject"), rejects())
def test_what_is_refused_stays_right(rule: fusion.Rule, reject: fusion.Example):
    testing.means_what_it_says(testing.trial(rule, reject, torch.bfloat16))
