"""Scripts that reproduce a difference between two graphs, and the functions that scripts call.

A graph is written as a function of `call`, which receives each operator with its arguments: the text shows the calls,
and running the function builds the graph again.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from fusion._torch.nested import map_only
from fusion._torch.operators import OpOverload, higher_order
from fusion._torch.tensors import attribute_of
from fusion.errors import FusionError
from fusion.graph.origin import location, look
from fusion.runtime.verification.judge import Judge
from fusion.runtime.verification.numbers import is_inexact, is_like, relative_error
from fusion.runtime.verification.runs import Call

_TEXT = '''"""{title}

    python {path}

Runs both graphs on the inputs in {data}, in their own dtypes and in float64, and prints the difference.
"""

{imports}
from math import inf, nan

import fusion.operators
from fusion.runtime.verification.script import compare
from torch import device

fusion.operators.ensure()


{graphs}

if __name__ == "__main__":
    compare(plain, fused, __file__)
'''


def write(folder: str, title: str, graphs: Mapping[str, fx.GraphModule], call: Call, names: Sequence[str]) -> Path:
    """Write a script that runs the graphs "plain" and "fused" on the inputs of `call`, and the inputs next to it.

    Args:
        folder: the folder; "" for a new temporary folder.
        title: the first line of the script.
        graphs: both graphs.
        call: their inputs.
        names: names of the results, and of the inputs that are written to.

    Raises:
        OSError: the folder cannot be written.
    """
    where = Path(folder or tempfile.mkdtemp(prefix="cann-fusion-"))
    where.mkdir(parents=True, exist_ok=True)
    path = next(path for number in count() if not (path := where / f"verify{number}.py").exists())
    written = _Written()
    texts = [written.function(name, gm) for name, gm in graphs.items()]
    inputs = [_saved(call.written.get(place, x)) for place, x in enumerate(call.inputs)]
    data = {"inputs": inputs, "constants": written.constants, "names": list(names)}
    torch.save(data, path.with_suffix(".pt"))
    imports = "\n".join(f"import {name}" for name in sorted(written.modules | {"torch"}))
    text = _TEXT.format(
        title=title, path=path, data=path.with_suffix(".pt").name, imports=imports, graphs="\n\n".join(texts)
    )
    path.write_text(text)
    return path


class _Written:
    """Writer of graphs as text.

    Attributes:
        constants: the constant tensors of the graphs, by their names in the text.
        modules: the modules that the text imports.
    """

    def __init__(self) -> None:
        self.constants: dict[str, Tensor] = {}
        self.modules: set[str] = set()

    def function(self, name: str, gm: fx.GraphModule) -> str:
        """Write a graph as a function, behind those for the bodies of its calls."""
        bodies: list[str] = []
        inputs, lines = ["    call,"], list[str]()
        for node in gm.graph.nodes:
            note = "  # " + ", ".join(filter(None, (look(node.meta.get("val")), location(node))))
            match node.op:
                case "placeholder":
                    inputs.append(f"    {node.name},{note}")
                case "get_attr":
                    lines.append(f"    {node.name} = {self._constant(f'{name}_{node.name}', node, bodies)}")
                case "output":
                    lines.append(f"    return {node.args[0]!r}")
                case _:
                    given = [*map(repr, node.args), *(f"{key}={value!r}" for key, value in node.kwargs.items())]
                    lines.append(f"    {node.name} = call({', '.join([self._called(node.target), *given])}){note}")
        return "\n".join([*bodies, f"def {name}(", *inputs, "):", *lines, ""])

    def _constant(self, name: str, node: fx.Node, bodies: list[str]) -> str:
        value = attribute_of(node)
        if isinstance(value, fx.GraphModule):
            bodies.append(self.function(name, value) + "\n")
            return name
        self.constants[name] = _saved(value)
        return f"call.constant({name!r})"

    def _called(self, target: Any) -> str:
        if isinstance(target, OpOverload):
            return f"torch.ops.{target}"
        if higher_order(target):
            return f"torch.ops.higher_order.{higher_order(target)}"
        module = "operator" if target.__module__ == "_operator" else target.__module__
        if module == "__main__" or "<" in target.__qualname__:
            raise FusionError(f"writing a graph as a script: {target.__qualname__} of {module} cannot be imported")
        self.modules.add(module)
        return f"{module}.{target.__qualname__}"


def _saved(x: Any) -> Any:
    """Copy a tensor without the memory that it shares with others."""
    return x.detach().clone() if isinstance(x, Tensor) else x


class _Built:
    """Builder of a graph from the calls of a function in a script: the argument `call` of such a function."""

    def __init__(self, constants: Mapping[str, Tensor]) -> None:
        self._constants = constants
        self._graph = fx.Graph()
        self._attributes: dict[str, Any] = {}

    def __call__(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        args, kwargs = map_only(FunctionType, self._body, (args, kwargs))
        return self._graph.call_function(target, args, kwargs)

    def constant(self, name: str) -> fx.Node:
        """Add a node that reads the constant tensor `name`."""
        self._attributes[name] = self._constants[name]
        return self._graph.get_attr(name)

    def _body(self, function: FunctionType) -> fx.Node:
        self._attributes[function.__name__] = _Built(self._constants).graph(function)
        return self._graph.get_attr(function.__name__)

    def graph(self, function: Callable[..., Any]) -> fx.GraphModule:
        """Build the graph that the calls of `function` describe."""
        _, *inputs = inspect.signature(function).parameters
        self._graph.output(function(self, *map(self._graph.placeholder, inputs)))
        return fx.GraphModule(self._attributes, self._graph)


class _Valued(fx.Interpreter):
    """Interpreter that records each result in the metadata of its node."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


def compare(plain: Callable[..., Any], fused: Callable[..., Any], path: str) -> None:
    """Run the graphs that two functions of a script describe, and print their differences; called by scripts."""
    saved = torch.load(Path(path).with_suffix(".pt"), weights_only=True)
    graphs = [_Built(saved["constants"]).graph(each) for each in (plain, fused)]
    call = Call.copying([each.graph for each in graphs], saved["inputs"])
    with torch.no_grad():
        observed = call.run(_Valued(graphs[0]).run)
        judge = Judge(graphs[0], call, observed, saved["names"], is_compiled=False)
        try:
            other = call.run(_Valued(graphs[1]).run)
        except Exception as error:
            print(judge.raised(error).message)
            return
        for name, *values in zip(saved["names"], observed, other, judge.judging, strict=True):
            print(f"{name}, {_difference(*values)}")
        fault = judge.fault(other, graphs[1])
    print(fault.message if fault else "Rounding explains the difference.")


def _difference(plain: Any, fused: Any, exact: Any) -> str:
    """Format how far the result `plain` and the result `fused` are from `exact`, or, of integers, how many entries
    differ.
    """
    if not isinstance(plain, Tensor) or not is_like(plain, fused):
        return f"{look(plain)} in the plain graph, {look(fused)} in the fused one"
    if not is_inexact(plain):
        return f"{look(plain)}: {int((plain != fused).sum())} entries differ"
    errors = (f"{relative_error(each, exact):.2g}" for each in (plain, fused))
    return "{}: off by {} in the plain graph, by {} in the fused one".format(look(plain), *errors)
