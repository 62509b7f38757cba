"""Regions of a model in which its author expects a fusion, and what was fused there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fusion.records import Refusal
from fusion.report.trace import displayed_place


@dataclass(frozen=True)
class RegionReport:
    """A region in one module of one graph.

    Attributes:
        rule: the rule that is expected to fuse.
        name: name of the function or class that is a region; "" for a `with` block.
        module: path of the module.
        where: `file:line` of the first call in it.
        fused: number of fusions of its calls, by rule.
        refusals: the refusals in it that explain why `rule` did not fuse; empty if it did.
        unused: the reason why `rule` is not used at all; "" if it is.
    """

    rule: str
    name: str
    module: str
    where: str
    fused: Mapping[str, int] = field(default_factory=dict[str, int])
    refusals: tuple[Refusal, ...] = ()
    unused: str = ""

    @property
    def is_met(self) -> bool:
        """True if the expected rule fused calls of the region."""
        return self.rule in self.fused

    @property
    def summary(self) -> str:
        """The fusions in the region, and the first reason why `rule` is not one of them."""
        reasons = (f"{each.reason} [{displayed_place(each.where)}]" for each in self.refusals)
        reason = f"{self.rule}: {self.unused}" if self.unused else next(reasons, "")
        return "; ".join(filter(None, (f"fused: {listed(self.fused)}", reason)))


def listed(fused: Mapping[str, int]) -> str:
    """List numbers of fusions by rule: "attention 1, rope 2"."""
    return ", ".join(f"{rule} {count}" for rule, count in fused.items()) or "nothing"
