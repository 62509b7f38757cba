"""Interfaces: inputs and results of the forward of a frame, and calls of equal modules that become a loop."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from fusion.frontend.port.frames import Frame
from fusion.frontend.port.traced import Argument
from fusion.frontend.port.weights import Tensors

Ref = fx.Node | str
"""Input of a frame: a value or tensor from outside, or the expression of an object among the arguments."""


@dataclass(frozen=True)
class Interface:
    """Inputs and results of the forward of a frame.

    Attributes:
        inputs: the inputs, in the order of their first use.
        outputs: the calls whose results are read outside, in order.
        prefixes: the objects among the arguments that the frame reads from.
    """

    inputs: tuple[Ref, ...]
    outputs: tuple[fx.Node, ...]
    prefixes: tuple[str, ...]

    def prefix(self, expression: str) -> str:
        """Return the object from which `expression` is read."""
        return next(each for each in self.prefixes if re.match(re.escape(each) + r"($|[.\[])", expression))


def interface(frame: Frame, tensors: Tensors) -> Interface:
    """Return the inputs and results of `frame`."""
    inside = set(frame.nodes())
    read = dict.fromkeys(each for node in frame.nodes() for each in node.all_input_nodes if each not in inside)
    arguments = {
        node: each.expression for node in read if isinstance(each := tensors.traced.sources.get(node), Argument)
    }
    face = Interface((), outputs_of(frame), _prefixes([*arguments.values()]))
    inputs: dict[Ref, None] = {}
    for node in read:
        if node in arguments:
            inputs[face.prefix(arguments[node])] = None
        elif node not in tensors.paths or not frame.has(tensors.paths[node]):
            inputs[node] = None
    return Interface(tuple(inputs), face.outputs, face.prefixes)


def outputs_of(frame: Frame) -> tuple[fx.Node, ...]:
    """List the calls of `frame` whose results are read outside."""
    inside = set(frame.nodes())
    several = (tuple, list)
    return tuple(
        node
        for node in frame.nodes()
        if not inside.issuperset(node.users) and not isinstance(node.meta.get("val"), several)
    )


def _prefixes(expressions: Sequence[str]) -> tuple[str, ...]:
    """Return the object for each root of `expressions` from which all of them are read: "cache.layers[0]"."""
    by_root: dict[str, list[list[str]]] = {}
    for each in dict.fromkeys(expressions):
        steps = re.findall(r"\.?\w+|\[[^\]]*\]", each)
        by_root.setdefault(steps[0], []).append(steps)
    return tuple(_prefix(several) for several in by_root.values())


def _prefix(several: Sequence[Sequence[str]]) -> str:
    """Return the object from which expressions of the same root are read, as steps: up to its last subscript."""
    common = [steps[0] for steps in zip(*several, strict=False)]
    equal = [len(set(steps)) == 1 for steps in zip(*several, strict=False)]
    common = common[: equal.index(False)] if False in equal else common
    last = max((place for place, step in enumerate(common) if step.startswith("[")), default=-1)
    return "".join(common if len(several) == 1 and last < 0 else common[: max(last + 1, 1)])


@dataclass(frozen=True)
class Run:
    """Calls of equal modules, one behind the other, that are written as a loop.

    Attributes:
        frames: the frames of the modules.
        carried: for each input of the forward that the module before has computed, the number of that result.
        indexed: the inputs that are read at the index of the module: container, and index for the first module.
    """

    frames: tuple[Frame, ...]
    carried: Mapping[int, int]
    indexed: Mapping[int, tuple[str, int]]


def rolled(frames: Sequence[Frame], tensors: Tensors) -> Run | None:
    """Return the calls of `frames`, modules of one class, as a loop; None where their inputs follow no pattern."""
    faces = [interface(each, tensors) for each in frames]
    if len({len(each.outputs) for each in faces}) > 1 or not all(map(_feeds_next, frames, frames[1:])):
        return None
    carried: dict[int, int] = {}
    indexed: dict[int, tuple[str, int]] = {}
    for place, refs in enumerate(zip(*(each.inputs for each in faces), strict=True)):
        if all(each == refs[0] for each in refs):
            continue
        at, number = _indexed(refs), _carried(refs, faces)
        if at is None and number is None:
            return None
        indexed |= {place: at} if at is not None else {}
        carried |= {place: number} if number is not None else {}
    return Run(tuple(frames), carried, indexed)


def _feeds_next(frame: Frame, following: Frame) -> bool:
    """Return True if no other frame than `following` reads a result of `frame`."""
    nodes = {*frame.nodes(), *following.nodes()}
    return all(nodes.issuperset(each.users) for each in outputs_of(frame))


def _indexed(refs: Sequence[Ref]) -> tuple[str, int] | None:
    """Return container and first index if `refs` are items of one container in order: c[2], c[3], ...; else None."""
    steps = [index_of(each) if isinstance(each, str) else None for each in refs]
    first = steps[0]
    if first is None or any(each != (first[0], first[1] + number) for number, each in enumerate(steps)):
        return None
    return first


def _carried(refs: Sequence[Ref], faces: Sequence[Interface]) -> int | None:
    """Return n if each of `refs`, but for the first, is result number n of the module before; None if they are not."""
    before: Any = zip(faces, refs[1:], strict=False)
    numbers = {face.outputs.index(ref) if ref in face.outputs else -1 for face, ref in before}
    return numbers.pop() if len(numbers) == 1 and -1 not in numbers else None


def index_of(path: str) -> tuple[str, int] | None:
    """Split a path or expression that ends in a number: container and index; None for any other."""
    match = re.fullmatch(r"(.*?)(?:\.(\d+)|\[(\d+)\])", path)
    return (match[1], int(match[2] or match[3])) if match else None
