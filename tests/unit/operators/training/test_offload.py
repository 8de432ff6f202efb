"""Offloaded tensors are restored bit for bit, and tensors on other devices stay untouched."""

from types import SimpleNamespace

import pytest
import torch

from operators.training import offload
from operators.training.offload import Offloaded, OlderWeights, make_offload, model_parts
from pipeline.config.tree import ActorRolloutRef

LENGTHS = (5, 7)


class Chunk(torch.nn.Module):
    """Weights that are views of one buffer, as in Megatron, and a weight with its own storage."""

    def __init__(self):
        super().__init__()
        self.whole = torch.arange(12, dtype=torch.bfloat16)
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(part) for part in (*self.whole.split(LENGTHS), torch.ones(3))]
        )
        self.expert_parallel_buffers = [SimpleNamespace(grad_data=torch.ones(4))]


def chunk() -> Chunk:
    made = Chunk()
    vars(made)["buffers"] = [SimpleNamespace(grad_data=torch.ones(12))]
    return made


def optimizer_of(chunk: Chunk) -> SimpleNamespace:
    """Return an optimizer with two parameters.

    One is an fp32 copy of the model's first weight, and the other is a weight of the model itself.
    """
    master = chunk.weights[0].detach().float()
    state = {"exp_avg": torch.full((5,), 2.0), "step": torch.tensor(3.0)}
    inner = SimpleNamespace(
        param_groups=[{"params": [master, chunk.weights[2]]}], state={master: state}
    )
    return SimpleNamespace(optimizer=inner)


def size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def settings(reference: bool | None = None, **actor: bool) -> ActorRolloutRef:
    return ActorRolloutRef.model_validate(
        {
            "model": {"path": "m"},
            "actor": {"megatron": {f"{name}_offload": on for name, on in actor.items()}},
            "ref": {"megatron": {"param_offload": reference}},
        }
    )


class TestOffloaded:
    def test_views_stay_views_of_the_restored_storage(self):
        made = chunk()
        views = list(made.weights)
        before = [view.detach().clone() for view in views]
        held = Offloaded(lambda: views)
        held.to_host()
        assert [size(view) for view in views] == [0, 0, 0]
        held.to_host()  # has no effect the second time
        held.to_device()
        held.to_device()
        assert all(torch.equal(a, b) for a, b in zip(views, before, strict=True))
        assert size(made.whole) == 24
        made.whole[0] = 9
        assert made.weights[0][0] == 9, "still a view"

    def test_tensors_without_kept_content_are_restored_as_zeros(self):
        gradients = torch.ones(4)
        held = Offloaded(lambda: [gradients], keep=False)
        held.to_host()
        assert size(gradients) == 0
        held.to_device()
        assert gradients.tolist() == [0] * 4

    def test_tensors_that_are_created_later_are_offloaded(self):
        state: list[torch.Tensor] = []
        held = Offloaded(lambda: state)
        held.to_host()
        held.to_device()
        state.append(torch.ones(4))
        held.to_host()
        assert size(state[0]) == 0


class TestOlderWeights:
    @pytest.mark.parametrize("error", [None, RuntimeError("kernel")])
    def test_a_pass_sees_the_older_weights_and_leaves_every_bit_as_it_was(self, monkeypatch, error):
        """The copy is larger than a piece."""
        monkeypatch.setattr(offload, "_PIECE", 10)  # splits a buffer of 24 bytes
        made = chunk()
        master = optimizer_of(made).optimizer.param_groups[0]["params"][0]
        held = OlderWeights()
        held.keep(4, [made])
        assert held.version == 4
        bits = torch.tensor([0x7FC1, 0x7FFF, 0x3F80, *range(9)], dtype=torch.int16)
        made.whole.copy_(bits.view(torch.bfloat16))
        made.weights[2].detach().fill_(5)
        caught = None
        try:
            with held.in_use([made]):
                assert torch.equal(made.whole, torch.arange(12, dtype=torch.bfloat16))
                assert made.weights[1].tolist() == list(range(5, 12)), "still a view"
                assert made.weights[2].tolist() == [1, 1, 1]
                assert master.tolist() == [0, 1, 2, 3, 4]
                if error is not None:
                    raise error
        except RuntimeError as found:
            caught = found
        assert caught is error
        assert torch.equal(made.whole.view(torch.int16), bits)
        assert torch.equal(made.weights[0].view(torch.int16), bits[:5])
        assert made.weights[2].tolist() == [5, 5, 5]
        assert master.tolist() == [0, 1, 2, 3, 4]
        assert held == OlderWeights(), "the copy is dropped"

    def test_weights_that_were_offloaded_meanwhile_take_part(self):
        """Offloading allocates new memory for the weights, but the order of storages stays the
        same."""
        made = chunk()
        held, moved = OlderWeights(), Offloaded(lambda: list(made.weights))
        held.keep(0, [made])
        made.whole.zero_()
        moved.to_host()
        moved.to_device()
        with held.in_use([made]):
            assert torch.equal(made.whole, torch.arange(12, dtype=torch.bfloat16))
        assert not made.whole.any()


