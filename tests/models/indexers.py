"""Families of transformers with an indexer, at sizes that a chip takes, one step over a static cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from fusion.testing import Captured, capture

from .families import Built, build
from .latents import call

SIZES = dict(hidden_size=1024, q_lora_rank=1536, index_topk=24)


@dataclass(frozen=True)
class Indexed:
    """One family, with sizes of its own, and the attention of transformers that it runs with."""

    family: str
    sizes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType(SIZES))
    attention: str = "sdpa"

    def built(self, dtype: torch.dtype) -> Built:
        """A model of it."""
        return build(self.family, dtype, self.attention, **self.sizes)

    def captured(self, mode: str, dtype: torch.dtype) -> Captured:
        """The graph of one step."""
        of = self.built(dtype)
        return capture(of.model, (), dynamic=None, **call(of, mode))


FILE = "model_indexers"
MODES = ("prefill_static", "decode_static")
INDEXED: Mapping[str, Indexed] = MappingProxyType(
    {
        "DeepseekV32": Indexed("DeepseekV32"),
        "GlmMoeDsa": Indexed("GlmMoeDsa", dict(SIZES, q_lora_rank=2048)),
        "GlmMoeDsa, lists shared": Indexed(
            "GlmMoeDsa", dict(SIZES, q_lora_rank=2048, indexer_types=["full", "shared"])
        ),
        "AXK2": Indexed("AXK2"),
        "MistralLarge4": Indexed("MistralLarge4"),
        "Dots3Note": Indexed("Dots3Note"),
        "HYV4": Indexed("HYV4", attention="eager"),
    }
)
"""Families that list keys; those that list blocks, or pools of keys, are in `families`."""
