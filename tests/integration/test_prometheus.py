"""A real Prometheus with infra/'s configuration watches a run on vLLM and one on the embedded engine.

Every query of every dashboard and every alert rule must find its series: a metric that was renamed shows up here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm_servers import START_LIMIT_S, vllm_tree

from pa_core.rollout.address import free_port

ROOT = Path(__file__).parent.parent.parent
DASHBOARDS = sorted((ROOT / "dashboards").glob("*.json"))
PA = [sys.executable, "-m", "pa_core.cli"]
LIMIT_S = 240
VARIABLES = {
    "${datasource}": "prometheus",
    "$run": ".*",
    "$replica": ".*",
    "$window": "5m",
    "$__rate_interval": "1m",
}


def until(condition: Callable[[], Any], what: str, limit_s: float) -> Any:
    deadline = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.3)
    return found


def get(url: str, **query: str) -> Any:
    """The JSON at ``url``, also that of a query that is refused; None while the server is not ready."""
    try:
        with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.load(error) if error.code in (400, 422) else None
    except OSError:
        return None


@contextmanager
def process(
    log: Path, ready: Callable[[], Any], *command: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], None]]]:
    """A process, and what waits until it is ready; it fails with the end of the log when the process ends before."""
    with log.open("wb") as out:
        child = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT)

    def wait() -> None:
        try:
            until(lambda: ready() or child.poll() is not None, log.stem, START_LIMIT_S)
            assert child.poll() is None, f"{log.stem} has ended"
        except AssertionError as error:
            pytest.fail(f"{error}\n{log.read_text(errors='replace')[-4000:]}")

    try:
        yield child, wait
    finally:
        if child.poll() is None:
            child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(30)


@dataclass
class Watched:
    """Two runs that go on, and the Prometheus that watches them."""

    url: str
    targets: Path
    folder: Path
    runs: dict[str, subprocess.Popen[bytes]]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query finds. Fails on an expression that Prometheus refuses."""
        answer = get(f"{self.url}/api/v1/query", query=expression)
        assert answer is not None, "Prometheus does not answer"
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def address(self, run: str, job: str = "pa_trainer") -> str:
        """Where an endpoint of a run is, as the run itself has announced."""
        (path,) = self.targets.glob(f"{run}-*.json")
        groups = json.loads(path.read_text())
        return next(str(group["targets"][0]) for group in groups if group["labels"]["job"] == job)


