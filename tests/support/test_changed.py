"""What a push runs is everything, unless all that changed belongs to domains, or is only read by people."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import changed


@pytest.mark.parametrize(
    ("path", "areas"),
    [
        ("patterns/latent/prolog/prolog.py", {"latent"}),
        ("tests/latent/latent_attention.py", {"latent"}),
        ("tests/examples/norm.py", {"norm"}),
        ("tests/examples/projections.py", {"linear", "latent"}),
        ("tests/goldens/expected/example_mla_prolog.txt", {"latent"}),
        ("tests/goldens/expected/corpus_rope_half.txt", {"rotary"}),
        ("tests/goldens/expected/model_Llama.txt", {"goldens"}),
        ("tests/models/test_generate.py", {"models"}),
        ("tests/attack/blocks/norms.py", {"attack"}),
        ("docs/prepared.md", set()),
        ("README.md", set()),
        ("tests/models/families.py", None),
        ("tests/conftest.py", None),
        ("tests/corpus/base.py", None),
        ("patterns/__init__.py", None),
        ("tests/examples/inputs.py", None),
        ("tests/examples/gone.py", None),
        ("fusion/stages/match.py", None),
        ("pyproject.toml", None),
        ("Makefile", None),
    ],
)
def test_whom_a_file_can_change(path: str, areas: set[str] | None):
    assert changed.areas_of(path) == areas


def test_what_everyone_shares_decides():
    decision = changed.of_files(["patterns/norm/rms_norm.py", "fusion/_torch/fakes.py"], "since 1234")
    assert decision.areas is None
    assert "fusion/_torch/fakes.py changed since 1234" in decision.why


def test_several_domains_are_run():
    decision = changed.of_files(
        ["patterns/norm/rms_norm.py", "tests/cache/layouts.py", "docs/prepared.md"], "since 1234"
    )
    assert decision.areas == {"cache", "norm"}
    assert decision.why == "cache, norm, and a smoke of the rest: 3 files changed since 1234"
    assert changed.of_files([], "since 1234").why == "a smoke: 0 files changed since 1234"


def test_a_commit_that_nobody_knows_is_no_reason_to_leave_tests_out(tmp_path, monkeypatch):
    monkeypatch.setattr(changed, "GREEN", tmp_path / "green")
    assert changed.decided("green").areas is None
    (tmp_path / "green").write_text("0123456789abcdef0123456789abcdef01234567\n")
    assert changed.decided("green").areas is None
    assert changed.decided("").areas is None


@pytest.mark.parametrize(
    ("test", "area"),
    [
        ("tests/laws/test_laws.py::test_rule_keeps_the_laws[mla_prolog-example plain-core-float32]", "latent"),
        ("tests/laws/test_laws.py::test_rule_is_tried[rope]", "rotary"),
        ("tests/laws/test_laws.py::test_a_law_that_is_broken_is_found", "laws"),
        ("tests/goldens/test_goldens.py::test_outcome_is_as_kept[corpus_rope_half-tables]", "rotary"),
        ("tests/goldens/test_goldens.py::test_outcome_is_as_kept[model_Llama-decode sdpa]", "goldens"),
        ("tests/corpus/test_corpus.py::test_look_alike_runs[torch.bfloat16-rms_norm/not/mean]", "norm"),
        ("tests/sparse/test_sparse_attention.py::test_spelling[attention-plain]", "sparse"),
        ("tests/operators/test_meta.py::test_shapes[rms_norm]", "operators"),
    ],
)
def test_whose_a_test_is(test: str, area: str):
    assert changed.area(test) == area


def test_a_smoke_holds_a_case_of_each_test_and_eight_smokes_hold_all():
    items = [
        SimpleNamespace(nodeid=f"tests/a.py::test_{name}[{n}]")
        for name in "abc"
        for n in range(10 if name == "a" else 1)
    ]
    run = set[str]()
    for number in range(changed.SMOKE):
        left = {each.nodeid for each in changed.beyond_smoke(items, number)}
        assert left == {each.nodeid for each in changed.beyond_smoke(items[::-1], number)}
        assert len(left) in (8, 9)
        assert all("test_a[" in each for each in left)
        run |= {each.nodeid for each in items} - left
    assert len(run) == len(items)
