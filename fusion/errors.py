"""Errors of the project: one base class, few children."""

from __future__ import annotations


class FusionError(Exception):
    """Something that the project was asked to do cannot be done; the message says what to do instead."""


class RuleError(FusionError):
    """A rule is declared wrongly, or two rules collide."""


class NoRulesError(FusionError):
    """No rule is loaded, so nothing could be fused."""


class OptionError(FusionError):
    """An option, a rule or a target has a name that is not known."""


class OperatorError(FusionError):
    """An operator is not in the registry."""


class VerificationError(FusionError):
    """A fused graph did not give what the original gives."""
