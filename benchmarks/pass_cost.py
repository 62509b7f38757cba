"""What the pass costs beside tracing, by model and number of layers: its seconds over those of Dynamo and AOT.

    python benchmarks/pass_cost.py [--models DeepseekV32 Qwen3] [--layers 4 16] [--modes decode] [--rounds 3]
                                   [--limit 0.15] [--slope 1.05]

Prints a table, the share of each stage, how the cost grows with the layers, and one line of JSON. Exits with 1 where a
median ratio at the largest number of layers, or the exponent by which the pass grows, is above its limit.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fusion import Options, pipeline
from fusion.backend import FusionBackend
from fusion.report import GraphReport

_COMMON = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 192, "num_attention_heads": 4, "pad_token_id": 0}
_LATENT = dict(
    _COMMON, num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
)  # fmt: skip
_GROUPED = dict(_COMMON, num_key_value_heads=2, head_dim=64)
MODELS = {
    "DeepseekV3": lambda layers: _LATENT | {"first_k_dense_replace": layers},
    "DeepseekV32": lambda layers: (
        _LATENT | {"mlp_layer_types": ["dense"] * layers, "index_head_dim": 128, "index_n_heads": 4, "index_topk": 16}
    ),
    "Qwen3": lambda layers: _GROUPED,
    "GptOss": lambda layers: _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
MODES = ("decode", "prefill")


class _Fused(Exception):  # noqa: N818 - ends a compilation behind the pass
    """The pass is done: nothing is run."""


@dataclass
class Measured:
    """Seconds of one compilation: of Dynamo and AOT, of the pass, and of each of its stages."""

    tracing: float = 0.0
    own: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class _Timed(FusionBackend):
    """The backend, which stops behind its pass and tells how long that took."""

    def fuse(self, *args: Any, **kwargs: Any) -> GraphReport:
        """As the backend does, timed."""
        start = time.process_time()
        super().fuse(*args, **kwargs)
        raise _Fused(start, time.process_time())


def measure(family: str, layers: int, mode: str) -> Measured:
    """Compile one step of a small random model, up to the fused graph."""
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=layers, **MODELS[family](layers))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval().requires_grad_(False)
    call: dict[str, Any] = {"input_ids": torch.arange(8).view(1, 8), "use_cache": False}
    found = Measured()
    with torch.no_grad():
        if mode == "decode":
            cache = transformers.StaticCache(config=config, max_cache_len=32)
            model(input_ids=call["input_ids"], past_key_values=cache, use_cache=True)
            call = {"input_ids": torch.ones(1, 1, dtype=torch.long), "past_key_values": cache, "use_cache": True}
        torch.compiler.reset()
        compiled = torch.compile(model, backend=_Timed(Options(target="ascend910_93", lower="eager")), fullgraph=True)
        start = time.process_time()
        with _watched(found):
            try:
                compiled(**call)
            except Exception as error:
                begin, end = _moments(error)
                found.tracing, found.own = begin - start, end - begin
    return found


def _moments(error: BaseException | None) -> tuple[float, float]:
    while error is not None and not isinstance(error, _Fused):
        error = error.__cause__ or getattr(error, "inner_exception", None)
    if error is None:
        raise SystemExit("pass_cost: the model compiled without its graph having been fused; try another mode")
    begin, end = error.args
    return begin, end


@contextmanager
def _watched(found: Measured) -> Iterator[None]:
    """Note the seconds that each stage takes, without those of stages inside it."""
    entered, inside = pipeline.stage, [0.0]

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        inside.append(0.0)
        start = time.process_time()
        with entered(name):
            yield
        took = time.process_time() - start
        found.stages[name] += took - inside.pop()
        inside[-1] += took

    pipeline.stage = timed
    try:
        yield
    finally:
        pipeline.stage = entered


def exponent(seconds: dict[int, float]) -> float:
    """How the cost grows between the smallest and the largest number of layers: 1 in proportion, 0 not at all."""
    small, large = min(seconds), max(seconds)
    return math.log(seconds[large] / seconds[small]) / math.log(large / small) if large > small else 0.0


def main(
    models: Annotated[list[str], typer.Option(help=f"families: {', '.join(MODELS)}")] = ["DeepseekV32", "Qwen3"],  # noqa: B006
    layers: Annotated[list[int], typer.Option(help="numbers of layers")] = [4, 16],  # noqa: B006
    modes: Annotated[list[str], typer.Option(help=f"steps: {', '.join(MODES)}")] = ["decode"],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="repetitions, interleaved; medians count")] = 3,
    limit: Annotated[float, typer.Option(help="largest ratio of the pass to tracing at the most layers")] = 0.15,
    slope: Annotated[float, typer.Option(help="largest exponent of the pass over the layers")] = 1.05,
) -> None:
    """Measure and print."""
    unknown = [each for each in models if each not in MODELS] + [each for each in modes if each not in MODES]
    if unknown:
        raise typer.BadParameter(f"not known: {', '.join(unknown)}; models are {', '.join(MODELS)}, modes {MODES}")
    torch.set_num_threads(1)
    cases = [(family, mode, count) for family in models for mode in modes for count in sorted(layers)]
    measure(models[0], 2, modes[0])  # imports and caches
    runs = defaultdict[tuple[str, str, int], list[Measured]](list)
    for case in track([case for _ in range(rounds) for case in cases], "compiling", console=Console(stderr=True)):
        family, mode, count = case
        runs[case].append(measure(family, count, mode))
    table = Table(
        "model", "step", "layers", "pass, s", "tracing, s", "ratio", "stages", title="cost of the pass (medians)"
    )
    ratios = {case: statistics.median(each.own / each.tracing for each in found) for case, found in runs.items()}
    owns = {case: statistics.median(each.own for each in found) for case, found in runs.items()}
    for (family, mode, count), found in runs.items():
        case = family, mode, count
        tracing = statistics.median(each.tracing for each in found)
        table.add_row(
            family, mode, str(count), f"{owns[case]:.2f}", f"{tracing:.2f}", f"{ratios[case]:.1%}", _shares(found)
        )
    slopes = {
        f"{family} {mode}": exponent({count: owns[family, mode, count] for count in layers})
        for family in models
        for mode in modes
    }
    Console(width=140).print(table)
    told = {" ".join(map(str, case)): round(ratio, 4) for case, ratio in ratios.items()}
    print(json.dumps({"pass_over_tracing": told, "exponent": {name: round(each, 2) for name, each in slopes.items()}}))
    worst = max(ratio for (_, _, count), ratio in ratios.items() if count == max(layers))
    raise typer.Exit(int(worst > limit or max(slopes.values()) > slope))


def _shares(found: list[Measured]) -> str:
    """The stages that take most of the pass."""
    names = {name for each in found for name in each.stages}
    shares = {name: statistics.median(each.stages[name] / each.own for each in found) for name in names}
    most = sorted(shares.items(), key=lambda each: -each[1])[:4]
    return ", ".join(f"{name} {share:.0%}" for name, share in most)


if __name__ == "__main__":
    typer.run(main)
