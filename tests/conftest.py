"""Which of the large grids run for each push: a fixed share of each, by name; all of them run nightly."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any
from zlib import crc32

import pytest

from fusion.options import PLAN_CACHE_VARIABLE
from tests import changed

SEED = "CANN_FUSION_SEED"
DECISION = pytest.StashKey[changed.Decision]()

SHARES = {
    "api/test_examples.py": 2,
    "attack/test_attack.py": 2,
    "attention/test_attention.py": 8,
    "attention/test_attention_numbers.py": 4,
    "attention/test_batches.py": 3,
    "attention/test_block_diagonal.py": 3,
    "attention/test_hidden_again.py": 4,
    "attention/test_int8_cache.py": 3,
    "attention/test_nz_block.py": 2,
    "attention/test_nz_block_in_floats.py": 3,
    "attention/test_paged_segments.py": 3,
    "corpus/test_corpus.py": 12,
    "corpus/test_recognition.py": 60,
    "sparse/test_sparse_attention.py": 6,
    "sparse/test_sparse_attention_numbers.py": 2,
    "sparse/test_cells.py": 2,
    "sparse/test_serving.py": 3,
    "sparse/test_serving_examples.py": 2,
    "sparse/test_packed_block.py": 2,
    "goldens/test_goldens.py": 32,
    "laws/test_laws.py": 64,
    "laws/test_reasons.py": 4,
    "laws/test_verification.py": 1600,
    "lowering/test_guest_numbers.py": 150,
    "models/test_caches.py": 3,
    "models/test_dynamic.py": 6,
    "models/test_experts.py": 3,
    "models/test_generate.py": 2,
    "latent/test_heads_first.py": 3,
    "latent/test_prolog_cells.py": 3,
    "latent/test_latent_atb.py": 3,
    "latent/test_latent_bytes.py": 3,
    "cache/test_layouts.py": 4,
    "cache/test_layouts_of_writes.py": 4,
    "latent/test_mla_preprocess.py": 3,
    "models/test_models.py": 6,
    "latent/test_paged_lines.py": 3,
    "models/test_projections.py": 4,
    "models/test_sparse_attention.py": 8,
    "latent/test_w8a8c8.py": 3,
    "repositories/test_pieces.py": 50,
    "moe/test_experts.py": 6,
    "moe/test_int8_experts.py": 2,
    "moe/test_loops.py": 2,
    "moe/test_routing_ge.py": 2,
    "operators/test_fallbacks.py": 32,
    "operators/test_meta.py": 32,
}
"""Modules of which one test in so many runs for each push; tests without parameters always run."""


MORE = 3
"""How many times as many of them run for what changed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where a push begins."""
    parser.addoption("--since", default="", help="run what changed since this commit (or `green`), a smoke of the rest")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed of what differs from run to run, unless it is given, and what to run; workers inherit both."""
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**6)))
    os.environ[PLAN_CACHE_VARIABLE] = "off"  # what a test sees is worked out in it
    given = getattr(config, "workerinput", {}).get("decision")
    config.stash[DECISION] = changed.Decision(*given) if given else changed.decided(config.option.since)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker."""
    node.workerinput["decision"] = astuple(node.config.stash[DECISION])


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say them."""
    return [f"attack: {SEED}={os.environ[SEED]}", f"tests: {config.stash[DECISION].why}"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Leave the others to the night."""
    areas = config.stash[DECISION].areas
    for item in items:
        share = next((share for name, share in SHARES.items() if item.nodeid.split("::")[0].endswith(name)), 1)
        more = MORE if areas and changed.area(item.nodeid) in areas else 1
        if "[" in item.nodeid and crc32(item.nodeid.encode()) % max(1, share // more):
            item.add_marker("nightly")
    if areas is not None:
        by_day = [each for each in items if not each.get_closest_marker("nightly")]
        for item in changed.beyond_smoke(each for each in by_day if changed.area(each.nodeid) not in areas):
            item.add_marker("nightly")
