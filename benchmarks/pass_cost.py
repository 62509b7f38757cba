"""What the pass costs beside tracing: seconds of the fusion pass over seconds of Dynamo and AOT, per number of layers.

    python benchmarks/pass_cost.py [--layers 4 16] [--rounds 3] [--limit 0.15]

Prints a table and one line of JSON; exits with 1 where the median ratio at the largest size is above the limit.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

from fusion import Options
from fusion.backend import FusionBackend
from fusion.report import GraphReport


class TimedBackend(FusionBackend):
    """The backend, with the time that its pass took."""

    seconds = 0.0

    def fuse(self, *args: object, **kwargs: object) -> GraphReport:
        """As the backend does, timed."""
        start = time.perf_counter()
        report = super().fuse(*args, **kwargs)  # type: ignore[arg-type]
        type(self).seconds = time.perf_counter() - start
        return report


def measure(layers: int) -> tuple[float, float]:
    """Seconds of the pass, and of everything else in the first call (tracing, and one eager run)."""
    config = transformers.DeepseekV3Config(
        vocab_size=96, hidden_size=256, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=96, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=32, first_k_dense_replace=layers, pad_token_id=0,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=TimedBackend(Options(target="ascend910_93", lower="eager")))
    start = time.perf_counter()
    with torch.no_grad():
        compiled(input_ids=torch.arange(8).view(1, 8), use_cache=False)
    return TimedBackend.seconds, time.perf_counter() - start - TimedBackend.seconds


def main(
    layers: Annotated[list[int], typer.Option(help="numbers of layers")] = [4, 16],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="repetitions; the median counts")] = 3,
    limit: Annotated[float, typer.Option(help="largest ratio that passes")] = 0.15,
) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    measure(1)  # imports and caches
    table = Table("layers", "pass, s", "tracing, s", "ratio", title="cost of the pass (medians)")
    ratios: dict[int, float] = {}
    for count in layers:
        pairs = [measure(count) for _ in range(rounds)]
        ratios[count] = statistics.median(own / rest for own, rest in pairs)
        middle = [f"{statistics.median(column):.3f}" for column in zip(*pairs, strict=True)]
        table.add_row(str(count), *middle, f"{ratios[count]:.1%}")
    Console().print(table)
    print(json.dumps({"pass_over_tracing": ratios}))
    raise typer.Exit(int(ratios[max(layers)] > limit))


if __name__ == "__main__":
    typer.run(main)
