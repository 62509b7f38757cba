"""Reasons at a place of the model, each with the smallest change by which the fusion is made, proven by making it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch.fx as fx

from fusion._torch.tracing import copied
from fusion.errors import FusionError
from fusion.graph.origin import location, source_text
from fusion.options import Options
from fusion.records import Candidate, Refusal
from fusion.report.outcome import GraphReport, Outcome, Rerun, counted
from fusion.report.why.edits import Edit, around, edited, edits
from fusion.report.why.statements import difference

log = logging.getLogger("fusion")
TRIES = 24
"""Number of edits that are tried for one reason, at most."""
_REACH = 6
"""Number of calls between the place of a reason and an edit, at most."""
_ORDER = ("constant", "eps", "swap", "step", "allocate", "omit")
"""Kinds of edits in the order in which they are tried."""
_OPTION = re.compile(r"set the option (?P<name>\w+) to (?P<value>\w+)")
"""Advice of a reason that an option is the cause of."""
_ASSUME = "the option assume"
"""Advice of a reason that a mask among the inputs is the cause of."""


@dataclass(frozen=True)
class Change:
    """A change of the model with which a refused fusion is made: the pass made it, on the changed graph.

    Attributes:
        what: the edit, in words.
        where: `file:line` of the edited call; "" for a change of an option.
        source: text of that line.
        diff: the statement before and after, as a diff; "" if its text does not show the place.
        rule: the rule that applies then.
        saves: launches that are saved then, beside those that are saved now.
    """

    what: str
    where: str
    source: str
    diff: str
    rule: str
    saves: int

    def __str__(self) -> str:
        text = self.diff or (f"{self.what} in `{self.source}` at {self.where}" if self.where else self.what)
        fewer = f" ({self.saves} launches less)" if self.saves else ""
        return f"with this change it fuses as {self.rule}{fewer}:\n{text}"


@dataclass(frozen=True)
class Explanation:
    """A refused fusion and, where one is known, a change with which it is made."""

    refusal: Refusal
    change: Change | None

    def __str__(self) -> str:
        return f"{self.refusal}\n{self.change or 'no small change of the model is known to make it'}"


def why(parts: Sequence[GraphReport], place: str | Refusal, tries: int = TRIES) -> list[Explanation]:
    """Return the refusals at `place` in the reports `parts`, each with a change that makes the fusion.

    Args:
        parts: the reports of the graphs.
        place: `file:line`, of which the folders may be left out; the path of a module; or a refusal.
        tries: number of edits that are tried for each reason, at most; 0 for the reasons alone.
    """
    explained: list[Explanation] = []
    for part in parts:
        unique = {(each.rule, each.reason, each.where): each for each in part.refusals if _is_at(each, place)}
        explained += [Explanation(_by_rule(part, each), _change(part, each, tries)) for each in unique.values()]
    return explained


def _by_rule(part: GraphReport, refusal: Refusal) -> Refusal:
    """Return `refusal` under the name of a rule, where a reader refused under that of its word."""
    name = part.rule_of.get(refusal.rule, refusal.rule)
    return refusal if name == refusal.rule else replace(refusal, rule=name)


def _is_at(refusal: Refusal, place: str | Refusal) -> bool:
    if isinstance(place, Refusal):
        return refusal is place
    in_module = refusal.module == place or refusal.module.startswith(f"{place}.")
    return in_module or f"/{refusal.where}".endswith(f"/{place}")


def _change(part: GraphReport, refusal: Refusal, tries: int) -> Change | None:
    """Return the first change around `refusal` that makes the fusion; None if there is none among so many `tries`."""
    if part.rerun is None or not tries:
        return None
    trial = _Trial(part, part.rerun, refusal)
    if option := _OPTION.search(refusal.reason):
        names = option["name"], f"plan_{option['name']}"  # the second is of the machine that the report is for
        return next(filter(None, (trial.with_option(name, option["value"]) for name in names)), None)
    if _ASSUME in refusal.reason:
        kinds = ({name: kind} for name in part.rerun.masks for kind in ("causal", "padding"))
        if change := next(filter(None, (trial.with_option("assume", each) for each in islice(kinds, tries))), None):
            return change
    nodes = {each.name: each for each in part.rerun.captured.graph.nodes}
    named = (refusal.blamed, refusal.node, refusal.about)
    seeds = [nodes[each.name] for each in named if each is not None and each.name in nodes]
    candidates = (edit for node in around(seeds, _REACH) for edit in edits(node))
    nearest = islice(candidates, 4 * tries)
    ordered = sorted(nearest, key=lambda each: _ORDER.index(each.kind))[:tries]
    return next(filter(None, (trial.with_edit(edit, nodes[edit.node]) for edit in ordered)), None)


@dataclass(frozen=True)
class _Trial:
    """Trials of changes for one refusal: the pass runs on a changed copy of the graph.

    Attributes:
        part: the report that has the refusal.
        rerun: the pass.
        refusal: the refusal.
    """

    part: GraphReport
    rerun: Rerun
    refusal: Refusal

    def with_edit(self, edit: Edit, node: fx.Node) -> Change | None:
        """Return the change that `edit` of `node` is, if the pass then makes the fusion; else None."""
        try:
            gm = edited(self.rerun.captured, edit)
            outcome = self.rerun.fuse(gm)
        except Exception as error:  # of the Meta kernels of torch, or of the pass: then the edit is none
            log.debug("the edit %s cannot be made: %s", edit, error)
            return None
        rule, saves = self._rule_made(outcome, (node, *node.all_input_nodes, *node.users)), self._saved(gm)
        if not rule or saves <= 0:
            return None
        where = location(node)
        return Change(str(edit), where, source_text(node), difference(where, edit), rule, saves)

    def with_option(self, name: str, value: Any) -> Change | None:
        """Return the change of option `name` to `value`, if the pass then makes the fusion; else None."""
        if not hasattr(Options, name):
            return None
        gm = fx.GraphModule(self.rerun.captured, copied(self.rerun.captured.graph))
        try:
            outcome = self.rerun.fuse(gm, **{name: value})
        except FusionError as error:  # of an input that is no mask
            log.debug("the option %s cannot be %s: %s", name, value, error)
            return None
        rule = self._rule_made(outcome, ())
        return Change(f"set the option {name} to {value!r}", "", "", "", rule, self._saved(gm)) if rule else None

    def _saved(self, gm: fx.GraphModule) -> int:
        before, after = (sum(each.launches for each in one.values()) for one in (self.part.after, counted(gm.graph)))
        return before - after

    def _rule_made(self, outcome: Outcome, near: Iterable[fx.Node]) -> str:
        """Return the rule that rewrites the refused nodes, or nodes `near` the edit, in `outcome` but not so in `part`.

        "" if there is none, or if the same reason refuses there again.
        """
        refused = self.refusal
        if any(each.reason == refused.reason and each.node.name == refused.node.name for each in outcome.refusals):
            return ""
        nodes = refused.node, refused.about, refused.blamed, *near
        names = frozenset({each.name for each in nodes if each is not None})
        known = {(each.match.rule.name, each.lowering) for each in self.part.chosen if _replaces(each, names)}
        made = ((each.match.rule.name, each.lowering) for each in outcome.chosen if _replaces(each, names))
        return next((each[0] for each in made if each not in known), "")


def _replaces(candidate: Candidate, names: frozenset[str]) -> bool:
    return not names.isdisjoint(each.name for each in candidate.dying)
