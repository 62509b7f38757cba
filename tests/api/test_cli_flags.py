"""Flags of the command: one for each option, and the models that a command line can name."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from fusion.frontend.cli import app
from fusion.frontend.commands.flags import WITHOUT_FLAG, OptionFlags
from fusion.frontend.commands.loading import call_of
from fusion.frontend.hf import Call
from fusion.options import Options

MODELS = """
import torch
from torch import nn

import fusion


class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Sized(nn.Module):
    def __init__(self, hidden, eps=1e-6):
        super().__init__()


class Fixed(Norm):
    def forward(self, x=torch.ones(2, 64)):
        return super().forward(x)


def masked(q, attention_mask):
    return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=attention_mask)


def build():
    return Norm(), (torch.ones(2, 64),)


norm = Norm()
LIBRARY = fusion.installed()
RULE = fusion.installed().rules[0]
TEXT = "norm"
"""
ATTENTION = ("masked", "--input", "bf16[1,4,32,64]", "--input", "attention_mask=bf16[1,1,32,32]")


@pytest.fixture
def models(tmp_path: Path) -> str:
    (tmp_path / f"models_{tmp_path.name.replace('-', '_')}.py").write_text(MODELS)
    return str(next(tmp_path.iterdir()))


def run(*arguments: str) -> Result:
    torch._dynamo.reset()
    return CliRunner().invoke(app, ["explain", *arguments])


def report(*arguments: str) -> dict:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_port_offers_no_flag_that_it_refuses():
    done = CliRunner().invoke(app, ["port", "--help"])
    assert done.exit_code == 0
    assert "--target" in done.output
    assert not any(each in done.output for each in ("--plan-lower", "--lower", "--dynamic", ".pt2"))


def test_every_option_has_a_flag_or_a_reason_why_not():
    flags = {each.name for each in fields(OptionFlags)}
    assert not flags & WITHOUT_FLAG.keys()
    assert flags | WITHOUT_FLAG.keys() == {each.name for each in fields(Options)}
    assert all(WITHOUT_FLAG.values())


def test_no_flag_sets_no_option():
    assert OptionFlags().options() == Options(target="ascend910_93")
    assert OptionFlags().options("ascend910b").target == "ascend910b"
    assert OptionFlags(target="host").options("ascend910b").target == "host"


def test_flags_set_the_options_of_their_names():
    flags = OptionFlags(
        lower="eager", plan_lower="torchair", rules=["rope"], disable=["rms_norm", "npu_swiglu"], unsafe=["rope"],
        assume=["attention_mask=causal", "masks[0]=window:4"], lengths="host", fuel=3, prepack="copy",
        plan_cache="off", progress=False, dump_dir="graphs",
    )  # fmt: skip
    assert flags.options() == Options(
        target="ascend910_93", lower="eager", plan_lower="torchair", rules=frozenset({"rope"}),
        disable=frozenset({"rms_norm", "npu_swiglu"}), unsafe=frozenset({"rope"}),
        assume={"attention_mask": "causal", "masks[0]": "window:4"}, lengths="host", fuel=3, prepack="copy",
        plan_cache="off", progress=False, dump_dir="graphs",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--assume", "attention_mask"), "write NAME=KIND, such as attention_mask=causal"),
        (("--assume", "attention_mask=casual"), "did you mean 'causal'"),
        (("--lower", "inductr"), "did you mean 'inductor'"),
        (("--prepack", "copies"), "known: share, copy"),
        (("--fuel", "-1"), "-1 is negative"),
        (("--rules", "rms_nrom"), "did you mean 'rms_norm'"),
        (("--rules", "rms_nrom", "--rules", "{models}:RULE"), "did you mean 'rms_norm'"),
        (("--rules", "{models}:absent"), "loading rules from"),
        (("--rules", "{models}:TEXT"), "handing over rules: 'norm' is a name"),
    ],
)
def test_a_wrong_flag_is_told_what_to_write(flags: tuple[str, ...], words: str, models: str):
    done = run(f"{models}:build", *(each.format(models=models) for each in flags))
    assert done.exit_code == 2, done.output
    assert words in done.stderr


def test_rules_are_those_that_are_named_or_handed_over(models: str):
    rms_norm = {"npu::npu_rms_norm": 1}
    assert report(f"{models}:build", "--rules", "rope")["ops"] == {}
    assert report(f"{models}:build", "--rules", "rope", "--rules", f"{models}:RULE")["ops"] == rms_norm
    assert report(f"{models}:build", "--rules", f"{models}:LIBRARY")["ops"] == rms_norm


def test_a_mask_can_be_assumed(models: str):
    name, *inputs = ATTENTION
    flags = f"{models}:{name}", *inputs, "--rules", "attention"
    assert report(*flags, "--assume", "attention_mask=causal")["assumptions"] == {"attention_mask": "causal"}
    assert report(*flags, "--fuel", "0")["rewrites"] == []


@pytest.mark.rotates(8)
def test_sizes_can_be_symbolic(models: str):
    flags = f"{models}:build", "--rules", "rms_norm", "--dump"
    folder = Path(models).parent / "dump"
    for flag, is_symbolic in (("--dynamic", True), ("--static", False)):
        report(*flags, str(folder / flag), flag)
        text = next((folder / flag).glob("*captured.txt")).read_text()
        assert ("SymInt" in text) == is_symbolic


# models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("build", ()), ("Norm", ("f32[2,64]",)), ("Norm", ("x=f32[2,64]",)), ("norm", ("f32[2,64]",)), ("Fixed", ())],
)
def test_a_file_names_a_factory_a_class_or_a_module(name: str, inputs: tuple[str, ...], models: str):
    call = call_of(f"{models}:{name}", inputs)
    assert isinstance(call, Call)
    (x,) = call.args or tuple(call.kwargs.values()) or (torch.ones(2, 64),)
    assert x.shape == (2, 64)
    assert call.model(x).shape == (2, 64)


def test_the_command_explains_a_class(models: str):
    assert report(f"{models}:Norm", "--input", "x=f32[2,64]")["ops"] == {"npu::npu_rms_norm": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{models}:Sized",), "its constructor requires hidden; name a function that returns the model"),
        (("{models}:Norm",), "the model requires x; give them by --input x=bf16[2,16,256], or name a function"),
        (("{models}:masked",), "it requires q, attention_mask; a factory takes no arguments: write def build()"),
        (("{models}:masked", "--input", "bf16[1,4,32,64]"), "the model requires attention_mask"),
        (("{models}:Nrm",), "has no callable 'Nrm'; did you mean 'Norm'? it defines Norm, Sized, Fixed, masked, build"),
        (("{models}",), "it names no function or class of the file; it defines Norm, Sized, Fixed, masked, build"),
        (("{broken}:build",), "broken.py cannot be imported (NameError: name 'absent' is not defined) at "),
        (("nothing",), "it is no model type, module or file; write hf:<model type>"),
        (("{models}:TEXT",), "'norm' is no callable"),
        (("{models}:Norm", "--input", "x=int[2]"), "is no tensor; write DTYPE[SHAPE] or NAME=DTYPE[SHAPE]"),
        (("absent.py:build",), "there is no file 'absent.py'"),
        (("absent.pt2",), "torch.export.save(program, 'absent.pt2') writes it"),
        (("{models}.pt2",), "there is no file"),
        (("hf:qwen3", "--input", "i64[1]"), "leave --input out"),
    ],
)
def test_a_wrong_model_is_told_what_to_write(arguments: tuple[str, ...], words: str, models: str):
    broken = Path(models).with_name("broken.py")
    broken.write_text("import torch\n\nabsent.build\n")
    done = run(*(each.format(models=models, broken=broken) for each in arguments))
    assert done.exit_code == 2, done.output
    assert words in done.stderr


def test_an_exported_program_is_explained(tmp_path: Path):
    class Norm(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    torch.export.save(torch.export.export(Norm(), (torch.ones(2, 64),)), tmp_path / "norm.pt2")
    assert report(str(tmp_path / "norm.pt2"))["ops"] == {"npu::npu_rms_norm": 1}
    done = run(str(tmp_path / "norm.pt2"), "--input", "f32[2,64]")
    assert done.exit_code == 2
    assert "a program of torch.export has its inputs" in done.stderr
    (tmp_path / "broken.pt2").write_text("nothing")
    done = run(str(tmp_path / "broken.pt2"))
    assert done.exit_code == 2
    assert "it is no program of torch.export" in done.stderr
