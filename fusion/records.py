"""Frozen records that stages pass to each other."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any, NamedTuple, cast

import torch
import torch.fx as fx

from fusion._torch.operators import OpOverload
from fusion._torch.pickled import portable_metadata
from fusion._torch.tracing import outside_modes
from fusion.graph import Miss, Value
from fusion.graph.origin import location, module_path, source_text
from fusion.language import Capture, Pattern, Refused, Rule, call
from fusion.operators import ensure

NOTHING_TO_CHANGE = "nothing to change"
"""Words of a reason that no change of the model removes."""


@dataclass(frozen=True, eq=False)
class Refusal:
    """A fusion that was refused, with the reason and the place in the model.

    Attributes:
        rule: name of the rule that would have matched.
        cause: the reason; formatted when it is read.
        node: the node of the model at which the refusal was decided.
        target: the target whose limit refused; "" for a refusal on every target.
        variant: the form that was refused, for a rule whose forms vary.
        benefit: predicted microseconds that the fusion would have saved, if a limit refused it; else -inf.
        miss: the miss of a reader, if that is the source of the refusal.
        about: the node that computes the subject of the miss, if another node does.
        blamed: the node whose line is to blame, if it is another node.
        words: the semantic ops of the look-alike that refused; None for those of the rule.
        covers: the nodes that this reason explains: reports drop the reasons of other rules about them.
    """

    rule: str
    cause: Refused | str
    node: fx.Node = field(repr=False)
    target: str = ""
    variant: str = ""
    benefit: float = field(default=-inf, repr=False)
    miss: Miss | None = field(default=None, repr=False)
    about: fx.Node | None = field(default=None, repr=False)
    blamed: fx.Node | None = field(default=None, repr=False)
    words: frozenset[str] | None = field(default=None, repr=False)
    covers: frozenset[fx.Node] = field(default=frozenset(), repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text and the place of a refusal, without the graph of its node."""
        place = fx.Graph().placeholder(self.node.name)
        place.meta = portable_metadata(self.blamed or self.node)
        place.meta.pop("val", None)
        return Refusal, (self.rule, self.reason, place, self.target, self.variant, self.benefit)

    @property
    def reason(self) -> str:
        """The reason, formatted."""
        return str(self.cause)

    @property
    def is_mendable(self) -> bool:
        """True unless the reason says that no change of the model makes the fusion."""
        return NOTHING_TO_CHANGE not in self.reason

    @property
    def names(self) -> frozenset[str]:
        """The rule and "rule.form": names by which `Match.within` of another match may refer to the refused fusion."""
        return frozenset({self.rule, f"{self.rule}.{self.variant.partition('[')[0]}"})

    @property
    def where(self) -> str:
        """`file:line` in the model's code."""
        return location(self.blamed or self.node)

    @property
    def source(self) -> str:
        """Text of that line."""
        return source_text(self.blamed or self.node)

    @property
    def module(self) -> str:
        """Path of the module."""
        return module_path(self.blamed or self.node)

    def __str__(self) -> str:
        place = " at ".join(part for part in (self.module, self.where) if part) or self.node.name
        on = f" on {self.target}" if self.target else ""
        return f"{self.rule} refused{on}: {self.reason} [{place}]"


@dataclass(frozen=True, eq=False)
class Match:
    """One place where a rule applies.

    Attributes:
        rule: the rule.
        pattern: the form that matched.
        captures: the captures of the pattern by name, tensors as values.
        results: the values that the match replaces.
        roots: for each result, the nodes of the model that compute it; none for a result that only other matches read.
        relies: the inputs that the match makes assumptions about.
    """

    rule: Rule
    pattern: Pattern
    captures: Mapping[str, Any]
    results: tuple[Value, ...]
    roots: tuple[tuple[fx.Node, ...], ...]
    relies: frozenset[str] = frozenset()

    @property
    def form(self) -> str:
        """Name of the form."""
        return self.pattern.name

    @property
    def spare(self) -> frozenset[str]:
        """Names of the captures that lowerings may omit."""
        captures = self.pattern.captures.items()
        return frozenset(name for name, each in captures if isinstance(each, Capture) and not each.needed)

    @property
    def within(self) -> frozenset[str]:
        """Names of the larger fusions that the match is a part of."""
        return call(self.rule.within, self.captures)

    @property
    def variant(self) -> str:
        """Name of the form, for a rule whose forms vary; else ""."""
        return self.form if self.pattern.varies else ""

    @property
    def node(self) -> fx.Node:
        """The first root, by which the match is named."""
        return self.firsts[0]

    @property
    def makers(self) -> tuple[fx.Node, ...]:
        """All nodes that compute a result."""
        return tuple(node for makers in self.roots for node in makers)

    @property
    def unheld(self) -> frozenset[Value]:
        """The results that no node computes: only other matches read them."""
        return frozenset(result for result, makers in zip(self.results, self.roots, strict=True) if not makers)

    @property
    def firsts(self) -> list[fx.Node]:
        """The first node of each result that nodes compute."""
        return [makers[0] for makers in self.roots if makers]


@dataclass(frozen=True)
class Input:
    """A tensor that a plan takes from outside, by the name of the capture."""

    name: str


@dataclass(frozen=True)
class Output:
    """Result number `item` of step number `step`; item None for its only result."""

    step: int
    item: int | None


