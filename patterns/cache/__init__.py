"""Caches: writes by position and by slot, and pages that a block table gathers."""
