"""The text of what the pass does to one graph, and the files in which it is kept."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.fx as fx

from fusion.frontend.library import installed
from fusion.operators import PACKAGES
from fusion.options import Options
from fusion.pipeline import Outcome, fuse_graph
from fusion.report.outcome import live_calls
from fusion.testing import Captured

if TYPE_CHECKING:
    from .cases import Case

FOLDER = Path(__file__).parent / "expected"
TARGETS = ("host", "ascend910_93")


def text(case: Case) -> str:
    """What comes out for each target; a target that gives what the one before it gave is not repeated."""
    captured = case.captured()
    told = {target: _told(captured, target, case.opt_in) for target in TARGETS}
    if len(set(told.values())) == 1:
        return _under(" and ".join(TARGETS), told[TARGETS[0]])
    return "\n".join(_under(target, each) for target, each in told.items())


def _under(target: str, told: str) -> str:
    first, *rest = told.splitlines()
    return "\n".join((f"{target}: {first}", *(f"  {each}" for each in rest)))


def _told(captured: Captured, target: str, opt_in: frozenset[str]) -> str:
    graph = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    before = _launches(graph.graph)
    options = Options(target=target, lower="eager", opt_in=opt_in, packages=frozenset(PACKAGES))
    outcome = fuse_graph(graph.graph, installed(), options, captured.facts)
    return "\n".join(_lines(graph.graph, before, outcome))


def _lines(source: fx.Graph, before: int, outcome: Outcome) -> Iterable[str]:
    yield f"{before} -> {_launches(source)} launches"
    yield from _counted("", (_operator(node) for node in source.nodes if "fusion" in node.meta))
    yield from _counted("by ", (f"{each.match.rule.name} {each.lowering}" for each in outcome.chosen))
    yield from _counted("", (f"refused: {each.rule}: {each.reason}" for each in outcome.refusals))
    if outcome.prepared or outcome.result_copies or outcome.host_reads:
        counts = {
            "prepared": len(outcome.prepared),
            "copies of results": outcome.result_copies,
            "host reads": outcome.host_reads,
        }
        yield ", ".join(f"{name}: {count}" for name, count in counts.items() if count)
    yield from (f"failed: {each.rule}: {each.error}" for each in outcome.failures)


def _operator(node: fx.Node) -> str:
    target = node.target
    known = isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")
    return str(target) if known else ""


def _counted(before: str, names: Iterable[str]) -> list[str]:
    counts = Counter(each for each in names if each)
    return [f"{before}{name}{f' x{count}' if count > 1 else ''}" for name, count in sorted(counts.items())]


def _launches(source: fx.Graph) -> int:
    return sum(each.launches for each in live_calls(source).values())


def kept(file: str, folder: Path = FOLDER) -> dict[str, str]:
    """What is kept in a file of a folder, by the name of the case; nothing where there is no such file."""
    path = folder / f"{file}.txt"
    blocks = path.read_text().split("\n\n") if path.exists() else []
    entries = (each.strip("\n").partition("\n") for each in blocks if each.strip())
    return {name[1:-1]: body for name, _, body in entries}


def keep(file: str, bodies: Mapping[str, str], folder: Path = FOLDER) -> None:
    """Write a file of a folder."""
    folder.mkdir(exist_ok=True)
    blocks = (f"[{name}]\n{body}\n" for name, body in bodies.items())
    (folder / f"{file}.txt").write_text("\n".join(blocks))
