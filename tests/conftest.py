"""What a run of the tests leaves out: of long grids the cases that another commit runs, and of domains that did not
change all but a smoke. `make nightly` runs everything."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import pytest
import torch

from fusion.options import PLAN_CACHE_VARIABLE
from tests import changed
from tests.support import rotation

SEED = "CANN_FUSION_SEED"
DECISION = pytest.StashKey[changed.Decision]()

MORE = 3
"""How many times as many cases of the long grids run for what changed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--since`, the commit that a push begins after."""
    parser.addoption("--since", default="", help="run what changed since this commit (or `green`), a smoke of the rest")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed and the number of the commit, unless they are given, and what to run; workers inherit all."""
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**6)))
    os.environ.setdefault(rotation.VARIABLE, str(rotation.commit_number()))
    os.environ[PLAN_CACHE_VARIABLE] = "off"  # what a test sees is worked out in it
    given = getattr(config, "workerinput", {}).get("decision")
    config.stash[DECISION] = changed.Decision(*given) if given else changed.decided(config.option.since)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the decision to a worker."""
    node.workerinput["decision"] = astuple(node.config.stash[DECISION])


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print what runs the same cases again: the seed, the number of the commit and the decision."""
    given = [f"{name}={os.environ[name]}" for name in (SEED, rotation.VARIABLE)]
    return [f"chosen by: {' '.join(given)}", f"tests: {config.stash[DECISION].why}"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Mark `nightly` what this commit leaves out: cases of long grids that are not due, and all but a smoke of the
    domains that did not change."""
    number, areas = int(os.environ[rotation.VARIABLE]), config.stash[DECISION].areas
    constant = list[pytest.Item]()
    for item in items:
        share, elsewhere = rotation.share_of(item), areas is not None and changed.area(item.nodeid) not in areas
        if share == 1 and elsewhere:
            constant.append(item)
        more = MORE if areas and not elsewhere else 1
        if not rotation.due(item.nodeid, max(1, share // more), number):
            item.add_marker("nightly")
    for item in changed.beyond_smoke(constant, number):
        item.add_marker("nightly")


@pytest.fixture
def fresh() -> None:
    """Forget what was compiled before."""
    torch.compiler.reset()
