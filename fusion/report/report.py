"""The report: rewrites, savings, and reasons of refusals, for every graph of a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from io import StringIO
from typing import Any

import torch.fx as fx

from fusion.errors import Failure
from fusion.graph.subgraphs import bodies
from fusion.records import Prepared, Refusal
from fusion.report.outcome import GraphReport, LayerReport, MatchReport, Tally, add_tallies, emitted
from fusion.report.regions import RegionReport


@dataclass(frozen=True)
class Break:
    """Place at which Python leaves the graphs: its code is in none of them.

    Attributes:
        where: `file:line` in the model's code; the first line of a function that is not traced.
        reason: the reason, in one line.
        function: the name of a function that is not traced, although its callees are; "" for a break between graphs.
    """

    where: str
    reason: str
    function: str = ""


@dataclass(frozen=True)
class Interruption:
    """Error of the model, or of tracing it, which ended the tracing.

    Attributes:
        error: type and message, in one line.
        where: `file:line` in the model's code.
        advice: advice to the user, or "".
        traceback: the traceback as Python prints it.
    """

    error: str
    where: str
    advice: str = ""
    traceback: str = field(default="", repr=False)

    def __str__(self) -> str:
        parts = self.error, f"at {self.where}" * bool(self.where), f"({self.advice})" * bool(self.advice)
        return " ".join(filter(None, parts))


@dataclass(frozen=True, repr=False)
class Report:
    """Report over all graphs of a model.

    Attributes:
        target: name of the target that the fusions were planned for.
        parts: one report per graph.
        guesses: number of values that Python read from data, by `file:line`; they are sampled, as nothing was run.
        breaks: places at which Python leaves the graphs.
        interruption: the error that ended the call before all of it was traced; None without one.
        notes: remarks on the call that was traced.
    """

    target: str
    parts: tuple[GraphReport, ...]
    guesses: Mapping[str, int] = field(default_factory=dict[str, int])
    breaks: tuple[Break, ...] = ()
    interruption: Interruption | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Name the target and count the entries; `str` is the report itself."""
        counts = f"{len(self.parts)} graphs, {len(self.matches)} matches, {len(self.refusals)} refusals"
        return f"Report({self.target}: {counts})"

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The rewritten graphs, with real operator names, before lowering."""
        return [part.graph for part in self.parts]

    @property
    def lowered(self) -> list[fx.GraphModule]:
        """The graph of each part as it is handed to the compiler of this machine; made anew at each call."""
        return [part.hand_on(part.graph) for part in self.parts]

    @property
    def matches(self) -> list[MatchReport]:
        """The rewrites of all graphs."""
        return [match for part in self.parts for match in part.matches]

    @property
    def refusals(self) -> list[Refusal]:
        """The refusals of all graphs, with their reasons."""
        return [refusal for part in self.parts for refusal in part.refusals]

    @property
    def failures(self) -> list[Failure]:
        """Errors in the pass: each left a graph unchanged, or dropped a rule."""
        return [failure for part in self.parts for failure in part.failures]

    @property
    def assumptions(self) -> dict[str, str]:
        """Kind of mask that rewrites rely on and every call is checked for, by the path of the argument."""
        return {name: kind for part in self.parts for name, kind in part.assumptions.items()}

    @property
    def ops(self) -> Counter[str]:
        """Number of emitted operators by qualified name, as the NPU would run them."""
        return sum((_emitted(graph.graph) for graph in self.graphs), Counter[str]())

    @property
    def launches(self) -> tuple[int, int]:
        """Live calls that read or return floating-point or quantised data, before and after."""
        before = sum(each.launches for part in self.parts for each in part.before.values())
        after = sum(each.launches for part in self.parts for each in part.after.values())
        return before, after

    @property
    def prepared(self) -> list[Prepared]:
        """Tensors that are computed from Parameters once and passed to the graphs."""
        return [each for part in self.parts for each in part.prepared]

    @property
    def prepared_bytes(self) -> int:
        """Additional bytes of the prepared tensors, for one set of Parameters."""
        return sum(part.prepared_bytes for part in self.parts)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the Parameters that the graphs read."""
        return sum(part.parameter_bytes for part in self.parts)

    @property
    def copies(self) -> dict[str, tuple[int, int]]:
        """Number of prepared tensors that are copies, and their bytes, by the reason."""
        kinds: dict[str, tuple[int, int]] = {}
        for each in self.prepared:
            if each.copied:
                tensors, size = kinds.get(each.copied, (0, 0))
                kinds[each.copied] = tensors + 1, size + each.bytes
        return kinds

    @property
    def unprepared(self) -> list[str]:
        """Tensors computed from Parameters that are not prepared, and the reasons."""
        return list(dict.fromkeys(part.unprepared for part in self.parts if part.unprepared))

    @property
    def regions(self) -> list[RegionReport]:
        """The regions in which the model's author expects a fusion, by `fusion.region`."""
        return [each for part in self.parts for each in part.regions]

    @property
    def layers(self) -> dict[str, LayerReport]:
        """Launches and bookkeeping calls before and after, per module path."""
        before = reduce(add_tallies, (part.before for part in self.parts), dict[str, Tally]())
        after = reduce(add_tallies, (part.after for part in self.parts), dict[str, Tally]())
        return {path: LayerReport(before.get(path, Tally()), after.get(path, Tally())) for path in (*before, *after)}

    def to_json(self) -> str:
        """Write everything but the graphs as JSON."""
        names = ("rule", "reason", "where", "source", "module", "target")
        content: dict[str, Any] = {
            "target": self.target,
            "graphs": len(self.parts),
            "launches": dict(zip(("before", "after"), self.launches, strict=True)),
            "ops": dict(sorted(self.ops.items())),
            "result_copies": sum(part.result_copies for part in self.parts),
            "prepared": {
                "tensors": len(self.prepared),
                "joined": sum(each.joined for each in self.prepared),
                "bytes": self.prepared_bytes,
                "parameter_bytes": self.parameter_bytes,
                "copies": [{"why": why, "tensors": n, "bytes": size} for why, (n, size) in self.copies.items()],
                "not": self.unprepared,
            },
            "layers": {path: asdict(layer) for path, layer in self.layers.items()},
            "assumptions": self.assumptions,
            "guesses": dict(self.guesses),
            "breaks": [asdict(each) for each in self.breaks],
            "interruption": None if self.interruption is None else asdict(self.interruption),
            "notes": list(self.notes),
            "matches": [asdict(each) for each in self.matches],
            "refusals": [{name: getattr(each, name) for name in names} for each in self.refusals],
            "regions": [
                {name: getattr(each, name) for name in ("rule", "name", "module", "where", "is_met", "summary")}
                for each in self.regions
            ],
            "failures": [{"graph": number, **asdict(each)} for number, each in self._failures_by_graph()],
        }
        return json.dumps(content, indent=2)

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=120, force_terminal=False).print(*self.tables())
        return text.getvalue()

    def tables(self) -> list[Any]:
        """Build the tables of the report for `rich`, for a terminal with colours."""
        always = [self._operators(), self._modules()]
        first = (self._noted(), self._interrupted(), self._failed(), self._broken())
        others = (self._regions(), self._remarks(), self._assumed(), self._guessed(), self._prepared(), self._refused())
        return always + [each for each in (*first, *others) if each.row_count or each.caption]

    def _operators(self) -> Any:
        before, after = self.launches
        graphs = f"{len(self.parts)} graph" + ("" if len(self.parts) == 1 else "s")
        waits = sum(part.host_reads for part in self.parts)
        times = f"{waits} times" if waits > 1 else "once"
        notes = [f"each step waits {times} for the device, to read lengths (lengths='host')"] if waits else []
        copies = sum(part.result_copies for part in self.parts)
        notes += [f"copies so that results lie in memory as those of the model do: {copies}"] if copies else []
        title = f"fused for {self.target}: {graphs}, {before} launches -> {after}"
        return _table(title, ("operator", "calls:"), sorted(self.ops.items()), notes)

    def _modules(self) -> Any:
        rows = [
            (path or "(outside modules)", count, layer.before.launches, layer.after.launches, layer.after.bookkeeping)
            for (path, layer), count in _alike(self.layers).items()
        ]
        columns = ("module", "of them:", "before:", "after:", "integer calls:")
        return _table("launches per module (layers alike are counted together)", columns, rows)

    def _failures_by_graph(self) -> list[tuple[int, Failure]]:
        return [(number, each) for number, part in enumerate(self.parts) for each in part.failures]

    def _failed(self) -> Any:
        rows = [
            (number, each.stage, "as it came" if each.drops_graph else f"without {each.rule}", each.error, each.place)
            for number, each in self._failures_by_graph()
        ]
        title = "failed in the pass: please report it, with the graph that options={'dump_dir': folder} writes"
        return _table(title, ("graph", "stage", "runs", "error", "at"), rows)

    def _noted(self) -> Any:
        return _table("of the call that was traced", ("note",), [(each,) for each in self.notes])

    def _interrupted(self) -> Any:
        given = self.interruption
        rows = [] if given is None else [(given.error, given.where, given.advice)]
        return _table("not traced to the end: the report is of the graphs before", ("error", "at", "advice"), rows)

    def _broken(self) -> Any:
        rows = [
            (f"{each.function} is not traced itself" if each.function else "break", each.where, each.reason)
            for each in self.breaks
        ]
        return _table("where Python leaves the graphs", ("what", "at", "reason"), rows)

    def _regions(self) -> Any:
        counts = Counter((each.rule, each.name or "with", each.where, each.summary) for each in self.regions)
        rows = [(rule, name, count, where, summary) for (rule, name, where, summary), count in counts.items()]
        columns = ("expected", "region", "times:", "at", "found")
        return _table("regions in which a fusion is expected", columns, rows)

    def _remarks(self) -> Any:
        counts = Counter((each.rule, each.remark) for each in self.matches if each.remark)
        rows = [(rule, count, remark) for (rule, remark), count in counts.items()]
        return _table("chosen by cost", ("rule", "times:", "choice"), rows)

    def _assumed(self) -> Any:
        return _table("assumed, and checked at every call", ("argument", "assumed to be"), self.assumptions.items())

    def _guessed(self) -> Any:
        title = "read from data, as nothing was run from a sample of it"
        return _table(title, ("read at", "times:"), self.guesses.items())

    def _prepared(self) -> Any:
        views = sum(each.joined for each in self.prepared)
        rows = [("in place of the Parameters", views, *self._size(0))] if views else []
        rows += [(f"a copy: {why}", tensors, *self._size(size)) for why, (tensors, size) in self.copies.items()]
        mebibytes, share = self._size(self.prepared_bytes)
        notes = [f"not prepared: {each}" for each in self.unprepared]
        if any(each.copied and each.sources for each in self.prepared):
            notes.append(
                "copies: writes through .data are seen on the host alone; elsewhere call fusion.refresh(model)"
            )
        title = f"prepared, once: {mebibytes} MiB beside the Parameters, {share} of these"
        return _table(title, ("held as", "tensors:", "MiB:", "of the Parameters:"), rows, notes)

    def _size(self, size: int) -> tuple[str, str]:
        """Format `size` bytes in MiB, and in per cent of the Parameters."""
        return f"{size / 2**20:,.2f}", f"{100 * size / self.parameter_bytes:.2f} %" if self.parameter_bytes else "-"

    def _refused(self) -> Any:
        kinds: dict[tuple[str, str], list[Refusal]] = {}
        for each in self.refusals:
            on = f" [on {each.target}]" if each.target and each.target != self.target else ""
            kinds.setdefault((each.rule, each.reason + on), []).append(each)
        rows = [
            (rule, len(those), reason, those[0].where or those[0].module) for (rule, reason), those in kinds.items()
        ]
        return _table("not fused, and why", ("rule", "times:", "reason", "first at"), rows)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], notes: Sequence[str] = ()) -> Any:
    """Build a `rich` table with `notes` as its caption; columns whose names end in a colon are right-aligned."""
    from rich.markup import escape
    from rich.table import Table

    width = max(map(len, (title, *notes)))
    table = Table(title=title, title_justify="left", min_width=width)
    table.caption, table.caption_justify = "\n".join(notes) or None, "left"
    for name in columns:
        table.add_column(name.rstrip(":"), justify="right" if name.endswith(":") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(each)) for each in row))
    return table


def _alike(layers: Mapping[str, LayerReport]) -> Counter[tuple[str, LayerReport]]:
    """Count the modules in `layers` by their path with "*" in place of numbers, and their counts."""
    kinds: Counter[tuple[str, LayerReport]] = Counter()
    for path, layer in layers.items():
        kinds[".".join("*" if part.isdigit() else part for part in path.split(".")), layer] += 1
    return kinds


def _emitted(source: fx.Graph) -> Counter[str]:
    inside = (_emitted(each.code.graph) for each in bodies(source) if each.code is not None)
    names = (emitted(node) for node in source.nodes)
    return sum(inside, Counter(name for name in names if name))
