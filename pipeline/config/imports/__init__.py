"""verl's own files as settings files of ours: scripts, YAML with `defaults`, interpolation."""