class TestOffload:
    def test_each_pass_of_a_step_has_only_its_parts_on_the_device(self, monkeypatch):
        monkeypatch.setattr(offload, "parts", lambda optimizer: [optimizer])
        policy, reference = chunk(), chunk()
        optimizer = optimizer_of(policy)
        (master, own), (state,) = (
            optimizer.optimizer.param_groups[0]["params"],
            optimizer.optimizer.state.values(),
        )
        of = make_offload(
            settings(param=True, grad=True, optimizer=True), [policy], optimizer, [reference], None
        )
        gradients = [vars(policy)["buffers"][0], policy.expert_parallel_buffers[0]]

        def sizes() -> dict[str, bool]:
            return {
                "policy": size(policy.whole) > 0 and size(own) > 0,
                "gradients": all(size(buffer.grad_data) for buffer in gradients),
                "state": size(master) > 0 and size(state["exp_avg"]) > 0,
                "reference": size(reference.whole) > 0,
            }

        everything = {"policy": True, "gradients": True, "state": True, "reference": False}
        assert sizes() == everything
        for _ in range(2):
            of.before_log_probs()
            log_probs = {"policy": True, "gradients": False, "state": False, "reference": False}
            assert sizes() == log_probs
            with of.of_reference():
                assert sizes() == {**log_probs, "policy": False, "reference": True}
                assert torch.equal(reference.whole, torch.arange(12, dtype=torch.bfloat16))
            assert sizes() == log_probs
            of.before_updates()
            assert sizes() == everything
        assert size(state["step"]) > 0
        assert master.tolist() == [0, 1, 2, 3, 4]
        assert state["exp_avg"].tolist() == [2] * 5

    def test_an_error_in_the_reference_pass_restores_the_policy(self):
        policy, reference = chunk(), chunk()
        of = make_offload(settings(param=True), [policy], optimizer_of(policy), [reference], None)
        with pytest.raises(RuntimeError, match="kernel"), of.of_reference():
            raise RuntimeError("kernel")
        assert (size(policy.whole), size(reference.whole)) == (24, 0)

    @pytest.mark.parametrize("keeps", [True, False])
    def test_each_pass_of_a_critic_has_only_its_parts_on_the_device(self, monkeypatch, keeps):
        """An offloaded critic returns to the device for its own passes, during which the policy is
        offloaded, and before a checkpoint is written."""
        monkeypatch.setattr(offload, "parts", lambda optimizer: [optimizer])
        policy, critic = chunk(), chunk()
        optimizer = optimizer_of(critic)
        master = optimizer.optimizer.param_groups[0]["params"][0]
        of_actor = settings(param=True, grad=True, optimizer=True)
        megatron = of_actor.actor.megatron if keeps else settings().actor.megatron
        of_critic = model_parts(megatron, [critic], optimizer)
        of = make_offload(of_actor, [policy], optimizer_of(policy), None, of_critic)
        gradients = vars(critic)["buffers"][0]

        def here() -> tuple[bool, bool, bool, bool]:
            found = (policy.whole, critic.whole, gradients.grad_data, master)
            return tuple(size(tensor) > 0 for tensor in found)

        assert here() == (True, True, True, True)
        for _ in range(2):
            of.before_log_probs()
            without = (True, *[not keeps] * 3)
            assert here() == without
            with of.of_values():
                assert here() == (False, True, not keeps, not keeps)
            assert here() == without
            with of.of_critic():
                assert here() == (False, True, True, True)
                assert torch.equal(critic.whole, torch.arange(12, dtype=torch.bfloat16))
            assert here() == without
            of.before_updates()
            assert here() == without
            of.before_checkpoint()
            assert here() == (True, True, True, True)
        assert master.tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize(
        ("of_actor", "own", "away"),
        [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
    )
    def test_the_reference_uses_the_actors_setting_by_default(self, of_actor, own, away):
        reference = chunk()
        held = settings(own, param=of_actor)
        make_offload(held, [chunk()], optimizer_of(chunk()), [reference], None)
        assert (size(reference.whole) == 0) == away

    def test_state_on_a_different_device_stays_there(self, monkeypatch):
        """Megatron's CPU offload keeps its state on the host, away from the model's device."""
        monkeypatch.setattr(offload, "parts", lambda optimizer: [optimizer])
        optimizer = optimizer_of(chunk())
        elsewhere = torch.nn.Linear(2, 2, device="meta")
        of = make_offload(settings(optimizer=True), [elsewhere], optimizer, None, None)
        of.before_log_probs()
        assert all(size(t) for t in optimizer.optimizer.param_groups[0]["params"])
