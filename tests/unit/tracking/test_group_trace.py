"""A group's trace, written to a real MLflow database and read back as its pages read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pa_core.records import Group, Prompt, Sample
from pa_core.tracking.timeline import Span

mlflow = pytest.importorskip("mlflow")
group_trace = pytest.importorskip("pa_core.tracking.group_trace")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        yield mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path_factory.mktemp('traces') / 'mlflow.db'}")


@pytest.fixture(scope="module")
def run(client: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("artifacts")
    return client.create_run(client.create_experiment("traces", folder.as_uri())).info


def sample(text: str, reward: float | None, **more: Any) -> Sample:
    tokens = np.arange(len(text), dtype=np.int32)
    scores = {} if reward is None else {"exact": reward}
    return Sample(
        tokens, np.full(len(text), -0.5, np.float32), [(3, len(text))], np.ones(len(text), np.uint8), "stop", text,
        reward, scores, **more,
    )  # fmt: skip


def group(id_: str) -> Group:
    prompt = Prompt(id_, 7, "1 + 1 = ?", np.arange(5, dtype=np.int32), "2")
    samples = [sample("2", 1.0), sample("three", 0.0), sample("", None, unscored="timeout: exact")]
    return Group(prompt, samples, 3, "r1", (100.0, 102.0))


SPANS = [
    Span("score", "score", 102.0, 102.5, 3, {"group": "p7"}),
    Span("score", "score", 101.0, 101.5, 3, {"group": "p8"}),
    Span("forward_backward", "train", 103.0, 104.0, 3, {"groups": ["p8", "p7"]}),
    Span("forward_backward", "train", 105.0, 106.0, 3, {"groups": ["p9"]}),
]
ADVANTAGES = [1.0, -1.0, 0.0]


def written(client: Any, run: Any, id_: str, spans: list[Span], times: int = 1) -> Any:
    """The one trace of the run's group ``id_``, after writing it ``times`` times."""
    for _ in range(times):
        trace = group_trace.group_trace(group(id_), ADVANTAGES, spans, run.run_id, run.experiment_id)
        group_trace.deliver(client.tracking_uri, trace, "m-1")
    found = client.search_traces(
        locations=[run.experiment_id], run_id=run.run_id, filter_string=f"tags.group = '{id_}'"
    )
    (trace,) = found
    return trace


def test_a_trace_shows_what_was_asked_answered_earned_and_learned(client: Any, run: Any) -> None:
    trace = written(client, run, "p7", SPANS)

    spans = {span.name: span for span in trace.data.spans}
    assert list(spans) == ["group p7", "generate", "sample 0", "sample 1", "sample 2", "score", "train"]
    root = spans["group p7"]
    assert root.inputs == {"prompt": "1 + 1 = ?", "answer": "2"}
    assert [row["response"] for row in root.outputs] == ["2", "three", ""]
    assert [row["advantage"] for row in root.outputs] == ADVANTAGES
    second = spans["sample 1"]
    assert (second.span_type, second.outputs, second.parent_id) == ("LLM", "three", spans["generate"].span_id)
    facts = [second.attributes[name] for name in ("tokens", "finish_reason", "logprob_sum", "logprob_mean")]
    assert facts == [5, "stop", -2.5, -0.5]
    assert spans["score"].outputs == [
        {"reward": 1.0, "exact": 1.0},
        {"reward": 0.0, "exact": 0.0},
        {"reward": None, "unscored": "timeout: exact"},
    ]
    assert spans["train"].outputs == {"advantages": ADVANTAGES}


def test_a_trace_has_the_times_of_the_timeline_and_says_where_it_belongs(client: Any, run: Any) -> None:
    trace = written(client, run, "p7", SPANS)

    windows = {span.name: (span.start_time_ns / 1e9, span.end_time_ns / 1e9) for span in trace.data.spans}
    assert windows["generate"] == windows["sample 0"] == (100.0, 102.0)
    assert windows["score"] == (102.0, 102.5)
    assert windows["train"] == (103.0, 104.0)
    assert (trace.info.request_time, trace.info.execution_duration) == (100_000, 4000)
    assert (trace.info.request_preview, trace.info.response_preview) == ("1 + 1 = ?", "2")
    assert trace.info.tags["policy_version"] == "3"
    assert trace.info.trace_metadata["mlflow.modelId"] == "m-1"
    assert [(one.name, one.value) for one in trace.info.assessments] == [("reward", 0.5)]
    assert trace.info.token_usage == {"input_tokens": 15, "output_tokens": 6, "total_tokens": 21}


def test_writing_a_trace_again_changes_nothing(client: Any, run: Any) -> None:
    trace = written(client, run, "p20", SPANS, times=2)

    assert len(trace.data.spans) == 7
    assert len(trace.info.assessments) == 1


def test_a_group_whose_scoring_is_not_on_record_is_traced_all_the_same(client: Any, run: Any) -> None:
    trace = written(client, run, "p30", [])

    windows = {span.name: span.end_time_ns - span.start_time_ns for span in trace.data.spans}
    assert (windows["score"], windows["train"], windows["generate"]) == (0, 0, 2 * 10**9)
