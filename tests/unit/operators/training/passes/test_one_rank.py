"""The passes of a real rank agree with formulas in plain transformers and numpy.

There is one rank, so nothing here sees how ranks divide the work; `test_context_ranks.py` and the
tests of layouts do. G is the number of response tokens of a sample.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from operators.training.passes import chosen as chosen_module
from operators.training.passes.chosen import chosen_tokens
from operators.training.passes.compared import Compared, compare
from operators.training.passes.critic_passes import (
    critic_gradients,
    update_critic,
    values_pass,
)
from operators.training.passes.logprob_pass import (
    logprobs_of,
    native_pass,
    recording_pass,
    replaying_pass,
)
from operators.training.passes.share import lay_out_share
from operators.training.passes.update import gradients, update
from pipeline.rl.kl import kl_estimate
from tests.synchronisations import counted
from tests.unit.operators.training.passes.one_rank import World, norm_of, with_correction, world

TIGHT = {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"}
"""Rejects tokens whose probability differs by more than a factor of 0.7 to 1.4."""
MICRO_BATCHES = 3
"""Micro-batches in each mini-batch."""
WEIGHTS = {"rollout_is": "token", "rollout_is_threshold": 1.2}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory):
    with world(
        tmp_path_factory.mktemp("world"), algorithm={"adv_estimator": "gae", "lam": 0.9}
    ) as made:
        yield made


@pytest.fixture
def data(one: World):
    loaded = one.data()
    yield loaded
    loaded.routes.close()


@pytest.fixture
def grpo(one: World):
    """The rank with GRPO's advantages, which need no critic."""
    algorithm = one.rank.config.algorithm.model_copy(update={"adv_estimator": "grpo"})
    return replace(one.rank, config=one.rank.config.model_copy(update={"algorithm": algorithm}))


def trainer_logprobs(one: World, data: Any) -> dict[str, np.ndarray]:
    with torch.no_grad():
        return {
            id: one.plain_tokens(data.samples[id])[0].numpy() for id in sorted(data.ids.values())
        }


def mask_of(data: Any) -> dict[str, np.ndarray]:
    """The loss mask, without the samples that have no reward."""
    return {
        id: data.samples[id].loss_mask_G & (data.samples[id].reward is not None)
        for id in data.ids.values()
    }


