"""At run time: computed once, found by the Parameters of the call, computed again when they change, freed with them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fusion
from fusion._torch.memory import stamps
from fusion.runtime import prepared_weights

from .graphs import numbers
from .prepared_rules import RAN, CountedGate, Gate, JoinedGate, Layers, agree, backend, close

X = numbers(2, 16, 3)


OTHERS = []
"""What other tests still hold."""


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    RAN.clear()
    OTHERS[:] = prepared_weights._RECIPES.values()


def compiled(model, rule=CountedGate(), dynamic=None, **options):
    return torch.compile(model, backend=backend(rule, **options), dynamic=dynamic)


def entries():
    own = [recipe for recipe in list(prepared_weights._RECIPES.values()) if not any(recipe is each for each in OTHERS)]
    return [entry for recipe in own for entry in recipe.entries.values()]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
@pytest.mark.parametrize("verify", [False, True])
def test_prepared_once(lower, verify):
    model = Gate()
    run = compiled(model, lower=lower, verify=verify)
    for _ in range(3):
        agree(run, model)
    assert RAN["join"] == 1


def test_prepared_once_whatever_the_sizes_of_the_inputs():
    model = Gate()
    run = compiled(model, dynamic=True)
    for length in (2, 3, 7):
        agree(run, model, numbers(2, 16, length))
    assert RAN["join"] == 1


def write(model):
    model.gate.weight.add_(1)


def assign(model):
    model.gate.weight.data = numbers(32, 16, 1, seed=5)


def load(model):
    model.load_state_dict(Gate().state_dict())


def replace(model):
    model.up.weight = nn.Parameter(numbers(32, 16, 1, seed=6))


@pytest.mark.rotates(6)
@pytest.mark.parametrize("change", [write, assign, load, replace])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{"prepack": "copy"}, {"prepack": "share"}], ids=["copy", "share"])
def test_a_change_is_seen(change, context, options):
    model = Gate()
    run = compiled(model, JoinedGate(), **options)
    with context():
        close(run(X), model(X))
        before = run(X)
        change(model)
        close(run(X), model(X))
        close(run(X), model(X))
        assert not torch.allclose(before, run(X))


@pytest.mark.parametrize("change", [write, assign, load])
def test_what_is_prepared_again_keeps_its_address(change):
    model = Gate()
    run = compiled(model)
    agree(run, model)
    (entry,) = entries()
    address = entry.tensor.data_ptr()
    with torch.no_grad():
        change(model)
    agree(run, model)
    agree(run, model)
    assert RAN["join"] == 2
    (entry,) = entries()
    assert entry.tensor.data_ptr() == address


def test_another_dtype_frees_what_the_old_one_held():
    model = Layers(Gate(), Gate())
    run = compiled(model)
    agree(run, model)
    old = [weakref.ref(entry.tensor) for entry in entries()]
    model.to(torch.float64)
    agree(run, model, X.double())
    assert len(entries()) == 2
    assert all(entry.tensor.dtype == torch.float64 for entry in entries())
    assert all(each() is None for each in old)


def test_instances_of_one_class_share_the_graph_and_nothing_else():
    graphs = []

    def counting(gm, inputs):
        graphs.append(gm)
        return backend()(gm, inputs)

    class Layer(Gate):
        forward = torch.compile(Gate.forward, backend=counting)

    layers = [Layer() for _ in range(3)]
    with torch.no_grad():
        for _ in range(2):
            for layer in layers:
                close(layer(X), Gate.forward(layer, X))
    assert len(graphs) == 1
    assert RAN["join"] == 3
    layers[1].gate.weight.data = numbers(32, 16, 1)
    with torch.no_grad():
        for layer in layers:
            close(layer(X), Gate.forward(layer, X))
    assert RAN["join"] == 4


def test_graphs_share_what_they_prepare_alike():
    model = Gate()
    first = compiled(model)
    agree(first, model)
    other = compiled(lambda x: model(x.cos()).sin())
    with torch.no_grad():
        close(other(X), model(X.cos()).sin())
    assert RAN["join"] == 1
    assert len(entries()) == 1


def test_tied_weights_are_prepared_once():
    one, two = Gate(), Gate()
    two.gate.weight, two.up.weight = one.gate.weight, one.up.weight
    model = Layers(one, two, Gate())
    agree(compiled(model), model)
    assert RAN["join"] == 2
    own = Gate()
    own.up.weight = own.gate.weight
    for prepack in ("copy", "share"):
        torch.compiler.reset()
        run = compiled(own, JoinedGate(), prepack=prepack)
        agree(run, own)
        with torch.no_grad():
            own.gate.weight.add_(1)
        agree(run, own)


@pytest.mark.rotates(6)
def test_freed_with_the_model():
    model = Layers(Gate(), Gate())
    run = compiled(model)
    agree(run, model)
    held = [weakref.ref(entry.tensor) for entry in entries()]
    kept = weakref.ref(model.layers[0].gate.weight)
    assert len(held) == 2
    del model, run
    gc.collect()
    assert kept() is None
    assert [each() for each in held] == [None, None]
    assert entries() == []


@pytest.mark.rotates(6)
def test_freed_with_the_graphs():
    model = Gate()
    agree(compiled(model), model)
    torch.compiler.reset()
    gc.collect()
    assert entries() == []


def test_training_is_left_alone():
    model = Gate()
    run = compiled(model)
    with pytest.warns(UserWarning, match="traced for training"):
        run(X).sum().backward()
    assert entries() == []
    assert model.gate.weight.grad is not None
    agree(run, model)
    assert not entries()[0].tensor.requires_grad
    run(X).sum().backward()


def test_a_parameter_that_the_graph_writes_to_is_an_input_like_any_other():
    class Growing(Gate):
        def forward(self, x):
            result = super().forward(x)
            self.gate.weight.mul_(2)
            return result

    model, plain = Growing(), Growing()
    plain.load_state_dict(model.state_dict())
    run = compiled(model, JoinedGate(), verify=True)
    with torch.no_grad():
        for _ in range(3):
            close(run(X), plain(X))
    assert entries() == []


def test_a_rule_that_fails_costs_its_own_places_only():
    class Broken(CountedGate):
        def one(self, x, gate, up):
            raise ZeroDivisionError

        one.fusion_role = "lowering"

    model = Gate()
    with pytest.warns(UserWarning, match="could not fuse by the rule .broken. and goes on without it"):
        agree(compiled(model, Broken()), model)
    assert entries() == []


def test_a_stamp_is_address_and_version():
    weight = nn.Parameter(numbers(4))
    (address,), (version,) = stamps([weight])
    with torch.no_grad():
        weight.add_(1)
    assert stamps([weight]) == ([address], [version + 1])
    with torch.inference_mode():
        uncounted = nn.Parameter(numbers(4))
    assert stamps([weight, uncounted]) == ([address, uncounted.data_ptr()], [version + 1, -1])


@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_constants_alone_are_prepared_once(lower):
    def model(x):
        return nn.functional.rms_norm(x * 2, x.shape[-1:]) + 1

    run = fusion.fuse(model, target="host", lower=lower)
    for context in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with context():
            close(run(X.float()), model(X.float()))
    (entry,) = entries()
    assert entry.tensor.tolist() == [1.0] * 3
