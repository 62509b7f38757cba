"""Parameters that are views of what was joined from them: everything that people do with Parameters goes on working."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import warnings
import weakref

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing._internal.two_tensor import TwoTensor

from fusion import Options
from fusion.runtime import joined_parameters, prepared_weights

from .graphs import numbers
from .prepared_rules import RAN, WIDE, Gate, JoinedGate, Layers, X, agree, backend, close, fresh

__all__ = ["fresh"]  # a fixture that every test here takes


def compiled(model, dynamic=None, **options):
    return torch.compile(model, backend=backend(JoinedGate(), **options), dynamic=dynamic)


def started(model=None, **options):
    """A model and its compiled form, behind a first call."""
    model = model or Gate()
    run = compiled(model, **options)
    agree(run, model)
    return run, model


def are_views(*parameters):
    return [joined_parameters.home(each) is not None for each in parameters]


def both_are_views(model):
    return all(are_views(model.gate.weight, model.up.weight))


def held(*tensors):
    """Bytes of all memory that these tensors keep: of storages that lie inside others, the others'."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    total, end = 0, 0
    for start, size in sorted((start, max(size, storages[start])) for start, size in storages.items()):
        total += max(0, start + size - max(start, end))
        end = max(end, start + size)
    return total


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.rotates)])
def test_parameters_are_what_they_were(lower):
    model = Gate()
    state = copy.deepcopy(model.state_dict())
    parameters, kinds = dict(model.named_parameters()), [type(each) for each in model.parameters()]
    started(model, lower=lower)
    assert both_are_views(model)
    assert all(own is each for own, each in zip(parameters.values(), model.parameters(), strict=True))
    assert [type(each) for each in model.parameters()] == kinds
    assert all(each.requires_grad and each.is_leaf and each.is_contiguous() for each in model.parameters())
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    address = model.gate.weight.data_ptr()
    assert model.up.weight.data_ptr() == address + model.gate.weight.numel() * 4


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getbuffer().nbytes


def sizes(model):
    one, state = model.gate.weight, model.state_dict()
    return [saved(model), saved(state), saved(one), *(len(pickle.dumps(each)) for each in (model, state, one))]


def test_what_is_written_to_disk_is_as_large_as_before():
    model = Gate(k=64, n=256)
    before = sizes(model)
    started_with = numbers(2, 64, 3)
    agree(compiled(model), model, started_with)
    assert both_are_views(model)
    assert all(after <= size + 256 for size, after in zip(before, sizes(model), strict=True))


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def through_mapped_file(model, path):
    torch.save(model.state_dict(), path)
    other = Gate()
    other.load_state_dict(torch.load(path, mmap=True), assign=True)
    return other


def through_safetensors(model, path):
    safetensors.torch.save_file(model.state_dict(), path)
    other = Gate()
    other.load_state_dict(safetensors.torch.load_file(path), assign=True)
    return other


def through_model_file(model, path):
    safetensors.torch.save_model(model, str(path))
    other = Gate()
    safetensors.torch.load_model(other, str(path))
    return other


@pytest.mark.filterwarnings("ignore:.*joined weights")
@pytest.mark.parametrize(
    "by", [through_mapped_file, through_model_file, pytest.param(through_safetensors, marks=pytest.mark.rotates)]
)
def test_a_model_goes_through_files(by, tmp_path):
    run, model = started()
    other = by(model, tmp_path / "weights")
    assert os.path.getsize(tmp_path / "weights") < held(*model.parameters()) + 4096
    check_independent(run, model, other)


@pytest.mark.filterwarnings("ignore:.*joined weights")
@pytest.mark.parametrize(
    "by", [through_pickle, copy.deepcopy, pytest.param(through_torch_save, marks=pytest.mark.rotates)]
)
def test_a_model_is_copied(by):
    run, model = started()
    check_independent(run, model, by(model))


def check_independent(run, model, other):
    assert all(torch.equal(each, own) for each, own in zip(other.parameters(), model.parameters(), strict=True))
    agree(compiled(other), other)
    with torch.no_grad():
        before = run(X)
        for each in other.parameters():
            each.data.add_(1)
        assert torch.equal(run(X), before)
    agree(compiled(other), other)


def test_a_part_of_a_model_is_copied_with_its_own_memory_alone():
    _, model = started()
    part = copy.deepcopy(model.gate)
    assert held(*part.parameters()) == model.gate.weight.numel() * 4


def test_loading_writes_into_the_joined_memory():
    run, model = started()
    addresses = [each.data_ptr() for each in model.parameters()]
    model.load_state_dict(Gate().state_dict())
    agree(run, model)
    assert [each.data_ptr() for each in model.parameters()] == addresses
    assert RAN == {}


