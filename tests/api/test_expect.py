"""Expectations: what is written holds the model, each breakage is named at its line, and a file with an error is told
of.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import nn
from typer.testing import CliRunner

import fusion
from fusion.errors import OptionError
from fusion.frontend.cli import app
from fusion.frontend.expectations.path_patterns import folded, is_within, layer_part, matches, with_parents
from fusion.report.trace import displayed_place

from . import expected_model
from .test_options import DOORS

pytestmark = pytest.mark.usefixtures("fresh")

FILE = Path(expected_model.__file__)
OPTIONS = {"target": "ascend910_93", "lower": "eager"}
WRITTEN = """
[fusions]
activation = 3
add_norm = 6
attention = 3
joined_projections = 3
rms_norm = 1

[modules."layers.*.attn"]
attention = 1
joined_projections = 1

[modules."layers.*.mlp"]
activation = 1

[modules."layers.*.norm2"]
add_norm = 1

[modules."layers.0.norm1"]
rms_norm = 1

[modules."layers.1-2.norm1"]
add_norm = 1

[modules."norm"]
add_norm = 1
"""
EXPECTED = """
target = "ascend910_93"

[at_most]
launches = 9
prepared_bytes = 4194304

[fusions]
attention = 1

[modules."layers.*.attn"]
attention = 1

