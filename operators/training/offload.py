"""Weights, gradients and optimizer state in the host's memory while no pass needs them.

                 log-probs   of reference   values   critic's updates   updates   checkpoint
    policy           here        away           away     away               here      here
    gradients        away        away           away     away               here      here
    optimizer state  away        away           away     away               here      here
    reference        away        here           away     away               away      away
    critic           away        away           here     here               away      here
    its gradients    away        away           away     here               away      here
    its optimizer    away        away           away     here               away      here

Each row only where its setting (megatron.param_offload, grad_offload, optimizer_offload,
ref.megatron.param_offload and critic.megatron's three, as verl names them) is on. The export needs
what updates need. Storages are emptied in place, so every view
of them (Megatron's parameters and their gradients are views of large buffers) stays what it is. On
CPU there is no other memory, and what is away is a copy beside it: only gradients save any.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from operators.training.megatron.optimizer import parts
from pipeline.config.actor import Megatron
from pipeline.config.tree import ActorRolloutRef

Tensors = Callable[[], Iterable[torch.Tensor]]


@dataclass
class Offloaded:
    """Tensors that can be put away. Their storages are looked up each time: Adam makes its state in
    the first update."""

    tensors: Tensors
    keep: bool = True
    """Whether their content is needed again; False: they come back as zeros."""
    _away: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = field(default_factory=list)
    """Emptied storages, their sizes and contents in bytes."""

    def to_host(self) -> None:
        """Move the content to the host and free the device's memory; nothing if it is away."""
        if self._away:
            return
        storages = {}
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages[storage.data_ptr()] = storage
        for storage in storages.values():
            content = None
            if self.keep:
                content = torch.empty(
                    storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda"
                )
                content.copy_(_bytes(storage))
            self._away.append((storage, storage.nbytes(), content))
            storage.resize_(0)

    def to_device(self) -> None:
        """Restore storages and contents; nothing if they are here."""
        for storage, size, content in self._away:
            storage.resize_(size)
            if content is None:
                _bytes(storage).zero_()
            else:
                _bytes(storage).copy_(content)
        self._away.clear()


@dataclass(frozen=True)
class CriticOffload:
    """What of the critic a rank keeps away between its passes; None: it always stays."""

    weights: Offloaded | None = None
    gradients: Offloaded | None = None
    optimizer: Offloaded | None = None

    @property
    def parts(self) -> tuple[Offloaded | None, ...]:
        """All of it."""
        return self.weights, self.gradients, self.optimizer


@dataclass(frozen=True)
class Offload:
    """What a rank keeps away between its passes; None: it always stays."""

    policy: Offloaded | None = None
    gradients: Offloaded | None = None
    optimizer: Offloaded | None = None
    reference: Offloaded | None = None
    critic: CriticOffload = CriticOffload()

    def before_log_probs(self) -> None:
        """Put away what only updates need, and the critic."""
        _to_host(self.gradients, self.optimizer, *self.critic.parts)

    def before_updates(self) -> None:
        """Bring back what updates and exports need."""
        _to_device(self.gradients, self.optimizer)

    def before_checkpoint(self) -> None:
        """Bring back the critic, beside what updates need."""
        _to_device(*self.critic.parts)

    @contextmanager
    def of_values(self) -> Iterator[None]:
        """Have the critic's weights here instead of the policy."""
        _to_host(self.policy)
        _to_device(self.critic.weights)
        try:
            yield
        finally:
            _to_host(self.critic.weights)
            _to_device(self.policy)

    @contextmanager
    def of_critic(self) -> Iterator[None]:
        """Have all of the critic here instead of the policy."""
        _to_host(self.policy)
        _to_device(*self.critic.parts)
        try:
            yield
        finally:
            _to_host(*self.critic.parts)
            _to_device(self.policy)

    @contextmanager
    def of_reference(self) -> Iterator[None]:
        """Have the reference here instead of the policy."""
        _to_host(self.policy)
        _to_device(self.reference)
        try:
            yield
        finally:
            _to_host(self.reference)
            _to_device(self.policy)


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
    critic: CriticOffload | None,
) -> Offload:
    """What the settings keep away; the reference is put away at once. None: there is no critic."""
    megatron, own = settings.actor.megatron, settings.ref.megatron.param_offload
    held = Offloaded(lambda: _weights(reference or ()))
    of_reference = megatron.param_offload if own is None else own
    if of_reference:
        held.to_host()
    policy = Offloaded(lambda: _weights(chunks))
    gradients = Offloaded(lambda: _gradients(chunks), keep=False)
    state = Offloaded(lambda: _state(optimizer, chunks))
    return Offload(
        # Without another model, every pass needs the policy.
        policy=policy if megatron.param_offload and (reference or critic) else None,
        gradients=gradients if megatron.grad_offload else None,
        optimizer=state if megatron.optimizer_offload else None,
        reference=held if of_reference and reference else None,
        critic=critic or CriticOffload(),
    )


def make_critic_offload(
    megatron: Megatron, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer
) -> CriticOffload:
    """What the critic's settings keep away, from its first pass on."""
    weights = Offloaded(lambda: _weights(chunks))
    gradients = Offloaded(lambda: _gradients(chunks), keep=False)
    state = Offloaded(lambda: _state(optimizer, chunks))
    return CriticOffload(
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
    """Yield fp32 weights and moments on the model's device; those of a CPU-offloaded optimizer are
    on the host already, and fp32 models update their weights themselves."""
    weights = list(_weights(chunks))
    of_model = {weight.untyped_storage().data_ptr() for weight in weights}
    for part in parts(optimizer):
        updated = [p for group in part.optimizer.param_groups for p in group["params"]]
        moments = [t for state in part.optimizer.state.values() for t in state.values()]
        for tensor in [*updated, *moments]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.device == weights[0].device
                and tensor.ndim > 0  # a step count
                and tensor.untyped_storage().data_ptr() not in of_model
            ):
                yield tensor


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
