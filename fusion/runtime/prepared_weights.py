"""Prepared weights at run time: tensors computed from the Parameters of a call, shared by graphs.

Every call looks prepared tensors up by the identity of its Parameters. Parameters that are joined become views of the
result where nobody else reads their memory (`fusion.runtime.joined_parameters`). A copy is computed again, in place,
when a change of a Parameter is detected: by its version, its address or, on the host, by samples of its elements.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.fx.immutable_collections import immutable_dict

from fusion._torch.memory import forget_freed, samples, stamps
from fusion._torch.tensors import byte_count, shares_memory
from fusion._torch.tracing import Boxed, dynamo_position, extended
from fusion.errors import OptionError
from fusion.records import Prepared
from fusion.runtime.joined_parameters import SHARED, Block, forget_moved, is_shared, obstacle, run_of

Ids = tuple[int, ...]
TWICE = "one Parameter stands in it twice"
_LOCK = RLock()  # guards all prepared tensors: graphs are called from several threads
SAMPLED = "cpu"  # on other devices, reading samples would synchronise the device


@dataclass(frozen=True, eq=False)
class _Look:
    """Stamps and samples of Parameters, taken when something was prepared from them.

    Attributes:
        stamps: addresses and versions of the Parameters.
        samples: elements of the copied Parameters, as views, which keep their addresses from being reused.
        on_host: the samples on the host, which can be compared at every call.
        contents: the contents of `on_host` at that time; None for no samples.
        waiting: numbers of the Parameters that another tensor keeps from becoming views.
    """

    stamps: tuple[list[int], list[int]]
    samples: list[Tensor]
    on_host: list[Tensor]
    contents: Tensor | None
    waiting: list[int]

    @staticmethod
    def take(parameters: Sequence[Tensor], copied: Sequence[str]) -> _Look:
        """Take stamps and samples of Parameters; `copied` is the reason why each was copied, "" for a view."""
        with torch.no_grad():
            taken = [samples(each) for each, why in zip(parameters, copied, strict=True) if why]
            on_host = [each for each in taken if each.device.type == SAMPLED]
            contents = torch.cat(on_host) if on_host else None
        waiting = [number for number, why in enumerate(copied) if why == SHARED]
        return _Look(stamps(parameters), taken, on_host, contents, waiting)

    def is_still(self, parameters: Sequence[Tensor]) -> bool:
        """Return True if no write to a Parameter shows, and none can now become a view that could not before."""
        if self.stamps != stamps(parameters):
            return False
        if self.contents is not None and not torch.equal(torch.cat(self.on_host), self.contents):
            return False
        return all(is_shared(parameters[number]) for number in self.waiting)


@dataclass(eq=False)
class _Entry:
    """One prepared tensor, for one set of Parameters.

    Attributes:
        kinds: shape, dtype and device of each Parameter.
        watches: weak references, which drop the entry when a Parameter dies.
        tensor: the tensor that graphs read.
        block: the memory of which Parameters are views, and the number of the first of them; None for a copy.
        copied: for each Parameter the reason why `tensor` has a copy of it, "" where the Parameter is a view.
        look: stamps and samples of the Parameters; None where the tensor must be computed again.
    """

    kinds: list[Any]
    watches: list[weakref.ref[Tensor]]
    tensor: Tensor = field(init=False)
    block: tuple[Block, int] | None = None
    copied: list[str] = field(default_factory=list[str])
    look: _Look | None = None


@dataclass(eq=False)
class _Recipe:
    """One computation of a tensor from Parameters, and the tensors for each set of live Parameters.

    Attributes:
        module: the computation.
        shape: shape of the tensor.
        stride: strides of the tensor.
        copied: the reason why Parameters cannot become views of it, "" where they can.
        entries: the tensors, by the ids of the Parameters.
    """

    module: fx.GraphModule
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    copied: str
    entries: dict[Ids, _Entry] = field(default_factory=dict[Ids, _Entry])

    def entry(self, parameters: Sequence[Tensor]) -> _Entry:
        """Return the tensor that is prepared from `parameters`, up to date."""
        ids = tuple(map(id, parameters))
        entry = self.entries.get(ids) or self._added(ids, parameters)
        if entry.look is None or not entry.look.is_still(parameters):
            with torch.inference_mode(False), torch.no_grad():
                if self.copied or len(set(ids)) < len(ids):
                    entry.copied = self._copy(entry, parameters)
                else:
                    entry.copied = self._join(entry, parameters)
            entry.look = _Look.take(parameters, entry.copied)
        return entry

    def _added(self, ids: Ids, parameters: Sequence[Tensor]) -> _Entry:
        if not self.entries:
            _forget_outdated()
        forget = partial(_forget, weakref.ref(self), ids)
        watches = [weakref.ref(each, forget) for each in parameters]
        entry = self.entries[ids] = _Entry(list(map(_kind, parameters)), watches)
        return entry

    def _copy(self, entry: _Entry, parameters: Sequence[Tensor]) -> list[str]:
        """Compute the tensor of `entry` from `parameters`, at the same address from the second time on, which captured
        graphs read.

        Returns the reason of the copy for each Parameter.
        """
        fresh = self.computed(parameters)
        if any(shares_memory(fresh, each) for each in parameters):
            entry.tensor = fresh  # a computation without effect returns the Parameter itself
            return [""] * len(parameters)
        if any(entry.copied):
            entry.tensor.copy_(fresh)
        else:
            entry.tensor = fresh
        return [self.copied or TWICE] * len(parameters)

    def computed(self, parameters: Sequence[Tensor]) -> Tensor:
        """Compute the tensor from `parameters`, in memory of its own unless nothing has to be computed."""
        result = self.module.forward(*parameters)
        if result.stride() == self.stride:
            return result
        return torch.empty_strided(self.shape, self.stride, dtype=result.dtype, device=result.device).copy_(result)

    def _join(self, entry: _Entry, parameters: Sequence[Tensor]) -> list[str]:
        """Write the Parameters into a block and make them views of the block, unless another tensor reads their memory.

        A part that another tensor still reads is not overwritten: that may be the backup of a Parameter, to be
        restored. The Parameters move to another block instead. Returns the reason for each Parameter that stays where
        it is, else "".
        """
        block, first = entry.block or run_of(parameters) or (Block.allocate(parameters), 0)
        left = None
        if any(not block.has(each, at) and block.is_read_outside(at) for at, each in enumerate(parameters, first)):
            left, block, first = block, Block.allocate(parameters), 0
            left.readers.discard(entry)
        entry.tensor, entry.block = block.view(first, len(parameters), self.shape), (block, first)
        block.readers.add(entry)
        return block.update(parameters, first, left)


@dataclass(frozen=True, eq=False)
class _Known:
    """Prepared tensors of one graph for one set of Parameters, and the look of these at the last update."""

    tensors: list[Tensor]
    look: _Look


@dataclass(frozen=True)
class Need:
    """One prepared tensor of a graph.

    Attributes:
        prepared: the record of its computation.
        shape: shape of the tensor.
        stride: strides of the tensor.
        dtype: dtype of the tensor.
        device: device of the tensor.
        numbers: which of the Parameters of the graph it is computed from.
    """

    prepared: Prepared
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numbers: list[int]

    @staticmethod
    def of(prepared: Prepared, val: Tensor, numbers: list[int]) -> Need:
        """Return the need of a tensor like `val`."""
        return Need(prepared, tuple(val.shape), tuple(val.stride()), val.dtype, val.device, numbers)


def needs_of(prepared: Sequence[Prepared], source: fx.Graph) -> tuple[list[str], list[Need]]:
    """Return the names of the inputs of `source` that `prepared` is computed from, in order, and a need of each."""
    vals = {node.name: node.meta["val"] for node in source.find_nodes(op="placeholder")}
    read = {name for each in prepared for name in each.sources}
    numbers = {name: number for number, name in enumerate(name for name in vals if name in read)}
    needs = [Need.of(each, vals[each.name], [numbers[at] for at in each.sources]) for each in prepared]
    return list(numbers), needs


@dataclass(eq=False)
class Supply:
    """The prepared tensors of one compiled graph.

    Attributes:
        places: positions of its Parameters among its other inputs.
        paths: their paths in the model.
        needs: for each prepared input its recipe and the numbers of its Parameters.
        known: the prepared tensors by the ids of all Parameters of the graph: one comparison for all of them is much
            faster than one for each tensor.
        warned: the reasons for copies that were warned of.
    """

    places: list[int]
    paths: list[str]
    needs: list[tuple[_Recipe, list[int]]]
    known: dict[Ids, _Known] = field(default_factory=dict[Ids, _Known])
    warned: set[str] = field(default_factory=set[str])

    @staticmethod
    def of(places: Sequence[int], paths: Sequence[str], needs: Sequence[Need]) -> Supply:
        """Return the supply of a graph for `needs`, whose tensors other graphs share."""
        supplied = Supply(list(places), list(paths), [(_recipe(each), each.numbers) for each in needs])
        _SUPPLIES.add(supplied)
        return supplied

    def __call__(self, values: Sequence[Any]) -> list[Tensor]:
        """Return the prepared tensors for the Parameters among `values`."""
        parameters: list[Tensor] = [values[place] for place in self.places]
        ids = tuple(map(id, parameters))
        known = self.known.get(ids)
        if known is None or not known.look.is_still(parameters):
            with _LOCK:
                known = self.known[ids] = self._looked_up(parameters)
        return known.tensors

    def _looked_up(self, parameters: Sequence[Tensor]) -> _Known:
        entries = [recipe.entry([parameters[number] for number in numbers]) for recipe, numbers in self.needs]
        copied, stuck = [""] * len(parameters), dict[str, list[int]]()
        for entry, (recipe, numbers) in zip(entries, self.needs, strict=True):
            for number, why in zip(numbers, entry.copied, strict=True):
                copied[number] = why or copied[number]
                if why and not recipe.copied:
                    stuck.setdefault(why, []).append(number)
        for why in stuck.keys() - self.warned:
            self._warn(why, [self.paths[number] for number in stuck[why]])
        _warn_of_writes([each for each, why in zip(parameters, copied, strict=True) if why])
        return _Known([entry.tensor for entry in entries], _Look.take(parameters, copied))

    def _warn(self, why: str, paths: Sequence[str]) -> None:
        """Warn, once for each reason `why`, that the Parameters at `paths` stay where they are."""
        self.warned.add(why)
        several = f"{', '.join(paths[:3])} and {len(paths) - 3} more" if len(paths) > 3 else ", ".join(paths)
        warnings.warn(
            f"{several}: {why}; joined weights take over only memory that nobody else reads. So these Parameters are "
            "held twice, and their copies are brought up to date where a change shows (docs/prepared.md).",
            stacklevel=2,
        )


_RECIPES: weakref.WeakValueDictionary[str, _Recipe] = (
    weakref.WeakValueDictionary()
)  # alive as long as a graph refers to it
_SUPPLIES: weakref.WeakSet[Supply] = weakref.WeakSet()
_WARNED: set[str] = set()  # device types


def supply(
    run: Boxed, source: fx.Graph, prepared: Sequence[Prepared], paths: Mapping[str, str] = immutable_dict()
) -> Boxed:
    """Return `run`, the compiled form of `source`, as a callable without the prepared inputs.

    `paths` maps the inputs with Parameters to their paths in the model.
    """
    if not prepared:
        return run
    names, needs = needs_of(prepared, source)
    places = {node.name: place for place, node in enumerate(source.find_nodes(op="placeholder"))}
    supplied = Supply.of([places[name] for name in names], [paths.get(name, name) for name in names], needs)
    return extended(run, supplied)


def obstacles(inputs: Sequence[Any]) -> list[str]:
    """Return for each input of a Dynamo graph the reason why it is a Parameter that cannot become a view, or ""."""
    return [obstacle(each) if isinstance(each, nn.Parameter) else "" for each in inputs]


def foreseen(prepared: Sequence[Prepared], source: fx.Graph, stuck: Sequence[str]) -> tuple[Prepared, ...]:
    """Predict the records `prepared` of the tensors for the graph `source` after the first call.

    `stuck` has the `obstacles` of Dynamo's inputs: a tensor that such Parameters should be views of copies them
    instead.
    """
    placeholders = source.find_nodes(op="placeholder")
    positions = {node.name: at for node in placeholders if (at := dynamo_position(node)) is not None}
    vals = {node.name: node.meta["val"] for node in placeholders}
    records: list[Prepared] = []
    for each in prepared:
        left = {name: why for name in each.sources if (why := stuck[positions[name]])} if each.joined else {}
        size = sum(byte_count(vals[name]) for name in left)
        records.append(replace(each, copied=next(iter(left.values())), size=size) if left else each)
    return tuple(records)


def refresh(model_or_parameters: nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Drop the tensors prepared from these Parameters: they are computed again when a compiled graph next needs them.

    Needed only for copies, and for writes that change none of these: the version of the Parameter (in place under
    `no_grad`, `load_state_dict`), its address (`.to(...)`, `weight.data = other`), and, on the host, one of its
    samples, one in each 1/64 of its elements (`weight.data.add_(...)`, NumPy).

    Raises:
        OptionError: something else is given than a module or tensors.
    """
    given: Any = model_or_parameters
    if isinstance(given, nn.Module):
        given = given.parameters()
    tensors = [given] if isinstance(given, Tensor) else list(given) if isinstance(given, Iterable) else [given]
    for each in tensors:
        if not isinstance(each, Tensor):
            kind = type(each).__name__
            raise OptionError(f"refreshing prepared weights: a {kind} is no Parameter; give the model, or Parameters")
    written = set(map(id, tensors))
    with _LOCK:
        for recipe in list(_RECIPES.values()):
            for ids, entry in list(recipe.entries.items()):
                if not written.isdisjoint(ids):
                    entry.look = None
        _look_again()


