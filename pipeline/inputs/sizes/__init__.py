"""How much memory a run needs, estimated from config.json and settings before anything starts."""
