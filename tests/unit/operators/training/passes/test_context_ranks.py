"""Sums and joins over two context-parallel ranks, in two forked processes."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from operators.training.batches.micro_batch import ResponseTokens
from operators.training.batches.zigzag import Zigzag
from operators.training.passes.samples import SamplesOfBatch
from operators.training.passes.share import of_all_ranks

LENGTHS = (3, 0, 4)
OWN = (np.array([0, 3, 4]), np.array([1, 2, 5, 6]))
"""Each rank's tokens, of seven in three samples; the second sample has none."""
VALUES_U = np.arange(1.0, 8.0, dtype=np.float32)
MASK_U = np.array([True, False, False, True, True, True, True])


def on_ranks(folder: Path, function: Callable[[Any, ResponseTokens], Any]) -> list[Any]:
    """Call the function on two ranks, and return both results."""
    children = []
    for index, own_T in enumerate(OWN):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            store = dist.FileStore(str(folder / "store"), 2)
            dist.init_process_group("gloo", store=store, rank=index, world_size=2)
            position = SimpleNamespace(context=Zigzag(index, 2), context_group=dist.group.WORLD)
            of_tokens = np.zeros(len(own_T), np.int64)
            response = ResponseTokens(
                ("a", "b", "c"), LENGTHS, own_T, of_tokens, of_tokens, MASK_U[own_T]
            )
            made = function(SimpleNamespace(position=position), response)
            (folder / str(index)).write_bytes(pickle.dumps(made))
            code = 0
        finally:
            os._exit(code)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    return [pickle.loads((folder / str(index)).read_bytes()) for index in range(2)]


def test_every_rank_gets_the_values_of_all_tokens(tmp_path: Path):
    def join(rank: Any, response: ResponseTokens) -> Any:
        own_T = torch.from_numpy(VALUES_U[response.own_T])
        return of_all_ranks(rank, response, own_T).numpy()

    for values_U in on_ranks(tmp_path, join):
        assert values_U.tolist() == VALUES_U.tolist()


def test_sums_over_samples_include_all_ranks_and_so_do_their_gradients(tmp_path: Path):
    """The loss of each rank is the sum over its own tokens of w times the mean of the token's
    sample. The gradient of the sum of both losses must reach each token on its own rank."""
    weights_U = np.linspace(0.5, 2.0, 7, dtype=np.float32)

    def mean_and_gradient(rank: Any, response: ResponseTokens) -> Any:
        mask_T = torch.from_numpy(response.loss_mask_T)
        samples = SamplesOfBatch(rank, response, mask_T)
        own_T = torch.from_numpy(VALUES_U[response.own_T]).requires_grad_()
        mean_S = samples.mean(own_T)
        loss = (torch.from_numpy(weights_U[response.own_T]) * samples.spread(mean_S)).sum()
        loss.backward()
        return (
            samples.sum(own_T.detach()).tolist(),
            mean_S.tolist(),
            samples.tokens_S.tolist(),
            own_T.grad.tolist(),
            samples.counts_samples,
        )

    values_U = torch.from_numpy(VALUES_U).requires_grad_()
    mask_U, sample_U = torch.from_numpy(MASK_U), np.repeat(np.arange(3), LENGTHS)
    means = [values_U[mask_U & torch.from_numpy(sample_U == s)] for s in range(3)]
    mean_S = [m.mean() if len(m) else torch.tensor(0.0) for m in means]
    loss = sum(w * mean_S[s] for w, s in zip(torch.from_numpy(weights_U), sample_U, strict=True))
    loss.backward()
    for index, found in enumerate(on_ranks(tmp_path, mean_and_gradient)):
        sums, found_mean_S, tokens, gradient_T, counts = found
        assert sums == [1.0, 0.0, 22.0]
        assert tokens == [1.0, 0.0, 4.0]
        np.testing.assert_allclose(found_mean_S, [m.item() for m in mean_S])
        np.testing.assert_allclose(gradient_T, values_U.grad.numpy()[OWN[index]], rtol=1e-6)
        assert counts == (index == 0)


def test_the_gradient_of_a_sum_over_ranks_changes_no_other_gradient(tmp_path: Path):
    def gradients(rank: Any, response: ResponseTokens) -> Any:
        samples = SamplesOfBatch(rank, response, torch.from_numpy(response.loss_mask_T))
        own_T = torch.from_numpy(VALUES_U[response.own_T]).requires_grad_()
        other_S = torch.zeros(3, requires_grad=True)
        later_S = other_S * 1.0  # its gradient is computed after that of the sum
        ((samples.sum(own_T) + later_S) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        return other_S.grad.tolist(), own_T.grad.tolist()

    for index, (other_S, own_T) in enumerate(on_ranks(tmp_path, gradients)):
        assert other_S == [1.0, 2.0, 3.0]
        expected_U = 2.0 * np.array([1, 1, 1, 3, 3, 3, 3]) * MASK_U
        assert own_T == expected_U[OWN[index]].tolist()
