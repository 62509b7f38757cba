"""fuse_exported: a program that runs, saves, loads and compiles, with the signature and state of the plain one."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export
from torch.nn import functional as F

import fusion
from fusion.errors import OperatorError, OptionError
from fusion.frontend.exported import STAY
from fusion.routes import cpu_gpu
from tests.engine.graphs import norm, numbers
from tests.support.child import child

A3 = {"target": "ascend910_93"}
HOST = {"target": "host"}
WIDTH, HEADS, ROOM = 128, 2, 16
LEVELS: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "training": lambda program: program,
    "functional": lambda program: program.run_decompositions({}),
    "core": lambda program: program.run_decompositions(),
}
every_level = pytest.mark.parametrize("level", LEVELS)


class Block(nn.Module):
    """A decoder layer with a cache of its own and one of the caller.

    x, residual [B, S, H], position [S], cache [B, N, T, D] → hidden [B, S, H], attended [B, S, H].
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("q", "k", "v", "gate", "up", "down"):
            weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
            self.register_parameter(name, nn.Parameter(weight.bfloat16(), requires_grad=False))
        self.gain = nn.Parameter(torch.ones(WIDTH).bfloat16(), requires_grad=False)
        self.register_buffer("keys", torch.zeros(2, HEADS, ROOM, WIDTH // HEADS).bfloat16())
        self.register_buffer("steps", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor, residual: Tensor, position: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
        x = x + residual
        y = norm(x, self.gain)
        q, k, v = (self.heads(F.linear(y, each)) for each in (self.q, self.k, self.v))
        self.keys.index_copy_(2, position, k)
        self.steps.add_(1)
        cache[:, :, position] = v
        seen = torch.arange(ROOM) <= position[:, None]
        attended = F.scaled_dot_product_attention(q, self.keys, cache, attn_mask=seen)
        hidden = F.silu(F.linear(y, self.gate)) * F.linear(y, self.up)
        return x + F.linear(hidden, self.down), attended.transpose(1, 2).flatten(2)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def inputs(length: int = 3) -> tuple[Tensor, ...]:
    x, residual = (numbers(2, length, WIDTH, seed=seed).bfloat16() for seed in (1, 2))
    return x, residual, torch.arange(length) + 2, numbers(2, HEADS, ROOM, WIDTH // HEADS, seed=3).bfloat16()


@cache
def exported(dynamic: bool = False, kind: type[nn.Module] = Block) -> ExportedProgram:
    """Return the program of a module; tests run copies of it, so that its buffers stay as they are."""
    size = Dim("size", min=2, max=8)
    sizes = ({1: size}, {1: size}, {0: size}, None) if dynamic else None
    with torch.no_grad():
        return export(kind(), inputs(), dynamic_shapes=sizes)


@torch.no_grad()
def steps(module: Any, length: int = 3) -> list[Tensor]:
    """Results of two calls, and what they have written."""
    given = inputs(length)
    first = module(*given)
    second = module(*given)
    return [*first, *second, given[3]]


def agrees(program: ExportedProgram, plain: ExportedProgram, *lengths: int) -> None:
    for length in lengths or (3,):
        ours, theirs = (copy.deepcopy(each).module() for each in (program, plain))
        torch.testing.assert_close(steps(ours, length), steps(theirs, length), rtol=5e-2, atol=5e-2)
        for name in ("keys", "steps"):
            torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=5e-2, atol=5e-2)


def calls(program: ExportedProgram) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


FUSED = {"npu.npu_add_rms_norm.default", "npu.npu_swiglu.default", "npu.npu_fused_infer_attention_score_v2.default"}


@every_level
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.rotates)])
def test_a_program_of_any_level_fuses_alike_and_computes_the_same(level: str, dynamic: bool):
    program = LEVELS[level](exported(dynamic))
    before = str(program)
    fused = fusion.fuse_exported(program, options=A3)
    assert calls(fused) >= FUSED
    assert str(program) == before, "the program that was given is not changed"
    assert fused.range_constraints == program.range_constraints
    fused.validate()
    agrees(fused, program, *((3, 5) if dynamic else (3,)))


def test_the_signature_names_what_is_written_and_returned():
    functional = exported().run_decompositions({})
    fused = fusion.fuse_exported(functional, options=A3)
    assert fused.graph_signature.output_specs == functional.graph_signature.output_specs
    assert set(fused.graph_signature.buffers_to_mutate.values()) == {"keys", "steps"}
    assert set(fused.graph_signature.user_inputs_to_mutate.values()) == {"cache"}
    assert fused.graph_signature.user_inputs == functional.graph_signature.user_inputs


