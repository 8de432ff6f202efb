"""A vocabulary that two tensor-parallel ranks share, and the groups that collectives use."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from operators.training.passes.advantages import data_parallel_ranks
from operators.training.passes.logprob_pass import _route_groups
from operators.training.passes.logprobs import logprobs_and_entropy
from tests.unit.operators.training.passes.test_logprobs import TEMPERATURE, made, plain

VOCABULARY = 50
HALF = VOCABULARY // 2


def on_two_ranks(folder: Path, function: Callable[[int], Any]) -> list[Any]:
    """Call the function in two forked processes that are ranks of one group."""
    children = []
    for index in range(2):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            torch.set_num_threads(1)  # the parent's threads are not there in a forked process
            store = dist.FileStore(str(folder / "store"), 2)
            dist.init_process_group("gloo", store=store, rank=index, world_size=2)
            (folder / str(index)).write_bytes(pickle.dumps(function(index)))
            code = 0
        finally:
            os._exit(code)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    return [pickle.loads((folder / str(index)).read_bytes()) for index in range(2)]


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_shared_vocabulary_gives_the_values_and_gradients_of_a_whole_one(
    tmp_path: Path, with_entropy: bool
):
    """The labels include the first and the last token of each half. The second half's logits are
    larger by 200, so that exponentials overflow without the largest logit of both halves."""
    hidden_TH, weight_VH, _ = made(6, 16, VOCABULARY)
    with torch.no_grad():
        hidden_TH[:, 0] = 1.0
        weight_VH[HALF:, 0] += 200 * TEMPERATURE
    labels_T = torch.tensor([0, HALF - 1, HALF, VOCABULARY - 1, 7, HALF + 7])
    weights_T = torch.linspace(-1, 2, len(labels_T))

    def loss(logp_T: torch.Tensor, entropy_T: torch.Tensor) -> torch.Tensor:
        of_entropy = (weights_T.square() * entropy_T).sum() if with_entropy else 0.0
        return (weights_T * logp_T).sum() + of_entropy

    def on_rank(index: int) -> Any:
        own_VH = weight_VH[index * HALF : (index + 1) * HALF].detach().requires_grad_()
        own_TH = hidden_TH.detach().requires_grad_()
        found = logprobs_and_entropy(
            own_TH, own_VH, labels_T, TEMPERATURE, dist.group.WORLD, with_entropy
        )
        loss(*found).backward()
        return *(x.detach().numpy() for x in found), own_TH.grad.numpy(), own_VH.grad.numpy()

    expected = plain(hidden_TH, weight_VH, labels_T)
    loss(*expected).backward()
    first, second = on_two_ranks(tmp_path, on_rank)
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 5e-3}  # float32, logits of 200
    for found in (first, second):
        for ours, theirs in zip(found[:2], expected, strict=True):
            np.testing.assert_allclose(ours, theirs.detach(), **close)
    np.testing.assert_allclose(first[2] + second[2], hidden_TH.grad, **close)
    np.testing.assert_allclose(np.concatenate([first[3], second[3]]), weight_VH.grad, **close)


def test_totals_use_the_group_of_the_ranks_that_share_the_step(monkeypatch: pytest.MonkeyPatch):
    used: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", lambda values, group=None: used.append(group))
    group = object()
    position = SimpleNamespace(samples_group=group)
    rank: Any = SimpleNamespace(position=position, chunks=[torch.nn.Linear(1, 1)])
    assert data_parallel_ranks(rank).total(np.ones(2)).tolist() == [1, 1]
    assert used == [group]


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_routes_are_joined_over_ranks_that_share_sequences(counts: tuple[int, int]):
    of_sequence, of_context = (SimpleNamespace(count=count) for count in counts)
    position = SimpleNamespace(
        sequence=of_sequence, context=of_context, tensor_group="tensor", context_group="context"
    )
    rank: Any = SimpleNamespace(position=position)
    groups = _route_groups(rank)
    assert groups.sequence == ("tensor" if counts[0] > 1 else None)
    assert groups.context == ("context" if counts[1] > 1 else None)
