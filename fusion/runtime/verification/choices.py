"""Choices: calls whose result jumps at small changes of their input, as a top-k, a comparison or a rounding to int8.

Two correct graphs may choose differently, and all later results differ then. So they are compared in two ways:

    Steady              in float64, each choice among equals is made alike: the first is taken, a half is a half
    Recorded, Replayed  a graph runs in its own dtype, and again in float64 with the recorded choices, which rounding
                        must explain: the remaining difference between both runs is rounding alone

Fused operators run by their decompositions, whose choices are included. Bodies of cond and the like are not entered.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fusion import operators
from fusion._torch.fakes import TorchDispatchMode
from fusion._torch.nested import leaves
from fusion._torch.operators import OpOverload, arguments_of, short_name
from fusion.graph.aliasing import memory_of, written_by
from fusion.graph.origin import place_of
from fusion.runtime.verification.numbers import TOLERANCE

aten = torch.ops.aten

_LISTS = frozenset({"topk", "sort", "max", "min", "kthvalue", "median"})
_PLACES = frozenset({"argmax", "argmin"})
_STEPS = frozenset({"round", "floor", "ceil", "trunc"})
_CASTS = frozenset({"_to_copy", "convert_element_type"})
_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})
_INDICES = frozenset({torch.int32, torch.int64})
_COMPARISONS = frozenset({"gt", "ge", "lt", "le", "eq", "ne"})


_GRAIN = 2.0**-30
"""Relative distance up to which numbers of two float64 runs are equal."""


@dataclass(frozen=True)
class Choice:
    """A call that chooses.

    Attributes:
        kind: "list" for values with their indices, "place" for indices alone, "step" for a rounding to integers,
            "comparison", or "bits" for floats whose memory is viewed as integers.
        target: the operator.
        args, kwargs: its arguments; the first is the tensor to choose from.
    """

    kind: str
    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def x(self) -> Tensor:
        """The tensor to choose from."""
        return self.args[0]

    @property
    def given(self) -> dict[str, Any]:
        """All arguments by name."""
        return arguments_of(self.target, self.args, self.kwargs)

    def on(self, x: Tensor) -> Any:
        """Make the call on other numbers `x`; lists have the first of equal numbers first."""
        given = self.given
        match short_name(self.target):
            case "topk":
                order = x.sort(dim=given["dim"], descending=given["largest"], stable=True)[1]
                return None, order.narrow(given["dim"], 0, given["k"]).contiguous()
            case "sort":
                return x.sort(dim=given["dim"], descending=given["descending"], stable=True)
            case _:
                return self.target(x, *self.args[1:], **self.kwargs)

    def values(self, indices: Tensor) -> Tensor:
        """Gather the numbers at the indices of a list, in the shape of the list."""
        dim = self.given["dim"]
        if indices.dim() == self.x.dim():
            return self.x.gather(dim, indices)
        return self.x.gather(dim, indices.unsqueeze(dim)).squeeze(dim)


class Choices(TorchDispatchMode):
    """Dispatch mode that passes the choosing calls of a graph to `choose`.

    Attributes:
        node: the node that is being run.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.node: fx.Node | None = None
        self._inside = operators.decompositions()

    def at(self, node: fx.Node) -> None:
        """Record the node that is about to run."""
        self.node = node

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in self._inside:
            with self:
                return self._inside[func](*args, **(kwargs or {}))
        kind = _kind(func, args, kwargs or {})
        return self.choose(Choice(kind, func, args, kwargs or {})) if kind else func(*args, **(kwargs or {}))

    def choose(self, choice: Choice) -> Any:
        """Return the results of the call `choice`, in place of those that the operator would give."""
        raise NotImplementedError


@dataclass(frozen=True)
class Moved:
    """A choice of a graph that differs from the one that float64 would make of the same numbers.

    Attributes: node: the node of the graph that makes the choice. target: the operator that chooses. is_tie: True if
    only equal numbers are exchanged. is_explained: True if rounding explains the choice: all exchanged numbers are
    equal, or closer than the dtype resolves.
    """

    node: fx.Node | None
    target: OpOverload
    is_tie: bool
    is_explained: bool

    def __str__(self) -> str:
        """Format kind, operator and place: "a tie in topk in layers.1.mlp at model.py:12"."""
        place = "" if self.node is None else f" {place_of(self.node)}"
        return f"{'a tie' if self.is_tie else 'rounding'} in {short_name(self.target)}{place}"


