"""The commands that start workers, whatever they run on."""

from collections.abc import Mapping, Sequence


def rollout_command(python: str, run_uri: str, worker: str, attempt: int) -> tuple[str, ...]:
    """One rollout worker."""
    options = {"--run-uri": run_uri, "--worker": worker, "--attempt": str(attempt)}
    return (python, "-m", "operators.rollout", *words(options))


def training_command(
    python: str, gang: Sequence[str], ranks: int, run_uri: str, attempt: int
) -> tuple[str, ...]:
    """torchrun on one node, which starts that node's training ranks.

    `gang`: torchrun's options on how the nodes find each other. torchrun restarts nothing: the
    launcher does, and counts.
    """
    torchrun = {"--nproc-per-node": str(ranks), "--max-restarts": "0"}
    program = {"-m": "operators.training", "--run-uri": run_uri, "--attempt": str(attempt)}
    return (python, "-m", "torch.distributed.run", *gang, *words(torchrun), *words(program))


def words(options: Mapping[str, str]) -> list[str]:
    """Options as the words of a command. Example: {'--attempt': '3'} -> ['--attempt', '3']."""
    return [word for option in options.items() for word in option]
