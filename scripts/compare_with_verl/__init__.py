"""Comparison of our algorithms with verl's functions: `python -m scripts.compare_with_verl`."""
