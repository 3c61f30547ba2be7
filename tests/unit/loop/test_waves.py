"""How much of an iteration is in flight at once."""

from __future__ import annotations

from typing import Any

import pytest

from pa_core.config_files import parse_config
from pa_core.loop.services import in_waves


@pytest.mark.parametrize(
    ("changes", "in_flight"),
    [
        ({"engine": {"kind": "vllm"}, "prompts_per_iteration": 16}, 4),
        ({"engine": {"kind": "vllm", "replicas": 2}, "prompts_per_iteration": 64}, 8),
        ({"engine": {"kind": "vllm", "replicas": 1, "urls": ["http://a:1"]}, "prompts_per_iteration": 64}, 8),
        ({"engine": {"kind": "vllm", "replicas": 8}, "prompts_per_iteration": 8}, 2),
        ({"engine": {"kind": "vllm"}, "schedule": {"stream": False}}, 32),
        ({"engine": {"kind": "vllm", "concurrency": 5}}, 5),
        ({"engine": {"batch_groups": 3}}, 6),
    ],
)
def test_a_streaming_iteration_goes_to_vllm_in_waves_unless_told_otherwise(
    changes: dict[str, Any], in_flight: int
) -> None:
    assert in_waves(parse_config({"data": {"name": "chain_sum"}, **changes})).max_in_flight == in_flight
