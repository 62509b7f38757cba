"""Measure the pass over tracing, by model, target, step and number of layers: CPU seconds over those of Dynamo and AOT.

    python -m benchmarks.pass_cost --models DeepseekV32 --models Qwen3 --layers 4 --layers 61 --modes decode
                                   --targets host --targets ascend910_93
                                   --incumbents --never 100 --json figures.json --cold 0.04

A model is traced once a round, in a process of its own, where nothing but a model of two layers was traced before; and
everything is run on copies of that graph, one after the other: the whole pass without plans that were kept, the same
with them, the pass as a guest of another compiler, with rules that never match, and what others do at the same places.
Prints a table of medians and one line of JSON; exits with 1 where a figure is beyond a limit that is given.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.fx as fx
import transformers
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import incumbents
from benchmarks.never import never_matching
from fusion import Options, pipeline
from fusion.facts import Facts
from fusion.frontend.backend import FusionBackend
from fusion.frontend.library import library_for
from fusion.frontend.passes import FusionPass
from fusion.language import Library
from fusion.report.outcome import GraphReport, Outcome

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
COMPARED = ("match", "plan", "select", "rewrite")
"""The stages that do what others do."""


class _Measured(Exception):  # noqa: N818 - ends a compilation behind the pass
    """Everything is measured: nothing is run."""


@dataclass
class Figures:
    """CPU seconds of one round; of the pass without plans that were kept (cold), and with them (warm).

    Attributes:
        tracing: Dynamo and AOT.
        cold: the whole pass.
        warm: the whole pass, with the plans of a run before it.
        guest: `FusionPass`, without plans that were kept.
        stages: each stage of the cold pass.
        never: the cold pass with further rules, over that without them.
        others: by name, what others take, and how many places they replace.
        places: how many places the pass rewrites.
        peak: bytes that the pass allocates at most.
    """

    tracing: float = 0.0
    cold: float = 0.0
    warm: float = 0.0
    guest: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    never: float = 0.0
    others: dict[str, tuple[float, int]] = field(default_factory=dict)
    places: int = 0
    peak: int = 0

    @property
    def compared(self) -> float:
        """The stages that do what others do."""
        return sum(self.stages[name] for name in COMPARED)


@dataclass(frozen=True)
class _Judge(FusionBackend):
    """The backend, which in place of compiling measures the pass on copies of the graph that it is given."""

    never: int = 0
    with_others: bool = False

    def fuse(
        self, gm: fx.GraphModule, facts: Facts = Facts(), original: fx.Graph | None = None, with_refusals: bool = True
    ) -> GraphReport:
        """As the backend does, several times."""
        entered = time.process_time()
        found = Figures()
        with _watched(found):
            found.cold, report = self._run(gm, facts)
        kept = replace(self.options, plan_cache="memory")
        self._run(gm, facts, options=kept)
        found.warm, _ = self._run(gm, facts, options=kept)
        found.guest = self._as_guest(gm)
        found.places = len(report.chosen)
        if self.never:
            known = library_for(self.options, self.rules)
            more = Library((*known.rules, *never_matching(self.never)), known.readers)
            found.never = self._run(gm, facts, rules=more)[0] - self._run(gm, facts, rules=known)[0]
        if self.with_others:
            gone = [[node.name for node in each.dying] for each in report.chosen]
            kinds = incumbents.kinds(gm.graph, gone)
            found.others["register_replacement"] = incumbents.by_register_replacement(gm, kinds)
            found.others["subgraph_rewriter"] = incumbents.by_subgraph_rewriter(gm, kinds)
        tracemalloc.start()
        self._run(gm, facts)
        found.peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        raise _Measured(entered, found)

    def _run(self, gm: fx.GraphModule, facts: Facts, **changed: Any) -> tuple[float, Outcome]:
        """Seconds and outcome of the pass on a copy of the graph."""
        own, original = (fx.GraphModule(gm, copy.deepcopy(gm.graph)) for _ in range(2))
        backend = FusionBackend(**{"options": self.options, "rules": self.rules} | changed)
        start = time.process_time()
        report = backend.outcome(own, facts, original.graph)
        return time.process_time() - start, report

    def _as_guest(self, gm: fx.GraphModule) -> float:
        """Return the CPU seconds of `FusionPass` on a copy of the graph."""
        own, guest = fx.GraphModule(gm, copy.deepcopy(gm.graph)), FusionPass(self.options, self.rules)
        start = time.process_time()
        guest(own)
        return time.process_time() - start


def model_and_call(family: str, layers: int, mode: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Build a small random model, and the arguments of one step."""
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=layers, **MODELS[family](layers))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval().requires_grad_(False)
    call: dict[str, Any] = {"input_ids": torch.arange(8).view(1, 8), "use_cache": False}
    if mode == "decode":
        cache = transformers.StaticCache(config=config, max_cache_len=32)
        with torch.no_grad():
            model(input_ids=call["input_ids"], past_key_values=cache, use_cache=True)
        call = {"input_ids": torch.ones(1, 1, dtype=torch.long), "past_key_values": cache, "use_cache": True}
    return model, call


