"""The option `assume`: said of an argument, checked at every call, never a wrong result."""

from __future__ import annotations

import gc
import itertools
import json
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fusion
from fusion._torch.tracing import boxed
from fusion.errors import OptionError
from fusion.frontend import backend
from fusion.inputs import assumptions
from fusion.inputs.assumptions import holds
from fusion.routes.cpu_gpu import has_compiler

from ..engine.graphs import norm, numbers

pytestmark = pytest.mark.usefixtures("fresh")

X, W = numbers(2, 2, 4, 64), numbers(64, seed=2)
HOST = {"target": "host", "lower": "eager"}
INF = float("-inf")
LEAST = torch.finfo(torch.float32).min


# -- the option --


@pytest.mark.parametrize("kind", ["causal", "padding", "window:1", "window:4096"])
def test_what_can_be_assumed(kind):
    assert fusion.Options.of({"assume": {"attention_mask": kind}}).assume["attention_mask"] == kind


@pytest.mark.parametrize(
    ("kind", "nearest"),
    [
        ("casual", "'causal'"),
        ("paddding", "'padding'"),
        ("window", "'window:n'"),
        ("window:0", "'window:n'"),
        ("window:-3", "'window:n'"),
        ("window:4.5", "'window:n'"),
        ("window: 4", "'window:n'"),
    ],
)
def test_anything_else_is_refused_with_the_nearest(kind, nearest):
    with pytest.raises(OptionError, match=rf"{nearest}.*positive number of keys"):
        fusion.Options.of({"assume": {"attention_mask": kind}})


def test_lengths_are_checked():
    assert fusion.Options().lengths == "auto"
    assert fusion.Options.of({"lengths": "host"}).lengths == "host"
    with pytest.raises(OptionError, match="'host'"):
        fusion.Options.of({"lengths": "hots"})


# -- the checks --


def tril(queries: int, keys: int, length: int | None = None) -> Tensor:
    offset = (keys if length is None else length) - queries
    return torch.ones(queries, keys, dtype=torch.bool).tril(offset)


def banded(queries: int, keys: int, width: int) -> Tensor:
    return tril(queries, keys) & ~tril(queries, keys, keys - width)


def added(visible: Tensor, masked: float) -> Tensor:
    return torch.zeros(visible.shape).masked_fill(~visible, masked)