def test_loaded_by_assignment_parameters_move_once_nobody_else_has_them():
    run, model = started()
    state = Gate().state_dict()
    model.load_state_dict(state, assign=True)
    with pytest.warns(UserWarning, match=r"gate.weight, up.weight: another tensor reads its memory"):
        agree(run, model)
    assert not any(are_views(*model.parameters()))
    state["gate.weight"].mul_(2)
    agree(run, model)
    assert torch.equal(model.gate.weight, state["gate.weight"])
    del state
    agree(run, model)
    assert both_are_views(model)


def test_other_memory_is_taken_into_the_place_that_is_free():
    """So captured graphs go on reading the right memory."""
    run, model = started()
    address = model.gate.weight.data_ptr()
    model.gate.weight.data = numbers(*WIDE, seed=3)
    agree(run, model)
    assert model.gate.weight.data_ptr() == address
    assert both_are_views(model)


@pytest.mark.parametrize(
    "plain", [False, pytest.param(True, marks=pytest.mark.rotates)], ids=["own storage", "one storage"]
)
def test_what_a_parameter_was_can_be_put_back(plain, monkeypatch):
    if plain:
        monkeypatch.setattr("fusion._torch.memory._SLICED", ())
    run, model = started()
    values = {name: each.clone() for name, each in model.state_dict().items()}
    average = {name: each * 2 for name, each in values.items()}
    backup = {name: each.data for name, each in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            for name, each in model.named_parameters():
                each.data = average[name]
            agree(run, model)
            for name, each in model.named_parameters():
                each.data = backup[name]
            assert all(torch.equal(each, values[name]) for name, each in model.state_dict().items())
            agree(run, model)
        backup.clear()
        average.clear()
        agree(run, model)
    assert plain or both_are_views(model)


@pytest.mark.rotates
def test_memory_that_two_parameters_have_exchanged():
    run, model = started()
    gate, up = model.gate.weight.data, model.up.weight.data
    values = gate.clone(), up.clone()
    model.gate.weight.data, model.up.weight.data = up, gate
    agree(run, model)
    assert torch.equal(model.gate.weight, values[1])
    assert torch.equal(model.up.weight, values[0])
    del gate, up
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree(run, model)
        agree(run, model)
    assert both_are_views(model)


def test_memory_that_a_tensor_of_the_user_reads_stays():
    model = Gate()
    other = nn.Parameter(model.gate.weight.data)
    with pytest.warns(UserWarning, match="gate.weight: another tensor reads its memory"):
        run, _ = started(model)
    assert are_views(model.gate.weight, model.up.weight) == [False, True]
    with torch.no_grad():
        other.add_(1)
    agree(run, model)
    del other
    agree(run, model)
    assert both_are_views(model)


def test_a_slice_of_a_tensor_of_the_user_stays():
    model, whole = Gate(), numbers(64, 16, 1)
    model.gate.weight = nn.Parameter(whole[:32])
    model.up.weight = nn.Parameter(whole[32:])
    with pytest.warns(UserWarning, match="gate.weight, up.weight: it is a part of a larger tensor"):
        run, _ = started(model)
    whole.mul_(2)
    agree(run, model)
    whole[40:] += 1
    agree(run, model)


@pytest.mark.rotates
def test_a_slice_of_nobody_else_stays_too():
    """A storage does not say what of it others read."""
    model = Gate()
    model.gate.weight = nn.Parameter(numbers(64, 16, 1)[:32])
    with pytest.warns(UserWarning, match="gate.weight: it is a part of a larger tensor"):
        started(model)


def test_memory_between_processes_stays():
    model = Gate().share_memory()
    with pytest.warns(UserWarning, match="other processes, or a file, share its memory"):
        run, _ = started(model)
    assert model.gate.weight.is_shared()
    torch.compiler.reset()
    later, other = started()
    other.share_memory()
    with pytest.warns(UserWarning, match="other processes, or a file, share its memory"):
        agree(later, other)
    assert other.gate.weight.is_shared()
    with torch.no_grad():
        other.gate.weight.add_(1)
        model.gate.weight.data.add_(1)
    agree(later, other)
    agree(run, model)


def test_pinned_memory_stays(monkeypatch):
    """Copies to a device from other memory would wait for it."""
    model = Gate()
    pinned = model.gate.weight.data_ptr()
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.data_ptr() == pinned)
    with pytest.warns(UserWarning, match="gate.weight: its memory is pinned"):
        started(model)
    assert are_views(model.gate.weight, model.up.weight) == [False, True]


def test_a_parameter_that_waits_is_looked_at_without_its_mappings(monkeypatch, tmp_path):
    """Each call asks only whether another tensor still reads its memory: to read all mappings takes a millisecond."""
    model = Gate()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "weights")
    state = safetensors.torch.load_file(tmp_path / "weights")
    model.load_state_dict(state, assign=True)
    with pytest.warns(UserWarning, match="gate.weight, up.weight: another tensor reads its memory"):
        run, _ = started(model)
    with monkeypatch.context() as patched:
        patched.delattr("fusion._torch.memory._MAPPINGS")
        agree(run, model)
    del state
    agree(run, model)
    assert both_are_views(model)


