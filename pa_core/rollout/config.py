"""Keys of the replicas that generate, and of the vLLM servers among them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pa_core.config_section import Section


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
    replicas: int = Field(
        1,
        ge=0,
        description="Replica processes to start here; with 0 the run waits for those that others start (pa serve, the "
        "replica flow) or that urls names.",
    )
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
