"""Comparison of the algorithms with verl's own functions: `python -m scripts.compare_with_verl`."""
