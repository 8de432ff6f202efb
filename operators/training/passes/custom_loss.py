"""Calls a user's loss, and checks its result. T is the number of response tokens."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from operators.training.batches.micro_batch import ResponseTokens
from operators.training.errors import UpdateError
from pipeline.rl.custom import from_sigterm, shown
from pipeline.rl.losses.formulas import log_ratio
from pipeline.rl.losses.types import LossFunction, LossSettings, LossTokens, PolicyLoss

OWN_REPORTS = frozenset({"tokens", "divisor", "entropy", "policy", "kl"})
"""Names of the sums that every loss reports; a user's reports must not use these names."""


def checked(function: LossFunction, where: str, response: ResponseTokens) -> LossFunction:
    """Wrap a user's loss in checks on its result, for the tokens of a micro-batch.

    The wrapper also adds the log-ratio, which all losses report, to the reports. It raises
    UpdateError if the function raises an error, if the loss or a report is not a real tensor [T],
    or if the loss has no gradient. It also raises UpdateError if a value is not finite for a token
    that the loss includes, and then names the sample.

    Args:
        function: The user's loss.
        where: The step and the function, for error messages.
        response: The response tokens of the micro-batch.
    """

    def loss(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
        many = f"{len(tokens.mask_T)} tokens of {len(response.ids)} samples"
        if response.ids:
            many += f" ({response.ids[0]} to {response.ids[-1]})"
        try:
            made = function(tokens, settings)
        except (Exception, SystemExit) as error:  # users' code may raise anything
            if from_sigterm(error):
                raise
            raise UpdateError(
                f"{where} raised {type(error).__name__}: {shown(error, str)}, for {many}; the step "
                "was not stored. Fix the function and start another run"
            ) from error
        _check_form(made, tokens, f"{where} returned", many)
        _check_numbers(made, tokens, where, response)
        return replace(made, reports={"log_ratio": log_ratio(tokens), **made.reports})

    return loss


def _check_form(made: object, tokens: LossTokens, where: str, many: str) -> None:
    """Raise UpdateError unless `made` has a loss and reports, each with one number per token."""
    if not isinstance(made, PolicyLoss):
        raise UpdateError(
            f"{where} {type(made).__name__}, expected a PolicyLoss (pipeline.rl.losses.types); "
            "fix the function"
        )
    if not isinstance(made.reports, Mapping) or not all(isinstance(n, str) for n in made.reports):
        raise UpdateError(
            f"{where} reports {shown(made.reports)}, expected a dict of tensors; fix the function"
        )
    if names := sorted(OWN_REPORTS & made.reports.keys()):
        raise UpdateError(
            f"{where} reports with the reserved names {', '.join(names)}; rename the reports"
        )
    for name, values_T in {"loss_T": made.loss_T, **made.reports}.items():
        if not isinstance(values_T, torch.Tensor) or values_T.shape != tokens.mask_T.shape:
            found = (
                f"of shape {tuple(values_T.shape)}"
                if isinstance(values_T, torch.Tensor)
                else f"of type {type(values_T).__name__}"
            )
            raise UpdateError(
                f"{where} {name} {found}, expected a tensor with a number for each of {many}; fix "
                "the function"
            )
        if values_T.is_complex():
            raise UpdateError(
                f"{where} {name} of complex numbers, expected real ones; fix the function"
            )


def _check_numbers(
    made: PolicyLoss, tokens: LossTokens, where: str, response: ResponseTokens
) -> None:
    """Raise UpdateError if the loss has no gradient, or an included token's value is not finite."""
    if not made.loss_T.requires_grad:
        raise UpdateError(
            f"{where} returned a loss without a gradient, expected one that depends on "
            "tokens.logprobs_T; fix the function"
        )
    for name, values_T in {"loss": made.loss_T, **made.reports}.items():
        wrong = torch.nonzero(tokens.mask_T & ~values_T.detach().isfinite())[:, 0].tolist()
        if wrong:
            sample = response.ids[int(response.sample_T[wrong[0]])]
            raise UpdateError(
                f"{where}, sample {sample}: {name} is {float(values_T[wrong[0]].detach())}, "
                f"expected a finite number ({len(wrong)} of the micro-batch's {len(values_T)} "
                "tokens have no finite value); the step was not stored"
            )
