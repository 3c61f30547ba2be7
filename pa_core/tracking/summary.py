"""What a run did, in numbers: ``summary.json``."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from pa_core.tracking.timeline import IterationTimes


class IterationRecord(BaseModel):
    """The figures of one finished iteration that a summary needs; JSON, so that a checkpoint can carry them."""

    model_config = ConfigDict(frozen=True)

    iteration: int = Field(ge=0, description="Number of the iteration, from 0; it generated with this version.")
    reward: float | None = Field(description="Mean total reward of its scored samples; None when none was scored.")
    times: IterationTimes = Field(description="Where its time went.")
    tokens: int = Field(ge=0, description="Response tokens it trained on.")
    groups: int = Field(ge=0, description="Groups that contributed to the update.")
    groups_duplicated: int = Field(0, ge=0, description="Groups that arrived twice; the second was ignored.")
    groups_lost: int = Field(0, ge=0, description="Groups that were asked for and never contributed.")
    max_staleness: int = Field(0, ge=0, description="Largest (trainer version - sampling version) of its tokens.")


class RunSummary(BaseModel):
    """What the run did. Times are seconds, summed over the iterations; those of a resumed run count all of it."""

    model_config = ConfigDict(frozen=True)

    run_id: str = Field(description="Name of the run.")
    run_url: str | None = Field(None, description="Where rollouts, weights and checkpoints are.")
    mlflow_run_id: str | None = Field(description="The MLflow run.")
    schedule: str = Field(description="periodic or sync.")
    engine: str = Field(description="Kind of the replicas.")
    iterations: int = Field(description="Iterations finished, the final policy version.")
    reward_first: float | None = Field(description="Mean reward of the first iteration that has one.")
    reward_last: float | None = Field(description="Mean reward of the last iteration that has one.")
    eval_before: float | None = Field(description="Held-out accuracy of version 0; None when not evaluated.")
    eval_after: float | None = Field(description="Held-out accuracy of the final version; None when not evaluated.")
    tokens: int = Field(description="Response tokens trained on.")
    tokens_per_s: float = Field(description="tokens / wall.")
    t_generate: float = Field(description="Time in which a replica generated, mean over replicas.")
    t_train: float = Field(description="Time in which the trainer computed gradients or stepped.")
    t_sync: float = Field(description="Time to publish versions and load them on the first replica.")
    wall: float = Field(description="Wall time of the iterations, without start-up and evaluation.")
    idle_generate: float = Field(description="Time a replica neither generated nor loaded, mean over replicas.")
    idle_train: float = Field(description="Time the trainer neither worked, published, saved nor logged.")
    overlap: float = Field(description="Share of the shorter side's work done while the other worked, 0 to 1.")
    bound: float = Field(
        description="(t_generate + t_train + t_sync) / (max(t_generate, t_train) + t_sync): the largest speed-up over "
        "the synchronous schedule that these times allow."
    )
    groups: int = Field(description="Groups that contributed to an update.")
    groups_duplicated: int = Field(description="Groups that arrived twice and were ignored the second time.")
    groups_lost: int = Field(description="Groups that were asked for and never contributed.")
    max_staleness_seen: int = Field(description="Largest (trainer version - sampling version) of a trained token.")
    weights_sha256: str | None = Field(description="Digest of the final weights as published.")


def total_times(times: Sequence[IterationTimes]) -> IterationTimes:
    """Times summed over iterations; overlap and bound are those of the sums."""

    def total(read: str, side: str | None = None) -> float:
        return float(sum(getattr(getattr(one, side) if side else one, read) for one in times))

    shares = {
        side: {name: total(name, side) for name in ("work", "sync", "other", "idle")} for side in ("generate", "train")
    }
    plain = {name: total(name) for name in ("wall", "t_generate", "t_train", "t_sync", "both")}
    return IterationTimes.model_validate({**plain, **shares})


def summarise(
    records: Sequence[IterationRecord],
    *,
    run_id: str,
    run_url: str | None,
    mlflow_run_id: str | None,
    schedule: str,
    engine: str,
    eval_before: float | None = None,
    eval_after: float | None = None,
    weights_sha256: str | None = None,
) -> RunSummary:
    """The summary of a run from the records of its iterations, in any order; none gives zeros."""
    ordered = sorted(records, key=lambda record: record.iteration)
    times = total_times([record.times for record in ordered])
    rewards = [record.reward for record in ordered if record.reward is not None]
    tokens = sum(record.tokens for record in ordered)
    return RunSummary(
        run_id=run_id,
        run_url=run_url,
        mlflow_run_id=mlflow_run_id,
        schedule=schedule,
        engine=engine,
        iterations=ordered[-1].iteration + 1 if ordered else 0,
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        eval_before=eval_before,
        eval_after=eval_after,
        tokens=tokens,
        tokens_per_s=tokens / times.wall if times.wall else 0.0,
        t_generate=times.t_generate,
        t_train=times.t_train,
        t_sync=times.t_sync,
        wall=times.wall,
        idle_generate=times.generate.idle,
        idle_train=times.train.idle,
        overlap=times.overlap,
        bound=times.bound,
        groups=sum(record.groups for record in ordered),
        groups_duplicated=sum(record.groups_duplicated for record in ordered),
        groups_lost=sum(record.groups_lost for record in ordered),
        max_staleness_seen=max((record.max_staleness for record in ordered), default=0),
        weights_sha256=weights_sha256,
    )