[modules."layers.*.mlp"]
activation = 1
"""


def expect(*arguments: str) -> Result:
    torch._dynamo.reset()
    return CliRunner().invoke(app, ["expect", *arguments])


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "expect.toml").write_text(EXPECTED)
    return str(tmp_path / "expect.toml")


def line(text: str) -> str:
    """Name the line of the model that has `text`, as reasons do."""
    return displayed_place(full_line(text))


def full_line(text: str) -> str:
    number = next(at for at, each in enumerate(FILE.read_text().splitlines(), 1) if text in each)
    return f"{FILE}:{number}"


def unwrapped(text: str) -> str:
    """Join the lines of `text`, which has 80 columns at most but for words that are longer."""
    assert all(len(each) <= 80 or len(each.split()) == 1 for each in text.splitlines())
    return " ".join(text.split())


# the command ---------------------------------------------------------------------------------------------------------


@pytest.mark.rotates(4)
def test_what_is_written_is_sorted_and_folded_and_holds_the_model(tmp_path: Path):
    output = tmp_path / "written.toml"
    assert expect("write", f"{FILE}:three_layers", "-o", str(output)).exit_code == 0
    text = output.read_text()
    assert re.match(r"# Written by cann-fusion \S+ for ascend910_93: ", text)
    assert text.endswith(WRITTEN)
    assert tomllib.loads(text)["at_most"]["launches"] == 25
    done = expect("check", f"{FILE}:three_layers", str(output))
    assert done.exit_code == 0, done.output
    assert "all 15 expectations are met" in done.stdout


@pytest.mark.parametrize(
    ("breakage", "table", "place"),
    [
        ("over_queries", '[modules."layers.*.attn"] attention: expected 1, found 0', "softmax(self.axis)"),
        ("multiplied_mask", '[modules."layers.*.attn"] attention: expected 1, found 0', "return scores * torch"),
        ("one_wide_head", '[modules."layers.*.attn"] attention: expected 1, found 0', "(weights @ v)"),
        ("finite_mask", "[at_most] launches: expected at most 9, found", "torch.where(hidden, -3.0"),
        ("no_softmax", '[modules."layers.*.attn"] attention: expected 1, found 0', ".sigmoid()"),
        ("no_gate", '[modules."layers.*.mlp"] activation: expected 1, found 0', "F.relu(self.gate(x))"),
        ("transposed_weight", "[at_most] prepared_bytes: expected at most 4194304, found", "rows = F.linear"),
        ("renamed", '[modules."layers.*.attn"]: expected a module of this path, found none', "return [each(x).view"),
    ],
)
@pytest.mark.rotates(6)
def test_a_breakage_is_named_at_its_line(breakage: str, table: str, place: str, file: str):
    done = expect("check", f"{FILE}:{breakage}", file)
    assert done.exit_code == 1, done.output
    text = unwrapped(done.stdout)
    assert table in text
    assert f"at {line(place)}" in text, done.stdout


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("activation", "activation: the option disable names it; remove it from disable to use it"),
        ("npu_swiglu", "activation: npu_swiglu: the option disable names it"),
    ],
)
def test_what_is_disabled_is_named(name: str, reason: str, file: str):
    done = expect("check", f"{FILE}:build", file, "--disable", name)
    assert done.exit_code == 1, done.output
    text = unwrapped(done.stdout)
    assert '[modules."layers.*.mlp"] activation: expected 1, found 0' in text
    assert reason in text
    assert line("F.silu(self.gate(x))") in text
    assert "fused there: joined_projections 1" in text


def test_mismatches_are_data_as_well(file: str):
    done = expect("check", f"{FILE}:over_queries", file, "--json")
    first = json.loads(done.stdout)[0]
    assert (first["name"], first["expected"], first["actual"]) == ("attention", 1, 0)
    (lack,) = first["lacks"]
    assert lack["modules"] == "layers.0.attn"
    assert lack["reasons"][0]["where"] == full_line("softmax(self.axis)")


@pytest.mark.rotates(8)
def test_another_target_is_a_mismatch_of_its_own(file: str):
    done = expect("check", f"{FILE}:build", file, "--target", "ascend910b")
    assert done.exit_code == 1
    assert done.stdout.startswith("target: expected ascend910_93, found ascend910b; set option target")


# errors in the file --------------------------------------------------------------------------------------------------

WRONG: list[tuple[Any, str]] = [
    ({"fusons": {}}, "'fusons' is not a known key; did you mean 'fusions'"),
    ({"fusions": {"attenton": 1}}, r"'attenton' is not a known rule in \[fusions\]; did you mean 'attention'"),
    ({"fusions": {"swiglu": 1}}, "'swiglu' is the rule 'activation'"),
    ({"modules": {"a.*": {"rop": 1}}}, r"'rop' is not a known rule in \[modules.'a.\*'\]; did you mean 'rope'"),
    ({"fusions": {"attention": "1"}}, "fusions.attention is '1' of type str; give a number"),
    ({"fusions": {"attention": True}}, "fusions.attention is True of type bool; give a number"),
    ({"fusions": {"attention": 0}}, "fusions.attention is 0; give 1 or more, or leave it out"),
    ({"fusions": ["attention"]}, "fusions is .* of type list; give a table"),
    ({"modules": {"a": 1}}, "modules.'a' is 1 of type int; give a table"),
    ({"modules": {"a..b": {}}}, "'a..b' is no path of a module: a name between its dots is missing"),
    ({"at_most": {"launch": 1}}, "'launch' is not a known limit in .*; did you mean 'launches'"),
    ({"target": "ascend910"}, "did you mean 'ascend910b'"),
    ({"target": 910}, "target is 910 of type int; give the name of a target"),
    ("no_such_file.toml", "cannot be read .No such file or directory.; write it by `cann-fusion expect write"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_an_error_in_expectations_says_what_to_write(given: Any, words: str):
    with pytest.raises(OptionError, match=words):
        fusion.FusionBackend({"expect": given})


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_an_error_in_expectations_is_one_at_every_door(door: Any):
    with pytest.raises(OptionError, match="reading expectations of the option expect: 'fusons' is not a known key"):
        door(expect={"fusons": {}})


def test_a_file_that_is_no_toml_is_bad_input_of_the_command(tmp_path: Path):
    (tmp_path / "broken.toml").write_text("[fusions\n")
    done = expect("check", f"{FILE}:build", str(tmp_path / "broken.toml"))
    assert done.exit_code == 2
    assert "it is no TOML" in done.stderr
    done = expect("write", f"{FILE}:build", "-o", str(tmp_path / "absent" / "e.toml"))
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


# compilations --------------------------------------------------------------------------------------------------------


def compiled(model: nn.Module, args: tuple[Any, ...], **options: Any) -> list[str]:
    """Compile and call a model; return the warnings of expectations."""
    torch.compiler.reset()
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = torch.compile(model, backend="cann_fusion", options={**OPTIONS, **options})(*args)
        torch.testing.assert_close(result, model(*args), rtol=5e-2, atol=5e-2)
    return [str(each.message) for each in caught if each.category is fusion.ExpectationWarning]


def test_a_compilation_warns_once_of_all_that_is_not_met(file: str):
    assert compiled(*expected_model.build(), expect=file) == []
    (text,) = compiled(*expected_model.over_queries(), expect=file)
    assert text.startswith(f"cann-fusion: expectations of {file} are not met:\n")
    assert line("softmax(self.axis)") in text
    assert "[fusions] attention: expected 1, found 0" in text


def test_a_filter_makes_the_warning_the_error_of_the_call():
    model, args = expected_model.over_queries()
    run = torch.compile(model, backend="cann_fusion", options={**OPTIONS, "expect": {"fusions": {"attention": 1}}})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", fusion.ExpectationWarning)
        with pytest.raises(fusion.ExpectationWarning, match="softmax: it is taken over the queries"):
            run(*args)


class InParts(nn.Module):
    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        return self.layers[1](x)


@pytest.mark.rotates(8)
def test_a_part_of_a_call_is_held_to_its_own_modules_alone():
    model, args = expected_model.call(layers=2)
    parts = InParts(model.layers)
    wanted = {"fusions": {"attention": 2}, "modules": {"layers.0.attn": {"attention": 1}}}
    assert compiled(parts, args, expect=wanted) == []
    (text,) = compiled(parts, args, expect={"modules": {"layers.1.attn": {"rope": 1}}})
    assert "in layers.1.attn" in text
    assert "rope: nothing has one of its written forms; `cann-fusion rules rope` shows them" in text


@pytest.mark.rotates(8)
@pytest.mark.parametrize("door", [fusion.explain, fusion.fuse_exported])
def test_exported_programs_are_held_to_expectations(door: Any):
    program = torch.export.export(*expected_model.over_queries())
    wanted = {"modules": {"layers.*.attn": {"attention": 1, "joined_projections": 1}}}
    with pytest.warns(fusion.ExpectationWarning, match="softmax: it is taken"):
        door(program, options={**OPTIONS, "expect": wanted})


# patterns of module paths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "path", "is_one"),
    [
        ("layers.*.attn", "layers.10.attn", True), ("layers.*.attn", "layers.10.attn.q", False),
        ("layers.0-2,5.attn", "layers.2.attn", True), ("layers.0-2,5.attn", "layers.5.attn", True),
        ("layers.0-2,5.attn", "layers.3.attn", False), ("layers.1", "layers.10", False),
        ("*", "norm", True), ("a-b", "a-b", True),
    ],
)  # fmt: skip
def test_a_pattern_matches_whole_names(pattern: str, path: str, is_one: bool):
    assert matches(pattern, path) == is_one


def test_folded_paths_match_the_folded_ones_alone():
    chosen = random.Random(7)
    known = {f"layers.{n}.{name}" for n in range(12) for name in ("attn", "mlp")} | {
        f"h.{n}.{m}" for n in (0, 3) for m in (1, 2)
    }
    for _ in range(50):
        values = {path: chosen.randrange(2) for path in sorted(known) if chosen.random() < 0.7}
        for pattern, value in folded(values, known):
            assert all(values.get(path) == value for path in known if matches(pattern, path)), pattern
        patterns = [pattern for pattern, _ in folded(values, known)]
        assert all(sum(matches(each, path) for each in patterns) == 1 for path in values)
    assert folded(dict.fromkeys(known, 1), known) == [("h.*.*", 1), ("layers.*.attn", 1), ("layers.*.mlp", 1)]


def test_paths_have_parts_and_parents():
    assert layer_part("model.layers.3.self_attn.q_norm") == "model.layers.3.self_attn"
    assert layer_part("model.norm") == "model.norm"
    assert with_parents(["a.b", ""]) == {"a", "a.b"}
    assert is_within("a.b", "a")
    assert not is_within("ab", "a")
