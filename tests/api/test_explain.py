"""explain: what would fuse, in every kind of model and call, without running or changing anything; and its report."""

from __future__ import annotations

import json
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor

import fusion

from ..engine.graphs import norm, numbers

pytestmark = pytest.mark.usefixtures("fresh")

X, Y, W = numbers(2, 3, 64), numbers(2, 3, 64, seed=1), numbers(64, seed=2)
HOST = {"target": "host", "lower": "eager"}
ADDED = {"npu::npu_add_rms_norm": 1}


def explain(model, *args, **kwargs):
    return fusion.explain(model, *args, **{"options": HOST, **kwargs})


class Layer(nn.Module):
    """Adds, norms, and keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(W.clone())
        self.register_buffer("cache", torch.zeros(2, 8, 64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, residual, *, position=None):
        s = x + residual
        position = torch.arange(3) if position is None else position
        self.cache.index_copy_(1, position, s)
        self.calls += 1
        return norm(s, self.weight), s

    def step(self, x, residual):
        return self.forward(x, residual)


class Model(nn.Module):
    def __init__(self, depth: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x, residual):
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x


@pytest.mark.parametrize("parameters", ["frozen", "trainable"])
def test_nothing_runs_and_nothing_changes(parameters):
    model = Model().requires_grad_(parameters == "trainable")
    state = {name: each.clone() for name, each in model.state_dict().items()}
    versions = {name: each._version for name, each in model.state_dict().items()}
    x, y = X.clone(), Y.clone()
    report = explain(model, x, y)
    assert report.ops == {"npu::npu_add_rms_norm": 3, "npu::scatter_update_": 3}
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert all(each._version == versions[name] for name, each in model.state_dict().items())
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    assert x._version == y._version == 0


def test_what_a_function_writes_to_its_arguments_is_not_written():
    def grow(cache, x, w):
        cache.add_(1)
        return norm(cache + x, w)

    cache = torch.zeros_like(X)
    assert explain(grow, cache, X, W).ops.total() == 1
    assert not cache.any()


def test_the_model_runs_as_ever_afterwards():
    model = Model()
    explain(model, X, Y)
    with torch.no_grad():
        want = Model()
        want.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(X, Y), want(X, Y))
    assert [int(each.calls) for each in model.layers] == [1, 1, 1]


def test_functions_modules_bound_methods_and_keywords():
    layer = Layer()
    assert explain(norm, X, W).ops == {"npu::npu_rms_norm": 1}
    assert explain(norm, X, weight=W, eps=1e-5).ops == {"npu::npu_rms_norm": 1}
    assert explain(lambda x, w: norm(x, w), X, W).ops == {"npu::npu_rms_norm": 1}
    assert explain(layer, X, Y, position=torch.tensor([0, 1, 2])).ops == {**ADDED, "npu::npu_scatter_nd_update_": 1}
    assert explain(layer.step, X, residual=Y).ops == {**ADDED, "npu::scatter_update_": 1}
    assert not layer.cache.any()


@pytest.mark.rotates(3)
def test_the_tenth_report_says_what_the_first_says():
    """Dynamo gives up on a function that is compiled too often, and learns sizes from what it has seen."""
    reports = [explain(norm, numbers(2, length, 64), W, eps=length * 1e-6) for length in range(1, 11)]
    assert [each.ops for each in reports] == [{"npu::npu_rms_norm": 1}] * 10
    sizes = [[node.meta["val"].shape for node in each.graphs[0].graph.find_nodes(op="placeholder")] for each in reports]
    assert all(isinstance(size, int) for shapes in sizes for shape in shapes for size in shape)


def experts(x, w, chosen):
    """A mixture of experts as it is written without a grouped product: every expert takes its own tokens."""
    x = norm(x, w)
    y = torch.zeros_like(x)
    for expert in chosen.unique():
        rows = torch.where(chosen == int(expert))[0]
        if rows.numel():
            y.index_add_(0, rows, norm(x[rows], w))
    if torch.equal(x, y) or bool((y > 0).all()):
        y = norm(y, w)
    return y[chosen > 1]


def test_code_behind_numbers_that_depend_on_data_is_traced_and_the_report_says_where():
    scores = torch.tensor([0, 2, 1, 1, 0, 3])[:, None] == torch.arange(4)
    report = explain(lambda x, w, scores: experts(x, w, scores.argmax(-1)), numbers(6, 64), W, scores.float())
    assert report.ops == {"npu::npu_rms_norm": 2}, "of all rows, of which one graph serves the expert and the end"
    assert len(report.guesses) >= 3
    assert all(place.startswith(f"{__file__}:") for place in report.guesses)
    assert "from a sample" in str(report)
    assert json.loads(report.to_json())["guesses"] == report.guesses
    sizes = [size for graph in report.graphs for node in graph.graph.nodes for size in shape_of(node)]
    assert all(isinstance(size, int) for size in sizes)


def test_single_numbers_that_are_passed_in_are_what_they_are():
    """How far a cache is filled; a copy of it is written to, and not the number itself."""

    def step(x, w, filled):
        rows = x[:, int(filled) :]
        filled.add_(2)
        return norm(rows, w)

    filled = torch.tensor(3)
    report = explain(step, numbers(2, 7, 64), W, filled)
    assert (report.ops, report.guesses, int(filled)) == ({"npu::npu_rms_norm": 1}, {}, 3)
    assert (2, 4, 64) in {tuple(shape_of(node)) for graph in report.graphs for node in graph.graph.nodes}


def test_other_numbers_that_are_passed_in_are_guessed():
    filled = torch.tensor([1.0, 3.0])
    report = explain(lambda x, w, filled: norm(x[:, int(filled.max()) :], w), numbers(2, 7, 64), W, filled)
    assert len(report.guesses) == 1


def test_whole_numbers_that_are_given_are_read_as_they_are():
    report = explain(experts, numbers(6, 64), W, torch.tensor([0, 2, 1, 1, 0, 3]))
    assert report.ops == {"npu::npu_rms_norm": 4}, "of all rows, of two, of one, and of all behind a guess"
    normed = [node.args[0].meta["val"].shape[0] for graph in report.graphs for node in calls_of(graph, "rms_norm")]
    assert normed == [6, 2, 1, 6]
    assert {place.split(":")[-1] for place in report.guesses} == {str(experts.__code__.co_firstlineno + 8)}


def images(x, sizes):
    """Rows of each image apart, as vision towers attend."""
    lengths = torch.repeat_interleave(sizes[:, 1] * sizes[:, 2], sizes[:, 0])
    ends = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    parts = torch.split(x, (ends[1:] - ends[:-1]).tolist())
    return torch.cat([F.scaled_dot_product_attention(each, each, each) for each in parts])


def test_what_follows_from_whole_numbers_that_are_given_is_no_guess():
    report = explain(images, numbers(20, 4, 16), torch.tensor([[1, 2, 4], [2, 3, 2]]))
    assert report.guesses == {}
    attended = [node.args[0].meta["val"].shape[0] for graph in report.graphs for node in calls_of(graph, "attention")]
    assert sorted(attended) == [6, 6, 8]


def calls_of(graph, name):
    return [node for node in graph.graph.nodes if node.op == "call_function" and name in str(node.target)]


@pytest.mark.parametrize(
    ("write", "rows", "guesses"),
    [
        (lambda x, place: place.add_(2), 5, 0),
        (lambda x, place: place.add_((x.sum() > 0).long()), 4, 1),
        (lambda x, place: place.copy_(x[0, :1]), 1, 1),
    ],
    ids=["a number", "what data decides", "data"],
)
@pytest.mark.rotates(3)
def test_what_is_written_is_read_in_every_view(write, rows, guesses):
    def step(x, w, place):
        view = place[0]
        torch._dynamo.graph_break()
        write(x, place)
        return norm(x[: int(view)], w)

    place = torch.tensor([3])
    report = explain(step, numbers(6, 64), W, place)
    assert sum(report.guesses.values()) == guesses
    (normed,) = [node for graph in report.graphs for node in calls_of(graph, "rms_norm")]
    assert normed.args[0].meta["val"].shape == (rows, 64)
    assert int(place) == 3


def shape_of(node):
    val = node.meta.get("val")
    return val.shape if isinstance(val, torch.Tensor) else ()


def test_a_loop_that_waits_for_another_number_is_an_error(monkeypatch):
    def search(x, w):
        while int(x.argmax()) == 1:
            x = norm(x, w)
        return x

    monkeypatch.setattr("fusion.inputs.data_dependent.MOST", 20)
    report = explain(search, X, W)
    assert re.search(r"20 numbers that depend on data were read, the last at .*test_explain", report.interruption.error)
    assert report.ops.total() >= 1


def failing(x, w):
    y = norm(x, w)
    return {0: y}[int(y.argmax())]


def test_a_model_that_raises_gives_a_report_of_the_graphs_before_it():
    report = explain(failing, X, W)
    assert report.ops == {"npu::npu_rms_norm": 1}
    error = report.interruption
    assert error.error == "KeyError: 1"
    assert error.where == f"{__file__}:{failing.__code__.co_firstlineno + 2}"
    assert "read from a sample at" in error.advice
    assert "Traceback" in error.traceback
    assert "not traced to the end" in str(report)
    assert json.loads(report.to_json())["interruption"]["error"] == "KeyError: 1"
    assert explain(norm, X, W).interruption is None


def test_an_error_of_an_operator_is_that_of_the_operator_at_its_line():
    def wrong(x, w):
        y = norm(x, w)
        torch._dynamo.graph_break()
        return y @ torch.ones(7, 7)

    report = explain(wrong, X, W)
    assert report.interruption.error.startswith("RuntimeError: ")
    assert "7" in report.interruption.error
    assert report.interruption.where == f"{__file__}:{wrong.__code__.co_firstlineno + 3}"
    assert report.ops == {"npu::npu_rms_norm": 1}


def test_numbers_that_numpy_reads_are_told_of():
    @torch.compiler.disable
    def outside(x):
        return x.cpu().numpy()

    report = explain(lambda x, w: outside(norm(x, w)), X, W)
    assert "compute this with torch" in report.interruption.advice
    assert report.ops == {"npu::npu_rms_norm": 1}


def test_what_cannot_be_copied_and_holds_no_tensor_is_shared():
    class Locked(nn.RMSNorm):
        def __init__(self):
            super().__init__(64, eps=1e-6)
            self.lock, self.generator = threading.Lock(), torch.Generator()

    assert explain(Locked(), X).ops == {"npu::npu_rms_norm": 1}


# graph breaks ------------------------------------------------------------------------------------------------------


@torch.compiler.disable(reason="it is slow")
def outside_the_graph(x):
    return x * 2


def looping(x):
    for _ in range(2):
        if x.sum() > 0:
            x = x.sin()
    return x


def breaking(x, w):
    y = norm(x, w)
    y = outside_the_graph(y[int(y.argmax()) :])
    y = looping(y)
    return norm(y, w)


@pytest.mark.rotates(3)
def test_graph_breaks_and_functions_that_are_not_traced_are_listed_with_their_places():
    first, loop = breaking.__code__.co_firstlineno, looping.__code__.co_firstlineno
    expected = {
        (f"{__file__}:{first + 2}", "", "Tensor.item()"),
        (f"{__file__}:{first + 2}", "", "it is slow"),
        (f"{__file__}:{loop + 2}", "", "Data-dependent branching"),
        (f"{__file__}:{loop}", "looping", "cannot resume behind"),
    }
    for _ in range(2):  # Dynamo says of a function but once that it skips it
        report = explain(breaking, X, W)
        listed = [(each.where, each.function, each.reason) for each in report.breaks]
        assert len(listed) == len(expected), listed
        for where, function, reason in expected:
            assert any((where, function) == each[:2] and reason in each[2] for each in listed), (reason, listed)
        assert all("\n" not in each.reason and len(each.reason) < 210 for each in report.breaks)
    assert "where Python leaves the graphs" in str(report)
    assert json.loads(report.to_json())["breaks"][0].keys() == {"where", "reason", "function"}
    assert explain(norm, X, W).breaks == ()


# counts and choices that data decides ------------------------------------------------------------------------------


class Experts(nn.Module):
    """A mixture of experts of which each runs on the tokens that chose it."""

    def __init__(self, count: int = 8):
        super().__init__()
        self.gate = nn.Linear(64, count, bias=False)
        self.experts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(count))

    def choose(self, x):
        return self.gate(x).softmax(-1).topk(2, -1)


class ByCounts(Experts):
    def forward(self, x):
        weights, chosen = self.choose(x)
        y, counts = torch.zeros_like(x), torch.bincount(chosen.flatten(), minlength=8).tolist()
        assert len(counts) == 8
        assert sum(counts) == chosen.numel()
        for n in range(8):
            if counts[n]:
                rows, place = torch.where(chosen == n)
                assert len(rows) == counts[n]
                y[rows] += self.experts[n](x[rows]) * weights[rows, place, None]
        return y


class BySplit(Experts):
    def forward(self, x):
        weights, chosen = self.choose(x)
        order = chosen.flatten().argsort()
        counts = chosen.flatten().bincount(minlength=8)
        parts = x[order // 2].split(counts.tolist())
        found = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return found[order.argsort()].view(*weights.shape, -1).mul(weights[..., None]).sum(1)


class ByUnique(Experts):
    def forward(self, x):
        weights, chosen = self.choose(x)
        y = torch.zeros_like(x)
        hit, counts = chosen.unique(return_counts=True)
        assert int(counts.sum()) == chosen.numel()
        for n, count in zip(hit.tolist(), counts.tolist(), strict=True):
            rows, place = (chosen == n).nonzero(as_tuple=True)
            assert len(rows) == count
            y.index_add_(0, rows, self.experts[n](x[rows]) * weights[rows, place, None])
        return y


class ByOneHot(Experts):
    def forward(self, x):
        weights, chosen = self.choose(x)
        mask = F.one_hot(chosen, 8).permute(2, 1, 0)
        y = torch.zeros_like(x)
        for n in (mask.sum((-1, -2)) > 0).nonzero().flatten():
            place, rows = torch.where(mask[n])
            assert len(rows) == len(x)
            y.index_add_(0, rows, self.experts[int(n)](x[rows]) * weights[rows, place, None])
        return y


class ByMask(Experts):
    def forward(self, x):
        chosen = self.choose(x).indices
        y = torch.zeros_like(x)
        for n in range(8):
            mask = (chosen == n).any(-1)
            if mask.item() if mask.numel() == 1 else mask.any():
                assert len(x[mask]) == int(mask.sum()) == len(x.masked_select(mask[:, None])) // 64
                y[mask] += self.experts[n](x[mask])
        return y


@pytest.mark.parametrize("kind", [ByCounts, BySplit, ByUnique, ByOneHot, ByMask])
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.rotates), 16])
def test_counts_and_choices_are_a_sample_that_is_consistent(kind, rows):
    report = explain(kind(), numbers(rows, 64), options={"target": "ascend910_93"})
    assert report.interruption is None, report.interruption.traceback
    assert report.guesses
    products = {node.args[0].meta["val"].shape for graph in report.graphs for node in calls_of(graph, "linear")}
    assert (rows, 64) in {tuple(each) for each in products}


def test_counts_of_more_than_is_followed_are_as_many_as_they_must_be():
    def count(x):
        counts = x.argmax(-1).bincount(minlength=8).tolist()
        return [each.sin() for each in x.split(counts)]

    report = explain(count, torch.empty(2**17, 8))
    assert report.interruption is None
    assert len(report.guesses) == 1


def test_a_sample_stands_in_the_order_of_its_rows():
    seen: list[list[int]] = []

    def order(x):
        chosen = x.topk(3, -1).indices, x.sort(0).indices, x.argmax(), x.max(1).indices, x.sum(-1).long(), x > 0
        torch._dynamo.graph_break()
        seen.extend(each.flatten().tolist() for each in chosen)
        return x.sin()

    explain(order, numbers(2, 4))
    assert seen == [[1, 2, 3] * 2, [1] * 4 + [0] * 4, [1], [1, 1], [1, 1], [True] * 8]


# tensors of other classes ------------------------------------------------------------------------------------------


def attend(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Biased(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, q, k, v):
        return attend(q, k, v, self.mask)


@pytest.mark.parametrize("make", [causal_lower_right, causal_upper_left])
@pytest.mark.rotates(3)
def test_a_causal_bias_is_read_wherever_it_is_made(make):
    q, k, v = (numbers(2, 4, n, 64).bfloat16() for n in (5, 12, 12))
    mask = make(5, 12)
    options = {"target": "ascend910_93"}
    reports = [
        fusion.explain(lambda q, k, v: attend(q, k, v, make(5, 12)), q, k, v, options=options),
        fusion.explain(lambda q, k, v: attend(q, k, v, mask), q, k, v, options=options),
        fusion.explain(attend, q, k, v, mask, options=options),
        fusion.explain(Biased(mask), q, k, v, options=options),
    ]
    assert [each.ops for each in reports] == [{"npu::npu_fused_infer_attention_score_v2": 1}] * 4
    assert [each.breaks for each in reports] == [()] * 4
    assert "__new__" not in vars(CausalBias)
    assert isinstance(make(5, 12), CausalBias)


def test_weights_that_wrap_tensors_are_traced_or_told_of():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(64, eps=1e-6)
            both = TwoTensor(torch.randn(64, 64), torch.randn(64, 64))
            self.weight = nn.Parameter(both, requires_grad=False)

        def forward(self, x):
            return F.linear(self.norm(x), self.weight)

    assert explain(Wrapped(), X).ops == {"npu::npu_rms_norm": 1}
    nested = torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(5, 64)], layout=torch.jagged)
    for given in (nested, X.to_sparse()):
        report = explain(lambda x: x.sin(), given)
        assert report.interruption is None or report.interruption.error


@pytest.mark.rotates(3)
def test_a_report_leaves_no_traces_in_what_is_compiled_later():
    for length in range(1, 11):
        explain(norm, numbers(2, length, 64), W)
    counted = torch._dynamo.testing.CompileCounter()
    with torch.no_grad():
        torch.compile(norm, backend=counted)(X, W)
    assert counted.frame_count == 1


def test_sizes_that_are_marked_as_dynamic_are_symbolic():
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    (graph,) = explain(norm, x, W).graphs
    shapes = [node.meta["val"].shape for node in graph.graph.find_nodes(op="placeholder") if node.users]
    batches = [shape[0] for shape in shapes if len(shape) == 3]
    assert isinstance(batches[0], torch.SymInt)


def test_a_function_may_close_over_real_tensors():
    def closed(x):
        return norm(x, W)

    assert explain(closed, X).ops == {"npu::npu_rms_norm": 1}


def test_every_graph_of_a_broken_call_is_in_the_report():
    def broken(x, w):
        first = norm(x, w)
        torch._dynamo.graph_break()
        return norm(first.sin(), w)

    report = explain(broken, X, W)
    assert len(report.graphs) == len(report.parts) == len(report.lowered) == 2
    assert report.ops == {"npu::npu_rms_norm": 2}


def test_a_dtype_or_device_that_is_not_here_costs_no_memory():
    class Huge(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(1 << 20, 1 << 20, bias=False, device="meta")

        def forward(self, x):
            return norm(self.project(x), x[0])

    assert explain(Huge(), torch.empty(4, 1 << 20, device="meta")).ops == {"npu::npu_rms_norm": 1}


def test_rules_of_ones_own():
    from patterns.norm.rms_norm import RMSNorm

    assert explain(Model(1), X, Y, rules=[RMSNorm()]).ops == {"npu::npu_rms_norm": 1}
    assert explain(Model(1), X, Y, rules=[]).ops == {}


def test_launches_layers_and_matches_add_up():
    report = explain(Model(), X, Y)
    before, after = report.launches
    copies = 3  # each write into a cache is in place, so that the copy behind it is gone as well
    assert before - after == sum(each.saved for each in report.matches) + copies == 3 * 6 + copies
    assert sum(each.before.launches for each in report.layers.values()) == before
    assert sum(each.after.launches for each in report.layers.values()) == after
    for rule in ("add_norm", "cache_write"):
        of_rule = [each for each in report.matches if each.rule == rule]
        assert [each.module for each in of_rule] == ["layers.0", "layers.1", "layers.2"]
        assert all(each.benefit > 0 for each in of_rule)
    assert {each.where.split("/")[-1].split(":")[0] for each in report.matches} == {"graphs.py", "test_explain.py"}
    assert {path for path in report.layers if path.startswith("layers")} == {f"layers.{n}" for n in range(3)}


def test_integer_calls_are_counted_apart():
    report = explain(Layer(), X, Y)
    assert sum(each.after.bookkeeping for each in report.layers.values()) >= 1


def test_as_json_it_says_the_same():
    def damped(x, y, w):
        return norm(x + y, w), norm(x, w, 0.5)

    report = explain(damped, X, Y, W)
    content = json.loads(report.to_json())
    assert content["target"] == "host"
    assert content["graphs"] == 1
    assert (content["launches"]["before"], content["launches"]["after"]) == report.launches
    assert content["ops"] == dict(report.ops)
    assert [(each["rule"], each["times"]) for each in content["rewrites"]] == [
        (each.rule, 1) for each in report.matches
    ]
    assert content["rewrites"][0]["lines"]
    refusal = content["refusals"][0]
    assert refusal["rule"] == "rms_norm"
    assert refusal["reason"].startswith("eps: it is 0.5")
    assert refusal["where"].split("/")[-1].startswith("graphs.py:")
    assert refusal["source"]


def test_as_text_it_says_what_was_called_what_stays_and_why():
    def damped(x, y, w):
        return norm(x + y, w), norm(x, w, 0.5)

    text = str(explain(damped, X, Y, W))
    for words in (
        "fused for host: 1 graph",
        "launches ->",
        "npu::npu_add_rms_norm",
        "not fused, and why",
        "eps: it is 0.5",
        "launches that stay",
    ):
        assert words in text, text
    assert "\x1b[" not in text
    many = str(explain(Model(4), X, Y))
    assert "layers.0-3 x4" in many, "layers alike are counted together"


def test_nothing_to_fuse_is_a_report_too():
    report = explain(lambda x: x.sin(), X)
    assert report.ops == {}
    assert report.matches == report.refusals == []
    assert report.launches == (1, 1)
    assert "0" not in json.loads(report.to_json())["ops"]
    assert "launches" in str(report)


def test_a_host_report_lists_what_the_chip_would_refuse():
    nine = numbers(*(1,) * 8, 64)
    report = explain(norm, nine, W)
    assert report.ops == {"npu::npu_rms_norm": 1}
    (told,) = report.refusals
    assert told.target == "ascend910_93"
    assert "rank(input) <= 8" in told.reason
    assert "[on ascend910_93]" in " ".join(str(report).split())


def test_a_report_for_the_chip_names_what_it_would_run_and_lowers_for_it():
    report = explain(Model(), X.bfloat16(), Y.bfloat16(), options={"target": "ascend910_93", "lower": "eager"})
    assert report.target == "ascend910_93"
    assert set(report.ops) <= {"npu::npu_add_rms_norm", "npu::npu_rms_norm", "npu::scatter_update_"}
    assert report.ops


@pytest.mark.rotates(8)
def test_what_inductor_is_given_holds_no_operator_of_the_npu():
    report = explain(norm, X, W, options={"target": "host", "lower": "inductor"})
    handed = {str(node.target) for graph in report.lowered for node in graph.graph.nodes}
    assert not any(name.startswith("npu.") for name in handed)
    assert any(str(node.target).startswith("npu.") for graph in report.graphs for node in graph.graph.nodes)
