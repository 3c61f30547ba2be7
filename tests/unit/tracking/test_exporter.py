"""The metrics of a run and their endpoint, without a run: what is counted, what happens when something fails."""

from __future__ import annotations

import json
import logging
import os
import platform
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pa_core.config import MetricsConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError
from pa_core.records import Group, Prompt, Sample
from pa_core.tracking.exporter import Live, ReplicaNow, RunMetrics
from pa_core.tracking.exporter_server import Endpoint
from pa_core.tracking.summary import IterationRecord
from pa_core.tracking.timeline import IterationTimes, Shares, Span

CONFIG = parse_config({"data": {"name": "chain_sum"}, "rewards": [{"name": "exact"}], "iterations": 7})


def live(**replicas: ReplicaNow) -> Live:
    return Live(
        open_groups={"queued": 3, "generating": 2, "scoring": 1, "buffered": 4},
        groups={"scored": 9, "duplicated": 1, "stale": 0},
        tokens_generated=500,
        restarts=1,
        retries=2,
        hedges=4,
        hedges_won=3,
        replicas=replicas,
    )


def run_metrics(**replicas: ReplicaNow) -> RunMetrics:
    return RunMetrics("run", CONFIG, lambda: live(**replicas))


def value(metrics: RunMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def sample(version: int, unscored: str | None = None) -> Sample:
    tokens = np.zeros(4, np.int32)
    return Sample(
        tokens, np.zeros(4, np.float32), [(version, 4)], np.ones(4, np.uint8), "stop", reward=None, unscored=unscored
    )


def group(index: int, *samples: Sample) -> Group:
    prompt = Prompt(f"p{index}", index, "", np.zeros(2, np.int32), "")
    return Group(prompt, list(samples), version=3, replica="r0")


def record(**changes: Any) -> IterationRecord:
    shares = Shares(work=2.0, sync=1.0, other=0.0, idle=1.0)
    late = Shares(work=3.0, sync=0.0, other=0.5, idle=-1e-12)
    times = IterationTimes(wall=4.0, t_generate=2.0, t_train=3.0, t_sync=1.0, both=1.0, generate=shares, train=late)
    return IterationRecord(**({"iteration": 3, "reward": 0.25, "times": times, "tokens": 8, "groups": 1} | changes))


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as answer:
        return str(answer.read().decode())


def test_an_iteration_shows_its_reward_times_and_what_became_of_its_samples() -> None:
    metrics = run_metrics()
    assert value(metrics, "pa_reward_mean") is None
    assert value(metrics, "pa_samples_unscored_total", reward="exact", cause="timeout") == 0
    metrics.iteration(
        record(groups_lost=2), [group(0, sample(3), sample(1)), group(1, sample(3, "timeout:exact"), sample(3))]
    )
    assert value(metrics, "pa_reward_mean") == 0.25
    assert value(metrics, "pa_overlap_ratio") == 0.5
    assert value(metrics, "pa_iterations_total") == 1
    assert value(metrics, "pa_iterations_target") == 7
    assert value(metrics, "pa_wall_seconds_total") == 4
    assert value(metrics, "pa_idle_seconds_total", side="replicas") == 1
    assert value(metrics, "pa_idle_seconds_total", side="trainer") == 0
    assert value(metrics, "pa_tokens_trained_total") == 8
    assert value(metrics, "pa_samples_total") == 4
    assert value(metrics, "pa_samples_unscored_total", reward="exact", cause="timeout") == 1
    states = {state: value(metrics, "pa_groups_total", state=state) for state in ("trained", "uninformative", "lost")}
    assert states == {"trained": 1, "uninformative": 1, "lost": 2}
    assert value(metrics, "pa_staleness_versions_bucket", le="0.0") == 3
    assert value(metrics, "pa_staleness_versions_bucket", le="2.0") == 4


def test_spans_move_the_version_the_last_step_and_what_replicas_have_loaded() -> None:
    metrics = run_metrics(r0=ReplicaNow(ready=True, in_flight=5), r1=ReplicaNow(ready=False))
    assert value(metrics, "pa_trainer_last_step_timestamp_seconds") == pytest.approx(time.time(), abs=60)
    metrics.span(Span("step", "train", 100.0, 101.5, 3))
    metrics.span(Span("publish", "train", 101.5, 102.0, 3, {"version": 4}))
    metrics.span(Span("load", "r0", 102.0, 102.25, 4))
    metrics.span(Span("generate", "r0", 102.5, 105.5, 4))
    assert value(metrics, "pa_trainer_last_step_timestamp_seconds") == 101.5
    assert value(metrics, "pa_policy_version") == 4
    assert value(metrics, "pa_trainer_seconds_total", activity="step") == 1.5
    assert value(metrics, "pa_weight_publish_seconds_sum") == 0.5
    assert value(metrics, "pa_weight_load_seconds_sum", replica="r0") == 0.25
    assert value(metrics, "pa_group_generate_seconds_sum", replica="r0") == 3
    assert value(metrics, "pa_replica_loaded_version", replica="r0") == 4
    assert value(metrics, "pa_replica_loaded_version", replica="r1") is None
    assert value(metrics, "pa_replica_ready", replica="r1") == 0
    assert value(metrics, "pa_replica_in_flight", replica="r0") == 5
    assert metrics.health() == {
        "run": "run",
        "phase": "starting",
        "version": 4,
        "last_step": 101.5,
        "replicas_ready": 1,
        "replicas": 2,
    }


def test_a_scrape_shows_the_pipeline_of_that_moment() -> None:
    metrics = run_metrics()
    metrics.phase("training")
    metrics.accuracy(0.75)
    assert value(metrics, "pa_run_phase", phase="training") == 1
    assert value(metrics, "pa_heldout_accuracy") == 0.75
    assert value(metrics, "pa_groups_open", state="buffered") == 4
    assert value(metrics, "pa_groups_total", state="duplicated") == 1
    assert value(metrics, "pa_tokens_generated_total") == 500
    assert value(metrics, "pa_group_hedges_won_total") == 3


def test_every_name_has_the_prefix_no_colon_and_a_description() -> None:
    metrics = run_metrics(r0=ReplicaNow(ready=True))
    metrics.iteration(record(), [group(0, sample(3))])
    families = list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
    names = [family.name for family in families]
    assert len(set(names)) == len(names) > 25
    for family in families:
        assert family.name.startswith("pa_")
        assert ":" not in family.name
        assert family.documentation


def test_what_fails_costs_figures_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Live:
        raise RuntimeError("dictionary changed size during iteration")

    metrics = RunMetrics("run", CONFIG, broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            metrics.span(Span("publish", "train", 0.0, 1.0, 0))  # without its version
            assert b"pa_iterations_target 7.0" in generate_latest(metrics.registry)
    warnings = [entry.getMessage() for entry in caplog.records]
    assert len(warnings) == 2
    assert all("training goes on" in warning for warning in warnings)


def test_metrics_and_health_are_served_and_nothing_else(tmp_path: Path) -> None:
    metrics = run_metrics(r0=ReplicaNow(ready=True))
    with Endpoint(MetricsConfig(targets=str(tmp_path))).serving(metrics) as address:
        assert address is not None
        assert "pa_iterations_target 7.0" in get(address, "/metrics")
        assert json.loads(get(address, "/health"))["replicas_ready"] == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address, "/")
    with pytest.raises(urllib.error.URLError):
        get(address, "/metrics")


def test_a_port_that_is_taken_is_named_with_key_value_and_fix_and_free_ones_never_collide() -> None:
    first, second = Endpoint(MetricsConfig(targets=None)), Endpoint(MetricsConfig(targets=None))
    with first.serving(run_metrics()) as one, second.serving(run_metrics()) as other:
        assert one is not None
        assert one != other
        port = int(one.rpartition(":")[2])
        with pytest.raises(ConfigError, match=rf"metrics\.port={port} .*metrics\.port=0") as caught:
            Endpoint(MetricsConfig(port=port))
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match=r"metrics\.host=no\.such\.host\.invalid"):
        Endpoint(MetricsConfig(host="no.such.host.invalid"))


