"""Reasons speak of the model: no name that is of this package alone reaches users."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
import torch

import fusion
import patterns
from fusion import Example, testing
from fusion.frontend.library import installed
from fusion.language import Group, Rule
from tests.goldens.outcome import FOLDER
from tests.support.tried import declared

from .cures import CURES

pytestmark = pytest.mark.rotates(12)

REFUSED = re.compile(r"^  refused: \w+: (.*?)(?: x\d+)?$", re.MULTILINE)
TEXTS = ("require", "lookalike", "Miss", "missed", "Refused", "OnHost")
CANONICAL = frozenset({"log_sum_exp", "slice_scatter", "write_rows", "write_within", "largest_index", "first_greatest"})
"""Ops of the canonical graph whose names torch does not have, or has for something else."""


def kinds() -> frozenset[str]:
    """Return the names of the groups, facets and rules of the library."""
    for each in walk_packages(patterns.__path__, "patterns."):
        import_module(each.name)
    found: set[str] = set()
    waiting: list[type] = [Group, Rule]
    while waiting:
        waiting += (subclasses := waiting.pop().__subclasses__())
        found |= {each.__name__ for each in subclasses if each.__module__.startswith("patterns.")}
    return frozenset(found)


# Words that reasons use as everybody does, although a class is named after them.
ORDINARY = frozenset(
    {
        "Attention",
        "Cache",
        "Pages",
        "Rope",
        "Quantisation",
        "Activation",
        "Bias",
        "Call",
        "Tables",
        "Rows",
        "Plain",
        "Norm",
    }
)


def internal(text: str) -> Iterator[str]:
    """Yield the names in a reason that only this package has."""
    names = kinds()
    for word in re.findall(r"[A-Za-z_][A-Za-z_0-9]*", text):
        if (word in names and word not in ORDINARY and word != word.lower()) or word in CANONICAL:
            yield word
    yield from re.findall(r"\w+\[[A-Z][A-Za-z]*(?:, [A-Za-z0-9]+)*\]", text)  # a lowering with its variants
    yield from re.findall(r"<[\w.]+ object|<class '|\bv\d+:\w+|Value\(", text)  # an object as Python shows it


def refused() -> list[str]:
    """Return every reason in what is recorded of the corpus, the examples, the models and the pieces."""
    texts = (path.read_text() for path in FOLDER.glob("*.txt"))
    return sorted({reason for text in texts for reason in REFUSED.findall(text)})


def written() -> Iterator[tuple[str, str]]:
    """Yield the constant parts of what is passed to what refuses, with their places."""
    for package in (patterns, fusion):
        folder = Path(inspect.getfile(package)).parent
        for path in folder.rglob("*.py"):
            yield from ((f"{path.name}:{line}", text) for line, text in _texts(ast.parse(path.read_text())))


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in TEXTS:
            for part in (each for argument in call.args for each in ast.walk(argument)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield call.lineno, part.value


def wrong(texts: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    return {f"{place}: {text}": found for place, text in texts if (found := list(internal(text)))}


@pytest.mark.rotates(3)
def test_no_reason_that_was_given_holds_a_name_of_ours():
    reasons = refused()
    assert len(reasons) > 300
    assert not wrong(("", each) for each in reasons)


@pytest.mark.rotates(3)
def test_no_reason_that_is_written_holds_a_name_of_ours():
    texts = list(written())
    assert len(texts) > 200
    assert not wrong(texts)


@pytest.mark.parametrize(
    "text",
    ["by packed[Structured, 2] it would take as long", "<fusion.graph.Value object at 0x1>", "it is v12:mul f32[2]",
     "the scores go through log_sum_exp"],
)  # fmt: skip
def test_names_of_ours_are_found(text: str):
    assert list(internal(text))


def rejects() -> dict[tuple[str, str], Example]:
    """Return every reject of every rule, by the names of both."""
    return {(rule, each.name): each for rule, tried in declared().items() for each in tried if each.refusal}


def uncured() -> list[str]:
    """Return the rejects for which no cure is known."""
    lines = (Path(__file__).parent / "uncured.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


CURED = [(rule, reject, cure) for rule, cures in CURES.items() for reject, cure in cures.items()]
MOST_UNCURED = 3


def test_every_reject_has_a_cure_or_is_listed():
    listed = uncured()
    cured = [f"{rule}: {reject}" for rule, reject, _ in CURED]
    assert sorted(cured + listed) == sorted(f"{rule}: {name}" for rule, name in rejects())
    assert len(listed) <= MOST_UNCURED, "the list of rejects without a cure only gets shorter"


@pytest.mark.rotates(48)
@pytest.mark.parametrize(
    ("rule", "reject", "cure"),
    [pytest.param(*each, id=f"{each[0]}-{each[1]}") for each in CURED],
)
def test_a_reject_without_its_obstacle_is_fused(rule: str, reject: str, cure: str):
    """The reason is of the place that it names: where the obstacle is gone, so is the reason, and the rule applies."""
    refused = rejects()[rule, reject]
    named = next(each for each in installed().rules if each.name == rule)
    cured = next(each for each in declared()[rule] if each.name == cure)
    trial = testing.trial(named, cured, torch.bfloat16)
    assert not cured.refusal
    testing.recognises(trial)
    own = [each.reason for each in trial.outcome.refusals if each.rule in {rule, *named.uses()}]
    assert not [each for each in own if refused.refusal in each]
