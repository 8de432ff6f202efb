"""The device of a worker's process, from the settings of its attempt."""

import logging

from pipeline.device import keep_to
from pipeline.run.attempts import read_attempt
from pipeline.store import open_store

log = logging.getLogger(__name__)


def settle(run_uri: str, attempt: int) -> None:
    """Keep this process to the attempt's device. Raises InputError, StoreError."""
    wanted = read_attempt(open_store(run_uri), attempt).settings["trainer.device"]
    log.info("device: %s (trainer.device: %s)", keep_to(wanted), wanted)
