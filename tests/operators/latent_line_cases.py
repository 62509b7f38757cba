"""Small calls of norm, rotation and writes of the latent line, what they compute, and both sides of their limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST
from tests.operators import sparse_references as sparse
from tests.operators.limit_cases import starts, t

Make = Callable[[torch.dtype], dict[str, Any]]
HCKV, DR = 32, 16
BLOCKS, SIZE = 4, 4
NAMES = ("npu_kv_rmsnorm_rope_cache_v2", "npu_kv_rmsnorm_rope_cache_v2_functional")


def line(batch: int, tokens: int, index: Any, mode: str = "PA_BNSD", table: int | None = None, **more: Any) -> Make:
    """Rows [batch, 1, tokens], into pages or, in mode Norm, into 6 places of every sequence."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64).to(dtype)

        lead = (batch, 1, 6) if mode == "Norm" else (BLOCKS, SIZE, 1)
        angle = torch.rand(batch, 1, tokens if table is None else table, DR, dtype=torch.float64) * 6
        call = {"kv": random(batch, 1, tokens, HCKV + DR), "gamma": random(HCKV)}
        call |= {
            "cos": angle.cos().to(dtype),
            "sin": angle.sin().to(dtype),
        }  # of both halves apart, as the kernel reads
        call |= {"index": torch.tensor(index, dtype=torch.int64)}
        call |= {"k_cache": random(*lead, DR), "ckv_cache": random(*lead, HCKV)}
        return call | {"cache_mode": mode} | more

    return make


def quantised(make: Make, *names: str) -> Make:
    """The same call with these caches in whole numbers, and a scale of each channel for them."""

    def whole(dtype: torch.dtype) -> dict[str, Any]:
        call = make(dtype)
        for name in names:
            width, scale = call[name].shape[-1], "k_rope_scale" if name == "k_cache" else "c_kv_scale"
            call[name] = torch.randint(-128, 128, call[name].shape, dtype=torch.int8)
            factors = (torch.rand(width, dtype=torch.float64) + 0.5) * 30  # of which some leave int8
            call[scale] = factors.to(torch.promote_types(dtype, torch.float32))
        return call

    return whole


BOTH = ("k_cache", "ckv_cache")
CASES: tuple[tuple[str, Make], ...] = (
    ("positions", line(2, 3, ((1, 2, 3), (0, 4, 5)), "Norm")),
    ("positions, skipped", line(2, 2, ((-1, 2), (5, -3)), "Norm", epsilon=0.5)),
    ("one position", line(3, 1, ((1,), (5,), (0,)), "Norm")),
    ("slots", line(5, 1, (3, 7, 0, 11, 6), "PA", is_output_kv=True)),
    ("slots of a batch", line(2, 3, (3, 7, 0, 11, 6, 2), is_output_kv=True)),
    ("one angle for all", line(2, 3, (3, 7, 0, 11, 6, 2), table=1)),
    ("skipped", line(2, 2, (-1, 7, 15, -4), is_output_kv=True)),
    ("all skipped", line(2, 1, (-1, -1))),
    ("no token", line(0, 1, ())),
    ("NZ", line(2, 3, (3, 7, 0, 11, -1, 2), "PA_NZ", is_output_kv=True)),
    ("runs of pages", line(2, 6, (4, 12, 0, 8), "PA_BLK_BNSD", is_output_kv=True)),
    ("runs of pages, one skipped", line(2, 5, (7, -1, 0, 8), "PA_BLK_BNSD")),
    ("runs of pages, NZ", line(1, 6, (4, 12), "PA_BLK_NZ")),
    ("whole numbers", quantised(line(2, 3, (3, 7, 0, 11, -1, 2), is_output_kv=True), *BOTH)),
    ("whole latents", quantised(line(2, 2, ((-1, 2), (5, 3)), "Norm"), "ckv_cache")),
    ("whole keys", quantised(line(5, 1, (3, 7, 0, 11, 6), "PA"), "k_cache")),
    ("whole latents, NZ", quantised(line(2, 3, (3, 7, 0, 11, -1, 2), "PA_NZ"), "ckv_cache")),
)


