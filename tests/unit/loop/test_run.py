"""A run's folder is new and its own, since it goes as a whole when the run is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pa_core.config import TrainConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError, UserError
from pa_core.loop.launch import train_new
from pa_core.loop.run import prepare_run


def config(folder: Path, name: str, reward: str = "exact") -> TrainConfig:
    tree = {"data": {"name": "chain_sum"}, "run_name": name, "store": {"url": str(folder)}}
    return parse_config(tree | {"rewards": [{"name": reward}]})


@pytest.mark.parametrize("name", [".", "..", ".git", "a/b", " "])
def test_a_name_that_is_no_folder_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="run_name="):
        prepare_run(config(tmp_path, name))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_other_things_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"run_name='mine': .*/mine has other things in it, such as thesis.txt"):
        train_new(config(tmp_path, "mine", reward="nope"), "x")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_refused_run_leaves_no_folder_and_its_neighbours_alone(tmp_path: Path) -> None:
    prepare_run(config(tmp_path, "first"))
    with pytest.raises(UserError, match="nope"):
        train_new(config(tmp_path, "second", reward="nope"), "x")
    assert [each.name for each in tmp_path.iterdir()] == ["first"]
    with pytest.raises(ConfigError, match="exists already"):
        prepare_run(config(tmp_path, "first"))