def test_joined_weights_take_the_place_of_those_that_nothing_reads():
    program = exported()
    fused = fusion.fuse_exported(program, options=A3)
    assert set(program.state_dict) - set(fused.state_dict) == {"q", "k", "v", "gate", "up"}
    assert {each for each in fused.state_dict if each.startswith("prepared")} == {"prepared_0", "prepared_1"}
    sizes = [sum(each.numel() for each in state.state_dict.values()) for state in (program, fused)]
    assert sizes[0] == sizes[1], "no weight is held twice"
    report = fusion.explain(program, options=A3)
    assert report.prepared
    assert not report.prepared_bytes
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fused.module().load_state_dict(Block().state_dict())


def test_a_weight_that_something_else_reads_stays():
    class Tied(Block):
        def forward(self, *given: Tensor) -> Any:
            return *super().forward(*given), F.linear(given[0], self.gate).exp()

    program = exported(kind=Tied)
    fused = fusion.fuse_exported(program, options=A3)
    assert {"gate", "prepared_0"} <= set(fused.state_dict)
    assert fusion.explain(program, options=A3).copies == {STAY: (1, 2 * WIDTH * WIDTH * 2)}
    agrees(fused, program)


def test_the_report_says_what_fused_and_computes_nothing(monkeypatch: pytest.MonkeyPatch):
    program = exported()
    monkeypatch.setattr("fusion.frontend.exported._program", None)
    report = fusion.explain(program, options=A3)
    assert report.target == "ascend910_93"
    assert {each.rule for each in report.matches} == {"add_norm", "joined_projections", "activation", "attention"}
    assert all(match.where.startswith(__file__) or "graphs.py" in match.where for match in report.matches)
    assert "npu::npu_swiglu" in str(report)
    assert report.lowered[0] is report.graphs[0]


def test_a_fused_program_fuses_no_further():
    fused = fusion.fuse_exported(exported(), options=A3)
    again = fusion.fuse_exported(fused, options=A3)
    assert calls(again) == calls(fused)
    assert set(again.state_dict) == set(fused.state_dict)


@pytest.mark.rotates(8)
def test_for_inductor_nothing_of_this_package_is_needed():
    program = exported()
    fused = fusion.fuse_exported(program, options={**A3, "lower": "inductor"})
    assert not any("npu" in each for each in calls(fused))
    assert "prepared_0" in fused.state_dict
    agrees(fused, program)


@pytest.mark.rotates(4)
def test_a_program_without_a_match_is_that_program():
    with torch.no_grad():
        program = export(torch.nn.Tanh(), (numbers(2, 3),)).run_decompositions({})
    fused = fusion.fuse_exported(program, options=A3)
    assert fused is not program
    assert str(fused.graph) == str(program.graph)
    assert fused.graph_signature == program.graph_signature


@pytest.mark.parametrize(
    "name", ["pipeline.canonicalise", "frontend.exported.write_at_end", "frontend.exported.return_writes"]
)
def test_where_a_stage_fails_the_program_is_as_it_came(monkeypatch: pytest.MonkeyPatch, name: str):
    def planted(*_: Any) -> None:
        raise TypeError("planted")

    monkeypatch.setattr(f"fusion.{name}", planted)
    with pytest.warns(UserWarning, match="could not fuse a graph"):
        fused = fusion.fuse_exported(exported(), options=A3)
    assert not any("npu" in each for each in calls(fused))
    agrees(fused, exported())


@pytest.mark.parametrize("option", [{"assume": {"mask": "causal"}}, {"verify": True}, {"target": "ascend"}])
def test_options_that_check_calls_are_refused(option: dict[str, Any]):
    with pytest.raises(OptionError, match=next(iter(option))):
        fusion.fuse_exported(exported(), options=option)


