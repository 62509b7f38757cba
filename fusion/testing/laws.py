"""The laws that every rule must keep, as functions: `check(rule, example, dtype, level)` raises where one is broken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fusion._torch.nested import tree_leaves
from fusion._torch.tensors import shares_memory
from fusion.frontend.library import examples
from fusion.graph.aliasing import is_write
from fusion.language import Example, Rule
from fusion.operators import operator_of
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.report.outcome import live_calls
from fusion.runtime.float64 import widen
from fusion.runtime.verification import relative_error
from fusion.testing.capturing import Level
from fusion.testing.trials import Trial, switched_on, trial

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDENED = 1e-12
"""Largest relative error between two float64 graphs of the same algebra."""

BYTES = 64
"""Largest distance of an int8 number from that in float64 that rounding may cause; a larger one in the original
means bytes of wider numbers."""


def recognises(t: Trial) -> None:
    """Assert that the rule is applied to its own example, or that float16 is reported to lack the range for it."""
    applied = [each.match.rule.name for each in t.outcome.chosen]
    refusals = "\n".join(str(each) for each in t.outcome.refusals)
    message = f"{t.rule.name} does not recognise its example; fused {applied}\n{refusals}\n{t.captured.canonical}"
    assert t.rule.name in applied or lacks_range(t), message


def lacks_range(t: Trial) -> bool:
    """Return True if inputs are float16, and a refusal reports that float16 lacks the range for a number of the
    model.
    """
    narrow = any(isinstance(each, Tensor) and each.dtype == torch.float16 for each in t.captured.inputs)
    return narrow and any("float16" in each.reason for each in t.outcome.refusals)


def means_what_it_says(t: Trial) -> None:
    """Assert equal algebra in float64, and in the dtype at most 1.5 times the error of the original, plus one ulp.

    Results and every mutated input are compared.
    """
    count = len(t.captured.inputs)
    truth = observed(widen(t.captured.graph), t.inputs(wide=True)[:count], count)
    algebra = observed(widen(t.fused), t.inputs(wide=True), count)
    before = observed(t.captured.graph, t.inputs()[:count], count)
    after = observed(t.fused, t.inputs(), count)
    for number, (exact, same, old, new) in enumerate(zip(truth, algebra, before, after, strict=True)):
        if not isinstance(exact, Tensor):
            assert new == old, f"result {number} is {new}, not {old}"
            continue
        assert (new.shape, new.dtype) == (old.shape, old.dtype), f"result {number}: {new.dtype}{list(new.shape)}"
        if exact.dtype == torch.int8:
            _assert_equal_int8(number, exact, same, old, new)
            continue
        if not exact.is_floating_point():
            assert torch.equal(new, old), f"result {number} differs"
            continue
        wrong = relative_error(same, exact)
        assert wrong <= WIDENED, f"result {number}: the algebra is wrong, float64 differs by {wrong:.3g}"
        if exact.double().isfinite().all() and not old.double().isfinite().all():
            continue  # the original overflows in this dtype: there is no rounding to compare
        limit = 1.5 * relative_error(old, exact) + torch.finfo(old.dtype).eps
        error = relative_error(new, exact)
        assert error <= limit, f"result {number}: rms error {error:.3g} where {limit:.3g} is allowed"


def _assert_equal_int8(number: int, exact: Tensor, same: Tensor, old: Tensor, new: Tensor) -> None:
    """Assert that int8 `same` equals `exact`, both in float64, and that `new` is about as close to `exact` as `old` is.

    `new` and `old` are the fused and the original result `number` in the dtype: differences of 1 are allowed, not much
    more often than in `old`. Where `old` differs by more than `BYTES`, these are bytes of wider numbers, and
    differences are only counted.
    """
    assert torch.equal(same, exact), f"result {number}: the algebra is wrong, float64 differs"
    off, before = ((each.int() - exact.int()).abs() for each in (new, old))
    near = off.max() <= max(1, int(before.max())) or before.max() > BYTES
    assert near, f"result {number} is {off.max()} beside the number in float64"
    limit = 1.5 * before.bool().sum() + 1 + exact.numel() // 100
    assert off.bool().sum() <= limit, f"result {number}: {off.bool().sum()} numbers differ, {limit:g} may"


def emits_valid_calls(t: Trial) -> None:
    """Assert that every new call fits its operator's schema, and returns the shape and dtype of its node."""
    for node in t.fused.graph.nodes:
        operator = operator_of(node.target) if "fusion" in node.meta else None
        if operator is not None:
            operator.bind(node.args, node.kwargs)
    t.fused.graph.lint()
    _Checked(t.fused).run(*t.inputs())


def idempotent(t: Trial) -> None:
    """Assert that the pass does not change its own result."""
    again = copy.deepcopy(t.fused.graph)
    options = switched_on(t.rule, Options(target="host", lower="eager"))
    outcome = fuse_graph(again, t.library, options, t.captured.facts)
    names = [each.match.rule.name for each in outcome.chosen]
    assert not names, f"a second pass fused {names}"
    assert _text(again) == _text(t.fused.graph), "a second pass changed the graph"


