"""One group's way through an iteration as an MLflow trace: what was asked, answered, earned, and learned from it.

MLflow's own instrumentation writes to a global server from a thread of its own, and drops what does not arrive. Here a
trace is built whole from what is on record, under ids made of run, version and group: delivering it twice is no harm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlflow.entities import (
    AssessmentSource,
    Feedback,
    Span,
    SpanType,
    Trace,
    TraceData,
    TraceInfo,
    TraceLocation,
    TraceState,
)
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TokenUsageKey, TraceMetadataKey, TraceTagKey

from pa_core.records import Group, Sample
from pa_core.tracking.timeline import TRAIN
from pa_core.tracking.timeline import Span as TimeSpan

PREVIEW = 1000
SCHEMA_VERSION = {"mlflow.trace_schema.version": "3"}
Window = tuple[float, float]


def group_trace(
    group: Group, advantages: Sequence[float], spans: Sequence[TimeSpan], run_id: str, experiment_id: str
) -> Trace:
    """The trace of one trained group.

    Args:
        group: generated and scored.
        advantages: one per sample.
        spans: the iteration's part of the timeline; what it lacks of the group (generated before a resume, say) has
            no length in the trace.
        run_id: the MLflow run that shows it.
        experiment_id: the run's experiment.
    """
    trace_id = "tr-" + _digest(run_id, group.version, group.id, length=32)
    score = _window(spans, lambda span: span.name == "score" and span.attrs.get("group") == group.id)
    train = _window(spans, lambda span: span.lane == TRAIN and group.id in span.attrs.get("groups", ()))
    generated = group.generated_at
    scored = score or (generated[1], generated[1])
    trained = train or (scored[1], scored[1])
    whole = (min(generated[0], scored[0]), max(generated[1], scored[1], trained[1]))
    tree = _Tree(trace_id)
    outcome = [
        {"response": sample.text, "reward": sample.reward, "advantage": round(advantage, 6)}
        for sample, advantage in zip(group.samples, advantages, strict=True)
    ]
    question = {"prompt": group.prompt.text, "answer": group.prompt.answer}
    root = tree.add(f"group {group.id}", None, whole, SpanType.CHAIN, question, outcome)
    facts = {"replica": group.replica, "policy_version": group.version, "samples": len(group.samples)}
    generate = tree.add("generate", root, generated, SpanType.TASK, group.prompt.text, None, facts)
    for number, sample in enumerate(group.samples):
        _add_sample(tree, generate, f"sample {number}", group, sample)
    tree.add("score", root, scored, SpanType.EVALUATOR, question, [_scores(sample) for sample in group.samples])
    rewards, learned = ([row[name] for row in outcome] for name in ("reward", "advantage"))
    tree.add("train", root, trained, SpanType.TASK, {"rewards": rewards}, {"advantages": learned})
    return Trace(_info(trace_id, group, whole, run_id, experiment_id), TraceData(spans=tree.spans))


def deliver(uri: str, trace: Trace, model_id: str | None) -> None:
    """Write a trace, in the calling thread; again is the same as once. Raises what MLflow raises.

    Args:
        uri: the tracking store or server.
        model_id: the logged model that generated it, if it is one.
    """
    client = TracingClient(uri)
    if model_id is not None:
        trace.info.trace_metadata[TraceMetadataKey.MODEL_ID] = model_id
    client.start_trace(trace.info)
    # MLflow asks a server once for its version, and takes one that was away then for one that knows no spans.
    server_version = getattr(client.store, "_get_server_version", None)
    if server_version is not None:
        server_version.cache_clear()
    client.log_spans(trace.info.experiment_id, trace.data.spans)


class _Tree:
    """Spans of one trace, each with an id made of its place."""

    def __init__(self, trace_id: str) -> None:
        self.spans: list[Span] = []
        self._trace_id = trace_id

    def add(
        self,
        name: str,
        parent: str | None,
        window: Window,
        kind: str,
        inputs: Any,
        outputs: Any,
        facts: Mapping[str, Any] | None = None,
    ) -> str:
        """Add a span that took ``window`` (seconds since the epoch); its id."""
        span_id = _digest(self._trace_id, parent, name, length=16)
        attributes = {
            SpanAttributeKey.REQUEST_ID: self._trace_id,
            SpanAttributeKey.SPAN_TYPE: kind,
            SpanAttributeKey.INPUTS: inputs,
            SpanAttributeKey.OUTPUTS: outputs,
            **(facts or {}),
        }
        tree = {
            "trace_id": self._trace_id,
            "span_id": span_id,
            "parent_span_id": parent,
            "name": name,
            "start_time_unix_nano": int(window[0] * 1e9),
            "end_time_unix_nano": int(window[1] * 1e9),
            "status": {"code": "OK", "message": ""},
            "attributes": {key: json.dumps(value) for key, value in attributes.items() if value is not None},
        }
        self.spans.append(Span.from_dict(tree))
        return span_id


def _add_sample(tree: _Tree, parent: str, name: str, group: Group, sample: Sample) -> None:
    prompt_tokens, tokens = len(group.prompt.token_ids), len(sample)
    total = float(sample.logprobs.sum())
    facts = {
        "tokens": tokens,
        "finish_reason": sample.finish_reason,
        "logprob_sum": round(total, 4),
        "logprob_mean": round(total / max(1, tokens), 4),
        SpanAttributeKey.CHAT_USAGE: {
            TokenUsageKey.INPUT_TOKENS: prompt_tokens,
            TokenUsageKey.OUTPUT_TOKENS: tokens,
            TokenUsageKey.TOTAL_TOKENS: prompt_tokens + tokens,
        },
    }
    # Replicas report a group's times, not a sample's.
    tree.add(name, parent, group.generated_at, SpanType.LLM, group.prompt.text, sample.text, facts)


def _scores(sample: Sample) -> dict[str, Any]:
    found: dict[str, Any] = {"reward": sample.reward, **dict(sorted(sample.rewards.items()))}
    return found if sample.unscored is None else found | {"unscored": sample.unscored}


def _info(trace_id: str, group: Group, window: Window, run_id: str, experiment_id: str) -> TraceInfo:
    scored = group.scored
    best = max(scored, key=lambda sample: sample.reward or 0.0, default=group.samples[0])
    feedback = []
    if scored:
        mean = sum(sample.reward or 0.0 for sample in scored) / len(scored)
        feedback.append(Feedback("reward", mean, source=AssessmentSource("CODE", "mean reward"), trace_id=trace_id))
        feedback[0].assessment_id = "a-" + _digest(trace_id, "reward", length=32)
    return TraceInfo(
        trace_id=trace_id,
        trace_location=TraceLocation.from_experiment_id(experiment_id),
        request_time=int(window[0] * 1e3),
        execution_duration=int((window[1] - window[0]) * 1e3),
        state=TraceState.OK,
        request_preview=group.prompt.text[:PREVIEW],
        response_preview=best.text[:PREVIEW],
        trace_metadata={TraceMetadataKey.SOURCE_RUN: run_id, **SCHEMA_VERSION},
        tags={
            TraceTagKey.TRACE_NAME: f"version {group.version}, group {group.id}",
            "policy_version": str(group.version),
            "group": group.id,
            "replica": group.replica,
        },
        assessments=feedback,
    )


def _window(spans: Sequence[TimeSpan], fits: Callable[[TimeSpan], bool]) -> Window | None:
    """From the first start to the last end of the spans that fit."""
    found = [span for span in spans if fits(span)]
    return (min(span.start for span in found), max(span.end for span in found)) if found else None


def _digest(*parts: object, length: int) -> str:
    """Hexadecimal digits that stand for ``parts``."""
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:length]
