"""Assumptions about inputs, which the graph cannot show: found among them, and checked at every call.

Of attention masks, as the user says:

visible(b, n, i, j)   query i of sequence b sees key j;   i < S queries, j < T keys, the queries being the last
                      S of the first L_b keys: query i stands at position i + L_b − S
causal                visible = j ≤ i + L_b − S
window:n              visible = i + L_b − S − n < j ≤ i + L_b − S
padding               visible = j ≤ i + L_b − S and valid(b, j)

Of buffers: that they hold the mask that they held when the model was compiled, `fusion.inputs.mask_buffers`.
Of pages: that they lie in a storage format, `fusion.inputs.nz_format`, where no device can tell at compile time.
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
"""A number that no score changes to which it is added."""

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
    """What is known of the inputs of a graph of AOT autograd.

    A name of `assume` stands for every mask whose path starts with it; of two names, the longer one counts. What a
    wrapper collects in `**kwargs` goes by its own name. Warns of a name that no input has and of inputs that cannot be
    such a mask.

    Args:
        source: the graph.
        paths: for each input of the graph of Dynamo, where it is found in the arguments of the compiled function.
        assume: the option of that name.
    """
    found: dict[fx.Node, ArgumentPath] = {}
    for node in source.find_nodes(op="placeholder"):
        position = dynamo_position(node)
        if position is not None and paths[position] and isinstance(node.meta.get("val"), Tensor):
            found[node] = paths[position]
    names = {node: max((n for n in assume if _starts(path, n)), key=len, default="") for node, path in found.items()}
    arguments = {node.name: _shown(path) for node, path in found.items()}
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
    """Return `kind`, with `ONES` behind it of floats that are subtracted from 1, as those that are added never are."""
    val = mask.meta["val"]
    if not val.is_floating_point() or _of_keys(val, kind):
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


def _of_keys(mask: Tensor, kind: str) -> bool:
    """True if a mask is [B, T], which holds 1 for each key that is no padding."""
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
    """Whether a tensor has a rank and dtype with which `holds` can be true."""
    return mask.dim() in (2, 3, 4) and not mask.is_complex()


def holds(mask: Tensor, kind: str) -> bool:
    """Whether a real mask is what was assumed, for any lengths L_b in [S, T]. Waits for the device once.

    Bool masks: True is visible. Integer masks, float masks [B, T] of "padding", and those of a kind that ends in
    `ONES`: 1 is visible, 0 is masked. Other float masks are added to scores: 0 is visible, at most half of the least
    finite number (−inf too) is masked. Any other content does not hold.

    "padding" asks for one validity per key and sequence, the same for all queries and heads, and for nothing about
    where the invalid keys lie (left, right or between): a rewrite may take the masked keys from the mask, not count
    them. So a [B, T] mask may hold any zeros and ones.

    A query that sees nothing occurs in padding masks only, where keys are missing on the left. It holds in a bool or
    integer mask and with −inf, of which attention gives zero or NaN. With finite numbers plain attention gives the mean
    over the keys that are lowered least: that holds for a kind that ends in `LOWERED`, if no score changes the numbers.

    Args:
        mask: [B | 1, N | 1, S, T], [B | 1, S, T], [S, T] (L the same for all), or for "padding" [B, T] instead.
        kind: "causal", "window:n" or "padding", perhaps with `ONES` or `LOWERED` behind it.
    """
    of_ones, lowered, kind = kind.endswith(ONES), kind.endswith(LOWERED), plain(kind)
    of_keys = _of_keys(mask, kind)
    if not can_be(mask) or (not of_keys and mask.shape[-2] > mask.shape[-1]):
        return False
    if not mask.numel():
        return True
    visible, legal = _read(mask, of_keys or of_ones, lowered)
    if of_keys:
        return bool(legal)
    visible = visible.reshape(mask.shape[0] if mask.dim() > 2 else 1, -1, *mask.shape[-2:])
    shape = _padding(visible) if kind == "padding" else _window(visible, window(kind))
    return bool(legal & (visible == shape).all())


def _read(mask: Tensor, of_ones: bool, lowered: bool) -> tuple[Tensor, Tensor]:
    """Return which entries are visible, and whether all of them mean anything.

    Args:
        mask: the mask.
        of_ones: whether 1 is visible, 0 is not.
        lowered: whether finite numbers may hide all keys of a query.
    """
    if mask.dtype == torch.bool:
        return mask, torch.ones((), dtype=torch.bool, device=mask.device)
    if of_ones or not mask.is_floating_point():
        return mask == 1, ((mask == 0) | (mask == 1)).all()
    least = torch.finfo(mask.dtype).min / 2
    visible, masked = mask == 0, mask <= least
    if lowered and least <= _SWALLOWS:
        return visible, (visible | masked).all()
    blind = ~visible.any(-1, keepdim=True)
    return visible, ((visible | masked) & (~blind | mask.isneginf())).all()


def _window(visible: Tensor, keys: int | None) -> Tensor:
    """What is visible in a window of so many keys (None: all), its end read off the first query."""
    key, query = _positions(visible)
    last = torch.where(visible[:, 0, 0], key, 0).amax(-1)[:, None, None, None]
    shape = (key <= query + last) & (last <= key.numel() - query.numel())
    return shape if keys is None else shape & (key > query + last - keys)


def _padding(visible: Tensor) -> Tensor:
    """What is visible where keys are missing, the lengths read off how many queries see each key.

    The least length that lets every visible entry be visible serves if any does: a longer one would only ask for more.
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
    """Return a check that a tensor is what was assumed, asked again only for another one, or one written to since.

    Masks are kept weakly. A tensor made in inference mode is asked every time: torch does not count writes to it.
    A storage format is asked every time, which waits for nothing.
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
        before, held = known.get(mask, (None, False))
        if before != now:
            held = as_expected(mask)
            known[mask] = now, held
        return held

    return check


def checks_of(source: fx.Graph, facts: Facts, relied: Collection[str]) -> dict[int, tuple[str, str | Band]]:
    """By position of the input: the name and the kind of what must be checked, of the inputs in `relied`."""
    placeholders = enumerate(source.find_nodes(op="placeholder"))
    return {position: facts.assumption(node.name) for position, node in placeholders if node.name in relied}


def assumed(
    run: Boxed,
    fallback: Callable[[], Boxed],
    checks: Mapping[int, tuple[str, str | Band]],
    looser: Callable[[], Boxed] | None = None,
) -> Boxed:
    """Run `run` while every checked input is what was assumed, else what `fallback` gives, with one warning.

    Checked before anything runs, so that the fallback sees inputs that nothing has written to. A new mask costs one
    wait for the device.

    Args:
        run: the graph that relies on the assumptions.
        fallback: compiles the graph that relies on nothing; called when it is first needed.
        checks: by position among the inputs, the name and the assumed kind.
        looser: compiles a graph for masks of padding that are `LOWERED`, which has checks of its own.
    """
    asked = {position: remembering(kind) for position, (_, kind) in checks.items()}
    lowered = {each: remembering("padding" + LOWERED) for each, (_, kind) in checks.items() if kind == "padding"}
    compiled: dict[bool, Boxed] = {}

    def call(*inputs: Any) -> Any:
        wrong = [position for position, check in asked.items() if not check(inputs[position])]
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
    """Return `facts` of float masks of padding [.., S, T] that may hide every key of a query by finite numbers."""
    masks = {node.name: node.meta["val"] for node in source.find_nodes(op="placeholder")}
    added = {name for name, kind in facts.assumed.items() if kind == "padding" and masks[name].is_floating_point()}
    low = {name: "padding" + LOWERED for name in added if masks[name].dim() > 2}
    return replace(facts, assumed={**facts.assumed, **low})
