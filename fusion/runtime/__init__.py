"""Run-time parts of a compiled function: prepared weights, and verification in float64."""
