"""The one typed tree of settings. Names follow verl where verl has one.

The description of every field explains its effect; docs/config.md is generated from here. A field
marked OPERATIONAL may change when a run is attached again; all others are the run's identity. For a
path marked INPUT, the content is identity, not the name.
"""

from typing import Any, Literal

from pydantic import Field

from pipeline.config.actor import Actor
from pipeline.config.algorithm import Algorithm
from pipeline.config.critic import Critic
from pipeline.config.launch import Launch
from pipeline.config.ref import LogProbCut, Ref
from pipeline.config.reward import Reward
from pipeline.config.section import FOR_WORKERS, INPUT, OPERATIONAL, Section, formerly
from pipeline.config.trainer import Trainer
from pipeline.store.schemes import CREDENTIALS, DEFAULT_STORE, REMOTE_URI, STORE_SHAPES


class Data(Section):
    """Prompts: Parquet in verl's layout."""

    train_files: str | list[str] | None = Field(
        None,
        json_schema_extra=INPUT,
        description=f"Parquet file(s), paths or {REMOTE_URI}s, with columns prompt (chat "
        "messages), data_source, reward_model.ground_truth and, optionally, extra_info.",
    )
    val_files: str | list[str] | None = Field(
        None,
        json_schema_extra=INPUT,
        description="Validation prompts in the same layout; null: no validation.",
    )
    prompt_key: str = Field("prompt", description="Column with the chat messages.")
    reward_fn_key: str = Field("data_source", description="Column with the data source's name.")
    train_batch_size: int = Field(32, ge=1, description="Prompts per step.")
    gen_batch_size: int | None = Field(
        None,
        ge=1,
        json_schema_extra=formerly(None),
        description="Prompts that are sampled at once with algorithm.filter_groups; null: "
        "train_batch_size. Otherwise it is train_batch_size.",
    )
    max_prompt_length: int = Field(512, ge=1, description="Longest prompt, in tokens.")
    max_response_length: int = Field(512, ge=1, description="Longest response, in tokens.")
    filter_overlong_prompts: bool = Field(
        False,
        description="true: drop prompts over max_prompt_length and say how many; "
        "false: see truncation.",
    )
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error",
        json_schema_extra=formerly("error"),
        description="Prompts over max_prompt_length that are not dropped: refuse to start, or cut "
        "that side of their tokens (middle: keep both ends).",
    )
    shuffle: bool = Field(True, description="Shuffle prompts anew in each epoch.")
    seed: int = Field(1, ge=0, description="Seed of the prompt order.")


class Model(Section):
    """The policy."""

    path: str = Field(
        json_schema_extra=INPUT,
        description="Folder with HF config, safetensors and tokenizer, "
        f"its {REMOTE_URI}, or a Hugging Face hub id.",
    )


