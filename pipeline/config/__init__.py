"""Settings: one typed tree (tree), its reading from files (reading) and its checks (rules)."""
