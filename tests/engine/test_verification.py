"""Verification of the first call: sound graphs pass, wrong ones are found and named, and nothing else changes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion import Rule
from fusion.errors import VerificationError
from fusion.frontend.backend import FusionBackend
from fusion.options import Options

from ..support.child import child
from .graphs import norm, numbers, rotate
from .rules import WrongNorm
from .spoiled import (
    Change,
    argument,
    held_in,
    in_float32,
    late_rows_larger,
    moved,
    one_listed_twice,
    result,
    scaled,
    spoil,
    swapped,
    tied_otherwise,
    without_gradients,
)

__all__ = ["without_gradients"]  # a fixture that every test here takes
A3 = {"target": "ascend910_93"}
X, W = numbers(2, 3, 64), numbers(64, seed=1)


def verified(function: Any, *rules: Rule, **options: Any) -> Any:
    torch.compiler.reset()
    given = {**A3, "lower": "eager", "verify": True, **options}
    return torch.compile(function, backend=FusionBackend(Options.of(given), rules or None))


def error(function: Any, *args: Any, rules: tuple[Rule, ...] = (), **options: Any) -> VerificationError:
    with pytest.raises(VerificationError) as raised:
        verified(function, *rules, **options)(*args)
    return raised.value


class Layer(nn.Module):
    """Norm, two projections that are rotated, a cache in a buffer, and attention over it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * numbers(128, seed=seed))
        self.q, self.k = (nn.Linear(128, 128, bias=False) for _ in range(2))
        self.register_buffer("keys", 0.1 * numbers(2, 2, 16, 64, seed=seed + 1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> Tensor:
        h = norm(x, self.weight)
        q, k = (each(h).view(2, -1, 2, 64).transpose(1, 2) for each in (self.q, self.k))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.keys.index_copy_(2, at, k)
        seen = torch.arange(16) <= at[:, None]
        y = F.scaled_dot_product_attention(q, self.keys, self.keys, attn_mask=seen)
        return x + y.transpose(1, 2).reshape(2, -1, 128)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(10), Layer(20)])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, at: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x, cos, sin, at)
        return {"hidden": x}


def model(dtype: torch.dtype = torch.bfloat16, tokens: int = 9) -> tuple[Model, list[Tensor]]:
    torch.manual_seed(0)
    angles = 4 * numbers(tokens, 32, seed=3).repeat(1, 2)
    inputs = [numbers(2, tokens, 128, dtype=dtype), angles.cos().to(dtype), angles.sin().to(dtype)]
    return Model().eval().requires_grad_(False).to(dtype), [*inputs, torch.arange(3, 3 + tokens)]


