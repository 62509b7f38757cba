"""Generators: one module for each kind of page that is written from the code, the library or the recorded results."""
