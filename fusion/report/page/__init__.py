"""HTML page of a document: one file without a network, its source, modules and graphs linked by a click."""
