"""The doors beside the backend: guests of Inductor, exported programs, verified calls, and weights that change.

guest       the captured graph compiled by Inductor, with the pass as a guest at one of its hooks
exported    `torch.export`, `fusion.fuse_exported`, and the module of the program that it returns
verified    `verify=True`, which must accuse no sound program
injected    the same with one result of the rewrites made half as large again, which it must notice
rewritten   two calls, between which weights are written to in a way that bumps no version
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from torch import Tensor, fx, nn

import fusion
from fusion.errors import VerificationError
from fusion.frontend import backend
from fusion.report.outcome import Outcome
from fusion.runtime.verification import relative_error
from fusion.testing import capture
from tests.lowering.guests import HOOKS, check

from .backend import Raised, Wrong, blamed
from .memory import exactly
from .program import Program, changed

NOTICED = 0.2
"""A relative rms error that a verification must notice."""
Door = Callable[[Program, str, float], tuple[str, ...]]
"""Takes a program, a target and a tolerance; returns the rules that were applied."""


class Model(nn.Module):
    """A program as a module: weights are its Parameters, `forward` takes the other inputs."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.function, self.names = program.function(), [each.name for each in program.inputs]
        for name, tensor in zip(self.names, program.tensors(), strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        given = iter(inputs)
        return self.function(*(getattr(self, each) if each in self._parameters else next(given) for each in self.names))


def arguments(program: Program) -> list[Tensor]:
    """Return the inputs of a `Model`."""
    return [each for each in program.tensors() if not isinstance(each, nn.Parameter)]


def guest(program: Program, target: str, loose: float) -> tuple[str, ...]:
    """Compile the captured graph with a guest; where Inductor without rewrites fails as well, the case is untraced."""
    captured = capture(program.function(), program.tensors())
    hook, disabled = HOOKS[crc32(repr(program).encode()) % len(HOOKS)], frozenset(program.disabled)
    try:
        return tuple(check(captured, hook, target, disable=disabled))
    except Exception as error:
        check(captured, hook, target, fuel=0)
        kind = Wrong if isinstance(error, AssertionError) else Raised
        raise kind(f"{target}: guest at {hook}: {type(error).__name__}: {error}") from error


def exported(program: Program, target: str, loose: float) -> tuple[str, ...]:
    """Export, fuse and run; aliases and strides of results are not those of a program.

    A case is untraced where torch's own decomposed program cannot run, as where it copies back into an expanded input.
    """
    made = torch.export.export(Model(program), tuple(arguments(program)))
    options = {"target": target, "disable": frozenset(program.disabled)}
    plain = made.run_decompositions({})  # torch cannot where inputs share memory
    _called(plain.module(), program)
    with blamed(f"{target}: exported: "), warnings.catch_warnings():
        warnings.filterwarnings("error", "cann-fusion could not")
        fused = fusion.fuse_exported(plain, options=options)
        have = _called(fused.module(), program)
    _require_near(
        f"{target}: exported", (_called(made.module(), program), _exactly(Model(program), program)), have, loose
    )
    return _rules(fused.graph)


def verified(program: Program, target: str, loose: float) -> tuple[str, ...]:
    """Verify a call; raise where the verification does."""
    with _faults(f"{target}: verified: ", program):
        _called(_compiled(program, target, verify=True), program)
    return ()


def injected(program: Program, target: str, loose: float) -> tuple[str, ...]:
    """Make one result of the rewrites wrong; where a result shows that, the verification must raise.

    Inputs are as they were before scaling: beyond its range, the plain graph is as wrong.
    """
    program = changed(program, inputs=tuple(changed(each, power=0) for each in program.inputs))
    with patch.object(backend, "fuse_graph", _wrongly(backend.fuse_graph)):
        have = _called(_compiled(program, target), program)
        want = _called(Model(program), program)
        if not any(_is_far(one, other) for one, other in zip(want, have, strict=True)):
            return ()
        try:
            _called(_compiled(program, target, verify=True), program)
        except Exception as error:
            if any(isinstance(each, VerificationError) for each in _causes(error)):
                return ("injected",)
            raise
    raise Wrong(f"{target}: injected: the verification notices nothing")


def rewritten(program: Program, target: str, loose: float) -> tuple[str, ...]:
    """Call, write to each weight by `data`, call again."""
    plain, fused = Model(program), Model(program)
    run = _compiled(program, target, model=fused)
    for _ in range(2):
        with _faults(f"{target}: rewritten: ", program):
            have = _called(run, program)
        _require_near(f"{target}: rewritten", (_called(plain, program), _exactly(plain, program)), have, loose)
        for model in (plain, fused):
            for each in model.parameters():
                each.data.mul_(0.5)
    return ()


DOORS: dict[str, Door] = {each.__name__: each for each in (guest, exported, verified, injected, rewritten)}
SHARES = ("guest", "guest", "exported", "exported", "verified", "verified", "injected", "rewritten", *[""] * 12)
"""The door of each of 20 cases; "" for the backend."""


def door_of(number: int) -> str:
    """Return the door of the case of this number."""
    return SHARES[number % len(SHARES)]


# what they share -----------------------------------------------------------------------------------------------------


def _compiled(program: Program, target: str, model: nn.Module | None = None, **options: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    given = {"target": target, "lower": "eager", "plan_cache": "off", "disable": frozenset(program.disabled), **options}
    return torch.compile(model or Model(program), backend="cann_fusion", options=given, fullgraph=True, dynamic=False)


@contextmanager
def _faults(where: str, program: Program) -> Iterator[None]:
    """Blame the pass for what is raised inside, unless torch alone cannot compile the program."""
    try:
        yield
    except Exception as error:
        torch.compiler.reset()
        _called(torch.compile(Model(program), backend="aot_eager", fullgraph=True, dynamic=False), program)
        raise Raised(f"{where}{type(error).__name__}: {error}") from error


def _called(model: Callable[..., Any], program: Program) -> list[Any]:
    """Return the results, and the inputs as they are afterwards."""
    given = arguments(program)
    with torch.no_grad():
        return [*model(*given), *given]


def _exactly(model: nn.Module, program: Program) -> list[Any] | None:
    """Return the results of `model` in float64, and the inputs as they are; None where that does not run."""
    exact = exactly(model, arguments(program))
    return None if exact is None else list(exact.values)


def _require_near(where: str, wants: tuple[list[Any], list[Any] | None], have: Sequence[Any], loose: float) -> None:
    """Require that `have` is near to the first of `wants`, or to the second, the same in float64, if there is one."""
    want, exact = wants
    for number, (one, other, right) in enumerate(zip(want, have, exact or want, strict=True)):
        if not isinstance(one, Tensor):
            if one == one and one != other:
                raise Wrong(f"{where}: result {number} is {other}, not {one}")
            continue
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise Wrong(f"{where}: result {number} is {other.dtype}{list(other.shape)}")
        if loose < math.inf and not min(relative_error(other, each) for each in (one, right)) <= loose:
            raise Wrong(f"{where}: result {number} is off by {relative_error(other, one):.3g}")


def _rules(graph: fx.Graph) -> tuple[str, ...]:
    return tuple(sorted({node.meta["fusion"]["rule"] for node in graph.nodes if "fusion" in node.meta}))


def _wrongly(fuse_graph: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Fuse as `fuse_graph` does, and make the last float tensor that a rewrite gives half as large again."""

    def fuse(graph: fx.Graph, *args: Any, **given: Any) -> Outcome:
        outcome = fuse_graph(graph, *args, **given)
        results = [node for node in graph.nodes if "fusion" in node.meta and _is_float(node.meta.get("val"))]
        if results:
            last = results[-1]
            with graph.inserting_after(last):
                wrong = graph.call_function(torch.ops.aten.mul.Tensor, (last, 1.5))
            wrong.meta = dict(last.meta)
            last.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        return outcome

    return fuse


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_far(one: Any, other: Any) -> bool:
    both = _is_float(one) and _is_float(other) and bool(one.isfinite().all()) and bool(other.isfinite().all())
    return both and relative_error(other, one) > NOTICED


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__
