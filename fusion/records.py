"""The frozen records that one stage hands to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any, NamedTuple, cast

import torch
import torch.fx as fx

from fusion._torch.operators import OpOverload
from fusion._torch.pickled import portable_metadata
from fusion.graph import Miss, Value
from fusion.graph.origin import location, module_path, source_text
from fusion.language import Capture, Pattern, Refused, Rule, call


@dataclass(frozen=True, eq=False)
class Refusal:
    """Why something did not happen, with the culprit in the user's own code.

    Attributes:
        rule: name of the rule that would have matched.
        cause: the reason; formatted when it is read.
        node: the user's node at which it was decided.
        target: the target whose limit refused, "" where it would be refused anywhere.
        variant: the form that was refused, where forms of the rule vary.
        benefit: predicted microseconds that it would have saved where a limit refused it, else -inf.
        miss: what a reader said, if it was one.
        about: the node that computes what it is said of, if another does.
        blamed: the node whose line is to blame, if it is another.
        words: the semantic ops of the look-alike that it is of, None where those of the rule speak.
        covers: the nodes that this reason accounts for: reports drop the reasons of other rules about them.
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
        """Pickle the text and the place of a refusal, without the graph that its node is of."""
        place = fx.Graph().placeholder(self.node.name)
        place.meta = portable_metadata(self.blamed or self.node)
        place.meta.pop("val", None)
        return Refusal, (self.rule, self.reason, place, self.target, self.variant, self.benefit)

    @property
    def reason(self) -> str:
        """The reason, in words."""
        return str(self.cause)

    @property
    def names(self) -> frozenset[str]:
        """What was refused: the rule, and the form where forms of it vary."""
        return frozenset({self.rule, f"{self.rule}.{self.variant.partition('[')[0]}"})

    @property
    def where(self) -> str:
        """`file:line` in the model's code."""
        return location(self.blamed or self.node)

    @property
    def source(self) -> str:
        """The text of that line."""
        return source_text(self.blamed or self.node)

    @property
    def module(self) -> str:
        """Path of the module."""
        return module_path(self.blamed or self.node)

    def __str__(self) -> str:
        """One line: rule, reason, place."""
        place = " at ".join(part for part in (self.module, self.where) if part) or self.node.name
        on = f" on {self.target}" if self.target else ""
        return f"{self.rule} refused{on}: {self.reason} [{place}]"


@dataclass(frozen=True, eq=False)
class Match:
    """One place where a rule applies.

    Attributes:
        rule: the rule.
        pattern: the form in which it was found.
        captures: what the pattern took, tensors as values.
        results: the values that it replaces.
        roots: for each result, the user's nodes that compute it; none for one that only other matches read.
        relies: the inputs of which something was assumed.
    """

    rule: Rule
    pattern: Pattern
    captures: Mapping[str, Any]
    results: tuple[Value, ...]
    roots: tuple[tuple[fx.Node, ...], ...]
    relies: frozenset[str] = frozenset()

    @property
    def form(self) -> str:
        """The name of its form."""
        return self.pattern.name

    @property
    def spare(self) -> frozenset[str]:
        """Names of the captures that lowerings can do without."""
        captures = self.pattern.captures.items()
        return frozenset(name for name, each in captures if isinstance(each, Capture) and not each.needed)

    @property
    def within(self) -> frozenset[str]:
        """Names of the larger fusions of which it is a part."""
        return call(self.rule.within, self.captures)

    @property
    def variant(self) -> str:
        """The name of its form, where forms of the rule vary."""
        return self.form if self.pattern.varies else ""

    @property
    def node(self) -> fx.Node:
        """The first root: the node by which this match is named."""
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
        """For each result that nodes compute, the first of them."""
        return [makers[0] for makers in self.roots if makers]


@dataclass(frozen=True)
class Input:
    """A tensor that a plan takes from outside."""

    name: str


@dataclass(frozen=True)
class Output:
    """Result number `item` of step number `step` (item None: its only result)."""

    step: int
    item: int | None


