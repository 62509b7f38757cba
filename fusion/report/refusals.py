"""Selection of the refusals to report: none inside a fused match, and the most informative of several for one node."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch.fx as fx

from fusion._torch.operators import schema_of
from fusion.graph.launches import is_view
from fusion.language import Library, Refused, Rule
from fusion.operators import operator_of
from fusion.records import LEAST_BENEFIT, TIE, Candidate, Refusal

STAY = "they stay as they are (nothing to change)"
SLOWER = f"{{operators}}: estimated {{lost:.1f}} us slower than the model's own calls at these sizes; {STAY}"
ALIKE = f"{{operators}}: estimated as fast as the model's own calls at these sizes; {STAY}"
MORE = (
    "{operators}: {calls} more than the model makes, for an estimated saving that may not outweigh them; "
    "its own calls stay (nothing to change)"
)


def useless(candidates: Sequence[Candidate], chosen: Collection[Candidate]) -> list[Refusal]:
    """Return refusals of those of `candidates` that are not `chosen` because they save nothing.

    Such a match would run slower than the model, or no faster because of a further call.
    """
    refused: list[Refusal] = []
    made = {each.match for each in chosen}
    gone = {node for each in chosen for node in each.dying}
    for each in candidates:
        saved = each.benefit - each.surplus
        is_unsure = each.benefit > LEAST_BENEFIT >= saved - each.further and gone.isdisjoint(each.dying)
        is_one_for_one = len(each.dying) == 1 and not each.launches
        if (is_unsure or saved < -LEAST_BENEFIT) and not is_one_for_one and each.match not in made:
            text = MORE if is_unsure else SLOWER if saved < -TIE else ALIKE
            calls = f"{-each.launches} call{'s' if each.launches < -1 else ''}"
            cause = Refused(text, {"operators": _operators(each), "lost": -saved, "calls": calls})
            refused.append(Refusal(each.match.rule.name, cause, each.match.node))
    return refused


def _operators(candidate: Candidate) -> str:
    """Name the fused operators that `candidate` calls, or the operators of torch where it calls none."""
    targets = [step.target for step in candidate.plan.steps]
    fused = [operator.short for operator in map(operator_of, targets) if operator is not None]
    plain = [schema_of(each).name.removeprefix("aten::") for each in targets if not is_view(each)]
    *names, last = list(dict.fromkeys(fused or (each for each in plain if each != "clone"))) or ["views"]
    return f"{', '.join(names)} and {last}" if names else last


def to_report(refusals: Sequence[Refusal], chosen: Sequence[Candidate], rules: Sequence[Rule]) -> list[Refusal]:
    """Return the `refusals` to report: without those at nodes that were fused, and the best of each node.

    A refusal at a fused node stays if it is of a larger fusion, or of a better one: another variant of the same rule
    may have fused more. Of several fusions of one node that a limit refused, the one with the greatest benefit is
    reported.
    """
    refusals = _uncovered(refusals)
    gone = {node for candidate in chosen for node in candidate.dying}
    made = {node: each for each in chosen for node in each.match.makers}
    holders = {node: each for each in chosen for node in each.dying}
    uses = {rule.name: rule.uses() for rule in rules}
    best: dict[fx.Node, float] = {}
    for each in refusals:
        best[each.node] = max(each.benefit, best.get(each.node, each.benefit))

    def larger(each: Refusal) -> bool:
        if (by := made.get(each.node)) is None:
            return not each.names.isdisjoint(holders[each.node].match.within)
        if by.match.rule.name == each.rule and _is_alternative(by.match.rule, each) == by.match.pattern.alternative:
            return each.variant not in ("", by.match.variant) or bool(each.target)
        words = uses.get(each.rule, frozenset[str]()) if each.words is None else each.words
        is_larger = by.match.rule.name in words or not each.names.isdisjoint(by.match.within)
        return each.benefit > by.benefit or is_larger

    reported = [each for each in _by_readers(refusals) if each.node not in gone or larger(each)]
    reported = [each for each in reported if each.miss or each.benefit == best[each.node] or each.node in made]
    unique = {
        (each.rule, each.reason, (each.miss and each.miss.of) or each.node, each.target): each for each in reported
    }
    return list(unique.values())


def missing(refusals: Iterable[Refusal], rule: str, uses: Mapping[str, frozenset[str]]) -> list[Refusal]:
    """Select of `refusals` at one place those that explain why `rule` did not fuse there, each reason once.

    Those of the rule come first, then those of the words that its forms use, then those of rules that they use; reasons
    that no change of the model mends are left out where there are others. If none is related to the rule, all that can
    be mended are returned.

    Args:
        refusals: the refusals at the place.
        rule: the name of the rule.
        uses: for each rule, the words and rules that its forms use.
    """
    used = uses.get(rule, frozenset[str]())
    rank = {rule: 0, **{name: 2 if name in uses else 1 for name in used}}
    unique = list({(each.reason, each.where): each for each in refusals}.values())
    related = sorted((each for each in unique if each.rule in rank), key=lambda each: rank[each.rule])
    mendable = [each for each in unique if STAY not in each.reason]
    return [each for each in related if each in mendable] or related or mendable


def rule_names(library: Library) -> dict[str, str]:
    """Map each name that a refusal may have to that of a rule of `library`.

    A word, by which readers refuse, is shown as a rule that is made of it: one of the domain of its reader, that is not
    opt-in, and of the fewest other words; as that domain where no rule is made of it.
    """
    domains = {word: each.read.__module__.split(".")[:2] for each in library.readers for word in each.gives}

    def distance(word: str, rule: Rule) -> tuple[bool, bool, int]:
        domain = type(rule).__module__.split(".")[:2]
        return rule.opt_in, domain != domains.get(word), len(rule.uses())

    made = {word: [rule for rule in library.rules if word in rule.uses()] for word in domains}
    words = {word: min(rules, key=partial(distance, word)).name for word, rules in made.items() if rules}
    others = {word: domain[-1] for word, domain in domains.items()}
    return others | words | {each.name: each.name for each in library.rules}


def _uncovered(refusals: Sequence[Refusal]) -> list[Refusal]:
    """Drop refusals by other rules of nodes that a refusal in `refusals` covers."""
    rules = {(node, each.rule) for each in refusals for node in each.covers}
    covered = {node for node, _ in rules}

    def is_other(each: Refusal) -> bool:
        about = each.node if each.about is None or each.node in covered else each.about
        return about in covered and (about, each.rule) not in rules

    return [each for each in refusals if not is_other(each)]


def _is_alternative(rule: Rule, refused: Refusal) -> bool:
    """Return True if the refused form is an `@alternative` of `rule`: then it is compared like another rule."""
    return any(form.alternative and form.name == refused.variant for form in rule.patterns())


def _by_readers(refusals: Sequence[Refusal]) -> list[Refusal]:
    """Merge refusals by limits with the misses of readers for the same node.

    A limited miss supplies the reason of the refusal; any other miss replaces the refusal.
    """
    misses = {node: each for each in refusals if each.miss for node in (each.about, each.node) if node}
    reported: list[Refusal] = []
    for each in refusals:
        miss = misses.get(each.node) if each.target else each
        if miss is None or (miss is each and not (each.miss and each.miss.limited)):
            reported.append(each)
        elif each.target and miss.miss and miss.miss.limited:
            reported.append(replace(each, cause=miss.cause, blamed=miss.blamed))
    return reported