def saves_what_it_claims(t: Trial) -> None:
    """Assert that the fused graph has as many launches less as its rewrites and in-place writes predict.

    More may be saved where several candidates share built values, or where the model's computation is prepared from
    Parameters.
    """
    graphs = t.captured.graph.graph, t.fused.graph
    calls, left = (live_calls(graph) for graph in graphs)
    before, after = (sum(each.launches for each in counted.values()) for counted in (calls, left))
    copies = sum(each.launches for node, each in calls.items() if node.name in t.outcome.in_place)
    claimed = sum(each.launches for each in t.outcome.chosen) + copies
    may_save_more = len(t.outcome.chosen) != 1 or bool(t.outcome.prepared)
    saved = before - after == claimed or (before - after > claimed and may_save_more)
    assert saved, f"{before} launches became {after}, {claimed} fewer were claimed"


def refuses(t: Trial, text: str, instead: str = "") -> None:
    """Assert that the rule is refused, with `text` in the reason and a place in the model's code.

    With `instead` the rule is applied, but only in forms with that in their names.
    """
    applied = [each.match.form for each in t.outcome.chosen if each.match.rule.name == t.rule.name]
    wrong = [form for form in applied if not instead or instead not in form]
    assert not wrong, f"{t.rule.name} was applied as {wrong} although it must be refused with {text!r}"
    assert applied or not instead or lacks_range(t), f"{t.rule.name} was not applied as {instead!r} instead"
    speaking = {t.rule.name, *t.rule.uses()}
    given = [each for each in t.outcome.refusals if each.rule in speaking and text in each.reason]
    others = "\n".join(str(each) for each in t.outcome.refusals)
    assert given or lacks_range(t), f"{t.rule.name} was not refused with {text!r} but with:\n{others}"
    assert all(each.where for each in given), "the refusal does not say where"


def leaves_the_rest_alone(t: Trial) -> None:
    """Assert that without rewrites the graph keeps its nodes, the same objects with the same arguments."""
    graph = copy.deepcopy(t.captured.graph.graph)
    before, text = list(graph.nodes), _text(graph)
    options = switched_on(t.rule, Options(target="host", lower="eager", fuel=0))
    outcome = fuse_graph(graph, t.library, options, t.captured.facts)
    after = list(graph.nodes)
    assert not outcome.chosen
    assert list(map(id, before)) == list(map(id, after)), "nodes were added, dropped or moved"
    assert _text(graph) == text, "the arguments of a node were changed"


def check(rule: Rule, example: Example, dtype: torch.dtype, level: Level = "composite") -> None:
    """Assert every law for one example, or for one reject (an example with a refusal).

    Raises:
        AssertionError: a law is broken; the message says which and how.
    """
    t = trial(rule, example, dtype, level)
    if example.refusal:
        refused = partial(refuses, text=example.refusal, instead=example.instead)
        laws: Sequence[Callable[[Trial], None]] = (refused, leaves_the_rest_alone)
        laws = (*laws, means_what_it_says) if example.instead else laws
    else:
        laws = (
            recognises, means_what_it_says, emits_valid_calls, idempotent, saves_what_it_claims, leaves_the_rest_alone,
        )  # fmt: skip
    for law in laws:
        law(t)


def cases(rules: Iterable[Rule]) -> Iterator[tuple[Rule, Example]]:
    """Yield every example and every reject of these rules, for `pytest.mark.parametrize`."""
    tried = examples()
    for rule in rules:
        for example in tried.get(rule.name, ()):
            yield rule, example


class _Checked(fx.Interpreter):
    """Interpreter that compares the result of each new node with the metadata of the node."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if "fusion" in n.meta:
            for real, declared in zip(tree_leaves(result), tree_leaves(n.meta["val"]), strict=True):
                if not isinstance(declared, Tensor):
                    continue
                have, want = ((each.dtype, tuple(each.shape), _strides(each)) for each in (real, declared))
                assert have == want, f"{n.format_node()} gives {have} and says {want}"
            self._check_memory(n, tree_leaves(result))
        return result

    def _check_memory(self, n: fx.Node, results: Sequence[Any]) -> None:
        """Assert that a fused operator returns memory of its own, except as its schema declares."""
        if operator_of(n.target) is None or is_write(n):
            return
        given = [each for each in map(self.env.get, n.all_input_nodes) if isinstance(each, Tensor)]
        tensors = [each for each in (*given, *results) if isinstance(each, Tensor) and each.numel()]
        shared = [
            one
            for one, other in combinations(tensors, 2)
            if not any(other is each for each in given) and shares_memory(one, other)
        ]
        assert not shared, f"{n.format_node()} gives memory that it was given, or gives it twice"


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of the dims with more than one entry."""
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel())


def observed(run: Callable[..., Any], inputs: Sequence[Any], count: int) -> list[Any]:
    """Return the results, and the first `count` inputs as they are after the run."""
    return [*tree_leaves(run(*inputs)), *inputs[:count]]


def _text(graph: fx.Graph) -> list[str]:
    return [f"{node.name} {node.target} {node.args} {node.kwargs}" for node in graph.nodes]