def _recipe(need: Need) -> _Recipe:
    made = _Recipe(need.prepared.module, need.shape, need.stride, need.prepared.copied)
    return _RECIPES.setdefault(need.prepared.key, made)


def _forget(recipe: weakref.ref[_Recipe], ids: Ids, _: Any) -> None:
    """Drop the tensor that `recipe` has prepared from the Parameters `ids`, one of which has died: its id may be
    reused.
    """
    alive = recipe()
    if alive is not None:
        alive.entries.pop(ids, None)
    _look_again()


def _forget_outdated() -> None:
    """Drop the tensors prepared from Parameters that have moved to another dtype or device: no graph reads them."""
    for recipe in list(_RECIPES.values()):
        for ids, entry in list(recipe.entries.items()):
            parameters = [watch() for watch in entry.watches]
            if any(each is None or _kind(each) != kind for each, kind in zip(parameters, entry.kinds, strict=True)):
                recipe.entries.pop(ids, None)
    forget_moved()
    forget_freed()
    _look_again()


def _look_again() -> None:
    """Clear the memoised lookups of all graphs: each looks up its prepared tensors at its next call."""
    for each in list(_SUPPLIES):
        each.known.clear()


def _kind(parameter: Tensor) -> Any:
    return parameter.shape, parameter.dtype, parameter.device


def _warn_of_writes(copied: Sequence[Tensor]) -> None:
    """Warn, once for each kind of device, that some writes to copied Parameters cannot be detected there."""
    for device in {each.device.type for each in copied} - _WARNED - {SAMPLED}:
        _WARNED.add(device)
        warnings.warn(
            f"prepared weights on {device}: some are copies of Parameters, and to look for writes that bump no version "
            "(through .data, or another tensor on the memory) the host would have to wait for the device; call "
            "fusion.refresh(model) after such a write. print(fusion.explain(...)) lists the copies.",
            stacklevel=2,
        )
