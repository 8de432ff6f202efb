"""Replaying a native pass (R2) changes no bit, and each layout replays another layout's routes.

Together, these tests show that the recorded sets and the live scores determine everything else in
each layout: the forward pass, each recomputation and the backward pass.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from pipeline.rl.estimator_table import ESTIMATORS
from pipeline.rl.losses.aggregate import AggregationMode
from tests.exhaustive import TEST_ALL
from tests.integration.torchrun import run_nodes, run_ranks
from tests.integration.training_replay.layouts import (
    LAYOUTS,
    ONLY_CRITIC,
    TRIED,
    Layout,
    has_critic,
    modes_of,
)
from tests.integration.training_replay.losses_in_layouts import PAIRS
from tests.integration.training_replay.sealed import config_of, make_run
from tests.integration.training_replay.unsplit import unsplit
from tests.integration.training_replay.values import HEAD
from tests.tiny_models import make_tiny

pytestmark = pytest.mark.integration
PROGRAM = "tests.integration.training_replay.layouts"
RANKS = {layout.name: layout.ranks for layout in TRIED}
ANY_MODE = {layout.name: modes_of(layout, 4)[0] for layout in TRIED}


CASES = [
    (layout.name, topk, recompute)
    for topk in (4, 8)
    for layout in TRIED
    for recompute in modes_of(layout, topk)
]
"""Layouts, top-k and recompute modes."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the folder of all results for each K. Four ranks run on two nodes."""
    folders = {}
    for topk in (4, 8):
        folder = folders[topk] = tmp_path_factory.mktemp(f"layouts-{topk}")
        model = make_tiny(folder / "model", "qwen3_moe", num_experts_per_tok=topk)
        make_run(folder / "run", model, config_of(), steps=1)
        together: dict[tuple[int, str], list[str]] = {}
        for layout in TRIED:
            if modes := ",".join(modes_of(layout, topk)):
                together.setdefault((layout.ranks, modes), []).append(layout.name)
        if topk == 4 and not TEST_ALL:
            together[4, "full"] += ONLY_CRITIC
        # The layout `one` is first, because the others replay its routes.
        for (ranks, modes), names in together.items():
            start = run_nodes if ranks == 4 else run_ranks
            start(PROGRAM, ranks, folder / "run", model, folder, modes, *names)
    return folders


def reports(folder: Path, layout: str, recompute: str) -> list[dict]:
    """Return the reports of all ranks.

    Args:
        folder: The folder of results.
        layout: The layout's name.
        recompute: The recompute mode.
    """
    return [
        json.loads((folder / f"{layout}.{recompute}.{rank}.json").read_text())
        for rank in range(RANKS[layout])
    ]


@pytest.mark.parametrize(("layout", "topk", "recompute"), CASES)
def test_replay_of_the_native_choice_changes_no_bit(
    found: dict[int, Path], layout: str, topk: int, recompute: str
):
    """In fp32, replay changes no bit of log-probs, losses and gradients.

    There are two mini-batches of several micro-batches (gradient accumulation). As a control,
    different sets change nearly every tensor. A router runs twice per micro-batch if the MoE layer
    is recomputed, and once otherwise.
    """
    runs_per_micro_batch = 1 if recompute == "none" else 2
    for report in reports(found[topk], layout, recompute):
        assert report["logprobs_differ"] == 0
        # Only in pp2-ep2 does a stage with one layer have half of the experts.
        assert report["tensors"] >= (48 if layout == "pp2-ep2" else 51)
        assert report["differ"] == 0
        assert report["left_at_routers"] == 0
        assert len(report["mini_batches"]) == 2
        for mini_batch in report["mini_batches"]:
            assert mini_batch["micro_batches"] > 1
            assert mini_batch["changed_by_other_sets"] > 0.8 * report["tensors"] / 2
            assert mini_batch["router_runs"] == [runs_per_micro_batch * mini_batch["micro_batches"]]


@pytest.mark.parametrize("layout", RANKS)
def test_every_row_of_every_sample_is_replayed_once(found: dict[int, Path], layout: str):
    """Over all ranks, each row is replayed once in each layer.

    Each layer is on one pipeline stage, and the routers' own choice equals the recorded one.
    """
    parts = reports(found[4], layout, ANY_MODE[layout])
    layers = sorted({layer for report in parts for layer in report["layers"]})
    assert layers == [0, 1, 2, 3]
    expected = sum({report["dp_rank"]: report["expected_rows"] for report in parts}.values())
    for layer in layers:
        counts = [r["counts"][str(layer)] for r in parts if layer in r["layers"]]
        assert sum(count["replayed"] for count in counts) == expected
        assert sum(count["agreeing"] for count in counts) == expected
        assert sum(count["native"] for count in counts) == 0
    padding = [m["padding"] for report in parts for m in report["mini_batches"]]
    assert sum(padding) > 0


