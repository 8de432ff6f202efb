"""Errors that end a training step."""

from pipeline.errors import LastingError


class ReplayError(LastingError):
    """A pass did not use its routes correctly; the text names layer, found and expected."""


class UpdateError(LastingError):
    """An optimizer step was impossible."""
