"""A user's loss: how it is called, and what it may return. Letters: T response tokens."""

from collections.abc import Mapping

import torch

from operators.training.batches.micro_batch import ResponseTokens
from operators.training.errors import UpdateError
from pipeline.rl.custom import shown
from pipeline.rl.losses.types import LossFunction, LossSettings, LossTokens, PolicyLoss

OWN_REPORTS = frozenset({"tokens", "divisor", "entropy", "policy", "kl"})
"""Sums that every loss has, whose names a user's reports may not have."""


def checked(function: LossFunction, where: str, response: ResponseTokens) -> LossFunction:
    """A user's loss for the tokens of a micro-batch; `where` names the step and the function.

    What it returns raises UpdateError, which names the sample where one is to blame: for an
    exception, for a loss or report that is not a tensor of [T], for a loss that does not follow
    from the log-probs or is not finite on a token that counts.
    """

    def loss(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
        many = f"{len(tokens.mask_T)} tokens of {len(response.ids)} samples"
        if response.ids:
            many += f" ({response.ids[0]} to {response.ids[-1]})"
        try:
            made = function(tokens, settings)
        except Exception as error:  # users' code may raise anything
            raise UpdateError(
                f"{where}: it raised {type(error).__name__}: {shown(error, str)}, with {many}; "
                "nothing of the step is stored. Mend the function and start another run"
            ) from error
        _check_form(made, tokens, f"{where}: it returned", many)
        _check_numbers(made, tokens, where, response)
        return made

    return loss


def _check_form(made: object, tokens: LossTokens, where: str, many: str) -> None:
    """Refuse what is not a loss and reports by token."""
    if not isinstance(made, PolicyLoss):
        raise UpdateError(
            f"{where} {type(made).__name__}, expected a PolicyLoss (pipeline.rl.losses.types); "
            "mend the function"
        )
    if not isinstance(made.reports, Mapping) or not all(isinstance(n, str) for n in made.reports):
        raise UpdateError(
            f"{where} reports {shown(made.reports)}, expected tensors by name; mend the function"
        )
    if names := sorted(OWN_REPORTS & made.reports.keys()):
        raise UpdateError(f"{where} reports called {', '.join(names)}, which exist; rename them")
    for name, values_T in {"loss_T": made.loss_T, **made.reports}.items():
        if not isinstance(values_T, torch.Tensor) or values_T.shape != tokens.mask_T.shape:
            found = (
                f"of shape {tuple(values_T.shape)}"
                if isinstance(values_T, torch.Tensor)
                else f"of type {type(values_T).__name__}"
            )
            raise UpdateError(
                f"{where} {name} {found}, expected a tensor with a number for each of {many}; mend "
                "the function"
            )


def _check_numbers(
    made: PolicyLoss, tokens: LossTokens, where: str, response: ResponseTokens
) -> None:
    """Refuse a loss without a gradient, and numbers that are not finite on a token that counts."""
    if not made.loss_T.requires_grad:
        raise UpdateError(
            f"{where}: its loss has no gradient, so it does not follow from tokens.logprobs_T; "
            "mend the function"
        )
    for name, values_T in {"loss": made.loss_T, **made.reports}.items():
        wrong = torch.nonzero(tokens.mask_T & ~values_T.detach().isfinite())[:, 0].tolist()
        if wrong:
            sample = response.ids[int(response.sample_T[wrong[0]])]
            raise UpdateError(
                f"{where}, sample {sample}: its {name} is {float(values_T[wrong[0]].detach())}, "
                f"expected a finite number ({len(wrong)} of {len(values_T)} tokens of the "
                "micro-batch are not); nothing of the step is stored"
            )
