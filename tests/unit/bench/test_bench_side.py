"""A side of a comparison in a process of its own, and the memory it takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pa_core.bench.memory import PeakMemory
from pa_core.bench.side import Side
from pa_core.errors import UserError

WORKER = """
import os
from pa_core.bench.side import serve

def double(number):
    print("libraries print what they like")
    return 2 * number

def fail():
    raise ValueError("no such model")

def die():
    os.write(2, b"out of memory")
    os._exit(9)

def toil():
    os.write(2, b"at work")
    while True:
        pass

serve({"double": double, "fail": fail, "die": die, "toil": toil, "threads": lambda: os.environ["OMP_NUM_THREADS"]})
"""


@pytest.fixture
def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    (tmp_path / "bench_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Side("bench_worker", threads=3) as worker:
        yield worker


def test_a_side_answers_and_says_what_went_wrong(side: Side) -> None:
    assert side.ask("double", number=21) == 42
    assert side.ask("threads") == "3"
    with pytest.raises(UserError, match="bench_worker failed at 'fail': ValueError: no such model"):
        side.ask("fail")
    assert side.ask("double", number=1) == 2  # it goes on
    with pytest.raises(UserError, match=r"(?s)bench_worker died at 'die'.*out of memory"):
        side.ask("die")


def test_a_side_whose_parent_is_gone_ends_in_the_middle_of_its_work(tmp_path: Path) -> None:
    (tmp_path / "bench_worker.py").write_text(WORKER)
    worker = subprocess.Popen(
        [sys.executable, "-m", "bench_worker"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    assert worker.stdin is not None and worker.stderr is not None
    try:
        worker.stdin.write(json.dumps({"do": "toil", "with": {}}).encode() + b"\n")
        worker.stdin.flush()
        assert worker.stderr.read(7) == b"at work"
        worker.stdin.close()  # as the end of the parent does
        assert worker.wait(60) != 0
    finally:
        worker.kill()
        worker.stderr.close()


def test_peak_memory_is_what_the_work_took_and_is_forgotten() -> None:
    memory = PeakMemory(torch.device("cpu"))
    megabyte = 1 << 20
    block = torch.ones(200 * megabyte // 4)
    del block
    assert 195 * megabyte <= memory.peak() < 240 * megabyte  # the kernel counts in batches of pages
    memory.restart()
    assert memory.peak() < 40 * megabyte