def outputs_of(step: int, result: Any) -> Iterator[tuple[Output, torch.Tensor]]:
    """Yield the tensors in the `result` of step number `step`, each with its `Output`."""
    several = isinstance(result, (tuple, list))
    for item, each in enumerate(cast(Sequence[Any], result) if several else (result,)):
        if isinstance(each, torch.Tensor):
            yield Output(step, item if several else None), each


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a plan.

    Attributes:
        target: the operator.
        args: the positional arguments, tensors as `Input` or `Output`.
        kwargs: the keyword arguments.
        result: the fake result.
        covered: True if the lowering declares that float16 has the range for the results, see
            `fusion.language.float16_ranges`.
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    covered: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """The calls of a lowering on inputs of one signature, recorded once.

    Attributes:
        steps: the calls, in order.
        results: the reference to each result, which may be an input.
        fakes: the fake results.
        refusals: reasons of operator limits that forbid the plan, by target name.
        costs: for each kernel among the steps, its predicted microseconds and the names of the inputs that it depends
            on.
        uses: names of the inputs that the plan reads.
    """

    steps: tuple[Step, ...]
    results: tuple[Input | Output, ...]
    fakes: tuple[Any, ...]
    refusals: Mapping[str, str]
    costs: tuple[tuple[float, frozenset[str]], ...]
    uses: frozenset[str]

    def tensors(self, match: Match) -> dict[str, Value]:
        """Map the names of the inputs that the plan reads to their values in `match`."""
        return {name: each for name, each in match.captures.items() if isinstance(each, Value) and name in self.uses}


@dataclass(frozen=True, eq=False)
class Prepared:
    """A tensor that is computed from Parameters once and passed to a graph as a further input.

    Attributes:
        name: the name of the input.
        sources: the inputs that hold the Parameters, in the order of the arguments of `module`.
        module: the computation of the tensor from the Parameters.
        key: equal for two tensors exactly when they are the same computation on Parameters of the same metadata.
        size: bytes of the copied Parameters, if it has copies.
        copied: the reason to copy the Parameters; "" where they become views of the tensor.
    """

    name: str
    sources: tuple[str, ...]
    module: fx.GraphModule = field(repr=False)
    key: str = field(repr=False)
    size: int
    copied: str

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "module": pickle.dumps(self.module)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ensure()  # the module calls operators by their names
        with outside_modes():  # what it computes from constants alone is computed now
            module = pickle.loads(state["module"])
        vars(self).update(state, module=module)

    @property
    def joined(self) -> bool:
        """Return True if the Parameters become views of the tensor."""
        return not self.copied

    @property
    def bytes(self) -> int:
        """Bytes that the tensor needs in addition to the Parameters: none if these become views of it."""
        return self.size if self.copied else 0


LEAST_BENEFIT = 1e-6
"""Least benefit in microseconds: a lesser one is the rounding of sums, and the pass would replace a node by an
equal one for ever."""
CLOSE = 0.01
"""Microseconds below which two lowerings of one match cost the same: the first that its rule declares is taken."""
TIE = 0.25
"""Microseconds below which two selections cost the same, within the precision of the cost model."""


class Made(NamedTuple):
    """Launches of a call, or of the steps that build a value; `alike` counts the candidates that share it.

    Several of the candidates in equal layers that one candidate stands for may share a call.
    """

    launches: int
    alike: int = 1


@dataclass(frozen=True, eq=False)
class Candidate:
    """A match with the lowering chosen for it.

    Attributes:
        match: the match.
        lowering: name of the rule's method.
        plan: the plan of the lowering.
        built: captured values that no node has and that must be built first.
        dying: the nodes that become dead code once the match is rewritten, its roots among them.
        benefit: predicted microseconds saved on the target.
        launches: launches saved, if nothing that is built is shared with other matches.
        surplus: part of `benefit` that comes from calls which a machine may run as one kernel instead of the predicted
            several, where the lowering takes more calls.
        further: predicted microseconds of the launches by which the lowering exceeds the model.
        made: launches of the calls and built values, which other candidates may share.
        needs: the candidate that reads a result of this one that no node has, or with which more nodes become dead than
            with either alone: both are selected, or this one is not. Then `dying`, `benefit`, `launches` and `further`
            are the difference to those of `needs`.
        times: number of candidates in equal layers that it stands for.
    """

    match: Match
    lowering: str
    plan: Plan
    built: tuple[Value, ...]
    dying: frozenset[fx.Node]
    benefit: float
    launches: int
    surplus: float
    further: float = 0.0
    made: Mapping[Any, Made] = field(default_factory=dict[Any, Made])
    needs: Candidate | None = None
    times: int = 1


@dataclass(frozen=True)
class Repeats:
    """Multiplicity of the nodes of a graph from which equal layers were left out, once or several times.

    Attributes:
        counts: for each node, outermost layers first, the number of layers that its layer stands for; None where one
            node serves all of them.
    """

    counts: Mapping[fx.Node, tuple[int | None, ...]] = field(default_factory=dict[fx.Node, tuple[int | None, ...]])

    def of(self, node: fx.Node) -> int:
        """Count the nodes that `node` stands for."""
        return prod(count or 1 for count in self.counts.get(node, ()))

    def alike(self, node: fx.Node, reads: Iterable[fx.Node]) -> int:
        """Count the nodes that `node` stands for and that share the nodes `reads`; 1 if every layer has its own."""
        levels = zip(*(self.counts.get(each, ()) for each in reads), strict=True)
        own = [any(each is not None for each in level) for level in levels]
        counts = self.counts.get(node, ())
        return prod(
            count or 1 for count, is_own in zip(counts, own or [False] * len(counts), strict=True) if not is_own
        )


@dataclass(frozen=True)
class Rewritten:
    """One rewrite: the candidate and the nodes that it added, operators and views alike."""

    candidate: Candidate
    added: tuple[fx.Node, ...] = field(repr=False)