class ValKwargs(Section):
    """Sampling for validation."""

    temperature: float = Field(0.0, ge=0, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(-1, ge=-1, description="Top-k sampling; -1: off.")
    n: int = Field(1, ge=1, description="Samples per prompt.")


class EngineKwargs(Section):
    """Further arguments of the engine."""

    vllm: dict[str, Any] = Field(
        default_factory=dict,
        json_schema_extra=formerly({}),
        description="vLLM's engine arguments, as in verl: compilation_config, async_scheduling, "
        "attention_backend, ... Refused are those that would make routes or log-probs wrong.",
    )


class Rollout(LogProbCut):
    """The rollout engine, and the trainer's log-probs of what it sampled."""

    name: Literal["vllm"] = Field("vllm", description="The inference engine.")
    n: int = Field(8, ge=1, description="Samples per prompt (the GRPO group).")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling.")
    top_k: int = Field(-1, ge=-1, description="Top-k sampling; -1: off.")
    enable_rollout_routing_replay: bool = Field(
        False, description="Record the engine's routing. R3 needs it."
    )
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="Engine's weights.")
    tensor_model_parallel_size: int = Field(1, ge=1, description="TP of each engine.")
    gpu_memory_utilization: float = Field(
        0.8, gt=0, le=1, json_schema_extra=FOR_WORKERS, description="Share of GPU memory."
    )
    cpu_kv_cache_gib: int = Field(
        1, ge=1, json_schema_extra=FOR_WORKERS, description="KV cache of the CPU build, GiB."
    )
    trace_buffer_mib: int = Field(
        512,
        ge=16,
        json_schema_extra=FOR_WORKERS,
        description="Finished samples of a worker that are not written yet, MiB of memory; "
        "generation waits when it is full.",
    )
    trace_compression: Literal["zstd", "lz4", "none"] = Field(
        "zstd",
        json_schema_extra=FOR_WORKERS | formerly("zstd"),
        description="Of the routes files: zstd is smallest; lz4 or none cost less processor time "
        "where bytes cost nothing, as in a folder of one machine.",
    )
    max_num_seqs: int = Field(256, ge=1, description="Sequences in one engine batch.")
    max_num_batched_tokens: int = Field(8192, ge=32, description="Tokens in one engine batch.")
    enforce_eager: bool | None = Field(
        None,
        json_schema_extra=formerly(True),
        description="No compilation, no CUDA graphs; null: true on the CPU, false on GPUs.",
    )
    engine_kwargs: EngineKwargs = Field(default_factory=EngineKwargs)
    val_kwargs: ValKwargs = Field(default_factory=ValKwargs)


class ActorRolloutRef(Section):
    """verl's name for everything about the policy."""

    model: Model
    actor: Actor = Field(default_factory=Actor)
    rollout: Rollout = Field(default_factory=Rollout)
    ref: Ref = Field(default_factory=Ref)


class CustomRewardFunction(Section):
    """Where the reward function is."""

    path: str = Field(
        json_schema_extra=INPUT,
        description=f"Self-contained Python file (path or {REMOTE_URI}) with verl's "
        "compute_score(data_source, solution_str, ground_truth, extra_info).",
    )
    name: str = Field("compute_score", description="Name of the function in that file.")


class StoreSettings(Section):
    """The object store that rollout, training and flow share."""

    uri: str = Field(
        DEFAULT_STORE,
        description=f"Folder, {STORE_SHAPES} of the object store. {CREDENTIALS}",
    )
    endpoint: str | None = Field(
        None,
        json_schema_extra=OPERATIONAL,
        description="URL of an S3 server other than AWS; null: AWS_ENDPOINT_URL_S3, the profile, "
        "or AWS.",
    )
    region: str | None = Field(
        None,
        json_schema_extra=OPERATIONAL,
        description="Region of the bucket; null: AWS_REGION, the profile, or us-east-1.",
    )
    path_style: bool | None = Field(
        None,
        json_schema_extra=OPERATIONAL,
        description="true: the bucket is part of the URL's path; false: of its host name; null: of "
        "the path with an endpoint of your own, of the host name on AWS.",
    )
    ca_bundle: str | None = Field(
        None,
        json_schema_extra=OPERATIONAL,
        description="File of the certificates that the endpoint is checked against; null: "
        "AWS_CA_BUNDLE, or the public ones.",
    )


class RunConfig(Section):
    """Everything about a run."""

    data: Data = Field(default_factory=Data)
    actor_rollout_ref: ActorRolloutRef
    critic: Critic = Field(
        default_factory=Critic, json_schema_extra=formerly(Critic().model_dump(mode="json"))
    )
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
        """Whether the run compares its policy with policy 0."""
        return self.actor_rollout_ref.actor.use_kl_loss or self.algorithm.use_kl_in_reward

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.algorithm.adv_estimator == "gae"

    @property
    def run_uri(self) -> str:
        """Where the run lies: <store.uri>/<its folder's name>."""
        return f"{self.store.uri.rstrip('/')}/{self.trainer.run_name}"
