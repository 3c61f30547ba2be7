"""The worker pool: what a misbehaving reward does to its sample, to the others, and to the run."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from pa_core.config import RewardConfig, ScoringConfig
from pa_core.errors import RewardError
from pa_core.records import Group, Prompt, Sample
from pa_core.rewards.pool import RewardPool

HOSTILE = str(Path(__file__).with_name("hostile.py"))
OBEY = RewardConfig(name="obey", function=f"{HOSTILE}:obey", weight=2.0)
ONE = RewardConfig(name="one", function=f"{HOSTILE}:always_one", weight=0.5)


def group(*responses: str, answer: str = "7", index: int = 0) -> Group:
    empty = np.zeros(0, dtype=np.int32)
    prompt = Prompt(f"p{index:08d}", index, "3 + 4 =", empty, answer)
    samples = [
        Sample(empty, empty.astype(np.float32), [], empty.astype(np.uint8), "stop", text=text) for text in responses
    ]
    return Group(prompt, samples, version=0, replica="r0")


def scored(pool: RewardPool, *responses: str) -> list[Sample]:
    result = group(*responses)
    asyncio.run(pool.score(result))
    return result.samples


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[RewardPool]:
    pool = RewardPool([OBEY, ONE], ScoringConfig(workers=1, timeout_s=1.0))
    pool.start()
    yield pool
    pool.close()


def test_the_total_is_the_weighted_sum_and_components_are_kept(shared_pool: RewardPool) -> None:
    samples = scored(shared_pool, "value 3", "true", "value -1.5")
    assert [sample.reward for sample in samples] == [6.5, 2.5, -2.5]
    assert samples[0].rewards == {"obey": 3.0, "one": 1.0}
    assert all(sample.unscored is None for sample in samples)


def test_a_reward_sees_how_many_tokens_each_response_has(shared_pool: RewardPool) -> None:
    result = group("tokens", "tokens")
    result.samples[1].token_ids = np.arange(3, dtype=np.int32)
    asyncio.run(shared_pool.score(result))
    assert [sample.rewards["obey"] for sample in result.samples] == [0.0, 3.0]


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ("hang", "timeout:obey"),
        ("raise no", "error:obey"),
        ("none", "none:obey"),
        ("value nan", "nan:obey"),
        ("value inf", "nan:obey"),
        ("text", "error:obey"),
        ("exit 0", "error:obey"),
        ("kill", "error:obey"),
    ],
)
def test_a_reward_without_a_value_unscores_its_own_sample_only_and_is_counted(
    shared_pool: RewardPool, response: str, cause: str
) -> None:
    before = shared_pool.counts[cause]
    good, bad, also_good = scored(shared_pool, "value 1", response, "value 2")
    assert (good.reward, also_good.reward) == (2.5, 4.5)
    assert (bad.reward, bad.unscored, bad.rewards) == (None, cause, {"one": 1.0})
    assert shared_pool.counts[cause] == before + 1


def test_a_worker_stuck_inside_c_code_is_killed_and_replaced(shared_pool: RewardPool) -> None:
    start = time.monotonic()
    (pid,) = scored(shared_pool, "pid")
    hung, good = scored(shared_pool, "hang-in-c", "value 1")
    assert (hung.unscored, good.reward) == ("timeout:obey", 2.5)
    assert not psutil.pid_exists(int(pid.rewards["obey"]))
    assert time.monotonic() - start < 15


def test_an_idle_worker_killed_from_outside_costs_nothing(shared_pool: RewardPool) -> None:
    (pid,) = scored(shared_pool, "pid")
    os.kill(int(pid.rewards["obey"]), signal.SIGKILL)
    time.sleep(0.5)
    assert [sample.reward for sample in scored(shared_pool, "value 1", "value 2")] == [2.5, 4.5]


def test_workers_import_no_torch_though_the_parent_has_it(shared_pool: RewardPool) -> None:
    import torch

    assert torch.__name__ in sys.modules
    samples = scored(shared_pool, "loaded torch", "loaded math_verify", "loaded reasoning_gym", "loaded transformers")
    assert [sample.rewards["obey"] for sample in samples] == [0, 0, 0, 0]


def test_groups_are_scored_at_the_same_time_and_keep_their_own_values(shared_pool: RewardPool) -> None:
    groups = [group(*(f"value {10 * index + sample}" for sample in range(4)), index=index) for index in range(6)]

    async def all_at_once() -> None:
        await asyncio.gather(*(shared_pool.score(each) for each in groups))

    asyncio.run(all_at_once())
    for index, each in enumerate(groups):
        assert [sample.rewards["obey"] for sample in each.samples] == [10 * index + sample for sample in range(4)]


def test_scoring_a_group_of_eight_takes_less_than_20_ms_once_warm(shared_pool: RewardPool) -> None:
    async def median() -> float:
        times = []
        for _ in range(15):
            start = time.perf_counter()
            await shared_pool.score(group(*["value 1"] * 8))
            times.append(time.perf_counter() - start)
        return sorted(times)[len(times) // 2]

    # The median of a quiet machine is a few ms; the bound leaves room for a busy one.
    assert asyncio.run(median()) < 0.02 * max(1.0, os.getloadavg()[0])


def test_what_a_reward_prints_stays_out_of_the_programs_output() -> None:
    program = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_reward_pool as t\n"
        "if __name__ == '__main__':\n"
        "    pool = t.RewardPool([t.OBEY], t.ScoringConfig()); pool.start()\n"
        "    t.scored(pool, 'print chatter'); pool.close(); print('result')\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "result\n", done.stderr
    assert "chatter" in done.stderr


def test_too_many_unscored_samples_stop_the_run_and_the_message_says_why() -> None:
    pool = RewardPool([OBEY], ScoringConfig(timeout_s=5, max_unscored=0.25))
    pool.start()
    try:
        few, many = group("value 1", "value 2", "value 3", "raise a"), group("value 1", "none", "raise a", "raise b")
        asyncio.run(pool.score(few))
        asyncio.run(pool.score(many))
        pool.check([few])
        pool.check([many], expected=12)
        with pytest.raises(RewardError, match="3 of 8"):
            pool.check([many], expected=8)
        with pytest.raises(RewardError) as caught:
            pool.check([few, many])
    finally:
        pool.close()
    message = str(caught.value)
    for part in ("reward 'obey'", "4 of 8", "3 x error:obey", "1 x none:obey", "ValueError: b (hostile.py:"):
        assert part in message
    assert "scoring.max_unscored=0.25" in message


def test_close_ends_a_hung_worker_at_once() -> None:
    others = {child.pid for child in multiprocessing.active_children()}
    pool = RewardPool([OBEY], ScoringConfig(timeout_s=600))
    pool.start()

    async def abandon() -> None:
        scoring = asyncio.create_task(pool.score(group("hang")))
        await asyncio.sleep(0.3)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring

    asyncio.run(abandon())
    start = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - start < 8
    assert {child.pid for child in multiprocessing.active_children()} <= others


@pytest.mark.parametrize("hang", ["hang", "hang-in-c"])
def test_workers_end_with_their_parent_even_in_the_middle_of_a_hang(hang: str, tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys, threading, time; sys.path.insert(0, sys.argv[1])\n"
        "import psutil, test_reward_pool as t\n"
        "if __name__ == '__main__':\n"
        "    pool = t.RewardPool([t.OBEY], t.ScoringConfig(timeout_s=600)); pool.start()\n"
        "    (sample,) = t.scored(pool, 'pid'); print(int(sample.rewards['obey']), flush=True)\n"
        "    threading.Timer(1.0, os.kill, (os.getpid(), 9)).start()\n"
        "    t.scored(pool, sys.argv[2])\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), hang]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    worker = int(done.stdout)
    deadline = time.monotonic() + 5
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_a_reward_lacks_is_named_at_the_start() -> None:
    pool = RewardPool([RewardConfig(name="own", function=f"{HOSTILE}:always_on")], ScoringConfig())
    with pytest.raises(RewardError, match="no function 'always_on'; did you mean 'always_one'"):
        pool.start()
    with pytest.raises(RewardError, match="'exakt' is no built-in reward"):
        RewardPool([RewardConfig(name="exakt")], ScoringConfig())


def test_a_reward_module_that_kills_its_process_at_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os._exit(3)")
    pool = RewardPool([RewardConfig(name="own", function=f"{tmp_path / 'deadly.py'}:f")], ScoringConfig())
    with pytest.raises(RewardError, match="died while it loaded own"):
        pool.start()


def test_math_scores_in_workers_with_the_time_limit_of_the_pool() -> None:
    pool = RewardPool([RewardConfig(name="math")], ScoringConfig(timeout_s=2))
    pool.start()
    try:
        samples = scored(pool, "\\boxed{7}", "$9^{9^{9^{9^{9}}}}$", "The answer is $\\frac{14}{2}$", "8")
    finally:
        pool.close()
    assert [sample.reward for sample in samples[:1] + samples[2:]] == [1.0, 1.0, 0.0]
    assert samples[1].reward in (0.0, None)
