"""Test tools for rules: functions captured as graphs, trials of a rule, and the laws that every rule must keep.

graph = capture(function, args).graph          the functional aten graph that a backend would see
widen(graph)                                   the same in float64, so that only the algebra is left to compare
check(rule, example, dtype, level)             raises where a law is broken
"""

from fusion.runtime.float64 import widen, widened
from fusion.testing.capturing import LEVELS, Captured, Level, capture, captured
from fusion.testing.laws import (
    DTYPES,
    WIDENED,
    cases,
    check,
    emits_valid_calls,
    idempotent,
    lacks_range,
    leaves_the_rest_alone,
    means_what_it_says,
    recognises,
    refuses,
    saves_what_it_claims,
)
from fusion.testing.precision_laws import further, grains, keeps_float64, refuses_float64, stays_in_range
from fusion.testing.trials import Trial, trial, trial_of

__all__ = [
    "DTYPES",
    "LEVELS",
    "WIDENED",
    "Captured",
    "Level",
    "Trial",
    "capture",
    "captured",
    "cases",
    "check",
    "emits_valid_calls",
    "further",
    "grains",
    "idempotent",
    "keeps_float64",
    "lacks_range",
    "leaves_the_rest_alone",
    "means_what_it_says",
    "recognises",
    "refuses",
    "refuses_float64",
    "saves_what_it_claims",
    "stays_in_range",
    "trial",
    "trial_of",
    "widen",
    "widened",
]