def outputs_of(step: int, result: Any) -> Iterator[tuple[Output, torch.Tensor]]:
    """Yield the tensors among what step number `step` gives, each with its name."""
    several = isinstance(result, (tuple, list))
    for item, each in enumerate(cast(Sequence[Any], result) if several else (result,)):
        if isinstance(each, torch.Tensor):
            yield Output(step, item if several else None), each


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a plan.

    Attributes:
        target: the operator.
        args: its arguments, tensors as `Input` or `Output`.
        kwargs: those that are passed by name.
        result: the fake result.
        covered: True if the lowering states that float16 holds what the call rounds (`fusion.language.ranges`).
    """

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    covered: bool = False


@dataclass(frozen=True, eq=False)
class Plan:
    """What a lowering runs on inputs of one signature, recorded once.

    Attributes:
        steps: the calls, in order.
        results: where each result is found, or the input that is passed on.
        fakes: the fake results.
        refusals: operator limits that forbid it, by target name.
        costs: for each kernel among the steps, its predicted microseconds and the inputs that it depends on.
        uses: names of the inputs that it reads.
    """

    steps: tuple[Step, ...]
    results: tuple[Input | Output, ...]
    fakes: tuple[Any, ...]
    refusals: Mapping[str, str]
    costs: tuple[tuple[float, frozenset[str]], ...]
    uses: frozenset[str]

    def tensors(self, match: Match) -> dict[str, Value]:
        """The values that it reads of a match."""
        return {name: each for name, each in match.captures.items() if isinstance(each, Value) and name in self.uses}


@dataclass(frozen=True, eq=False)
class Prepared:
    """A tensor that is computed from Parameters once and passed to a graph as a further input.

    Attributes:
        name: the input that holds it.
        sources: the inputs that hold the Parameters, in the order in which `module` takes them.
        module: computes it from them.
        key: equal for two of them exactly when they compute the same from Parameters of the same metadata.
        size: bytes of what is copied into it, if Parameters are.
        copied: why it holds a copy of Parameters; "" where they become views of it.
    """

    name: str
    sources: tuple[str, ...]
    module: fx.GraphModule = field(repr=False)
    key: str = field(repr=False)
    size: int
    copied: str

    @property
    def joined(self) -> bool:
        """True if the Parameters become views of it."""
        return not self.copied

    @property
    def bytes(self) -> int:
        """Count the bytes that it holds beside the Parameters."""
        return self.size if self.copied else 0


LEAST_BENEFIT = 1e-6
"""Microseconds: less is the rounding of sums, and the pass would replace a node by its like for ever."""
CLOSE = 0.01
"""Microseconds below which two ways to run one match cost the same: the first that its rule declares is taken."""
TIE = 0.25
"""Microseconds below which two covers cost the same: the cost model knows no better."""


class Made(NamedTuple):
    """Launches of a call, or of what builds a value; and how many of those for which a candidate stands share them."""

    launches: int
    alike: int = 1


@dataclass(frozen=True, eq=False)
class Candidate:
    """A match with the lowering chosen for it.

    Attributes:
        match: the match.
        lowering: name of the rule's method.
        plan: what it runs.
        built: captured values that no node holds and that must be built first.
        dying: the nodes that nothing needs once the match is rewritten (its roots among them).
        benefit: predicted microseconds saved on the target.
        launches: launches saved, if it shares none of what it builds with other matches.
        surplus: how much of `benefit` are launches of calls of the model each of which a machine may run as one kernel,
            where more calls are to stand for them.
        further: what the calls cost that are then made more.
        made: what it calls and builds, which others may share.
        needs: the one that reads what no node holds and only this one gives, or with which it leaves more needless than
            either alone: both are chosen, or this one is not. Then `dying`, `benefit`, `launches` and `further` are
            what comes on top of those of `needs`.
        times: for how many candidates in equal layers it stands.
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
    """How often the nodes of a graph stand in the one from which layers were left out, once or several times.

    Attributes:
        counts: for each node, of the outermost layers first, for how many its layer stands; None where the node is the
            same for all of them.
    """

    counts: Mapping[fx.Node, tuple[int | None, ...]] = field(default_factory=dict[fx.Node, tuple[int | None, ...]])

    def of(self, node: fx.Node) -> int:
        """Count the nodes for which one stands."""
        return prod(count or 1 for count in self.counts.get(node, ()))

    def alike(self, node: fx.Node, reads: Iterable[fx.Node]) -> int:
        """Count the nodes for which `node` stands that read the same where it reads `reads`, itself among them."""
        levels = zip(*(self.counts.get(each, ()) for each in reads), strict=True)
        own = [any(each is not None for each in level) for level in levels]
        counts = self.counts.get(node, ())
        return prod(
            count or 1 for count, is_own in zip(counts, own or [False] * len(counts), strict=True) if not is_own
        )


@dataclass(frozen=True)
class Rewritten:
    """One rewrite that was made: the candidate and the nodes that it added, operators and views alike."""

    candidate: Candidate
    added: tuple[fx.Node, ...] = field(repr=False)