@pytest.mark.parametrize("layout", [name for name in RANKS if name != "one"])
def test_every_layout_replays_the_routes_of_one_rank(found: dict[int, Path], layout: str):
    """Log-probs and choices are the same as on one rank, up to float32 summation order."""
    for report in reports(found[4], layout, ANY_MODE[layout]):
        foreign = report["foreign"]
        assert foreign["largest_difference"] < 1e-5
        assert foreign["replayed"] > 0
        assert foreign["agreeing"] >= 0.999 * foreign["replayed"]


SAME = {
    "one-padded": "one",
    "one-tokens": "one",
    **{name: "tp2-sp" for name in ("tp2-sp-padded",) if name in RANKS},
    "pp2-vpp2-padded": "pp2-vpp2",
    **{name: "one" for name in RANKS if name.startswith(("cp2-dp2", "cp2-ep2"))},
    **{name: "one" for name in ("cp2", "cp2-padded") if name in RANKS},
    **{name: "tp2-sp" for name in RANKS if name.startswith("cp2-tp2")},
    **{name: "pp2-uneven" for name in RANKS if name.startswith("cp2-pp2")},
}
"""For each layout, another layout whose ranks have the same parts of the model."""


def rank_of_same(layout: str, rank: int) -> int:
    """Return the rank of the other layout that has the same part of the model.

    Megatron numbers ranks by TP first, then by CP and DP, then by PP.
    """
    if SAME[layout] == "one":
        return 0
    if layout.startswith("cp2"):
        return rank % 2 if SAME[layout] == "tp2-sp" else rank // 2
    return rank


def whole_name(name: str, layout: str, rank: int) -> str:
    """Return a parameter's name with the expert's number among all 16; each EP rank has 8.

    Args:
        name: The parameter's name on its rank.
        layout: The layout's name.
        rank: The rank.
    """
    if "ep2" not in layout:
        return name
    return re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + 8 * rank}", name)


@pytest.mark.parametrize(
    ("layout", "recompute"),
    [(name, mode) for name, topk, mode in CASES if name in SAME and topk == 4],
)
def test_gradients_do_not_depend_on_packing_or_on_the_ranks_of_tokens(
    found: dict[int, Path], layout: str, recompute: str
):
    """Gradients in float32 do not depend on how tokens are split among ranks and micro-batches.

    Differences are relative to the largest gradient of each tensor.
    """
    compared = 0
    for rank in range(RANKS[layout]):
        same = rank_of_same(layout, rank)
        ours = np.load(found[4] / f"{layout}.{recompute}.{rank}.gradients.npz")
        theirs = np.load(found[4] / f"{SAME[layout]}.{recompute}.{same}.gradients.npz")
        names = {name: whole_name(name, layout, rank) for name in ours}
        assert {*names.values()} <= {*theirs}
        assert "ep2" in layout or len(names) == len(theirs.files)
        for name, there in names.items():
            largest = np.abs(theirs[there]).max()
            assert np.abs(ours[name] - theirs[there]).max() <= 1e-5 * max(largest, 1e-3), name
            compared += 1
    assert compared > 50


@pytest.fixture(scope="module")
def of_losses(found: dict[int, Path]) -> dict[str, dict[str, np.ndarray]]:
    """Return the values of each loss, keyed by layout and summed over ranks."""
    added: dict[str, dict[str, np.ndarray]] = {}
    for layout in RANKS:
        of_layout = added[layout] = {}
        for path in sorted(found[4].glob(f"{layout}.[0-9].losses.npz")):
            for name, values in np.load(path).items():
                if name.endswith(":norm"):
                    of_layout[name] = values  # every rank has the norm of the full model
                else:
                    of_layout[name] = of_layout.get(name, 0) + values
    return added