def test_a_storage_format_of_a_chip_stays(monkeypatch):
    monkeypatch.setattr(
        joined_parameters, "is_fractal", lambda tensor: tensor.shape == (32, 16, 1) and tensor[0, 0, 0] == 7
    )
    model = Gate()
    with torch.no_grad():
        model.gate.weight[0, 0, 0] = 7
    with pytest.warns(UserWarning, match="gate.weight: it is stored in FRACTAL_NZ"):
        started(model)
    assert are_views(model.gate.weight, model.up.weight) == [False, True]


def test_a_parameter_that_wraps_others_stays():
    class Wrapped(Gate):
        def __init__(self):
            super().__init__()
            weight = numbers(*WIDE)
            self.last = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)

        def forward(self, x):
            return super().forward(x) @ self.last[:3, :1, 0]

    model = Wrapped().requires_grad_(False)
    run = compiled(model)
    with torch.no_grad():
        have, want = run(X), model(X)
    close(have.a, want.a)
    close(have.b, want.b)
    assert both_are_views(model), "those beside it are joined"


@pytest.mark.rotates
def test_tied_parameters_are_joined_once():
    one, two = Gate(), Gate()
    two.gate.weight, two.up.weight = one.gate.weight, one.up.weight
    model = Layers(one, two, Gate())
    run, _ = started(model)
    assert two.gate.weight is one.gate.weight
    assert held(*model.parameters()) == 4 * one.gate.weight.numel() * 4
    with torch.no_grad():
        one.gate.weight.data.add_(1)
    agree(run, model)


@pytest.mark.rotates
def test_one_parameter_twice_in_a_join_is_a_copy():
    model = Gate()
    model.up.weight = model.gate.weight
    run, _ = started(model)
    with torch.no_grad():
        model.gate.weight.data.add_(1)
    agree(run, model)


def test_a_parameter_object_of_two_models():
    run, model = started()
    other = Gate()
    other.gate.weight = model.gate.weight
    with pytest.warns(UserWarning, match="gate.weight: another compiled graph has joined it with other Parameters"):
        later, _ = started(other)
    for write in (model.gate.weight.data.add_, other.gate.weight.data.mul_, other.up.weight.data.mul_):
        write(3)
        agree(run, model)
        agree(later, other)


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor, *numbers: int) -> Tensor:
        return torch.cat([self.layers[number](x) for number in numbers], -1)


@pytest.mark.parametrize(
    ("first", "second", "views"),
    [
        ((0, 1, 2), (1, 2), True),
        ((1, 2), (0, 1, 2), False),
        pytest.param((0, 1, 2), (0, 1, 2), True, marks=pytest.mark.rotates),
        pytest.param((0, 1), (1, 2), False, marks=pytest.mark.rotates),
    ],
)
def test_graphs_that_join_the_same_parameters_otherwise(first, second, views):
    """A run of what is joined is a view of it; else the second graph keeps copies."""
    model, x = Four().eval(), numbers(4, 64)
    run = torch.compile(model, backend="cann_fusion", options={"lower": "eager", "plan_cache": "off"}, dynamic=False)
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            for numbers_of in (first, second):
                close(run(x, *numbers_of), model(x, *numbers_of))
            for layer in model.layers:
                layer.weight.data += 0.5
    assert bool([each for each in told if "another compiled graph" in str(each.message)]) is not views
    joins = [entry for recipe in prepared_weights._RECIPES.values() for entry in recipe.entries.values() if entry.block]
    blocks = {id(entry.block[0]) for entry in joins}
    assert (len(blocks) == 1) is views


def prepared_entries() -> list[object]:
    return [entry for recipe in prepared_weights._RECIPES.values() for entry in recipe.entries.values()]


def test_prefill_and_decode_share_one_join():
    model, before = Gate(), prepared_entries()  # of graphs of other tests that still live
    run = compiled(model, dynamic=False)
    for length in (7, 1):
        agree(run, model, numbers(2, 16, length))
    assert sum(all(each is not old for old in before) for each in prepared_entries()) == 1
    assert both_are_views(model)


@pytest.mark.rotates
def test_joined_parameters_stay_joined_for_the_next_graph():
    _, model = started()
    addresses = [each.data_ptr() for each in model.parameters()]
    torch.compiler.reset()
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        started(model)
    assert [each.data_ptr() for each in model.parameters()] == addresses


