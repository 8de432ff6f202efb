"""Offloads weights, gradients and optimizer state to the host while no pass needs them.

    ● on the GPU, · on the host

                      log-probs   of reference   values   of the critic   updates   checkpoint
    policy:               ●            ·            ·           ·            ●          ●
    gradients:            ·            ·            ·           ·            ●          ●
    optimizer state:      ·            ·            ·           ·            ●          ●
    reference:            ·            ●            ·           ·            ·          ·
    critic:               ·            ·            ●           ●            ·          ●
    its gradients:        ·            ·            ·           ●            ·          ●
    its optimizer:        ·            ·            ·           ●            ·          ●

The column "of reference" shows the reference's log-prob pass, and "of the critic" shows the
critic's updates. The last two rows are the critic's gradients and optimizer state. A row applies
only if its setting is on. The settings have verl's names: megatron.param_offload, grad_offload and
optimizer_offload, ref.megatron.param_offload, and the same three under critic.megatron. The export
needs the same parts on the GPU as the updates do.

Megatron's parameters and gradients are views of large buffers. Offloading empties their storages in
place, so that every view stays valid. On CPU, host and device share one memory. Offloaded weights
and states are then copies in the same memory, and only offloading gradients saves memory, because
gradients are not kept.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from operators.training.megatron.optimizer import parts
from pipeline.config.actor import Megatron
from pipeline.config.tree import ActorRolloutRef

Tensors = Callable[[], Iterable[torch.Tensor]]
_PIECE = 64 << 20
"""Bytes that the model and a copy on the host swap at a time."""


@dataclass
class Offloaded:
    """Tensors that can be moved to the host.

    Their storages are looked up at each move, because Adam creates its state during the first
    update.
    """

    tensors: Tensors
    keep: bool = True
    """Whether to keep the content; False restores the tensors as zeros."""
    _away: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = field(default_factory=list)
    """Emptied storages with their sizes in bytes and their contents."""

    def to_host(self) -> None:
        """Move the content to the host and free the device's memory, unless it is already there."""
        if self._away:
            return
        for storage in _storages(self.tensors()):
            content = None
            if self.keep:
                content = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
                )
                content.copy_(_bytes(storage))
            self._away.append((storage, storage.nbytes(), content))
            storage.resize_(0)

    def to_device(self) -> None:
        """Restore storages and contents on the device, if they are on the host."""
        for storage, size, content in self._away:
            storage.resize_(size)
            if content is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(content)
        self._away.clear()


