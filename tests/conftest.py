"""Which of the large grids run for each push: a fixed share of each, by name; all of them run nightly."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from zlib import crc32

import pytest

SEED = "CANN_FUSION_SEED"

SHARES = {
    "attention/test_attention.py": 4,
    "attention/test_attention_numbers.py": 2,
    "corpus/test_corpus.py": 8,
    "corpus/test_recognition.py": 20,
    "sparse/test_sparse_attention.py": 6,
    "sparse/test_sparse_attention_numbers.py": 2,
    "goldens/test_goldens.py": 8,
    "laws/test_laws.py": 12,
    "models/test_caches.py": 3,
    "models/test_dynamic.py": 6,
    "models/test_generate.py": 2,
    "latent/test_heads_first.py": 3,
    "latent/test_latent_atb.py": 3,
    "latent/test_latent_bytes.py": 3,
    "cache/test_layouts.py": 4,
    "cache/test_layouts_of_writes.py": 4,
    "latent/test_mla_preprocess.py": 3,
    "models/test_models.py": 3,
    "latent/test_paged_lines.py": 3,
    "models/test_projections.py": 2,
    "models/test_sparse_attention.py": 4,
    "latent/test_w8a8c8.py": 3,
    "operators/test_fallbacks.py": 8,
    "operators/test_meta.py": 8,
}
"""Modules of which one test in so many runs for each push; tests without parameters always run."""


def pytest_configure() -> None:
    """Choose the seed of what differs from run to run, unless it is given; worker processes inherit it."""
    os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**6)))


def pytest_report_header() -> str:
    """Say it."""
    return f"attack: {SEED}={os.environ[SEED]}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Leave the others to the night."""
    for item in items:
        share = next((share for name, share in SHARES.items() if item.nodeid.split("::")[0].endswith(name)), 1)
        if "[" in item.nodeid and crc32(item.nodeid.encode()) % share:
            item.add_marker("nightly")