def config(folder: Path, model: Path, name: str, **engine: Any) -> Path:
    tree = vllm_tree(
        str(folder / "runs"),
        run_name=name,
        iterations=1_000_000,
        prompts_per_iteration=4,
        group_size=2,
        model={"path": str(model)},
        data={"name": "chain_sum", "options": {"size": 60, "max_digits": 1}, "held_out": 0.1},
        rewards=[{"name": "number"}],
        sampling={"max_tokens": 8},
        evaluation={"limit": 2},
        tracking={"uri": f"sqlite:///{folder / f'{name}.db'}", "log_model": False},
        metrics={"targets": str(folder / "targets")},
        engine=engine,
    )
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def wider_heads(model: Path, folder: Path) -> Path:
    """The tiny model with heads as wide as vLLM's attention on CPUs needs them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(model, folder)
    changes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    LlamaForCausalLM(LlamaConfig.from_pretrained(model, **changes)).save_pretrained(folder)
    return folder


def prometheus_files(folder: Path, prefect_port: int) -> Path:
    """infra/prometheus with the addresses of this test."""
    shutil.copytree(ROOT / "infra/prometheus", folder)
    for file, here, there in (
        ("prometheus.yml", "../../.services/targets/*.json", f"{folder.parent}/targets/*.json"),
        ("targets/prefect.yml", "127.0.0.1:4200", f"127.0.0.1:{prefect_port}"),
    ):
        text = (folder / file).read_text()
        assert here in text
        (folder / file).write_text(text.replace(here, there))
    return folder / "prometheus.yml"


@pytest.fixture(scope="module")
def watched(vllm_environment: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("needs Prometheus (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("watched")
    prefect_port, port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    model = wider_heads(tiny_model, folder / "model")
    vllm = config(folder, model, "on-vllm")
    plain = config(folder, model, "embedded", kind="embedded", threads=1)
    server = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(prefect_port)]
    watching = [binary, f"--config.file={prometheus_files(folder / 'prometheus', prefect_port)}"]
    watching += [f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address=127.0.0.1:{port}"]
    with ExitStack() as stack:

        def start(name: str, ready: Callable[[], Any], *command: str, **environment: str) -> Any:
            return stack.enter_context(process(folder / f"{name}.log", ready, *command, **environment))

        def iterated(run: str) -> Callable[[], bool]:
            return (folder / f"runs/{run}/ledger/v000001.json").exists

        on_vllm, trained = start(
            "on-vllm", iterated("on-vllm"), *PA, "train", str(vllm), PA_VLLM_PYTHON=vllm_environment
        )
        _, orchestrates = start(
            "prefect",
            lambda: get(f"http://127.0.0.1:{prefect_port}/api/health"),
            *server,
            PREFECT_HOME=str(folder / "prefect"),
            PREFECT_SERVER_METRICS_ENABLED="true",
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
        )
        _, watches = start("prometheus", lambda: get(f"{url}/api/v1/status/buildinfo"), *watching)
        for wait in (watches, orchestrates, trained):
            wait()
        embedded, trained = start("embedded", iterated("embedded"), *PA, "train", str(plain))
        trained()
        yield Watched(url, folder / "targets", folder, {"on-vllm": on_vllm, "embedded": embedded})


def panel_queries() -> list[tuple[str, str]]:
    """``(dashboard: panel, expression)`` with the variables filled in."""
    found = []
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                for name, value in VARIABLES.items():
                    expression = expression.replace(name, value)
                found.append((f"{path.stem}: {panel['title']}", expression))
    return found


def test_every_query_of_every_panel_finds_data(watched: Watched) -> None:
    missing = panel_queries()
    assert len(missing) > 60
    for title, expression in missing:
        assert "$" not in expression, f"{title}: an unknown variable in {expression}"

    def complete() -> bool:
        missing[:] = [(title, expression) for title, expression in missing if not watched.query(expression)]
        return not missing

    try:
        until(complete, "data for every query", LIMIT_S)
    except AssertionError:
        listed = "\n".join(f"{title}: {expression}" for title, expression in missing)
        pytest.fail(f"these queries find nothing:\n{listed}")


def test_every_rule_is_evaluated_finds_its_series_and_is_quiet_on_healthy_runs(watched: Watched) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = get(f"{watched.url}/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), "an evaluation of every rule", LIMIT_S)
    assert len(rules()) == 7
    for rule in rules():
        assert rule["health"] == "ok", rule.get("lastError")
        head, comparison, tail = re.fullmatch(r"(.*) (>|==) (.*)", rule["query"], re.S).groups()  # type: ignore[union-attr]
        compared = f"{head} {comparison} bool {tail}"
        until(lambda query=compared: watched.query(query), f"data for {rule['name']}: {compared}", LIMIT_S)
        assert rule["state"] != "firing", rule


def test_prometheus_reaches_trainers_replicas_and_prefect_by_what_runs_announce(watched: Watched) -> None:
    def up() -> set[tuple[str, str]]:
        found = watched.query("up == 1")
        return {(series["metric"]["job"], series["metric"].get("run", "")) for series in found}

    jobs = {("prefect", ""), *((job, run) for job in ("pa_trainer", "pa_replica") for run in ("on-vllm", "embedded"))}
    until(lambda: up() == jobs, f"targets {jobs}", LIMIT_S)


def test_vllms_names_have_their_colon(watched: Watched) -> None:
    assert watched.query('vllm:generation_tokens_total{run="on-vllm", replica="r0"}')
    assert not watched.query('{__name__=~"vllm_.+"}')


def test_what_prometheus_has_is_what_the_run_has_done(watched: Watched) -> None:
    def value(expression: str) -> float:
        (series,) = until(lambda: watched.query(expression), expression, LIMIT_S)
        return float(series["value"][1])

    for run in watched.runs:
        this = f'{{run="{run}"}}'
        assert value(f"pa_iterations_total{this} > 1") <= len(list((watched.folder / f"runs/{run}/ledger").iterdir()))
        # Not at once: a scrape may fall between the two.
        value(f'pa_groups_total{{run="{run}", state="trained"}} == ignoring (state) 4 * pa_iterations_total{this}')
        value(f"pa_samples_total{this} == 8 * pa_iterations_total{this}")
        assert value(f"pa_tokens_generated_total{this} - pa_tokens_trained_total{this}") > 0
        assert 0 <= value(f"pa_overlap_ratio{this}") <= 1
        assert abs(value(f"time() - pa_trainer_last_step_timestamp_seconds{this}")) < LIMIT_S


def test_health_tells_the_version_the_last_step_and_the_replicas(watched: Watched) -> None:
    health = get(f"http://{watched.address('embedded')}/health")
    assert health["run"] == "embedded"
    assert health["phase"] == "training"
    assert health["version"] > 0
    assert abs(health["last_step"] - time.time()) < LIMIT_S
    assert (health["replicas_ready"], health["replicas"]) in ((1, 1), (0, 1))  # 0 while it loads


def test_an_embedded_replica_shows_its_metrics_without_a_key_and_nothing_else(watched: Watched) -> None:
    replica = f"http://{watched.address('embedded', 'pa_replica')}"
    with urllib.request.urlopen(f"{replica}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    answered = re.search(r'^pa_engine_requests_total{outcome="answered"} (.+)$', text, re.M)
    assert answered is not None
    assert float(answered.group(1)) > 0
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{replica}/health", timeout=30)


def test_a_port_that_is_taken_is_bad_input_and_leaves_nothing_behind(watched: Watched) -> None:
    port = watched.address("embedded").rpartition(":")[2]
    changes = ["run_name=second", f"metrics.port={port}"]
    result = subprocess.run(
        [*PA, "train", str(watched.folder / "embedded.yaml"), *changes],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert f"metrics.port={port}" in result.stderr
    assert "metrics.port=0" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (watched.folder / "runs/second").exists()


def test_runs_that_stop_take_their_targets_along(watched: Watched) -> None:
    """The last test of the file: it ends the runs."""
    for run in watched.runs.values():
        run.send_signal(signal.SIGTERM)
    codes = {name: run.wait(LIMIT_S) for name, run in watched.runs.items()}
    assert codes == {"on-vllm": 3, "embedded": 3}
    assert list(watched.targets.iterdir()) == []

    def active() -> list[str]:
        targets = get(f"{watched.url}/api/v1/targets")["data"]["activeTargets"]
        return [target["labels"]["job"] for target in targets]

    until(lambda: active() == ["prefect"], "the targets to be gone", LIMIT_S)
