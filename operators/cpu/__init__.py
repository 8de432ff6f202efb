"""Stand-ins for the parts of a GPU run that a machine without GPUs lacks."""