LEFT = torch.tensor([False, True, True, True])
BOTH_LENGTHS = torch.stack([tril(2, 6, 3), tril(2, 6, 5)])[:, None]
TABLE: dict[str, tuple[Tensor, set[str]]] = {
    "square": (tril(4, 4)[None, None], {"causal", "padding", "window:4"}),
    "square, 3-D": (tril(4, 4)[None], {"causal", "padding", "window:4"}),
    "continued": (tril(2, 5)[None, None], {"causal", "padding"}),
    "a slot of a static cache": (tril(1, 8, 3)[None, None], {"causal", "padding", "window:4"}),
    "two lengths": (BOTH_LENGTHS, {"causal", "padding"}),
    "two lengths among heads": (BOTH_LENGTHS.transpose(0, 1), set()),
    "two lengths, 3-D": (BOTH_LENGTHS[:, 0], {"causal", "padding"}),
    "one length, 2-D": (tril(3, 5), {"causal", "padding"}),
    "a window, 2-D": (banded(6, 6, 4), {"window:4", "padding"}),
    "added, 2-D": (added(tril(3, 5), INF), {"causal"}),
    "a bias, 2-D": (added(tril(3, 5), INF) + 0.5, set()),
    "ones that are added, 2-D": (tril(4, 4).float(), {"padding"}),
    "more queries than keys, 2-D": (torch.ones(4, 3, dtype=torch.bool), {"padding"}),
    "padded left, 3-D": (torch.stack((tril(4, 4) & LEFT, tril(4, 4))), {"padding"}),
    "added, least": (added(tril(3, 5), LEAST)[None, None], {"causal", "padding"}),
    "added, minus infinity": (added(tril(3, 5), INF)[None, None], {"causal", "padding"}),
    "added, bfloat16": (
        added(tril(3, 5), torch.finfo(torch.bfloat16).min).bfloat16()[None, None],
        {"causal", "padding"},
    ),
    "added, not low enough": (added(tril(3, 5), -1e9)[None, None], set()),
    "added, NaN": (added(tril(3, 5), math.nan)[None, None], set()),
    "a bias": (added(tril(3, 5), INF)[None, None] + 0.5, set()),
    "integers": (tril(3, 5).int()[None, None], {"causal", "padding"}),
    "integers of another kind": (tril(3, 5).int()[None, None] * 2, set()),
    "all visible": (torch.ones(1, 1, 3, 4, dtype=torch.bool), set()),
    "all visible to one query": (torch.ones(1, 1, 1, 4, dtype=torch.bool), {"causal", "padding", "window:4"}),
    "nothing visible": (torch.zeros(1, 1, 3, 4, dtype=torch.bool), {"padding"}),
    "nothing visible, finite": (torch.full((1, 1, 3, 4), LEAST), set()),
    "window": (banded(6, 6, 4)[None, None], {"window:4"}),
    "window, continued": (banded(2, 9, 4)[None, None], {"window:4"}),
    "window of one query": (banded(1, 9, 4)[None, None], {"window:4", "padding"}),
    "wider window": (banded(6, 6, 5)[None, None], set()),
    "padded left": ((tril(4, 4) & LEFT)[None, None], {"padding"}),
    "padded left, minus infinity": (added(tril(4, 4) & LEFT, INF)[None, None], {"padding"}),
    "padded left, finite": (added(tril(4, 4) & LEFT, LEAST)[None, None], set()),
    "padded left, one query, finite": (added(LEFT[None], LEAST)[None, None], {"padding"}),
    "padded right": ((tril(4, 4) & LEFT.flip(0))[None, None], {"padding"}),
    "padded between": ((tril(3, 4) & LEFT.roll(1))[None, None], {"padding"}),
    "blind queries made to see all": ((tril(4, 4) & LEFT).index_fill(0, torch.tensor([0]), True)[None, None], set()),
    "validity": (torch.tensor([[0, 0, 1, 1], [1, 0, 1, 1]]), {"padding"}),
    "validity, floats": (torch.tensor([[0.0, 1.0], [1.0, 1.0]]), {"padding"}),
    "validity, others": (torch.tensor([[0, 2], [1, 1]]), set()),
    "more queries than keys": (torch.ones(1, 1, 4, 3, dtype=torch.bool), set()),
    "complex": (torch.ones(1, 1, 1, 4, dtype=torch.complex64), set()),
    "vector": (torch.ones(4, dtype=torch.bool), set()),
    "no keys": (torch.ones(1, 1, 4, 0, dtype=torch.bool), set()),
    "no queries": (torch.ones(1, 1, 0, 4, dtype=torch.bool), {"causal", "padding", "window:4"}),
}


@pytest.mark.parametrize("kind", ["causal", "padding", "window:4"])
@pytest.mark.parametrize("name", TABLE)
def test_masks_are_what_they_are(name, kind):
    mask, kinds = TABLE[name]
    assert holds(mask, kind) == (kind in kinds)


def entry(value: float | bool) -> bool | None:
    """Whether a value of an additive or a Boolean mask is visible, None where it is neither."""
    if isinstance(value, bool):
        return value
    return True if value == 0 else False if value <= LEAST / 2 else None


def by_definition(mask: Tensor, kind: str) -> bool:
    """The definition, tried for every length and every validity of keys."""
    queries, keys = mask.shape[-2:]
    values = mask.tolist()
    if any(entry(value) is None for value in mask.flatten().tolist()):
        return False
    blind = [row for heads in values for head in heads for row in head if not any(map(entry, row))]
    if any(value != INF for row in blind for value in row if not isinstance(value, bool)):
        return False
    width = int(kind[7:]) if kind.startswith("window") else keys
    validities = list(itertools.product((False, True), repeat=keys)) if kind == "padding" else [(True,) * keys]

    def shape(length: int, valid: tuple[bool, ...]) -> list[list[bool]]:
        ends = [query + length - queries for query in range(queries)]
        return [[end - width < key <= end and valid[key] for key in range(keys)] for end in ends]

    return all(
        any(
            all([[entry(value) for value in row] for row in head] == shape(length, valid) for head in heads)
            for length in range(queries, keys + 1)
            for valid in validities
        )
        for heads in values
    )