class Steady(Choices):
    """Choices of float64 runs of `graph` that treat numbers as equal if they are equal up to rounding.

    Numbers that a graph computes in float64 itself must be equal but for their last bits.

    Attributes:
        sizes: the numbers of entries of the lists that were chosen.
        lists: the integer tensors that the graph has computed, of as many entries as a list of another run.
        moved: the lists that were taken from another run.
    """

    def __init__(self, graph: fx.Graph, wanted: Collection[int] = (), others: Sequence[Tensor] = ()) -> None:
        """Prepare a run of `graph` that collects its integer tensors with as many entries as one of `wanted`.

        A list among `others`, of another run, replaces a list of this run where both name equal numbers.
        """
        super().__init__()
        self._coarsest = coarsest_dtypes(graph)
        self._wanted, self._others = wanted, others
        self.sizes: set[int] = set()
        self.lists: list[Tensor] = []
        self.moved: list[Moved] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        tensors = (each for each in leaves(made) if isinstance(each, Tensor) and each.dtype in _INDICES)
        self.lists.extend(each for each in tensors if each.numel() in self._wanted)
        return made

    def choose(self, choice: Choice) -> Any:
        """Make `choice` on rounded numbers: a list or place by ranks, of which equal numbers have one, a step after
        snapping to integers and halves.

        Comparisons and bits are made as they are.
        """
        dtype = torch.float32 if self.node is None else self._coarsest[self.node.name]
        grain = 2.0**-48 if dtype == torch.float64 else _GRAIN
        match choice.kind:
            case "list":
                indices = self._list(choice, grain)
                return choice.values(indices), indices
            case "place":
                return choice.on(_ranks(choice.x, choice.given["dim"], grain))
            case "step":
                return choice.on(_snapped(choice.x, short_name(choice.target) == "round", grain))
            case _:
                return choice.target(*choice.args, **choice.kwargs)

    def _list(self, choice: Choice, grain: float) -> Tensor:
        """Return the indices of the list `choice`, made by ranks of numbers that are equal up to `grain`.

        They are those of a list of another run of as many entries, if that names numbers of the same ranks.
        """
        dim = choice.given["dim"]
        ranks = _ranks(choice.x, dim, grain)
        own = choice.on(ranks)[1]
        self.sizes.add(own.numel())
        for other in (each for each in self._others if each.numel() == own.numel()):
            indices = other.reshape(own.shape).to(own)
            inside = bool(((indices >= 0) & (indices < ranks.shape[dim])).all())
            ranked = replace(choice, args=(ranks, *choice.args[1:]))
            if inside and not torch.equal(indices, own) and torch.equal(ranked.values(indices), ranked.values(own)):
                self.moved.append(Moved(self.node, choice.target, is_tie=True, is_explained=True))
                return indices
        return own


class Recorded(Choices):
    """Choices that are recorded.

    Attributes:
        made: the results, in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def choose(self, choice: Choice) -> Any:
        """Make a choice and record it."""
        made = choice.target(*choice.args, **choice.kwargs)
        self.made.append(made)
        return made


class Replayed(Choices):
    """Recorded choices, replayed in a float64 run of `graph`.

    Attributes:
        moved: the choices that float64 would make differently.
    """

    def __init__(self, graph: fx.Graph, made: Sequence[Any]) -> None:
        super().__init__()
        self._coarsest, self._made = coarsest_dtypes(graph), iter(made)
        self.moved: list[Moved] = []

    def choose(self, choice: Choice) -> Any:
        """Return what the narrow run chose, and add to `moved` what float64 would choose otherwise of the numbers of
        this run.

        Of a list the recorded indices count: the numbers at these are returned.
        """
        assert self.node is not None
        dtype = self._coarsest[self.node.name]
        eps = torch.finfo(dtype).eps
        if choice.kind == "list":
            values, indices = (each.to(choice.x.device) for each in next(self._made))
            result: Any = (choice.values(indices), indices)
            other, apart, far = _compared_lists(choice, values, indices, dtype)
        else:
            own = choice.target(*choice.args, **choice.kwargs)
            result = next(self._made).to(own)
            other = apart = result != own
            far = _FAR[choice.kind](choice, result, own, eps)
        if other.any():
            apart_too, strange = (bool((other & each).any()) for each in (apart, far))
            self.moved.append(Moved(self.node, choice.target, not apart_too, not strange))
        return result


def coarsest_dtypes(source: fx.Graph) -> dict[str, torch.dtype]:
    """Return, by the name of each node, the coarsest floating dtype that it is computed in or from, float64 for none.

    The dtype of an input to which the graph writes includes the writes.
    """
    coarsest: dict[fx.Node, torch.dtype] = {}
    for node in source.nodes:
        own = [val.dtype for val in leaves(node.meta.get("val")) if isinstance(val, Tensor) and val.dtype in TOLERANCE]
        read = [coarsest[each] for each in node.all_input_nodes]
        coarsest[node] = max((*own, *read), key=_eps, default=torch.float64)
        for memory in map(memory_of, written_by(node)):
            coarsest[memory] = max(coarsest[memory], coarsest[node], key=_eps)
    return {node.name: dtype for node, dtype in coarsest.items()}


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _compared_lists(
    choice: Choice, values: Tensor, indices: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare the recorded list `choice`, `values` at `indices`, with that of float64: return three masks of rows.

    They are True where a row has other indices, where it has other numbers, and where it has numbers that are not
    close. Numbers are close if their gap is 4 eps of the largest, or within the rounding of the narrow `values` of
    `dtype`.
    """
    dim = choice.given["dim"]
    own = choice.on(choice.x)[1]
    taken, best = choice.values(indices), choice.values(own)
    noise = _finite(values.double() - taken).abs()
    if not choice.given.get("sorted", True):
        taken, best = taken.sort(dim=dim)[0], best.sort(dim=dim)[0]
    if indices.dim() < choice.x.dim():
        own, indices, taken, best, noise = (each.unsqueeze(dim) for each in (own, indices, taken, best, noise))
    gap, largest = _gap(best, taken), _largest(choice.x, dim)
    limit = 4 * _eps(dtype) * largest + 2 * noise.amax(dim, keepdim=True).minimum(TOLERANCE[dtype] * largest)
    return (indices != own).any(dim), (gap > _GRAIN * largest).any(dim), (gap > limit).any(dim)


