"""Rewards of one's own: by module or file, and a message that names what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pa_core.config import RewardConfig
from pa_core.errors import RewardError
from pa_core.rewards.registry import load_reward, reward_target

HOSTILE = str(Path(__file__).with_name("hostile.py"))


def load(function: str, **options: Any) -> Any:
    return load_reward(RewardConfig(name="own", function=function, options=options))


def test_a_function_is_found_by_file_and_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(f"{HOSTILE}:always_one")("r", "a", metadata={}) == 1
    (tmp_path / "own_rewards_for_test.py").write_text("def length(response, answer, *, metadata): return len(response)")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("own_rewards_for_test:length")("four", "", metadata={}) == 4


def test_a_relative_file_is_found_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def zero(response, answer, *, metadata): return 0")
    monkeypatch.chdir(tmp_path)
    assert load("mine.py:zero")("", "", metadata={}) == 0


def test_options_are_bound() -> None:
    assert load(f"{HOSTILE}:needs_scale", scale=3.0)("", "", metadata={}) == 3.0


@pytest.mark.parametrize(
    ("function", "options", "fault"),
    [
        ("gone.py:f", {}, r"file .*gone.py does not exist"),
        ("no_such_module:f", {}, r"no module 'no_such_module'; install it, or give the file"),
        (f"{HOSTILE}:always_on", {}, r"no function 'always_on'; did you mean 'always_one'"),
        (f"{HOSTILE}:no_metadata", {}, r"no_metadata\(response: str, answer: str\).*metadata"),
        (f"{HOSTILE}:needs_scale", {}, r"missing a required .*'scale'"),
        (f"{HOSTILE}:always_one", {"skale": 1}, r"unexpected keyword argument 'skale'"),
        ("just_a_name", {}, r"expected module:function or path/file.py:function"),
    ],
)
def test_what_is_missing_is_named(function: str, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(RewardError, match=fault) as caught:
        load(function, **options)
    assert "'own'" in str(caught.value)


def test_a_file_that_fails_while_it_is_imported_shows_its_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(RewardError, match="RuntimeError: no licence"):
        load(f"{tmp_path / 'broken.py'}:f")


def test_an_unknown_name_suggests_the_nearest_built_in_reward() -> None:
    with pytest.raises(RewardError, match="'exakt' is no built-in reward; did you mean 'exact'"):
        reward_target(RewardConfig(name="exakt"))
    with pytest.raises(RewardError, match="built in are: exact, number"):
        reward_target(RewardConfig(name="zzz"))
