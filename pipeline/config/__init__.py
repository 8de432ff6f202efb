"""Settings: one typed tree (tree), how it is read (load) and checked (check)."""
