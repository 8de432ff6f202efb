"""The reward of the addition example: 1.0 if the response ends with the exact sum, else 0.0."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return the score of one response.

    Only the last number counts, and the response must end with it. For the ground truth "95",
    "7+8=15 3+5+1=9 95" scores 1.0, and "95 or so", "095" and "" score 0.0. The signature is verl's,
    and the function needs only the standard library.

    Args:
        data_source: Ignored.
        solution_str: The text of the response.
        ground_truth: The exact sum.
        extra_info: Ignored.
    """
    text = solution_str.strip().removesuffix("<|im_end|>").rstrip()
    last_number = re.search(r"(?<!\d)\d+$", text)
    return float(last_number is not None and last_number.group() == str(ground_truth))
