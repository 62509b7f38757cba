"""Memory of tensors: versions, reference counts, owners, samples of the contents, storages over part of a tensor."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fusion._torch.tensors import WeakTensors, shares_memory, storage_of

RUNS = 64
_SAMPLES: WeakTensors = WeakTensors()  # tensor -> the view that `samples` returned
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size: NaN differs from itself
_OURS: dict[int, StorageWeakRef] = {}
"""Storages that `with_own_storage` made, by address; the weak reference keeps the address from being reused."""
_MAPPINGS = Path("/proc/self/maps")  # Linux only
_SLICED = ("cpu", "cuda")  # devices whose DLPack import is an ordinary tensor


def stamps(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return addresses and versions of `tensors`: one changes on each write to a tensor, except through `.data`.

    Tensors made under `torch.inference_mode` count no versions: -1. Private: `Tensor._version`.
    """
    addresses = list(map(Tensor.data_ptr, tensors))
    if any(map(Tensor.is_inference, tensors)):
        return addresses, [-1 if each.is_inference() else each._version for each in tensors]
    return addresses, [each._version for each in tensors]


def holders(tensor: Tensor, sampled: Tensor | None = None) -> int:
    """Count the references to the storage of `tensor`: tensors (itself too), storages, NumPy arrays, DLPack exports.

    The view of `samples` of `tensor`, or of `sampled`, does not count.
    Private: `torch._C._storage_Use_Count`, `UntypedStorage._cdata`.
    """
    storage = tensor.untyped_storage()
    view = _SAMPLES.get(tensor if sampled is None else sampled)
    is_sampled = view is not None and shares_memory(view, tensor)
    return torch._C._storage_Use_Count(storage._cdata) - is_sampled - 1  # without `storage`


def fills_its_storage(tensor: Tensor) -> bool:
    """Return True if the storage of `tensor` has exactly as many bytes as its elements."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def copied(x: Tensor) -> Tensor:
    """Copy `x` with its storage, so that the copy has the strides, the offset and the storage size of `x`."""
    if x.is_contiguous() and fills_its_storage(x):
        return x.detach().clone()  # keeps the storage format, which a copy of the bytes does not
    memory = x.detach().untyped_storage().clone()
    return x.new_empty(0).set_(memory, x.storage_offset(), x.shape, x.stride())


def is_between_processes(tensor: Tensor) -> bool:
    """Return True if `tensor` is in shared or mapped CPU memory: another process may write to it, or it is a file."""
    return tensor.device.type == "cpu" and tensor.untyped_storage().is_shared()


def is_from_torch(tensor: Tensor) -> bool:
    """Return True if only storages of torch can refer to the memory of `tensor`.

    The memory is from an allocator of torch, from `with_own_storage`, or a private mapping of a checkpoint, as made by
    `torch.load(mmap=True)` and safetensors. False for memory of other libraries, such as NumPy, and without a proof.
    """
    return tensor.untyped_storage().resizable() or storage_of(tensor) in _OURS or _is_mapped_file(tensor)


def _is_mapped_file(tensor: Tensor) -> bool:
    """Return True if the memory of `tensor` is a private mapping of a file; False where /proc has no list of
    mappings.
    """
    if tensor.device.type != "cpu" or not _MAPPINGS.exists():
        return False
    mappings = _MAPPINGS.read_text().splitlines()  # by address
    behind = bisect_right(mappings, tensor.data_ptr(), key=lambda line: int(line.partition("-")[0], 16))
    if not behind:
        return False
    span, access, _, _, inode, *_ = mappings[behind - 1].split()
    return tensor.data_ptr() < int(span.partition("-")[2], 16) and access.endswith("p") and inode != "0"


def with_own_storage(part: Tensor) -> Tensor:
    """Return a tensor over the memory of `part`, contiguous [N], whose storage ends where `part` does.

    `torch.save`, `pickle`, `copy.deepcopy` and safetensors write and compare storages: a storage larger than its tensor
    is written in full for each of its tensors, or refused. The memory lives as long as the result. On devices whose
    DLPack import is not known to be an ordinary tensor the result is a view with the storage of `part`.

    Private: `UntypedStorage._cdata`.
    """
    if part.device.type not in _SLICED:
        return part.data
    given: Any = torch.from_dlpack(part.detach().view(torch.uint8))  # not every dtype has a code in DLPack
    storage = given.untyped_storage()
    _OURS[storage._cdata] = StorageWeakRef(storage)
    return given.view(part.dtype).data  # a view would keep its base, which refers to the storage as well


def forget_freed() -> None:
    """Drop the records of storages of `with_own_storage` that have been freed."""
    for key, storage in list(_OURS.items()):
        if storage.expired():
            del _OURS[key]


def samples(tensor: Tensor) -> Tensor:
    """View evenly spread elements of `tensor` as integers [n], one in each 1/64 of its memory, or all of few.

    The view is memoised for each tensor, so that `holders` can leave it out of its count.
    """
    sampled = _SAMPLES.get(tensor)
    if sampled is None or sampled.data_ptr() != tensor.data_ptr():
        sampled = _SAMPLES[tensor] = _sampled(tensor)
    return sampled


def _sampled(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    spacing = span // RUNS
    # an odd step does not sample rows of an even length in one column
    step = max(1, spacing if spacing % 2 else spacing - 1)
    count = -(-span // step) if tensor.numel() else 0
    return tensor.detach().view(_INTEGERS[tensor.element_size()]).as_strided((count,), (step,)).data  # no base
