"""The single typed tree of settings. Settings that also exist in verl keep verl's names.

The description of each field explains its effect; docs/config.md is generated from these
descriptions. A field marked OPERATIONAL may change when a run is attached again; all other fields
make up the run's identity. For a path marked INPUT, the file's content is part of the identity, but
the path is not.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from pipeline.config.actor import Actor
from pipeline.config.algorithm import Algorithm
from pipeline.config.critic import Critic
from pipeline.config.launch import Launch
from pipeline.config.ref import LogProbCut, Ref
from pipeline.config.reward import Reward
from pipeline.config.section import FOR_WORKERS, INPUT, OPERATIONAL, PLACE, Count, Section, Share
from pipeline.config.trainer import Trainer
from pipeline.store.schemes import CREDENTIALS, DEFAULT_STORE, REMOTE_URI, STORE_SHAPES


class Data(Section):
    """The prompts, as Parquet files in verl's layout."""

    train_files: Annotated[str | list[str] | None, PLACE, INPUT] = Field(
        None,
        description=f"Parquet file or files with the training prompts, as paths or {REMOTE_URI}s. "
        "Columns: prompt (chat messages), data_source, reward_model.ground_truth and, optionally, "
        "extra_info.",
    )
    val_files: Annotated[str | list[str] | None, PLACE, INPUT] = Field(
        None,
        description="Parquet file or files with the validation prompts, in the same layout; null: "
        "no validation.",
    )
    prompt_key: str = Field("prompt", description="Column that contains the chat messages.")
    reward_fn_key: str = Field(
        "data_source", description="Column that contains the name of the data source."
    )
    train_batch_size: Count = Field(32, description="Prompts per step.")
    gen_batch_size: Count | None = Field(
        None,
        description="With algorithm.filter_groups.enable: number of prompts in each batch "
        "(sub-plan) that a step samples; null: train_batch_size. Without "
        "algorithm.filter_groups.enable, only null and the value of train_batch_size are accepted.",
    )
    max_prompt_length: Count = Field(512, description="Maximum length of a prompt, in tokens.")
    max_response_length: Count = Field(512, description="Maximum length of a response, in tokens.")
    filter_overlong_prompts: bool = Field(
        False,
        description="true: drop prompts that are longer than max_prompt_length, and report how "
        "many were dropped; false: treat them as `truncation` specifies.",
    )
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error",
        description="Treatment of prompts that are longer than max_prompt_length and are not "
        "dropped. error: refuse to start; left, right: remove tokens from that side; middle: "
        "remove tokens from the middle.",
    )
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further variables for the model's chat template, such as {enable_thinking: "
        "false}. They apply to training and validation prompts.",
    )
    shuffle: bool = Field(True, description="Shuffle the prompts in each epoch.")
    seed: NonNegativeInt = Field(1, description="Seed for the order of the prompts.")


class Model(Section):
    """The policy's model."""

    path: Annotated[str, PLACE, INPUT] = Field(
        description=f"Folder (a path or {REMOTE_URI}) with a Hugging Face config, safetensors "
        "files and a tokenizer.json, or the model's id on the Hugging Face Hub.",
    )


class ValKwargs(Section):
    """Sampling for validation."""

    temperature: NonNegativeFloat = Field(0.0, description="Sampling temperature; 0: greedy.")
    top_p: Share = Field(1.0, description="Nucleus sampling; 1: off.")
    top_k: int = Field(-1, ge=-1, description="Top-k sampling; -1: off.")
    n: Count = Field(1, description="Samples per prompt.")


class EngineKwargs(Section):
    """Additional arguments for the engine."""

    vllm: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's engine arguments, as in verl, such as compilation_config, "
        "async_scheduling and attention_backend. Arguments that would lead to incorrect routes or "
        "log-probs are refused. vLLM checks the values when an engine starts.",
    )