def test_without_a_port_there_is_no_endpoint(tmp_path: Path) -> None:
    with Endpoint(MetricsConfig(port=None, targets=str(tmp_path))).serving(run_metrics()) as address:
        assert address is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_announces_itself_and_its_replicas_while_it_lasts(tmp_path: Path) -> None:
    replicas = {"r0": ReplicaNow(ready=True, url="http://127.0.0.1:8001", engine="vllm")}
    metrics = RunMetrics("run", CONFIG, lambda: live(**replicas))
    folder = tmp_path / "targets"

    def announced() -> list[dict[str, Any]]:
        return [entry for path in folder.glob("*.json") for entry in json.loads(path.read_text())]

    with Endpoint(MetricsConfig(targets=str(folder))).serving(metrics) as address:
        trainer, replica = until(announced, "a file of targets")
        assert trainer["targets"] == [address]
        assert (trainer["labels"]["job"], trainer["labels"]["run"]) == ("pa_trainer", "run")
        assert replica["targets"] == ["127.0.0.1:8001"]
        labels = {"job": "pa_replica", "run": "run", "replica": "r0", "kind": "vllm", "__scheme__": "http"}
        assert replica["labels"] == labels
        replicas["r0"] = ReplicaNow(ready=False)
        until(lambda: len(announced()) == 1, "the replica that is gone leaves the file")
    assert list(folder.iterdir()) == []


def test_files_of_dead_trainers_are_removed_by_the_next_run_and_those_of_others_stay(tmp_path: Path) -> None:
    def write(name: str, owner: str) -> None:
        content = [{"targets": ["127.0.0.1:1"], "labels": {"job": "pa_trainer", "__pa_owner": owner}}]
        (tmp_path / name).write_text(json.dumps(content))

    me = psutil.Process()
    write("dead-1.json", f"{platform.node()} {os.getpid()} {me.create_time() - 1000}")
    write("alive-1.json", f"{platform.node()} {os.getpid()} {me.create_time()}")
    write("elsewhere-1.json", "another-host 1 0.0")
    (tmp_path / "own.json").write_text("[]")
    with Endpoint(MetricsConfig(targets=str(tmp_path))).serving(run_metrics()):
        until(lambda: len(list(tmp_path.glob("run-*.json"))) == 1, "a file of targets")
        assert not (tmp_path / "dead-1.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alive-1.json", "elsewhere-1.json", "own.json"]


def test_a_folder_that_cannot_be_written_costs_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with Endpoint(MetricsConfig(targets=str(tmp_path / "file"))).serving(run_metrics()) as address:
        assert address is not None
        assert "pa_iterations_target" in get(address, "/metrics")
