"""Errors that end a training step."""


class ReplayError(Exception):
    """A pass did not use its routes correctly; the text names layer, found and expected."""


class UpdateError(Exception):
    """An optimizer step was impossible."""