def measure(family: str, target: str, mode: str, layers: int, never: int = 0, with_others: bool = False) -> Figures:
    """Compile one step of a small random model, up to the fused graph."""
    model, call = model_and_call(family, layers, mode)
    options = Options(target=target, lower="eager", plan_cache="off")
    with torch.no_grad():
        torch.compiler.reset()
        judge = _Judge(options, never=never, with_others=with_others)
        compiled = torch.compile(model, backend=judge, fullgraph=True)
        start = time.process_time()
        try:
            compiled(**call)
        except Exception as error:
            return _figures(error, start)
    raise SystemExit(f"pass_cost: {family} {mode} compiled without its graph having been fused; try another step")


def _measured(family: str, target: str, mode: str, layers: int, never: int, with_others: bool) -> Figures:
    """Run a round in a fresh process, behind one small compilation that pays for imports."""
    torch.set_num_threads(1)
    measure(family, target, mode, 2, never)
    return measure(family, target, mode, layers, never, with_others)


def _figures(error: BaseException, start: float) -> Figures:
    reason: BaseException | None = error
    while reason is not None and not isinstance(reason, _Measured):
        reason = reason.__cause__ or getattr(reason, "inner_exception", None)
    if reason is None:
        raise error
    entered, found = reason.args
    return replace(found, tracing=entered - start)


@contextmanager
def _watched(found: Figures) -> Iterator[None]:
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


def exponent(seconds: Mapping[int, float]) -> float:
    """How the cost grows between the smallest and the largest number of layers: 1 in proportion, 0 not at all."""
    small, large = min(seconds), max(seconds)
    return math.log(seconds[large] / seconds[small]) / math.log(large / small) if large > small else 0.0


