"""Goldens: what the pass does today to everything that the tests know, as text that a person can read and compare.

    python -m tests.goldens                      what differs from the text that is kept
    python -m tests.goldens models --accept      keep what comes out now, for the files whose name holds "models"

A change of these files is a change of what users get: it belongs into the commit that means it, and nowhere else.
"""
