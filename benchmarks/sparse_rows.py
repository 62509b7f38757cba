"""What sparse attention reads and takes, by the length of its context: the rows that are listed, whatever lies around.

    python -m benchmarks.sparse_rows --listed 2048 --contexts 4096 --contexts 65536 --device cpu --growth 1.1

One decode step of `npu_sparse_flash_attention` and `npu_kv_quant_sparse_flash_attention` by their decompositions,
beside attention over the whole context as it is written out. Bytes are those of every tensor that is read or made, and
of a tensor of which rows are taken those of the rows. Exits with 1 where they grow more than the limit from the
shortest context to the longest.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.operators.sparse.kv_quant_sparse_flash_attention import KV_QUANT_SPARSE_FLASH_ATTENTION
from fusion.operators.sparse.sparse_flash_attention import SPARSE_FLASH_ATTENTION

LATENT, ROPE, ROW = 512, 64, 656
SCALE = (128 + ROPE) ** -0.5
TAKEN = (torch.ops.aten.index_select.default, torch.ops.aten.index.Tensor, torch.ops.aten.gather.default)


class Touched(TorchDispatchMode):
    """Counts the bytes that are read and made inside; views touch nothing."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            read = args[1:] if func in TAKEN else args
            self.total += sum(_bytes(each) for each in torch.utils._pytree.tree_leaves([read, kwargs, result]))
        return result


def _bytes(value: object) -> int:
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0


def calls(context: int, listed: int, heads: int, device: str) -> dict[str, Callable[[], object]]:
    """Return the functions to compare by name: one token against a cache of `context` tokens."""
    places = torch.randperm(context, device=device)[:listed].to(torch.int32).reshape(1, 1, 1, -1)
    lists = {"sparse_indices": places, "scale_value": SCALE, "attention_mode": 2, "layout_kv": "BSND"}
    found: dict[str, Callable[[], object]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        query, latent = (torch.randn(1, n, m, LATENT, device=device).to(dtype) for n, m in ((1, heads), (context, 1)))
        q_rope, rope = (torch.randn(1, n, m, ROPE, device=device).to(dtype) for n, m in ((1, heads), (context, 1)))
        given = {"query": query, "key": latent, "value": latent, "query_rope": q_rope, "key_rope": rope}
        name = str(dtype).removeprefix("torch.")
        found[name] = lambda given=given: SPARSE_FLASH_ATTENTION.fallback(**given, **lists)
        found[f"{name}, whole"] = lambda given=given: _whole(**given)
    rows = torch.randint(-100, 100, (1, context, 1, ROW), dtype=torch.int8, device=device)
    rows[..., LATENT:] = torch.ones(1, context, 1, (ROW - LATENT) // 4, device=device).view(torch.int8)
    given = {"query": torch.randn(1, 1, heads, LATENT + ROPE, device=device).bfloat16(), "key": rows, "value": rows}
    modes = {"key_quant_mode": 2, "value_quant_mode": 2}
    found["int8 rows"] = lambda: KV_QUANT_SPARSE_FLASH_ATTENTION.fallback(**given, **lists, **modes)
    return found


def _whole(query: Tensor, key: Tensor, value: Tensor, query_rope: Tensor, key_rope: Tensor) -> Tensor:
    latent, rope = query[0, 0] @ key[0, :, 0].T, query_rope[0, 0] @ key_rope[0, :, 0].T
    return ((latent + rope) * SCALE).softmax(-1) @ value[0, :, 0]


def seconds(call: Callable[[], object], device: str, rounds: int) -> float:
    """Measure the median time of a call."""
    taken: list[float] = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        call()
        if device != "cpu":
            torch.accelerator.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def main(
    contexts: Annotated[list[int], typer.Option(help="tokens in the cache")] = [4096, 16384, 65536],  # noqa: B006
    listed: Annotated[int, typer.Option(help="keys that are listed")] = 2048,
    heads: Annotated[int, typer.Option(help="heads of the query")] = 16,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    rounds: Annotated[int, typer.Option(help="repetitions; medians count")] = 9,
    growth: Annotated[
        float, typer.Option(help="how many times the bytes of the shortest context are allowed")
    ] = math.inf,
) -> None:
    """Compare contexts; each option that is a list is given once for each of its items."""
    if short := [each for each in contexts if each < listed]:
        raise typer.BadParameter(f"contexts of {short} tokens are shorter than the {listed} keys that are listed")
    torch.set_num_threads(1)
    figures: dict[str, list[tuple[int, float]]] = {}
    with torch.no_grad():
        for context in track(sorted(contexts), "contexts", console=Console(stderr=True)):
            for name, call in calls(context, listed, heads, device).items():
                with Touched() as touched:
                    call()
                figures.setdefault(name, []).append((touched.total, seconds(call, device, rounds)))
    table = Table("attention", *(f"{each:,}" for each in sorted(contexts)), title=f"MiB and ms, {listed} keys listed")
    for name, found in figures.items():
        table.add_row(name, *(f"{size / 2**20:.1f}, {spent * 1e3:.2f}" for size, spent in found))
    Console().print(table)
    grown = {name: found[-1][0] / found[0][0] for name, found in figures.items() if "whole" not in name}
    print(json.dumps({name: round(each, 3) for name, each in grown.items()}))
    raise typer.Exit(int(max(grown.values()) > growth))


if __name__ == "__main__":
    typer.run(main)
