"""The benchmark compares what it says it compares."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_truth import tiny_model

from pa_core.bench.shared_prompt import run, token_ratio


def test_rho_is_computed_tokens_over_computed_tokens() -> None:
    assert token_ratio(16, 512, 64) == pytest.approx(6.0)
    assert token_ratio(8, 16_000, 64) == pytest.approx(7.78, abs=0.01)


def test_both_sides_do_the_same_work(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    result = run(str(tmp_path), group_size=3, prompt_len=20, response_len=5, repeats=2)
    assert result["gradient_distance"] < 1e-5
    tried = result["per_sample_seconds_per_sample"]
    assert set(tried) in ({1, 2}, {1, 2, 3}) and tried[result["per_sample_micro_batch"]] == min(tried.values())
    assert result["speedup"] == result["per_sample_s"] / result["shared_s"]
    assert len(result["shared_all_s"]) == len(result["per_sample_all_s"]) == 2
