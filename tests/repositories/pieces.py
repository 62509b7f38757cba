"""All pieces."""

from __future__ import annotations

from . import gemma, gpt_fast, gpt_oss, llama, nano
from .base import Piece

PIECES: tuple[Piece, ...] = (
    *llama.PIECES,
    *gemma.PIECES,
    *gpt_oss.PIECES,
    *gpt_fast.PIECES,
    *nano.PIECES,
)
