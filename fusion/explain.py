"""explain: what would fuse in a model, and why the rest would not, without running anything."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from fusion._torch.exported import is_exported
from fusion._torch.fakes import FakeCopyMode, fresh_fake_mode
from fusion._torch.tracing import compile_apart, keep_marks, unwrapped
from fusion.backend import Explainer, FusionBackend
from fusion.errors import FusionError
from fusion.exported import explain_exported
from fusion.guesses import Guesses
from fusion.language import Rule
from fusion.options import Options
from fusion.outcome import GraphReport
from fusion.progress import watched
from fusion.report import Report
from fusion.target import Target

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def explain(
    fn_or_module: Callable[..., Any] | ExportedProgram,
    *args: Any,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    rules: Iterable[Rule] | None = None,
    **kwargs: Any,
) -> Report:
    """Trace a function or module under fake tensors and report what fuses.

    Nothing is run and no input, parameter or cache is changed: the model and its inputs are copied as fake tensors,
    which have no memory. Takes the arguments that the call would take; `options` as for the backend. Where Python reads
    a number or a size that follows from the whole numbers of the call alone, it gets that; of other data it gets 1, and
    True for a truth value, and the report says where. An ExportedProgram, which has its inputs, is given alone: its
    report is what `fuse_exported` makes of it.

    Returns:
        The report over all graphs of the call.

    Raises:
        FusionError: the options or rules cannot be used.
    """
    if is_exported(fn_or_module) and not (args or kwargs):
        return explain_exported(fn_or_module, options, rules)
    checked = Options.of(options)
    parts: list[GraphReport] = []
    backend = FusionBackend(checked, None if rules is None else tuple(rules))
    mode = fresh_fake_mode(Guesses)
    copied: dict[int, Any] = {}
    with FakeCopyMode(mode):
        model, fake_args, fake_kwargs = copy.deepcopy((fn_or_module, args, kwargs), copied)
    pairs = _copies(copied)
    explainer = Explainer(backend, parts, _positional(fn_or_module), {id(fake): real for fake, real in pairs})
    keep_marks(tree_leaves((args, kwargs)), copied)
    mode.given.give(pairs)
    for_inference = any(isinstance(each, torch.Tensor) and each.is_inference() for each in copied.values())
    try:
        with (
            watched("trace", checked.progress),
            torch.inference_mode() if for_inference else torch.no_grad(),
            mode,
        ):
            compile_apart(model, explainer, dynamic)(*fake_args, **fake_kwargs)
    except Exception as error:
        if isinstance(unwrapped(error), FusionError):
            raise unwrapped(error) from None
        if mode.places:
            told = ", ".join(mode.places)
            error.add_note(f"explaining runs nothing: numbers that depend on data were taken for 1 at {told}")
        raise
    return Report(Target.resolve(checked.target).name, tuple(parts), dict(mode.places))


def _copies(copied: dict[int, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each fake tensor with what it is a copy of; `copied`: the memo of `copy.deepcopy`, which keeps what it copies."""
    kept = [each for each in copied.get(id(copied), ()) if isinstance(each, torch.Tensor)]
    return [(copied[id(each)], each) for each in kept if id(each) in copied]


def _positional(called: Callable[..., Any]) -> tuple[str, ...]:
    forward = called.forward if isinstance(called, torch.nn.Module) else called
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # written in C
        return ()
    return tuple(each.name for each in parameters if each.kind in kinds)
