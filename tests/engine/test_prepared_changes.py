"""The table "When weights change" of docs/prepared.md, for a Parameter that is a view and for one that is copied."""

from __future__ import annotations

import warnings
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import fusion
from fusion._torch.memory import RUNS, samples
from fusion.runtime import joined_parameters, prepared_weights

from .graphs import numbers
from .prepared_rules import RAN, WIDE, CountedGate, Gate, JoinedGate, X, backend, close, fresh

__all__ = ["fresh"]  # a fixture that every test here takes


def in_place(model):
    model.gate.weight.add_(1)


def optimiser(model):
    model.gate.weight.grad = torch.ones_like(model.gate.weight)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def loaded(model):
    model.load_state_dict(Gate().state_dict())


def loaded_by_assignment(model):
    model.load_state_dict(Gate().state_dict(), assign=True)


def other_memory(model):
    model.gate.weight.data = model.gate.weight.data + 1


def other_parameter(model):
    model.up.weight = nn.Parameter(model.up.weight + 1)


def merged_through_data(model):
    model.gate.weight.data += (numbers(32, 2, seed=7) @ numbers(2, 16, seed=8))[..., None]


def unmerged_through_data(model):
    merged_through_data(model)
    model.gate.weight.data -= (numbers(32, 2, seed=9) @ numbers(2, 16, seed=8))[..., None]


def merged_safely(model):
    merged = model.gate.weight.data.clone()
    merged += (numbers(32, 2, seed=7) @ numbers(2, 16, seed=8))[..., None]
    model.gate.weight.data = merged


def numpy(model):
    array = model.gate.weight.detach().numpy()
    array += 1


def another_tensor(model):
    model.gate.weight.detach().view(-1).data.mul_(2)


def one_row_through_data(model):
    model.gate.weight.data[3] += 1


def exchanged(model):
    gate, up = model.gate.weight.data, model.up.weight.data
    model.gate.weight.data, model.up.weight.data = up, gate


