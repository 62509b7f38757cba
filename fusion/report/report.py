"""The report: rewrites, savings, and reasons of refusals, for every graph of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import torch.fx as fx

from fusion.errors import Failure
from fusion.graph.subgraphs import bodies
from fusion.operators.packages import VENDOR, package_of
from fusion.records import Prepared, Refusal
from fusion.report.compose import Composition, cost_of
from fusion.report.document import Break, Document, Expected, Interruption, Memory, Stored
from fusion.report.outcome import GraphReport, LayerReport, MatchReport, Tally, add_tallies
from fusion.report.regions import RegionReport
from fusion.report.trace import displayed_place, emitted
from fusion.report.why import TRIES, Explanation, why


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
        model: name of the class or function that was traced; "" if it is not known.
    """

    target: str
    parts: tuple[GraphReport, ...]
    guesses: Mapping[str, int] = field(default_factory=dict[str, int])
    breaks: tuple[Break, ...] = ()
    interruption: Interruption | None = None
    notes: tuple[str, ...] = ()
    model: str = ""

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
        """The refusals of all graphs, with their reasons; one reason at one line of one module once."""
        refusals = (refusal for part in self.parts for refusal in part.refusals)
        return list(
            {(each.rule, each.reason, each.target, each.module, each.where): each for each in refusals}.values()
        )

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
    def packages(self) -> dict[str, str]:
        """Package of each operator in `ops` that torch_npu does not have."""
        owners = {name: package_of(name.partition("::")[0]) for name in self.ops}
        return {name: owner.name for name, owner in owners.items() if owner not in (None, VENDOR)}

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

    def why(self, place: str | Refusal, tries: int = TRIES) -> list[Explanation]:
        """Explain the refusals at `place`, each with a change of the model that makes the fusion, where one is known.

        The change is proven: it is made in the captured graph, and the pass makes the fusion there. Reports that were
        pickled, or of a compiled model, have the reasons alone.

        Args:
            place: `file:line`, of which the folders may be left out; the path of a module; or one of `refusals`.
            tries: number of changes that are tried for each reason, at most; 0 for the reasons alone.
        """
        return why(self.parts, place, tries)

    def document(self, everything: bool = False) -> Document:
        """Compose the content of the report, with equal layers as one.

        Args:
            everything: True to list refusals at places that fused otherwise as well.
        """
        made = Composition(self.parts)
        changes = tuple(each for each in made.changes if everything or each.target or not each.fused_otherwise)
        return Document(
            model=self.model,
            target=self.target,
            graphs=len(self.parts),
            before=cost_of(made.before),
            after=cost_of(made.after),
            ops=dict(sorted(self.ops.items())),
            packages=dict(sorted(self.packages.items())),
            changes=changes,
            hidden=sum(each.times for each in made.changes) - sum(each.times for each in changes),
            rewrites=made.rewrites(),
            left=made.left(),
            copied=made.copied(),
            modules=made.modules(),
            layers=made.layers(),
            scopes=made.scopes(),
            expected=self._expected(),
            assumptions=self.assumptions,
            guesses=dict(self.guesses),
            breaks=self.breaks,
            interruption=self.interruption,
            notes=self.notes,
            failures=tuple((number, each) for number, part in enumerate(self.parts) for each in part.failures),
            memory=self._memory(),
            result_copies=sum(part.result_copies for part in self.parts),
            host_reads=sum(part.host_reads for part in self.parts),
        )

    def _expected(self) -> tuple[Expected, ...]:
        """Count the regions that are alike."""
        kinds = Counter(
            (each.rule, each.name or "with", displayed_place(each.where), each.is_met, each.summary)
            for each in self.regions
        )
        return tuple(Expected(*kind[:3], times, *kind[3:]) for kind, times in kinds.items())

    def _memory(self) -> Memory:
        """Sum up the prepared tensors by the reason to copy them."""
        views = sum(each.joined for each in self.prepared)
        stored = [Stored("in place of the Parameters", views, 0)] if views else []
        stored += [Stored(f"a copy: {why}", tensors, size) for why, (tensors, size) in self.copies.items()]
        is_stale = any(each.copied and each.sources for each in self.prepared)
        return Memory(tuple(stored), self.prepared_bytes, self.parameter_bytes, tuple(self.unprepared), is_stale)

    def to_json(self, everything: bool = False) -> str:
        """Write the document as JSON, `everything` as for `document`."""
        from fusion.report.as_json import to_json

        return to_json(self.document(everything))

    def to_html(self, path: str | Path, everything: bool = False) -> None:
        """Write the document as one HTML file without a network, `everything` as for `document`.

        Raises:
            OSError: the file cannot be written.
        """
        from fusion.report.page.write import to_html

        Path(path).write_text(to_html(self.document(everything)), encoding="utf-8")

    def __str__(self) -> str:
        from fusion.report.text import to_text

        return to_text(self.document())


def _emitted(source: fx.Graph) -> Counter[str]:
    inside = (_emitted(each.code.graph) for each in bodies(source) if each.code is not None)
    names = (emitted(node) for node in source.nodes)
    return sum(inside, Counter(name for name in names if name))
