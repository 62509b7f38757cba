"""The report: its document, and what is written from it."""
