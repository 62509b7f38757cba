"""Errors of the project: one base class, few children."""

from __future__ import annotations


class FusionError(Exception):
    """Something that the project was asked to do cannot be done; the message says what to do instead."""


class OptionError(FusionError):
    """An option or a target is not one that the package knows."""


class OperatorError(FusionError):
    """A target operator is unknown, wrongly declared, wrongly called or not registered."""


class RuleError(FusionError):
    """A rule is wrongly declared."""


class VerificationError(FusionError):
    """A rewritten graph does not mean what the original graph means."""


class NoRulesError(FusionError):
    """No rules were found to rewrite with."""
