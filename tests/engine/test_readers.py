"""Readers: in the order of what they need, over words that something gives, several meanings for one value."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fusion
from fusion import Library, Rule, lowering, pattern, reader, tensor, word
from fusion.errors import RuleError
from fusion.frontend.library import installed
from fusion.graph import Algebra, Miss, Reading, Readings
from fusion.language import Reader, needed, ordered
from fusion.language.cache_keys import files_of, keys_of
from fusion.language.checks import check_library
from fusion.stages.canonicalise import canonicalise
from fusion.stages.read import read

from .graphs import numbers, read_graph, traced

OTHER_MEANINGS = {
    ("inner_writes.py", "write"),
    ("slice_updates.py", "write"),
    ("cost.py", "linear"),  # an operator of aten
    ("hf.py", "attention"),  # an argument of transformers
    ("buffers.py", "write"),  # canonical ops of values
    ("constant_folding.py", "write"),
    ("joined_writes.py", "write"),
    ("writes.py", "write"),
    ("vocabulary.py", "gelu"),  # functions of torch
    ("arithmetic.py", "gelu"),
}
ENGINE = Path(fusion.__file__).parent
WORDS = {word for each in installed().readers for word in each.gives} | {rule.name for rule in installed().rules}


def gives(name: str, *needs: str) -> Reader:
    @reader(gives=(name,), needs=needs)
    def read(graph):
        return iter(())

    return Reader(f"reads_{name}", read.read, read.gives, read.needs)


@dataclass(frozen=True)
class Uses(Rule):
    """A rule over a word."""

    @pattern
    def written(self, p, x=tensor("*B D")):
        """The word, misspelt."""
        return p.turned_lane(x=x)

    @lowering
    def run(self, x):
        """Not run here."""
        return x


def test_readers_run_after_what_they_need_and_otherwise_as_declared():
    a, b, c, d = gives("a", "c"), gives("b"), gives("c", "b"), gives("d")
    assert ordered([a, b, c, d]) == [b, c, a, d]
    more = Reader("more", a.read, frozenset(), refines=frozenset({"b"}))
    assert ordered([c, more, b]) == [b, more, c]
    with pytest.raises(RuleError, match=r"in a circle: \['reads_a', 'reads_b'\]"):
        ordered([gives("a", "b"), gives("b", "a")])


def test_readers_that_no_rule_needs_are_not_run():
    runs: list[str] = []

    @reader(gives=("unused_word",))
    def unused(graph):
        runs.append("unused")
        return iter(())

    @reader(needs=("unused_word",))
    def reports_unused(graph):
        runs.append("reports_unused")
        return iter(())

    @reader()
    def reports(graph):
        runs.append("reports")
        return iter(())

    (norm,) = (each for each in installed().rules if each.name == "rms_norm")
    library = Library((norm,), (reports, unused, reports_unused))
    compiled = torch.compile(torch.nn.RMSNorm(64), backend=fusion.FusionBackend({"target": "host"}, library))
    with torch.no_grad():
        compiled(torch.randn(4, 64))
    assert runs == []
    fusion.explain(torch.nn.RMSNorm(64), torch.randn(4, 64), rules=library)
    assert runs == ["reports"]


def test_what_is_superseded_is_dropped_before_and_behind():
    x, y = (Algebra().make("input", (), (name, 0), (2,), None) for name in "xy")
    missed = Readings().joined([(x, Miss("first", "a")), (y, Miss("first", "b")), (x, Miss("second", "c"))])
    found = missed.joined([(x, Reading("third", {}))], supersedes={"first"})
    assert found.missed() == [(y, Miss("first", "b")), (x, Miss("second", "c"))]
    assert found.is_superseded(x, "first")
    assert found.joined([(x, Miss("first", "late"))]).missed() == found.missed()


def test_what_a_needed_reader_needs_is_needed_as_is_what_refines_it():
    readers = (gives("a"), gives("b", "a"), gives("c"), gives("turned_lane", "b"))
    refines = replace(gives("d"), refines=frozenset({"b"}))
    assert needed((*readers, refines), [Uses()]) == [readers[0], readers[1], readers[3], refines]
    assert needed(readers, []) == []


def test_words_that_nothing_gives_are_errors_with_the_nearest_name():
    with pytest.raises(
        RuleError,
        match=rf"rule uses uses, in form written \({__file__}:\d+\), 'turned_lane', "
        "which no rule or reader gives; .* 'turned_lanes'",
    ):
        check_library(Library((Uses(),), (gives("turned_lanes"),)))
    with pytest.raises(RuleError, match="reader reads_a needs 'c', which no rule or reader gives"):
        check_library(Library((), (gives("a", "c"),)))


@dataclass(frozen=True)
class Applies(Rule):
    """A rule that applies a word to something else."""

    @pattern
    def written(self, p, x=tensor("*B D")):
        """A capture, misspelt."""
        return p.turned_lanes(x=x, stat=0)

    @lowering
    def run(self, x):
        """Not run here."""
        return x


TURNED = word("turned_lanes", "lanes in another order", x="[*B, D]", start="the first of them")


def test_a_form_applies_a_word_to_what_it_declares_alone():
    @reader(gives=(TURNED,))
    def turned(graph):
        return iter(())

    with pytest.raises(RuleError, match=r"rule applies uses, .* turned_lanes of 'stat', .*; did you mean 'start'\?"):
        check_library(Library((Applies(),), (turned,)))
    with pytest.raises(RuleError, match="'turned' is provided twice"):
        Library((), (turned, turned))


def test_a_reader_that_says_more_than_its_word_is_left_out_with_the_reason():
    @reader(gives=(TURNED,))
    def turned(graph):
        yield next(iter(graph.places)), Reading("turned_lanes", {"x": None, "end": 3})

    graph, failures = read(canonicalise(traced(lambda x: x * 2, numbers(2, 3)).graph), (turned,))
    assert not list(graph.readings)
    assert "turned gives turned_lanes of 'end'" in str(failures[0])


def test_every_reading_of_the_library_is_documented():
    for each in installed().words().values():
        assert each.meaning, each.name
        assert each.captures, each.name


def test_nothing_is_given_twice():
    with pytest.raises(RuleError, match="the word 'a' is provided twice"):
        Library((), (gives("a"), Reader("another", gives("a").read, frozenset({"a"}))))
    with pytest.raises(RuleError, match="the reader 'reads_a' is provided twice"):
        Library((), (gives("a"), gives("a")))


def test_a_value_may_mean_several_things_each_once():
    x = Algebra().make("input", (), ("x", 0), (2,), None)
    one, other, odd = Reading("one", {"x": x}), Reading("other", {}), Miss("third", "it is none")
    found = Readings().joined([(x, one), (x, other), (x, Reading("one", {"x": x})), (x, odd), (x, odd)])
    assert found.of(x) == (one, other)
    assert found.one(x, "other") is other
    assert found.all("one") == [(x, one)]
    assert found.missed("third") == [(x, odd)]
    assert not found.missed("one")


def test_every_reading_is_a_word_that_its_reader_gives():
    graph = read_graph(traced(lambda x, w: x @ w.mT, numbers(2, 8), numbers(4, 8)).graph)
    assert graph.readings.all("linear")
    for each in installed().readers:
        assert {
            reading.op for _, reading in each.read(graph) if isinstance(reading, Reading)
        } <= each.gives | each.refines


def test_the_engine_names_no_rule_and_no_reading():
    found = set()
    for path in ENGINE.rglob("*.py"):
        if any(path.is_relative_to(ENGINE / each) for each in ("operators", "frontend/port", "report")):
            continue  # where names are those of aten
        texts = {each.value for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.Constant)}
        found |= {(path.name, text) for text in texts & WORDS if isinstance(text, str)}
    assert found == OTHER_MEANINGS


def test_the_key_of_a_library_changes_with_any_file_and_any_rule(tmp_path, monkeypatch):
    whole = installed()
    fewer = Library(whole.rules[1:], whole.readers)
    assert keys_of(whole) != keys_of(fewer)
    package = tmp_path / "their_rules"
    package.mkdir()
    (package / "__init__.py").write_text("def read(graph):\n    return iter(())\n")
    (package / "helper.py").write_text("NUMBER = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import their_rules  # type: ignore[import-not-found]

    library = Library((), (Reader("theirs", their_rules.read, frozenset({"theirs"})),))
    before = files_of(library)
    (package / "helper.py").write_text("NUMBER = 2\n")
    assert files_of(library) != before
