"""What is sent between processes that train together, and a layout that does not fit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_core.config import TrainConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError, Stopped
from pa_core.loop import ranks
from pa_core.loop.joining import joined
from pa_core.loop.run import prepare_run, resume_run
from pa_core.loop.signals import StopSignals
from pa_core.records import Group, Prompt, Sample
from pa_core.rollout.process import trainer_threads


def config(folder: Path, **changes: Any) -> TrainConfig:
    tree = {"run_name": "run", "data": {"name": "chain_sum"}, "store": {"url": str(folder)}}
    return parse_config(tree | changes)


def test_groups_arrive_as_they_were_sent() -> None:
    sample = Sample(
        token_ids=np.array([3, 1], np.int32),
        logprobs=np.array([-0.5, -1.25], np.float32),
        versions=[(4, 2)],
        loss_mask=np.array([1, 0], np.uint8),
        finish_reason="length",
        reward=None,
    )
    sent = [Group(Prompt("p1", 1, "q", np.array([7, 8, 9], np.int32), "a"), [sample], 4, "r0")]
    (group,) = ranks._decoded(ranks._encoded(sent))
    assert (group.id, group.version, group.prompt.token_ids.tolist()) == ("p1", 4, [7, 8, 9])
    (found,) = group.samples
    assert found.reward is None
    assert found.finish_reason == "length"
    assert found.token_ids.tolist() == [3, 1]
    assert found.logprobs.tolist() == [-0.5, -1.25]
    assert found.loss_mask.tolist() == [1, 0]


def test_a_launcher_with_another_number_of_processes_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare_run(config(tmp_path, parallel={"fsdp": 2, "tp": 2}))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        pytest.raises(ConfigError, match=r"fsdp=2 x parallel\.tp=2 = 4 processes, .* WORLD_SIZE=3; make them equal"),
        joined(run, StopSignals()),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"fsdp": 2}, "lora": {"rank": 2}}, r"parallel\.fsdp=2, parallel\.tp=1: lora"),
        ({"parallel": {"tp": 2}, "deterministic": True}, r"parallel\.tp=2: deterministic"),
        (
            {"parallel": {"tp": 2}, "engine": {"kind": "vllm", "weight_transfer": "nccl"}},
            r"engine\.weight_transfer=nccl .* use engine\.weight_transfer=fsspec",
        ),
        ({"parallel": {"fsdp": 0}}, r"parallel\.fsdp"),
    ],
)
def test_what_does_not_go_together_with_several_processes_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **changes)


def test_a_stopped_run_may_go_on_in_another_layout_and_with_nothing_else_changed(tmp_path: Path) -> None:
    url = prepare_run(config(tmp_path, parallel={"fsdp": 4})).url
    assert resume_run(url, ["parallel.fsdp=1", "parallel.tp=2"]).config.parallel.processes == 2
    assert resume_run(url).config.parallel.processes == 4
    with pytest.raises(
        ConfigError, match=r"optimizer\.learning_rate=1.*only keys of parallel, trainer and metrics may change"
    ):
        resume_run(url, ["optimizer.learning_rate=1"])


def test_processes_of_one_host_share_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    several = config(tmp_path, parallel={"fsdp": 4}, engine={"replicas": 4})
    assert trainer_threads(several) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the other two are on another host
    assert trainer_threads(several) == 2
    assert trainer_threads(config(tmp_path, trainer={"threads": 5})) == 5


def test_a_stop_waits_for_the_outermost_block_and_comes_once() -> None:
    with StopSignals() as signals:
        with pytest.raises(Stopped, match="stopped by SIGTERM"), signals.uninterrupted():
            with signals.uninterrupted():
                signal.raise_signal(signal.SIGTERM)
                assert signals.pending
            inner_left = True
        assert inner_left
        with signals.uninterrupted():  # a checkpoint on the way out must not be stopped again
            pass
        with pytest.raises(Stopped), signals.uninterrupted():
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("a second signal acts at once")
