"""Legality of calls: the limits of an operator on a chip, evaluated for the sizes, dtypes and arguments of a call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from fusion.errors import OperatorError
from fusion.operators import limit_texts, named_dims
from fusion.operators.limits import CHIPS, HOST, LOWERINGS, Limit

if TYPE_CHECKING:
    from fusion.operators.operator import Operator

_HAS_ELEMENTS = Limit("size > 0")


def refusal(
    op: Operator,
    chip: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    lowering: str | None = None,
    host_reads: bool = False,
) -> str | None:
    """Return the reason, one sentence, for which `chip` rejects the call `op(*args, **kwargs)`, or None if it takes it.

    Tensors may be fake or meta, sizes symbolic; a limit that is not proven for a symbolic size is a reason as well.
    `chip` is one of `CHIPS` or `"host"`; `lowering`, if given, one of `LOWERINGS`; `host_reads` is True if a launch
    may read tensors on the host.

    Raises:
        OperatorError: the chip or the lowering does not exist, or the call does not fit the schema.
    """
    _known(chip, (HOST, *CHIPS), "chip")
    values = op.bind(args, kwargs)
    bound = named_dims.bind(op.dims, values)
    if isinstance(bound, named_dims.Misfit):
        return f"{bound.problem}; {op.short} requires {bound.required}"
    if chip != HOST and chip not in op.limits:
        return f"{op.short} does not exist on {chip}; it does on {', '.join(sorted(set(op.limits) & set(CHIPS)))}"
    taken = lowering is None or _known(lowering, LOWERINGS, "lowering") in op.lowerings
    refused = _dtype_refusal(op, chip, values) or _limit_refusal(op, chip, values | bound, lowering)
    refused = refused or _empty_refusal(op, bound)  # what no way of lowering would change comes first
    if refused or taken or (op.on_host and lowering == "eager" and host_reads):
        return refused
    return f"{op.short} cannot be lowered by {lowering}; {_ways(op)}"


def require_decomposed(op: Operator, given: Mapping[str, Any]) -> None:
    """Raise OperatorError, naming an argument, if the decomposition of `op` does not compute the call `given`.

    Tensors may be fake: a limit that depends on their values or on unknown sizes counts as satisfied. Nothing is
    checked inside `unchecked()`.
    """
    if not _checking.get():
        return
    call = op.name, *map(_appearance, given.values())
    try:
        complaint = _complaints.get(call, "")
    except TypeError:  # symbolic sizes have no hash
        complaint = _complaint(op, given)
    else:
        complaint = _remember(call, _complaint(op, given)) if complaint == "" else complaint
    if complaint is not None:
        raise OperatorError(f"calling {op.name}: {complaint}, or run the call on an NPU")


def without_elements(op: Operator, given: Mapping[str, Any]) -> OperatorError | None:
    """Return an error that blames empty tensors for the failure of the decomposition of `op` in the call `given`; None
    if no tensor is empty, or inside `unchecked()`."""
    empty = [name for name, value in given.items() if any(0 in each.shape for each in limit_texts.tensors(value))]
    if not empty or not _checking.get():
        return None
    shown = ", ".join(f"{name} is {_shown(given[name])}" for name in empty)
    return OperatorError(
        f"calling {op.name}: {shown}, and the decomposition computes nothing of tensors without elements here; pass "
        "tensors with elements, or run the call on an NPU"
    )


_complaints: dict[Hashable, str | None] = {}
"""Memoised results of `_complaint`, by operator and appearance of the arguments: graphs repeat calls at every step."""


def _remember(call: Hashable, complaint: str | None) -> str | None:
    if len(_complaints) >= 4096:
        _complaints.clear()
    _complaints[call] = complaint
    return complaint


_checking = ContextVar("checking", default=True)


@contextmanager
def unchecked() -> Generator[None, None, None]:
    """Disable the checks of decompositions and Meta kernels: a planner asks for the `refusal` of each call itself."""
    token = _checking.set(False)
    try:
        yield
    finally:
        _checking.reset(token)


def _appearance(value: Any) -> Hashable:
    """Return the hashable properties of an argument that limits read: shape and dtype of a tensor, the items of a list,
    any other value as it is."""
    if value is None:  # most arguments are
        return None
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    return tuple(map(_appearance, value)) if isinstance(value, (list, tuple)) else value


def _complaint(op: Operator, given: Mapping[str, Any]) -> str | None:
    """Return as text which argument the decomposition does not compute and what to do; None if it computes the call."""
    for name, because in op.uncomputed.items():
        default = op.default(name)
        if not limit_texts.same(_as_tuple(given[name]), default):
            return (
                f"{name} is {_shown(given[name])}, and the decomposition does not compute it: {because}; "
                f"leave {name} at its default, {default!r}"
            )
    bound = named_dims.bind(op.dims, given, limit_texts.hinted)
    if isinstance(bound, named_dims.Misfit):
        return f"{bound.problem}; the decomposition requires {bound.required}; pass tensors whose dims agree"
    broken = _broken(op, {**given, **bound})
    if broken is not None:
        when = f" where {broken.when}" if broken.when else ""
        because = f" ({broken.because})" if broken.because else ""
        shown = _described(op, broken, {**given, **bound})
        return f"{shown}; the decomposition requires {broken.text}{when}{because}; pass such arguments"
    kinds = _kind_refusal(op, given)
    return None if kinds is None else f"{kinds}; pass tensors of that dtype"


def _broken(op: Operator, values: Mapping[str, Any]) -> Limit | None:
    """Return the first limit of every machine that `values` break; None if there is none.

    Symbolic sizes are taken as in the traced call; a limit that is undecided by that is not broken.
    """
    if all(map(limit_texts.is_plain, values.values())) and _all_hold(op, HOST, None)(values):
        return None
    limits = _limits(op, HOST, None)
    return next((each for each in limits if each.evaluate(values, limit_texts.hinted) is False), None)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _described(op: Operator, limit: Limit, values: Mapping[str, Any]) -> str:
    """Format the terms of `limit` by argument: `query: D (last dim) is 32, N is 8; num_heads: 4; mask: absent`."""
    shown: dict[str, list[str]] = {}
    for term, value in limit_texts.facts(limit.text, values).items():
        subject, text = _fact(op, term, value, values)
        shown.setdefault(subject, []).append(text)
    return "; ".join(f"{subject}: {', '.join(texts)}" for subject, texts in shown.items())


def _fact(op: Operator, term: str, value: Any, values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the argument that the `term` of a limit is about, and the `value` of the term as text."""
    function, opening, inside = term.partition("(")
    subject, _, place = inside.rstrip(")").partition(", ")
    if value is None:
        return subject or term, "absent"
    if opening:
        return subject, _MEASURED[function].format(value, place) if function != "given" else _GIVEN[value]
    layouts = {each: text for each, text in op.dims.items() if term in named_dims.names(text)}
    if not layouts:
        return term, _shown(value)
    carrier = next((each for each in layouts if limit_texts.tensors(values[each])), next(iter(layouts)))
    meaning = _MEANINGS.get(term) or _place(term, named_dims.layouts(layouts[carrier]))
    return carrier, f"{term}{f' ({meaning})' if meaning else ''} is {value}"


