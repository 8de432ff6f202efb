"""Examine the inputs and choices of routers for several layouts in a single launch of the ranks.

The arguments are the run store, the folder with the models, the folder for results and the names of
layouts. Each rank writes the results of these examinations to
`<folder>/alignment.<layout>.<rank>.json`:

alignment  Attention and experts of the aligned model (models.py) add nothing, so the hidden state
           of a router is its token's embedding. The router's input thus identifies the tokens that
           the model's own split gave to this rank. Each token's route contains the token's code,
           and the router's choice must be the code of its input token.
ragged     For samples of 1 to 600 positions, packed micro-batches equal padded ones, and context
           parallelism equals data parallelism.
padding    An expert bias counts the tokens of each expert, which must not include padding.
exception  A failed pass leaves no state in the routers, and the next pass is bit-identical.
logprobs   Log-probs over a split vocabulary agree with plain torch.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open

from operators.training.batches.step_data import StepData, layout_rules, load_step
from operators.training.megatron import parallel
from operators.training.passes.compared import compare
from operators.training.passes.logprob_pass import recording_pass, replaying_pass
from operators.training.passes.logprobs import logprobs_and_entropy
from operators.training.passes.update import gradients
from operators.training.rank import Rank, make_rank
from pipeline.store import Store, open_store
from pipeline.traces import Routes, open_manifest
from tests.exhaustive import TEST_ALL, sample_or_all
from tests.integration.training_replay.layouts import (
    LAYOUTS,
    TRIED,
    Layout,
    passed,
    without_critic,
)
from tests.integration.training_replay.ragged import compared, packed_against_padded
from tests.integration.training_replay.sealed import VOCABULARY

TOPK, LAYERS, NEVER_CODED = 4, 4, 15
"""The aligned model's routers prefer expert 15 for every token, and no code contains it.

