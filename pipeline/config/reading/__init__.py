"""Readers of settings: a YAML file and overrides become the typed tree, or a list of problems."""
