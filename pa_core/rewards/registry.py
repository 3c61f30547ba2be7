"""Rewards by name, by ``module:function`` and by ``path/file.py:function``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from pa_core.config import RewardConfig
from pa_core.errors import RewardSetupError

Reward = Callable[..., Any]

# Text, so that naming a reward imports nothing: math-verify and reasoning-gym load only where they are used.
BUILT_IN = {
    "exact": "pa_core.rewards.text:exact",
    "number": "pa_core.rewards.text:number",
    "concise": "pa_core.rewards.text:concise",
    "closeness": "pa_core.rewards.text:closeness",
    "integer_only": "pa_core.rewards.text:integer_only",
    "overlong": "pa_core.rewards.length:overlong",
    "equation": "pa_core.rewards.arithmetic:equation",
    "restates": "pa_core.rewards.arithmetic:restates",
    "result": "pa_core.rewards.arithmetic:result",
    "stops": "pa_core.rewards.arithmetic:stops",
    "math": "pa_core.rewards.mathematics:math",
    "reasoning_gym": "pa_core.rewards.procedural:reasoning_gym",
}


def reward_target(config: RewardConfig) -> str:
    """Where the function lives, as ``module:function`` or ``file.py:function``, checked for form only.

    Raises:
        RewardSetupError: an unknown name without a function, or a function of another form.
    """
    if config.function is None:
        if config.name not in BUILT_IN:
            near = difflib.get_close_matches(config.name, BUILT_IN, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"built in are: {', '.join(BUILT_IN)}."
            raise RewardSetupError(
                f"rewards: {config.name!r} is no built-in reward; {hint} "
                "For a reward of your own set function: module:function or path/file.py:function"
            )
        return BUILT_IN[config.name]
    module, _, name = config.function.rpartition(":")
    if not module or not name:
        raise RewardSetupError(
            f"{_field(config)}: expected module:function or path/file.py:function, for example my_rewards.py:length"
        )
    return config.function


def load_reward(config: RewardConfig) -> Reward:
    """The function with its options bound; it is called as ``f(response, answer, metadata=…)``.

    Runs the module that defines it, so it is called in reward workers.

    Raises:
        RewardSetupError: naming what is missing: the file, the module, the function, or a parameter.
    """
    module_name, _, function_name = reward_target(config).rpartition(":")
    module = _load_module(config, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(function_name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has: {', '.join(known) or 'none'}"
        raise RewardSetupError(f"{_field(config)}: {module_name} has no function {function_name!r}; {hint}")
    try:
        inspect.signature(function).bind("", "", metadata={}, **config.options)
    except TypeError as error:
        raise RewardSetupError(
            f"reward {config.name!r}: {function_name}{inspect.signature(function)} cannot be called as "
            f"f(response, answer, metadata=…, **options) with options={config.options}: {error}"
        ) from None
    return partial(function, **config.options)


def _field(config: RewardConfig) -> str:
    return f"rewards: {config.name!r} has function={config.function!r}"


def _load_module(config: RewardConfig, name: str) -> ModuleType:
    try:
        return _load_file(config, name) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        fix = "install it, or give the file as path/file.py:function" if error.name == name else "install it"
        raise RewardSetupError(f"{_field(config)}: there is no module {error.name!r}; {fix}") from error
    except RewardSetupError:
        raise
    except Exception as error:  # whatever a module of the user raises while it runs
        raise RewardSetupError(f"{_field(config)}: importing {name} failed: {type(error).__name__}: {error}") from error


def _load_file(config: RewardConfig, name: str) -> ModuleType:
    file = Path(name).expanduser().resolve()
    if not file.is_file():
        raise RewardSetupError(f"{_field(config)}: the file {file} does not exist")
    spec = importlib.util.spec_from_file_location(f"own_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise RewardSetupError(f"{_field(config)}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up here
    spec.loader.exec_module(module)
    return module
