"""Lowering: a rewritten graph passed to the compiler, or the interpreter, that runs it."""
