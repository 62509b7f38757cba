"""torch.compile(backend="cann_fusion"): found without an import, steered by options, harmless where it cannot help."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import warnings

import pytest
import torch
from torch import nn

import fusion
from fusion.errors import NoRulesError, OptionError, RuleError
from fusion.frontend import library
from fusion.planning.target import Target
from fusion.stages.lower import lower, route
from fusion.testing import capture

from ..engine.graphs import norm, numbers, rotate
from ..support.child import child

pytestmark = pytest.mark.usefixtures("fresh")

X, Y, W = numbers(2, 3, 64), numbers(2, 3, 64, seed=1), numbers(64, seed=2)
HOST = {"target": "host", "lower": "eager"}


def add_norm(x, y, w):
    s = x + y
    return norm(s, w), s


def compiled(function, options=None, **more):
    return torch.compile(function, backend="cann_fusion", options={**HOST, **(options or {})}, **more)


def close(have, want, tolerance=1e-5):
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


@pytest.mark.rotates(8)
def test_the_backend_is_found_without_importing_fusion():
    done = child(
        """
        import sys, torch
        assert not any(name.split(".")[0] in ("fusion", "patterns") for name in sys.modules)
        def norm(x, w):
            return w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        assert "cann_fusion" in torch.compiler.list_backends()
        x, w = torch.randn(2, 64), torch.randn(64)
        with torch.no_grad():
            run = torch.compile(norm, backend="cann_fusion", options={"target": "host", "lower": "eager"})
            torch.testing.assert_close(run(x, w), norm(x, w))
            close = torch.compile(norm, backend="cann_fusion", mode="reduce-overhead")(x, w)
        import fusion
        print(fusion.explain(norm, x, w, options={"target": "host"}).ops["npu::npu_rms_norm"])
        """
    )
    assert done.stdout.strip() == "1"


@pytest.mark.rotates(8)
@pytest.mark.parametrize("lower", ["eager", "inductor"])
def test_results_are_those_of_the_model(lower):
    with torch.no_grad():
        for have, want in zip(compiled(add_norm, {"lower": lower})(X, Y, W), add_norm(X, Y, W), strict=True):
            close(have, want)


@pytest.mark.rotates(4)
def test_mode_is_accepted_because_generate_passes_it():
    with torch.no_grad():
        run = torch.compile(norm, backend="cann_fusion", mode="default")
        close(run(X, W), norm(X, W))


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        ({"targt": "host"}, "'target'"),
        ({"target": "ascend910_39"}, "'ascend910_93'"),
        ({"lower": "inductr"}, "'inductor'"),
        ({"disable": "rms_nrm"}, "'rms_norm'"),
        ({"rules": ["add_rms_norm"]}, "'add_norm'"),
        ({"unsafe": "ropee"}, "'rope'"),
        ({"fuel": -1}, "number of rewrites"),
        ({"plan_lower": "torchar"}, "'torchair'"),
        ({"prepack": "shar"}, "'share'"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_with_the_nearest_right_one(options, nearest):
    with pytest.raises(OptionError, match=nearest):
        fusion.FusionPass(options)


def test_a_wrong_option_of_the_backend_reaches_the_user():
    with torch.no_grad(), pytest.raises(Exception, match="did you mean 'target'"):
        compiled(norm, {"targt": "host"})(X, W)


def test_options_are_by_value_frozen_and_complete():
    one = fusion.Options.of({"target": "host", "disable": ["activation", "rope"], "assume": {"mask": "causal"}})
    two = fusion.Options.of({"target": "host"}, disable=("rope", "activation"), assume={"mask": "causal"})
    assert one == two
    assert hash(one) == hash(two)
    assert one.key() != fusion.Options.of({"target": "host"}).key()
    with pytest.raises(Exception, match=r"frozen|assign"):
        one.target = "auto"  # type: ignore[misc]
    with pytest.raises(TypeError):
        one.assume["mask"] = "window:4"  # type: ignore[index]
    assert fusion.Options.of(one) is one
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one


class Distribution:
    """An entry point of a third party."""

    def __init__(self, name, provider):
        self.name, self.value, self._provider = name, f"{name}:library", provider

    def load(self):
        return self._provider


@pytest.fixture
def provided(monkeypatch):
    def provide(*points):
        library.installed.cache_clear()
        monkeypatch.setattr(library, "entry_points", lambda group: [each for each in points if group == library.GROUP])

    yield provide
    monkeypatch.setattr(library, "entry_points", importlib.metadata.entry_points)
    library.installed.cache_clear()


def test_an_empty_library_is_an_error_that_says_what_to_install(provided):
    provided()
    with pytest.raises(NoRulesError, match=r"fusion\.patterns.*pip install"):
        fusion.FusionPass()


def test_a_third_party_adds_its_rules_and_may_not_take_a_name(provided):
    from patterns.norm.layer_norm import LayerNorm
    from patterns.norm.rms_norm import RMSNorm

    provided(Distribution("default", lambda: (RMSNorm(),)), Distribution("other", (LayerNorm(),)))
    assert {rule.name for rule in fusion.FusionPass({"target": "host"}).library.rules} == {"rms_norm", "layer_norm"}
    provided(Distribution("default", lambda: (RMSNorm(),)), Distribution("other", (RMSNorm(),)))
    with pytest.raises(RuleError, match="'rms_norm' is provided twice"):
        fusion.FusionPass()


def test_training_runs_unfused_with_one_warning():
    weight = W.clone().requires_grad_()
    run = compiled(norm)
    with pytest.warns(UserWarning, match="traced for training: it runs unfused"):
        result = run(X, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(X, weight)
    result.sum().backward()
    want = W.clone().requires_grad_()
    norm(X, want).sum().backward()
    close(weight.grad, want.grad)


def test_a_model_with_parameters_is_fused_under_no_grad_without_a_warning():
    model = nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64, eps=1e-6))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        close(compiled(model)(X), model(X))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_forward_that_turns_gradients_off_itself_is_fused(off):
    class Model(nn.Sequential):
        forward = off()(nn.Sequential.forward)

    model = Model(nn.Linear(64, 64), nn.RMSNorm(64, eps=1e-6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = compiled(model)(X)
    close(result, model(X))
    assert not result.requires_grad
    assert torch.is_grad_enabled()


def operators(options):
    return fusion.explain(add_norm, X, Y, W, options={**HOST, **options}).ops


def test_rules_disable_and_fuel_choose_what_is_done():
    assert operators({}) == {"npu::npu_add_rms_norm": 1}
    assert operators({"disable": "add_norm"}) == {"npu::npu_rms_norm": 1}
    assert operators({"rules": ["rms_norm"]}) == {"npu::npu_rms_norm": 1}
    assert operators({"disable": ["add_norm", "rms_norm"]}) == {}
    assert operators({"fuel": 0}) == {}


def test_fuel_counts_rewrites_in_the_order_of_the_graph():
    def three(x, w):
        return norm(norm(norm(x, w).sin(), w).sin(), w)

    counts = [fusion.explain(three, X, W, options={**HOST, "fuel": fuel}).ops.total() for fuel in range(5)]
    assert counts == [0, 1, 2, 3, 3]


def test_unsafe_leaves_out_the_guard_but_not_the_limits():
    def damped(x, w):
        return norm(x, w, 0.5)

    assert fusion.explain(damped, X, W, options=HOST).ops == {}
    assert fusion.explain(damped, X, W, options={**HOST, "unsafe": "rms_norm"}).ops == {"npu::npu_rms_norm": 1}
    nine = numbers(*(1,) * 8, 64)
    options = {"target": "ascend910_93", "lower": "eager", "unsafe": "rms_norm"}
    report = fusion.explain(norm, nine, W, options=options)
    assert report.ops == {}
    assert any("rank(input) <= 8" in each.reason for each in report.refusals)


def test_graphs_are_dumped_before_and_after(tmp_path):
    with torch.no_grad():
        compiled(add_norm, {"dump_dir": tmp_path})(X, Y, W)
    stages = {path.stem.split("_")[1]: path.read_text() for path in tmp_path.iterdir()}
    assert set(stages) == {"captured", "fused"}
    assert "rsqrt" in stages["captured"]
    assert "npu_add_rms_norm" in stages["fused"]


def test_a_written_cache_is_written_in_place():
    def step(x, w, cache, position):
        cache.index_copy_(1, position, norm(x, w))
        return cache * 2

    cache, expected = torch.zeros(2, 8, 64), torch.zeros(2, 8, 64)
    position = torch.tensor([1, 4, 5])
    address = cache.data_ptr()
    with torch.no_grad():
        have, want = compiled(step)(X, W, cache, position), step(X, W, expected, position)
    close(have, want)
    close(cache, expected)
    assert cache.data_ptr() == address


def test_graph_breaks_give_several_graphs_each_fused():
    def broken(x, w):
        first = norm(x, w)
        torch._dynamo.graph_break()
        return norm(first.sin(), w)

    with torch.no_grad():
        close(compiled(broken)(X, W), broken(X, W))
    report = fusion.explain(broken, X, W, options=HOST)
    assert [sum(1 for node in each.graph.nodes if "fusion" in node.meta) > 0 for each in report.graphs] == [True, True]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_lowered_graph_runs_as_it_was_rewritten(lowering):
    """What a report holds is this graph: its code is not that of before the rewrite."""
    gm = capture(lambda x: x.sin(), (X,)).graph
    next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default))).target = torch.cos
    run = lower(gm, [X], lowering)
    close(gm(X)[0], X.cos())
    close(run([X])[0], X.cos())


def test_rotations_of_two_sizes_recompile_and_stay_right():
    run = compiled(rotate)
    with torch.no_grad():
        for length in (3, 5, 1):
            q, c, s = numbers(2, 4, length, 64), numbers(length, 64), numbers(length, 64, seed=1)
            close(run(q, c, s), rotate(q, c, s))


@pytest.mark.parametrize(("lower", "by"), [("auto", "torchair"), ("eager", "eager")])
def test_on_an_npu_torchair_compiles_unless_another_is_named(lower, by, monkeypatch):
    monkeypatch.setattr(Target, "detect", lambda: Target.named("ascend910_93"))
    assert route(lower) == by
