"""How a vLLM server is started."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pa_core.config import TrainConfig
from pa_core.config_files import parse_config
from pa_core.errors import ConfigError
from pa_core.rollout.process import ReplicaSet
from pa_core.rollout.vllm_command import Place, command, environment, vllm_python

CPU = Place("/models/policy", 8192, on_cpu=True)


def config(**engine: Any) -> TrainConfig:
    return parse_config({"data": {"name": "chain_sum"}, "engine": {"kind": "vllm", **engine}})


def value(line: list[str], option: str) -> str:
    return line[line.index(option) + 1]


def test_the_server_listens_on_loopback_serves_no_weights_of_its_own_and_has_the_guard_and_plugin() -> None:
    line = command(config(), Path("/venv/bin/python"), CPU, 4711)
    assert (value(line, "--host"), value(line, "--port")) == ("127.0.0.1", "4711")
    assert value(line, "--load-format") == "dummy"
    assert value(line, "--middleware") == "pa_core.rollout.vllm_guard.RunGuard"
    assert json.loads(value(line, "--weight-transfer-config")) == {"backend": "fsspec"}
    assert value(line, "--logprobs-mode") == "processed_logprobs"
    assert value(line, "--max-model-len") == "8192"
    assert "--trust-remote-code" not in line


def test_no_key_reaches_the_command_line_or_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PA_API_KEY", "sesame")
    words = [*command(config(), Path("/p"), CPU, 1), *environment(config(), 0, 1, [0]).values()]
    assert "sesame" not in " ".join(words)


def test_a_cpu_server_never_splits_a_prefill_and_a_gpu_server_may() -> None:
    settings = {"vllm": {"max_model_len": 512}}
    on_cpu = command(config(**settings), Path("/p"), CPU, 1)
    assert "--no-enable-chunked-prefill" in on_cpu
    assert value(on_cpu, "--max-num-batched-tokens") == "512"
    assert "--no-enable-chunked-prefill" not in command(config(**settings), Path("/p"), Place("m", 8192, False), 1)


def test_the_users_arguments_come_last_so_that_they_win() -> None:
    line = command(config(vllm={"extra_args": ["--max-num-seqs", "3"]}), Path("/p"), CPU, 1)
    assert line[-2:] == ["--max-num-seqs", "3"]


def test_dtype_follows_the_model_unless_set() -> None:
    assert value(command(config(), Path("/p"), CPU, 1), "--dtype") == "float32"
    assert value(command(config(vllm={"dtype": "bfloat16"}), Path("/p"), CPU, 1), "--dtype") == "bfloat16"


@pytest.mark.parametrize(
    ("replica", "workers", "threads", "cores", "binding"),
    [
        (0, 1, 1, [0, 1], "1"),
        (1, 1, 1, [0, 1], "0"),
        (2, 1, 1, [0, 1], "1"),
        (0, 1, 2, [4, 5, 6, 7], "6,7"),
        (1, 1, 2, [4, 5, 6, 7], "4,5"),
        (0, 2, 2, [0, 1, 2, 3], "2,3|0,1"),
        (0, 1, 4, [0, 1], "0,1"),
    ],
)
def test_every_worker_has_cores_of_its_own_while_there_are_enough(
    replica: int, workers: int, threads: int, cores: list[int], binding: str
) -> None:
    variables = environment(config(replicas=4, vllm={"tensor_parallel": workers}), replica, threads, cores)
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == binding


def test_devices_are_given_out_by_replica() -> None:
    settings = config(replicas=2, vllm={"devices": ["0,1", "2,3"]})
    assert environment(settings, 1, 1, [0])["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "CUDA_VISIBLE_DEVICES" not in environment(config(), 0, 1, [0])


def test_a_missing_environment_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PA_VLLM_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\.venv-vllm/bin/python.*make vllm.*engine\.vllm\.python"):
        vllm_python(config().engine.vllm)
    monkeypatch.setenv("PA_VLLM_PYTHON", sys.executable)
    assert vllm_python(config().engine.vllm) == Path(sys.executable)
    with pytest.raises(ConfigError, match="/nowhere"):
        vllm_python(config(vllm={"python": "/nowhere"}).engine.vllm)


def test_an_interpreter_that_cannot_serve_is_bad_input_before_anything_starts(tmp_path: Path) -> None:
    log = tmp_path / "logs"
    for python, reason in (("/bin/true", "no Python interpreter"), (sys.executable, "vLLM is not installed there")):
        settings = config(vllm={"python": python}).engine
        if python == sys.executable and importlib.util.find_spec("vllm") is not None:
            continue
        with pytest.raises(ConfigError, match=f"engine.vllm.python: .*{reason}.*make vllm"):
            ReplicaSet(f"file://{tmp_path}", settings, log).start()
    assert not log.exists()


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"kind": "embedded", "urls": ["http://a:1"]}, "engine.kind=vllm"),
        ({"urls": ["a:1"]}, "http://host:port"),
        ({"urls": ["http://me:secret@a:1"]}, "without credentials"),
        ({"kind": "embedded", "weight_transfer": "nccl"}, "needs engine.kind=vllm"),
        ({"replicas": 2, "vllm": {"devices": ["0"]}}, "names 1 entries"),
    ],
)
def test_engine_settings_that_contradict_each_other_are_refused(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**engine)
