"""Routers: which experts a token goes to, and with what weight."""