@dataclass
class OlderWeights:
    """A host copy of the weights of an older policy version, which a pass can use once.

    The copy and the model swap their bytes piece by piece, in place. So the pass needs neither a
    second model on the device nor a second copy on the host, and swapping twice restores every bit.
    The optimizer's own float32 weights are not swapped.
    """

    version: int | None = None
    """The policy version of the copy; None if there is no copy."""
    _contents: list[torch.Tensor] = field(default_factory=list)
    """The bytes of each storage, in the order of the model's parameters."""

    def keep(self, version: int, chunks: Sequence[torch.nn.Module]) -> None:
        """Copy these chunks' weights, which must be the weights of policy `version`."""
        self._contents.clear()
        self._contents += [_bytes(of).to("cpu", copy=True) for of in _storages(_weights(chunks))]
        self.version = version

    @contextmanager
    def in_use(self, chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Give the chunks the older weights during the `with` block, and then drop the copy."""
        self._swap(chunks)
        try:
            yield
        finally:
            self._swap(chunks)
            self._contents.clear()
            self.version = None

    def _swap(self, chunks: Sequence[torch.nn.Module]) -> None:
        for storage, content in zip(_storages(_weights(chunks)), self._contents, strict=True):
            of_model, of_copy = (torch.split(of, _PIECE) for of in (_bytes(storage), content))
            for ours, theirs in zip(of_model, of_copy, strict=True):
                held = ours.to("cpu", copy=True)
                ours.copy_(theirs)
                theirs.copy_(held)


@dataclass(frozen=True)
class ModelParts:
    """The parts of a trained model that are on the host while no pass needs them.

    A field is None if its part is always on the device.
    """

    weights: Offloaded | None = None
    gradients: Offloaded | None = None
    optimizer: Offloaded | None = None

    @property
    def all(self) -> tuple[Offloaded | None, ...]:
        """Weights, gradients and optimizer state."""
        return self.weights, self.gradients, self.optimizer


@dataclass(frozen=True)
class Offload:
    """The parts of a rank's models that are on the host while no pass needs them."""

    policy: ModelParts = ModelParts()
    critic: ModelParts = ModelParts()
    reference: Offloaded | None = None
    """The reference's weights; None if they are always on the device."""

    def before_log_probs(self) -> None:
        """Move the critic and the parts that only updates need to the host."""
        _to_host(self.policy.gradients, self.policy.optimizer, *self.critic.all)

    def before_updates(self) -> None:
        """Restore the parts that updates and exports need."""
        _to_device(self.policy.gradients, self.policy.optimizer)

    def before_checkpoint(self) -> None:
        """Restore the critic, in addition to the parts that updates need."""
        _to_device(*self.critic.all)

    def of_values(self) -> AbstractContextManager[None]:
        """Keep the critic's weights, not the policy, on the device during the `with` block."""
        return self._without_policy(self.critic.weights)

    def of_critic(self) -> AbstractContextManager[None]:
        """Keep all parts of the critic, not the policy, on the device during the `with` block."""
        return self._without_policy(*self.critic.all)

    def of_reference(self) -> AbstractContextManager[None]:
        """Keep the reference, not the policy, on the device during the `with` block."""
        return self._without_policy(self.reference)

    @contextmanager
    def _without_policy(self, *parts: Offloaded | None) -> Iterator[None]:
        _to_host(self.policy.weights)
        _to_device(*parts)
        try:
            yield
        finally:
            _to_host(*parts)
            _to_device(self.policy.weights)


def _to_host(*parts: Offloaded | None) -> None:
    for part in parts:
        if part is not None:
            part.to_host()


def _to_device(*parts: Offloaded | None) -> None:
    for part in parts:
        if part is not None:
            part.to_device()


def make_offload(
    settings: ActorRolloutRef,
    chunks: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    reference: Sequence[torch.nn.Module] | None,
    critic: ModelParts | None,
) -> Offload:
    """Return the parts that the settings offload, and move the reference to the host immediately.

    Args:
        settings: Settings of the actor and the reference.
        chunks: Chunks of the trained model.
        optimizer: The trained model's optimizer.
        reference: Chunks of the reference; None if the run has no reference.
        critic: The critic's parts; None if the run has no critic.
    """
    megatron, own = settings.actor.megatron, settings.ref.megatron.param_offload
    held = Offloaded(lambda: _weights(reference or ()))
    of_reference = megatron.param_offload if own is None else own
    if of_reference:
        held.to_host()
    policy = model_parts(megatron, chunks, optimizer)
    if not (reference or critic):  # every pass needs the policy
        policy = replace(policy, weights=None)
    return Offload(policy, critic or ModelParts(), held if of_reference and reference else None)


def model_parts(
    megatron: Megatron, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> ModelParts:
    """Return the parts of a trained model that the settings offload; nothing is moved yet.

    Args:
        megatron: The model's Megatron settings.
        chunks: Chunks of the model.
        optimizer: The model's optimizer.
    """
    weights = Offloaded(lambda: _weights(chunks))
    gradients = Offloaded(lambda: _gradients(chunks), keep=False)
    state = Offloaded(lambda: _state(optimizer, chunks))
    return ModelParts(
        weights=weights if megatron.param_offload else None,
        gradients=gradients if megatron.grad_offload else None,
        optimizer=state if megatron.optimizer_offload else None,
    )


def _weights(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()


def _gradients(chunks: Sequence[DistributedDataParallel]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield buffer.grad_data


def _state(
    optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]
) -> Iterator[torch.Tensor]:
    """Yield the fp32 weights and moments on the model's device.

    A CPU-offloaded optimizer already keeps them on the host. In an fp32 model the optimizer updates
    the model's own weights, which are not yielded.
    """
    weights = list(_weights(chunks))
    of_model = {weight.untyped_storage().data_ptr() for weight in weights}
    for part in parts(optimizer):
        updated = [p for group in part.optimizer.param_groups for p in group["params"]]
        moments = [t for state in part.optimizer.state.values() for t in state.values()]
        for tensor in [*updated, *moments]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.device == weights[0].device
                and tensor.ndim > 0  # not a step count
                and tensor.untyped_storage().data_ptr() not in of_model
            ):
                yield tensor


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors, each once; emptied storages are left out."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage
    return list(found.values())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
