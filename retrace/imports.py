"""Conversion of other trainers' jobs into settings files."""

import os
from collections.abc import Sequence
from pathlib import Path


def import_verl(source: str | Path, arguments: Sequence[str] = ()) -> str:
    """Return the text of a settings file for a verl job, with a TODO for each open decision.

    bash evaluates a script with the environment variables of this process, but does not start
    programs or write files.

    Args:
        source: A shell script that starts verl.trainer.main_ppo, a YAML file for verl, or a folder
            of such files if `arguments` contains `--config-name=NAME`. YAML with `defaults` or
            `${...}` needs the extra `verl`.
        arguments: Further arguments from verl's command line.

    Raises:
        InputError: The job cannot be read or resolved; the message names the line or key.
    """
    # Imported here because readers of traces do not need pydantic and YAML.
    from pipeline.config.imports.job import import_verl as import_job

    return import_job(Path(source), arguments, os.environ)
