"""The commands that start workers, the same for every launcher."""

from collections.abc import Mapping, Sequence


def rollout_command(python: str, run_uri: str, worker: str, attempt: int) -> tuple[str, ...]:
    """Return the command that starts one rollout worker.

    Args:
        python: The Python interpreter.
        run_uri: The run's root in the store.
        worker: The worker's index, or a variable that Kubernetes replaces with the index.
        attempt: The attempt's number.
    """
    options = {"--run-uri": run_uri, "--worker": worker, "--attempt": str(attempt)}
    return (*_program(python, "operators.rollout"), *words(options))


def training_command(
    python: str, gang: Sequence[str], ranks: int, run_uri: str, attempt: int
) -> tuple[str, ...]:
    """Return the torchrun command that starts the training ranks of one node.

    torchrun does not restart ranks; the launcher restarts the gang and counts the restarts.

    Args:
        python: The Python interpreter.
        gang: The torchrun options that let the nodes find each other.
        ranks: The number of ranks on this node.
        run_uri: The run's root in the store.
        attempt: The attempt's number.
    """
    torchrun = {"--nproc-per-node": str(ranks), "--max-restarts": "0"}
    program = {"-m": "operators.training", "--run-uri": run_uri, "--attempt": str(attempt)}
    run = _program(python, "torch.distributed.run")
    return (*run, *gang, *words(torchrun), *words(program))


def _program(python: str, module: str) -> tuple[str, ...]:
    """Return the beginning of a command; the environment of a surrounding launcher is dropped."""
    return (python, "-m", "pipeline.launch.own_environment", "-m", module)


def words(options: Mapping[str, str]) -> list[str]:
    """Return options as words of a command. Example: {'--attempt': '3'} -> ['--attempt', '3']."""
    return [word for option in options.items() for word in option]