A row whose set lacks expert 15 was therefore replayed, whatever the layout.
"""

RAGGED = sample_or_all(("biased",), ("biased", "plain"))
"""Models with latent and with plain attention."""

PACKED = [
    layout.name
    for layout in TRIED
    if not layout.name.endswith("padded") and (TEST_ALL or layout.name == "one")
]
"""Layouts in which packed and padded micro-batches of samples of any length are compared."""


def code_table() -> np.ndarray:
    """Return a set of experts for each token id and layer: [V, L, K], ascending, without 15."""
    scores = np.random.default_rng(0).random((VOCABULARY, LAYERS, NEVER_CODED))
    return np.sort(scores.argsort(axis=-1)[..., :TOPK]).astype(np.uint8)


def program(run_uri: str, models: str, results: str, names: Sequence[str]) -> None:
    """Run the examinations in each layout, and write the results.

    Args:
        run_uri: The run's store.
        models: The folder with the models.
        results: The folder for results.
        names: The names of the layouts.
    """
    store = open_store(run_uri)
    for layout in (layout for layout in LAYOUTS if layout.name in names):
        found = {
            "alignment": examine(alignment, store, Path(models, "aligned"), layout),
            "padding": examine(padding, store, Path(models, "biased"), layout),
        }
        if "pp2" not in layout.name:  # otherwise a stage would wait for the one that failed
            found["exception"] = examine(exception, store, Path(models, "aligned"), layout)
        if layout.name == "tp2-sp":
            found["logprobs"] = examine(logprobs, store, Path(models, "aligned"), layout)
        if layout.name == "cp2":
            found["contexts"] = {name: compared(Path(models, name)) for name in RAGGED}
        if layout.name in PACKED:
            found["ragged"] = {name: ragged(Path(models, name), layout) for name in RAGGED}
        path = Path(results, f"alignment.{layout.name}.{dist.get_rank()}.json")
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


def examine(
    what: Callable[[Rank, StepData, Path], Any], store: Store, model: Path, layout: Layout
) -> Any:
    """Build a model in a layout, load the step, and run one examination.

    Args:
        what: The examination.
        store: The run's store.
        model: The model's folder.
        layout: The layout.
    """
    config = without_critic(layout.config("moe"))
    position = parallel.start(config.actor_rollout_ref.actor.megatron)
    rank, _ = make_rank(config, position, model)
    rules = layout_rules(config, position.data_parallel)
    data = load_step(store, open_manifest(store, 0), config, rules, position.dp_rank, rank.geometry)
    found = what(rank, data, model)
    parallel.stop()
    return found


def ragged(model: Path, layout: Layout) -> dict[str, float]:
    """Compare packed with padded micro-batches, and a replay with its native pass.

    Args:
        model: The model's folder.
        layout: The layout.
    """
    megatron = {**layout.megatron, "override_transformer_config": layout.overrides}
    budget = {"ppo_max_token_len_per_gpu": 700} if layout.actor else {}
    return packed_against_padded(model, megatron, {**layout.actor, **budget})


def alignment(rank: Rank, data: StepData, model: Path) -> dict[str, Any]:
    """Replay codes in a forward pass and in training with recomputation, then misplaced codes.

    Args:
        rank: This training rank.
        data: The step's data.
        model: The model's folder.
    """
    spy = Spy(rank, model)
    right = {id: spy.coded(sample.tokens_S[:-1]) for id, sample in data.samples.items()}
    made = replaying_pass(rank, data, right)
    found: dict[str, Any] = {"forward": spy.take()}
    for mini_batch in data.layout.mini_batches:
        gradients(rank, data, mini_batch, compare(rank, data, made.logprobs, None), right)
    found["training"] = spy.take()
    for name, misplaced in (
        ("token", {id: _changed(r, np.roll(r.sets_TLK, 1, axis=0)) for id, r in right.items()}),
        ("layer", {id: _changed(r, np.roll(r.sets_TLK, 1, axis=1)) for id, r in right.items()}),
        ("sample", _two_swapped(right)),
    ):
        replaying_pass(rank, data, misplaced)
        found[name] = spy.take()
    found["share"] = [rank.position.dp_rank, rank.position.stage]
    found["rows"] = sum(len(routes.valid_T) for routes in right.values()) * len(rank.routers)
    return found


class Spy:
    """Compare the input and the choice of each router, call by call."""

    def __init__(self, rank: Rank, model: Path) -> None:
        self.layers = sorted(rank.routers)
        self.codes_VLK = code_table()
        self.replayed = self.wrong = 0
        with safe_open(model / "model.safetensors", framework="pt") as file:
            embeddings = file.get_tensor("model.embed_tokens.weight")
        self.table = torch.nn.functional.normalize(embeddings, dim=1)
        for layer, router in rank.routers.items():
            router.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Callable[..., None]:
        def look(_: Any, inputs: Any, outputs: Any) -> None:
            hidden_RH = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            tokens_R = (hidden_RH @ self.table.T).argmax(1).numpy()
            sets_RK = outputs[1].nonzero()[:, 1].reshape(len(tokens_R), TOPK).numpy()
            replayed_R = (sets_RK != NEVER_CODED).all(axis=1)
            expected_RK = self.codes_VLK[tokens_R, layer]
            self.replayed += int(replayed_R.sum())
            self.wrong += int((sets_RK != expected_RK).any(axis=1)[replayed_R].sum())

        return look

    def take(self) -> dict[str, int]:
        """Return the counts of rows x layers x runs since the last call."""
        found = {"replayed": self.replayed, "wrong": self.wrong}
        self.replayed = self.wrong = 0
        return found

    def coded(self, tokens_T: np.ndarray) -> Routes:
        """Return the codes of a sample's tokens as routes for this rank's layers."""
        sets_TLK = self.codes_VLK[tokens_T.astype(int)][:, self.layers]
        return Routes(np.ascontiguousarray(sets_TLK), np.ones(len(tokens_T), np.bool_))


def _changed(routes: Routes, sets_TLK: np.ndarray) -> Routes:
    return Routes(np.ascontiguousarray(sets_TLK), routes.valid_T)


def _two_swapped(routes: dict[str, Routes]) -> dict[str, Routes]:
    """Swap the routes of the two longest samples, up to the shorter length."""
    a, b = sorted(routes, key=lambda id: len(routes[id].valid_T))[-2:]
    reach = min(len(routes[id].valid_T) for id in (a, b))
    sets = {id: routes[id].sets_TLK.copy() for id in (a, b)}
    sets[a][:reach] = routes[b].sets_TLK[:reach]
    sets[b][:reach] = routes[a].sets_TLK[:reach]
    return routes | {id: _changed(routes[id], sets[id]) for id in (a, b)}


def padding(rank: Rank, data: StepData, model: Path) -> dict[str, Any]:
    """Count the tokens that an expert bias counts per layer in a training pass, and the real rows.

    Args:
        rank: This training rank.
        data: The step's data.
        model: The model's folder.
    """
    counted = dict.fromkeys(rank.routers, 0)
    for layer, router in rank.routers.items():

        def count(router: Any, *_: Any, layer: int = layer) -> None:
            # Counts grow over micro-batches; the bias update resets them at the end of the pass.
            counted[layer] = int(router.local_tokens_per_expert.sum())

        router.register_forward_hook(count)
    found = recording_pass(rank, data)
    mini_batch = data.layout.mini_batches[0]
    gradients(rank, data, mini_batch, compare(rank, data, found.logprobs, None), found.routes)
    mine = mini_batch.rows(rank.position.dp_rank).tolist()
    rows = sum(len(data.samples[data.ids[row]].tokens_S) - 1 for row in mine)
    share = rank.position.dp_rank
    return {"share": share, "with_mask": rank.with_padding_mask, "rows": rows, "counted": counted}


def exception(rank: Rank, data: StepData, model: Path) -> dict[str, Any]:
    """Fail in the middle of a recording, a replaying and a training pass; compare later passes.

    Args:
        rank: This training rank.
        data: The step's data.
        model: The model's folder.
    """
    found = recording_pass(rank, data)
    compared = compare(rank, data, found.logprobs, None)
    mini_batch = data.layout.mini_batches[0]
    before = passed(rank, data, mini_batch, compared, found.routes)
    left, raised = [], 0
    for routes in (None, found.routes):
        failing = next(iter(rank.routers.values())).register_forward_hook(_fail)
        for attempt in (
            lambda: recording_pass(rank, data),
            lambda routes=routes: gradients(rank, data, mini_batch, compared, routes),
            lambda: replaying_pass(rank, data, found.routes),
        ):
            try:
                attempt()
            except RuntimeError:
                raised += 1
            left += [router.router_replay is not None for router in rank.routers.values()]
        failing.remove()
    after = passed(rank, data, mini_batch, compared, found.routes)
    return {
        "raised": raised,
        "left": sum(left),
        "differ": sum(not torch.equal(before[name], after[name]) for name in before),
    }


def _fail(*_: Any) -> None:
    raise RuntimeError("the router fails")


def logprobs(rank: Rank, data: StepData, model: Path) -> dict[str, float]:
    """Compare log-probs, entropy and gradients over a split vocabulary with plain torch.

    Args:
        rank: This training rank.
        data: The step's data.
        model: The model's folder.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 32, generator=generator) for n in (11, VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (11,), generator=generator)
    weights = torch.randn(2, 11, generator=generator)
    whole = [x.clone().requires_grad_() for x in (hidden, weight)]
    log_p = (whole[0] @ whole[1].T / 0.7).log_softmax(-1)
    expected = [log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)]
    sum((w * x).sum() for w, x in zip(weights, expected, strict=True)).backward()
    part = VOCABULARY // 2
    mine = slice(rank.position.tensor_rank * part, (rank.position.tensor_rank + 1) * part)
    cut = [x.clone().requires_grad_() for x in (hidden, weight[mine])]
    with patch("operators.training.passes.logprobs.CHUNK_TOKENS", 4):
        found = logprobs_and_entropy(
            *cut, labels, 0.7, rank.position.tensor_group, entropy_gradient=True
        )
        sum((w * x).sum() for w, x in zip(weights, found, strict=True)).backward()
    dist.all_reduce(cut[0].grad, group=rank.position.tensor_group)
    differences = [cut[0].grad - whole[0].grad, cut[1].grad - whole[1].grad[mine]]
    return {
        "logprobs": float((found[0] - expected[0]).abs().max()),
        "entropy": float((found[1] - expected[1]).abs().max()),
        "gradient": max(float(difference.abs().max()) for difference in differences),
        "largest_gradient": float(whole[0].grad.abs().max()),
    }


if __name__ == "__main__":
    program(*sys.argv[1:4], sys.argv[4:])