class Einsum(nn.Module):
    """A product that autocast computes in bfloat16."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.einsum("bsd,btd->bst", q, k)


def test_a_call_that_torch_traces_without_the_casts_of_autocast_is_an_error():
    program = export(Einsum(), (numbers(1, 2, 4), numbers(1, 3, 4, seed=1)))
    for door in (fusion.fuse_exported, fusion.explain):
        with pytest.raises(OperatorError, match=r"einsum.* at .*test_exported\.py:\d+ is called under autocast"):
            door(program)
    wide = export(Einsum(), (half(1, 2, 4), half(1, 3, 4)))
    assert fusion.fuse_exported(wide).module()(half(1, 2, 4), half(1, 3, 4)).dtype == torch.bfloat16


def half(*shape: int) -> Tensor:
    return numbers(*shape).bfloat16()


def test_rules_may_be_handed_over():
    from fusion.frontend.library import installed

    rules = [rule for rule in installed().rules if rule.name == "rms_norm"]
    assert calls(fusion.fuse_exported(exported(), options=A3, rules=rules)).isdisjoint(FUSED)


class Branches(nn.Module):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, w: norm(x, w), lambda x, w: norm(x, w) * 2, (x, w))


@pytest.mark.rotates(8)
def test_branches_are_fused():
    given = numbers(2, 64), numbers(64)
    with torch.no_grad():
        program = export(Branches(), given)
        for lower in ("auto", "inductor"):
            fused = fusion.fuse_exported(program, options={**HOST, "lower": lower})
            inside = {str(node.target) for _, body in fused.graph_module.named_children() for node in body.graph.nodes}
            assert ("npu.npu_rms_norm.default" in inside) is (lower == "auto")
            for sign in (1, -1):
                torch.testing.assert_close(
                    fused.module()(sign * given[0], given[1]), Branches()(sign * given[0], given[1])
                )


def test_the_graph_of_a_program_and_its_module_are_rewritten_in_place():
    program = exported().run_decompositions({})
    fusion.FusionPass(A3)(program.graph_module)
    assert "npu.npu_add_rms_norm.default" in calls(program)
    program.validate()
    agrees(program, exported())
    module, plain = (copy.deepcopy(exported()).module() for _ in range(2))
    fusion.FusionPass(A3)(module)
    assert "npu.npu_add_rms_norm.default" in {str(node.target) for node in module.graph.nodes}
    torch.testing.assert_close(steps(module), steps(plain), rtol=5e-2, atol=5e-2)


LOADS = """
    import torch, fusion
    fusion.operators.ensure()
    program = torch.export.load({path!r})
    given = torch.load({inputs!r})
    with torch.no_grad():
        torch.save(program.module()(*given), {results!r})
"""


@pytest.mark.rotates
@pytest.mark.parametrize("dynamic", [False, True])
def test_another_process_loads_it(tmp_path: Path, dynamic: bool):
    program = exported(dynamic)
    names = {name: str(tmp_path / name) for name in ("path", "inputs", "results")}
    torch.export.save(fusion.fuse_exported(program, options=A3), names["path"])
    torch.save(inputs(), names["inputs"])
    child(LOADS.format(**names))
    with torch.no_grad():
        wanted = copy.deepcopy(program).module()(*inputs())
    torch.testing.assert_close(torch.load(names["results"]), wanted, rtol=5e-2, atol=5e-2)


def test_it_saves_and_loads():
    file = io.BytesIO()
    torch.export.save(fusion.fuse_exported(exported(), options=A3), file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert calls(loaded) >= FUSED
    agrees(loaded, exported())


@pytest.mark.rotates
@pytest.mark.skipif(not cpu_gpu.has_compiler("cpu"), reason="needs a C++ compiler and Python.h")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("way", ["fused", "fused for inductor", "guest", "guest of fused"])
def test_aot_inductor_compiles_it(tmp_path: Path, way: str, dynamic: bool):
    program = exported(dynamic)
    given = {**A3, "lower": "inductor"} if "inductor" in way else A3
    packed = fusion.fuse_exported(program, options=given) if "fused" in way else program
    guests = {"post_grad_custom_pre_pass": fusion.FusionPass(A3)} if "guest" in way else {}
    file = str(tmp_path / "model.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._inductor.aoti_compile_and_package(packed, package_path=file, inductor_configs=guests)
    for length in (3, 5) if dynamic else (3,):
        run = torch._inductor.aoti_load_package(file)
        torch.testing.assert_close(
            steps(run, length), steps(copy.deepcopy(program).module(), length), rtol=5e-2, atol=5e-2
        )


def test_an_input_that_is_named_like_a_builtin_keeps_its_name():
    """As that of most modules of torch is: fx renames such a node where it copies a graph."""

    class Norm(nn.Module):
        def forward(self, input: Tensor, weight: Tensor) -> Tensor:
            return norm(input, weight)

    with torch.no_grad():
        program = export(Norm(), (numbers(2, 64), numbers(64)))
        fused = fusion.fuse_exported(program, options=A3)
    assert "npu.npu_rms_norm.default" in calls(fused)
    assert fused.graph_signature.user_inputs == ("input", "weight")
    with torch.no_grad():
        torch.testing.assert_close(fused.module()(numbers(2, 64), numbers(64)), norm(numbers(2, 64), numbers(64)))
        fusion.FusionPass(A3)(program.graph_module)
    program.validate()
    assert "npu.npu_rms_norm.default" in calls(program)
