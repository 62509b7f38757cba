"""The errors of the project: one base class, few children."""

from __future__ import annotations

from dataclasses import dataclass


class FusionError(Exception):
    """Base of errors for the user: what was being done, with what, what is wrong, and what to do about it."""


class OptionError(FusionError):
    """An option has a value that is not accepted."""


class OperatorError(FusionError):
    """An operator is unknown, or is called with arguments that it does not accept."""


class RuleError(FusionError):
    """A rule is declared wrongly."""


class FormatError(FusionError):
    """A rewritten graph reads a tensor in a storage format other than the tensor's."""


class NoRulesError(FusionError):
    """There is no rule to apply."""


class ExpectationWarning(UserWarning):
    """A compiled graph lacks a fusion that a region or the option `expect` names, or exceeds a limit of the option."""


@dataclass(frozen=True)
class Failure:
    """An error in the pass, and its place.

    Attributes:
        stage: the stage of the pipeline.
        error: type and message of the error.
        rule: name of the rule that was being applied, or "".
        drops_graph: True if the graph runs unchanged; else only the rule is dropped.
        node: name of the node that was being processed, or "".
        where: `file:line` in the model's code.
        source: the text of that line.
        module: path of the module.
    """

    stage: str
    error: str
    rule: str = ""
    drops_graph: bool = True
    node: str = ""
    where: str = ""
    source: str = ""
    module: str = ""

    @property
    def place(self) -> str:
        """Node, module, `file:line` and its text, as far as they are known."""
        line = ": ".join(part for part in (self.where, self.source) if part)
        context = " at ".join(part for part in (self.module, line) if part)
        return f"node {self.node}" + (f" ({context})" if context else "") if self.node else context

    @property
    def advice(self) -> str:
        """Advice to the user."""
        left_out = f"options={{'disable': {{{self.rule!r}}}}} leaves that rule out; " if self.rule else ""
        return f"{left_out}please report it, with the graph that options={{'dump_dir': folder}} writes"

    def __str__(self) -> str:
        by_rule = f", with the rule {self.rule!r}," if self.rule else ""
        place = f" at {self.place}" if self.place else ""
        return f"stage {self.stage}{by_rule} failed{place}: {self.error}"


class VerificationError(FusionError):
    """A rewritten graph differs from the original in its interface or its numbers.

    Attributes:
        culprit: the rule and the place of the wrong rewrite; None where it is not known.
        script: path of a script that reproduces a difference in numbers; "" where there is none.
    """

    def __init__(self, message: str, culprit: Failure | None = None, script: str = "") -> None:
        super().__init__(message)
        self.culprit, self.script = culprit, script


class StageError(FusionError):
    """A stage of the pipeline raised an error; the graph is unchanged."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure
