"""Caches as operators that write to them are told that they lie: sizes that differ, and sizes that are equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion.options import Options
from tests.examples.inputs import Inputs, normal
from tests.examples.latent_model import norm, turned

from .layouts import UNEQUAL, Shape, Sizes, calls, tried

pytestmark = pytest.mark.rotates(12)

CHANNELS, RATE = 32, 16


@dataclass(frozen=True)
class Cache:
    """Shapes of a cache of rows [.., width], how rows [B, S, width] are written, and what the operator is told."""

    shape: Callable[[int], Shape]
    write: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    mode: str
    read: Callable[[Tensor], Tensor]
    """Rows [B, T, width] of all that it holds."""


def caches(s: Sizes) -> dict[str, Cache]:
    """Contiguous ones of `keys` positions, and pages of `size` rows; `at` counts positions, slots all rows of pages."""
    size, room = s.size, s.keys

    def positions(cache: Tensor, rows: Tensor, at: Tensor, slots: Tensor) -> None:
        axis = cache.dim() - 2
        cache.index_copy_(axis, at + torch.arange(s.queries), rows.reshape(*cache.shape[:axis], -1, rows.shape[-1]))

    def numbers(cache: Tensor, rows: Tensor, at: Tensor, slots: Tensor) -> None:
        cache.view(-1, rows.shape[-1])[slots] = rows.flatten(0, 1)

    def places(cache: Tensor, rows: Tensor, at: Tensor, slots: Tensor) -> None:
        cache[slots // size, slots % size] = rows.reshape(-1, *cache.shape[2:])

    def lined(cache: Tensor, rows: Tensor, at: Tensor, slots: Tensor) -> None:
        wide = (slice(None),) * (cache.dim() - 3)
        cache[(slots // size, *wide, slots % size)] = rows.reshape(len(slots), *cache.shape[1:-2], cache.shape[-1])

    def whole(cache: Tensor) -> Tensor:
        return cache[table].reshape(s.batch, room, -1)

    def turned_lines(cache: Tensor) -> Tensor:
        return cache[table].flatten(2, -3).transpose(2, 3).reshape(s.batch, room, -1)

    table = (torch.arange(s.batch * s.pages) * 5 + 2).reshape(s.batch, s.pages) % s.blocks
    return {
        "positions": Cache(lambda width: (s.batch, room, width), positions, "Norm", lambda x: x),
        "positions of a head": Cache(lambda width: (s.batch, 1, room, width), positions, "Norm", lambda x: x[:, 0]),
        "rows": Cache(lambda width: (s.blocks, size, width), numbers, "PA_BNSD", whole),
        "rows of a head": Cache(lambda width: (s.blocks, size, 1, width), places, "PA_BNSD", whole),
        "lines": Cache(lambda width: (s.blocks, width // 16, size, 16), lined, "PA_NZ", turned_lines),
        "lines of a head": Cache(lambda width: (s.blocks, 1, width // 16, size, 16), lined, "PA_NZ", turned_lines),
    }


OF_WRITES = {
    "unequal": replace(UNEQUAL, queries=3, size=4, pages=6),
    "rows as many as lines": replace(UNEQUAL, queries=3, size=2, blocks=5, pages=9),
    "rows as many as lanes of a line": replace(UNEQUAL, queries=2, size=16, blocks=3, pages=1),
    "a block of each token": replace(UNEQUAL, batch=1, queries=4, size=2, blocks=2, pages=16),
    "tokens as many as sequences": replace(UNEQUAL, batch=3, queries=3, size=3, blocks=3, pages=3),
}


def written(s: Sizes, cache: Cache) -> tuple[Callable[..., tuple[Tensor, ...]], Inputs]:
    """A latent line whose parts go to two caches."""

    def forward(
        line: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, at: Tensor, slots: Tensor, latents: Tensor, ropes: Tensor
    ) -> tuple[Tensor, ...]:
        latent, rope = line.split((CHANNELS, RATE), -1)
        cache.write(latents, norm(latent, gain), at, slots)
        cache.write(ropes, turned(rope, cos, sin), at, slots)
        return latents * 2, ropes * 2

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        tokens = s.batch, s.queries
        angles = normal(2, *tokens, RATE // 2).repeat(1, 1, 2)
        given = normal(0, *tokens, CHANNELS + RATE), 1 + normal(1, CHANNELS) / 8, angles.cos(), angles.sin()
        places = torch.randperm(s.blocks * s.size, generator=torch.Generator().manual_seed(2))
        held = (normal(3 + n, *cache.shape(width)).to(dtype) for n, width in enumerate((CHANNELS, RATE)))
        return *(each.to(dtype) for each in given), torch.tensor(2), places[: s.batch * s.queries], *held

    return forward, make


@pytest.mark.parametrize("form", caches(UNEQUAL))
@pytest.mark.parametrize("name", OF_WRITES)
def test_rows_of_a_latent_line(form: str, name: str):
    s = OF_WRITES[name]
    cache = caches(s)[form]
    t = tried("kv_rmsnorm_rope_cache", *written(s, cache))
    (call,) = calls(t, "npu.npu_kv_rmsnorm_rope_cache_v2")
    assert call.kwargs.get("cache_mode", "Norm") == cache.mode
    assert "aten.clone" not in str([node.target for node in t.fused.graph.nodes if node in call.all_input_nodes])


HIDDEN, LOW, NOPE = 64, 40, 24
OF_FRONTS = {
    "unequal": replace(UNEQUAL, queries=3, size=16, pages=2, heads=4),
    "tokens as many as heads": replace(UNEQUAL, queries=4, size=16, pages=2, heads=4),
    "sequences, tokens, heads": replace(UNEQUAL, batch=4, queries=4, size=16, pages=2, heads=4, blocks=4),
    "one sequence, one head": replace(UNEQUAL, batch=1, queries=2, size=16, pages=2, heads=1),
    "rows as many as channels": replace(UNEQUAL, queries=2, size=32, pages=1, blocks=3, heads=2),
}


def fronted(s: Sizes, cache: Cache) -> tuple[Callable[..., tuple[Tensor, ...]], Inputs]:
    """What stands before an attention of absorbed queries, and the writes."""

    def forward(
        x: Tensor, dq: Tensor, uq: Tensor, up: Tensor, dkv: Tensor, gain_q: Tensor, gain: Tensor, cos: Tensor,
        sin: Tensor, at: Tensor, slots: Tensor, latents: Tensor, ropes: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        q = linear(norm(linear(x, dq), gain_q), uq).unflatten(-1, (s.heads, -1)).transpose(1, 2)
        nope, rotated = q.split((NOPE, RATE), -1)
        rotated = turned(rotated, cos.unsqueeze(1), sin.unsqueeze(1))
        latent, rope = linear(x, dkv).split((CHANNELS, RATE), -1)
        for pages, rows in ((latents, norm(latent, gain)), (ropes, turned(rope, cos, sin))):
            cache.write(pages, rows, at, slots)
        latent, rope = (cache.read(pages) for pages in (latents, ropes))
        query = torch.einsum("bnsd,ndc->bnsc", nope, up)
        scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", rotated, rope)
        return torch.einsum("bnst,btc->bnsc", (scores / 8).softmax(-1), latent)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = (LOW, HIDDEN), (s.heads * (NOPE + RATE), LOW), (s.heads, NOPE, CHANNELS), (CHANNELS + RATE, HIDDEN)
        weights = [normal(20 + n, *shape) / 8 for n, shape in enumerate(shapes)]
        _, gain, *rest = written(s, cache)[1](dtype)
        fixed = [each.to(dtype) for each in (*weights, 1 + normal(30, LOW) / 8)]
        parameters = (torch.nn.Parameter(each, requires_grad=False) for each in (*fixed, gain))
        return normal(31, s.batch, s.queries, HIDDEN).to(dtype), *parameters, *rest

    return forward, make


@pytest.mark.parametrize("form", ["positions", "rows", "rows of a head", "lines", "lines of a head"])
@pytest.mark.parametrize("name", OF_FRONTS)
def test_rows_of_a_prolog(form: str, name: str):
    s = OF_FRONTS[name]
    t = tried("mla_prolog", *fronted(s, caches(s)[form]))
    (call,) = calls(t, "npu.npu_mla_prolog_v3")
    assert call.kwargs.get("cache_mode", "PA_BSND") == ("PA_NZ" if "lines" in form else "PA_BSND")


OF_PAGES = {
    "unequal": replace(UNEQUAL, queries=5),
    "rows as many as heads": replace(UNEQUAL, heads=4, size=4, queries=3),
    "tokens as many as heads": replace(UNEQUAL, batch=1, heads=3, queries=3, size=5),
    "one head": replace(UNEQUAL, heads=1, queries=3),
    "all of them": replace(UNEQUAL, batch=1, heads=3, queries=3, size=3, blocks=3, width=3),
}


@pytest.mark.parametrize("by", ["number", "place"])
@pytest.mark.parametrize("name", OF_PAGES)
@pytest.mark.parametrize(
    ("plan_lower", "operator"), [("eager", "atb._npu_reshape_and_cache"), ("torchair", "npu.npu_scatter_pa_kv_cache")]
)
def test_rows_of_keys_and_values(by: str, name: str, plan_lower: str, operator: str):
    s = OF_PAGES[name]

    def forward(key: Tensor, value: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        for cache, rows in ((keys, key), (values, value)):
            if by == "number":
                cache.view(-1, *cache.shape[2:])[slots] = rows
            else:
                cache[slots // s.size, slots % s.size] = rows
        return keys * 2, values * 2

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        tokens = s.batch * s.queries
        places = torch.randperm(s.blocks * s.size, generator=torch.Generator().manual_seed(2))[:tokens]
        rows, pages = (tokens, s.heads, s.width), (s.blocks, s.size, s.heads, s.width)
        given = [normal(n, *shape).to(dtype) for n, shape in enumerate((rows, rows, pages, pages))]
        return *given[:2], places, *given[2:]

    t = tried(
        "cache_write",
        forward,
        make,
        Options(target="ascend910_93", lower="eager", plan_lower=plan_lower),
        torch.bfloat16,
    )
    assert calls(t, operator)


ORDERS = ("BSND", "BNSD", "SBND", "SND")
OF_ROWS = {"unequal": (2, 7, 3, 8, 2), "equal": (3, 3, 3, 3, 3), "one token": (2, 5, 2, 4, 1), "one": (1, 4, 1, 4, 1)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", OF_ROWS)
@pytest.mark.parametrize("known", [True, False], ids=["consecutive", "any"])
def test_rows_along_an_axis(order: str, sizes: str, known: bool):
    batch, keys, heads, width, tokens = OF_ROWS[sizes]
    of = {"B": batch, "S": keys, "N": heads, "D": width}
    axis = order.index("S")

    def forward(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
        places = at[:1].clamp(0, keys - tokens) + torch.arange(tokens) if known else at
        return cache.index_copy_(axis, places, rows) * 2

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        whole, new = ([of[dim] for dim in order], [(of | {"S": tokens})[dim] for dim in order])
        places = torch.randperm(keys, generator=torch.Generator().manual_seed(3))[:tokens]
        return normal(0, *whole).to(dtype), normal(1, *new).to(dtype), places

    t = tried("cache_write", forward, make)
    names = [str(node.target) for node in t.fused.graph.nodes]
    assert [name for name in names if "scatter_update" in name or "scatter_nd_update" in name], names


@pytest.mark.parametrize("form", ["rows", "rows of a head", "lines", "lines of a head"])
def test_pages_with_gaps_are_not_written_by_slot(form: str):
    """Every page behind one of another layer, as one buffer of all layers holds them: no copy of a cache is made."""
    s = OF_WRITES["unequal"]
    cache = caches(s)[form]
    if form == "rows":
        cache = replace(cache, write=caches(s)["rows of a head"].write)  # a view of all rows would not exist
    forward, make = written(s, cache)

    def apart(dtype: torch.dtype) -> tuple[Tensor, ...]:
        *given, latents, ropes = make(dtype)
        return *given, *(torch.stack((each, each), 1)[:, 0] for each in (latents, ropes))

    t = tried("kv_rmsnorm_rope_cache", forward, apart)
    assert not calls(t, "npu.npu_kv_rmsnorm_rope_cache_v2")
