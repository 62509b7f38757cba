"""Objects that act at each call of a compiled function: prepared weights, and verification in float64."""