@st.composite
def masks(draw: Any) -> Tensor:
    """Masks of all kinds, some with one entry that is wrong."""
    queries = draw(st.integers(1, 4))
    keys = draw(st.integers(queries, 5))
    width = draw(st.integers(1, 6))
    heads = draw(st.integers(1, 2))
    sequences = []
    for _ in range(draw(st.integers(1, 2))):
        length = draw(st.integers(queries, keys))
        valid = torch.tensor(draw(st.lists(st.sampled_from([True, True, False]), min_size=keys, max_size=keys)))
        sequences.append(tril(queries, keys, length) & ~tril(queries, keys, length - width) & valid)
    visible = torch.stack(sequences)[:, None].repeat(1, heads, 1, 1)
    if draw(st.booleans()):
        place = draw(st.integers(0, visible.numel() - 1))
        visible.view(-1)[place] ^= True
    masked = draw(st.sampled_from([None, INF, LEAST, LEAST / 2, LEAST / 4]))
    return visible if masked is None else added(visible, masked)


@settings(max_examples=300, deadline=None)
@given(masks())
def test_the_checks_are_the_definition(mask):
    for kind in ("causal", "padding", "window:1", "window:2", "window:3"):
        assert holds(mask, kind) == by_definition(mask, kind), kind


@pytest.mark.parametrize("kind", ["causal", "padding", "window:2"])
def test_more_queries_than_keys_are_none_of_it(kind):
    assert not holds(torch.ones(1, 1, 5, 3, dtype=torch.bool), kind)
    assert not holds(torch.ones(5, 3, dtype=torch.bool).tril()[None, None], kind)


def test_a_mask_is_asked_again_only_when_it_changed(monkeypatch):
    asked: list[Tensor] = []
    monkeypatch.setattr(assumptions, "holds", lambda mask, kind: asked.append(mask.clone()) or holds(mask, kind))
    check = assumptions.remembering("causal")
    first, second = tril(3, 3)[None, None], tril(2, 3)[None, None]
    assert [check(each) for each in (first, second, first, second)] == [True] * 4
    assert len(asked) == 2
    first[..., 0, 2] = True
    assert [check(first), check(first)] == [False, False]
    assert len(asked) == 3
    first.transpose_(2, 3)
    assert check(first) is False
    assert len(asked) == 4
    first.data = tril(3, 3)[None, None]
    assert check(first)
    with torch.inference_mode():
        made = tril(3, 3)[None, None]
        assert check(made)
        made[..., 0, 2] = True
        assert not check(made)


@pytest.mark.rotates(4)
def test_masks_are_kept_weakly():
    check = assumptions.remembering("causal")
    mask = tril(3, 3)[None, None]
    assert check(mask)
    gone = weakref.ref(mask)
    del mask
    gc.collect()
    assert gone() is None


# -- the wrapper --


def attend(x, w, attention_mask):
    h = norm(x, w)
    return F.scaled_dot_product_attention(h, h, h, attn_mask=attention_mask)


CAUSAL = tril(4, 4)[None, None]
PADDED = (tril(4, 4) & torch.tensor([True, True, True, False]))[None, None]


class Spy:
    """Which graphs were compiled and run, by whether they hold a fused operator."""

    def __init__(self, lower: Callable[..., Any]):
        self.lower, self.compiled, self.ran = lower, [], []

    def __call__(self, gm: Any, *rest: Any) -> Any:
        kind = "fused" if any("npu" in str(node.target) for node in gm.graph.nodes) else "plain"
        run = self.lower(gm, *rest)
        self.compiled.append((kind, rest[1]))
        return boxed(lambda *values: self.ran.append(kind) or run(list(values)))


@pytest.fixture
def spy(monkeypatch):
    found = Spy(backend.lower)
    monkeypatch.setattr(backend, "lower", found)
    return found


def compiled(function, assume, options=None, **more):
    options = {**HOST, "assume": assume, **(options or {})}
    return torch.compile(function, backend="cann_fusion", options=options, **more)


@pytest.fixture
def said():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def texts(said):
    return [str(each.message) for each in said if "cann-fusion" in str(each.message)]


