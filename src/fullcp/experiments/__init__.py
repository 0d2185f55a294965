"""Experiments: one file a table or figure."""
