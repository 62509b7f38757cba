"""Recording: run plain torch once on fake tensors and record the operators that it called, to be replayed as nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

from fusion._torch.fakes import (
    FakesMode,
    FakeTensor,
    FakeTensorMode,
    SizeAskedError,
    fake_like,
    fake_tensor,
    run_on_fakes,
    without_guards,
    without_view_tracking,
)
from fusion._torch.nested import leaves, map_only
from fusion._torch.operators import OpOverload, schema_of
from fusion._torch.tensors import as_distinct
from fusion.graph import Dim, Graph, Value, dim_of, dims_of
from fusion.graph.rebuilding import build, buildable
from fusion.language import Refused
from fusion.language.float16_ranges import is_covered
from fusion.operators import unchecked
from fusion.planning.plan_json import frozen
from fusion.planning.symbolic_sizes import SizeNodes
from fusion.records import Input, Output, Step, outputs_of


class Recorder(FakesMode):
    """Dispatch mode that records every operator called inside, with tensors as references.

    `ran` memoises results of calls for all recordings, which repeat calls on the same fakes.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], ran: Ran) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._ran = ran
        self._names: dict[int, Input | Output] = {id(tensor): Input(name) for name, tensor in inputs.items()}
        self._alive: list[Any] = list(inputs.values())  # `id` is unique only while its tensor lives

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        result = self._result(func, args, named)
        if not any(isinstance(each, torch.Tensor) for each in leaves(result)):
            return result  # a size or a device is a constant: nothing to replay
        number = len(self.steps)
        self._alive.append(result)
        for output, tensor in outputs_of(number, result):
            self._names.setdefault(id(tensor), output)
        given, named = map_only(torch.Tensor, self.name, (_completed(func, args), named))
        self.steps.append(Step(func, given, named, result, is_covered()))
        return result

    def _result(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call, or return a memoised result, unless that is one of this recording already."""
        call = func, _call_key(args), _call_key(kwargs)
        if call in self._ran and not any(id(each) in self._names for each in leaves(self._ran[call][1])):
            return self._ran[call][1]
        result = run_on_fakes(func, args, kwargs)
        if not schema_of(func).is_mutable:
            self._ran[call] = (args, kwargs), result
        return result

    def name(self, tensor: torch.Tensor) -> Input | Output:
        """Return the reference of a tensor: an input of the recording, or the output of a step.

        Raises:
            Refused: the tensor is neither.
        """
        if id(tensor) not in self._names:
            raise Refused(
                "lowering: it uses a tensor that is not one of its captures; a rule requires tensors of its form alone",
                {},
            )
        return self._names[id(tensor)]


Ran = dict[Hashable, tuple[Any, Any]]
"""Memoised calls on fakes, by operator and arguments: the arguments, kept alive so that ids stay unique, and the
result."""


def _call_key(argument: Any) -> Hashable:
    """Return a hashable key of an argument, in which a tensor is itself: equal metadata does not suffice."""
    match argument:
        case torch.Tensor():
            return id(argument)
        case list() | tuple():
            return tuple(map(_call_key, argument))
        case dict():
            return tuple((name, _call_key(each)) for name, each in argument.items())
        case _:
            return frozen(argument)


def _completed(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Append the defaults that the dispatcher left out: those of fused operators differ between versions."""
    return args if func.namespace in ("aten", "prims") else (*args, *_defaults(func, len(args)))


@cache
def _defaults(func: OpOverload, given: int) -> tuple[Any, ...]:
    """Return the default values of the positional arguments of `func` from number `given` on."""
    return tuple(each.default_value for each in schema_of(func).arguments[given:] if not each.kwarg_only)


class Recipe(NamedTuple):
    """Calls that build a value from its arguments, which are inputs named by number; a reshape may have to copy."""

    steps: Sequence[Step]
    result: Input | Output
    inputs: Mapping[str, torch.Tensor]
    fake: torch.Tensor


class Fakes:
    """Fake tensors for the values of one graph, and sizes for its symbolic dims."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        vals = [node.meta.get("val") for node in graph.source.nodes]
        self._mode: Any = next((val.fake_mode for val in vals if isinstance(val, FakeTensor)), nullcontext())
        self._known: dict[Value, torch.Tensor] = {}
        self._recipes: dict[Value, Recipe] = {}
        self._runs: dict[Any, tuple[Any, str]] = {}
        self._ran: Ran = {}
        sizes = [size for val in vals for size in (val.shape if isinstance(val, torch.Tensor) else (val,))]
        self._symbols: dict[Any, torch.SymInt] = {
            dim_of(size): size for size in reversed(sizes) if isinstance(size, torch.SymInt)
        }

    def size(self, dim: Dim) -> int | torch.SymInt:
        """Return the size for `dim`, a SymInt where it is symbolic.

        Raises:
            Refused: it cannot be computed from the sizes in the graph.
        """
        if isinstance(dim, int):
            return dim
        if dim in self._symbols:
            return self._symbols[dim]
        symbols = sorted(dim.free_symbols, key=str)
        if not all(symbol in self._symbols for symbol in symbols):
            raise Refused("the symbolic size {dim} is not among the sizes of the graph", {"dim": dim})
        import sympy

        return sympy.lambdify(symbols, dim)(*(self._symbols[symbol] for symbol in symbols))

    def of(self, value: Value) -> torch.Tensor:
        """Return a fake tensor with the metadata of `value`, or those that its recipe will give it.

        Raises:
            Refused: no node has the value, and no recipe can build it.
        """
        if value not in self._known:
            node = self._graph.node(value)
            self._known[value] = node.meta["val"] if node is not None else self._built(value)
        return self._known[value]

    def _built(self, value: Value) -> torch.Tensor:
        recipe = self._graph.recipe(value)
        if not buildable(recipe):
            raise Refused(
                "{op}: the rewrite reads this value, which the model does not compute; a lowering requires "
                "values that a node of the graph has",
                {"op": value.op},
            )
        self._recipes[value] = self._run_recipe(recipe, [self.of(arg) for arg in recipe.args])
        return self._recipes[value].fake

    def _run_recipe(self, recipe: Value, args: Sequence[torch.Tensor]) -> Recipe:
        inputs = {str(number): each for number, each in enumerate(args)}
        recorder, fake = self.record(lambda given: build(recipe, self.size, *given.values()), inputs)
        return Recipe(recorder.steps, recorder.name(fake), inputs, fake)

    def recipe(self, value: Value, args: Sequence[torch.Tensor] | None = None) -> Recipe:
        """Return the calls that build `value`, which no node has, from its arguments, or from `args` of other strides.

        Raises:
            Refused: no recipe can build the value.
        """
        self.of(value)
        known = self._recipes[value]
        if args is None or _strides(args) == _strides(known.inputs.values()):
            return known
        return self._run_recipe(self._graph.recipe(value), args)

    def record(
        self, function: Callable[[Mapping[str, torch.Tensor]], Any], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[Recorder, Any]:
        """Run `function` of `inputs` on fakes; return the recorder of its calls and its result.

        Raises:
            Refused: a call takes a symbolic size that no node of the graph has and none can compute, or the calls
                depend on the value of a symbolic size.
        """
        distinct = dict(zip(inputs, as_distinct(inputs.values()), strict=True))
        recorder = Recorder(distinct, self._ran)
        try:
            # Unchecked: limits are tested for each target once the calls are known.
            with (
                without_guards(self._mode),
                self._mode,
                torch.no_grad(),
                without_view_tracking(),
                unchecked(),
                recorder,
            ):
                result = function(distinct)
        except SizeAskedError as asked:
            raise Refused(
                "sizes: the rewrite is right for some symbolic sizes alone ({asked}); it requires all; compile "
                "for static sizes there",
                {"asked": asked},
            ) from None
        for dim in self._computed_sizes(recorder.steps):
            if not self._sizes.can_make(dim):
                raise Refused("the symbolic size {dim} is not among the sizes of the graph", {"dim": dim})
        return recorder, result

    def _computed_sizes(self, steps: Sequence[Step]) -> Iterator[Dim]:
        """Yield the symbolic sizes that the calls in `steps` take as arguments."""
        for step in steps if self._symbols else ():
            yield from (dim_of(each) for each in leaves(step.args, step.kwargs) if isinstance(each, torch.SymInt))

    @cached_property
    def _sizes(self) -> SizeNodes:
        return SizeNodes(self._graph.source)

    def run(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
        """Return the fake result of one call, or the text of its error; memoised for equal calls."""
        key = (target, frozen(args), frozen(kwargs))
        if key not in self._runs:
            try:
                with self._mode, torch.no_grad(), unchecked():
                    self._runs[key] = run_on_fakes(target, args, kwargs), ""
            except (RuntimeError, ValueError) as error:
                self._runs[key] = None, str(error) or type(error).__name__
        return self._runs[key]

    def made(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Make a fake tensor of the mode of the graph."""
        if isinstance(self._mode, FakeTensorMode):
            return fake_tensor(self._mode, shape, stride, dtype, device)
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def like(self, val: Any) -> Any:
        """Make fakes with the metadata of `val`, so that no two nodes share a fake: they would look like aliases."""
        return map_only(torch.Tensor, fake_like, val)


def _strides(tensors: Iterable[torch.Tensor]) -> list[tuple[Dim, ...]]:
    return [dims_of(each.stride()) for each in tensors]