@pytest.mark.rotates
def test_parameters_of_a_graph_that_is_gone_are_joined_otherwise():
    model, x = Four().eval(), numbers(4, 64)
    for numbers_of in ((0, 1), (1, 2, 3)):
        torch.compiler.reset()
        gc.collect()
        run = torch.compile(model, backend="cann_fusion", options={"lower": "eager", "plan_cache": "off"})
        with torch.no_grad():
            close(run(x, *numbers_of), model(x, *numbers_of))
    assert are_views(*(layer.weight for layer in model.layers[1:])) == [True] * 3


@pytest.mark.rotates
def test_instances_of_one_class_have_their_own_memory():
    class Layer(Gate):
        forward = torch.compile(Gate.forward, backend=backend(JoinedGate()))

    layers = [Layer() for _ in range(3)]
    for _ in range(2):
        for layer in layers:
            agree(layer, lambda x, layer=layer: Gate.forward(layer, x))
            assert both_are_views(layer)
        layers[1].gate.weight.data.add_(1)


def test_trained_after_it_was_joined():
    model = Gate()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    run, _ = started(model)
    for _ in range(2):
        model(X).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
        agree(run, model)
    assert both_are_views(model)
    assert [id(each) for each in optimiser.param_groups[0]["params"]] == [id(each) for each in model.parameters()]


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda model: parametrizations.weight_norm(model.gate), "parametrizations"),
        pytest.param(
            lambda model: parametrizations.orthogonal(model.gate), "parametrizations", marks=pytest.mark.rotates
        ),
        pytest.param(lambda model: nn.utils.spectral_norm(model.gate), "weight_orig", marks=pytest.mark.rotates),
    ],
)
def test_a_weight_that_is_computed_by_the_model(make, seen):
    model = Gate().eval()
    make(model)
    assert any(seen in name for name, _ in model.named_parameters())
    run, _ = started(model)
    with torch.no_grad():
        for each in model.parameters():
            each.data.mul_(1.5)
    agree(run, model)


@pytest.mark.rotates(6)
def test_freed_with_the_model():
    run, model = started()
    memory = [weakref.ref(joined_parameters.home(model.gate.weight)[0].memory), weakref.ref(model.gate.weight)]
    del run, model
    gc.collect()
    assert [each() for each in memory] == [None, None]


@pytest.mark.rotates
def test_freed_where_all_parameters_have_moved():
    run, model = started()
    memory = weakref.ref(joined_parameters.home(model.gate.weight)[0].memory)
    model.double()
    agree(run, model, X.double())
    gc.collect()
    assert memory() is None
    assert both_are_views(model)


def test_threads_call_one_graph_for_the_first_time():
    model = Layers(*(Gate() for _ in range(4)))
    want = model(X).detach()
    run = compiled(model)
    failed = []

    def call():
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(run(X), want, atol=1e-5):
                    failed.append(threading.get_ident())

    threads = [threading.Thread(target=call) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    assert all(map(both_are_views, model.layers))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64],
)
def test_a_block_holds_every_dtype(dtype):
    values = [numbers(32, 16, seed=seed).mul(9).to(dtype) for seed in range(3)]
    parameters = [nn.Parameter(each.clone(), requires_grad=False) for each in values]
    block = joined_parameters.Block.allocate(parameters)
    assert block.update(parameters, 0) == ["", "", ""]
    assert all(torch.equal(each.data, value) for each, value in zip(parameters, values, strict=True))
    assert are_views(*parameters) == [True] * 3
    assert joined_parameters.run_of(parameters[1:]) == (block, 1)
    assert joined_parameters.run_of(parameters[::-1]) is None


class Attention(nn.Module):
    """What the default library joins: queries, keys and values, gate and up."""

    def __init__(self, size: int = 64):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(size, 96), nn.Linear(size, 96), nn.Linear(96, size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (4, 16)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return self.down(F.silu(self.gate(x)) * self.up(x))


def alive():
    """Every tensor of this process that has memory."""
    return [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu"]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("prepack", ["share", "copy"])
@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.rotates)])
def test_bytes_that_are_really_held(prepack, lower):
    model, x = Attention().eval(), numbers(2, 8, 64)
    weights = held(*model.parameters())
    before = {id(each) for each in alive()}
    options = {"lower": lower} | ({} if prepack == Options().prepack else {"prepack": prepack})
    run = torch.compile(model, backend="cann_fusion", options=options)
    with torch.no_grad():
        for _ in range(3):
            close(run(x), model(x))
    gc.collect()
    further = held(*model.parameters(), *(each for each in alive() if id(each) not in before)) - weights
    parts = (model.q, model.k, model.v, model.gate, model.up)
    twice = held(*(each for part in parts for each in part.parameters())) if prepack == "copy" else 0
    assert both_are_views(model) is (prepack == "share")
    assert twice <= further <= twice + 8192, "but for samples of what is held twice"
