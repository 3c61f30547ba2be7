"""Tracked runs in a real MLflow database, read back through MLflow's own client."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pa_core.config import TrainConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError
from pa_core.tracking.connection import absolute_uri, artifact_location
from pa_core.tracking.mlflow_run import TrackedRun
from pa_core.tracking.picture import reward_curve

mlflow = pytest.importorskip("mlflow")

FINGERPRINTS = {"data": "d" * 64, "evaluation": "e" * 64, "model": "m" * 64}


@pytest.fixture(scope="module", autouse=True)
def _quiet_mlflow() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.2")
        yield


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('tracking') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def client(uri: str) -> Any:
    return mlflow.MlflowClient(tracking_uri=uri)


def config(uri: str, experiment: str = "unit", **changes: Any) -> TrainConfig:
    tree = {
        "data": {"name": "chain_sum", "options": {"size": 20}, "held_out": 0.2},
        "rewards": [{"name": "exact"}, {"name": "format", "weight": 0.2}],
        "tracking": {"uri": uri, "experiment": experiment},
    }
    return parse_config(tree | changes)


@pytest.fixture
def start(uri: str) -> Any:
    """Starts runs, and ends those that a test left open."""
    begun: list[TrackedRun] = []

    def begin(changes: dict[str, Any] | None = None, **options: Any) -> TrackedRun:
        experiment = options.pop("experiment", "unit")
        tracked = TrackedRun.start(
            config(options.pop("uri", uri), experiment, **(changes or {})),
            run_url="/somewhere/runs/demo-1",
            fingerprints=FINGERPRINTS,
            versions={"torch": "2.13.0"},
            **options,
        )
        begun.append(tracked)
        return tracked

    yield begin
    for tracked in begun:
        tracked.finish("KILLED")


Start = Callable[..., TrackedRun]


def text(client: Any, run: TrackedRun, path: str, folder: Path) -> str:
    return Path(client.download_artifacts(run.run_id, path, str(folder))).read_text()


def test_a_finished_run_explains_itself(client: Any, start: Start, tmp_path: Path) -> None:
    tracked = start()
    assert tracked.finish("FINISHED") == 0

    run = client.get_run(tracked.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "demo-1"
    assert run.data.params["objective.advantage.preset"] == "verl"
    assert run.data.params["rewards.1.weight"] == "0.2"
    assert run.data.params["schedule.stream"] == "true"
    tags = run.data.tags
    assert (tags["schedule"], tags["engine"], tags["version.torch"]) == ("periodic", "embedded", "2.13.0")
    assert tags["fingerprint.model"] == "m" * 64
    assert tags["code_version"] and tags["package_version"]
    assert parse_config(yaml.safe_load(text(client, tracked, "config.yaml", tmp_path))) == config(tracked.uri)
    inputs = {one.tags[0].value: (one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs}
    assert inputs == {"training": ("chain_sum", "d" * 16), "evaluation": ("chain_sum", "e" * 16)}


def test_the_description_tells_how_to_read_the_run_and_what_the_words_mean(client: Any, start: Start) -> None:
    note = client.get_run(start().run_id).data.tags["mlflow.note.content"]

    for word in ("How to read this run", "**idle**", "**overlap**", "`perf/bound`", "`reward/mean`", "chain_sum"):
        assert word in note
    assert len(note) < 8000, "MLflow cuts longer tags"


def test_metrics_of_an_iteration_arrive_at_its_step_with_mended_keys(client: Any, start: Start) -> None:
    tracked = start()
    for step in range(3):
        tracked.log_iteration(step, {"reward/mean": 0.25 * step, "eval/pass@1": 1, "train/kl": float("nan")})
    assert tracked.finish("FINISHED") == 0

    history = client.get_metric_history(tracked.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert "eval/pass_1" in client.get_run(tracked.run_id).data.metrics


def test_a_table_is_one_file_per_step_that_mlflow_loads_and_lists(
    client: Any, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked = start()
    tracked.log_table([{"prompt": "1+1", "reward": 1.0}, {"prompt": "2+2", "note": "x"}], "rollouts", 0)
    tracked.log_table([{"prompt": "3+3", "reward": float("nan")}], "rollouts", 10)
    assert tracked.finish("FINISHED") == 0

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracked.uri)
    table = client.load_table(tracked.experiment_id, "tables/rollouts/step_000000.json", [tracked.run_id])
    assert list(table["prompt"]) == ["1+1", "2+2"]
    assert json.loads(text(client, tracked, "tables/rollouts/step_000010.json", tmp_path)) == {
        "columns": ["prompt", "reward"],
        "data": [["3+3", None]],
    }
    listed = json.loads(client.get_run(tracked.run_id).data.tags["mlflow.loggedArtifacts"])
    assert [entry["path"][-11:] for entry in listed] == ["000000.json", "000010.json"]


def test_hundreds_of_tables_keep_the_list_within_a_tag(client: Any, start: Start) -> None:
    tracked = start()
    name = "rollouts-with-a-name-of-some-length-indeed"
    for step in range(90):
        tracked.log_table([{"a": 1}], name, step)
    assert tracked.finish("FINISHED") == 0

    listed = json.loads(client.get_run(tracked.run_id).data.tags["mlflow.loggedArtifacts"])
    assert listed[-1]["path"] == f"tables/{name}/step_000089.json"


def test_figures_texts_and_the_model_become_artifacts(client: Any, start: Start, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    tracked = start()
    tracked.log_figure(reward_curve([(0, 0.1)]), "reward_curve.png")
    tracked.log_dict({"a": [1]}, "timeline/trace.json")
    tracked.log_text("hello", "notes.txt")
    tracked.add_model(3, {})
    assert tracked.log_model_dir(tmp_path / "model", version=3)
    assert tracked.finish("FINISHED") == 0

    folder = tmp_path / "down"
    folder.mkdir()
    assert text(client, tracked, "notes.txt", folder) == "hello"
    assert json.loads(text(client, tracked, "timeline/trace.json", folder)) == {"a": [1]}
    assert text(client, tracked, "model/config.json", folder) == "{}"
    assert Path(client.download_artifacts(tracked.run_id, "reward_curve.png", str(folder))).stat().st_size > 1000


def models(client: Any, tracked: TrackedRun) -> dict[str, Any]:
    """The run's logged models by policy version."""
    found = client.search_logged_models([tracked.experiment_id], f"source_run_id = '{tracked.run_id}'")
    assert len(found) == len({model.params["policy_version"] for model in found})
    return {model.params["policy_version"]: model for model in found}


