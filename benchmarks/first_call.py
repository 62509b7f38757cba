"""What a user waits for: the first call with `lower="inductor"` over that of Inductor alone on the same plain model.

    python -m benchmarks.first_call --models DeepseekV32 --layers 2 --layers 4 --rounds 3 --ratio 1.05

Every call is in a process of its own, with empty caches of plans and of Inductor, on one thread, one after the other in
turns. CPU seconds, those of the C++ compiler among them; a table of medians of the ratios of one round each. Exits with
1 where a ratio is beyond the limit.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.pass_cost import MODELS, MODES, model_and_call

Case = tuple[str, int, str]
FUSED: dict[str, Any] = {
    "backend": "cann_fusion",
    "options": {"target": "host", "lower": "inductor", "plan_cache": "off"},
}


def seconds(case: Case, how: dict[str, Any]) -> float:
    """CPU seconds of a first call, in a process that has compiled nothing."""
    import torch._inductor.config as config

    torch.set_num_threads(1)
    config.compile_threads, config.fx_graph_cache = 1, False
    model, call = model_and_call(*case)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        start = _spent()
        torch.compile(model, fullgraph=True, **how)(**call)
        return _spent() - start


def _spent() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in both)


def main(
    models: Annotated[list[str], typer.Option(help=f"families: {', '.join(MODELS)}")] = ["DeepseekV32"],  # noqa: B006
    layers: Annotated[list[int], typer.Option(help="numbers of layers")] = [2, 4],  # noqa: B006
    mode: Annotated[str, typer.Option(help=f"step: {' or '.join(MODES)}")] = "decode",
    rounds: Annotated[int, typer.Option(help="repetitions, in turns; medians count")] = 3,
    ratio: Annotated[float, typer.Option(help="largest ratio of the first calls")] = math.inf,
) -> None:
    """Compare first calls; each option that is a list is given once for each of its items."""
    if unknown := [each for each in models if each not in MODELS] + [each for each in (mode,) if each not in MODES]:
        raise typer.BadParameter(f"not known: {', '.join(unknown)}; models are {', '.join(MODELS)}, modes {MODES}")
    cases: list[Case] = [(family, count, mode) for family in models for count in layers]
    runs = defaultdict[Case, list[tuple[float, float]]](list)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
        for case in track(cases * rounds, "compiling", console=Console(stderr=True)):
            alone, fused = (fresh.submit(seconds, case, how).result() for how in ({}, FUSED))
            runs[case].append((alone, fused))
    ratios = {case: statistics.median(fused / alone for alone, fused in found) for case, found in runs.items()}
    table = Table("model", "layers", "step", "Inductor alone, s", "fused, s", "ratio", title="first calls (medians)")
    for case, found in runs.items():
        alone, fused = (statistics.median(each) for each in zip(*found, strict=True))
        table.add_row(*map(str, case), f"{alone:.1f}", f"{fused:.1f}", f"{ratios[case]:.3f}")
    Console().print(table)
    print(json.dumps({" ".join(map(str, case)): round(each, 3) for case, each in ratios.items()}))
    raise typer.Exit(int(max(ratios.values()) > ratio))


if __name__ == "__main__":
    typer.run(main)