class Rollout(LogProbCut):
    """The rollout engine, and the trainer's log-probs of the sampled responses."""

    name: Literal["vllm"] = Field("vllm", description="The inference engine.")
    n: Count = Field(8, description="Samples per prompt (the size of a group).")
    temperature: float = Field(
        1.0,
        ge=0.01,
        description="Sampling temperature. The minimum is vLLM's, which would sample at 0.01 where "
        "the trainer divides by less.",
    )
    top_p: Share = Field(
        1.0,
        description="Nucleus sampling; only 1 (off), because the trainer's log-probs refer to the "
        "entire vocabulary.",
    )
    top_k: int = Field(-1, ge=-1, description="Top-k sampling; only -1 (off), for the same reason.")
    enable_rollout_routing_replay: bool = Field(
        False, description="Record the engine's routing. R3 requires this setting."
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Data type of the engine's weights."
    )
    tensor_model_parallel_size: Count = Field(
        1, description="Tensor-parallel size (TP) of each engine."
    )
    gpu_memory_utilization: Annotated[Share, FOR_WORKERS] = Field(
        0.8, description="Share of the GPU's memory that the engine may use."
    )
    cpu_kv_cache_gib: Annotated[Count, FOR_WORKERS] = Field(
        1, description="Size of the KV cache in GiB, if vLLM's CPU build is used."
    )
    trace_buffer_mib: Annotated[int, FOR_WORKERS] = Field(
        512,
        ge=16,
        description="Memory limit, in MiB, for a worker's finished but unwritten samples. "
        "Generation pauses while this buffer is full.",
    )
    trace_compression: Annotated[Literal["zstd", "lz4", "none"], FOR_WORKERS] = Field(
        "zstd",
        description="Compression of the routes files. zstd produces the smallest files. lz4 and "
        "none take less processor time; choose one of them if size is unimportant, for example on "
        "a local disk.",
    )
    max_num_seqs: Count = Field(256, description="Maximum number of sequences per engine batch.")
    max_num_batched_tokens: int = Field(
        8192, ge=32, description="Maximum number of tokens per engine batch."
    )
    enforce_eager: bool | None = Field(
        None,
        description="Run the engine without compilation or CUDA graphs; null: true on the CPU, "
        "false on GPUs.",
    )
    engine_kwargs: EngineKwargs = Field(default_factory=EngineKwargs)
    val_kwargs: ValKwargs = Field(default_factory=ValKwargs)


class ActorRolloutRef(Section):
    """All settings of the policy: model, training, rollout and reference, grouped as in verl."""

    model: Model
    actor: Actor = Field(default_factory=Actor)
    rollout: Rollout = Field(default_factory=Rollout)
    ref: Ref = Field(default_factory=Ref)


class CustomRewardFunction(Section):
    """The user's reward function."""

    path: Annotated[str, PLACE, INPUT] = Field(
        description=f"Python file (path or {REMOTE_URI}) that defines verl's "
        "compute_score(data_source, solution_str, ground_truth, extra_info). The modules that it "
        "imports from its folder are staged with it.",
    )
    name: str = Field("compute_score", description="Name of the function in that file.")
    reward_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Further keyword arguments for each call of the function.",
    )


_DELTAS_FROM = 1 << 30
"""Minimum size of the weights, in bytes, for storing policies as differences by default.

Smaller policies are quick to write whole.
"""


class PolicyDeltas(Section):
    """Storage of policy versions as differences from the previous version."""

    enable: Annotated[bool | None, FOR_WORKERS] = Field(
        None,
        description="Store policies as exact differences; null: do this only if the weights take 1 "
        "GiB or more. With differences, each training rank keeps its share of the weights in a "
        "file under TMPDIR.",
    )
    every: Annotated[Count, FOR_WORKERS] = Field(
        16,
        description="Store every n-th version whole, where n is this value; 1 has the same effect "
        "as enable=false. The first version that a trainer writes after it starts is also stored "
        "whole. A version is also stored whole if its difference is at least half as large as its "
        "weights.",
    )

    def whole_every(self, size: int) -> int | None:
        """Return the interval between whole versions, for `size` bytes of weights.

        Return None if every version is stored whole.
        """
        enabled = size >= _DELTAS_FROM if self.enable is None else self.enable
        return self.every if enabled and self.every > 1 else None


