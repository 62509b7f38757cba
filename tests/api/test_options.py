"""Options: wrong names and values are errors at every door, and say what to give instead."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config
from typer.testing import CliRunner

import fusion
from fusion import FusionBackend, FusionPass, Options
from fusion.errors import FusionError, OptionError
from fusion.frontend.cli import app
from fusion.frontend.library import installed, rule_called
from fusion.operators import OPERATORS
from fusion.options import MODES, PLAN_CACHE_VARIABLE

from ..engine.graphs import norm, numbers

pytestmark = pytest.mark.usefixtures("fresh")

X, W = numbers(2, 3, 64), numbers(64, seed=1)
README = Path(fusion.__file__).parents[1] / "README.md"


def by_name(**options: Any) -> None:
    with torch.no_grad():
        torch.compile(norm, backend="cann_fusion", options=options)(X, W)


def by_name_suppressed(**options: Any) -> None:
    with dynamo_config.patch(suppress_errors=True):
        by_name(**options)


def by_object(**options: Any) -> None:
    with torch.no_grad():
        torch.compile(norm, backend=FusionBackend({"target": "host"}), options=options)(X, W)


@cache
def exported() -> Any:
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return norm(x, w)

    return torch.export.export(Norm(), (X, W))


DOORS = {
    "backend by name": by_name,
    "backend by name, errors suppressed": by_name_suppressed,
    "backend": lambda **options: FusionBackend(options),
    "backend, options of torch.compile": by_object,
    "backend of Options": lambda **options: FusionBackend(Options(**options)),
    "fuse": lambda **options: fusion.fuse(**options),
    "fuse, options": lambda **options: fusion.fuse(options=options),
    "explain": lambda **options: fusion.explain(norm, X, W, options=options),
    "fuse_exported": lambda **options: fusion.fuse_exported(exported(), options=options),
    "explain, exported": lambda **options: fusion.explain(exported(), options=options),
    "pass": lambda **options: FusionPass(options),
}
"""Ways in at which options are given: each raises before a model runs."""
NAMES = {
    "disable": (["rms_nrom"], "'rms_norm'"),
    "rules": ({"rms_nrom"}, "'rms_norm'"),
    "unsafe": ("ropee", "'rope'"),
    "opt_in": (("gather_selection_kv_cash",), "'gather_selection_kv_cache'"),
    "packages": (["cann_ops_transformers"], "'cann_ops_transformer'"),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("option", NAMES)
@pytest.mark.rotates(6)
def test_a_misspelt_rule_is_an_error_at_every_door_with_the_nearest(option: str, door: Any):
    given, nearest = NAMES[option]
    with pytest.raises(OptionError, match=rf"is not a known .*(rule|package); did you mean {nearest}"):
        door(**{option: given})


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_two_versions_of_torch_npu_are_an_error_at_every_door(door: Any):
    with pytest.raises(OptionError, match=r"packages names torch_npu==2\.10 and torch_npu==2\.7; name one version"):
        door(packages=["torch_npu==2.7", "torch_npu==2.10"])


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_misspelt_operator_is_an_error_at_every_door_with_the_nearest(door: Any):
    with pytest.raises(OptionError, match="did you mean 'npu_swiglu'"):
        door(disable={"npu_swiglo"})


@pytest.mark.parametrize("flag", ["--disable", "--opt-in"])
def test_a_misspelt_rule_is_bad_input_of_the_command(flag: str):
    done = CliRunner().invoke(app, ["explain", "hf:qwen3", flag, "gather_selection_kv_cash"])
    assert done.exit_code == 2
    assert "did you mean 'gather_selection_kv_cache'" in done.stderr


WRONG: dict[str, list[Any]] = {
    "target": [None, 910, ["host"], True],
    "lower": [None, 1, ["eager"], "inductr"],
    "plan_lower": [None, 0, "torchar"],
    "mode": [None, 3, "reduce_overhead"],
    "rules": [None, 3, {"rope": True}, [None], [["rope"]], b"rope"],
    "disable": [None, True, {"rope": 1}, [3]],
    "opt_in": [None, 1.5],
    "packages": [None, 2, {"cann_ops_transformer": "9.0"}, [b"custom_ops"]],
    "unsafe": [None, object()],
    "assume": [
        None,
        "causal",
        ["attention_mask"],
        {"attention_mask": None},
        {"m": True},
        {3: "causal"},
        {"m": {"a": "causal"}},
    ],
    "lengths": [None, True, "device"],
    "fuel": ["3", True, 3.0, -1, [1]],
    "verify": ["no", 1, None, "True"],
    "hints": [None, 3, "prefech", [1]],
    "prepack": [None, False, "copies"],
    "plan_cache": [None, False, 1, "disc"],
    "progress": [1, "yes", None],
    "dump_dir": [3, True, ["dump"], b"dump"],
    "expect": [3, True, ["expect.toml"], b"expect.toml"],
}


@pytest.mark.parametrize(("option", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_another_type_is_an_error_that_says_what_to_give(option: str, value: Any):
    with pytest.raises(OptionError) as caught:
        Options(**{option: value})
    text = str(caught.value)
    assert re.search(r"^(setting option|reading options|choosing a target)", text), text
    assert re.search(r"; give |did you mean|known: ", text), text
    assert option in text, text


def test_every_option_is_checked_by_type():
    assert set(WRONG) == set(Options.__dataclass_fields__)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_value_of_another_type_is_an_error_at_every_door(door: Any):
    with pytest.raises(OptionError, match="setting option fuel: '3' of type str is not accepted; give the number"):
        door(fuel="3")


@pytest.mark.parametrize("given", ["host", 3, [("target", "host")]])
def test_options_that_are_no_mapping_are_an_error(given: Any):
    with pytest.raises(OptionError, match="is no mapping; give a mapping of names to values"):
        FusionPass(given)


def test_options_beside_options_change_them():
    assert Options.of(Options(target="host"), fuel=3) == Options(target="host", fuel=3)
    assert Options.of({"target": "host"}, target="ascend910b").target == "ascend910b"
    with pytest.raises(OptionError, match="did you mean 'fuel'"):
        Options.of(Options(), fuell=3)


def test_options_in_the_place_of_the_model_are_an_error():
    with pytest.raises(OptionError, match="give options by name"):
        fusion.fuse({"target": "host"})


def test_ordinary_ways_to_give_a_value_are_accepted(tmp_path: Path):
    options = Options(rules="rope", disable=iter(["rope", "npu_swiglu"]), dump_dir=tmp_path, plan_lower="", fuel=0)
    assert options.rules == {"rope"}
    assert options.disable == {"rope", "npu_swiglu"}
    assert options.dump_dir == str(tmp_path)
    assert Options(dump_dir=None).dump_dir == ""  # pyright: ignore[reportArgumentType]


def test_a_wrong_variable_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(PLAN_CACHE_VARIABLE, "discs")
    with pytest.raises(OptionError, match=rf"'discs' is not .*\${PLAN_CACHE_VARIABLE}.*did you mean 'disk'"):
        Options()
    assert Options(plan_cache="off").plan_cache == "off"


# what users call a rule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("swiglu", "'swiglu' is the rule 'activation'"),
        ("SwiGLU", "'SwiGLU' is the rule 'activation'"),
        ("RMSNorm", "'RMSNorm' is the rule 'rms_norm'"),
        ("rms-norm", "'rms-norm' is the rule 'rms_norm'"),
        ("add_rms_norm", "'add_rms_norm' is the rule 'add_norm'"),
        ("quantization", "'quantization' is the rule 'quantisation'"),
        ("rope.together", "'rope.together' is part of the rule 'rope'"),
        ("together", "'together' is part of the rule 'rope'"),
        ("one_plus_weight", "'one_plus_weight' is part of the rule 'rms_norm'"),
        ("npu_swiglu", "'npu_swiglu' is emitted by the rules 'activation', 'routed_experts'"),
        ("npu::npu_rotary_mul", "'npu::npu_rotary_mul' is emitted by the rule 'rope'"),
    ],
)
def test_a_name_that_is_no_rule_is_answered_with_the_rule(name: str, hint: str):
    with pytest.raises(OptionError, match=re.escape(hint)):
        FusionPass({"rules": [name]})


@pytest.mark.parametrize("name", ["swiglu", "npu::npu_rotary_mul"])
def test_the_command_answers_with_the_rule_too(name: str):
    done = CliRunner().invoke(app, ["rules", name])
    assert done.exit_code == 2
    assert "the rule" in done.stderr


def test_no_alias_is_of_two_rules_or_a_rule():
    names = [name for rule in installed().rules for name in (rule.name, *rule.aliases)]
    assert len(names) == len(set(names))


def test_whatever_readme_says_that_the_pass_emits_is_answered_with_a_rule():
    table = README.read_text().partition("| rule | recognises")[2].partition("\n\n")[0]
    emitted = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.rpartition("| ")[2] or row)}
    known = {each.short.partition(".")[0] for each in OPERATORS.values()}
    assert len(emitted & known) > 30
    assert [name for name in sorted(emitted & known) if not rule_called(name, installed().rules)] == []


def test_options_of_a_compilation_replace_those_of_the_backend_that_they_name():
    backend = FusionBackend({"target": "host", "fuel": 3})
    assert backend.changed(None, None) is backend
    assert backend.changed({"fuel": 2}, "reduce-overhead").options == Options(
        target="host", fuel=2, mode="reduce-overhead"
    )
    assert backend.changed(Options(fuel=2), None).options == Options(fuel=2)
    with torch.no_grad():
        compiled = torch.compile(norm, backend=backend, options={"lower": "eager"})
        torch.testing.assert_close(compiled(X, W), norm(X, W))


# mode ----------------------------------------------------------------------------------------------------------------


def test_the_modes_are_those_of_torch():
    assert set(MODES) == set(torch._inductor.list_mode_options())


@pytest.mark.parametrize("given", ["mode", "options", "object"])
def test_a_mode_is_passed_on_to_inductor(given: str, monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import compile_fx, config

    seen: list[tuple[bool, bool]] = []
    real = compile_fx.compile_fx_forward

    def listening(*args: Any, **kwargs: Any) -> Any:
        seen.append((config.triton.cudagraphs, config.max_autotune))
        return real(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_forward", listening)
    how: Any = {"mode": "reduce-overhead"}
    if given == "options":
        how = {"options": {"target": "host", "lower": "inductor", **how}}
    backend = FusionBackend({"target": "host", "lower": "inductor"}) if given == "object" else "cann_fusion"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="cann-fusion")
        torch.testing.assert_close(torch.compile(norm, backend=backend, **how)(X, W), norm(X, W))
    assert seen == [(True, False)]
    assert not config.triton.cudagraphs


def test_a_mode_that_changes_nothing_is_told_of():
    options = {"lower": "eager", "target": "host", "mode": "max-autotune"}
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match=r"by 'eager' here, and mode='max-autotune'.* nothing"),
    ):
        torch.compile(norm, backend="cann_fusion", options=options)(X, W)


def test_a_mode_that_does_not_exist_is_an_error():
    with torch.no_grad(), pytest.raises(OptionError, match="did you mean 'reduce-overhead'"):
        torch.compile(norm, backend="cann_fusion", mode="reduce-overheads")(X, W)
    with pytest.raises(OptionError, match="did you mean 'max-autotune'"):
        fusion.fuse(mode="max-autotunes")


def test_an_error_reaches_the_caller_at_each_call():
    run = torch.compile(norm, backend="cann_fusion", options={"targt": "host"})
    for _ in range(2):
        with torch.no_grad(), pytest.raises(FusionError, match="did you mean 'target'"):
            run(X, W)
