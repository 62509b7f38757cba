"""All pieces."""

from __future__ import annotations

from . import (
    books,
    cann,
    diffusion,
    encoders,
    gemma,
    gpt_fast,
    gpt_oss,
    hub,
    latents,
    litgpt,
    llama,
    lucid,
    mistral,
    nano,
    positions_first,
    qwen,
    references,
    serving,
    torchtune,
    vision,
)
from .base import Piece

PIECES: tuple[Piece, ...] = (
    *llama.PIECES,
    *gemma.PIECES,
    *gpt_oss.PIECES,
    *mistral.PIECES,
    *qwen.PIECES,
    *latents.PIECES,
    *gpt_fast.PIECES,
    *litgpt.PIECES,
    *torchtune.PIECES,
    *lucid.PIECES,
    *nano.PIECES,
    *books.PIECES,
    *encoders.PIECES,
    *serving.PIECES,
    *references.PIECES,
    *cann.PIECES,
    *positions_first.PIECES,
    *hub.PIECES,
    *diffusion.PIECES,
    *vision.PIECES,
)
