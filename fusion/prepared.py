"""Prepared weights at run time: (what is computed, from which Parameters of this call) → one tensor, shared by graphs.

What a graph needs is looked up at every call by the very Parameters that were passed. One that was written to since, or
lies elsewhere, is noticed by its version and address, and what was prepared from it is computed again, in place.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from fusion._torch.tensors import is_alone, stamps
from fusion._torch.tracing import Boxed, extended
from fusion.records import Prepared

Ids = tuple[int, ...]


@dataclass(eq=False)
class _Entry:
    """One prepared tensor.

    Attributes:
        tensor: what graphs read.
        joined: whether the Parameters are views of it.
        stamps: addresses and versions of the Parameters when it was prepared; None once it is to be prepared again.
        kinds: shape, dtype and device of each Parameter then.
        watches: tell when a Parameter dies.
    """

    tensor: Tensor
    joined: bool
    stamps: tuple[list[int], list[int]] | None
    kinds: list[Any]
    watches: list[weakref.ref[Tensor]]


@dataclass(eq=False)
class _Recipe:
    """One way to compute a tensor from Parameters, and what was computed for each set of them that is alive."""

    module: fx.GraphModule
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    joined: bool
    entries: dict[Ids, _Entry] = field(default_factory=dict[Ids, _Entry])

    def entry(self, parameters: Sequence[Tensor]) -> _Entry:
        """What is prepared from these Parameters, up to date."""
        entry = self.entries.get(tuple(map(id, parameters)))
        if entry is None:
            return self._first(parameters)
        if entry.stamps != stamps(parameters):
            self._again(entry, parameters)
        return entry

    def _first(self, parameters: Sequence[Tensor]) -> _Entry:
        if not self.entries:
            _forget_outdated()
        tensor, joined = self._made(parameters)
        ids = tuple(map(id, parameters))
        forget = partial(_forget, weakref.ref(self), ids)
        watches = [weakref.ref(each, forget) for each in parameters]
        entry = _Entry(tensor, joined, stamps(parameters), list(map(_kind, parameters)), watches)
        self.entries[ids] = entry
        return entry

    def _again(self, entry: _Entry, parameters: Sequence[Tensor]) -> None:
        """Bring an entry up to date, at its own address where that is nobody else's: captured graphs read there."""
        if not entry.joined:
            self._renew(entry, parameters)
        elif not _lie_at(entry.tensor.data_ptr(), parameters):
            # Someone may keep what a Parameter was before, to put it back: its memory is not written to.
            entry.tensor, entry.joined = self._made(parameters)
        entry.stamps = stamps(parameters)

    def _made(self, parameters: Sequence[Tensor]) -> tuple[Tensor, bool]:
        """A tensor for these Parameters, and whether they are views of it now."""
        with torch.inference_mode(False), torch.no_grad():
            if not self.joined:
                return self._computed(parameters), False
            if _lie_at(parameters[0].data_ptr(), parameters):
                return parameters[0].detach().as_strided(self.shape, self.stride), True
            joined = _can_move(parameters)
            tensor = self._computed(parameters)
            if joined:
                _move_into(tensor, parameters)
            return tensor, joined

    def _renew(self, entry: _Entry, parameters: Sequence[Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            fresh = self._computed(parameters)
            if _share_memory(fresh, parameters):
                entry.tensor = fresh  # not a copy: a computation that does nothing here gives the Parameter itself
            else:
                entry.tensor.copy_(fresh)

    def _computed(self, parameters: Sequence[Tensor]) -> Tensor:
        result = self.module.forward(*parameters)
        if result.stride() == self.stride:
            return result
        return torch.empty_strided(self.shape, self.stride, dtype=result.dtype, device=result.device).copy_(result)


@dataclass(eq=False)
class _Supply:
    """The prepared inputs of one compiled graph.

    Attributes:
        places: where its Parameters are among its other inputs.
        needs: how to compute each prepared input, and from which of these Parameters.
        known: what was found for Parameters that it was called with, and their stamps then: to look at all of them at
            once takes a fraction of the time.
    """

    places: list[int]
    needs: list[tuple[_Recipe, list[int]]]
    known: dict[Ids, tuple[tuple[list[int], list[int]], list[_Entry]]] = field(default_factory=dict[Any, Any])

    def __call__(self, values: Sequence[Any]) -> list[Tensor]:
        """The prepared tensors for the Parameters among `values`."""
        parameters = [values[place] for place in self.places]
        ids = tuple(map(id, parameters))
        found = self.known.get(ids)
        if found is None or found[0] != stamps(parameters):
            entries = [recipe.entry([parameters[number] for number in where]) for recipe, where in self.needs]
            found = self.known[ids] = stamps(parameters), entries
        return [entry.tensor for entry in found[1]]


_RECIPES: weakref.WeakValueDictionary[str, _Recipe] = weakref.WeakValueDictionary()  # alive as long as a graph has one
_SUPPLIES: weakref.WeakSet[_Supply] = weakref.WeakSet()


def supply(run: Boxed, source: fx.Graph, prepared: Sequence[Prepared]) -> Boxed:
    """`run`, the compiled form of `source`, as a callable that is called without the prepared inputs."""
    if not prepared:
        return run
    placeholders = source.find_nodes(op="placeholder")
    vals = {node.name: node.meta["val"] for node in placeholders}
    read = {name for each in prepared for name in each.sources}
    places = {node.name: place for place, node in enumerate(placeholders) if node.name in read}
    numbers = {name: number for number, name in enumerate(places)}
    needs = [(_recipe(each, vals[each.name]), [numbers[name] for name in each.sources]) for each in prepared]
    supplied = _Supply(list(places.values()), needs)
    _SUPPLIES.add(supplied)
    return extended(run, supplied)


def refresh(model_or_parameters: nn.Module | Tensor | Iterable[Tensor]) -> None:
    """Forget what was prepared from these Parameters: it is computed again when a compiled graph next needs it.

    Needed after writes that neither the address nor the version of a Parameter shows: in place through `.data`
    (`weight.data.add_(...)`, as some adapters merge themselves), through a NumPy array or another tensor that shares
    the memory, and in place to Parameters that were made under `torch.inference_mode`. All other writes are noticed:
    in place under `no_grad`, `load_state_dict`, `.to(...)`, `weight.data = other`.
    """
    if isinstance(model_or_parameters, nn.Module):
        model_or_parameters = model_or_parameters.parameters()
    given = [model_or_parameters] if isinstance(model_or_parameters, Tensor) else model_or_parameters
    written = set(map(id, given))
    for recipe in list(_RECIPES.values()):
        for ids, entry in list(recipe.entries.items()):
            if not written.isdisjoint(ids):
                entry.stamps = None
    _look_again()


def _recipe(prepared: Prepared, like: Tensor) -> _Recipe:
    made = _Recipe(prepared.module, tuple(like.shape), tuple(like.stride()), prepared.joined)
    return _RECIPES.setdefault(prepared.key, made)


def _forget(recipe: weakref.ref[_Recipe], ids: Ids, _: Any) -> None:
    """A Parameter died: its id may soon be another's."""
    alive = recipe()
    if alive is not None:
        alive.entries.pop(ids, None)
    _look_again()


def _forget_outdated() -> None:
    """Drop what was prepared from Parameters that have moved to another dtype or device: its graph cannot run again."""
    for recipe in list(_RECIPES.values()):
        for ids, entry in list(recipe.entries.items()):
            parameters = [watch() for watch in entry.watches]
            if any(each is None or _kind(each) != kind for each, kind in zip(parameters, entry.kinds, strict=True)):
                recipe.entries.pop(ids, None)
    _look_again()


def _look_again() -> None:
    """Let every graph look up at its next call what it needs."""
    for each in list(_SUPPLIES):
        each.known.clear()


def _kind(parameter: Tensor) -> Any:
    return parameter.shape, parameter.dtype, parameter.device


def _can_move(parameters: Sequence[Tensor]) -> bool:
    """Whether nobody else would notice that these Parameters move to other memory."""
    if all(is_alone(each) and not each.is_inference() for each in parameters):
        return True
    warnings.warn(
        f"prepack='replace' keeps a copy beside {len(parameters)} Parameters of shapes "
        f"{[list(each.shape) for each in parameters]}: they share their memory with other tensors, or were made "
        "under torch.inference_mode, so they cannot become views of what was joined from them.",
        stacklevel=2,
    )
    return False


def _lie_at(address: int, parameters: Sequence[Tensor]) -> bool:
    """Whether the Parameters lie one behind the other, from this address on."""
    for each in parameters:
        if each.data_ptr() != address or not each.is_contiguous():
            return False
        address += each.numel() * each.element_size()
    return len({each.untyped_storage().data_ptr() for each in parameters}) == 1


def _share_memory(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return tensor.untyped_storage().data_ptr() in {each.untyped_storage().data_ptr() for each in others}


def _move_into(whole: Tensor, parameters: Sequence[Tensor]) -> None:
    for each, part in zip(parameters, whole.split([each.shape[0] for each in parameters]), strict=True):
        each.data = part