def route(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """A router: the weights of the experts of each token, and which these are."""
    weights, experts = (x @ w).float().softmax(-1).topk(2, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


def quantised(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """A linear layer in W8A8: x [B, D] quantised by token, w [N, D] int8 with a scale of each channel."""
    step = x.float().abs().amax(-1, keepdim=True) / 127
    whole = (x.float() / step).round().to(torch.int8)
    return ((whole.int() @ w.int().T).float() * step * scale).to(x.dtype)


def swallowed(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """Attention in float16 whose mask of -65504 swallows scores: float64 keeps them in a row that sees no key."""
    scores = q @ k.mT * 0.125 + torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -65504.0)
    return scores.float().softmax(-1).to(q.dtype) @ v


# sound graphs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [(torch.float16, 9), *(pytest.param(torch.bfloat16, n, marks=pytest.mark.rotates) for n in (1, 9))],
)
def test_a_sound_model_passes_and_is_left_as_without_verification(dtype: torch.dtype, tokens: int):
    plain, inputs = model(dtype, tokens)
    fused = model(dtype, tokens)[0]
    want = verified(plain, verify=False)(*inputs)["hidden"]
    have = verified(fused)(*inputs)["hidden"]
    assert torch.equal(have, want)
    for one, other in zip(plain.buffers(), fused.buffers(), strict=True):
        assert torch.equal(one, other)


def test_rows_that_see_no_key_are_named_and_judged_by_both_dtypes(caplog: pytest.LogCaptureFixture):
    q, k, v = (3 * numbers(2, 4, 8, 64, seed=seed, dtype=torch.float16) for seed in range(3))
    hidden = ~torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    hidden[0, :, :, :3] = True  # the first three rows of a sequence that is padded on the left
    want = swallowed(q, k, v, hidden)
    exact = swallowed(q.double(), k.double(), v.double(), hidden)
    assert (want[0, :, 0] - exact[0, :, 0]).norm() > 0.1 * exact[0, :, 0].norm()
    verified(swallowed)(q, k, v, hidden)
    assert "the plain one is further from float64 in output (" in caplog.text


def equal_experts() -> tuple[Tensor, Tensor]:
    x, w = numbers(32, 64, dtype=torch.bfloat16), numbers(64, 8, seed=1, dtype=torch.bfloat16)
    w[:, 5] = w[:, 4] = w[:, 1] = w[:, 0]
    return x, w


def test_ties_of_a_router_are_named_and_no_fault(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    spoil(monkeypatch, "npu.npu_moe_gating_top_k_softmax_v2.default", result(tied_otherwise, 1))
    verified(route)(*equal_experts())
    assert "a tie in" in caplog.text


def test_quantised_layers_round_otherwise_and_pass():
    x, w = (
        numbers(64, 256, dtype=torch.bfloat16),
        (40 * numbers(96, 256, seed=1)).round().clamp(-127, 127).to(torch.int8),
    )
    x[:, 1::2] = x[:, ::2] * 0.5  # many numbers that are half a step from the next
    verified(quantised)(x, w, numbers(96, seed=2).abs() * 0.01)


def test_a_graph_is_verified_until_it_was_right_once():
    torch.compiler.reset()
    wrong = verified(norm, WrongNorm())
    for _ in range(2):
        with pytest.raises(VerificationError):
            wrong(X, W)
    wrong(X, torch.ones(64))
    wrong(X, W)  # nothing is compared any more


@pytest.mark.rotates
def test_each_compilation_is_verified_and_so_are_symbolic_sizes(monkeypatch: pytest.MonkeyPatch):
    run = verified(lambda x, w: norm(x, w) + 1)
    run(X, W)
    spoil(monkeypatch, "npu.npu_rms_norm.default", argument(2, 0.5))
    with pytest.raises(VerificationError):
        run(numbers(3, 5, 64), W)  # other sizes, of which nothing is known but the last


@pytest.mark.rotates
@pytest.mark.parametrize("rules", [(), (WrongNorm(),)], ids=["right", "wrong"])
def test_compiled_graphs_are_verified(rules: tuple[Rule, ...]):
    run = verified(norm, *rules, lower="inductor", target="host")
    if not rules:
        run(X, W)
        return
    with pytest.raises(VerificationError, match="wrong_norm"):
        run(X, W)


def noisy(x: Tensor, w: Tensor) -> Tensor:
    return norm(x + torch.rand_like(x) + torch.bernoulli(torch.full_like(x, 0.5)), w)


def test_random_numbers_are_drawn_as_without_verification():
    drawn: list[tuple[Tensor, Tensor]] = []
    for verify in (False, True):
        torch.manual_seed(5)
        drawn.append((verified(noisy, verify=verify)(X.bfloat16(), W.bfloat16()), torch.rand(3)))
    assert all(map(torch.equal, *drawn))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_after_a_call_that_raises_inputs_are_as_before(mode: Any):
    def step(cache: Tensor, x: Tensor, w: Tensor) -> Tensor:
        cache[:, 2:5] = norm(x, w)
        return cache.sum(1)

    with mode():
        cache = numbers(2, 8, 64, seed=2)
        before = cache.clone()
        wrong = error(step, cache, X, W, rules=(WrongNorm(),))
    assert torch.equal(cache, before)
    assert "also wrong: cache" in str(wrong)


# wrong graphs --------------------------------------------------------------------------------------------------------


ATTENTION = "npu.npu_fused_infer_attention_score_v2.default"
ROTATION = "npu.npu_apply_rotary_pos_emb.default"
WRONG = [
    pytest.param(ROTATION, swapped(2, 3), "rope", 9, 0, id="rotation"),
    pytest.param(ROTATION, swapped(2, 3), "rope", 9, 1, id="rotation of the last layer"),
    pytest.param("npu.npu_rms_norm.default", argument(2, 0.5), "rms_norm", 9, 0, id="epsilon"),
    pytest.param("npu.npu_add_rms_norm.default", argument(3, 0.5), "add_norm", 9, 1, id="epsilon behind a sum"),
    pytest.param(ATTENTION, scaled("softmax_scale", 1.3), "attention", 9, 1, id="scale"),
    pytest.param(ATTENTION, result(late_rows_larger), "attention", 9, 1, id="late rows"),
    pytest.param("npu.scatter_update_.default", moved(1), "cache_write", 1, 0, id="slot"),
    pytest.param("npu.scatter_update_.default", moved(1), "cache_write", 1, 1, id="slot of the last layer"),
]


@pytest.mark.rotates
@pytest.mark.parametrize(("target", "change", "rule", "tokens", "layer"), WRONG)
def test_a_wrong_rewrite_in_one_layer_is_named(
    target: str,
    change: Change,
    rule: str,
    tokens: int,
    layer: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    spoil(monkeypatch, target, change, f"layers.{layer}")
    plain, inputs = model(tokens=tokens)
    wrong = error(plain, *inputs)
    assert wrong.culprit is not None
    assert (wrong.culprit.rule, wrong.culprit.module) == (rule, f"layers.{layer}")
    assert wrong.culprit.where in str(wrong)
    assert "output['hidden'] (bfloat16" in str(wrong)
    assert f"layers.{layer}.keys" in str(wrong) or rule != "cache_write"
    runpy.run_path(wrong.script, run_name="__main__")
    assert "the fused graph differs from the plain one in float64 as well" in capsys.readouterr().out


@pytest.mark.rotates(8)
def test_a_wrong_list_is_found_and_its_script_runs_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    spoil(monkeypatch, "npu.npu_moe_gating_top_k_softmax_v2.default", result(one_listed_twice, 1))
    x, w = numbers(32, 64, dtype=torch.bfloat16), numbers(64, 8, seed=1, dtype=torch.bfloat16)
    wrong = error(route, x, w, dump_dir=str(tmp_path))
    assert re.match(
        r"verifying a fused graph on its first call, with x \(bfloat16\[32, 64\]\) and 1 other input: "
        r"output\[1\] \(int64\[32, 2\]\) at \[0, 1\] is (\d), float64 (\d), the plain graph \2 \(32 of 32 rows\); ",
        str(wrong),
    )
    assert wrong.culprit is not None
    assert wrong.culprit.rule == "expert_routing"
    assert wrong.script == str(tmp_path / "verify0.py")
    done = child(f"import runpy; runpy.run_path({wrong.script!r}, run_name='__main__')")
    assert "int64[32, 2]: 32 entries differ" in done.stdout


def test_a_choice_in_too_narrow_a_dtype_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    """Two scores of float64 that float32 cannot tell apart."""
    scores = numbers(32, 8, dtype=torch.float64)
    scores[:, 1] = scores[:, 0] * (1 + 1e-12)
    spoil(monkeypatch, "npu.npu_moe_gating_top_k_softmax_v2.default", in_float32)
    wrong = error(lambda x: x.softmax(-1).topk(2, -1), scores, target="host")
    assert "also wrong: output[1]" in str(wrong)


def test_an_overflow_that_the_plain_graph_does_not_have_is_a_fault(monkeypatch: pytest.MonkeyPatch):
    spoil(monkeypatch, "npu.npu_rms_norm.default", held_in(torch.float16))
    wrong = error(lambda x, w: norm(x, w) * 1e-5, X, 1e5 * W, target="host")
    assert "inf, float64" in str(wrong)
    assert "float64 of both graphs agrees: the fused one overflows" in str(wrong)


def test_a_rewrite_that_raises_is_named(monkeypatch: pytest.MonkeyPatch):
    spoil(monkeypatch, "npu.npu_rms_norm.default", argument(1, 1.0))
    wrong = error(norm, X, W)
    assert wrong.culprit is not None
    assert wrong.culprit.rule == "rms_norm"
    assert "the fused graph raises" in str(wrong)
    assert wrong.__cause__ is not None


def test_a_script_that_cannot_be_written_costs_no_more(monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> Path:
        raise OSError("no space left on device")

    monkeypatch.setattr("fusion.runtime.verification.write", full)
    wrong = error(norm, X, W, rules=(WrongNorm(),))
    assert wrong.script == ""
    assert "rule 'wrong_norm'" in str(wrong)
    assert "could not be written: OSError: no space left on device" in str(wrong)
