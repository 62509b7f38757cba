"""Recording: run plain torch once on fake tensors and keep the operators that it called, to be replayed as nodes."""

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
from fusion._torch.operators import OpOverload, schema_of
from fusion._torch.tensors import leaves, map_only, told_apart
from fusion.graph import Dim, Graph, Value, dim_of, dims_of
from fusion.graph.recipe import build, buildable
from fusion.language import Refused
from fusion.language.ranges import is_covered
from fusion.operators import unchecked
from fusion.planning.plan_json import frozen
from fusion.planning.symbolic_sizes import SizeNodes
from fusion.records import Input, Output, Step, outputs_of


class Recorder(FakesMode):
    """Records every operator that runs inside it, with tensors as references.

    `ran` is what calls gave to earlier recordings, which ask the same of the same fakes again.
    """

    def __init__(self, inputs: Mapping[str, torch.Tensor], ran: Ran) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._ran = ran
        self._names: dict[int, Input | Output] = {id(tensor): Input(name) for name, tensor in inputs.items()}
        self._kept: list[Any] = list(inputs.values())  # an identity is unique only while its tensor lives

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator and record it."""
        named = dict(kwargs or {})
        result = self._result(func, args, named)
        if not any(isinstance(each, torch.Tensor) for each in leaves(result)):
            return result  # a size or a device: known, nothing to replay
        number = len(self.steps)
        self._kept.append(result)
        for output, tensor in outputs_of(number, result):
            self._names.setdefault(id(tensor), output)
        given, named = map_only(torch.Tensor, self.name, (_completed(func, args), named))
        self.steps.append(Step(func, given, named, result, is_covered()))
        return result

    def _result(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What a call gives; of two equal ones in this recording each its own."""
        call = func, _told(args), _told(kwargs)
        if call in self._ran and not any(id(each) in self._names for each in leaves(self._ran[call][1])):
            return self._ran[call][1]
        result = run_on_fakes(func, args, kwargs)
        if not schema_of(func).is_mutable:
            self._ran[call] = (args, kwargs), result
        return result

    def name(self, tensor: torch.Tensor) -> Input | Output:
        """The reference of a tensor that went in or came out.

        Raises:
            Refused: the tensor comes from elsewhere.
        """
        if id(tensor) not in self._names:
            raise Refused("its lowering uses a tensor that is not one of its captures", {})
        return self._names[id(tensor)]


Ran = dict[Hashable, tuple[Any, Any]]
"""Calls on fakes by operator and arguments: the arguments, whose identities are unique only while they live; result."""


def _told(argument: Any) -> Hashable:
    """An argument as one of the same call: tensors are themselves, and no others that look like them."""
    match argument:
        case torch.Tensor():
            return id(argument)
        case list() | tuple():
            return tuple(map(_told, argument))
        case dict():
            return tuple((name, _told(each)) for name, each in argument.items())
        case _:
            return frozen(argument)


def _completed(func: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Fill in what the dispatcher left out: defaults of fused operators differ between operators and versions."""
    return args if func.namespace in ("aten", "prims") else (*args, *_defaults(func, len(args)))


@cache
def _defaults(func: OpOverload, given: int) -> tuple[Any, ...]:
    """The default values of the arguments behind so many."""
    return tuple(each.default_value for each in schema_of(func).arguments[given:] if not each.kwarg_only)


class Recipe(NamedTuple):
    """The calls that build a value from its arguments, the inputs, by number: a reshape may have to copy."""

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
        """The size that a dim stands for.

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
        """A fake tensor with the metadata that `value` has, or will have once its recipe has built it.

        Raises:
            Refused: neither a node nor a recipe gives the value.
        """
        if value not in self._known:
            node = self._graph.node(value)
            self._known[value] = node.meta["val"] if node is not None else self._built(value)
        return self._known[value]

    def _built(self, value: Value) -> torch.Tensor:
        recipe = self._graph.recipe(value)
        if not buildable(recipe):
            raise Refused("it needs a value ({op}) that the graph does not hold", {"op": value.op})
        self._recipes[value] = self._run_recipe(recipe, [self.of(arg) for arg in recipe.args])
        return self._recipes[value].fake

    def _run_recipe(self, recipe: Value, args: Sequence[torch.Tensor]) -> Recipe:
        inputs = {str(number): each for number, each in enumerate(args)}
        recorder, fake = self.record(lambda given: build(recipe, self.size, *given.values()), inputs)
        return Recipe(recorder.steps, recorder.name(fake), inputs, fake)

    def recipe(self, value: Value, args: Sequence[torch.Tensor] | None = None) -> Recipe:
        """The calls that build `value`, which no node holds, from its arguments, or from `args` that lie otherwise.

        Raises:
            Refused: neither a node nor a recipe gives the value.
        """
        self.of(value)
        known = self._recipes[value]
        if args is None or _strides(args) == _strides(known.inputs.values()):
            return known
        return self._run_recipe(self._graph.recipe(value), args)

    def record(
        self, function: Callable[[Mapping[str, torch.Tensor]], Any], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[Recorder, Any]:
        """Run `function` of `inputs` on fakes; return what it called and its result.

        Raises:
            Refused: a call takes a symbolic size that no node of the graph holds, nor can; or it depends on one what
                is called.
        """
        apart = dict(zip(inputs, told_apart(inputs.values()), strict=True))
        recorder = Recorder(apart, self._ran)
        try:
            # Unchecked: limits are asked for each target once the calls are known.
            with (
                without_guards(self._mode),
                self._mode,
                torch.no_grad(),
                without_view_tracking(),
                unchecked(),
                recorder,
            ):
                result = function(apart)
        except SizeAskedError as asked:
            raise Refused("it would hold for some symbolic sizes alone: {asked}", {"asked": asked}) from None
        for dim in self._computed_sizes(recorder.steps):
            if not self._sizes.can_make(dim):
                raise Refused("the symbolic size {dim} is not among the sizes of the graph", {"dim": dim})
        return recorder, result

    def _computed_sizes(self, steps: Sequence[Step]) -> Iterator[Dim]:
        """The symbolic sizes that calls take."""
        for step in steps if self._symbols else ():
            yield from (dim_of(each) for each in leaves(step.args, step.kwargs) if isinstance(each, torch.SymInt))

    @cached_property
    def _sizes(self) -> SizeNodes:
        return SizeNodes(self._graph.source)

    def run(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
        """The fake result of one call, or what the error says that it raises: the same for equal calls."""
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
        """A fresh fake with this metadata."""
        if isinstance(self._mode, FakeTensorMode):
            return fake_tensor(self._mode, shape, stride, dtype, device)
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def like(self, val: Any) -> Any:
        """Fresh fakes with the metadata of `val`: nodes that shared a fake would look like aliases of each other."""
        return map_only(torch.Tensor, fake_like, val)


def _strides(tensors: Iterable[torch.Tensor]) -> list[tuple[Dim, ...]]:
    return [dims_of(each.stride()) for each in tensors]
