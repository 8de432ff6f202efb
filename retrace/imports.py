"""Jobs of other trainers as settings files."""

import os
from collections.abc import Sequence
from pathlib import Path


def import_verl(source: str | Path, arguments: Sequence[str] = ()) -> str:
    """The text of a settings file for a verl job, with TODO comments on what is to be decided.

    `source` is a shell script that starts verl.trainer.main_ppo, a YAML file for verl, or a folder
    of such files with `--config-name=NAME` among the arguments, which are further ones of verl's
    command line. bash evaluates a script with the variables of this process, but starts no program
    and writes no file. YAML with `defaults` or `${...}` needs the extra `verl`.

    Raises InputError: what cannot be read or resolved, with its line or key.
    """
    # Imported here: readers of traces have no use for pydantic and YAML.
    from pipeline.config.imports.job import import_verl as import_job

    return import_job(Path(source), arguments, os.environ)
