"""The errors of the project: one base class, few children."""

from __future__ import annotations


class FusionError(Exception):
    """What was being done, with what, what is wrong, and what to do about it."""


class OptionError(FusionError):
    """An option has a value that it cannot have."""


class OperatorError(FusionError):
    """An operator is unknown, or is called in a way that it does not accept."""


class RuleError(FusionError):
    """A rule is declared wrongly."""


class VerificationError(FusionError):
    """A rewritten graph is not what it has to be."""


class NoRulesError(FusionError):
    """There is no rule to apply."""