def assert_close(found: Any, expected: Any, **tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for id, values_G in expected.items():
        np.testing.assert_allclose(found[id], values_G, err_msg=id, **tolerance)


def test_every_log_prob_pass_agrees_with_transformers(one: World, data: Any):
    expected = trainer_logprobs(one, data)
    native, recorded = native_pass(one.rank, data, one.rank.chunks), recording_pass(one.rank, data)
    replayed = replaying_pass(one.rank, data, data.routes)
    for found in (native, recorded, replayed):
        assert_close(found.logprobs, expected, atol=2e-5, rtol=0)
    assert (native.counts, native.routes, recorded.counts) == ({}, {}, {})
    layers = one.rank.geometry.layers
    rows = sum(int(data.routes[id].valid_T.sum()) for id in data.ids.values())
    unknown = sum(int((~data.routes[id].valid_T).sum()) for id in data.ids.values())
    found = {layer: (count.replayed, count.native) for layer, count in replayed.counts.items()}
    assert found == dict.fromkeys(layers, (rows, unknown))
    assert all(c.agreeing == c.replayed > 0 for c in replayed.counts.values())
    assert replayed.samples.keys() == recorded.routes.keys() == set(data.ids.values())
    for id, routes in recorded.routes.items():
        of_engine = data.routes[id]
        assert routes.valid_T.all()
        known = of_engine.valid_T
        assert np.array_equal(routes.sets_TLK[known], of_engine.sets_TLK[known]), id


def test_other_routes_give_other_log_probs(one: World, data: Any):
    """Each sample replays its routes in reverse order."""
    (first, *_) = data.layout.mini_batches
    ids = [data.ids[row] for row in first.rows(0).tolist()]
    reversed_routes = {
        id: replace(data.routes[id], sets_TLK=data.routes[id].sets_TLK[::-1].copy())
        for id in data.ids.values()
    }
    batches = lay_out_share(one.rank, data, first, reversed_routes)
    found = logprobs_of(one.rank, batches, reversed_routes)
    native = trainer_logprobs(one, data)
    assert max(np.abs(found[id] - native[id]).max() for id in ids) > 1e-3
    replayed = replaying_pass(one.rank, data, reversed_routes).logprobs
    assert_close(found, {id: replayed[id] for id in ids}, atol=1e-6, rtol=0)


def test_weights_are_divided_by_the_mean_of_all_ranks(one: World, data: Any, grpo: Any):
    old = trainer_logprobs(one, data)
    plain = compare(with_correction(grpo, **WEIGHTS), data, old, None)
    rank = with_correction(grpo, **WEIGHTS, rollout_is_batch_normalize=True)
    divided = compare(rank, data, old, None)
    all_weights = np.concatenate([plain.weights[id][m] for id, m in mask_of(data).items()])
    mean = all_weights[all_weights > 0].mean(dtype=np.float64)
    assert mean != pytest.approx(1.0, rel=1e-3)
    expected = {id: values_G / mean for id, values_G in plain.weights.items()}
    assert_close(divided.weights, expected, rtol=1e-5, atol=1e-6)


def test_rejected_tokens_leave_the_loss_mask_and_the_others_are_weighted(
    one: World, data: Any, grpo: Any
):
    old = trainer_logprobs(one, data)
    rank = with_correction(grpo, **TIGHT, **WEIGHTS)
    made = compare(rank, data, old, None)
    before, kept, weights = mask_of(data), {}, {}
    for id in data.ids.values():
        ratio_G = np.exp(old[id] - data.samples[id].logprobs_G.astype(np.float64))
        inverse_G = 1 / ratio_G
        kept[id] = before[id] & (inverse_G >= 0.7) & (inverse_G <= 1.4)
        weights[id] = np.where(before[id], np.minimum(ratio_G, 1.2), 0)
    total, rejected = (sum(int(m.sum()) for m in masks.values()) for masks in (before, kept))
    assert 0 < rejected < total
    assert {id: m.tolist() for id, m in made.mask.items()} == {
        id: m.tolist() for id, m in kept.items()
    }
    assert_close(made.weights, weights, rtol=1e-4, atol=1e-6)
    assert_close(made.old, old, rtol=0, atol=0)
    assert made.reference is made.kl is made.values is None
    for id in data.ids.values():
        assert not made.advantages[id][~kept[id]].any()
        assert made.advantages[id].dtype == made.weights[id].dtype == np.float32


def test_bypass_uses_the_engines_log_probs_and_rejects_only_in_the_update(
    one: World, data: Any, grpo: Any
):
    made = compare(with_correction(grpo, bypass_mode=True, **TIGHT), data, None, None)
    mask = mask_of(data)
    assert {id: m.tolist() for id, m in made.mask.items()} == {
        id: m.tolist() for id, m in mask.items()
    }
    engine = {
        id: np.where(m, data.samples[id].logprobs_G, 0).astype(np.float32) for id, m in mask.items()
    }
    assert_close(made.old, engine, rtol=0, atol=0)
    assert any(np.isnan(sample.logprobs_G).any() for sample in data.samples.values())
    assert made.weights is made.tally is made.returns is None


def test_an_update_in_bypass_mode_rejects_and_weights_by_its_own_log_probs(
    one: World, data: Any, grpo: Any
):
    """The loss is REINFORCE: -w A log p, over the tokens that are not rejected."""
    rank = with_correction(grpo, bypass_mode=True, loss_type="reinforce", **TIGHT, **WEIGHTS)
    rank = replace(rank, config=without_others(rank.config))
    compared = compare(rank, data, None, None)
    (first, *_) = data.layout.mini_batches
    tallies: list[Any] = []
    reports, counts = gradients(rank, data, first, compared, data.routes, tallies)
    tokens = policy = all_tokens = 0.0
    trainer = trainer_logprobs(one, data)
    for id in (data.ids[row] for row in first.rows(0).tolist()):
        ratio_G = np.exp(trainer[id] - compared.old[id].astype(np.float64))
        kept_G = compared.mask[id] & (1 / ratio_G >= 0.7) & (1 / ratio_G <= 1.4)
        weights_G = np.minimum(ratio_G, 1.2)
        policy -= (weights_G * compared.advantages[id] * trainer[id])[kept_G].sum()
        tokens += kept_G.sum()
        all_tokens += compared.mask[id].sum()
    assert sum(int(r["tokens"]) for r in reports) == sum(int(r["divisor"]) for r in reports)
    assert 0 < sum(int(report["tokens"]) for report in reports) == tokens < all_tokens
    assert sum(float(report["policy"]) for report in reports) == pytest.approx(policy, rel=1e-3)
    assert len(tallies) == len(reports) > 1
    assert counts.keys() == set(rank.geometry.layers)
    assert all(count.replayed for count in counts.values())


def without_others(config: Any) -> Any:
    """Return the settings with the policy loss alone."""
    actor = config.actor_rollout_ref.actor.model_copy(
        update={"entropy_coeff": 0.0, "use_kl_loss": False}
    )
    return config.model_copy(
        update={"actor_rollout_ref": config.actor_rollout_ref.model_copy(update={"actor": actor})}
    )


def near(one: World, data: Any, seed: int) -> dict[str, np.ndarray]:
    """Log-probs near the trainer's."""
    rng = np.random.default_rng(seed)
    of_trainer = trainer_logprobs(one, data)
    return {id: (x + rng.normal(0, 0.3, len(x))).astype(np.float32) for id, x in of_trainer.items()}


def plain_loss(one: World, data: Any, mini_batch: Any, compared: Compared) -> Any:
    """PPO's loss with entropy and KL to the reference, averaged over the mini-batch's tokens."""
    total: Any = 0.0
    count = 0
    for id in (data.ids[row] for row in mini_batch.rows(0).tolist()):
        new_G, entropy_G = one.plain_tokens(data.samples[id])
        old_G, advantages_G, mask_G, weights_G, reference_G = (
            torch.from_numpy(values[id])
            for values in (
                compared.old,
                compared.advantages,
                compared.mask,
                compared.weights,
                compared.reference,
            )
        )
        ratio_G = (new_G - old_G).exp()
        free_G = -advantages_G * ratio_G
        clipped_G = torch.maximum(free_G, -advantages_G * ratio_G.clamp(0.8, 1.2))
        limited_G = torch.minimum(clipped_G, -advantages_G * 3.0)
        policy_G = torch.where(advantages_G < 0, limited_G, clipped_G) * weights_G
        kl_G = kl_estimate(new_G, reference_G, "mse")
        total = total + (policy_G - 0.3 * entropy_G + 0.7 * kl_G)[mask_G].sum()
        count += int(mask_G.sum())
    return total / count, count


def test_gradients_of_a_mini_batch_equal_those_of_plain_autograd(one: World, data: Any, grpo: Any):
    """The loss has every part: clipping, weights, rejection, entropy and KL to the reference."""
    rank = with_correction(grpo, **TIGHT, **WEIGHTS)
    old, reference = near(one, data, 1), near(one, data, 2)
    compared = compare(rank, data, old, reference)
    assert compared.reference is reference
    (first, *_) = data.layout.mini_batches
    reports, _ = gradients(rank, data, first, compared, data.routes)
    rank.optimizer.prepare_grads()
    found = rank.optimizer.get_grad_norm()
    one.plain.zero_grad()
    loss, count = plain_loss(one, data, first, compared)
    loss.backward()
    expected = norm_of(p.grad for p in one.plain.parameters() if p.grad is not None)
    assert found == pytest.approx(expected, rel=1e-4)
    assert sum(int(report["tokens"]) for report in reports) == count
    total = sum(
        float(r["policy"]) - 0.3 * float(r["entropy"]) + 0.7 * float(r["kl"]) for r in reports
    )
    assert total / count == pytest.approx(float(loss.detach()), rel=1e-4)
    assert not any(x.requires_grad for report in reports for x in report.values())
    gradients(rank, data, first, compared, data.routes)
    rank.optimizer.prepare_grads()
    assert rank.optimizer.get_grad_norm() == pytest.approx(found, rel=1e-6)


def test_an_update_takes_one_step_per_mini_batch(one: World, data: Any, grpo: Any):
    """Runs last of the policy's tests, because it changes the weights."""
    rank = with_correction(grpo, **WEIGHTS)
    compared = compare(rank, data, near(one, data, 1), near(one, data, 2))
    before = [p.detach().clone() for chunk in rank.chunks for p in chunk.parameters()]
    (first, *_) = data.layout.mini_batches
    one.plain.zero_grad()
    loss, count = plain_loss(one, data, first, compared)
    loss.backward()
    expected = norm_of(p.grad for p in one.plain.parameters() if p.grad is not None)
    updates = update(rank, data, compared, data.routes)
    number = len(data.layout.mini_batches)
    assert len(updates.sums) == len(updates.grad_norms) == number > 1
    assert (updates.empty, updates.skipped, updates.tallies) == (0, 0, [])
    assert updates.lr == rank.config.actor_rollout_ref.actor.optim.lr == 1e-3
    assert updates.grad_norms[0] == pytest.approx(expected, rel=1e-4)
    assert updates.sums[0]["tokens"] == count
    epochs = rank.config.actor_rollout_ref.actor.ppo_epochs
    assert [counts.keys() for counts in updates.counts] == [set(rank.geometry.layers)] * epochs
    valid = sum(int(data.routes[id].valid_T.sum()) for id in data.ids.values())
    assert all(c.replayed == valid for counts in updates.counts for c in counts.values())
    after = [p.detach() for chunk in rank.chunks for p in chunk.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_tokens_are_drawn_by_their_place_in_the_step(one: World, data: Any, monkeypatch: Any):
    """A token's number is its sample's row and its index in the response, whatever the order."""
    monkeypatch.setattr(chosen_module, "hashes", lambda places_T, salt: places_T)
    seen: list[Any] = []

    def choose(choice: Any, settings: Any) -> Any:
        seen.append(choice)
        return choice.logprobs_T > choice.old_T

    current, old = near(one, data, 1), near(one, data, 2)
    mask = mask_of(data)
    advantages = near(one, data, 3)
    compared = Compared(old, None, advantages=advantages, mask=mask)
    (first, *_) = data.layout.mini_batches
    found = chosen_tokens(one.rank, data, first, compared, choose, current)
    rows = first.rows(0).tolist()
    ids = [data.ids[row] for row in rows]
    assert {id: x.tolist() for id, x in found.items()} == {
        id: (current[id] > old[id]).tolist() for id in ids
    }
    (choice,) = seen
    for values_T, by_id in (
        (choice.logprobs_T, current),
        (choice.old_T, old),
        (choice.advantages_T, advantages),
        (choice.mask_T, mask),
    ):
        assert np.array_equal(values_T, np.concatenate([by_id[id] for id in ids]))
    places = [
        row * 2**32 + token
        for row, id in zip(rows, ids, strict=True)
        for token in range(len(current[id]))
    ]
    assert choice.drawn_T.tolist() == places


class TestCritic:
    """The critic of the rank."""

    def values(self, one: World, sample: Any) -> torch.Tensor:
        """The values of a sample's response tokens, [G], with gradients."""
        tokens = torch.from_numpy(sample.tokens_S.astype(np.int64))
        hidden_SH = one.plain.model(tokens[None, :-1]).last_hidden_state[0]
        return (hidden_SH @ self.head(one).T)[len(sample.prompt_tokens_P) - 1 :, 0]

    def head(self, one: World) -> torch.Tensor:
        """The value head's weight."""
        (chunk,) = one.rank.critic.model.bare_chunks
        return chunk.output_layer.weight.detach()

    def test_values_agree_with_transformers(self, one: World, data: Any):
        found = values_pass(one.rank, one.rank.critic, data, data.routes)
        with torch.no_grad():
            expected = {id: self.values(one, data.samples[id]).numpy() for id in data.ids.values()}
        assert_close(found.values, expected, atol=2e-5, rtol=0)
        assert found.counts.keys() == set(one.rank.geometry.layers)
        assert all(count.replayed for count in found.counts.values())
        assert not values_pass(one.rank, one.rank.critic, data, None).counts

    def test_gradients_and_report_equal_the_clipped_loss(self, one: World, data: Any):
        """The old values are far from both the values and the returns."""
        rng = np.random.default_rng(5)
        critic = one.rank.critic
        assert critic is not None
        lengths = {id: len(data.samples[id].logprobs_G) for id in data.ids.values()}
        old = {id: rng.normal(0, 1, G).astype(np.float32) for id, G in lengths.items()}
        returns = {id: rng.normal(2, 1, G).astype(np.float32) for id, G in lengths.items()}
        mask = mask_of(data)
        compared = Compared({}, None, mask=mask, values=old, returns=returns)
        (first, *_) = data.layouts["critic_update"].mini_batches
        reports, counts = critic_gradients(one.rank, critic, data, first, compared, data.routes)
        critic.model.optimizer.prepare_grads()
        found = critic.model.optimizer.get_grad_norm()
        clip = one.rank.config.critic.cliprange_value
        weight = self.head(one).clone().requires_grad_()
        one.plain.zero_grad()
        total: Any = 0.0
        clipped = count = vpred = 0.0
        for id in (data.ids[row] for row in first.rows(0).tolist()):
            sample = data.samples[id]
            tokens = torch.from_numpy(sample.tokens_S.astype(np.int64))
            hidden_SH = one.plain.model(tokens[None, :-1]).last_hidden_state[0]
            v_G = (hidden_SH @ weight.T)[len(sample.prompt_tokens_P) - 1 :, 0]
            v_G, old_G, returns_G = (
                values_G[torch.from_numpy(mask[id])]
                for values_G in (v_G, torch.from_numpy(old[id]), torch.from_numpy(returns[id]))
            )
            limited_G = torch.maximum(torch.minimum(v_G, old_G + clip), old_G - clip)
            free_G, other_G = (v_G - returns_G) ** 2, (limited_G - returns_G) ** 2
            total = total + 0.5 * torch.maximum(free_G, other_G).sum()
            clipped += int((other_G > free_G).sum())
            vpred += float(v_G.detach().sum())
            count += len(v_G)
        (total / count).backward()
        expected = norm_of(
            [weight.grad] + [p.grad for p in one.plain.model.parameters() if p.grad is not None]
        )
        assert found == pytest.approx(expected, rel=1e-4)
        sums = {name: sum(float(report[name]) for report in reports) for name in reports[0]}
        assert sums == {
            "tokens": count,
            "divisor": count,
            "vf_loss": pytest.approx(float(total.detach()), rel=1e-4),
            "vf_clipped": clipped,
            "vpred": pytest.approx(vpred, rel=1e-3, abs=1e-3),
        }
        assert 0 < clipped < count
        assert counts.keys() == set(one.rank.geometry.layers)
        assert all(of_layer.replayed for of_layer in counts.values())
        assert not any(x.requires_grad for report in reports for x in report.values())
        critic_gradients(one.rank, critic, data, first, compared, data.routes)
        critic.model.optimizer.prepare_grads()
        assert critic.model.optimizer.get_grad_norm() == pytest.approx(found, rel=1e-6)

    def test_an_update_takes_one_step_per_mini_batch(self, one: World, data: Any):
        old = trainer_logprobs(one, data)
        critic = one.rank.critic
        values = values_pass(one.rank, critic, data, None).values
        compared = compare(one.rank, data, old, None, values=values)
        assert compared.values is values
        assert compared.returns is not None
        before = self.head(one).clone()
        updates = update_critic(one.rank, critic, data, compared, data.routes)
        assert len(updates.sums) == len(data.layouts["critic_update"].mini_batches) > 1
        assert updates.lr == critic.settings.optim.lr
        assert not torch.equal(before, self.head(one))


def test_a_gpu_never_waits_during_a_pass(one: World, data: Any):
    """Results are read from the device in one go after a pass; replay uploads once per micro-batch.

    An update also reads the totals of its mini-batch, before it, and whether it has any token. A
    recording reads each micro-batch's routes, which are large.
    """
    rank, critic, replays = one.rank, one.rank.critic, "replay/replayed.py::__init__"
    values = values_pass(rank, critic, data, data.routes).values
    old = native_pass(rank, data, rank.chunks).logprobs
    compared = compare(rank, data, old, None, values=values)
    passes = {
        "native": (lambda: native_pass(rank, data, rank.chunks), 1),
        "recording": (lambda: recording_pass(rank, data), 1 + MICRO_BATCHES),
        "replaying": (lambda: replaying_pass(rank, data, data.routes), 2),
        "values": (lambda: values_pass(rank, critic, data, data.routes), 2),
        "update": (lambda: update(rank, data, compared, data.routes), 4),
        "critic": (lambda: update_critic(rank, critic, data, compared, data.routes), 4),
    }
    for name, (run, reads) in passes.items():
        with counted() as waits:
            run()
        assert waits.in_pass == {}, name
        found = {place: n for place, n in waits.outside.items() if not place.endswith(" numpy")}
        assert sum(found.values()) == reads * waits.passes, (name, found)
        replayed = name not in ("native", "recording")
        assert waits.uploads[replays] == 2 * MICRO_BATCHES * waits.passes * replayed, name
