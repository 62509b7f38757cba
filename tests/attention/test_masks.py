"""What is read out of a mask is true of every element of it, for masks that are put together at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sympy import Symbol
from torch import Tensor

from fusion.analysis.affine import Affine, Leaf
from fusion.analysis.affine import number as number_of
from fusion.analysis.constant_folding import Folder
from fusion.analysis.mask_formulas import Positions
from fusion.graph import Algebra, Reading, Value
from fusion.graph.contractions import matmul, swapped
from fusion.graph.dims import dims_of
from fusion.graph.proof_steps import proof
from fusion.graph.rebuilding import build
from fusion.stages.canonicalise import comparisons
from fusion.stages.canonicalise.translators import TRANSLATORS, Out
from fusion.testing import capture
from patterns.attention import cores_of, read_attention
from patterns.attention.masks import bounds as bounds_of
from patterns.attention.masks import masks as attention_masks
from patterns.attention.masks.assumed import Assumed
from patterns.attention.masks.mask_terms import Term, visible
from tests.engine.graphs import read_graph

aten = torch.ops.aten
D = 4
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ENDS = (125, 253, -128, 2**15 - 2, 2**31 - 3, -(2**31), 2**53 + 1, 254, 2046, 2**24 - 2)
"""Numbers near which dtypes begin to wrap round or to round."""


@dataclass(frozen=True)
class Twin:
    """A canonical value and the tensor that it stands for."""

    value: Value
    tensor: Tensor


@dataclass
class Twins:
    """Computes with canonical values and with real tensors at once."""

    draw: Any
    a: Algebra = field(default_factory=Algebra)
    real: dict[Value, Tensor] = field(default_factory=dict)

    def input(self, tensor: Tensor) -> Twin:
        value = self.a.make("input", (), (f"x{len(self.real)}", 0), dims_of(tensor.shape), tensor.dtype)
        return self._kept(value, tensor)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Twin:
        """The operator on tensors, and its translation on values; what has none is an input."""
        plain = [_each(one, "tensor") for one in args]
        tensor = op(*plain, **kwargs)
        translator = TRANSLATORS.get(op)
        values = [_each(one, "value") for one in args]
        out = Out(dims_of(tensor.shape), tensor.dtype)
        value = None if translator is None else proof(translator)(self.a, out, *values, **kwargs)
        right = isinstance(value, Value) and (value.shape, value.dtype) == (out.shape, out.dtype)
        return self._kept(value, tensor) if right else self.input(tensor)

    def _kept(self, value: Value, tensor: Tensor) -> Twin:
        self.real.setdefault(value, tensor)
        same = torch.allclose(self.real[value].double(), tensor.double(), rtol=0, atol=0, equal_nan=True)
        assert same, f"{value} stands for two tensors"
        return Twin(value, tensor)


def _each(x: Any, side: str) -> Any:
    if isinstance(x, list):
        return [_each(each, side) for each in x]
    return getattr(x, side) if isinstance(x, Twin) else x


# random masks --------------------------------------------------------------------------------------------------------


@dataclass
class Masks:
    """Draws masks that broadcast to scores [B, 1, S, T]."""

    t: Twins
    batch: int
    queries: int
    keys: int
    odd: bool = False  # whether numbers are cast, wrapped round and rounded

    def pick(self, *choices: Any) -> Any:
        return self.t.draw(st.sampled_from(choices))

    def small(self) -> int:
        return self.t.draw(st.integers(-3, 4))

    def line(self, size: int) -> Twin:
        """Whole numbers [size]."""
        t, call = self.t, self.t.call
        match self.pick("arange", "start", "cumsum", "sliced", "scaled", "gathered", "input"):
            case "start":
                start = self.small()
                return call(aten.arange.start, start, start + size)
            case "cumsum":
                return call(aten.cumsum.default, call(aten.ones.default, [size], dtype=torch.int64), 0)
            case "sliced":
                return call(aten.slice.Tensor, call(aten.arange.default, size + 3), 0, 2, size + 2)
            case "scaled":
                return call(aten.mul.Tensor, call(aten.arange.default, size), self.pick(2, -1))
            case "gathered":
                places = call(aten.add.Tensor, call(aten.arange.default, size), self.pick(-2, 0, 1))
                source = call(aten.arange.default, size + 1)
                return call(aten.index.Tensor, source, [places])
            case "input":
                numbers = t.draw(st.lists(st.integers(-2, 6), min_size=size, max_size=size))
                return t.input(torch.tensor(numbers))
            case _:
                return call(aten.arange.default, size)

    def whole(self) -> Twin:
        """Whole numbers that broadcast to the mask."""
        t, call = self.t, self.t.call
        match self.pick("query", "key", "query", "key", "batch", "number", "sum"):
            case "query":
                number = call(aten.reshape.default, self.line(self.queries), [1, 1, self.queries, 1])
            case "key":
                number = call(aten.reshape.default, self.line(self.keys), [1, 1, 1, self.keys])
            case "batch":
                drawn = t.draw(st.lists(st.integers(0, 6), min_size=self.batch, max_size=self.batch))
                number = call(aten.reshape.default, t.input(torch.tensor(drawn)), [self.batch, 1, 1, 1])
            case "number":
                number = t.input(torch.tensor(self.small()))
            case _:
                number = call(self.pick(aten.add.Tensor, aten.sub.Tensor), self.whole(), self.whole())
        number = self.changed(number) if self.odd and self.pick(True, False) else number
        return call(aten.add.Tensor, number, self.small()) if self.pick(True, False) else number

    def changed(self, x: Twin) -> Twin:
        """Numbers in another dtype, or so that the one they have may not hold them."""
        call, to = self.t.call, aten._to_copy.default
        match self.pick("cast", "cast", "sum", "product", "round trip", "float", "part", "floor", "bool", "negated"):
            case "sum":
                op = self.pick(aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar)
                end = self.pick(*ENDS)
                far = call(op, x, end)
                return call(aten.sub.Tensor, far, end) if self.pick(True, False) else far
            case "product":
                return call(aten.mul.Tensor, x, self.pick(-1, 3, 100, 2**28, 2**31 + 1))
            case "round trip":
                return call(to, call(to, x, dtype=self.pick(*INTEGERS, *FLOATS)), dtype=torch.int64)
            case "float":
                return call(to, x, dtype=self.pick(*FLOATS))
            case "part":
                part = call(self.pick(aten.div.Tensor, aten.mul.Tensor), x, self.pick(2, 0.5, 0.1, 3, 49))
                part = call(aten.mul.Tensor, part, self.pick(2, 10, 49))
                return call(to, part, dtype=self.pick(*INTEGERS, torch.float64))
            case "floor":
                return call(self.pick(aten.floor_divide.default, aten.remainder.Scalar), x, self.pick(2, 3))
            case "bool":
                return call(to, call(to, x, dtype=torch.bool), dtype=self.pick(*INTEGERS))
            case "negated":
                return call(aten.neg.default, x)
            case _:
                return call(to, x, dtype=self.pick(*INTEGERS))

    def truth(self, depth: int) -> Twin:
        """Booleans that broadcast to the mask."""
        t, call = self.t, self.t.call
        kinds = ("compare", "compare", "bound", "triangle", "padding")
        deep = ("and", "or", "not", "where", "float", *(("number", "sum", "zero") if self.odd else ()))
        match self.pick(*kinds, *(deep if depth else ())):
            case "bound":
                op = self.pick(aten.le.Scalar, aten.lt.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.eq.Scalar)
                return call(op, self.whole(), self.pick(0, 1, -2, 0.5, 2.5, *(ENDS if self.odd else ())))
            case "number":
                op = self.pick(aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.ge.Scalar)
                return call(op, self.truth(depth - 1), self.pick(0, 1, 2, 0.5, -1))
            case "sum":
                op = self.pick(aten.add.Tensor, aten.mul.Tensor)
                return call(op, self.truth(depth - 1), self.truth(depth - 1))
            case "zero":
                return call(aten.eq.Scalar, self.count(depth - 1), self.pick(0, 1, 100, -56, 2, 44))
            case "triangle":
                op = self.pick(aten.tril.default, aten.triu.default)
                ones = call(aten.ones.default, [self.queries, self.keys], dtype=torch.bool)
                return call(op, ones, self.small())
            case "padding":
                count = self.batch * self.keys
                drawn = t.draw(st.lists(st.booleans(), min_size=count, max_size=count))
                return t.input(torch.tensor(drawn).reshape(self.batch, 1, 1, self.keys))
            case "and" | "or" as word:
                op = aten.bitwise_and.Tensor if word == "and" else aten.bitwise_or.Tensor
                return call(op, self.truth(depth - 1), self.truth(depth - 1))
            case "not":
                return call(aten.bitwise_not.default, self.truth(depth - 1))
            case "where":
                return call(aten.where.self, *(self.truth(depth - 1) for _ in range(3)))
            case "float":
                return call(aten.eq.Scalar, self.floats(depth - 1), 0)
            case _:
                op = self.pick(aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.eq.Tensor)
                return call(op, self.whole(), self.whole())

    def usual(self) -> Twin:
        """Keys up to a position, perhaps within a window, perhaps turned: what can be told in words."""
        call, draw = self.t.call, self.t.draw
        key = call(aten.reshape.default, call(aten.arange.default, self.keys), [1, self.keys])
        query = call(aten.reshape.default, call(aten.arange.default, self.queries), [self.queries, 1])
        room = st.integers(0, max(self.keys - self.queries, 0))
        match self.pick("none", "number", "input", "batch", "length"):
            case "number":
                query = call(aten.add.Tensor, query, draw(room))
            case "input":
                query = call(aten.add.Tensor, query, self.t.input(torch.tensor(draw(room))))
            case "batch":
                starts = torch.tensor(draw(st.lists(room, min_size=self.batch, max_size=self.batch)))
                query = call(aten.add.Tensor, query, self.t.input(starts.reshape(-1, 1, 1, 1)))
            case "length":
                ends = draw(st.lists(st.integers(0, self.keys), min_size=self.batch, max_size=self.batch))
                return call(aten.lt.Tensor, key, self.t.input(torch.tensor(ends).reshape(-1, 1, 1, 1)))
        seen = call(self.pick(aten.le.Tensor, aten.le.Tensor, aten.lt.Tensor, aten.ge.Tensor), key, query)
        if self.pick(True, False):
            near = call(aten.sub.Tensor, query, self.small())
            seen = call(aten.bitwise_and.Tensor, seen, call(self.pick(aten.gt.Tensor, aten.ge.Tensor), key, near))
        return call(aten.bitwise_and.Tensor, seen, self.truth(0)) if self.pick(True, False, False) else seen

    def count(self, depth: int) -> Twin:
        """Whole numbers of few kinds, made of booleans."""
        call, dtype = self.t.call, self.pick(*INTEGERS)
        number = call(aten._to_copy.default, self.truth(depth), dtype=dtype)
        match self.pick("one", "product", "sum", "from one", "float"):
            case "product":
                return call(aten.mul.Tensor, number, self.pick(-1, 2, 100, 300))
            case "sum" if depth:
                return call(aten.add.Tensor, number, self.count(depth - 1))
            case "from one":
                return call(aten.rsub.Scalar, number, 1)
            case "float":
                part = call(aten.mul.Tensor, number, self.pick(0.5, 1.5, -2.5, 300.0))
                return call(aten._to_copy.default, part, dtype=self.pick(*INTEGERS))
            case _:
                return number

    def floats(self, depth: int) -> Twin:
        """Numbers that are added to scores."""
        call, size = self.t.call, [self.batch, 1, self.queries, self.keys]
        low = self.pick(-torch.inf, -1e9, torch.finfo(torch.float32).min)
        match self.pick("filled", "where", "triangle", "times", "sum", *(("count", "filled ones") if self.odd else ())):
            case "count":
                number = call(aten._to_copy.default, self.count(depth), dtype=self.pick(*FLOATS))
                return call(aten.mul.Tensor, number, self.pick(low, -1.0))
            case "filled ones":
                ones = call(aten.ones.default, size, dtype=self.pick(torch.float32, torch.float16))
                return call(aten.mul.Tensor, call(aten.masked_fill.Scalar, ones, self.truth(depth), 0.0), -torch.inf)
            case "where":
                numbers = [call(aten.scalar_tensor.default, each, dtype=torch.float32) for each in (low, 0.0)]
                return call(aten.where.self, self.truth(depth), *numbers)
            case "triangle":
                full = call(aten.full.default, [self.queries, self.keys], low, dtype=torch.float32)
                return call(aten.triu.default, full, self.small())
            case "times":
                seen = call(aten._to_copy.default, self.truth(depth), dtype=torch.float32)
                return call(aten.mul.Tensor, call(aten.rsub.Scalar, seen, 1.0), low)
            case "sum" if depth:
                return call(aten.add.Tensor, self.floats(depth - 1), self.floats(depth - 1))
            case _:
                zeros = call(aten.zeros.default, size, dtype=torch.float32)
                return call(aten.masked_fill.Scalar, zeros, self.truth(depth), low)


# brute force ---------------------------------------------------------------------------------------------------------


def holds(formula: Any, t: Twins, at: tuple[int, ...]) -> bool:
    """A formula at one position."""
    if isinstance(formula, bool):
        return formula
    op, content = formula
    match op:
        case "le":
            return number(content, t, at) <= 0
        case "eq":
            return number(content, t, at) == 0
        case "is":
            return bool(read(content, t, at))
        case "not":
            return not holds(content, t, at)
        case "and":
            return all(holds(each, t, at) for each in content)
        case _:
            return any(holds(each, t, at) for each in content)


def number(expression: Affine, t: Twins, at: tuple[int, ...]) -> float:
    total = expression.constant
    for term, factor in expression.terms.items():
        total += factor * (at[term] if isinstance(term, int) else read(term, t, at))
    return total


def read(leaf: Leaf, t: Twins, at: tuple[int, ...]) -> Any:
    places = tuple(number(each, t, at) for each in leaf.index)
    tensor = tensor_of(leaf.value, t)
    assert all(0 <= place < size for place, size in zip(places, tensor.shape, strict=True)), "read beyond a tensor"
    return tensor[places].item()


def tensor_of(value: Value, t: Twins) -> Tensor:
    """The tensor of a value, by torch where a node held it, by folding its arguments where none did."""
    if value not in t.real:
        folder = Folder()
        folder._known.update({each: _numbers(tensor) for each, tensor in t.real.items()})
        found = folder.fold(value)
        if found is None:  # what would be rounded is not folded
            t.real[value] = build(value, lambda size: size, *(tensor_of(each, t) for each in value.args))
        else:
            t.real[value] = torch.from_numpy(np.array(found)).to(value.dtype)
    return t.real[value]


def _numbers(tensor: Tensor) -> Any:
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def sizes(draw: Any) -> tuple[int, int, int]:
    return draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 5))


def broadcast(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    return mask.expand(shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1, 0.1])
def test_numbers_that_a_dtype_rounds_are_not_folded(dtype, factor):
    t = Twins(None)
    line = t.call(aten._to_copy.default, t.call(aten.arange.default, 600), dtype=dtype)
    line = t.call(aten.mul.Tensor, line, factor)
    seen = t.call(
        aten.lt.Tensor, t.call(aten.reshape.default, line, [1, 600]), t.call(aten.reshape.default, line, [600, 1])
    )
    folded = Folder().fold(seen.value)
    assert folded is None or (folded == seen.tensor.numpy()).all()
    assert (folded is not None) == (factor == 1 and dtype is not torch.bfloat16)


def test_several_indices_among_others_are_not_folded():
    t = Twins(None)
    table = t.call(aten.reshape.default, t.call(aten.arange.default, 24), [2, 3, 4])
    taken = t.call(aten.index.Tensor, table, [None, *(t.call(aten.arange.default, 3) for _ in range(2))])
    folded = Folder().fold(taken.value)
    assert folded is None or (folded == taken.tensor.numpy()).all()


@pytest.mark.parametrize("odd", [False, True], ids=["plain", "odd"])
@settings(max_examples=250, deadline=None)
@given(data=st.data())
@pytest.mark.rotates(4)
def test_a_formula_holds_exactly_where_the_mask_does(odd, data):
    t = Twins(data.draw)
    batch, queries, keys = sizes(data.draw)
    masks = Masks(t, batch, queries, keys, odd)
    how = data.draw(st.sampled_from(("keep", "drop", "add")))
    mask = masks.floats(2) if how == "add" else masks.truth(2)
    shape = (batch, 1, queries, keys)
    formula = visible(Positions(shape, Folder()), [Term(how, mask.value)])
    if isinstance(formula, str):
        return
    wide = broadcast(mask.tensor, shape)
    seen = wide if how == "keep" else ~wide if how == "drop" else wide == 0
    assert how != "add" or not wide.isnan().any()
    for at in np.ndindex(*shape):
        assert holds(formula, t, at) == seen[at].item(), (formula, at)


def _line(t: Twins, size: int) -> Twin:
    return t.call(aten.arange.default, size)


READ = {
    "a running total of other numbers": lambda t: _le(t, t.call(aten.cumsum.default, _line(t, 6), 0), _given(t, 4)),
    "a running total of ones": lambda t: _le(
        t, t.call(aten.cumsum.default, t.call(aten.ones.default, [6], dtype=torch.int64), 0), _given(t, 4)
    ),
    "rows of a line": lambda t: _le(
        t, t.call(aten.reshape.default, _given(t, *range(24), shape=(24,)), [4, 6]), _given(t, 9)
    ),
    "a row of a table": lambda t: _le(
        t, t.call(aten.index.Tensor, _given(t, *range(24), shape=(4, 6)), [_given(t, 2, 0, 3, 1, shape=(4,))]),
        _given(t, 9),
    ),
    "rows of a table from the second on": lambda t: _le(
        t, t.call(aten.index.Tensor, _given(t, *range(30), shape=(5, 6)), [_plus(t, _line(t, 4), 1)]), _given(t, 9),
    ),
    "elements of a table": lambda t: _le(
        t, t.call(aten.index.Tensor, _given(t, *range(24), shape=(4, 6)), [
            t.call(aten.reshape.default, _line(t, 4), [4, 1]), _line(t, 6),
        ]), _given(t, 9),
    ),
    "elements counted from the end": lambda t: _le(
        t, t.call(aten.index.Tensor, _given(t, 0, 1, 2, 3, 4, 5, shape=(6,)), [_plus(t, _line(t, 6), -2)]), _given(t, 2)
    ),
    "numbers as truths": lambda t: t.call(
        aten._to_copy.default, _given(t, 0, 2, 1, 0, -1, 0, shape=(6,)), dtype=torch.bool
    ),
    "fractions as truths": lambda t: t.call(
        aten._to_copy.default, t.input(torch.tensor([0.0, 0.5, 1.0, 0.0, -0.5, 2.0])), dtype=torch.bool
    ),
}  # fmt: skip
"""Masks of 4 queries and 6 keys whose elements are read in another place than they stand."""


@pytest.mark.parametrize("name", READ)
def test_a_formula_reads_the_elements_that_the_mask_reads(name: str):
    t = Twins(None)
    mask = READ[name](t)
    formula = visible(Positions((2, 1, 4, 6), Folder()), [Term("keep", mask.value)])
    assert not isinstance(formula, str)
    for at, seen in np.ndenumerate(broadcast(mask.tensor, (2, 1, 4, 6)).numpy()):
        assert holds(formula, t, at) == seen, (formula, at)


def _times_zero(seen: Tensor, other: Tensor) -> Tensor:
    """-inf · 0 where a key is hidden by the first and lowered by none."""
    return torch.where(seen, 0.0, -torch.inf) * other.float()


def _infinite_times_zero(seen: Tensor, other: Tensor) -> Tensor:
    """0 · -inf where a key is seen."""
    return (1.0 - seen.float()) * -torch.inf


def _infinities(seen: Tensor, other: Tensor) -> Tensor:
    """-inf + inf where a key is hidden by the first and raised by the second."""
    return torch.where(seen, 0.0, -torch.inf) + torch.where(other, 0.0, torch.inf)


@pytest.mark.parametrize("made", [_times_zero, _infinite_times_zero, _infinities])
def test_a_mask_that_holds_nan_is_not_proven(made):
    def attend(q, k, v, seen, other):
        return (q @ k.mT + made(seen, other)).softmax(-1) @ v

    seen, other = torch.tensor([True, False, True, False]), torch.tensor([True, True, False, False])
    assert made(seen, other).isnan().any()
    captured = capture(attend, (*(torch.randn(2, 4, D) for _ in range(3)), seen, other), "composite")
    graph = read_graph(captured.graph.graph, captured.facts)
    assert not graph.readings.all("softmax_attention")


def _lost_in_zero(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, -torch.inf) * 0.0


def _added_and_lost_in_zero(scores: Tensor, seen: Tensor) -> Tensor:
    return (scores + torch.where(seen, 0.0, -torch.inf)) * 0.0


def _filled_with_nan(scores: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, torch.nan)


def _turned_round(scores: Tensor, seen: Tensor) -> Tensor:
    return (scores + torch.where(seen, 0.0, torch.inf)) * -1.0


@pytest.mark.parametrize("masked", [_lost_in_zero, _added_and_lost_in_zero, _filled_with_nan, _turned_round])
def test_a_mask_that_a_factor_changes_is_not_proven(masked):
    def attend(q, k, v, seen):
        return masked(q @ k.mT, seen).softmax(-1) @ v

    seen = torch.tensor([True, False, True, False])
    captured = capture(attend, (*(torch.randn(2, 4, D) for _ in range(3)), seen), "composite")
    graph = read_graph(captured.graph.graph, captured.facts)
    assert not graph.readings.all("softmax_attention")


@pytest.mark.parametrize("odd", [False, True], ids=["plain", "odd"])
@settings(max_examples=250, deadline=None)
@given(data=st.data())
@pytest.mark.rotates(4)
def test_attention_is_told_what_the_mask_shows(odd, data):
    t = Twins(data.draw)
    batch, queries, keys = sizes(data.draw)
    masks = Masks(t, batch, queries, keys, odd)
    mask = masks.usual() if data.draw(st.booleans()) else masks.truth(2)
    is_told_right(t, mask, (batch, queries, keys), data.draw(st.sampled_from(("nan", "zero"))))


def is_told_right(t: Twins, mask: Twin, shape: tuple[int, int, int], softmax: str = "nan") -> dict[str, Any]:
    """What attention over [batch, queries, keys] is told about the keys that `mask` shows, which is right."""
    batch, queries, keys = shape
    q, k, v = (t.input(torch.zeros(batch, 2, size, D)).value for size in (queries, keys, keys))
    scores = matmul(t.a, q, swapped(t.a, k))
    masked = comparisons.where(
        t.a, mask.value, scores, comparisons.constant(t.a, -torch.inf, (), torch.float32), torch.float32
    )
    root = matmul(t.a, t.a.softmax(masked, -1, softmax), v)
    cores = cores_of(Assumed(t.a), root)
    assert isinstance(cores, list)
    outcome = read_attention(Assumed(t.a), cores)
    assert isinstance(outcome, dict), outcome
    reading = outcome[root]
    assert isinstance(reading, Reading), reading
    assume(within(reading.captures, t, queries, keys))
    seen = broadcast(mask.tensor, (batch, 1, queries, keys))
    assert torch.equal(claimed(reading.captures, t, seen.shape), seen), reading.captures
    if reading.captures["fully_masked_row"] == "zero" and root.arg.attrs[1] == "nan":
        assert seen.any(-1).all(), "a query that sees no key gives NaN"
    return reading.captures


def _le(t: Twins, left: Twin, right: Twin) -> Twin:
    return t.call(aten.le.Tensor, left, right)


def _plus(t: Twins, left: Twin, right: Any) -> Twin:
    return t.call(aten.add.Tensor, left, right)


def _twice(t: Twins, x: Twin) -> Twin:
    return t.call(aten.mul.Tensor, x, 2)


def _both(t: Twins, *masks: Twin) -> Twin:
    first, *others = masks
    for each in others:
        first = t.call(aten.bitwise_and.Tensor, first, each)
    return first


def _given(t: Twins, *numbers: int, shape: tuple[int, ...] = ()) -> Twin:
    return t.input(torch.tensor(numbers).reshape(shape))


NO_WORDS = {
    "two last keys": lambda t, i, j: _both(t, _le(t, j, _plus(t, i, 2)), _le(t, j, _plus(t, i, _given(t, 1)))),
    "two last keys, the nearer first": lambda t, i, j: _both(
        t, _le(t, j, _plus(t, i, _given(t, 1))), _le(t, j, _plus(t, i, _given(t, 0)))
    ),
    "two first keys": lambda t, i, j: _both(
        t, _le(t, j, i), _le(t, i, _plus(t, j, 2)), _le(t, i, _plus(t, j, _given(t, 1)))
    ),
    "a last key that moves, and one that does not": lambda t, i, j: _both(
        t, _le(t, j, i), _le(t, _plus(t, j, _given(t, 0)), _given(t, 2))
    ),
    "a first key that does not move": lambda t, i, j: _both(t, _le(t, j, i), _le(t, _given(t, 0), j)),
    "twice the key": lambda t, i, j: _le(t, _twice(t, j), i),
    "twice the key backwards": lambda t, i, j: _le(t, i, _twice(t, j)),
    "twice the query": lambda t, i, j: _le(t, j, _twice(t, i)),
    "against the query": lambda t, i, j: _le(t, _plus(t, j, i), _given(t, 4)),
    "a last key of each query": lambda t, i, j: _le(t, j, _given(t, 0, 2, 1, 3, shape=(4, 1))),
    "a last key of each key": lambda t, i, j: _le(t, j, _plus(t, i, _given(t, 0, 1, 0, 1, 0, 2, shape=(6,)))),
    "keys from a position on": lambda t, i, j: _le(t, i, j),
    "one key of each query": lambda t, i, j: t.call(aten.eq.Tensor, i, _plus(t, j, _given(t, 0))),
    "all but one key": lambda t, i, j: t.call(aten.ne.Tensor, i, j),
    "padding beside": lambda t, i, j: _both(
        t, _le(t, j, i), t.input(torch.tensor([True, True, False, True, True, True]))
    ),
    "a window of a tensor's width": lambda t, i, j: _both(t, _le(t, j, i), _le(t, i, _plus(t, j, _given(t, 1)))),
    "before the first key": lambda t, i, j: _le(t, _plus(t, j, 2), i),
    "a last key of some queries": lambda t, i, j: _le(t, j, _given(t, 0, 2, -1, 3, shape=(4, 1))),
    "twice the key up to a number": lambda t, i, j: _le(t, _twice(t, j), _given(t, 5)),
    "queries up to a number": lambda t, i, j: _le(t, i, _plus(t, _twice(t, j), _given(t, 2))),
    "no query behind a number": lambda t, i, j: _both(t, _le(t, i, _given(t, 2)), _le(t, j, _given(t, 4))),
    "less a number": lambda t, i, j: _le(t, _plus(t, j, _given(t, 2)), i),
    "behind a number of keys": lambda t, i, j: _le(t, j, _plus(t, i, _given(t, 1))),
    "behind so many keys that the last query sees none": lambda t, i, j: _le(t, j, _plus(t, i, _given(t, 4))),
    "padding of the first key": lambda t, i, j: _both(
        t, _le(t, j, i), t.input(torch.tensor([False, True, True, True, True, True]))
    ),
    "padding within a number": lambda t, i, j: _both(
        t, _le(t, j, _given(t, 3)), t.input(torch.tensor([True, False, True, True, True, True]))
    ),
    "behind the query, up to a number": lambda t, i, j: _both(
        t, _le(t, _plus(t, i, 1), j), t.call(aten.le.Scalar, j, 3)
    ),
    "in order, and no query behind a number": lambda t, i, j: _both(t, _le(t, j, i), t.call(aten.le.Scalar, i, 2)),
    "behind the number of the sequence": lambda t, i, j: _le(
        t, j, _plus(t, i, t.call(aten.reshape.default, t.call(aten.arange.default, 2), [2, 1, 1, 1]))
    ),
    "twice a number": lambda t, i, j: _le(t, j, _plus(t, i, _twice(t, _given(t, 1)))),
}
"""Masks of 4 queries [4, 1] and 6 keys [1, 6] that words for bounds are not made for."""


@pytest.mark.parametrize("softmax", ["nan", "zero"])
@pytest.mark.parametrize("name", NO_WORDS)
def test_a_mask_that_words_are_not_made_for_is_shown(name: str, softmax: str):
    t = Twins(None)
    query = t.call(aten.reshape.default, t.call(aten.arange.default, 4), [4, 1])
    key = t.call(aten.reshape.default, t.call(aten.arange.default, 6), [1, 6])
    told = is_told_right(t, NO_WORDS[name](t, query, key), (2, 4, 6), softmax)
    assert told["mask_kind"] == "dense"


def test_a_window_that_begins_behind_the_last_key_shows_nothing():
    def attend(q, k, v, start):
        ahead = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - start
        return (q @ k.mT).masked_fill((ahead < 0) | (ahead > 0), -torch.inf).softmax(-1) @ v

    sizes = (3, 2, 2)  # more queries than keys
    captured = capture(attend, (*(torch.randn(2, size, D) for size in sizes), torch.tensor(0)), "composite")
    graph = read_graph(captured.graph.graph, captured.facts)
    ((_, reading),) = graph.readings.all("softmax_attention")
    assert reading.captures["fully_masked_row"] == "nan"


HIGH = Affine({Leaf(Algebra().make("input", (), ("last", 0), (), torch.int64), ()): 1})
SIZE = Symbol("size", integer=True)


@pytest.mark.parametrize(
    ("low", "window"), [(HIGH.plus(-2), 2), (HIGH.plus(1).plus(-SIZE), None), (number_of(-2), None), (None, None)]
)
def test_a_window_is_a_number(low: Affine | None, window: int | None):
    a = Algebra()
    masks = attention_masks.Masks(a, Positions((2, 1, 4, 6), Folder()), (), (2, 1, 4, 6), begins={HIGH})
    bounds = bounds_of.Limits(HIGH, low, True, ())
    assert masks.bounded(bounds).get("window") == window
    assert bounds_of.sees_some(bounds, 4, 6) == (low is None or window == 2)


@pytest.mark.parametrize(("last", "some"), [(0, True), (-1, False), (SIZE, False)])
def test_a_last_key_that_is_not_known_before_may_be_none(last: Any, some: bool):
    assert bounds_of.sees_some(bounds_of.Limits(number_of(last), None, True, ()), 4, 6) == some


def of_each(shape: tuple[Any, ...], *index: Affine, factor: Any = 1, more: Any = 0) -> Value | None:
    """The tensor of two sequences of an element of an input."""
    a = Algebra()
    leaf = Leaf(a.make("input", (), ("lengths", 0), shape, torch.int64), index)
    return bounds_of.per_sequence(a, Affine({leaf: factor}, more), 2)


def test_a_number_of_keys_less_something_of_a_tensor_may_be_none():
    whole = Affine({}, SIZE)
    for high, some in ((whole, True), (whole + HIGH.times(-1), False)):
        assert bounds_of.sees_some(bounds_of.Limits(high, None, False, ()), 4, 6, {SIZE}) == some


def test_truths_of_each_query_that_are_passed_in_are_no_list():
    t = Twins(None)
    query = t.call(aten.reshape.default, t.call(aten.arange.default, 4), [4, 1])
    key = t.call(aten.reshape.default, t.call(aten.arange.default, 6), [1, 6])
    given = t.input(torch.arange(48).reshape(2, 1, 4, 6) % 5 > 0)
    assert is_told_right(t, _both(t, _le(t, key, query), given), (2, 4, 6))["fully_masked_row"] == "nan"


SEQUENCE, BACK = Affine({0: 1}), Affine({0: -1}, 1)


def test_a_number_of_each_sequence_is_read_where_its_place_and_factor_are_known():
    for found in (of_each((2,), SEQUENCE), of_each((3, 2), number_of(1), SEQUENCE), of_each((), factor=2, more=1)):
        assert found is not None
        assert found.shape == (2,)
    assert of_each((2,), BACK) is None
    assert of_each((3,), SEQUENCE) is None
    assert of_each((2, 2), SEQUENCE, SEQUENCE) is None
    assert of_each((SIZE,), number_of(1)) is None
    assert of_each((SIZE,), number_of(SIZE - 1)) is None
    assert of_each((3,), number_of(SIZE - 1)) is None
    assert of_each((2,), SEQUENCE, factor=SIZE) is None
    assert of_each((2,), SEQUENCE, more=SIZE) is None


def within(told: dict[str, Any], t: Twins, queries: int, keys: int) -> bool:
    """Whether positions read from tensors lie among the keys, as those of a cache do."""
    if told.get("kv_lens") is None:
        return True
    length = tensor_of(told["kv_lens"].arg, t)
    least = queries if told["mask_kind"] == "causal_lower_right" else 1 if told["fully_masked_row"] == "zero" else 0
    return bool((length >= least).all() and (length <= keys).all())


def claimed(told: dict[str, Any], t: Twins, shape: tuple[int, ...]) -> Tensor:
    """What the words of a reading let through."""
    batch, _, queries, keys = shape
    if told["mask_kind"] == "dense":
        return ~tensor_of(told["mask"], t).bool().expand(shape)
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    length = torch.full((batch,), keys if told["kv_len"] is None else told["kv_len"])
    if told.get("kv_lens") is not None:
        length = tensor_of(told["kv_lens"].arg, t).clamp(max=keys)
    length = length.reshape(-1, 1, 1, 1)
    last = i if told["mask_kind"] == "causal_upper_left" else i + length - queries
    seen = (j < length).expand(shape)
    if told["mask_kind"] == "none" or queries == 1:
        return seen
    seen = seen & (j <= last)
    return seen if told["window"] is None else seen & (j >= last - told["window"])


def _as_float(t: Twins, seen: Twin, hidden: float = -torch.inf) -> Twin:
    zeros = t.call(aten.zeros.default, [4, 6], dtype=torch.float32)
    return t.call(aten.masked_fill.Scalar, zeros, t.call(aten.bitwise_not.default, seen), hidden)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32], ids=str)
def test_a_mask_of_floats_is_cast_as_torch_casts_it(dtype: torch.dtype):
    t = Twins(None)
    query = t.call(aten.reshape.default, t.call(aten.arange.default, 4), [4, 1])
    key = t.call(aten.reshape.default, t.call(aten.arange.default, 6), [1, 6])
    seen = _le(t, key, _plus(t, query, _given(t, 1)))
    cast = t.call(aten._to_copy.default, _as_float(t, seen), dtype=dtype)
    hidden = cast if dtype is torch.bool else t.call(aten.ne.Scalar, cast, 0)
    read = visible(Positions((2, 1, 4, 6), Folder()), [Term("drop", hidden.value)])
    assert (read[0] == "le") == (dtype is torch.bool)  # what torch makes of -inf in int32 is left open
    is_told_right(t, t.call(aten.bitwise_not.default, hidden), (2, 4, 6))


def _listed(t: Twins, places: Twin) -> Value:
    """What of 6 keys each query lists."""
    none = t.call(aten.zeros.default, [2, 4, 6], dtype=torch.bool)
    listed = t.call(aten.scatter.value, none, -1, places, True).value.arg  # of a choice between True and `none`
    assert listed.op == "chosen"
    return listed


@pytest.mark.parametrize(("times", "rows"), [((4, 0), (2, 4, 0)), ((4, 3), (2, 4, 3)), ((4, 1), (2, 1, 1))])
def test_a_list_for_several_rows_is_one_and_one_of_nothing_names_none(times: tuple[int, int], rows: tuple[int, ...]):
    t = Twins(None)
    given = t.input(torch.arange(2).reshape(2, 1, 1))
    mask = t.call(aten.expand.default, given, [2, *times])
    written = t.call(aten.scatter.value, t.call(aten.zeros.default, [2, 4, 6], dtype=torch.bool), -1, mask, True)
    chosen = written.value.below("expand").arg
    assert chosen.op == "chosen"
    assert (chosen.arg.shape, written.value.shape) == (rows, (2, 4, 6))


def test_places_that_are_remainders_are_not_all_there_are():
    t = Twins(None)
    given = t.input(torch.arange(2 * 4 * 6).reshape(2, 4, 6) * 2)
    listed = _listed(t, t.call(aten.remainder.Scalar, given, 6))
    positions = Positions((2, 4, 6), Folder())
    assert positions.truth(listed, positions.origin) == ("is", Leaf(listed, positions.origin))


@pytest.mark.parametrize("keep", [False, True])
def test_a_list_of_all_places_stays_one_where_it_is_looked_for(keep: bool):
    t = Twins(None)
    scores = t.a.make("input", (), ("scores", 0), (2, 4, 6), torch.float32)
    places = t.a.make("largest_index", (scores,), (6,), (2, 4, 6), torch.int64)
    listed = _listed(t, Twin(places, torch.arange(6).expand(2, 4, 6)))
    positions = Positions((2, 4, 6), Folder(), keep_lists=keep)
    assert positions.truth(listed, positions.origin) == (("is", Leaf(listed, positions.origin)) if keep else True)
    assert positions.lists_all == (not keep)


def _filled(scores: Tensor, first: int) -> Tensor:
    return scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(first), -torch.inf)


def _lowered(scores: Tensor, first: int) -> Tensor:
    return scores + torch.full((6, 6), -torch.inf).triu(first)


@pytest.mark.parametrize(
    ("ordered", "first", "padded", "turned", "empty"),
    [
        (_filled, 1, False, False, "zero"),
        (_lowered, 1, False, False, "zero"),
        (_lowered, 0, False, False, "nan"),  # the first query sees no key
        (_filled, 1, True, False, "nan"),
        (_filled, 1, False, True, "nan"),  # what other queries list
    ],
)
def test_what_is_listed_of_keys_that_are_seen_is_seen(ordered: Any, first: int, padded: bool, turned: bool, empty: str):
    def attend(q, k, v, scores, padding):
        places = ordered(scores, first).topk(3, -1).indices
        listed = torch.zeros(2, 6, 6, dtype=torch.bool).scatter(-1, places, True)
        masked = (q @ k.mT).masked_fill(padding, -torch.inf) if padded else q @ k.mT
        listed = listed.mT if turned else listed
        return ordered(masked, first).masked_fill(~listed, -torch.inf).softmax(-1) @ v

    sizes = (2, 6, D), (2, 6, D), (2, 6, D), (2, 6, 6)
    captured = capture(attend, (*map(torch.zeros, sizes), torch.zeros(2, 1, 6, dtype=torch.bool)), "composite")
    ((_, reading),) = read_graph(captured.graph.graph, captured.facts).readings.all("softmax_attention")
    assert reading.captures["fully_masked_row"] == empty
