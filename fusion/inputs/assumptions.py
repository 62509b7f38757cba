"""Assumptions about inputs, which the graph cannot show: assigned to its inputs, and checked at every call.

Attention masks, as the user declares them:

visible(b, n, i, j)   query i of sequence b attends to key j;   i < S queries, j < T keys, the queries being the last
                      S of the first L_b keys: query i is at position i + L_b − S
causal                visible = j ≤ i + L_b − S
window:n              visible = i + L_b − S − n < j ≤ i + L_b − S
padding               visible = j ≤ i + L_b − S and valid(b, j)

Buffers: the same mask as when the model was compiled, `fusion.inputs.mask_buffers`.
Pages: a storage format, `fusion.inputs.nz_format`, where no device can report it at compile time.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fusion._torch.memory import stamps
from fusion._torch.operators import short_name
from fusion._torch.tensors import WeakTensors
from fusion._torch.tracing import Boxed, boxed, dynamo_position
from fusion.facts import FORMATS, LOWERED, ONES, Band, Facts, plain, window
from fusion.inputs.mask_buffers import band_of
from fusion.inputs.nz_format import is_fractal

ArgumentPath = tuple[str, ...]
_SWALLOWS = -1e30
"""A number so low that adding any score to it changes nothing."""

_UNKNOWN = (
    "a graph has no such tensor among its arguments ({}): nothing is assumed in this graph. Correct the name if no "
    "other graph has it; a mask that is None needs no assumption."
)
_UNFIT = (
    "that tensor cannot be one: nothing is assumed of it. A mask is a bool, int or float tensor [B, N, S, T], where B "
    "and N may be 1, [B, S, T], [S, T], or [B, T] as a padding mask."
)
_OTHER = (
    "this call passes another one ({}, {}): such calls run the unfused graph, and are right but slow. Give what the "
    "mask is in options={{'assume': ...}}, or leave it out."
)
_CHANGED = (
    "cann-fusion compiled a graph for what the buffer {!r} held then ({}), but now it holds something else: such calls "
    "run the unfused graph, and are right but slow. Call torch.compiler.reset() behind the last write to it."
)
_ELSEWHERE = (
    "cann-fusion compiled a graph for {!r} in the storage format {}, but this call passes it in another one: such "
    "calls run the unfused graph, and are right but slow. Pass it as it was when the model was compiled: "
    "torch_npu.npu_format_cast(x, 29) makes FRACTAL_NZ of it, 2 makes ND; of lines of NZ it changes no byte."
)


def facts_of(source: fx.Graph, paths: Sequence[ArgumentPath], assume: Mapping[str, str]) -> Facts:
    """Map the inputs of a graph of AOT autograd to the assumed masks.

    A name of `assume` stands for every mask whose path starts with it; of two names, the longer one counts. Items of
    `**kwargs` of a wrapper go by their own names. Warns of a name without input, and of inputs that cannot be a mask.

    Args:
        source: the graph.
        paths: for each input of the graph of Dynamo, its path in the arguments of the compiled function.
        assume: the option of that name.
    """
    path_of: dict[fx.Node, ArgumentPath] = {}
    for node in source.find_nodes(op="placeholder"):
        position = dynamo_position(node)
        if position is not None and paths[position] and isinstance(node.meta.get("val"), Tensor):
            path_of[node] = paths[position]
    names = {node: max((n for n in assume if _starts(path, n)), key=len, default="") for node, path in path_of.items()}
    arguments = {node.name: _shown(path) for node, path in path_of.items()}
    for name in sorted(set(assume) - set(names.values())):
        near = difflib.get_close_matches(name, list(arguments.values()), n=3, cutoff=0)
        known = f"the nearest are {', '.join(map(repr, near))}" if near else "it has none"
        _warn(name, assume[name], _UNKNOWN.format(known))
    assumed = {node.name: _encoded(node, assume[name]) for node, name in names.items() if name}
    unfit = {node.name for node, name in names.items() if name and not can_be(node.meta["val"])}
    for name in sorted(unfit):
        _warn(arguments[name], plain(assumed.pop(name)), _UNFIT)
    return Facts(assumed=assumed, arguments=arguments)


def _encoded(mask: fx.Node, kind: str) -> str:
    """Append `ONES` to `kind` for a float `mask` that the graph subtracts from 1: additive masks never are."""
    val = mask.meta["val"]
    if not val.is_floating_point() or _is_per_key(val, kind):
        return kind
    waiting, seen = list(mask.users), set(mask.users)
    while waiting:
        node = waiting.pop()
        name = short_name(node.target)
        if name in ("rsub", "sub") and node.args[1] == 1:
            return kind + ONES
        more = [each for each in node.users if each not in seen] if name in _VIEWS else []
        seen.update(more)
        waiting.extend(more)
    return kind


_VIEWS = ("view", "reshape", "unsqueeze", "expand", "slice", "select", "_to_copy", "clone", "alias", "permute", "index")


def _is_per_key(mask: Tensor, kind: str) -> bool:
    """Return True if `mask` of an assumed `kind` is a padding mask [B, T], with 1 for each key that is no padding."""
    return mask.dim() == 2 and kind == "padding"


def _warn(name: str, kind: str, wrong: str) -> None:
    warnings.warn(f"cann-fusion was told to assume that {name!r} is a {kind} mask, but {wrong}", stacklevel=2)


def _warn_of(name: str, kind: str | Band, other: Tensor) -> None:
    if isinstance(kind, Band):
        warnings.warn(_CHANGED.format(name, kind), stacklevel=2)
    elif kind in FORMATS:
        warnings.warn(_ELSEWHERE.format(name, kind), stacklevel=2)
    else:
        _warn(name, plain(kind), _OTHER.format(list(other.shape), other.dtype))


def _starts(path: ArgumentPath, name: str) -> bool:
    wanted = tuple(re.findall(r"[^.\[\]'\"]+", name))
    return path[: len(wanted)] == wanted or path[1 : 1 + len(wanted)] == wanted


def _shown(path: ArgumentPath) -> str:
    return ".".join(path[1:] if path[0] == "kwargs" and len(path) > 1 else path)


def can_be(mask: Tensor) -> bool:
    """Return True if `mask` can be a mask: it has 2, 3 or 4 dims, and is not complex."""
    return mask.dim() in (2, 3, 4) and not mask.is_complex()


def holds(mask: Tensor, kind: str) -> bool:
    """Return True if a real `mask` has the assumed contents, for any lengths L_b in [S, T]. Synchronises the device
    once.

    Bool masks: True is visible. Integer masks, float masks [B, T] of "padding", and those of a kind that ends in
    `ONES`: 1 is visible, 0 is masked. Other float masks are added to scores: 0 is visible, at most half of the least
    finite number (−inf too) is masked. Any other content is False.

    "padding" requires one validity per key and sequence, the same for all queries and heads, at any positions (left,
    right or between): a rewrite may read the masked keys from the mask, not count them. So a [B, T] mask may have any
    zeros and ones, at least one 1 in each sequence unless the kind ends in `LOWERED`.

    A fully masked query occurs in padding masks only, where keys are missing on the left. It is accepted in a bool or
    integer mask and with −inf, for which attention returns zero or NaN. With finite numbers plain attention returns the
    mean over the keys that are lowered least: accepted for a kind that ends in `LOWERED`, if no score changes the
    numbers.

    Args:
        mask: [B | 1, N | 1, S, T], [B | 1, S, T], [S, T] (L the same for all), or for "padding" [B, T] instead.
        kind: "causal", "window:n" or "padding", optionally with `ONES` or `LOWERED` appended.
    """
    is_ones, lowered, kind = kind.endswith(ONES), kind.endswith(LOWERED), plain(kind)
    is_per_key = _is_per_key(mask, kind)
    if not can_be(mask) or (not is_per_key and mask.shape[-2] > mask.shape[-1]):
        return False
    if not mask.numel():
        return True
    visible, legal = _read(mask, is_per_key or is_ones, lowered)
    if is_per_key:
        return bool(legal if lowered else legal & visible.any(-1).all())
    visible = visible.reshape(mask.shape[0] if mask.dim() > 2 else 1, -1, *mask.shape[-2:])
    shape = _padding(visible) if kind == "padding" else _window(visible, window(kind))
    return bool(legal & (visible == shape).all())


def _read(mask: Tensor, is_ones: bool, lowered: bool) -> tuple[Tensor, Tensor]:
    """Return the visible entries as bools like `mask`, and a bool [] that is true if every entry is legal.

    Args:
        mask: the mask.
        is_ones: True if 1 is visible and 0 is masked.
        lowered: True if finite numbers may mask all keys of a query.
    """
    if mask.dtype == torch.bool:
        return mask, torch.ones((), dtype=torch.bool, device=mask.device)
    if is_ones or not mask.is_floating_point():
        return mask == 1, ((mask == 0) | (mask == 1)).all()
    least = torch.finfo(mask.dtype).min / 2
    visible, masked = mask == 0, mask <= least
    if lowered and least <= _SWALLOWS:
        return visible, (visible | masked).all()
    blind = ~visible.any(-1, keepdim=True)
    return visible, ((visible | masked) & (~blind | mask.isneginf())).all()


def _window(visible: Tensor, keys: int | None) -> Tensor:
    """Return the causal mask [B, 1, S, T], True for visible, of which `visible` [B, N, S, T] can only be a copy.

    The offset of each sequence is read off the last key that its first query sees; each query sees at most `keys` keys
    (None: all before). All False if the offset exceeds T - S.
    """
    key, query = _positions(visible)
    last = torch.where(visible[:, 0, 0], key, 0).amax(-1)[:, None, None, None]
    shape = (key <= query + last) & (last <= key.numel() - query.numel())
    return shape if keys is None else shape & (key > query + last - keys)


def _padding(visible: Tensor) -> Tensor:
    """Return the causal mask with padded keys [B, 1, S, T], True for visible, of which `visible` [B, N, S, T] can only
    be a copy.

    A key is padding if no query sees it. The offset of each sequence is the least with which every visible entry is
    causal: a longer one would only require more visible entries. All False if it exceeds T - S.
    """
    key, query = _positions(visible)
    seen = visible.sum(2).amax(1)  # [B, T]
    valid = seen > 0
    last = torch.where(valid, key + seen - query.numel(), 0).amax(-1).clamp_min(0)[:, None, None, None]
    return (key <= query + last) & valid[:, None, None] & (last <= key.numel() - query.numel())


def _positions(visible: Tensor) -> tuple[Tensor, Tensor]:
    queries, keys = visible.shape[-2:]
    return torch.arange(keys, device=visible.device), torch.arange(queries, device=visible.device)[:, None]


def remembering(kind: str | Band) -> Callable[[Tensor], bool]:
    """Return a check that a tensor has the assumed contents, memoised for each tensor until a write to it.

    Tensors are referred to weakly. A tensor made in inference mode is checked every time: torch does not count writes
    to it. A storage format is checked every time, which does not synchronise.
    """
    if kind in FORMATS:
        return lambda x: is_fractal(x) in (None, kind == "FRACTAL_NZ")
    known: Any = WeakTensors()

    def as_expected(mask: Tensor) -> bool:
        return band_of(mask) == kind if isinstance(kind, Band) else holds(mask, kind)

    def check(mask: Tensor) -> bool:
        if mask.is_inference():
            return as_expected(mask)
        now = stamps([mask]), mask.shape, mask.stride()
        before, is_expected = known.get(mask, (None, False))
        if before != now:
            is_expected = as_expected(mask)
            known[mask] = now, is_expected
        return is_expected

    return check


def checks_of(source: fx.Graph, facts: Facts, relied: Collection[str]) -> dict[int, tuple[str, str | Band]]:
    """Map the position among the inputs of `source` of each name in `relied` to its path in the arguments and assumed
    kind.
    """
    placeholders = enumerate(source.find_nodes(op="placeholder"))
    return {position: facts.assumption(node.name) for position, node in placeholders if node.name in relied}


def assumed(
    run: Boxed,
    fallback: Callable[[], Boxed],
    checks: Mapping[int, tuple[str, str | Band]],
    looser: Callable[[], Boxed] | None = None,
) -> Boxed:
    """Return a callable of `run` that falls back, with one warning, where a checked input is not as assumed.

    Inputs are checked before anything runs, so that the fallback reads inputs that nothing has written to. A new mask
    costs one synchronisation of the device.

    Args:
        run: the graph that relies on the assumptions.
        fallback: compiles the graph that relies on nothing; called when it is first needed.
        checks: by position among the inputs, the name and the assumed kind.
        looser: compiles a graph for masks of padding that are `LOWERED`, which has checks of its own.
    """
    tests = {position: remembering(kind) for position, (_, kind) in checks.items()}
    lowered = {each: remembering("padding" + LOWERED) for each, (_, kind) in checks.items() if kind == "padding"}
    compiled: dict[bool, Boxed] = {}

    def call(*inputs: Any) -> Any:
        wrong = [position for position, check in tests.items() if not check(inputs[position])]
        if not wrong:
            return run(list(inputs))
        low = looser is not None and all(each in lowered and lowered[each](inputs[each]) for each in wrong)
        if low not in compiled:
            if not low:
                _warn_of(*checks[wrong[0]], inputs[wrong[0]])
            compiled[low] = looser() if low and looser is not None else fallback()
        return compiled[low](list(inputs))

    return boxed(call)


def loosened(source: fx.Graph, facts: Facts) -> Facts:
    """Return `facts` with `LOWERED` for padding masks that may mask all keys of a query.

    That are masks [B, T], and floats [.., S, T], in which finite numbers may do so.
    """
    masks = {node.name: node.meta["val"] for node in source.find_nodes(op="placeholder")}
    padding = [name for name, kind in facts.assumed.items() if kind == "padding"]
    low = [name for name in padding if _is_per_key(masks[name], "padding") or masks[name].is_floating_point()]
    return replace(facts, assumed={**facts.assumed, **dict.fromkeys(low, "padding" + LOWERED)})
