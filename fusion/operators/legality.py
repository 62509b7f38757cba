"""Whether a chip takes a call of an operator, and why not: its limits, read for the sizes and dtypes of the call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch

from fusion.errors import OperatorError
from fusion.operators import dims as named_dims
from fusion.operators import predicates
from fusion.operators.contract import CHIPS, HOST, LOWERINGS, Limit, Operator

_HAS_ELEMENTS = Limit("size > 0")


def refusal(
    op: Operator,
    chip: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    lowering: str | None = None,
    host_reads: bool = False,
) -> str | None:
    """Why `chip` would not take the call `op(*args, **kwargs)`, in one sentence, or None if it would.

    Tensors may be fake or meta, sizes symbolic; a limit that is not proven for a symbolic size is a refusal too.
    `chip` is one of `CHIPS` or `"host"`; `lowering`, if given, one of `LOWERINGS`; `host_reads` says whether a launch
    may read tensors on the host.
    """
    _known(chip, (HOST, *CHIPS), "chip")
    values = op.bind(args, kwargs)
    bound = named_dims.bind(op.dims, values)
    if isinstance(bound, str):
        return f"{op.short} {bound}"
    if chip != HOST and chip not in op.limits:
        return f"{op.short} does not exist on {chip}; it does on {', '.join(sorted(set(op.limits) & set(CHIPS)))}"
    taken = lowering is None or _known(lowering, LOWERINGS, "lowering") in op.lowerings
    refused = _dtype_refusal(op, chip, values) or _limit_refusal(op, chip, values | bound, lowering)
    refused = refused or _empty_refusal(op, bound)  # what no way of lowering would change comes first
    if refused or taken or (op.on_host and lowering == "eager" and host_reads):
        return refused
    return f"{op.short} cannot be lowered by {lowering}; it can by {_ways(op)}"


def _kind_refusal(op: Operator, values: Mapping[str, Any]) -> str | None:
    """A decomposition takes other numbers of the same kind: wider floats, positions of 64 bits."""
    for name, accepted in op.dtypes.items():
        kinds = set(map(_kind, accepted))
        wrong = next((each.dtype for each in predicates.tensors(values[name]) if _kind(each.dtype) not in kinds), None)
        if wrong is not None:
            return f"{op.short} needs {' or '.join(sorted(kinds))} for {name} ({name} is {_kind(wrong)})"
    return None


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floats"
    return "whole numbers" if dtype in (torch.int32, torch.int64) else str(dtype).removeprefix("torch.")


def _ways(op: Operator) -> str:
    """The lowerings that take `op`, and what it needs where it would have to read tensors on the host."""
    reads = ["eager with the option lengths='host', which waits for the device"] if op.on_host else []
    return " or ".join([*sorted(op.lowerings - ({"eager"} if reads else set())), *reads]) or "none"


def _dtype_refusal(op: Operator, chip: str, values: Mapping[str, Any]) -> str | None:
    if chip == HOST:
        return None
    for name, accepted in op.dtypes.items():
        wrong = next((each.dtype for each in predicates.tensors(values[name]) if each.dtype not in accepted), None)
        if wrong is not None:
            listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in accepted))
            return f"{op.short} on {chip} needs {name} in {listed} ({name} is {str(wrong).removeprefix('torch.')})"
    return None


def _empty_refusal(op: Operator, bound: named_dims.Bound) -> str | None:
    """No kernel is documented for empty tensors, and a softmax over no key is not decomposed."""
    for name, found in bound.items():
        sizes = () if name in op.empty else found if isinstance(found, tuple) else (found,)
        if any(map(_is_nothing, sizes)):
            return f"{op.short} needs tensors with elements ({name.removeprefix('*')}={found})"
    return None


def _is_nothing(size: int | torch.SymInt) -> bool:
    return size == 0 if isinstance(size, int) else _HAS_ELEMENTS.verdict({"size": size}) is False


def _limit_refusal(op: Operator, chip: str, values: Mapping[str, Any], lowering: str | None) -> str | None:
    asked = _asked(op, chip, lowering)
    all_kept = all(map(predicates.is_plain, values.values())) and _all_hold(op, chip, lowering)(values)
    for limit in () if all_kept else asked:
        kept = limit.verdict(values)
        if kept:
            continue
        facts = predicates.facts(limit.text, values)
        shown = f" ({facts})" if kept is False else f", which is not proven for {facts}"
        because = f": {limit.because}" if limit.because else ""
        route = f" under {limit.lowering}" if limit.lowering else ""
        return f"{op.short} on {chip}{route} needs {limit.text}{shown}{because}"
    return _kind_refusal(op, values) if chip == HOST else None


@cache
def _asked(op: Operator, chip: str, lowering: str | None) -> tuple[Limit, ...]:
    """What a call is asked for: on every machine, and on that chip."""
    every = (*op.limits_on(HOST), *(op.limits_on(chip) if chip != HOST else ()))
    return tuple(limit for limit in every if limit.lowering in (None, lowering))


@cache
def _all_hold(op: Operator, chip: str, lowering: str | None) -> Callable[[Mapping[str, Any]], bool]:
    return predicates.all_hold((limit.text, limit.when) for limit in _asked(op, chip, lowering))


def _known(name: str, known: tuple[str, ...], what: str) -> str:
    if name in known:
        return name
    nearest = get_close_matches(name, known, n=3, cutoff=0.3) or known
    raise OperatorError(f"checking a call: there is no {what} {name!r}; did you mean {' or '.join(nearest)}?")
