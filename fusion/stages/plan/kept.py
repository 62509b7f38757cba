"""Plans that are kept: JSON under a digest of all that they depend on.

That is the rule, how its inputs look, the targets and some options. A symbolic size belongs to one graph: such plans
are never kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from fusion.language import Refused, Rule
from fusion.language.code import is_of_its_module
from fusion.recording import Fakes
from fusion.records import Plan
from fusion.texts import UnwrittenError, read, written

Plans = Mapping[str, Plan | Refused]


def digest(rule: Rule, *parts: Any) -> str | None:
    """What tells plans apart beside the versions; None where no text can."""
    if not is_of_its_module(rule):
        return None
    try:
        told = json.dumps([type(rule).__module__, type(rule).__qualname__, written(parts)])
    except UnwrittenError:
        return None
    return sha256(told.encode()).hexdigest()


def text_of(plans: Plans) -> str | None:
    """Plans as JSON; None where they hold what cannot be written."""
    try:
        return json.dumps({name: written(each) for name, each in plans.items()})
    except UnwrittenError:
        return None


def plans_of(text: str, fakes: Fakes) -> Plans:
    """The plans that a text tells, with fakes of this graph."""
    return {name: read(each, fakes.made) for name, each in json.loads(text).items()}
