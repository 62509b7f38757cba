"""Classes: one for all modules whose forward and tensors are the same text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx
from torch import nn

from fusion.errors import FusionError
from fusion.frontend.port.bodies import Body, with_return
from fusion.frontend.port.constructors import constructor, declared
from fusion.frontend.port.frames import Frame
from fusion.frontend.port.interfaces import Ref, interface
from fusion.frontend.port.lines import Replaced
from fusion.frontend.port.names import Names, cleaned, distinct, name_of_object
from fusion.frontend.port.traced import Argument, class_name, tensor_of
from fusion.frontend.port.weights import Tensors, subscripted
from fusion.graph.aliasing import memory_of
from fusion.graph.origin import look


@dataclass(eq=False)
class Class:
    """One class of the port.

    Attributes:
        key: the text of its tensors and of its forward, with inputs by number.
        frames: the frames of its modules.
        name: its name.
    """

    key: Any = field(repr=False)
    frames: list[Frame] = field(default_factory=list[Frame])
    name: str = ""


class Classes:
    """Classes of `root` and of all frames below, innermost first."""

    def __init__(self, root: Frame, tensors: Tensors, replaced: Replaced) -> None:
        self._tensors, self._replaced, self._root = tensors, replaced, root
        self.all: list[Class] = []
        self._class: dict[Frame, Class] = {}
        self._around: dict[Frame, Frame] = {}
        self._add(root)
        self._name()

    def name_of(self, frame: Frame) -> str:
        """Return the name of the class of `frame`."""
        return self._class[frame].name

    def text(self, one: Class) -> str:
        """Return the source of a class."""
        frame = one.frames[0]
        names = self._input_names(one)
        body = self._body(frame, names)
        statements = body.write()
        is_root = frame is self._root
        if is_root:
            statements = self._with_results(body, statements)
        else:
            statements = with_return(statements, [*map(body.text, self._face(frame).outputs)])
        inside = {frame.local(each.path): f"{self.name_of(each)}()" for each in frame.children}
        made = constructor(inside | declared(frame, self._tensors))
        lines = [f"class {one.name}(nn.Module):", f'    """{self._doc(one)}"""', ""]
        lines += ["    def __init__(self):", "        super().__init__()"] if made else []
        lines += [*(f"        {each}" for each in made), ""] if made else []
        parameters = self._tensors.traced.parameters if is_root else names.values()
        lines.append(f"    def forward({', '.join(['self', *parameters])}):")
        return "\n".join([*lines, *(f"        {each}" for each in [*self._shapes(frame, names), *statements])])

    def _add(self, frame: Frame) -> None:
        for each in frame.children:
            self._around[each] = frame
            self._add(each)
        by_place: dict[Ref, str] = {ref: f"p{number}" for number, ref in enumerate(self._face(frame).inputs)}
        inside = tuple((frame.local(each.path), id(self._class[each])) for each in frame.children)
        body = self._body(frame, by_place)
        written = (each for each in body.write() if not each.startswith("#"))  # lines may be credited to one layer
        statements = [*written, *map(body.text, self._face(frame).outputs)]
        key = frame.kind, frame is self._root, tuple(declared(frame, self._tensors).items()), inside, tuple(statements)
        one = next((each for each in self.all if each.key == key), None)
        if one is None:
            self.all.append(one := Class(key))
        one.frames.append(frame)
        self._class[frame] = one

    def _name(self) -> None:
        """Give each class the name of its class in the model: of several variants the most frequent gets the name
        alone, the others get it with the numbers in the path of their first module.
        """
        by_kind: dict[str, list[Class]] = {}
        for each in self.all:
            kind = each.frames[0].kind
            own = getattr(kind, "__name__", str(kind).rpartition(".")[2])
            name = self._tensors.traced.name if each.frames[0] is self._root else own
            by_kind.setdefault(class_name(name), []).append(each)
        taken: set[str] = set()
        for name, variants in by_kind.items():
            for each in sorted(variants, key=lambda each: -len(each.frames)):
                number = "".join(step for step in each.frames[0].path.split(".") if step.isdigit())
                each.name = name if name not in taken else distinct(f"{name}{number}", taken)
                taken.add(each.name)

    def _face(self, frame: Frame) -> Any:
        return interface(frame, self._tensors)

    def _body(self, frame: Frame, inputs: Mapping[Ref, str]) -> Body:
        return Body(frame, self._tensors, self._replaced, inputs, self._class.get, frame is self._root)

    def _input_names(self, one: Class) -> dict[Ref, str]:
        """Name the inputs of the forward of a class as the last of its callers does."""
        chosen: list[str] = []
        for ref in self._face(one.frames[-1]).inputs:
            chosen.append(distinct(self._input_name(ref, one.frames[-1]) or "value", chosen))
        return dict(zip(self._face(one.frames[0]).inputs, chosen, strict=True))

    def _input_name(self, ref: Ref, frame: Frame) -> str:
        if isinstance(ref, str):
            return name_of_object(ref)
        if ref in self._tensors.paths:
            steps = self._tensors.paths[ref].split(".")
            return cleaned("_".join(steps[-2:] if steps[-1] in ("weight", "bias") else steps[-1:]))
        around = self._around[frame]
        while ref not in set(around.nodes()):
            around = self._around[around]
        return Names(around, self._tensors).of(ref)

    def _with_results(self, body: Body, statements: Sequence[str]) -> list[str]:
        """Return `statements` with those behind them that store and return the results of the model."""
        results: Any = self._tensors.traced.graph.output_node().args[0]
        texts = [body.text(each) if isinstance(each, fx.Node) else repr(each) for each in results]
        traced = self._tensors.traced
        stored: list[str] = []
        for name, node, text in zip(traced.results, results, texts, strict=True):
            if is_returned(name) or (isinstance(node, fx.Node) and memory_of(node).op == "placeholder"):
                continue  # what a call has written in place needs no storing
            stored.append(f"{self._place(name)} = {text}")
        named = zip(traced.results, texts, strict=True)
        return with_return([*statements, *stored], [text for name, text in named if is_returned(name)])

    def _place(self, name: str) -> str:
        """Return the expression of the attribute `name` in which the model stores a result."""
        traced = self._tensors.traced
        if Argument(name).root in traced.arguments:
            return name
        if isinstance(traced.model, nn.Module) and tensor_of(traced.model, name) is not None:
            return f"self.{subscripted(name)}"
        raise FusionError(
            f"porting a model: its result {name} is stored in an object that is no argument and no module; return the "
            "result"
        )

    def _doc(self, one: Class) -> str:
        if one.frames[0] is self._root:
            return f"{self._tensors.traced.name} with fused operators."
        paths = [each.path for each in one.frames]
        return f"Fused forward of {paths[0]}" + (f", and of {len(paths) - 1} more like it." if paths[1:] else ".")

    def _shapes(self, frame: Frame, names: Mapping[Ref, str]) -> list[str]:
        """Return the docstring of the forward: dtypes and shapes of its inputs."""
        inputs = {name: look(ref.meta["val"]) for ref, name in names.items() if isinstance(ref, fx.Node)}
        if frame is self._root:
            sources = self._tensors.traced.sources.items()
            read = [(each.expression, node) for node, each in sources if isinstance(each, Argument) and node.users]
            inputs = {name: look(node.meta["val"]) for name, node in read}
        lines = ["Inputs:", *(f"{name}: {shape.replace('[', ' [', 1)}" for name, shape in inputs.items())]
        if frame is self._root:
            results = [each for each in self._tensors.traced.results if is_returned(each)]
            lines += textwrap.wrap(f"Results: {', '.join(results)} of the model.", 90) if results else []
        return [f'"""{lines[0]}', *lines[1:], '"""'] if inputs else []


def is_returned(name: str) -> bool:
    """Return True if `name` is a part of the model's return value, not of an argument that it writes to."""
    return name == "output" or name.startswith(("output.", "output["))
