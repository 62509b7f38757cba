"""Checks of what configures another compiler, which a user may confuse with the options of the pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fusion.errors import OptionError
from fusion.options import Options


def given_as(value: Any) -> str:
    """Write `value` with its type for a message."""
    return f"{value!r} of type {type(value).__name__}"


def check_config(compiler: str, config: Any) -> None:
    """Check that `config` maps names of options of `compiler`, or is None.

    Raises:
        OptionError: it is no mapping, or has an option of the pass or a key that is no text.
    """
    doing = f"configuring {compiler}"
    if not isinstance(config, Mapping | None):
        raise OptionError(
            f"{doing}: {given_as(config)} is no mapping of its options by name; give one, such as {{}}, and options of "
            "the pass as options={...}"
        )
    ours = {each.name for each in fields(Options)} - {"mode"}  # npugraph_ex has that name as well
    for name in config or {}:
        if not isinstance(name, str):
            raise OptionError(f"{doing}: {given_as(name)} is no name of an option; give a mapping of names to values")
        if name in ours:
            raise OptionError(
                f"{doing}: {name!r} is an option of the pass; give options of {compiler} first, and those of the pass "
                f"behind them: fusion.integrations.{compiler}({{}}, {{{name!r}: ...}})"
            )
