"""What every section of the configuration tree shares: strictness, and how it reads as a form."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


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
        allow_inf_nan=False,
        json_schema_extra=_number_fields,
        field_title_generator=_field_title,
        model_title_generator=_section_title,
    )
