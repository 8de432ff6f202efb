"""Each token gets its own recorded experts, on every rank and in every layer of every layout."""

import json
from pathlib import Path

import pytest

from tests.integration.torchrun import run_nodes, run_ranks
from tests.integration.training_replay.alignment import PACKED, RAGGED
from tests.integration.training_replay.layouts import TRIED
from tests.integration.training_replay.models import make_aligned, make_biased

pytestmark = pytest.mark.integration
PROGRAM = "tests.integration.training_replay.alignment"
RANKS = {layout.name: layout.ranks for layout in TRIED}


@pytest.fixture(scope="module")
def found(
    sealed_run: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict]]:
    """Return the results of each rank, keyed by layout."""
    folder = tmp_path_factory.mktemp("alignment")
    (folder / "plain").symlink_to(tiny_model)
    make_aligned(folder / "aligned")
    make_biased(folder / "biased")
    for ranks in sorted({*RANKS.values()}):
        names = [layout.name for layout in TRIED if layout.ranks == ranks]
        start = run_nodes if ranks == 4 else run_ranks
        start(PROGRAM, ranks, sealed_run, folder, folder, *names)
    return {
        name: [
            json.loads((folder / f"alignment.{name}.{rank}.json").read_text())
            for rank in range(ranks)
        ]
        for name, ranks in RANKS.items()
    }


@pytest.mark.parametrize("layout", RANKS)
def test_routers_choose_the_code_of_their_input_token(found: dict, layout: str):
    """Each router chooses the code that is written into the route of its input token.

    The router's input identifies the token that the model's own split put there, so the comparison
    does not rely on our layout. Training compares each row twice, because it includes a
    recomputation.
    """
    parts = [report["alignment"] for report in found[layout]]
    for part in parts:
        assert part["forward"]["wrong"] == 0
        assert part["training"]["wrong"] == 0
        assert part["training"]["replayed"] == 2 * part["forward"]["replayed"] > 0
    # With TP and CP, ranks have the same samples, and each router processes a part of their rows.
    rows = {tuple(part["share"]): part["rows"] for part in parts}
    assert sum(part["forward"]["replayed"] for part in parts) == sum(rows.values())


@pytest.mark.parametrize("layout", RANKS)
@pytest.mark.parametrize("shift", ["token", "layer", "sample"])
def test_misplaced_routes_are_detected(found: dict, layout: str, shift: str):
    """The test above detects a shift by one token or layer, and two swapped samples.

    Layers are shifted within a rank, so a rank with one layer keeps its routes.
    """
    parts = [report["alignment"][shift] for report in found[layout]]
    if shift == "layer" and "pp2" in layout and "vpp2" not in layout:
        first = len(parts) // 2
        assert [part["wrong"] for part in parts[:first]] == [0] * first
        parts = parts[first:]
    if shift == "sample":  # a rank may have neither of the two samples
        wrong, replayed = (sum(part[name] for part in parts) for name in ("wrong", "replayed"))
        assert wrong > 0.1 * replayed
        return
    for part in parts:
        assert part["wrong"] > 0.9 * part["replayed"]


@pytest.mark.parametrize("layout", RANKS)
def test_the_expert_bias_does_not_count_padding(found: dict, layout: str):
    """With a model like DeepSeek-V3, the expert bias counts K tokens per layer and real row."""
    parts = [report["padding"] for report in found[layout]]
    assert all(part["with_mask"] for part in parts)
    rows = sum({part["share"]: part["rows"] for part in parts}.values())
    layers = {layer for part in parts for layer in part["counted"]}
    assert layers == {"1", "2", "3"}
    for layer in layers:
        assert sum(part["counted"].get(layer, 0) for part in parts) == 4 * rows


@pytest.mark.parametrize("layout", [name for name in RANKS if "pp2" not in name])
def test_a_failed_pass_leaves_no_state(found: dict, layout: str):
    """After a pass in which a router raises an exception, no routes stay bound to the routers.

    This holds for recording, replaying and training passes. The next pass is bit-identical to the
    last one before the failure.
    """
    for report in found[layout]:
        assert report["exception"] == {"raised": 6, "left": 0, "differ": 0}


def test_log_probs_over_a_split_vocabulary_equal_torchs(found: dict):
    """Log-probs, entropy and gradients with TP2 agree with plain torch over the vocabulary."""
    for report in found["tp2-sp"]:
        differences = report["logprobs"]
        assert differences["largest_gradient"] > 1
        for name in ("logprobs", "entropy", "gradient"):
            assert differences[name] < 1e-5


@pytest.mark.parametrize("packed", ["packed", "padded"])
@pytest.mark.parametrize("model", RAGGED)
def test_cp2_equals_dp2_for_samples_of_any_length(found: dict, model: str, packed: str):
    """With 1 to 600 positions in fp32, CP2 gives the same log-probs and gradients as DP2.

    Gradients are compared relative to the largest gradient of each tensor.
    """
    for report in found["cp2"]:
        differences = report["contexts"][model][packed]
        assert differences["tensors"] > 100
        assert differences["logprobs"] < 1e-5
        assert differences["gradient"] < 1e-5


@pytest.mark.parametrize("model", RAGGED)
@pytest.mark.parametrize("layout", PACKED)
def test_packing_does_not_change_samples_of_any_length(found: dict, layout: str, model: str):
    """With 1 to 600 positions in fp32, packed and padded micro-batches give the same results.

    They have the same log-probs and gradients, up to summation order. Replaying the routes of a
    packed native pass changes no bit. Gradients are compared relative to the largest gradient of
    each tensor.
    """
    for report in found[layout]:
        differences = report["ragged"][model]
        assert differences["tensors"] > 20  # a stage with one dense layer has 24
        assert differences["logprobs"] < 1e-5
        assert differences["gradient"] < 1e-5
        assert differences["changed_by_replay"] == 0
