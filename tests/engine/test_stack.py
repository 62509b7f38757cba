"""A call with room on the stack is a call."""

from __future__ import annotations

import pytest

from fusion._torch.frame_stack import roomy


def depth(number: int) -> int:
    return 1 + depth(number - 1) if number else 0


def test_a_call_with_room_gives_what_the_function_gives():
    assert roomy(lambda: depth(700)) == 700
    assert roomy(lambda: roomy(lambda: "twice")) == "twice"


def test_what_it_raises_is_raised():
    def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        roomy(fail)