def main(
    models: Annotated[list[str], typer.Option(help=f"families: {', '.join(MODELS)}")] = ["DeepseekV32", "Qwen3"],  # noqa: B006
    layers: Annotated[list[int], typer.Option(help="numbers of layers")] = [4, 16],  # noqa: B006
    modes: Annotated[list[str], typer.Option(help=f"steps: {', '.join(MODES)}")] = ["decode"],  # noqa: B006
    targets: Annotated[list[str], typer.Option(help="targets, host among them")] = ["ascend910_93"],  # noqa: B006
    rounds: Annotated[int, typer.Option(help="repetitions, interleaved; medians count")] = 3,
    others: Annotated[bool, typer.Option("--incumbents", help="run what others do at the same places")] = False,
    never: Annotated[int, typer.Option(help="further rules, which match nowhere")] = 0,
    file: Annotated[Path | None, typer.Option("--json", help="where the figures go as JSON, too")] = None,
    cold: Annotated[float, typer.Option(help="largest ratio of the pass to tracing, at the most layers")] = math.inf,
    warm: Annotated[float, typer.Option(help="the same with plans that were kept")] = math.inf,
    slope: Annotated[float, typer.Option(help="largest exponent of the pass over the layers")] = math.inf,
    never_limit: Annotated[float, typer.Option(help="largest ratio of the further rules to tracing")] = math.inf,
    faster: Annotated[float, typer.Option(help="how often faster than register_replacement, at least")] = 0.0,
) -> None:
    """Measure what the pass costs beside tracing; each option that is a list is given once for each of its items."""
    unknown = [each for each in models if each not in MODELS] + [each for each in modes if each not in MODES]
    if unknown:
        raise typer.BadParameter(f"not known: {', '.join(unknown)}; models are {', '.join(MODELS)}, modes {MODES}")
    if faster and not others:
        raise typer.BadParameter("--faster compares with --incumbents: give both")
    of = list(product(models, targets, modes))
    cases = [(*each, count) for each in of for count in sorted(set(layers))]
    runs = defaultdict[tuple[str, str, str, int], list[Figures]](list)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
        for case in track([case for _ in range(rounds) for case in cases], "compiling", console=Console(stderr=True)):
            runs[case].append(fresh.submit(_measured, *case, never, others).result())
    figures = {" ".join(map(str, case)): _figures_of(found) for case, found in runs.items()}
    slopes = {
        " ".join(each): exponent({n: figures[f"{' '.join(each)} {n}"]["cold_seconds"] for n in layers}) for each in of
    }
    _show(runs, figures)
    text = json.dumps({"cases": figures, "exponent": {name: round(each, 2) for name, each in slopes.items()}})
    print(text)
    if file is not None:
        file.write_text(text + "\n")
    largest = [each for name, each in figures.items() if name.endswith(f" {max(layers)}")]
    broken = [
        *(f"cold {each['cold']:.1%}" for each in largest if each["cold"] > cold),
        *(f"warm {each['warm']:.1%}" for each in largest if each["warm"] > warm),
        *(f"further rules {each['never']:.2%}" for each in largest if each["never"] > never_limit),
        *(
            f"{each['register_replacement']:.1f}x"
            for each in largest
            if others and each["register_replacement"] < faster
        ),
        *(f"exponent {each:.2f}" for each in slopes.values() if each > slope),
    ]
    if broken:
        Console(stderr=True).print(f"beyond the limits: {', '.join(broken)}")
    raise typer.Exit(int(bool(broken)))


def _figures_of(found: Sequence[Figures]) -> dict[str, float]:
    """Medians over the rounds; ratios of one round each."""

    def median(*values: float) -> float:
        return round(statistics.median(values), 4)

    said = {
        "tracing_seconds": median(*(each.tracing for each in found)),
        "cold_seconds": median(*(each.cold for each in found)),
        "cold": median(*(each.cold / each.tracing for each in found)),
        "warm": median(*(each.warm / each.tracing for each in found)),
        "guest": median(*(each.guest / each.tracing for each in found)),
        "never": median(*(each.never / each.tracing for each in found)),
        "places": median(*(each.places for each in found)),
        "peak_mib": median(*(each.peak / 2**20 for each in found)),
    }
    for name in found[0].others:
        said[name] = median(*(each.others[name][0] / each.compared for each in found))
        said[f"{name}_places"] = median(*(each.others[name][1] for each in found))
    return said


def _show(
    runs: Mapping[tuple[str, str, str, int], Sequence[Figures]], figures: Mapping[str, Mapping[str, float]]
) -> None:
    titles = (
        "model",
        "target",
        "step",
        "layers",
        "tracing, s",
        "cold, s",
        "cold",
        "warm",
        "guest",
        "further rules",
        "peak, MiB",
    )
    table = Table(*titles, "others", "stages of the cold pass", title="cost of the pass over Dynamo and AOT (medians)")
    for case, found in runs.items():
        each = figures[" ".join(map(str, case))]
        others = [f"{name} {each[name]:.1f}x, {each[f'{name}_places']:.0f} of {each['places']:.0f} places"
                  for name in found[0].others]  # fmt: skip
        table.add_row(
            *map(str, case), f"{each['tracing_seconds']:.2f}", f"{each['cold_seconds']:.2f}", f"{each['cold']:.1%}",
            f"{each['warm']:.1%}", f"{each['guest']:.1%}",
            f"{each['never']:.2%}", f"{each['peak_mib']:.0f}", "\n".join(others), _shares(found),
        )  # fmt: skip
    Console(width=180).print(table)


def _shares(found: Sequence[Figures]) -> str:
    """List the stages that take most of the pass."""
    names = {name for each in found for name in each.stages}
    shares = {name: statistics.median(each.stages[name] / each.cold for each in found) for name in names}
    most = sorted(shares.items(), key=lambda each: -each[1])[:5]
    return ", ".join(f"{name} {share:.0%}" for name, share in most)


if __name__ == "__main__":
    typer.run(main)