def by_kind(values: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """Return the values whose names have a prefix, under the names without it."""
    return {n.removeprefix(prefix): x for n, x in sorted(values.items()) if n.startswith(prefix)}


@pytest.mark.parametrize("layout", RANKS)
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_each_loss_is_that_of_the_full_mini_batch(
    of_losses: dict[str, dict[str, np.ndarray]], layout: str, pair: tuple[str, AggregationMode]
):
    """Ranks and micro-batches together compute the loss of the full mini-batch.

    The value, and the gradients with respect to each token's log-prob and entropy, are compared
    with autograd on one rank and one micro-batch in double precision. Clip-Cov and KL-Cov choose
    the same tokens.
    """
    values, prefix = of_losses[layout], ":".join(pair)
    divisor = float(values[f"{prefix}:sum:divisor"])
    tokens, expected = unsplit(values, pair)
    assert divisor == expected.divisor
    for what, number in (("policy", expected.policy), ("kl", expected.kl)):
        assert float(values[f"{prefix}:sum:{what}"]) / divisor == pytest.approx(number, rel=1e-5)
    for kind, gradient_T in (("logprobs", expected.logprobs_T), ("entropy", expected.entropy_T)):
        of_samples = by_kind(values, f"{prefix}:{kind}:")
        made_T = np.concatenate([of_samples[id] for id in tokens]) / divisor
        assert np.abs(gradient_T).max() > 1e-4
        assert np.abs(made_T - gradient_T).max() <= 1e-5 * np.abs(gradient_T).max(), kind


@pytest.mark.parametrize("layout", [name for name in RANKS if name != "one"])
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_the_gradient_norm_is_the_same_in_every_layout(
    of_losses: dict[str, dict[str, np.ndarray]], layout: str, pair: tuple[str, AggregationMode]
):
    """The norm covers all ranks, and the optimizer uses this norm to clip the gradients."""
    name = ":".join((*pair, "norm"))
    assert float(of_losses[layout][name]) == pytest.approx(float(of_losses["one"][name]), rel=1e-4)


@pytest.mark.parametrize("layout", RANKS)
def test_corrections_equal_those_of_one_rank(found: dict[int, Path], layout: str):
    """Each token has the same mask and weight as on one rank, and the mean weight covers all ranks.

    Every pipeline stage receives the number of remaining tokens. With bypass_mode, where the update
    computes the corrections, the remaining tokens, the loss and the sums over ranks are also the
    same.
    """
    (one,) = (report["corrections"] for report in reports(found[4], "one", ANY_MODE["one"]))
    assert 0.05 < np.mean([not all(mask) for mask in one["mask"].values()]) < 0.95
    assert len({round(w, 4) for weights in one["weights"].values() for w in weights}) > 20
    parts = [report["corrections"] for report in reports(found[4], layout, ANY_MODE[layout])]
    compared = set()
    for part in parts:
        assert part["kept"] == one["kept"]
        for id, mask in part["mask"].items():
            assert mask == one["mask"][id]
            assert part["weights"][id] == pytest.approx(one["weights"][id], rel=1e-4)
            compared.add(id)
    assert compared == one["mask"].keys()
    left = sum(of_mini_batch["tokens"] for of_mini_batch in one["kept"])
    assert left == sum(map(sum, one["mask"].values()))
    sums = [part["sums"] for part in parts if "sums" in part]
    for name, value in one["sums"].items():
        assert sum(of_rank[name] for of_rank in sums) == pytest.approx(value, rel=1e-4, abs=1e-4)
    moments = [part["moments"] for part in parts if "moments" in part]
    assert 0 < one["moments"]["rejected"]["total"] < one["moments"]["rejected"]["count"]
    for name, of_one in one["moments"].items():
        for field in ("count", "total", "squares"):
            whole = sum(of_rank[name][field] for of_rank in moments)
            assert whole == pytest.approx(of_one[field], rel=1e-4, abs=1e-4), (name, field)


@pytest.mark.parametrize("layout", ANY_MODE)
def test_advantages_are_the_same_in_every_layout(found: dict[int, Path], layout: str):
    """For every estimator, with a KL penalty in the reward, advantages are the same as on one rank.

    The ranks of the last stage together have all samples. Advantages differ only by rounding,
    because each layout has its own log-probs and adds numbers in a different order.
    """
    (whole,) = (report["advantages"] for report in reports(found[4], "one", ANY_MODE["one"]))
    of_ranks = [report["advantages"] for report in reports(found[4], layout, ANY_MODE[layout])]
    assert whole.keys() == ESTIMATORS.keys()
    for name, expected in whole.items():
        seen = set()
        for by_sample in (advantages[name] for advantages in of_ranks):
            for id, values in by_sample.items():
                assert values == pytest.approx(expected[id], rel=1e-4, abs=1e-4), (name, id)
            seen |= by_sample.keys()
        assert seen == expected.keys()
        assert max(abs(value) for values in expected.values() for value in values) > 0.1, name


CRITICS = [layout for layout in LAYOUTS if has_critic(layout) and layout.name != "one"]


def of_critic(folder: Path, layout: str, ranks: int) -> dict[str, np.ndarray]:
    """Return the values, returns and gradients of a layout, from the files of all its ranks.

    Args:
        folder: The folder of results.
        layout: The layout's name.
        ranks: The number of ranks.
    """
    files = [np.load(folder / f"{layout}.values.{rank}.npz") for rank in range(ranks)]
    return {name: file[name] for file in files for name in file.files}


@pytest.mark.parametrize("layout", CRITICS, ids=lambda layout: layout.name)
def test_a_critic_is_the_same_in_every_layout(found: dict[int, Path], layout: Layout):
    """In float32 with native routing, a critic's results are the same as on one rank.

    The results are the value of each response token, the returns by GAE from the rewards of all
    ranks, and the full gradient of a mini-batch's value loss. The gradient covers each HF weight
    and the value head.
    """
    one, here = (
        of_critic(found[4], name, n) for name, n in (("one", 1), (layout.name, layout.ranks))
    )
    assert one.keys() == here.keys()
    spread = np.concatenate([one[name] for name in one if name.startswith("value/")]).std()
    assert spread > 0.1
    assert np.abs(one[f"gradient/{HEAD}"]).max() > 1e-3
    for name, expected in one.items():
        kind = name.partition("/")[0]
        if kind == "reports":
            continue  # depends on the micro-batches
        difference = np.abs(here[name] - expected).max()
        if kind == "gradient":
            assert difference <= 1e-4 * max(np.abs(expected).max(), 1e-3), name
        else:
            assert difference < 2e-5, name
