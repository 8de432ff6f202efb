"""Rules that involve several settings: pure functions of the settings and config.json."""
