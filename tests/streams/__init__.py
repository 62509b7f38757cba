"""Hyper-connections as public models write them, and what resembles them."""
