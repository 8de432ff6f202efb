"""Facts about a model before an engine loads it: its routing, and what its family supports."""
