"""Count the modules that a sample crosses, from the engine's answer to the router's hook."""
