"""What a study is asked for: variants of a config, a grid over its keys, and how the best is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from pa_core.config_section import Section

RESERVED = ("run_name", "store.url", "tracking.uri")
"""Keys that the study sets for all of its runs."""


def as_text(value: Any) -> str:
    """A value as the right side of ``key=value``: text as it is, anything else as a YAML flow value."""
    if isinstance(value, (str, float)):
        return str(value)
    return yaml.safe_dump(value, default_flow_style=True, width=2**31).removesuffix("\n...\n").strip()


class Variant(Section):
    """One run of a study: what it changes in the config."""

    name: str | None = Field(None, description="Short name for tables and pictures; default: made of the overrides.")
    overrides: list[str] = Field(
        default_factory=list, description="Changes of the config as key=value, e.g. optimizer.learning_rate=1e-5."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_mapping(cls, value: Any) -> Any:
        """Files may write a run as a mapping of config keys to values."""
        if isinstance(value, Mapping) and not set(value) <= {"name", "overrides"}:
            return {"overrides": [f"{key}={as_text(one)}" for key, one in value.items()]}
        return value


SYNC_AND_PERIODIC = (
    Variant(name="sync", overrides=["schedule.stream=false"]),
    Variant(name="periodic", overrides=["schedule.stream=true"]),
)


class Parameter(Section):
    """One axis of a grid: a key of the config and the values that it takes."""

    key: str = Field(min_length=1, description="Key of the config, with dots, e.g. optimizer.learning_rate.")
    values: list[str] = Field(min_length=1, description="Its values, each as one would type it after key=.")

    @field_validator("values", mode="before")
    @classmethod
    def _texts(cls, values: Any) -> Any:
        return [as_text(value) for value in values] if isinstance(values, list) else values


class CompareConfig(Section):
    """A comparison: the config is trained once per variant, one after the other."""

    name: str | None = Field(
        None, description="Name of the comparison; the same name again trains only what is missing. Default: made up."
    )
    variants: list[Variant] = Field(
        default_factory=lambda: list(SYNC_AND_PERIODIC),
        min_length=2,
        description="Runs to compare; the synchronous one, or else the first, is what the others are measured against.",
    )


class SweepConfig(Section):
    """A sweep: a grid over keys of the config, a list of runs, or both."""

    name: str | None = Field(
        None, description="Name of the sweep; the same name again trains only what is missing. Default: made up."
    )
    parameters: list[Parameter] = Field(default_factory=list, description="The grid: every combination is one run.")
    runs: list[Variant] = Field(default_factory=list, description="Further runs, each with overrides of its own.")
    metric: str = Field(
        "eval/accuracy", description="Metric by which the best is chosen: its last value in the run's MLflow page."
    )
    mode: Literal["max", "min"] = Field("max", description="Whether the largest or the smallest value is the best.")
    concurrency: int = Field(
        1,
        ge=1,
        le=64,
        description="Runs at a time. Each takes the machine for its own: set trainer.threads and engine.threads, or "
        "devices, when it is above 1.",
    )
    devices: list[str] = Field(
        default_factory=list,
        description="Devices that each run at a time may see (CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES), e.g. "
        "['0,1', '2,3'] with concurrency=2; empty: all.",
    )
    model_name: str | None = Field(
        None, description="Registered model in MLflow whose alias 'best' is the best run; default: the sweep's name."
    )

    @field_validator("parameters", mode="before")
    @classmethod
    def _from_mapping(cls, value: Any) -> Any:
        """Files may write the grid as a mapping of keys to lists of values."""
        if isinstance(value, Mapping):
            return [{"key": key, "values": values} for key, values in value.items()]
        return value

    @model_validator(mode="after")
    def _something(self) -> SweepConfig:
        if not self.parameters and not self.runs:
            raise ValueError("nothing to sweep: give parameters (a grid), runs (a list), or both")
        keys = [parameter.key for parameter in self.parameters]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"parameters: {', '.join(twice)} is there twice; put all of its values into one list")
        if self.devices and len(self.devices) < self.concurrency:
            raise ValueError(f"devices names {len(self.devices)} entries for concurrency={self.concurrency}")
        return self

    def variants(self) -> list[Variant]:
        """The grid, the first parameter slowest, then the listed runs; what is asked for twice is there once."""
        axes = [[f"{axis.key}={value}" for value in axis.values] for axis in self.parameters]
        grid = [Variant(overrides=list(point)) for point in itertools.product(*axes)] if axes else []
        chosen: dict[tuple[str, ...], Variant] = {}
        for variant in [*grid, *self.runs]:
            chosen.setdefault(tuple(sorted(variant.overrides)), variant)
        return list(chosen.values())