def figures(model: Any) -> dict[str, tuple[float, int]]:
    return {metric.key: (metric.value, metric.step) for metric in model.metrics or []}


def test_stored_versions_are_models_with_the_figures_of_their_own_step(client: Any, start: Start) -> None:
    tracked = start()
    tracked.log_iteration(2, {"eval/accuracy": 0.5})
    tracked.add_model(2, {"weights": "/somewhere/runs/demo-1/weights/v000002"})
    tracked.log_iteration(2, {"reward/mean": 0.25, "train/loss": 1.0})
    tracked.log_iteration(3, {"reward/mean": 0.75})
    tracked.log_iteration(4, {"eval/accuracy": 0.9})
    tracked.add_model(4, {})
    tracked.keep_models([4])
    assert tracked.unlisted([2, 3, 4]) == [3]
    assert tracked.finish("FINISHED") == 0

    found = models(client, tracked)
    assert figures(found["2"]) == {"eval/accuracy": (0.5, 2), "reward/mean": (0.25, 2)}
    assert figures(found["4"]) == {"eval/accuracy": (0.9, 4)}
    assert found["2"].params["weights"] == "/somewhere/runs/demo-1/weights/v000002"
    assert (found["2"].tags["stored"], found["4"].tags["stored"]) == ("false", "true")
    assert {model.status for model in found.values()} == {"READY"}
    outputs = {output.model_id: output.step for output in client.get_run(tracked.run_id).outputs.model_outputs}
    assert outputs == {found["2"].model_id: 2, found["4"].model_id: 4}
    for key, points in {"eval/accuracy": 2, "reward/mean": 2}.items():
        assert len(client.get_metric_history(tracked.run_id, key)) == points, "the run has each point once"


def test_a_resumed_run_lists_its_models_no_second_time(client: Any, start: Start) -> None:
    first = start()
    first.add_model(2, {"base_model": "x"})
    first.finish("FINISHED")
    second = start(resume_run_id=first.run_id)
    second.add_model(2, {"base_model": "x"})
    second.log_iteration(2, {"reward/mean": 0.5})
    assert second.finish("FINISHED") == 0

    found = models(client, second)
    assert figures(found["2"]) == {"reward/mean": (0.5, 2)}
    assert len(client.get_run(first.run_id).outputs.model_outputs) == 1