class StoreSettings(Section):
    """The object store that the rollout workers, the trainer and the flow share."""

    uri: Annotated[str, PLACE] = Field(
        DEFAULT_STORE,
        description=f"Folder, {STORE_SHAPES} of the object store. {CREDENTIALS}",
    )
    endpoint: Annotated[str | None, OPERATIONAL] = Field(
        None,
        description="URL of an S3 server other than AWS; null: AWS_ENDPOINT_URL_S3, otherwise the "
        "profile's endpoint, otherwise AWS.",
    )
    region: Annotated[str | None, OPERATIONAL] = Field(
        None,
        description="Region of the bucket; null: AWS_REGION, otherwise the profile's region, "
        "otherwise us-east-1.",
    )
    path_style: Annotated[bool | None, OPERATIONAL] = Field(
        None,
        description="true: the bucket is part of the URL's path; false: it is part of the host "
        "name; null: true with a custom endpoint, false on AWS.",
    )
    ca_bundle: Annotated[str | None, PLACE, OPERATIONAL] = Field(
        None,
        description="File with the certificates that are used to verify the endpoint; null: "
        "AWS_CA_BUNDLE, otherwise the public certificate authorities.",
    )
    policy_cache: Annotated[str, FOR_WORKERS] = Field(
        "disk",
        pattern=r"^(disk|memory|/.*)$",
        description="Where rollout workers keep a policy, with one copy per machine: disk (under "
        "TMPDIR), memory (/dev/shm), or the path of a local folder.",
    )
    policy_buffer_mib: Annotated[Count, FOR_WORKERS] = Field(
        2048,
        description="Limit on the host memory, in MiB, for a new policy's weights that a training "
        "rank has copied but not yet written. A tensor larger than this limit is copied on its "
        "own. Training waits while this buffer is full.",
    )
    policy_deltas: PolicyDeltas = Field(default_factory=PolicyDeltas)


class RunConfig(Section):
    """All settings of a run."""

    data: Data = Field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef
    critic: Critic = Field(default_factory=Critic)
    algorithm: Algorithm = Field(default_factory=Algorithm)
    custom_reward_function: CustomRewardFunction | None = Field(
        None,
        description="The reward function; null: built-in scorers by data_source (docs/rewards.md).",
    )
    reward: Reward = Field(default_factory=Reward)
    trainer: Trainer
    store: StoreSettings = Field(default_factory=StoreSettings)
    launch: Launch = Field(default_factory=Launch)

    @property
    def has_reference(self) -> bool:
        """Whether the run compares its policy with the reference policy (policy 0)."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained along with the policy."""
        return self.algorithm.adv_estimator == "gae"

    def has_staleness_pass(self, step: int) -> bool:
        """Return whether a step measures engine mismatch and staleness separately.

        The step then has a pass with the weights of the samples' policy version, which the previous
        step must keep. With replay_file, those weights may belong to another run. With bypass_mode,
        only R3 runs the native pass that the comparison needs.
        """
        replay = self.actor_rollout_ref.actor.router_replay
        bypassed = self.algorithm.rollout_correction.bypass_mode and not replay.replays_recorded
        return (
            self.trainer.max_staleness > 0
            and not bypassed
            and replay.replay_file is None
            and 0 < step < self.trainer.total_training_steps
            and replay.native_every > 0
            and step % replay.native_every == 0
        )

    @property
    def run_uri(self) -> str:
        """The run's URI: <store.uri>/<name of the run's folder>."""
        return f"{self.store.uri.rstrip('/')}/{self.trainer.run_name}"
