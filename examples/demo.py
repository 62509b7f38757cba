"""`make demo`: DeepSeek-V3.2 of transformers, untouched, before and after fusion, with its numbers checked.

What it launches on the chip, as planned without one; then, on this machine, whether it computes the same: in float64,
where no rounding hides a wrong formula, and in bfloat16, where the fused model must not be further from float64 than
the plain one; and how long a step of decoding takes under Inductor, plain and fused.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, StaticCache

import fusion

TARGET = "ascend910_93"
BATCH, PROMPT, STEPS, CAPACITY, TOP_K = 2, 100, 4, 256, 64  # the prompt is longer than what a query attends to
LONG = 2048  # context of the timed steps
ROUNDS = 5
EXACT = 1e-6  # what a right formula leaves in float64: norms and scores of this model round to float32 even then
ALLOWED = 1.5  # times the plain model's own rounding error
CACHES = ("keys", "values", "indexer_keys")
console = Console(width=None if sys.stdout.isatty() else 110)
Caller = Callable[..., Any]


def build() -> DeepseekV32ForCausalLM:
    """Two dense layers, heads, latents and indexer of sizes that the operators take, and a small vocabulary."""
    torch.manual_seed(0)
    config = DeepseekV32Config(
        num_hidden_layers=2, mlp_layer_types=["dense"] * 2, hidden_size=1024, intermediate_size=2048, vocab_size=2048,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=1536, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, index_n_heads=8, index_head_dim=128, index_topk=TOP_K,
    )  # fmt: skip
    return DeepseekV32ForCausalLM(config).bfloat16().eval()


@torch.no_grad()
def new_cache(model: Any, capacity: int = CAPACITY, batch: int = BATCH) -> StaticCache:
    """An empty cache with its tensors allocated: one token gives them their shapes, outside any compiled call."""
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    model(input_ids=torch.zeros(batch, 1, dtype=torch.long), past_key_values=cache, use_cache=True)
    cache.reset()
    return cache


def tokens(count: int, batch: int = BATCH) -> Tensor:
    """The same tokens at every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 2000, (batch, count), generator=generator)


@torch.no_grad()
def run(model: Any, call: Caller) -> dict[str, Tensor]:
    """Prefill a prompt, decode some given tokens; the logits, and the caches as they are then."""
    cache, ids = new_cache(model), tokens(PROMPT + STEPS)
    pieces = [ids[:, :PROMPT], *ids[:, PROMPT:].split(1, dim=1)]
    logits = [call(input_ids=each.contiguous(), past_key_values=cache, use_cache=True).logits for each in pieces]
    caches = {name: torch.stack([getattr(each, name) for each in cache.layers]) for name in CACHES}
    return {"logits, prefill": logits[0], "logits, decode": torch.cat(logits[1:], dim=1), **caches}


def fused(model: Any, **options: Any) -> Caller:
    """The model as any user compiles it."""
    torch.compiler.reset()
    return torch.compile(model, backend="cann_fusion", options=options, dynamic=False)


def explained(model: Any, count: int) -> fusion.Report:
    """The report on one call; nothing runs, and the cache stays as it is."""
    call = {"input_ids": torch.zeros(BATCH, count, dtype=torch.long), "past_key_values": new_cache(model)}
    return fusion.explain(model, **call, use_cache=True, options={"target": TARGET})


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is a name."""
    table = Table(title=title, title_justify="left", min_width=60)
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "fused operators") else "right")
    for row in rows:
        table.add_row(*row)
    return table


def savings(reports: dict[str, fusion.Report]) -> Table:
    """Launches before and after, and the fused operators."""
    rows = [
        (
            name,
            *map(str, report.launches),
            ", ".join(f"{n} {op.split('::')[1]}" for op, n in sorted(report.ops.items())),
        )
        for name, report in reports.items()
    ]
    return table_of("launches", ("", "before", "after", "fused operators"), rows)


def error(have: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`."""
    return float((have.double() - want.double()).norm() / want.double().norm())


@dataclass(frozen=True)
class Numbers:
    """Errors by name: of the fused model in float64, of the plain and of the fused one in bfloat16."""

    formula: dict[str, float]
    plain: dict[str, float]
    fused: dict[str, float]

    def good(self, name: str) -> bool:
        """Whether fusing kept this result."""
        return self.formula[name] < EXACT and self.fused[name] <= ALLOWED * self.plain[name]

    def table(self) -> Table:
        """All of them."""
        rows = [
            (
                name, f"{self.formula[name]:.0e}", f"{self.plain[name]:.2e}", f"{self.fused[name]:.2e}",
                f"[{'green' if self.good(name) else 'red'}]{self.fused[name] / self.plain[name]:.2f}[/]",
            )
            for name in self.plain
        ]  # fmt: skip
        columns = ("", "fused float64", "plain bfloat16", "fused bfloat16", "ratio")
        return table_of("relative rms error against the plain model in float64", columns, rows)


def numbers(model: Any) -> Numbers:
    """Run the plain and the fused model, in both dtypes, on this machine."""
    wide = copy.deepcopy(model).double()
    exact = run(wide, wide)
    have = {
        "formula": run(wide, fused(wide, target="host", lower="eager")),
        "plain": run(model, model),
        "fused": run(model, fused(model, target=TARGET, lower="eager")),
    }
    return Numbers(**{kind: {n: error(each[n], exact[n]) for n in exact} for kind, each in have.items()})


@torch.no_grad()
def seconds(model: Any) -> tuple[float, float]:
    """Seconds of one step behind a long context under Inductor, plain and fused: medians of interleaved rounds."""
    plain = torch.compile(copy.deepcopy(model), dynamic=False)
    calls = [(plain, new_cache(model, LONG, 1)), (fused(model, target="host"), new_cache(model, LONG, 1))]
    spent: list[list[float]] = [[], []]
    for number in range(ROUNDS + 1):
        for times, (call, cache) in zip(spent, calls, strict=True):
            for layer in cache.layers:  # as if all but the last tokens had been there
                layer.cumulative_length.fill_(LONG - ROUNDS - 2 + number)
            start = time.perf_counter()
            call(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - start)
    before, after = (statistics.median(times[1:]) for times in spent)  # the first round compiles
    return before, after


def main() -> int:
    """Explain, run, compare, time."""
    warnings.filterwarnings("ignore", module="torch")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    model = build()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("planning prefill and decode", total=None)
        reports = {"prefill": explained(model, PROMPT), "decode": explained(model, 1)}
        console.rule(f"DeepSeek-V3.2, two layers of it, planned for {TARGET}")
        console.print(str(reports["decode"]), markup=False, highlight=False)
        console.print(savings(reports))
        progress.update(task, description="running the plain and the fused model in float64 and bfloat16")
        found = numbers(model)
        console.rule("the same numbers?")
        console.print(found.table())
        progress.update(task, description=f"timing a step behind {LONG} tokens under Inductor")
        before, after = seconds(model)
    console.rule(f"a step of decoding behind {LONG} tokens, on this machine, under Inductor")
    rows = [
        ("plain", f"{before * 1e3:.1f}"),
        ("fused", f"{after * 1e3:.1f}"),
        ("times faster", f"{before / after:.1f}"),
    ]
    console.print(table_of("milliseconds", ("", "median"), rows))
    wrong = [name for name in found.plain if not found.good(name)]
    if wrong:
        console.print(f"[bold red]FAILED[/]: fusing has cost accuracy in {', '.join(wrong)}")
        return 1
    launches = reports["decode"].launches
    console.print(
        f"[bold green]OK[/]: {launches[0]} launches became {launches[1]} in a decode step, and the fused model "
        "computes the same."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
