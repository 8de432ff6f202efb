"""Rules across settings, as pure functions of the tree and the model's config.json."""
