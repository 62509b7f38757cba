"""port: the fused forward of a model, written as PyTorch to own and to tune."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from fusion._torch.exported import is_exported
from fusion.errors import OptionError
from fusion.frontend.explain import explain
from fusion.frontend.port.source import source_of
from fusion.frontend.port.traced import signature_of, traced
from fusion.language import Library, Reader, Rule
from fusion.options import Options


def port(
    fn_or_module: Callable[..., Any],
    *args: Any,
    options: Options | Mapping[str, Any] | None = None,
    rules: Library | Iterable[Rule | Reader] | None = None,
    **kwargs: Any,
) -> str:
    """Return the source of a module that computes the call of `fn_or_module` by fused operators.

    Nothing is run. Sizes and dtypes of the source are those of the call, and its operators are chosen for launches one
    by one, so that it runs as it is.

    Args:
        fn_or_module: the function or module.
        args: the arguments of the call.
        options: the options, as for the backend.
        rules: the rules, as for the backend.
        kwargs: the keyword arguments of the call.

    Raises:
        FusionError: the call has several graphs, reads numbers from data, or has calls that cannot be written.
        OptionError: an option is wrong.
        RuleError: a rule is declared wrongly.
    """
    if is_exported(fn_or_module):
        raise OptionError("porting an exported program: its source is gone; port the module that was exported")
    checked = Options.of(options)
    if checked.plan_lower not in ("", "eager"):
        raise OptionError(
            f"porting a model: option plan_lower is {checked.plan_lower!r}; a port launches its operators one by one: "
            "leave the option out"
        )
    checked = replace(checked, plan_lower="eager")
    report = explain(fn_or_module, *args, options=checked, dynamic=False, rules=rules, **kwargs)
    with torch.no_grad():
        return source_of(traced(fn_or_module, report, signature_of(fn_or_module, kwargs)))
