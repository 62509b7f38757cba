"""The errors of the project: one base class, few children."""

from __future__ import annotations

from dataclasses import dataclass


class FusionError(Exception):
    """What was being done, with what, what is wrong, and what to do about it."""


class OptionError(FusionError):
    """An option has a value that it cannot have."""


class OperatorError(FusionError):
    """An operator is unknown, or is called in a way that it does not accept."""


class RuleError(FusionError):
    """A rule is declared wrongly."""


class FormatError(FusionError):
    """A rewritten graph reads a tensor in another storage format than it lies in."""


class NoRulesError(FusionError):
    """There is no rule to apply."""


@dataclass(frozen=True)
class Failure:
    """Something that raised while a graph was fused, and where.

    Attributes:
        stage: which stage of the pipeline it was.
        error: type and message of what was raised.
        rule: name of the rule that was at work, "" where none was.
        whole: whether the whole graph runs as it came; else it goes on without that rule.
        node: name of the node that was worked on, "" where it is not known.
        where: `file:line` in the model's code.
        source: the text of that line.
        module: path of the module.
    """

    stage: str
    error: str
    rule: str = ""
    whole: bool = True
    node: str = ""
    where: str = ""
    source: str = ""
    module: str = ""

    @property
    def place(self) -> str:
        """Node, module, `file:line` and its text, as far as they are known."""
        line = ": ".join(part for part in (self.where, self.source) if part)
        told = " at ".join(part for part in (self.module, line) if part)
        return f"node {self.node}" + (f" ({told})" if told else "") if self.node else told

    @property
    def advice(self) -> str:
        """What a user can do about it."""
        left_out = f"options={{'disable': {{{self.rule!r}}}}} leaves that rule out; " if self.rule else ""
        return f"{left_out}please report it, with the graph that options={{'dump_dir': folder}} writes"

    def __str__(self) -> str:
        """One sentence: stage, place, error."""
        of_rule = f", with the rule {self.rule!r}," if self.rule else ""
        place = f" at {self.place}" if self.place else ""
        return f"stage {self.stage}{of_rule} failed{place}: {self.error}"


class VerificationError(FusionError):
    """A rewritten graph is not what it has to be.

    Attributes:
        culprit: the guilty rewrite: its rule and its place in the model; None where it is not known.
        script: path of a script that reproduces a difference in numbers; "" where there is none.
    """

    def __init__(self, message: str, culprit: Failure | None = None, script: str = "") -> None:
        super().__init__(message)
        self.culprit, self.script = culprit, script


class StageError(FusionError):
    """A stage of the pipeline raised; the graph is left, or runs, as it came."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure
