"""Errors of the project: one base class, few children."""

from __future__ import annotations


class FusionError(Exception):
    """Something that the project was asked to do cannot be done; the message says what to do instead."""