def reference(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor,
    cache_mode: str, epsilon: float = 1e-5, is_output_kv: bool = False, stored: torch.dtype = torch.float64,
    k_rope_scale: Tensor | None = None, c_kv_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Token by token; `stored` is the dtype to which the kernel rounds."""
    batch, _, tokens, _ = kv.shape
    width, table = len(gamma), cos.shape[2]
    keys, latents = k_cache.clone(), ckv_cache.clone()
    ropes, norms = torch.zeros(batch, 1, tokens, cos.shape[-1]), torch.zeros(batch, 1, tokens, width)
    ropes, norms = ropes.double(), norms.double()
    for b in range(batch):
        for s in range(tokens):
            x, r = kv[b, 0, s, :width], kv[b, 0, s, width:]
            norm = x / ((x @ x) / width + epsilon) ** 0.5 * gamma
            turned = sparse.rope(r, sin[b, 0, s % table], cos[b, 0, s % table])
            norms[b, 0, s], ropes[b, 0, s] = norm.to(stored), turned.to(stored)
            for cache, row, scale in ((keys, turned, k_rope_scale), (latents, norm, c_kv_scale)):
                kept = row.to(stored) if scale is None else (row * scale).round().clamp(-128, 127).to(torch.int8)
                _store(cache, kept, index, cache_mode, (b, s, tokens))
    given = (ropes, norms) if is_output_kv else (torch.zeros_like(ropes), torch.zeros_like(norms))
    return *given, keys, latents


def _store(cache: Tensor, row: Tensor, index: Tensor, mode: str, token: tuple[int, int, int]) -> None:
    b, s, tokens = token
    if mode == "Norm":
        if index[b, s] >= 0:
            cache[b, 0, index[b, s]] = row
        return
    size = cache.shape[1]
    if "BLK" in mode:
        runs = -(-tokens // size)
        start = int(index[b * runs + s // size])
        slot = start if start < 0 else start // size * size + s % size
    else:
        slot = int(index[b * tokens + s])
    sparse.store(cache, row, slot, "PA_NZ" if mode.endswith("NZ") else "PA_BSND")


# limits ------------------------------------------------------------------------------------------------------------

A2, A3, A5 = CHIPS
EVERY = (HOST, *CHIPS)
F16, LONG = torch.float16, torch.int64


def call(
    mode: str = "PA_BNSD", b: int = 2, s: int = 3, hckv: int = 512, dr: int = 64, blocks: int = 9, size: int = 16,
    dtype: torch.dtype = torch.bfloat16, index: Any = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    lead = (b, 1, 32) if mode == "Norm" else (blocks, size, 1)
    count = {"Norm": (b, s)}.get(mode, (b * -(-s // 16),) if "BLK" in mode else (b * s,))
    shapes = {"kv": (b, 1, s, hckv + dr), "gamma": (hckv,), "cos": (b, 1, s, dr), "sin": (b, 1, s, dr)}
    shapes |= {"k_cache": (*lead, dr), "ckv_cache": (*lead, hckv)}
    tensors: dict[str, Any] = {name: t(*shape, dtype=dtype) for name, shape in shapes.items()}
    return tensors | {"index": t(*(index or count), dtype=LONG), "cache_mode": mode} | more


def whole(*names: str, size: int = 32, dr: int = 64, hckv: int = 512, **more: Any) -> dict[str, Any]:
    """The same with these caches in whole numbers, by scales of each channel."""
    widths = {"k_cache": (dr, "k_rope_scale"), "ckv_cache": (hckv, "c_kv_scale")}
    found = call(size=size, dr=dr, hckv=hckv, **more)
    for name in names:
        width, scale = widths[name]
        found |= {name: t(9, size, 1, width, dtype=torch.int8), scale: t(width, dtype=torch.float32)}
    return found


_OFFSETS = ("k_rope_offset", "c_kv_offset")
_LIMITS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    *starts(whole("k_cache"), whole("ckv_cache"), whole(*BOTH, mode="PA_BLK_NZ")),
    (EVERY, whole(*BOTH), whole(*BOTH) | {"c_kv_scale": t(1, dtype=torch.float32)}, "requires c_kv_scale as [Hckv]"),
    ((HOST, A5), whole("k_cache", mode="PA_NZ"), whole("k_cache", mode="PA_NZ", dr=48), "Dr % 32 == 0"),
    ((A2, A3), whole("k_cache", mode="PA_NZ"), whole("k_cache", mode="PA_NZ", dr=48), "Dr % 32 == 0"),
    (EVERY, call("PA"), call("PA_BSND"), "requires cache_mode='Norm' or"),
    (EVERY, call("Norm"), call("Norm", index=(2, 4)), "requires index as [B S]"),
    (EVERY, call(), call(kv=t(2, 2, 3, 576)), "requires kv as [B 1 S W]"),
    (EVERY, call(), call(ckv_cache=t(9, 16, 1, 256)), "requires ckv_cache as [Blocks Size 1 Hckv]"),
]
EDGES = [(name, *edge) for name in NAMES for edge in _LIMITS]