def _place(dim: str, layouts: tuple[named_dims.Layout, ...]) -> str:
    """Format the place of `dim` in a tensor, "last dim" or "dim 1"; "" if it differs among the `layouts`."""
    dims = [each.dims for each in layouts if dim in each.dims]
    if all(each[-1] == dim for each in dims):
        return "last dim"
    places = {each.index(dim) for each in dims}
    is_counted = len(places) == 1 and not any(each[0].startswith("*") for each in dims)
    return f"dim {places.pop()}" if is_counted else ""


_MEANINGS = {
    "Blocks": "pages",
    "Size": "positions of a page",
    "Pages": "pages of a sequence",
    "Length": "positions of the cache",
    "He": "hidden size",
    "Hcq": "latent of queries, q_lora_rank",
    "Hckv": "latent of keys, kv_lora_rank",
    "Dr": "rotated lanes",
}
"""Meanings of the dims that have the same one in every operator."""
_GIVEN = {True: "given", False: "absent"}
_MEASURED: Mapping[str, str] = {
    "size": "dim {1} is {0}",
    "sizes": "the sizes of dims {1} are {0}",
    "shape": "the shape is {0}",
    "rank": "it has {0} dims",
    "dtype": "it is {0}",
    "itemsize": "an element has {0} bytes",
    "length": "the length is {0}",
    "item": "element {1} is {0}",
    "numel": "it has {0} elements",
}
"""Texts about an argument for the functions of limits: {0} is the value, {1} the further arguments."""


def _shown(value: Any) -> str:
    match value:
        case torch.Tensor():
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        case list() | tuple():
            return f"[{', '.join(map(_shown, value))}]"
        case _:
            return repr(value)


