"""The short report at the end of a run."""

from __future__ import annotations

from pa_core.tracking.summary import RunSummary


def _change(before: float | None, after: float | None) -> str:
    """``0.12 → 0.74 (+0.62)``, with a dash for what was not measured."""
    if before is None or after is None:
        known = next((value for value in (before, after) if value is not None), None)
        return "not measured" if known is None else f"{known:.3f}"
    return f"{before:.3f} → {after:.3f} ({after - before:+.3f})"


def report(summary: RunSummary) -> str:
    """Reward, held-out accuracy, speed and overlap of a finished run, and where to find it."""
    lines = [
        f"{summary.run_id}: {summary.iterations} iterations, {summary.schedule}, {summary.engine} engine",
        f"  reward             {_change(summary.reward_first, summary.reward_last)}",
        f"  held-out accuracy  {_change(summary.eval_before, summary.eval_after)}",
        f"  throughput         {summary.tokens_per_s:.1f} response tokens/s in {summary.wall:.0f} s of iterations",
        f"  overlap            {summary.overlap:.2f} of the shorter side hidden; generate {summary.t_generate:.0f} s, "
        f"train {summary.t_train:.0f} s, sync {summary.t_sync:.0f} s",
        f"  bound              {summary.bound:.2f}x over sync is the most these times allow",
        f"  on-policy          largest staleness {summary.max_staleness_seen}, groups lost {summary.groups_lost}, "
        f"duplicated {summary.groups_duplicated}",
        f"  run                {summary.run_url}",
        f"  MLflow run         {summary.mlflow_run_id}",
    ]
    return "\n".join(lines)
