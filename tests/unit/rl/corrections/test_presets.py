"""The presets match verl's constructors and the table in docs/corrections.md."""

import re
from collections.abc import Iterator
from typing import Any

from pipeline.rl.corrections.forms import PRESETS
from tests.paths import ROOT

_NAMES = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_rs",
    "rollout_rs_threshold",
    "bypass_mode",
    "loss_type",
)
_GEO = "0.999_1.001"
_TWO = "0.5_5.0"
_SEQ = "sequence"

VERL = {
    "disabled": (None, 2.0, None, None, False, "ppo_clip"),
    "decoupled_token_is": ("token", 2.0, None, None, False, "ppo_clip"),
    "decoupled_seq_is": (_SEQ, 2.0, None, None, False, "ppo_clip"),
    "decoupled_token_icepop": ("token", _TWO, None, None, False, "ppo_clip"),
    "decoupled_seq_is_rs": (_SEQ, 2.0, "seq_sum_k1", "0.5_2.0", False, "ppo_clip"),
    "decoupled_geo_rs": (None, 2.0, "seq_mean_k1", _GEO, False, "ppo_clip"),
    "decoupled_geo_rs_seq_tis": (_SEQ, 2.0, "seq_mean_k1", _GEO, False, "ppo_clip"),
    "decoupled_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", _GEO, False, "ppo_clip"),
    "decoupled_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "decoupled_k3_rs_seq_tis": (_SEQ, 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "decoupled_k3_rs_token_tis": ("token", 2.0, "seq_mean_k3", 0.01, False, "ppo_clip"),
    "bypass_ppo_clip": (None, 2.0, None, None, True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, 2.0, "seq_mean_k1", _GEO, True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, 2.0, "seq_mean_k3", 0.01, True, "ppo_clip"),
    "bypass_pg_is": (_SEQ, 2.0, None, None, True, "reinforce"),
    "bypass_pg_token_icepop": ("token", _TWO, None, None, True, "reinforce"),
    "bypass_pg_geo_rs": (None, 2.0, "seq_mean_k1", _GEO, True, "reinforce"),
    "bypass_pg_geo_rs_seq_tis": (_SEQ, 2.0, "seq_mean_k1", _GEO, True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": ("token", 2.0, "seq_mean_k1", _GEO, True, "reinforce"),
}
"""The results of verl's RolloutCorrectionConfig constructors with their default arguments."""


def test_presets_equal_verls_constructors() -> None:
    found = {name: tuple(values[key] for key in _NAMES) for name, values in PRESETS.items()}
    assert found == VERL
    assert all(len(values) == len(_NAMES) for values in PRESETS.values())


def documented() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each preset from the table in docs/corrections.md, with the values in its row.

    In a row with several presets, a cell contains one value for all of them, or one for each.
    """
    page = (ROOT / "docs" / "corrections.md").read_text()
    table = page.split("| presets | weights | rejection | notes |\n")[1].split("\n\n")[0]
    for row in table.splitlines()[1:]:
        presets, *cells = (cell.strip().replace("`", "") for cell in row.strip("|").split("|"))
        first, *others = presets.split(", ")
        names = [first, *(re.sub(r"^\.\.\.", first, name) for name in others)]
        each = [cell.split(" / ") for cell in cells]
        columns = [cell * len(names) if len(cell) == 1 else cell for cell in each]
        for name, weights, rejection, notes in zip(names, *columns, strict=True):
            values: dict[str, Any] = {}
            for kind, text in (("rollout_is", weights), ("rollout_rs", rejection)):
                level, _, threshold = text.partition(", ")
                values[kind] = None if level == "\N{EN DASH}" else level
                values[f"{kind}_threshold"] = threshold or None
            values["bypass_mode"] = "bypass" in notes
            values["loss_type"] = "reinforce" if "reinforce" in notes else "ppo_clip"
            yield name, values


def test_the_documented_presets_are_those_of_the_code() -> None:
    found = dict(documented())
    expected: dict[str, dict[str, Any]] = {}
    for name, values in PRESETS.items():
        expected[name] = dict(values)
        for kind in ("rollout_is", "rollout_rs"):  # the page omits thresholds that do not apply
            threshold = values[f"{kind}_threshold"] if values[kind] else None
            expected[name][f"{kind}_threshold"] = threshold and str(threshold)
    assert found == expected
