"""Runs in a child process behind the stubs: prints for each case a line of JSON: number, text, broken laws."""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch_npu  # noqa: F401  (registers the operators)
from torch_npu.op_plugin.meta import _meta_registrations

from tests.support import acl, ge

from .cases import numbered
from .conversion import converted
from .grid import MARK


def main(numbers: Iterable[int]) -> None:
    """Convert the cases with these `numbers`."""
    _meta_registrations.get_cann_version = lambda: "8.5.0"  # the stubs tell none
    ge.install()
    acl.install()
    for number in numbers:
        print(f"\n{MARK}{json.dumps([number, *converted(numbered()[number])])}", flush=True)