def halved(model):
    model.gate.weight.data = model.gate.weight.data[: len(model.gate.weight) // 2]
    model.up.weight.data = model.up.weight.data[: len(model.up.weight) // 2]


def rounded_to_16_bits(model):
    model.half().float()
    model.gate.weight.data += 1


def shared_between_processes(model):
    model.share_memory()
    model.gate.weight.data += 1


def by_a_vector(model):
    """Parameters become parts of one tensor, as optimisers of second order set them."""
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(1.5 * vector, model.parameters())


def several_at_once(model):
    torch._foreach_mul_([each.data for each in model.parameters()], 1.5)


def through_dlpack(model):
    torch.from_dlpack(model.gate.weight.detach()).mul_(1.5)


CHANGES = (
    in_place, optimiser, loaded, loaded_by_assignment, other_memory, other_parameter, merged_through_data,
    unmerged_through_data, merged_safely, numpy, another_tensor, one_row_through_data, exchanged, halved,
    rounded_to_16_bits,
    shared_between_processes, by_a_vector, several_at_once, through_dlpack,
)  # fmt: skip


VIEW, COPY = JoinedGate(), CountedGate()
BY_DAY = {(change, VIEW, False) for change in CHANGES} | {
    (change, COPY, False) for change in (in_place, loaded_by_assignment, other_memory, merged_through_data, numpy)
}


def settings():
    """Each change of a view and of a copy, with a storage for each Parameter and, as on other devices, one for all."""
    for change, rule, plain in product(CHANGES, (VIEW, COPY), (False, True)):
        marks = () if (change, rule, plain) in BY_DAY else pytest.mark.rotates
        name = f"{change.__name__}-{'view' if rule == VIEW else 'copy'}{'-one storage' * plain}"
        yield pytest.param(change, rule, plain, marks=marks, id=name)


@pytest.mark.rotates(6)
@pytest.mark.filterwarnings("ignore:.*joined weights")
@pytest.mark.parametrize(("change", "rule", "plain"), settings())
def test_every_change_is_seen(change, rule, plain, monkeypatch):
    if plain:
        monkeypatch.setattr("fusion._torch.memory._SLICED", ())
    model = Gate()
    run = torch.compile(model, backend=backend(rule))
    with torch.no_grad():
        close(run(X), model(X))
        for _ in range(2):
            before = run(X)
            change(model)
            for _ in range(2):
                close(run(X), model(X))
            assert run(X).shape != before.shape or not torch.equal(run(X), before)


@pytest.mark.parametrize("write", [in_place, merged_through_data, numpy])
@pytest.mark.parametrize("rule", [JoinedGate(), CountedGate()], ids=["view", "copy"])
def test_writes_to_parameters_of_inference_mode(write, rule):
    """They count no versions."""
    with torch.inference_mode():
        model = Gate()
        run = torch.compile(model, backend=backend(rule))
        close(run(X), model(X))
        assert all(each.is_inference() for each in model.parameters())
        assert all((joined_parameters.home(each) is not None) is (rule == JoinedGate()) for each in model.parameters())
        before = run(X)
        write(model)
        close(run(X), model(X))
        assert not torch.allclose(run(X), before)
        other_memory(model)
        close(run(X), model(X))


def unsampled(model):
    """Where no element is that stands for others."""
    view = model.gate.weight.data.view(-1)
    taken = {each.data_ptr() for each in samples(model.gate.weight)}
    view[next(number for number in range(view.numel()) if view[number].data_ptr() not in taken)] += 5


def test_what_no_sample_shows_needs_a_refresh():
    model = Gate()
    run = torch.compile(model, backend=backend())
    with torch.no_grad():
        for given in (model, model.gate.weight, [model.gate.weight], model.parameters()):
            before = run(X)
            unsampled(model)
            assert torch.equal(run(X), before), "no version, no address and no sample shows it"
            fusion.refresh(given)
            close(run(X), model(X))
    ran = RAN["join"]
    fusion.refresh(Gate())
    with torch.no_grad():
        run(X)
    assert RAN["join"] == ran, "the Parameters of another model"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()), torch.zeros(0, 3), torch.zeros(5), torch.zeros(127), torch.zeros(129), torch.zeros(640, 512),
        torch.zeros(640, 512).t(), torch.zeros(64, 64)[:, :48], torch.zeros(300, dtype=torch.bfloat16),
        torch.zeros(300, dtype=torch.int8), torch.zeros(300, dtype=torch.bool), torch.zeros(99, dtype=torch.float64),
        torch.zeros(300, dtype=torch.complex64), torch.zeros(300, dtype=torch.complex64).conj(),
        torch.zeros(300).to(torch.float8_e4m3fn), torch.zeros(4, 4).expand(3, 4, 4),
    ],
)  # fmt: skip
def test_a_sample_stands_in_every_run_of_a_64th_of_the_memory(tensor):
    taken = samples(tensor)
    assert not taken.is_floating_point()
    if not tensor.numel():
        assert not taken.numel()
        return
    real = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor) if tensor.is_complex() else tensor
    span = 1 + sum((size - 1) * stride for size, stride in zip(real.shape, real.stride(), strict=True))
    assert taken.stride(0) <= max(1, span // RUNS)
    assert taken.stride(0) % 2 == 1
    assert span - taken.stride(0) <= (taken.numel() - 1) * taken.stride(0) < span
    assert samples(tensor) is taken, "one view for all who look"


def test_not_a_number_is_like_itself():
    model = Gate()
    run = torch.compile(model, backend=backend())
    with torch.no_grad():
        model.gate.weight.fill_(float("nan"))
        for _ in range(3):
            run(X)
    assert RAN["join"] == 1


def test_devices_whose_writes_are_not_looked_for_are_warned_of_once(monkeypatch):
    """On a device the host would have to wait; here a device that holds nothing stands for it."""
    monkeypatch.setattr(prepared_weights, "_WARNED", set())
    for _ in range(2):
        torch.compiler.reset()
        model = Gate().to("meta")
        run = torch.compile(model, backend=backend())
        with torch.no_grad(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert run(X.to("meta")).shape == model(X.to("meta")).shape
        assert [str(each.message)[:24] for each in told if "refresh" in str(each.message)] == (
            ["prepared weights on meta"] if _ == 0 else []
        )


def test_an_array_of_numpy_keeps_its_parameter():
    """A Parameter on memory of NumPy stays there: writes to the array are the model's."""
    array = np.random.default_rng(0).standard_normal(WIDE).astype(np.float32)
    model = Gate()
    model.gate.weight = nn.Parameter(torch.from_numpy(array))
    run = torch.compile(model, backend=backend(JoinedGate()))
    with torch.no_grad():
        with pytest.warns(UserWarning, match="gate.weight: NumPy or another library may own its memory"):
            close(run(X), model(X))
        array *= 2
        close(run(X), model(X))
    assert joined_parameters.home(model.up.weight) is not None, "the other is a view"
