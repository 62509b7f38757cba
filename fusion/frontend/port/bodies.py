"""Bodies: the statements of the forward of one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from fusion.frontend.port.expressions import call_text, is_fused, writer
from fusion.frontend.port.frames import Frame, is_item
from fusion.frontend.port.interfaces import Ref, Run, index_of, interface, rolled
from fusion.frontend.port.lines import Replaced
from fusion.frontend.port.names import TAKEN, Names, distinct, name_of_item
from fusion.frontend.port.nesting import is_increment, nested
from fusion.frontend.port.traced import Argument
from fusion.frontend.port.weights import Tensors, subscripted
from fusion.graph.aliasing import is_write, shown

aten = torch.ops.aten
_SEVERAL = (tuple, list)


@dataclass
class Body:
    """Writer of the statements of one forward.

    Attributes:
        frame: the frame.
        tensors: the tensors of the port.
        replaced: the lines of the model that fused calls replace.
        inputs: the names of the inputs.
        class_of: returns the class of a frame inside.
        is_root: True for the forward of the model itself, whose arguments are those of the model.
        lines: the statements so far.
    """

    frame: Frame
    tensors: Tensors
    replaced: Replaced
    inputs: Mapping[Ref, str]
    class_of: Callable[[Frame], Any]
    is_root: bool
    lines: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        """Decide which calls are nested in others, and when each value is read last."""
        self._interface = interface(self.frame, self.tensors)
        self._names = Names(self.frame, self.tensors)
        self._nested = nested(self.frame, self._names)
        self._at = {
            node: place
            for place, item in enumerate(self.frame.items)
            for node in ([item] if isinstance(item, fx.Node) else item.nodes())
        }
        self._env: dict[fx.Node, str] = {}
        self._commented: list[str] = []
        arguments = self.tensors.traced.arguments if self.is_root else ()
        self._live: dict[str, fx.Node | None] = dict.fromkeys(arguments)
        self._live |= {name: ref if isinstance(ref, fx.Node) else None for ref, name in self.inputs.items()}

    def write(self) -> list[str]:
        """Return the statements that compute the results."""
        place = 0
        while place < len(self.frame.items):
            item = self.frame.items[place]
            run = self._run(place)
            if run is not None:
                self._loop(run, place + len(run.frames) - 1)
            elif isinstance(item, Frame):
                self._call(item, place)
            elif item not in self._nested:
                self._statement(item, place)
            place += len(run.frames) if run is not None else 1
        return self.lines

    def text(self, node: Any) -> str:
        """Return the expression of a value in the forward."""
        if node in self._nested:
            return self._expression(node)
        if node in self._env:
            return self._env[node]
        if node in self.inputs:
            return self.inputs[node]
        source = self.tensors.traced.sources.get(node)
        if isinstance(source, Argument):
            return self._argument(source.expression)
        return "self." + subscripted(self.frame.local(self.tensors.paths[node]))

    def _expression(self, node: fx.Node) -> str:
        """Return the expression of the call `node`: of a layer of the port as a call of that layer."""
        write = writer(self.text)
        layer = self.tensors.layer_of(node)
        if layer and self.frame.has(layer):
            (given,) = [each for each in node.args if isinstance(each, fx.Node) and each not in self.tensors.paths]
            return f"self.{subscripted(self.frame.local(layer))}({write(given)})"
        return call_text(node, write, self._device)

    def _argument(self, expression: str) -> str:
        if self.is_root:
            return expression
        prefix = self._interface.prefix(expression)
        return self.inputs[prefix] + expression[len(prefix) :]

    def _device(self) -> str:
        """Return the device on which the forward makes tensors: that of its first input, else of a tensor it has."""
        read = [each for node in self.frame.nodes() for each in node.all_input_nodes]
        sources = self.tensors.traced.sources
        passed = [each for each in read if each in self.inputs or isinstance(sources.get(each), Argument)]
        own = [each for each in read if each in self.tensors.paths]
        return f"{self.text((passed or own)[0])}.device" if passed or own else '"cpu"'

    def _last_read(self, node: fx.Node) -> float:
        """Return the number of the item that reads `node` last; infinite where the forward returns it."""
        places = [0.0]
        for user in node.users:
            same = user in self._nested or (is_write(user) and shown(user) is not None)
            places.append(self._at.get(user, float("inf")))
            places += [self._last_read(user)] if same else []
        return max(places)

    def _bind(self, node: fx.Node, place: float) -> str:
        """Name the result of `node`, which item `place` computes: a name whose value is dead is used again."""
        busy = {name for name, node in self._live.items() if node is None or self._last_read(node) > place}
        name = distinct(self._names.of(node), busy | TAKEN)
        self._live[name] = node
        self._env[node] = name
        return name

    def _statement(self, node: fx.Node, place: int) -> None:
        if is_item(node) and node.args[0] in self._at:
            return  # named where its call is unpacked
        text = self._increment(node) or self._expression(node)
        comment = [f"# {each}" for each in self.replaced.lines(node, self.frame.kind)] if is_fused(node) else []
        if comment != self._commented:  # a rewrite of several calls has its lines above the first of them
            self.lines += comment
        self._commented = comment or self._commented
        base = shown(node) if is_write(node) else None
        if isinstance(node.meta.get("val"), _SEVERAL):
            self._several(node, text, place)
        elif base is not None or not node.users:
            self.lines.append(text)
            self._env |= {node: self.text(base)} if base is not None else {}
        else:
            self.lines.append(f"{self._bind(node, place)} = {text}")

    def _increment(self, node: fx.Node) -> str:
        """Return x.add_(c) for the copy of x + c over x; "" for any other call."""
        made: Any = node.args[1] if is_increment(node) else None
        return f"{self.text(made.args[0])}.add_({writer(self.text)(made.args[1])})" if made in self._nested else ""

    def _several(self, node: fx.Node, text: str, place: int) -> None:
        """Write a call of several results: unpacked, or with the only one that is read."""
        items: dict[int, list[fx.Node]] = {}
        for user in node.users:
            number: Any = user.args[1]
            items.setdefault(number, []).append(user)
        names: dict[int, str] = {}
        for number, users in sorted(items.items()):
            names[number] = self._bind(users[0], place)
            self._env |= dict.fromkeys(users, names[number])
        targets = ", ".join(names.get(number, "_") for number in range(len(node.meta["val"])))
        if len(names) == 1:
            ((number, name),) = names.items()
            targets, text = name, f"{text}[{number}]"
        self.lines.append(f"{targets} = {text}" if names else text)

    def _call(self, child: Frame, place: int) -> None:
        face = interface(child, self.tensors)
        text = f"self.{subscripted(self.frame.local(child.path))}({', '.join(map(self._passed, face.inputs))})"
        names = [self._bind(each, place) for each in face.outputs]
        self.lines.append(f"{', '.join(names)} = {text}" if names else text)

    def _passed(self, ref: Ref) -> str:
        return self._argument(ref) if isinstance(ref, str) else self.text(ref)

    def _run(self, start: int) -> Run | None:
        """Return the longest loop of calls that begins with item `start`; None where there is none."""
        frames: list[Frame] = []
        begin: Any = self.frame.items[start]
        base = index_of(begin.path) if isinstance(begin, Frame) else None
        for item in self.frame.items[start:] if base is not None else ():
            follows = isinstance(item, Frame) and base and index_of(item.path) == (base[0], base[1] + len(frames))
            if not isinstance(item, Frame) or not follows or self.class_of(item) is not self.class_of(begin):
                break
            frames.append(item)
        runs = (rolled(frames[:length], self.tensors) for length in range(len(frames), 1, -1))
        return next((each for each in runs if each is not None), None)

    def _loop(self, run: Run, place: int) -> None:
        """Write the calls of `run`, which end with item `place`, as a loop over the modules."""
        face = interface(run.frames[0], self.tensors)
        first = {number: self._passed(ref) for number, ref in enumerate(face.inputs) if number not in run.indexed}
        # half a step earlier: what the last module reads is read by it again, so that its name is not free
        names = [self._bind(each, place - 0.5) for each in interface(run.frames[-1], self.tensors).outputs]
        begun = {names[result]: first[number] for number, result in run.carried.items()}
        begun = {name: text for name, text in begun.items() if name != text}
        if begun:
            self.lines.append(f"{', '.join(begun)} = {', '.join(begun.values())}")
        loops, variables = self._iterated(run)
        args = [
            names[run.carried[number]] if number in run.carried else variables.get(number) or first[number]
            for number in range(len(face.inputs))
        ]
        over = ", ".join(loops.values())
        head = f"for {', '.join(loops)} in " + (f"zip({over}, strict=False):" if len(loops) > 1 else f"{over}:")
        call = f"{next(iter(loops))}({', '.join(args)})"
        self.lines += [head, "    " + (f"{', '.join(names)} = {call}" if names else call)]

    def _iterated(self, run: Run) -> tuple[dict[str, str], dict[int, str]]:
        """Return what the loop of `run` goes over, by loop variable, and the variable of each indexed input."""
        container, begin = index_of(self.frame.local(run.frames[0].path)) or ("", 0)
        end = begin + len(run.frames)
        later = self._count(run) > end
        bounds = f"[{begin or ''}:{end if later else ''}]" if begin or later else ""
        module = distinct(name_of_item(container), {*self._live, *TAKEN})
        loops = {module: f"self.{subscripted(container)}{bounds}"}
        variables: dict[int, str] = {}
        for number, (owner, index) in run.indexed.items():
            variables[number] = distinct(name_of_item(owner), {*self._live, *loops, *TAKEN})
            loops[variables[number]] = self._argument(owner) + (f"[{index}:]" if index else "")
        return loops, variables

    def _count(self, run: Run) -> int:
        """Count the modules in the container of the modules of `run`, as far as the port has them."""
        container, last = index_of(run.frames[-1].path) or ("", 0)
        paths = [*self.tensors.paths.values(), *(each.path for each in self.frame.children)]
        inside = [each[len(container) + 1 :].partition(".")[0] for each in paths if each.startswith(f"{container}.")]
        return 1 + max([last, *(int(each) for each in inside if each.isdigit())])


def with_return(statements: Sequence[str], results: Sequence[str]) -> list[str]:
    """Return `statements` with one behind them that returns `results`, if there are any."""
    if not results:
        return [*statements]
    start = f"{results[0]} = "
    if len(results) == 1 and statements and statements[-1].startswith(start):
        return [*statements[:-1], f"return {statements[-1].removeprefix(start)}"]
    return [*statements, f"return {', '.join(results)}"]
