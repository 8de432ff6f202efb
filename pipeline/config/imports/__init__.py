"""Conversion of verl's scripts, and of YAML with `defaults` or interpolation, to our settings."""
