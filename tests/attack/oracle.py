"""What must hold of a program: fused it is the plain one, or nothing was fused.

One trace serves all. Its backend keeps the graph as it came and one fused for each target; then the same compiled
function is called on fresh inputs, by each of these in turn, and once as plain Python.

* widened to float64, results and written inputs of a fused graph equal those of the graph, NaNs and infinities too;
* in the program's own dtype its error is at most 1.5 times that of the graph, and a rounding; where inputs are at an
  end of their range this alone is compared, and numbers that are finite stay so;
* shapes, dtypes, strides, written inputs, and which memory is shared with which, are those of plain Python.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusion.testing import WIDENED

from .backend import TIES, Attack, Raised, Wrong, blamed
from .defined import Defined
from .doors import DOORS
from .memory import Seen, differences, exactly, seen_of
from .program import Program

TARGETS = ("host", "ascend910_93")
LOOSE = {"bfloat16": 2e-1, "half": 5e-2, "float16": 5e-2, "float32": 2e-3, "float64": 1e-9}
"""How far results of whole calls may be from those of plain Python, by the least dtype that a program names."""

JUMPS = re.compile(r"topk|argmax|argsort|sort|round|floor|int|char|short|long|uint8|bool|%|==|>|<|trunc")


@dataclass(frozen=True)
class Verdict:
    """What one case came to.

    Attributes:
        status: "right", "wrong", "raised", "invalid" (plain Python raises), "untraced" (torch cannot capture it, or
            compile it as it stands) or "unmeasured" (its graph does not run in float64, or as it was captured).
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
    def kind(self) -> str:
        """What a smaller case must have in common with this one: the status, and the detail without numbers."""
        return (
            f"{self.status} {re.sub(r'[0-9][0-9.e+-]*|[0-9]', '', self.detail.splitlines()[0] if self.detail else '')}"
        )


def verdict(program: Program, targets: Sequence[str] = TARGETS, lowering: str = "eager", door: str = "") -> Verdict:
    """Attack with this program, by one of the other `DOORS` if one is named."""
    if door:
        return _by_door(program, targets, door)
    rounds = any("round" in line for line in program.lines)
    algebra = TIES if rounds else WIDENED
    attack = Attack(targets, lowering, algebra=algebra, scaled=program.is_scaled, disabled=program.disabled)
    torch.compiler.reset()
    with _quiet():
        try:
            function = program.function()
            with Defined():
                wanted = [seen_of(function, program.tensors(again)) for again in _calls(program)]
        except Exception as error:
            return Verdict("invalid", f"{type(error).__name__}: {error}")
        try:
            _attacked(program, attack, function, wanted)
        except Exception as error:
            found = _failed(error, _applied(attack))
            torn = found.status == "raised" and lowering == "inductor" and not _is_compiled(program)
            return Verdict("untraced", found.detail) if torn else found
    fused = _applied(attack)
    parts = sum(len(_parts(program, target)) for target in attack.reports)
    status, detail = ("unmeasured", attack.unmeasured[0]) if attack.unmeasured else ("right", "")
    return Verdict(status, detail, fused, tuple(_missed(program, attack)), parts)


def _by_door(program: Program, targets: Sequence[str], door: str) -> Verdict:
    """Attack by another door, with the first sizes of a program alone."""
    fused, tolerance = dict[str, tuple[str, ...]](), _tolerance(program)
    with _quiet():
        if not program.runs():
            return Verdict("invalid", "plain Python raises")
        for target in targets:
            torch.compiler.reset()
            try:
                fused[target] = DOORS[door](program, target, tolerance)
            except Exception as error:
                return _failed(error, fused)
    return Verdict("right", "", fused)


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


def at_the_door(program: Program, target: str, lowering: str) -> list[str]:
    """How the program compiled by the backend itself, `cann_fusion`, differs from plain Python in all that is seen."""
    function = program.function()
    torch.compiler.reset()
    options = {"target": target, "lower": lowering}
    compiled = torch.compile(function, backend="cann_fusion", options=options, fullgraph=True, dynamic=False)
    with _quiet():
        warnings.filterwarnings("error", "cann-fusion could not fuse")
        want, have = (seen_of(each, program.tensors()) for each in (function, compiled))
    return differences(want, have, _tolerance(program))


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
            with blamed(f"{target}: running: "):
                have = seen_of(compiled, _marked(program, again))
            different = differences(want, have, loose) and differences(plain, have, loose)
            if different:
                different = differences(want, have, loose, exactly(function, program.tensors(again)))
            if different and attack.lowering != "eager":
                attack.route = "plain lowered"
                different = differences(seen_of(compiled, _marked(program, again)), have, loose)
            if different:
                raise Wrong(f"{target}: {different[0]}")


def _is_compiled(program: Program) -> bool:
    """Whether Inductor compiles the program as it stands."""
    torch.compiler.reset()
    try:
        torch.compile(program.function(), dynamic=False)(*program.tensors())
    except Exception:
        return False
    return True


def _tolerance(program: Program) -> float:
    """Infinite where a rounding may decide what is chosen, and at the ends of a range."""
    if program.is_scaled or any(JUMPS.search(line) for line in program.lines):
        return math.inf
    return next((bound for name, bound in LOOSE.items() if program.autocast or name in repr(program)), LOOSE["float32"])


def _marked(program: Program, again: bool) -> tuple[Tensor, ...]:
    tensors = program.tensors(again)
    if not program.again:
        return tensors
    for given, tensor in zip(program.inputs, tensors, strict=True):
        for number, dim in enumerate(given.dims):
            if isinstance(dim, str) and tensor.shape[number] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, number)
    return tensors


def _applied(attack: Attack) -> dict[str, tuple[str, ...]]:
    return {name: tuple(each.rule for each in report.matches) for name, report in attack.reports.items()}


def _failed(error: Exception, fused: dict[str, tuple[str, ...]]) -> Verdict:
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
