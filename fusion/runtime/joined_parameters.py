"""Joined Parameters: several Parameters, one behind the other in one block of memory, each a view of its part.

Writes to such a Parameter of any kind are writes to the block, and no number is stored twice. A Parameter whose memory
others read as well stays where it is: its part is a copy, which is updated when a change of the Parameter is detected.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from fusion._torch.fakes import FakeTensor
from fusion._torch.memory import (
    fills_its_storage,
    holders,
    is_between_processes,
    is_from_torch,
    with_own_storage,
)
from fusion._torch.tensors import WeakTensors, is_traceable_wrapper_subclass, shares_memory
from fusion.inputs.nz_format import is_fractal

Run = tuple[int, int, tuple[int, ...]]
SHARED = "another tensor reads its memory"
ELSEWHERE = "another compiled graph has joined it with other Parameters"
NOT_CONTIGUOUS = "it is not contiguous"
FORMAT = "it is stored in FRACTAL_NZ, which a view of joined memory cannot be"
SUBCLASS = "it is a tensor subclass, which wraps other tensors"
SLICE = "it is a part of a larger tensor"
PROCESSES = "other processes, or a file, share its memory"
PINNED = "its memory is pinned"
FOREIGN = "NumPy or another library may own its memory (parameter.data = parameter.data.clone() gives it its own)"


@dataclass(eq=False)
class Block:
    """Memory for several Parameters, one behind the other.

    Attributes:
        memory: the elements of all of them, contiguous [N].
        ends: the end of the part of each Parameter, in elements.
        owners: the Parameters.
        handles: for each Parameter the tensor over its part [n], whose storage the Parameter has; None before.
        views: the tensors that graphs read, by first Parameter, number of Parameters, and shape.
        readers: the prepared tensors that are views of the block.
    """

    memory: Tensor
    ends: list[int]
    owners: list[weakref.ref[Tensor]]
    handles: list[Tensor | None]
    views: dict[Run, Tensor] = field(default_factory=dict[Run, Tensor])
    readers: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet[object])

    @staticmethod
    def allocate(parameters: Sequence[Tensor]) -> Block:
        """Allocate a block for Parameters of one dtype and device."""
        ends = list(accumulate(each.numel() for each in parameters))
        memory = torch.empty(ends[-1], dtype=parameters[0].dtype, device=parameters[0].device)
        return Block(memory, ends, [weakref.ref(each) for each in parameters], [None] * len(ends))

    def start(self, number: int) -> int:
        """Return the beginning of the part of Parameter `number`, in elements."""
        return self.ends[number - 1] if number else 0

    def view(self, first: int, count: int, shape: tuple[int, ...]) -> Tensor:
        """View `count` Parameters from number `first` on as one tensor of `shape`: the same object at every call."""
        key = first, count, shape
        if key not in self.views:
            self.views[key] = self.memory[self.start(first) : self.ends[first + count - 1]].view(shape)
        return self.views[key]

    def has(self, tensor: Tensor, number: int) -> bool:
        """Return True if `tensor` is part `number`: the same memory, size, dtype and order."""
        start, size = self.start(number), self.ends[number] - self.start(number)
        same = tensor.dtype == self.memory.dtype and tensor.numel() == size and tensor.is_contiguous()
        return same and tensor.data_ptr() == self.memory.data_ptr() + start * self.memory.element_size()

    def is_read_outside(self, number: int) -> bool:
        """Return True if another tensor than its Parameter still reads part `number`, such as one that `.data`
        returned.
        """
        handle, owner = self.handles[number], self.owners[number]()
        if handle is None or not self.has(handle, number):
            return False
        return holders(handle, owner) > self.known_holders(handle)

    def known_holders(self, tensor: Tensor) -> int:
        """Count the tensors of this block, and the Parameters in their places, on the storage of `tensor`."""
        owners = [owner() for owner in self.owners]
        placed = [each for number, each in enumerate(owners) if each is not None and self.has(each, number)]
        inside = [self.memory, *self.views.values(), *self.handles, *placed]
        return sum(each is not None and shares_memory(each, tensor) for each in inside)

    def update(self, parameters: Sequence[Tensor], first: int, moves_from: Block | None = None) -> list[str]:
        """Write Parameters that are no views of their parts into these, and make views of those that can be.

        The parts are those from number `first` on; `moves_from` is a block that the Parameters may leave, see
        `obstacle`.

        Returns:
            For each Parameter the reason why it stays where it is, "" for a view of its part.
        """
        return [self._take(each, number, moves_from) for number, each in enumerate(parameters, first)]

    def _take(self, parameter: Tensor, number: int, moves_from: Block | None) -> str:
        if self.has(parameter, number):
            return ""
        part = self.memory[self.start(number) : self.ends[number]]
        part.copy_(parameter.detach().reshape(-1))
        why = obstacle(parameter, moves_from)
        if why:
            return why
        with torch.inference_mode(parameter.is_inference()):  # inference tensors accept no other memory
            handle = self.handles[number] = with_own_storage(part)
            parameter.data = handle.view(parameter.shape)
        _HOMES[parameter] = self, number
        return ""


_HOMES: WeakTensors = WeakTensors()  # Parameter -> the block that it is a view of, and its number there


def home(parameter: Tensor) -> tuple[Block, int] | None:
    """Return the block that a Parameter is a view of, and its number there; None for a Parameter in no block."""
    at: tuple[Block, int] | None = _HOMES.get(parameter)
    if at is None or at[0].has(parameter, at[1]):
        return at
    _HOMES.pop(parameter, None)  # the Parameter was given other memory: release the block
    return None


def forget_moved() -> None:
    """Release blocks whose Parameters have been given other memory."""
    for parameter in list(_HOMES):
        home(parameter)


def run_of(parameters: Sequence[Tensor]) -> tuple[Block, int] | None:
    """Return the block in which `parameters` are adjacent already, and the number of the first; else None."""
    homes = [home(each) for each in parameters]
    if homes[0] is None:
        return None
    block, first = homes[0]
    return (block, first) if homes == [(block, number) for number in range(first, first + len(homes))] else None


def obstacle(parameter: Tensor, moves_from: Block | None = None) -> str:
    """Return the reason why nobody but the caller may give a Parameter other memory unnoticed, "" if that is possible.

    Args:
        parameter: the Parameter.
        moves_from: a block that it may leave although graphs read it.
    """
    if isinstance(parameter, FakeTensor) or parameter.device.type == "meta":
        return ""  # the real Parameter has memory of its own
    if is_traceable_wrapper_subclass(parameter):
        return SUBCLASS
    if not parameter.is_contiguous():
        return NOT_CONTIGUOUS
    if is_fractal(parameter):
        return FORMAT
    at = home(parameter)
    why = _obstacle_outside(parameter) if at is None else ELSEWHERE if at[0].readers and at[0] is not moves_from else ""
    return why or (SHARED if is_shared(parameter) else "")


def _obstacle_outside(parameter: Tensor) -> str:
    """Return the kind of memory that keeps a Parameter of no block from moving, "" for none."""
    if is_between_processes(parameter):
        return PROCESSES
    if not fills_its_storage(parameter):
        return SLICE
    if parameter.is_pinned():
        return PINNED
    return "" if is_from_torch(parameter) else FOREIGN


def is_shared(parameter: Tensor) -> bool:
    """Return True if another tensor reads the memory of a Parameter, which may be a view of a block."""
    at = home(parameter)
    return holders(parameter) > (at[0].known_holders(parameter) if at else 1)