def _kind_refusal(op: Operator, values: Mapping[str, Any]) -> str | None:
    """Return as a reason the first of the arguments `values` of `op` whose dtype is of another kind than the accepted
    ones.

    None if there is none. A decomposition takes every float where some float is accepted, and int32 and int64 where one
    of them is.
    """
    for name, accepted in op.dtypes.items():
        kinds = set(map(_kind, accepted))
        wrong = next((each.dtype for each in limit_texts.tensors(values[name]) if _kind(each.dtype) not in kinds), None)
        if wrong is not None:
            return f"{name}: it is {_kind(wrong)}; {op.short} requires {' or '.join(sorted(kinds))}"
    return None


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "floats"
    return "int32 or int64" if dtype in (torch.int32, torch.int64) else str(dtype).removeprefix("torch.")


def _ways(op: Operator) -> str:
    """Name the values of the option `plan_lower` that run `op`.

    Eager launches of an operator that reads tensors on the host need the option `lengths` as well.
    """
    reads = ["eager with the option lengths='host', which waits for the device"] if op.on_host else []
    ways = [*sorted(op.lowerings - ({"eager"} if reads else set())), *reads]
    return f"set the option plan_lower to {' or '.join(ways)}" if ways else "no other lowering takes it either"


def _dtype_refusal(op: Operator, chip: str, values: Mapping[str, Any]) -> str | None:
    if chip == HOST:
        return None
    for name, accepted in op.dtypes.items():
        wrong = next((each.dtype for each in limit_texts.tensors(values[name]) if each.dtype not in accepted), None)
        if wrong is not None:
            listed = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in accepted))
            return (
                f"{name}: it is {str(wrong).removeprefix('torch.')}; {op.short} on {chip} requires {name} in {listed}"
            )
    return None


def _empty_refusal(op: Operator, bound: named_dims.Bound) -> str | None:
    """Return as a reason the first dim of size 0 that is not in `op.empty`, or None: no kernel is documented for empty
    tensors, and a softmax over no key is not decomposed."""
    for name, bound_to in bound.items():
        sizes = () if name in op.empty else bound_to if isinstance(bound_to, tuple) else (bound_to,)
        if any(map(_is_zero, sizes)):
            empty = next(each for each, text in op.dims.items() if name in text.split())
            dim = name.removeprefix("*")
            return f"{empty}: it has no elements, {dim} is {bound_to}; {op.short} requires tensors with elements"
    return None


def _is_zero(size: int | torch.SymInt) -> bool:
    return size == 0 if isinstance(size, int) else _HAS_ELEMENTS.verdict({"size": size}) is False


def _limit_refusal(op: Operator, chip: str, values: Mapping[str, Any], lowering: str | None) -> str | None:
    """Return as a reason the first limit of `op` that `values` break on `chip` under `lowering`, or that is not proven;
    or None.

    On the host dtypes must be of the accepted kinds, too.
    """
    all_hold = all(map(limit_texts.is_plain, values.values())) and _all_hold(op, chip, lowering)(values)
    for limit in () if all_hold else _limits(op, chip, lowering):
        satisfied = limit.verdict(values)
        if satisfied:
            continue
        unproven = "" if satisfied is False else ", which is not proven"
        because = f": {limit.because}" if limit.because else ""
        route = f" under {limit.lowering}" if limit.lowering else ""
        shown = _described(op, limit, values)
        return f"{shown}; {op.short} on {chip}{route} requires {limit.text}{unproven}{because}"
    return _kind_refusal(op, values) if chip == HOST else None


@cache
def _limits(op: Operator, chip: str, lowering: str | None) -> tuple[Limit, ...]:
    """Return the limits of `op` on a call that `lowering` runs on `chip`: those of every machine, then those of the
    chip.
    """
    every = (*op.limits_on(HOST), *(op.limits_on(chip) if chip != HOST else ()))
    return tuple(limit for limit in every if limit.lowering in (None, lowering))


@cache
def _all_hold(op: Operator, chip: str, lowering: str | None) -> Callable[[Mapping[str, Any]], bool]:
    return limit_texts.all_hold((limit.text, limit.when) for limit in _limits(op, chip, lowering))


def _known(name: str, known: tuple[str, ...], what: str) -> str:
    if name in known:
        return name
    nearest = get_close_matches(name, known, n=3, cutoff=0.3) or known
    raise OperatorError(f"checking a call: there is no {what} {name!r}; did you mean {' or '.join(nearest)}?")
