"""Errors that end a training step."""

from pipeline.errors import LastingError


class ReplayError(LastingError):
    """The routes do not fit the model, or a pass did not use them correctly."""


class UpdateError(LastingError):
    """An update was impossible, for example because a number was not finite."""


class PeerError(Exception):
    """Another rank ended or did not respond in time; that rank's own error gives the cause."""
