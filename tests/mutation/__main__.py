"""Drop one step of a guard at a time and see which test fails: `python -m tests.mutation [expression]`."""

from importlib import import_module

from tests.mutation import probe

probe.install()  # before anything of the library is imported
import_module("tests.mutation.command").run()
