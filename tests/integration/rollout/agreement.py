"""Compare a batch of generations with the reference model."""

import numpy as np

LOGPROB_TOLERANCE = 2e-4
"""Both sides compute in float32, but sum in different orders."""


def assert_agrees(reference, requests, generations, temperature: float) -> tuple[int, int]:
    """Assert that generations have the reference's routes and log-probs, and only valid rows.

    The expert sets may differ where the reference has near-ties.

    Args:
        reference: The ReferenceModel for the policy.
        requests: The requests of the batch.
        generations: One generation for each request, in order.
        temperature: The sampling temperature.

    Returns:
        The number of (row, layer) pairs, and how many of them are near-ties. The rows of a prompt
        that several samples share are counted once.
    """
    rows = ties = 0
    seen = set()
    for request, generation in zip(requests, generations, strict=True):
        tokens_S = np.concatenate([np.array(request.prompt_tokens), generation.tokens_G])
        expected = reference(tokens_S)
        logprobs_G = expected.logprobs_of(generation.tokens_G, temperature)
        np.testing.assert_allclose(generation.logprobs_G, logprobs_G, atol=LOGPROB_TOLERANCE)
        if generation.routes is None:
            assert not reference.layers
            continue
        assert generation.routes.valid_T.all()
        assert generation.routes.sets_TLK.shape == expected.sets_TLK.shape
        wrong_TL = (generation.routes.sets_TLK != expected.sets_TLK).any(-1)
        assert not (wrong_TL & ~expected.near_tie_TL).any(), (
            f"{request.id}: (row, layer) {np.argwhere(wrong_TL)[:4].tolist()} differ"
        )
        first = len(request.prompt_tokens) if request.prompt_tokens in seen else 0
        seen.add(request.prompt_tokens)
        rows += expected.near_tie_TL[first:].size
        ties += int(expected.near_tie_TL[first:].sum())
    return rows, ties
