from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pa_core.records import Group, Prompt, Sample
from pa_core.store.objects import ObjectStore


@pytest.fixture(params=["file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    """An empty store on each protocol that every room is tested on."""
    if request.param == "s3":
        server = request.getfixturevalue("moto_s3")
        with server.activated():
            yield ObjectStore.open(server.url(f"test-{uuid.uuid4().hex}/run"))
        assert server.unfinished() == []
    else:
        yield ObjectStore.open(
            f"file://{tmp_path}/run" if request.param == "file" else f"memory://test-{uuid.uuid4().hex}/run"
        )


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """A group with two samples of unequal length, every field filled in."""

    def make(group_id: str = "p0", version: int = 3, replica: str = "r0") -> Group:
        prompt = Prompt(
            id=group_id,
            index=7,
            text="What is 3 + 4?",
            token_ids=np.array([1, 50, 2], dtype=np.int32),
            answer="7",
            metadata={"difficulty": 2, "source": "sums"},
        )
        samples = [
            Sample(
                token_ids=np.array([9, 8, 7], dtype=np.int32),
                logprobs=np.array([-0.5, -1.25, -0.1], dtype=np.float32),
                versions=[(version, 3)],
                loss_mask=np.array([1, 1, 1], dtype=np.uint8),
                finish_reason="stop",
                text="it is 7",
                reward=1.0,
                rewards={"exact": 1.0},
                routed_experts=np.arange(5 * 2 * 2, dtype=np.int32).reshape(5, 2, 2),
                sampling_mask=(np.array([9, 4], np.int32), np.array([8], np.int32), np.array([7, 1, 2], np.int32)),
            ),
            Sample(
                token_ids=np.array([5], dtype=np.int32),
                logprobs=np.array([-2.0], dtype=np.float32),
                versions=[(version, 1)],
                loss_mask=np.array([1], dtype=np.uint8),
                finish_reason="length",
                text="it",
                unscored="timeout: exact",
            ),
        ]
        return Group(prompt, samples, version, replica, (100.25, 101.5))

    return make