def close(have, want):
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_the_right_mask_runs_the_fused_graph(spy, said):
    run = compiled(attend, {"attention_mask": "causal"})
    with torch.no_grad():
        for _ in range(2):
            close(run(X, W, CAUSAL), attend(X, W, CAUSAL))
    assert spy.ran == ["fused", "fused"]
    assert spy.compiled == [("fused", "eager")]
    assert texts(said) == []


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    "lower", ["eager", pytest.param("inductor", marks=pytest.mark.skipif(not has_compiler(), reason="no compiler"))]
)
def test_another_mask_runs_the_unfused_graph_with_one_warning(spy, said, lower):
    run = compiled(attend, {"attention_mask": "causal"}, {"lower": lower})
    with torch.no_grad():
        for mask in (PADDED, PADDED.clone(), CAUSAL, PADDED):
            close(run(X, W, mask), attend(X, W, mask))
    assert spy.ran == ["plain", "plain", "fused", "plain"]
    assert spy.compiled == [("fused", lower), ("plain", lower)]
    assert len(texts(said)) == 1
    assert "'attention_mask' is a causal mask, but this call passes another one ([1, 1, 4, 4]" in texts(said)[0]


LEFT_PADDED = CAUSAL & LEFT
"""Padding on the left: the first query sees no key."""


def turned(low: float) -> Callable[..., Tensor]:
    """Attention with a mask of 0 and 1 that the model turns into numbers that are added."""

    def attend(x: Tensor, attention_mask: Tensor) -> Tensor:
        return (x @ x.mT / 8 + (1.0 - attention_mask) * low).softmax(-1) @ x

    return attend


@pytest.mark.parametrize("low", [LEAST, -1e9, -1e4])
@pytest.mark.parametrize(("kind", "mask"), [("causal", CAUSAL), ("padding", CAUSAL & (torch.arange(4) != 1))])
def test_floats_of_0_and_1_are_turned_by_the_model(spy, said, low, kind, mask):
    attend = turned(low)
    run = compiled(attend, {"attention_mask": kind})
    with torch.no_grad():
        close(run(X, mask.float()), attend(X, mask.float()))
        assert (spy.ran, texts(said)) == (["fused"], [])
        close(run(X, mask.float() / 2), attend(X, mask.float() / 2))
    assert spy.ran == ["fused", "plain"]
    assert len(texts(said)) == 1


@pytest.mark.parametrize("low", [LEAST, -1e9, -1e4])
def test_a_query_that_floats_of_0_and_1_show_no_key(spy, low):
    attend = turned(low)
    run = compiled(attend, {"attention_mask": "padding"})
    with torch.no_grad():
        close(run(X, LEFT_PADDED.float()), attend(X, LEFT_PADDED.float()))
    assert spy.ran == ["fused"]


def test_left_padding_by_a_finite_number_that_is_added(spy, said):
    def attend(x: Tensor, attention_mask: Tensor) -> Tensor:
        return (x @ x.mT / 8 + attention_mask).softmax(-1) @ x

    run, x = compiled(attend, {"attention_mask": "padding"}, {"target": "ascend910_93"}), X.bfloat16()
    least = torch.finfo(x.dtype).min
    with torch.no_grad():
        for mask in (CAUSAL, LEFT_PADDED, CAUSAL):
            low = added(mask, least).bfloat16()
            torch.testing.assert_close(run(x, low), attend(x, low), rtol=2e-2, atol=2e-2)
    assert (spy.ran[0], spy.ran[2]) == ("fused", "fused")  # by cost, the graph between may be either
    assert len(spy.compiled) == 2
    assert texts(said) == []


def test_a_mask_that_is_changed_in_place_is_seen(spy):
    run, mask = compiled(attend, {"attention_mask": "causal"}), CAUSAL.clone()
    with torch.no_grad(), pytest.warns(UserWarning, match="passes another one"):
        run(X, W, mask)
        mask[..., 3] = False
        close(run(X, W, mask), attend(X, W, mask))
    assert spy.ran == ["fused", "plain"]


