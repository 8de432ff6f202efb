"""Reward of the addition example: 1.0 for the exact sum at the end of the response, else 0.0."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Score one response; verl's signature, self-contained (standard library only).

    Only the last number counts, and it must end the response: "7+8=15 3+5+1=9 95" scores 1.0 for
    ground truth "95"; "95 or so", "095" and "" score 0.0.
    """
    text = solution_str.strip().removesuffix("<|im_end|>").rstrip()
    last_number = re.search(r"(?<!\d)\d+$", text)
    return float(last_number is not None and last_number.group() == str(ground_truth))
