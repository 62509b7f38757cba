"""What must hold of a program: fused it is the plain one, or nothing was fused.

One trace serves all. Its backend keeps the graph as it came and one fused for each target; then the same compiled
function is called on fresh inputs, by each of these in turn, and once as plain Python.

* widened to float64, results and written inputs of a fused graph equal those of the graph, NaNs and infinities too;
* in the program's own dtype its error is at most 1.5 times that of the graph, and a rounding;
* shapes, dtypes, strides, written inputs, and which memory is shared with which, are those of plain Python.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from fusion._torch import Boxed, specialise_floats
from fusion.backend import FusionBackend
from fusion.facts import Facts
from fusion.library import installed
from fusion.options import Options
from fusion.prepared import supply
from fusion.report import GraphReport
from fusion.stages.capture import capture
from fusion.stages.lower import lower
from fusion.testing import WIDENED, widen, widened
from fusion.verification import relative_error
from fusion.weights import marks, parameter_inputs

from .memory import Seen, differences, seen_of
from .program import Program

TARGETS = ("host", "ascend910_93")
ROUNDINGS = 2
"""So many units of rounding are allowed beside 1.5 times the error of the graph itself."""

LOOSE = {"bfloat16": 2e-1, "half": 5e-2, "float16": 5e-2, "float32": 2e-3}
"""How far results of whole calls may be from those of plain Python, by the least dtype that a program names."""

JUMPS = re.compile(r"topk|argmax|argsort|sort|round|floor|int|char|short|long|uint8|bool|%|==|>|<|trunc")


@dataclass(frozen=True)
class Verdict:
    """What one case came to.

    Attributes:
        status: "right", "wrong", "raised", "invalid" (plain Python raises) or "untraced" (torch cannot capture it).
        detail: where and how it differs.
        fused: the rules applied, for each target.
        missed: of the parts built to be fused, those that were not, with the target.
        parts: how many parts were built to be fused, over all targets.
    """

    status: str
    detail: str = ""
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    missed: tuple[tuple[str, str, str], ...] = ()
    parts: int = 0

    @property
    def bad(self) -> bool:
        """Whether this is a defect."""
        return self.status in ("wrong", "raised")

    @property
    def known(self) -> bool:
        """Whether it is one that is being mended."""
        return self.bad and _is_known(self.detail)

    @property
    def kind(self) -> str:
        """What a smaller case must have in common with this one: the status, and the detail without numbers."""
        return f"{self.status} {re.sub(r'[0-9][0-9.e+-]*|[0-9]', '', self.detail.splitlines()[0] if self.detail else '')}"


KNOWN: dict[str, str] = {"strides of results": "has strides"}
"""Defects that are being mended, by what their details say: told last where a case has another one too."""


class Wrong(AssertionError):
    """The fused graph is not the plain one."""


class Raised(Exception):  # noqa: N818 - what it says
    """The pass or the fused graph raised what the plain one does not."""


@dataclass
class Attack:
    """The backend: every captured graph as it came and fused for each target, called by the current route.

    Attributes:
        targets: what to fuse for.
        lowering: who runs the fused graphs.
        route: which of them the next call runs, "plain" or a target.
        reports: of the first graph, for each target.
    """

    targets: Sequence[str]
    lowering: str = "eager"
    route: str = "plain"
    reports: dict[str, GraphReport] = field(default_factory=dict)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """What `torch.compile` calls."""
        specialise_floats(gm)
        return capture(gm, example_inputs, partial(self._compile, marks(example_inputs)))

    def _compile(self, marked: Sequence[Any], gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        fused = {target: self._fused(target, marked, gm, example_inputs) for target in self.targets}
        plain = fx.GraphModule(gm, _copied(gm))
        checked: list[bool] = []

        def run(values: list[Any]) -> Any:
            if not checked:
                checked.append(True)
                for target, (report, _) in fused.items():
                    with _blamed(f"{target}: "):
                        means_the_same(plain, report, values)
            return fused[self.route][1](values) if self.route != "plain" else plain(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _fused(
        self, target: str, marked: Sequence[Any], gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> tuple[GraphReport, Boxed]:
        graph = fx.GraphModule(gm, _copied(gm))
        backend = FusionBackend(Options(target=target, lower=self.lowering))
        facts = Facts(parameter_inputs(graph.graph, marked))
        with _blamed(f"{target}: fusing: "):
            report = backend.fuse(graph, installed(), facts)
        self.reports.setdefault(target, report)
        prepared = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")[len(example_inputs) :]]
        with _blamed(f"{target}: lowering: "):
            run = lower(graph, [*example_inputs, *prepared], self.lowering)
        return report, supply(run, graph.graph, report.prepared)


@contextlib.contextmanager
def _blamed(where: str) -> Iterator[None]:
    """What is raised inside is a defect, and says where."""
    try:
        yield
    except Wrong as error:
        raise Wrong(f"{where}{error}") from error
    except Exception as error:
        raise Raised(f"{where}{type(error).__name__}: {error}") from error


def _copied(gm: fx.GraphModule) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(gm.graph, {}))
    for old, new in zip(gm.graph.nodes, copied.nodes, strict=True):
        new.meta = copy.copy(old.meta)
    return copied


# one graph -----------------------------------------------------------------------------------------------------------


def means_the_same(plain: fx.GraphModule, report: GraphReport, values: Sequence[Any]) -> None:
    """The same algebra in float64; in their own dtypes, about the same error.

    Raises:
        Wrong: they differ.
    """
    if not report.matches:
        return
    count = len(values)
    graphs = (widen(plain), widen(report.graph), plain, report.graph)
    try:
        exact, old = (_run(graphs[number], values, None, count, wide=not number) for number in (0, 2))
    except Exception:  # noqa: BLE001 - the graph as it came cannot be run so: there is nothing to compare with
        return
    same, new = (_run(graphs[number], values, report, count, wide=number == 1) for number in (1, 3))
    for number, each in enumerate(zip(exact, same, old, new, strict=True)):
        _equal(f"result {number}", *each)


def _equal(what: str, exact: Any, same: Any, old: Any, new: Any) -> None:
    if not isinstance(exact, Tensor):
        if same != exact:
            raise Wrong(f"{what} is {same}, not {exact}")
        return
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise Wrong(f"{what} is {new.dtype}{list(new.shape)}, not {old.dtype}{list(old.shape)}")
    if not exact.is_floating_point() and not exact.is_complex():
        if not torch.equal(same, exact):
            raise Wrong(f"{what}: whole numbers differ")
        return
    exact, same, old, new = (_real(each) for each in (exact, same, old, new))
    wrong = relative_error(same, exact)
    if not wrong <= WIDENED:
        raise Wrong(f"{what}: the algebra is wrong, float64 differs by {wrong:.3g}")
    error, before = relative_error(new, exact), relative_error(old, exact)
    if not error <= 1.5 * before + ROUNDINGS * torch.finfo(old.dtype).eps and before < 0.1:
        raise Wrong(f"{what}: rms error {error:.3g} where the plain graph has {before:.3g}")


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def _run(gm: fx.GraphModule, values: Sequence[Any], report: GraphReport | None, count: int, wide: bool) -> list[Any]:
    """Results, and the first `count` inputs as they are afterwards."""
    copies = [_copy(each, wide) for each in values]
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    named = dict(zip(names, copies, strict=False))
    for each in report.prepared if report else ():
        module = widen(each.module) if wide else each.module
        copies.append(module(*(named[name] for name in each.sources)))
    return [*tree_leaves(gm(*copies)), *copies[:count]]


def _copy(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    return widened(value) if wide else value.detach().clone()


# one program ---------------------------------------------------------------------------------------------------------


def verdict(program: Program, targets: Sequence[str] = TARGETS, lowering: str = "eager") -> Verdict:
    """Attack with this program."""
    attack = Attack(targets, lowering)
    torch.compiler.reset()
    with _quiet():
        try:
            function = program.function()
            wanted = [seen_of(function, program.tensors(again)) for again in _calls(program)]
        except Exception as error:  # noqa: BLE001 - a changed program may be no program
            return Verdict("invalid", f"{type(error).__name__}: {error}")
        try:
            _attacked(program, attack, function, wanted)
        except Exception as error:  # noqa: BLE001 - sorted here
            return _failed(error, attack)
    fused = {name: tuple(each.rule for each in report.matches) for name, report in attack.reports.items()}
    parts = sum(len(_parts(program, target)) for target in attack.reports)
    return Verdict("right", "", fused, tuple(_missed(program, attack)), parts)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch tells of programs that it cannot trace."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)


def _calls(program: Program) -> tuple[bool, ...]:
    return (False, True) if program.again else (False,)


def _attacked(program: Program, attack: Attack, function: Callable[..., Any], wanted: Sequence[Seen]) -> None:
    compiled = torch.compile(function, backend=attack, fullgraph=True, dynamic=None if program.again else False)
    loose = _tolerance(program)
    for again, want in zip(_calls(program), wanted, strict=True):
        attack.route = "plain"
        plain = seen_of(compiled, _marked(program, again))
        for target in attack.targets:
            attack.route = target
            with _blamed(f"{target}: running: "):
                have = seen_of(compiled, _marked(program, again))
            different = differences(want, have, loose)
            different = different and sorted(differences(plain, have, loose), key=_is_known)
            if different:
                raise Wrong(f"{target}: {different[0]}")


def _tolerance(program: Program) -> float:
    """Infinite where a rounding may decide what is chosen."""
    if any(JUMPS.search(line) for line in program.lines):
        return math.inf
    return next((bound for name, bound in LOOSE.items() if program.autocast or name in repr(program)), LOOSE["float32"])


def _is_known(detail: str) -> bool:
    return any(re.search(known, detail) for known in KNOWN.values())


def _marked(program: Program, again: bool) -> tuple[Tensor, ...]:
    tensors = program.tensors(again)
    if not program.again:
        return tensors
    for given, tensor in zip(program.inputs, tensors, strict=True):
        for number, dim in enumerate(given.dims):
            if isinstance(dim, str) and tensor.shape[number] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, number)
    return tensors


def _failed(error: Exception, attack: Attack) -> Verdict:
    fused = {name: tuple(each.rule for each in report.matches) for name, report in attack.reports.items()}
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, Wrong):
            return Verdict("wrong", str(cause), fused)
        if isinstance(cause, Raised):
            return Verdict("raised", str(cause), fused)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return Verdict("untraced", f"{type(error).__name__}: {error}", fused)


def _missed(program: Program, attack: Attack) -> Iterator[tuple[str, str, str]]:
    """Each part that was not fused: what it should have become, the target, and what was refused."""
    for target, report in attack.reports.items():
        applied = [each.rule for each in report.matches]
        for part in _parts(program, target):
            names = tuple(part.split("|"))
            if not any(rule.startswith(names) for rule in applied):
                told = [str(each) for each in report.refusals if each.rule.startswith(names)]
                yield part, target, told[0] if told else "no refusal"


def _parts(program: Program, target: str) -> list[str]:
    """What is built to be fused on this target."""
    split = [each.partition(" on ") for each in program.fusable]
    return [part for part, _, only in split if only in ("", target)]