def _far_places(choice: Choice, made: Tensor, own: Tensor, eps: float) -> Tensor:
    """Return where the numbers at the recorded places `made` and at float64's `own` places differ by more than 4 `eps`
    of the largest.
    """
    dim, keep = choice.given["dim"], choice.given["keepdim"]
    x = choice.x.flatten() if dim is None else choice.x
    at = 0 if dim is None else dim
    taken, best = (each.reshape(1) if dim is None else each if keep else each.unsqueeze(at) for each in (made, own))
    far = _gap(x.gather(at, best), x.gather(at, taken)) > 4 * eps * _largest(x, at)
    return far.reshape(made.shape)


def _far_steps(choice: Choice, made: Tensor, own: Tensor, eps: float) -> Tensor:
    """Return where the recorded rounded numbers `made` differ from float64's `own` by more than a step and `_noise` of
    the input.

    A rounded number that is not finite is the result of an overflow before, which the results of the graph show.
    """
    return made.isfinite() & (_gap(made.double(), own.double()) > 1 + _noise(choice.x, eps))


def _far_comparisons(choice: Choice, made: Tensor, own: Tensor, eps: float) -> Tensor:
    """Return where the two sides of the comparison `choice` differ by more than `_noise`; its results are not read."""
    other = torch.as_tensor(choice.args[1], device=choice.x.device)
    return _gap(choice.x.double(), other.double()) > _noise(choice.x, eps)


def _far_bits(choice: Choice, made: Tensor, own: Tensor, eps: float) -> Tensor:
    """Return where the floats whose bits are `made`, as recorded, and `own`, of float64, differ by more than `_noise`.

    Integers narrower than the floats get the result of the float that they are a part of.
    """
    taken, best = (each.view(choice.x.dtype).double() for each in (made, own))
    far = _gap(taken, best) > _noise(best, eps)
    return far.repeat_interleave(made.shape[-1] // far.shape[-1], -1)


def _noise(x: Tensor, eps: float) -> Tensor:
    """Return how far rounding may move any number of `x`: 8 `eps` of the largest, as each may be computed from such
    numbers.
    """
    return 8 * eps * _finite(x.double()).abs().max()


_FAR = {"place": _far_places, "step": _far_steps, "comparison": _far_comparisons, "bits": _far_bits}


def _kind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Classify a call on floats as `Choice.kind`; "" where it chooses nothing."""
    if not args or not isinstance(args[0], Tensor) or not (args[0].is_floating_point() and args[0].numel()):
        return ""
    name = short_name(target)
    if name in _LISTS:
        return "list" if "dim" in arguments_of(target, args, kwargs) else ""
    if name in _CASTS:
        return "step" if arguments_of(target, args, kwargs)["dtype"] in _INTEGERS else ""
    if name == "view":
        return "bits" if arguments_of(target, args, kwargs).get("dtype") in _INTEGERS else ""
    kinds = {"place": _PLACES, "step": _STEPS, "comparison": _COMPARISONS}
    return next((kind for kind, names in kinds.items() if name in names), "")


def _ranks(x: Tensor, dim: int | None, grain: float) -> Tensor:
    """Replace numbers by their ranks along `dim`, or among all; numbers that are equal up to `grain` share a rank."""
    if dim is None:
        return _ranks(x.flatten(), 0, grain).reshape(x.shape)
    values, order = x.double().sort(dim=dim, stable=True)
    low, high = values.narrow(dim, 0, x.shape[dim] - 1), values.narrow(dim, 1, x.shape[dim] - 1)
    higher = _gap(low, high) > grain * _finite(torch.maximum(low.abs(), high.abs()))
    ranks = torch.zeros_like(values)
    ranks.narrow(dim, 1, x.shape[dim] - 1).copy_(higher.cumsum(dim))
    return ranks.scatter(dim, order, ranks.clone())


def _snapped(x: Tensor, halves: bool, grain: float) -> Tensor:
    """Round numbers that are within `grain` of an integer (or of half of one, with `halves`) to it."""
    step = x.floor() + 0.5 if halves else x.round()
    return torch.where((x - step).abs() <= grain * x.abs().clamp_min(1.0), step, x)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def _largest(x: Tensor, dim: int) -> Tensor:
    return _finite(x).abs().amax(dim, keepdim=True)


def _gap(x: Tensor, y: Tensor) -> Tensor:
    """Return |x - y| elementwise: 0 for equal infinities, infinity for NaN and other infinities."""
    return torch.where(x == y, 0.0, x - y).abs().nan_to_num(torch.inf, torch.inf)
