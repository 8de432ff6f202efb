"""A linter for the project's prose: checks of proselint, and our own style (see `style.py`)."""
