"""The output of a run for its users: progress, tables and trackers."""
