"""Log-probs from hidden states, compared with plain torch, and the memory that they require."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from operators.training.passes import logprobs
from operators.training.passes.logprobs import logprobs_and_entropy

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def alone():
    """The group of a single rank, without tensor parallelism."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def made(tokens, width, vocabulary, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight_VH = torch.randn(vocabulary, width, generator=generator).to(dtype).requires_grad_()
    labels_T = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden_TH, weight_VH, labels_T


def plain(hidden_TH, weight_VH, labels_T):
    log_p = (hidden_TH @ weight_VH.T / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, labels_T[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 23])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_those_of_plain_torch(alone, monkeypatch, tokens, with_entropy):
    """A chunk holds 8 tokens; the cases range from no token to almost three chunks."""
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 8)
    inputs, labels_T = made(tokens, 16, 50)[:2], made(tokens, 16, 50)[2]
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    found = logprobs_and_entropy(*inputs, labels_T, TEMPERATURE, alone, with_entropy)
    expected = plain(*copies, labels_T)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    weights_T = torch.linspace(-1, 2, tokens)
    for logp_T, entropy_T in (found, expected):
        loss = (weights_T * logp_T).sum()
        if with_entropy:
            loss = loss + (weights_T.square() * entropy_T).sum()
        loss.backward()
    for ours, theirs in zip(inputs, copies, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert found[1].requires_grad == with_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_memory_does_not_grow_with_the_number_of_tokens(alone, monkeypatch, dtype, with_entropy):
    """In addition to the hidden states, the weight and their gradients, the computation takes at
    most 1.5 times the memory of a chunk's float32 logits. The logits of all tokens would take the
    memory of 16 chunks, and so would the gradients of these logits."""
    monkeypatch.setattr(logprobs, "CHUNK_TOKENS", 64)
    tokens, width, vocabulary = 16 * 64, 16, 20_000
    hidden_TH, weight_VH, labels_T = made(tokens, width, vocabulary, dtype)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logp_T, entropy_T = logprobs_and_entropy(
            hidden_TH, weight_VH, labels_T, TEMPERATURE, alone, with_entropy
        )
        (logp_T + entropy_T).sum().backward()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    chunk = 4 * 64 * vocabulary
    # Memory holds the float32 sum of the weight's gradients as well as the gradient of one chunk.
    gradients = 3 * 4 * weight_VH.numel() + 4 * 4 * hidden_TH.numel()
    assert chunk < peak <= 1.5 * chunk + gradients
