"""Ports: what is written computes what the fused graph does, reads well, and says what it cannot be written of."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import examples.deepseek_r1 as mla
import examples.qwen3_paged as paged
import fusion
from fusion.errors import FusionError

from .harness import TARGET, check, is_clean, loaded, ported
from .models import Block, rows, seeded, spelt, stack


def port(model, *args, **kwargs):
    return fusion.port(model, *args, options=TARGET, **kwargs)


@pytest.mark.nightly
def test_a_block_has_joined_weights_and_its_module():
    source = check(seeded(Block), rows(2, 16, 256), rows(2, 16, 256, seed=1))
    assert re.search(
        r"= torch\.ops\.npu\.npu_add_rms_norm\(\n?\s*x, x2=residual, gamma=self\.norm\.weight, epsilon=1e-06", source
    )
    assert 'state["mlp.gate_up.weight"] = torch.cat([plain["mlp.gate.weight"], plain["mlp.up.weight"]])' in source
    assert "self.gate_up = nn.Linear(256, 1024, bias=False, dtype=torch.bfloat16)" in source
    assert "self.count.add_(1)" in source
    assert 'state["count"] = plain["count"].clone()' in source
    assert "# models.py:" in source


@pytest.mark.rotates(6)
def test_equal_layers_are_one_class_in_a_loop():
    model, args = stack(4)
    source = check(model, *args)
    assert source.count("class Attention(") == source.count("class Mlp(") == source.count("class Layer(") == 1
    assert "for layer, cache in zip(self.layers[1:], caches[1:], strict=False):" in source
    assert "nn.ModuleList([Layer0(), *(Layer() for _ in range(3))])" in source
    assert 'for at in [f"layers.{i}.attention." for i in range(4)]:' in source
    assert "self.embed(tokens)" in source


@pytest.mark.nightly
def test_latent_attention_over_pages():
    x, cos, sin, slots, lengths = mla.step(mla.PROMPT, 1, torch.bfloat16)
    cache = tuple(rows(mla.BLOCKS, mla.SIZE, width) for width in (mla.LATENT, mla.ROPE))
    source = check(seeded(mla.Attention), x, cos, sin, cache, slots, mla.TABLE, lengths)
    assert "torch.ops.npu.npu_mla_prolog_v3(" in source
    assert "weight_uk=self.weight_uk" in source


@pytest.mark.nightly
def test_caches_in_buffers_are_written_in_place_and_are_the_ports_own():
    model = paged.model(False, torch.bfloat16)
    source = check(model, *paged.step(paged.PROMPT, 1, torch.bfloat16))
    assert "_functional" not in source
    ported = loaded(source)["from_plain"](model)
    assert ported.keys.data_ptr() != model.keys.data_ptr()
    assert ported.out.weight.data_ptr() == model.out.weight.data_ptr()


def test_a_function_is_a_module_without_tensors():
    def gated(x, gate, up):
        return torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())

    weights = [nn.Parameter(rows(512, 256, seed=seed)) for seed in (1, 2)]
    source = check(gated, rows(2, 16, 256), *weights)
    assert "class Gated(nn.Module):" in source
    assert "torch.cat([gate, up])" in source
    assert "def prepare" not in source


def test_other_calls_are_idioms_of_torch():
    given = rows(2, 3, 8), rows(2, 3, 8, seed=1), torch.tensor([1]), rows(2, 3, 8, seed=2) > 0, rows(2, 4, 8, seed=3)
    source = check(spelt, *given)
    assert "torch.ops.aten" not in source


def chosen(scores, count):
    """Weights and choice of two of all experts, in the manner of sparse mixers."""
    best, first = scores.max(-1, keepdim=True)
    factor = scores.abs().clamp(min=best)
    rest = scores.masked_fill((best - scores) / factor > 0.02 * count, -torch.inf)
    second = scores.scatter(-1, first, -torch.inf).argmax(-1, keepdim=True)
    bound = scores.abs().clamp(min=second) + 1.0
    return rest.softmax(-1) / bound, torch.cat((first, second), -1)


class Mixer(nn.Module):
    """A module whose work is done by a function, with a recurrent state and an upper-case name."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, groups=16, bias=False)
        self.register_buffer("states", torch.zeros(2, 16, 3))

    def forward(self, x):
        X = nn.functional.pad(x.mT, (2, 0))
        self.states.copy_(X[..., -3:].clone())
        decay = 10.0 ** (torch.arange(16) / 16)
        weights, experts = chosen(self.conv(X).mT * decay.to(x.dtype), 3)
        return weights, experts


