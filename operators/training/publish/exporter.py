"""Assigns an exported model's tensors to ranks, and exports this rank's tensors.

Each tensor has one owner among the ranks that hold it or a part of it. Owners are chosen by size,
so that all ranks of a pipeline stage write about the same number of bytes. All ranks of a stage
hold tensors of the same sizes in the same order. This is true even with expert parallelism, where
the ranks hold different experts. Each rank can therefore compute the same owners from the ranks'
places.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from operators.training.agree import gathered
from operators.training.megatron.export import (
    HeldTensor,
    RankPlace,
    held_tensors,
    rank_place,
    untrained_tensors,
)
from operators.training.megatron.model import LoadedModel
from operators.training.megatron.weights import weight_files
from pipeline.policies.weights import TensorPlace

_LARGEST_FILE = 16 << 30
"""Maximum size of a file with several tensors, in bytes. S3 allows at most 10,000 parts per upload,
and several smaller files can be read in parallel."""


class Exporter:
    """This rank's share of every export of a model.

    The constructor is collective: every rank must call it.
    """

    def __init__(self, model: LoadedModel, source: Path, room: int) -> None:
        """Assign the model's tensors to ranks. Every rank must call this.

        Args:
            model: The model.
            source: The Hugging Face folder from which the model was built.
            room: Maximum number of bytes that a rank exports before it waits for the other ranks.

        Raises:
            RuntimeError: The model's tensors differ from the source's tensors.
        """
        self._bridge = model.bridge
        self._held = list(held_tensors(model, source))
        rank = torch.distributed.get_rank()
        places = gathered(rank_place())
        self._here = places[rank]
        self._owners = _owners(self._held, places, self._here)
        self._places = places
        own = [
            held
            for held, of_expert in zip(self._held, self._owners, strict=True)
            if of_expert[self._expert_of(held)] == rank
        ]
        loads = gathered(sum(held.size for held in own))
        untrained = list(untrained_tensors(model, source))
        copied_by = choose_owners([(u.made.end, range(len(loads))) for u in untrained], loads)
        self._untrained = [u for u, by in zip(untrained, copied_by, strict=True) if by == rank]
        tensors = [t for held in own for t in held.made] + [u.made for u in self._untrained]
        self.files = _in_files(tensors)
        """The tensors in each of this rank's files: first those that `tensors` yields, then those
        that `untrained` yields."""
        rounds = _rounds(self._owners, [held.size for held in self._held], room)
        self._rounds = rounds + [range(0)] * (max(gathered(len(rounds))) - len(rounds))
        self.listed = gathered([[(t.name, t.end - t.begin) for t in file] for file in self.files])
        """Names and sizes (in bytes) of all written tensors, by rank and file."""
        _check_complete(self.listed, source)
        self.size = sum(size for files in self.listed for file in files for _, size in file)
        """Total size of all ranks' tensors, in bytes."""

    def tensors(self, prepare: Callable[[int], None]) -> Iterator[memoryview]:
        """Yield the bytes of this rank's part of the model, in the order of `files`.

        Every rank must call this. Ranks gather tensors in rounds. Before each round, every rank
        calls `prepare` with the number of bytes that this rank receives next. `prepare` must return
        on all ranks at the same time. Otherwise one rank could wait in a collective while another
        is still writing its bytes.
        """
        rank = torch.distributed.get_rank()
        for positions in self._rounds:
            mine = [p for p in positions if self._owner(p) == rank]
            prepare(sum(self._held[p].size for p in mine))
            for position in positions:
                owner = self._owner(position)
                places = self._places[owner], self._here
                yield from self._held[position].exported(self._bridge, owner, *places)

    def untrained(self) -> Iterator[memoryview]:
        """Yield the bytes of the tensors that this rank copies, which come last in `files`."""
        for untrained in self._untrained:
            yield untrained.exported()

    def _owner(self, position: int) -> int:
        return self._owners[position][self._expert_of(self._held[position])]

    def _expert_of(self, held: HeldTensor) -> int:
        return self._here.expert if held.is_expert else 0


def choose_owners(
    items: Sequence[tuple[int, Sequence[int]]], loads: Sequence[int] = ()
) -> list[int]:
    """Choose a rank for each item.

    An item is a pair: its size in bytes, and the ranks that may take it. Items are assigned in
    descending order of size, each to the rank with the fewest bytes so far. `loads` contains the
    number of bytes that each rank already has.
    """
    bytes_of = dict(enumerate(loads))
    chosen = [0] * len(items)
    for index in sorted(range(len(items)), key=lambda i: (-items[i][0], i)):
        size, ranks = items[index]
        chosen[index] = min(ranks, key=lambda rank: (bytes_of.get(rank, 0), rank))
        bytes_of[chosen[index]] = bytes_of.get(chosen[index], 0) + size
    return chosen


def _owners(
    held: Sequence[HeldTensor], places: Sequence[RankPlace], here: RankPlace
) -> list[dict[int, int]]:
    """Return each tensor's owners, keyed by expert-parallel rank.

    A tensor outside the experts has the single key 0.
    """
    stage = [rank for rank, place in enumerate(places) if place.stage == here.stage]
    of_experts = {
        expert: [rank for rank in stage if places[rank].expert == expert]
        for expert in sorted({places[rank].expert for rank in stage})
    }
    slots = [
        (position, expert)
        for position, tensor in enumerate(held)
        for expert in (of_experts if tensor.is_expert else [0])
    ]
    items = [
        (held[position].size, of_experts[expert] if held[position].is_expert else stage)
        for position, expert in slots
    ]
    owners: list[dict[int, int]] = [{} for _ in held]
    for (position, expert), owner in zip(slots, choose_owners(items), strict=True):
        owners[position][expert] = owner
    return owners


def _rounds(owners: Sequence[dict[int, int]], sizes: Sequence[int], room: int) -> list[range]:
    """Divide the tensors' indices into rounds in which each owner has at most `room` bytes.

    A tensor larger than `room` is its owner's only tensor in its round.
    """
    rounds, begin = [], 0
    bytes_of: dict[int, int] = {}
    for position, of_expert in enumerate(owners):
        size = sizes[position]
        if any(o in bytes_of and bytes_of[o] + size > room for o in of_expert.values()):
            rounds.append(range(begin, position))
            begin, bytes_of = position, {}
        for owner in of_expert.values():
            bytes_of[owner] = bytes_of.get(owner, 0) + size
    return [*rounds, range(begin, len(owners))]


def _in_files(tensors: Sequence[TensorPlace]) -> list[list[TensorPlace]]:
    """Divide the tensors into files, and set the position of each tensor in its file."""
    files: list[list[TensorPlace]] = []
    end = _LARGEST_FILE
    for tensor in tensors:
        size = tensor.end - tensor.begin
        if end + size > _LARGEST_FILE:
            files.append([])
            end = 0
        files[-1].append(tensor._replace(begin=end, end=end + size))
        end += size
    return files


def _check_complete(listed: Sequence[Sequence[Sequence[tuple[str, int]]]], source: Path) -> None:
    """Raise RuntimeError unless all ranks together write each tensor of the source exactly once."""
    found = Counter(name for files in listed for file in files for name, _ in file)
    expected = Counter(weight_files(source).keys())
    if found != expected:
        missing, surplus = expected - found, found - expected
        raise RuntimeError(
            f"export of {source}: {missing.total()} of its tensors are missing (for example "
            f"{sorted(missing)[:3]}), and {surplus.total()} exports are duplicates or unknown (for "
            f"example {sorted(surplus)[:3]}); expected each of its tensors exactly once"
        )
