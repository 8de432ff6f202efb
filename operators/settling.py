"""The settings of an attempt that apply to a worker's process: device and time limit."""

import logging

from operators import hanging
from pipeline.device import keep_to
from pipeline.run.attempts import read_attempt
from pipeline.store import open_store

log = logging.getLogger(__name__)


def settle(run_uri: str, attempt: int) -> None:
    """Restrict this process to its attempt's device, and set the time limit for store operations.

    Raises InputError or StoreError.
    """
    settings = read_attempt(open_store(run_uri), attempt).settings
    hanging.allow(settings["launch.step_timeout_s"])
    wanted = settings["trainer.device"]
    log.info("device: %s (trainer.device: %s)", keep_to(wanted), wanted)