class Mixers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x, experts = layer(x)
        return x, experts


def test_functions_that_a_forward_calls_give_names_and_order():
    source = check(seeded(Mixers), rows(2, 8, 16))
    texts = ("best, first = ", "factor = ", "rest = ", "second = ", "bound = ", "return ")
    body = source[source.index("class Mixer(") : source.index("class Mixer2(")]
    places = [body.index(each) for each in texts]
    assert places == sorted(places)
    assert "decay = 10.0 ** (steps / 16)" in source
    assert body.count(".abs()") == source.count("torch.arange(16") == 1, "an equal call is made once"
    assert "F.conv1d(" in source
    assert "F.pad(" in source
    assert "torch.ops.aten" not in source
    assert 'state[at + "states"] = plain[at + "states"].clone()' in source


class Shared(nn.Module):
    """A module that is called twice, a list of layers that is no module of its own, and an attribute."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64))
        self.scale = torch.full((64,), 2.0)

    def forward(self, x):
        return self.twice(self.twice(x)) * self.scale


@pytest.mark.nightly
def test_shared_modules_and_attributes():
    source = check(seeded(Shared), rows(3, 64))
    assert source.count("self.twice[0](") == 2
    assert 'tensors["scale"] = model.scale' in source


class Counter:
    length = 4


def test_numbers_that_python_counts_are_named():
    def step(x, counter):
        counter.length += 1
        return x * counter.length

    source = port(step, torch.ones(3), Counter())
    assert "VALID FOR ONE STEP ONLY" in source
    assert "    counter.length" in source


@pytest.mark.rotates(3)
def test_what_cannot_be_written_says_why():
    def broken(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    def branched(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    def sized(x):
        return x[x > 0] * 2

    def overlapping(x, y):
        x.add_(1)
        y.mul_(2)
        return x + 1

    weight = torch.ones(3)

    def closed(x):
        return x * weight

    def failing(x):
        return x @ x.new_ones(7, 7)

    with pytest.raises(FusionError, match=r"Python leaves the graph at .*test_port\.py:\d+"):
        port(broken, torch.ones(3))
    with pytest.raises(FusionError, match=r"cond at .*test_port\.py:\d+ has graphs of its own"):
        port(branched, torch.ones(3))
    with pytest.raises(FusionError, match="porting a model"):
        port(sized, torch.ones(3))
    with pytest.raises(FusionError, match="which is no argument and no tensor of the module"):
        port(closed, torch.ones(3))
    with pytest.raises(FusionError, match="shares its memory with another input"):
        port(overlapping, (line := torch.ones(8))[:4], line[2:6])
    with pytest.raises(FusionError, match="cannot be traced to the end"):
        port(failing, torch.ones(3))
    with pytest.raises(FusionError, match="plan_lower is 'torchair'"):
        fusion.port(broken, torch.ones(3), options={"plan_lower": "torchair"})


def test_a_function_called_f_hides_no_import():
    def f(x):
        return torch.nn.functional.layer_norm(x, (3,)), x.view(-1)

    source = port(f, torch.ones(2, 3))
    assert "class FPort(nn.Module):" in source
    assert loaded(source)["FPort"]()(torch.ones(2, 3))[1].shape == (6,)


@pytest.mark.nightly
def test_equal_calls_give_equal_sources():
    given = rows(2, 16, 256), rows(2, 16, 256, seed=1)
    assert port(seeded(Block), *given) == port(seeded(Block), *given)
    assert is_clean(port(nn.RMSNorm(64, eps=1e-6), torch.randn(4, 64)))


class Scaled(nn.Module):
    def forward(self, x, *factors, shift):
        return nn.functional.rms_norm(x * factors[0] + factors[2], (256,)) + shift


def test_further_arguments_are_read_by_their_place():
    source = port(Scaled(), rows(2, 256), rows(256), rows(2), rows(2, 256, seed=1), shift=rows(256, seed=2))
    assert "def forward(self, x, *factors, shift):" in source
    assert "factors[1]" not in source
    x, *factors = rows(2, 256), rows(256), rows(2), rows(2, 256, seed=1)
    shift = rows(256, seed=2)
    made = ported(source, Scaled())(x, *factors, shift=shift)
    torch.testing.assert_close(made, Scaled()(x, *factors, shift=shift), rtol=1e-2, atol=2e-2)
