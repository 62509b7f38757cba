"""Small calls of norms, rotation and writes of grouped heads, what they compute, and both sides of their limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST
from tests.operators.limit_cases import t

Make = Callable[[torch.dtype], dict[str, Any]]
NAMES = ("npu_qkv_rms_norm_rope_cache", "npu_qkv_rms_norm_rope_cache_functional")
NQ, NK, D = 4, 2, 32
BLOCKS, SIZE = 3, 4
BOTH = ("k", "v")


def heads(index: Sequence[int], int8: Sequence[str] = (), offsets: bool = False, **more: Any) -> Make:
    """Tokens to these slots; the caches named are in whole numbers, some of which the scales let leave int8."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64).to(dtype)

        tokens, wide = len(index), torch.promote_types(dtype, torch.float32)
        angle = torch.rand(tokens, D // 2, dtype=torch.float64).repeat(1, 2) * 6
        call = {"qkv": random(tokens, (NQ + 2 * NK) * D), "q_gamma": random(D), "k_gamma": random(D)}
        call |= {"cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}
        call |= {"index": torch.tensor(index, dtype=torch.int64), "q_out": random(tokens, NQ * D)}
        for name in BOTH:
            line = 32 if name in int8 else 16
            shape = BLOCKS, NK * D // line, SIZE, line
            whole = torch.randint(-128, 128, shape, dtype=torch.int8)
            call[f"{name}_cache"] = whole if name in int8 else random(*shape)
            if name in int8:
                call[f"{name}_scale"] = (torch.rand(NK, D, dtype=torch.float64) / 50 + 0.01).to(wide)
            if name in int8 and offsets:
                call[f"{name}_offset"] = torch.randint(-9, 9, (NK, D)).to(wide)
        sizes: dict[str, Any] = {"qkv_size": [1, tokens, NQ + 2 * NK, D], "head_nums": [NQ, NK, NK]}
        return call | sizes | more

    return make


CASES: tuple[tuple[str, Make], ...] = (
    ("slots", heads((3, 7, 0, 11, 6))),
    ("one token", heads((5,), epsilon=0.5)),
    ("skipped", heads((-1, 7, 10, -4))),
    ("all skipped", heads((-1, -1))),
    ("no token", heads(())),
    ("whole numbers", heads((3, 7, 0, 11, -1, 2), BOTH)),
    ("whole numbers and offsets", heads((3, 7, 0, 11, -1, 2), BOTH, True)),
    ("whole keys", heads((8, 1), "k")),
    ("whole values", heads((8, 1), "v")),
)


def reference(
    qkv: Tensor, q_gamma: Tensor, k_gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, q_out: Tensor,
    k_cache: Tensor, v_cache: Tensor, qkv_size: list[int], head_nums: list[int], k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, k_offset: Tensor | None = None, v_offset: Tensor | None = None,
    epsilon: float = 1e-6, stored: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Head by head of each token; `stored` is the dtype to which the kernel rounds."""
    width, (queries, shared, _) = qkv_size[3], head_nums
    out, keys, values = q_out.clone(), k_cache.clone(), v_cache.clone()

    def turned(x: Tensor, gamma: Tensor, token: int) -> Tensor:
        y = x / ((x @ x) / width + epsilon) ** 0.5 * gamma
        partner = torch.cat((-y[width // 2 :], y[: width // 2]))
        return y * cos[token] + partner * sin[token]

    def put(cache: Tensor, row: Tensor, slot: int, head: int, scale: Tensor | None, offset: Tensor | None) -> None:
        if scale is not None:
            row = row / scale[head] + (0 if offset is None else offset[head])
            row = row.round().clamp(-128, 127)
        line = cache.shape[3]
        for place in range(width):
            block = (head * width + place) // line
            cache[slot // cache.shape[2], block, slot % cache.shape[2], place % line] = row[place].to(stored)

    for token in range(len(qkv)):
        parts = qkv[token].reshape(-1, width)
        for head in range(queries):
            out[token, head * width : (head + 1) * width] = turned(parts[head], q_gamma, token).to(stored)
        slot = int(index[token])
        for head in range(shared) if slot >= 0 else ():
            put(keys, turned(parts[queries + head], k_gamma, token), slot, head, k_scale, k_offset)
            put(values, parts[queries + shared + head], slot, head, v_scale, v_offset)
    return *(torch.zeros((), dtype=torch.float64) for _ in range(3)), out, keys, values


# limits ------------------------------------------------------------------------------------------------------------

A2, A3, _ = CHIPS
OLDER = (A2, A3)
EVERY = (HOST, A2, A3)
F16, F32 = torch.float16, torch.float32


def call(
    tokens: int = 5, queries: int = 8, shared: int = 2, width: int = 128, blocks: int = 3, size: int = 32,
    int8: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    shapes = {"qkv": (tokens, (queries + 2 * shared) * width), "q_gamma": (width,), "k_gamma": (width,)}
    shapes |= {"cos": (tokens, width), "sin": (tokens, width), "q_out": (tokens, queries * width)}
    found: dict[str, Any] = {name: t(*shape, dtype=dtype) for name, shape in shapes.items()}
    for name in BOTH:
        line = 32 if name in int8 else 16
        kept = torch.int8 if name in int8 else dtype
        found[f"{name}_cache"] = t(blocks, shared * width // line, size, line, dtype=kept)
        if name in int8:
            found[f"{name}_scale"] = t(shared, width, dtype=F32)
    nums = [queries, shared, shared]
    sizes: dict[str, Any] = {"qkv_size": [1, tokens, sum(nums), width], "head_nums": nums}
    return found | sizes | {"index": t(tokens, dtype=torch.int64)} | more


def _with(name: str, **changed: Any) -> dict[str, Any]:
    """Both caches in whole numbers, and this changed for one of them."""
    return call(int8=BOTH) | {f"{name}_{what}": each for what, each in changed.items()}


_THREE = {f"{name}_scale": t(3, 128, dtype=F32) for name in BOTH}
_LIMITS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    (EVERY, call(), call(cos=t(4, 128)), "requires cos as [T D]"),
    (EVERY, call(), call(index=t(4, dtype=torch.int64)), "requires index as [T]"),
    ((HOST,), call(width=32), call(width=33, shared=16), "D % 2 == 0"),
    (OLDER, call(), call(width=33, shared=16), "D % 2 == 0"),
    (OLDER, call(), call(width=64), "D == 128"),
    *((OLDER, call(), call(**{f"{n}_cache": t(3, 8, 32, 32)}), f"{n.upper()}Line == 16") for n in BOTH),
    *((OLDER, _with(n), _with(n, cache=t(3, 16, 32, 16, dtype=torch.int8)), f"{n.upper()}Line == 32") for n in BOTH),
    (OLDER, call(queries=6), call(queries=7), "Q % (KLines * KLine) == 0"),
]
EDGES = [(name, *edge) for name in NAMES for edge in _LIMITS]
