"""Facts about a model that are known before an engine loads it.

These facts include the model's family, its geometry, its widths and the number of its weights.
"""
