"""Who may get which policy over a fabric, with the fabric itself replaced: it needs GPUs or NPUs."""

from __future__ import annotations

import threading

import pytest
import torch

from pa_core.errors import ConfigError, EngineError
from pa_core.rollout.config import EngineConfig
from pa_core.rollout.fabric import ControlPlane, FabricTransfer


class Group:
    """One replica's group; keeps what the policy was at each send."""

    def __init__(self, model: torch.nn.Linear) -> None:
        self.model = model
        self.sent: list[float] = []
        self.left = False
        self.failure: Exception | None = None
        self.entered, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def send_weights(self) -> None:
        self.entered.set()
        assert self.may_end.wait(10)
        if self.failure is not None:
            raise self.failure
        self.sent.append(float(self.model.weight.detach().sum()))

    def shutdown(self) -> None:
        self.left = True


class Fabric:
    """A transfer whose groups the test sees."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.model.weight, 1.0)
        self.groups: list[Group] = []
        config = EngineConfig(kind="vllm", weight_transfer="nccl")
        self.transfer = FabricTransfer(config, self.model, self.join)

    def join(self, control: ControlPlane) -> Group:
        self.groups.append(Group(self.model))
        return self.groups[-1]


def test_only_the_version_in_memory_is_sent_and_each_replica_joins_once() -> None:
    fabric = Fabric()
    with pytest.raises(EngineError, match=r"version 0 cannot be sent.*about to change"):
        fabric.transfer.send(0, "http://a", "k")
    fabric.transfer.offer(0)
    fabric.transfer.send(0, "http://a", "k")
    fabric.transfer.send(0, "http://b", "k")
    with pytest.raises(EngineError, match="has version 0"):
        fabric.transfer.send(1, "http://a", "k")
    fabric.transfer.withdraw()
    torch.nn.init.constant_(fabric.model.weight, 2.0)
    fabric.transfer.offer(1)
    fabric.transfer.send(1, "http://a", "k")
    assert [group.sent for group in fabric.groups] == [[1.0, 2.0], [1.0]]


def test_the_policy_does_not_change_under_a_replica_that_is_receiving_it() -> None:
    fabric = Fabric()
    fabric.transfer.offer(0)
    fabric.transfer.send(0, "http://a", "k")
    group = fabric.groups[0]
    group.entered.clear()
    group.may_end.clear()
    receiving = threading.Thread(target=fabric.transfer.send, args=(0, "http://a", "k"))
    receiving.start()
    assert group.entered.wait(10)
    stepped = threading.Event()

    def step() -> None:
        fabric.transfer.withdraw()
        torch.nn.init.constant_(fabric.model.weight, 2.0)
        stepped.set()

    stepping = threading.Thread(target=step)
    stepping.start()
    assert not stepped.wait(0.3)
    group.may_end.set()
    receiving.join(10)
    stepping.join(10)
    assert stepped.is_set()
    assert group.sent == [1.0, 1.0]


def test_a_replica_whose_transfer_failed_leaves_its_group_and_joins_anew() -> None:
    fabric = Fabric()
    fabric.transfer.offer(3)
    fabric.transfer.send(3, "http://a", "k")
    fabric.groups[0].failure = RuntimeError("NCCL error: remote process exited")
    with pytest.raises(EngineError, match="nccl transfer to http://a failed: NCCL error"):
        fabric.transfer.send(3, "http://a", "k")
    assert fabric.groups[0].left
    fabric.transfer.send(3, "http://a", "k")
    assert fabric.groups[1].sent == [1.0]
    fabric.transfer.close()
    assert fabric.groups[1].left


@pytest.mark.parametrize(("backend", "device"), [("nccl", "cuda"), ("hccl", "npu")])
def test_a_policy_on_another_device_is_told_so(backend: str, device: str) -> None:
    config = EngineConfig(kind="vllm", weight_transfer=backend)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=f"engine.weight_transfer={backend} needs a policy that is trained on a {device} device.*fsspec",
    ):
        FabricTransfer(config, torch.nn.Linear(1, 1))
