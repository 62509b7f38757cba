"""What a call gives and does, as far as a caller can see it: values, layout, what was written, what shares memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fusion.runtime.verification import relative_error
from fusion.testing import capture, widen, widened


@dataclass(frozen=True)
class Seen:
    """One call.

    Attributes:
        values: results, then inputs as they are afterwards; copies.
        layouts: dtype, sizes and strides of each result; dims of one position have no stride.
        shared: pairs of names that have memory in common.
        names: "result 0", "input x" and so on.
    """

    values: tuple[Any, ...]
    layouts: tuple[Any, ...]
    shared: frozenset[tuple[str, str]]
    names: tuple[str, ...]


def seen_of(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Seen:
    """Call it for inference."""
    with torch.no_grad():
        results = function(*inputs)
    each = [*results, *inputs]
    names = [*(f"result {n}" for n in range(len(results))), *(f"input {n}" for n in range(len(inputs)))]
    pairs = combinations(zip(names, each, strict=True), 2)
    shared = frozenset((one, other) for (one, a), (other, b) in pairs if _share(a, b))
    values = tuple(one.detach().clone() if isinstance(one, Tensor) else one for one in each)
    return Seen(values, tuple(map(_layout, results)), shared, tuple(names))


def exactly(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Seen | None:
    """Call what torch captures of it, with the numbers that it has, in float64; None where that does not run.

    A number that follows the dtype, as `torch.finfo(x.dtype).min`, stays that of the dtype of `inputs`.
    """
    try:
        captured = capture(function, inputs)
        results = widen(captured.graph)(*widened(list(captured.inputs)))
    except Exception:
        return None
    given = tree_leaves(results)
    return Seen((*given, *inputs), (), frozenset(), tuple(f"result {number}" for number in range(len(given))))


def differences(want: Seen, have: Seen, tolerance: float, exact: Seen | None = None) -> list[str]:
    """How `have` differs from `want`; values by a relative rms error above `tolerance`, to `exact` as well if given.

    A score of bfloat16 to which -1e4 is added is lost in the rounding of the sum, and in float64 it is not: where no
    key is visible, a kernel that adds in float32 is nearer to float64 than plain code.
    """
    found = []
    for name, one, other in zip(want.names, want.layouts, have.layouts, strict=False):
        if one[:2] != other[:2]:
            found.append(f"{name} is {other[:2]}, not {one[:2]}")
        elif one != other:
            found.append(f"{name} has strides {other[2]}, not {one[2]}")
    exact_values = have.values if exact is None else exact.values
    for name, one, other, right in zip(want.names, want.values, have.values, exact_values, strict=True):
        wrong = _value(name, one, other, tolerance)
        found += wrong if exact is None or _value(name, right, other, tolerance) else []
    for pair in sorted(want.shared - have.shared):
        found.append(f"{' and '.join(pair)} share no memory any more")
    for pair in sorted(have.shared - want.shared):
        found.append(f"{' and '.join(pair)} share memory")
    return found


def _value(name: str, want: Any, have: Any, tolerance: float) -> list[str]:
    if not isinstance(want, Tensor) or not isinstance(have, Tensor):
        return [] if type(want) is type(have) and (want == have or want != want) else [f"{name} is {have}, not {want}"]
    if have.shape != want.shape or tolerance == math.inf:
        return []
    if not torch.equal(have.isnan(), want.isnan()):
        return [f"{name} has other NaNs"]
    error = relative_error(have, want)
    return [] if error <= tolerance else [f"{name} is off by {error:.3g}"]


def _layout(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value).__name__, None
    strides = [stride if size > 1 else None for size, stride in zip(value.shape, value.stride(), strict=True)]
    return str(value.dtype), list(value.shape), strides if value.numel() else []


def _share(a: Any, b: Any) -> bool:
    """Whether a write to one may be seen in the other."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or not a.numel() or not b.numel():
        return False
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    return bool(torch.isin(_places(a), _places(b)).any())


def _places(x: Tensor) -> Tensor:
    """Addresses of the elements, in bytes of the storage."""
    places = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = (places.unsqueeze(-1) + torch.arange(size) * stride).unsqueeze(-1).squeeze(-1)
    return (places * x.element_size()).flatten()
