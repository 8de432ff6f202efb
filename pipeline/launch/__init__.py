"""How a stage's workers start. Today: local processes."""
