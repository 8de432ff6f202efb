"""Programs for maintainers, to run in the repository's root."""
