"""`make demo`: DeepSeek-V3 of transformers, untouched, before and after fusion, with its numbers checked.

Prefill and one step of decoding over a StaticCache, in bfloat16. Logits and caches of the plain and of the fused model
are both measured against a float64 run of the same weights: fusing must not cost accuracy.
"""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, StaticCache

import fusion

TARGET = "ascend910_93"
PROMPT, CAPACITY = 24, 32
ALLOWED = 1.5  # times the plain model's own rounding error
console = Console(width=None if sys.stdout.isatty() else 110)


def build() -> DeepseekV3ForCausalLM:
    """Two dense layers, heads and latents of the real sizes, few heads and a small vocabulary."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        num_hidden_layers=2, first_k_dense_replace=2, hidden_size=1024, intermediate_size=2048, vocab_size=2048,
        num_attention_heads=8, num_key_value_heads=8, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).bfloat16().eval()


@torch.no_grad()
def new_cache(model: Any) -> StaticCache:
    """An empty cache with its tensors allocated: one token gives them their shapes, outside any compiled call."""
    cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
    model(input_ids=torch.tensor([[0]]), past_key_values=cache, use_cache=True)
    cache.reset()
    return cache


@dataclass(frozen=True)
class Run:
    """What one model computed."""

    prefill: Tensor
    decode: Tensor
    keys: Tensor
    values: Tensor


@torch.no_grad()
def run(model: Any, call: Any) -> Run:
    """Prefill a prompt, then decode one token."""
    cache = new_cache(model)
    prompt = torch.arange(PROMPT)[None]
    prefill = call(input_ids=prompt, past_key_values=cache, use_cache=True).logits
    decode = call(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True).logits
    keys, values = (torch.stack([getattr(each, name) for each in cache.layers]) for name in ("keys", "values"))
    return Run(prefill, decode, keys[..., : PROMPT + 1, :], values[..., : PROMPT + 1, :])


def explained(model: Any, tokens: int) -> fusion.Report:
    """The report on one call; nothing runs, and the cache stays as it is."""
    call = {"input_ids": torch.zeros(1, tokens, dtype=torch.long), "past_key_values": new_cache(model)}
    return fusion.explain(model, **call, use_cache=True, options={"target": TARGET})


def savings(reports: dict[str, fusion.Report]) -> Table:
    """Launches before and after, and the fused operators."""
    table = Table(title="launches", title_justify="left", min_width=60)
    for name in ("call", "before", "after", "fused operators"):
        table.add_column(name, justify="right" if name in ("before", "after") else "left")
    for name, report in reports.items():
        before, after = report.launches
        fused = ", ".join(f"{count} {op.split('::')[1]}" for op, count in sorted(report.ops.items()))
        table.add_row(name, str(before), str(after), fused)
    return table


def error(have: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`."""
    return float((have.double() - want.double()).norm() / want.double().norm())


def accuracy(plain: Run, fused: Run, exact: Run) -> tuple[Table, bool]:
    """Errors of both models against float64, and whether fusing kept them."""
    table = Table(title="relative rms error against float64", title_justify="left", min_width=60)
    for name in ("", "plain bfloat16", "fused bfloat16", "ratio"):
        table.add_column(name, justify="right" if name else "left")
    kept = True
    names = {"prefill": "logits, prefill", "decode": "logits, decode", "keys": "cache, keys", "values": "cache, values"}
    for name, title in names.items():
        want = getattr(exact, name)
        before, after = error(getattr(plain, name), want), error(getattr(fused, name), want)
        good = after <= ALLOWED * before
        kept = kept and good
        ratio = f"[{'green' if good else 'red'}]{after / before:.2f}[/]"
        table.add_row(title, f"{before:.2e}", f"{after:.2e}", ratio)
    return table, kept


def main() -> int:
    """Explain, run, compare."""
    warnings.filterwarnings("ignore", module="torch")
    model = build()
    console.rule(f"DeepSeek-V3, two layers of it, planned for {TARGET}")
    reports = {"prefill": explained(model, PROMPT), "decode": explained(model, 1)}
    for each in reports["decode"].tables():
        console.print(each)
    console.print(savings(reports))

    console.rule("the same numbers?")
    fused = torch.compile(model, backend="cann_fusion", options={"target": TARGET, "lower": "eager"}, dynamic=False)
    exact = copy.deepcopy(model).double()
    table, kept = accuracy(run(model, model), run(model, fused), run(exact, exact))
    console.print(table)

    before, after = reports["decode"].launches
    if not kept:
        console.print(f"[bold red]FAILED[/]: the fused model is more than {ALLOWED} times as far from float64")
        return 1
    console.print(
        f"[bold green]OK[/]: {before} launches became {after} in a decode step, and the fused model is as close to "
        "float64 as the plain one."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
