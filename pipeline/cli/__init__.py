"""The `retrace` command."""
