"""What is away comes back bit for bit, and what never leaves the device is left alone."""

from types import SimpleNamespace

import pytest
import torch

from operators.training import offload
from operators.training.offload import Offload, Offloaded, make_critic_offload, make_offload
from pipeline.config.tree import ActorRolloutRef

LENGTHS = (5, 7)


class Chunk(torch.nn.Module):
    """Weights that are views of one buffer, as Megatron's, and one with a storage of its own."""

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
    """An fp32 copy of the first weight with moments, and a weight that is updated itself."""
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
    def test_views_come_back(self):
        made = chunk()
        views = list(made.weights)
        before = [view.detach().clone() for view in views]
        held = Offloaded(lambda: views)
        held.to_host()
        assert [size(view) for view in views] == [0, 0, 0]
        held.to_host()  # nothing is left to put away
        held.to_device()
        held.to_device()
        assert all(torch.equal(a, b) for a, b in zip(views, before, strict=True))
        assert size(made.whole) == 24
        made.whole[0] = 9
        assert made.weights[0][0] == 9, "still a view"

    def test_what_is_not_kept_comes_back_as_zeros(self):
        gradients = torch.ones(4)
        held = Offloaded(lambda: [gradients], keep=False)
        held.to_host()
        assert size(gradients) == 0
        held.to_device()
        assert gradients.tolist() == [0] * 4

    def test_what_appears_later_is_to_host_too(self):
        state: list[torch.Tensor] = []
        held = Offloaded(lambda: state)
        held.to_host()
        held.to_device()
        state.append(torch.ones(4))
        held.to_host()
        assert size(state[0]) == 0


class TestOffload:
    def test_the_passes_of_a_step(self, monkeypatch):
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

    def test_a_failing_reference_leaves_the_policy_here(self):
        policy, reference = chunk(), chunk()
        of = make_offload(settings(param=True), [policy], optimizer_of(policy), [reference], None)
        with pytest.raises(RuntimeError, match="kernel"), of.of_reference():
            raise RuntimeError("kernel")
        assert (size(policy.whole), size(reference.whole)) == (24, 0)

    @pytest.mark.parametrize("keeps", [True, False])
    def test_the_passes_of_a_critic(self, monkeypatch, keeps):
        """It is here for its own passes, when the policy is away, and for a checkpoint."""
        monkeypatch.setattr(offload, "parts", lambda optimizer: [optimizer])
        policy, critic = chunk(), chunk()
        optimizer = optimizer_of(critic)
        master = optimizer.optimizer.param_groups[0]["params"][0]
        of_actor = settings(param=True, grad=True, optimizer=True)
        megatron = of_actor.actor.megatron if keeps else settings().actor.megatron
        of_critic = make_critic_offload(megatron, [critic], optimizer)
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
    def test_the_reference_follows_the_actor(self, of_actor, own, away):
        reference = chunk()
        held = settings(own, param=of_actor)
        make_offload(held, [chunk()], optimizer_of(chunk()), [reference], None)
        assert (size(reference.whole) == 0) == away

    def test_nothing_is_asked_for(self):
        models = ([chunk()], optimizer_of(chunk()))
        assert make_offload(settings(), *models, [chunk()], None) == Offload()
        alone = make_offload(settings(param=True), *models, None, None)
        assert alone == Offload()

    def test_what_is_on_another_device_stays(self, monkeypatch):
        """Megatron's CPU offload keeps its part on the host already: a model elsewhere (here: of no
        device) has nothing there to be moved."""
        monkeypatch.setattr(offload, "parts", lambda optimizer: [optimizer])
        optimizer = optimizer_of(chunk())
        elsewhere = torch.nn.Linear(2, 2, device="meta")
        of = make_offload(settings(optimizer=True), [elsewhere], optimizer, None, None)
        of.before_log_probs()
        assert all(size(t) for t in optimizer.optimizer.param_groups[0]["params"])
