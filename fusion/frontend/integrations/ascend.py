"""Backends of `torch.compile` that fuse and hand the graph to a compiler of torch_npu, configured by the user.

The pass comes first and the vendor's compiler behind it, so that calls are seen: weights are prepared, `assume` and
`verify` hold. Passes of the user in the configuration run where that compiler runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fusion.errors import OptionError
from fusion.frontend.backend import FusionBackend
from fusion.frontend.integrations.configurations import check_config, given_as
from fusion.frontend.library import Rules
from fusion.options import Options
from fusion.routes.vendor import converts_to_ge


def torchair(
    compiler_config: Any = None, options: Options | Mapping[str, Any] | None = None, rules: Rules = None
) -> FusionBackend:
    """Return a backend of `torch.compile` that fuses, and compiles by torchair with `compiler_config`.

        torch.compile(model, backend=fusion.integrations.torchair(config))    # in place of get_npu_backend(...)

    Args:
        compiler_config: a `torchair.CompilerConfig`; None for a default one. In its modes that capture graphs, fusions
            are planned for launches, as by `npugraph_ex`.
        options: the options of the pass; `lower` is "torchair".
        rules: the rules to choose from; None for the installed ones.

    Raises:
        OptionError: an option is wrong, `lower` names another compiler, or `compiler_config` is no configuration.
    """
    if compiler_config is not None and not hasattr(getattr(compiler_config, "mode", None), "value"):
        raise OptionError(
            f"handing graphs to torchair: {given_as(compiler_config)} is no configuration of torchair; give a "
            "torchair.CompilerConfig(), or None for a default one, and options of the pass as options={...}"
        )
    planned = "torchair" if converts_to_ge(compiler_config) else "npugraph_ex"
    return _backend("torchair", planned, compiler_config, options, rules)


def npugraph_ex(
    config: Mapping[str, Any] | None = None,
    options: Options | Mapping[str, Any] | None = None,
    rules: Rules = None,
) -> FusionBackend:
    """Return a backend of `torch.compile` that fuses, and captures by npugraph_ex with the options `config`.

        torch.compile(model, backend=fusion.integrations.npugraph_ex({"clone_input": False}))

    Args:
        config: options of npugraph_ex by name, as `npugraph_ex.compile_fx` takes them; `post_grad_custom_pre_pass` and
            `post_grad_custom_post_pass` among them.
        options: the options of the pass; `lower` is "npugraph_ex".
        rules: the rules to choose from; None for the installed ones.

    Raises:
        OptionError: an option is wrong, `lower` names another compiler, or `config` is no mapping of names.
    """
    check_config("npugraph_ex", config)
    return _backend("npugraph_ex", "npugraph_ex", config, options, rules)


def _backend(
    lower: str, planned: str, settings: Any, options: Options | Mapping[str, Any] | None, rules: Rules
) -> FusionBackend:
    given = Options.of(options)
    if given.lower not in ("auto", lower):
        raise OptionError(
            f"handing graphs to {lower}: option lower is {given.lower!r}, another compiler; leave it out, or give the "
            "options to fusion.FusionBackend"
        )
    made = replace(given, lower=lower, plan_lower=given.plan_lower or planned)
    return FusionBackend(made, rules, settings=settings)
