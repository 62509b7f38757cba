"""Lowering: a rewritten graph handed to the compiler, or the interpreter, that runs it."""
