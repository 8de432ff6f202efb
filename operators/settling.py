"""The setting of an attempt that applies to a worker's process: the device."""

import logging

from pipeline.device import keep_to
from pipeline.run.attempts import read_attempt
from pipeline.store import open_store

log = logging.getLogger(__name__)


def settle(run_uri: str, attempt: int) -> None:
    """Restrict this process to its attempt's device. Raises InputError or StoreError."""
    wanted = read_attempt(open_store(run_uri), attempt).settings["trainer.device"]
    log.info("device: %s (trainer.device: %s)", keep_to(wanted), wanted)
