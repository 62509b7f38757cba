"""All pieces."""

from __future__ import annotations

from . import books, encoders, gemma, gpt_fast, gpt_oss, latents, litgpt, llama, mistral, nano, references
from .base import Piece

PIECES: tuple[Piece, ...] = (
    *llama.PIECES,
    *gemma.PIECES,
    *gpt_oss.PIECES,
    *mistral.PIECES,
    *latents.PIECES,
    *gpt_fast.PIECES,
    *litgpt.PIECES,
    *nano.PIECES,
    *books.PIECES,
    *encoders.PIECES,
    *references.PIECES,
)
