"""From YAML files, plain trees and dotted overrides to a validated config; every error names the key."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from pa_core.config import TrainConfig
from pa_core.errors import ConfigError


def _known_keys(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Keys of the section that ``location`` points into, walking through optional and list fields."""
    current: type[BaseModel] = model
    for part in location:
        if not isinstance(part, str) or part not in current.model_fields:
            continue
        annotation = current.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        for candidate in candidates:
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                current = candidate
    return list(current.model_fields)


def _explain(error: ValidationError) -> str:
    """One line per problem: the key, what is wrong, the value, and the nearest known key."""
    lines = []
    for problem in error.errors():
        location = problem["loc"]
        key = ".".join(str(part) for part in location) or "config"
        if problem["type"] == "extra_forbidden":
            known = _known_keys(TrainConfig, location[:-1])
            near = difflib.get_close_matches(str(location[-1]), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
            lines.append(f"{key}: unknown key{hint}")
        elif problem["type"] == "missing":
            lines.append(f"{key}: required, but not set")
        elif problem["type"] == "value_error":
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(message if key == "config" else f"{key}: {message}")
        else:
            lines.append(f"{key}: {problem['msg']} (got {problem['input']!r})")
    return "\n".join(lines)


def parse_config(tree: dict[str, Any]) -> TrainConfig:
    """Validate a plain tree. Raises :class:`ConfigError` that names every wrong key."""
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set ``a.b.c=value`` in a tree; the value is read as YAML, list items by index (``rewards.0.weight=2``)."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected key=value, for example optimizer.learning_rate=1e-5")
    *parents, last = key.split(".")
    node: Any = tree
    try:
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
        value = _read_value(text)
        if isinstance(node, list):
            node[int(last)] = value
        else:
            node[last] = value
    except (TypeError, ValueError, IndexError, AttributeError):
        raise ConfigError(f"override {override!r}: {key} does not lead into a section of the config") from None


def _read_value(text: str) -> Any:
    """A YAML scalar or flow value; 1e-5 is a number here although YAML 1.1 calls it text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override value {text!r} is not valid YAML: {error}") from None
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def load_config(path: str | Path, overrides: list[str] | None = None) -> TrainConfig:
    """Read a YAML file and apply dotted overrides. Raises :class:`ConfigError` with the file and key."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"config file {file} does not exist")
    try:
        tree = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: expected a mapping of keys to values")
    for override in overrides or []:
        apply_override(tree, override)
    return parse_config(tree)