def test_each_new_mask_is_asked_once(spy, monkeypatch):
    asked = []
    monkeypatch.setattr(assumptions, "holds", lambda *given: asked.append(given) or holds(*given))
    run = compiled(attend, {"attention_mask": "causal"})
    with torch.no_grad():
        for mask in (CAUSAL, CAUSAL, CAUSAL.clone(), CAUSAL):
            run(X, W, mask)
    assert len(asked) == 2
    assert spy.ran == ["fused"] * 4


def test_a_mask_that_nothing_was_read_by_is_not_checked(spy, said):
    def elsewhere(x, w, attention_mask):
        return norm(x, w) @ x.mT * attention_mask

    run = compiled(elsewhere, {"attention_mask": "causal"})
    with torch.no_grad():
        close(run(X, W, PADDED), elsewhere(X, W, PADDED))
    assert spy.compiled == [("fused", "eager")]
    assert texts(said) == []


@pytest.mark.parametrize("mask", [CAUSAL, PADDED], ids=["right", "wrong"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_cache_is_written_once(spy, mask, verify):
    def step(x, w, cache, attention_mask):
        cache.add_(norm(x, w))
        return F.scaled_dot_product_attention(x, cache, cache, attn_mask=attention_mask)

    run = compiled(step, {"attention_mask": "causal"}, {"verify": verify})
    cache, expected = torch.ones_like(X), torch.ones_like(X)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            close(run(X, W, cache, mask), step(X, W, expected, mask))
            close(cache, expected)
    assert spy.ran == (["fused"] * 2 if mask is CAUSAL else ["plain"] * 2)


def test_verification_waits_for_the_first_fused_call(spy):
    run = compiled(attend, {"attention_mask": "causal"}, {"verify": True})
    with torch.no_grad(), pytest.warns(UserWarning, match="passes another one"):
        for mask in (PADDED, CAUSAL, PADDED, CAUSAL):
            close(run(X, W, mask), attend(X, W, mask))
    assert spy.ran == ["plain", "fused", "plain", "fused"]


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    "lower", ["eager", pytest.param("inductor", marks=pytest.mark.skipif(not has_compiler(), reason="no compiler"))]
)
def test_sizes_that_are_not_fixed(spy, said, lower):
    run = compiled(attend, {"attention_mask": "causal"}, {"lower": lower})
    with torch.no_grad():
        for size in (4, 6, 5, 7):
            x, mask = numbers(2, 2, size, 64), tril(size, size)[None, None].clone()  # Dynamo guards on views
            torch._dynamo.maybe_mark_dynamic(x, 2)
            for each in (mask, mask & (torch.arange(size) != 1)):
                torch._dynamo.maybe_mark_dynamic(each, (2, 3))
                close(run(x, W, each), attend(x, W, each))
    assert spy.ran == ["fused", "plain"] * 4
    assert spy.compiled == [("fused", lower), ("plain", "eager")]
    assert len(texts(said)) == 1


def test_a_number_is_no_mask():
    run = compiled(lambda x, w, length: norm(x, w) * length, {"length": "causal"}, dynamic=True)
    with torch.no_grad(), pytest.warns(UserWarning, match="has no such tensor among its arguments"):
        close(run(X, W, 7), norm(X, W) * 7)


def test_inference_mode(spy):
    run = compiled(attend, {"attention_mask": "causal"})
    with torch.inference_mode(), pytest.warns(UserWarning, match="passes another one"):
        mask = CAUSAL.clone()
        close(run(X, W, mask), attend(X, W, mask))
        mask[..., 3] = False
        close(run(X, W, mask), attend(X, W, mask))
    assert spy.ran == ["fused", "plain"]


def test_inputs_that_share_memory_do_not_move_the_check(spy):
    """AOT autograd passes the common memory of such inputs first and changes the order of the others."""

    def step(x, attention_mask, left, right, w):
        left.add_(1)
        right.mul_(2)
        return attend(x, w, attention_mask) + left.sum() + right.sum()

    run = compiled(step, {"attention_mask": "causal"})
    with torch.no_grad(), pytest.warns(UserWarning, match="passes another one"):
        for mask in (CAUSAL, PADDED):
            memory, expected = torch.ones(8), torch.ones(8)
            want = step(X, mask, expected[:6], expected[2:], W)
            close(run(X, mask, memory[:6], memory[2:], W), want)
            close(memory, expected)
    assert spy.ran == ["fused", "plain"]


# -- the names --


def layers(x, w, **kwargs):
    masks = kwargs["attention_mask"]
    return attend(attend(x, w, masks["full_attention"]), w, masks["sliding_attention"])


MASKS = {"full_attention": CAUSAL, "sliding_attention": banded(4, 4, 2)[None, None]}
KINDS = {"attention_mask.full_attention": "causal", "attention_mask.sliding_attention": "window:2"}


@pytest.mark.parametrize(
    "assume",
    [
        KINDS,
        {"attention_mask": "causal", "attention_mask['sliding_attention']": "window:2"},
        {f"kwargs.{name}": kind for name, kind in KINDS.items()},
    ],
    ids=["paths", "the longer counts", "of the wrapper"],
)
@pytest.mark.rotates(3)
def test_a_mask_inside_an_argument_has_a_path(spy, assume):
    with torch.no_grad():
        close(compiled(layers, assume)(X, W, attention_mask=MASKS), layers(X, W, attention_mask=MASKS))
    assert spy.ran == ["fused"]
    assert fusion.explain(layers, X, W, attention_mask=MASKS, options={**HOST, "assume": assume}).assumptions == KINDS


def test_one_name_stands_for_every_mask_below_it(spy):
    with torch.no_grad(), pytest.warns(UserWarning, match="'attention_mask.sliding_attention' is a causal mask, but"):
        have = compiled(layers, {"attention_mask": "causal"})(X, W, attention_mask=MASKS)
    close(have, layers(X, W, attention_mask=MASKS))
    assert spy.ran == ["plain"]


def test_a_name_that_no_input_has_is_warned_of_with_the_nearest(spy):
    with torch.no_grad(), pytest.warns(UserWarning, match=r"'atention_mask' is a causal.*nearest are 'attention_mask'"):
        close(compiled(attend, {"atention_mask": "causal"})(X, W, PADDED), attend(X, W, PADDED))
    assert spy.ran == ["fused"]


def test_a_tensor_that_cannot_be_such_a_mask_is_warned_of(spy):
    def validity(x, w, attention_mask):
        return norm(x, w) * attention_mask[..., None, :, None]

    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad(), pytest.warns(UserWarning, match=r"cannot be one.*\[B, T\] as a padding mask"):
        close(compiled(validity, {"attention_mask": "causal"})(X, W, mask[0]), validity(X, W, mask[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusion.explain(validity, X, W, mask, options={**HOST, "assume": {"attention_mask": "padding"}})


# -- the report --


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(W.clone())
        self.register_buffer("attention_mask", CAUSAL.clone())

    def forward(self, x, attention_mask=None):
        mask = self.attention_mask if attention_mask is None else attention_mask
        return attend(x, self.weight, mask)


@pytest.mark.parametrize("how", ["position", "keyword"])
@pytest.mark.parametrize("model", [attend, Attention()], ids=["function", "module"])
@pytest.mark.rotates(4)
def test_the_report_lists_what_was_assumed_and_runs_nothing(model, how):
    args = (X, W) if model is attend else (X,)
    call = (*args, PADDED) if how == "position" else args
    more = {} if how == "position" else {"attention_mask": PADDED}
    options = {**HOST, "assume": {"attention_mask": "causal"}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fusion.explain(model, *call, **more, options=options)
    assert report.assumptions == {"attention_mask": "causal"}
    assert json.loads(report.to_json())["assumptions"] == {"attention_mask": "causal"}
    assert "assumed, and checked at every call" in str(report)
    assert fusion.explain(model, *call, **more, options=HOST).assumptions == {}
    assert "assumed" not in str(fusion.explain(model, *call, **more, options=HOST))


def test_without_a_rewrite_nothing_is_assumed():
    options = {**HOST, "assume": {"attention_mask": "causal"}, "fuel": 0}
    assert fusion.explain(attend, X, W, CAUSAL, options=options).assumptions == {}


def test_a_buffer_is_no_argument():
    options = {**HOST, "assume": {"attention_mask": "causal"}}
    with pytest.warns(UserWarning, match="no such tensor among its arguments"):
        report = fusion.explain(Attention(), X, options=options)
    assert report.assumptions == {"attention_mask": "True where column - row <= 0, else False"}  # as it was found