def test_a_listed_model_can_be_registered_though_its_weights_are_elsewhere(
    client: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked = start()
    tracked.add_model(2, {})
    assert tracked.finish("FINISHED") == 0
    model = models(client, tracked)["2"]

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracked.uri)
    registered = mlflow.register_model(model.model_uri, "best-of-unit")
    client.set_registered_model_alias("best-of-unit", "best", registered.version)
    assert client.get_model_version_by_alias("best-of-unit", "best").source == model.model_uri


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_the_first_final_status_stays(client: Any, start: Start, status: Any) -> None:
    tracked = start()
    tracked.finish(status)
    tracked.finish("FINISHED")

    assert client.get_run(tracked.run_id).info.status == status


def test_writing_from_another_thread_makes_no_stray_run(client: Any, start: Start) -> None:
    tracked = start(experiment="threads")

    def work() -> None:
        tracked.log_iteration(0, {"reward/mean": 1.0})
        tracked.log_table([{"a": 1}], "rollouts", 0)
        tracked.log_text("x", "x.txt")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    finisher = threading.Thread(target=tracked.finish, args=("FINISHED",))
    finisher.start()
    finisher.join()

    runs = client.search_runs([tracked.experiment_id])
    assert [run.info.run_id for run in runs] == [tracked.run_id]
    assert runs[0].data.metrics["reward/mean"] == 1.0
    assert mlflow.active_run() is None


def test_a_resumed_run_goes_on_and_notes_what_changed(client: Any, start: Start) -> None:
    first = start()
    first.log_iteration(0, {"reward/mean": 0.1})
    first.log_table([{"a": 1}], "rollouts", 0)
    first.finish("KILLED")

    second = start({"iterations": 7}, resume_run_id=first.run_id)
    second.log_iteration(1, {"reward/mean": 0.2})
    second.log_table([{"a": 1}], "rollouts", 1)
    assert client.get_run(first.run_id).info.status == "RUNNING"
    assert second.finish("FINISHED") == 0

    run = client.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(first.run_id, "reward/mean")] == [0, 1]
    assert run.data.params["iterations"] == "100", "params cannot change"
    assert run.data.tags["resumed.iterations"] == "7"
    assert "resumed_at" in run.data.tags
    assert len(json.loads(run.data.tags["mlflow.loggedArtifacts"])) == 2


def test_system_metrics_belong_to_the_run_and_stop_with_it(client: Any, start: Start) -> None:
    tracked = start()
    deadline = time.monotonic() + 20
    names: set[str] = set()
    while not names and time.monotonic() < deadline:
        time.sleep(0.2)
        names = {name for name in client.get_run(tracked.run_id).data.metrics if name.startswith("system/")}
    tracked.finish("FINISHED")

    assert "system/cpu_utilization_percentage" in client.get_run(tracked.run_id).data.metrics
    assert not [thread for thread in threading.enumerate() if thread.name == "SystemMetricsMonitor"]


def test_a_relative_database_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    uri = absolute_uri("sqlite:///mlflow.db")
    assert uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert artifact_location(uri, "grpo/one two") == f"file://{tmp_path}/mlartifacts/grpo_one_two"
    assert absolute_uri("http://host:5000") == "http://host:5000"
    assert artifact_location("http://host:5000", "x") is None


def test_artifacts_lie_beside_the_database(client: Any, start: Start) -> None:
    tracked = start()
    beside = Path(tracked.uri.removeprefix("sqlite:///")).parent / "mlartifacts"

    assert client.get_run(tracked.run_id).info.artifact_uri.startswith(beside.as_uri())
    assert tracked.open_command == f"mlflow ui --backend-store-uri {tracked.uri}"
    assert tracked.url is None


def test_a_store_that_cannot_be_used_is_a_user_error_that_names_the_setting(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.uri='http://127.0.0.1:9'.*Start the MLflow server"):
        start(uri="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="nosuchrun"):
        start(resume_run_id="nosuchrun")


def test_a_deleted_experiment_is_a_user_error_with_the_command_that_restores_it(client: Any, start: Start) -> None:
    client.delete_experiment(client.create_experiment("gone"))

    with pytest.raises(ConfigError, match="mlflow experiments restore"):
        start(experiment="gone")


def test_a_table_that_cannot_be_written_is_counted_and_the_rest_arrives(
    client: Any, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    tracked = start()
    tracked.log_text("x", "../outside.txt")
    tracked.log_iteration(0, {"reward/mean": 1.0})
    with caplog.at_level(logging.WARNING):
        assert tracked.finish("FINISHED", timeout_s=15) == 1

    assert "1 deliveries never reached MLflow" in caplog.text
    assert "outside.txt" in caplog.text
    assert client.get_run(tracked.run_id).data.metrics["reward/mean"] == 1.0
