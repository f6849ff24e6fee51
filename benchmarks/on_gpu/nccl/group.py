"""The process group of ranks that share one card: NCCL's, or gloo's without CUDA."""

import faulthandler
import os
import signal
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchmarks.on_gpu.stage import Stage, compute_alike

STORE = "RANKS_STORE"  # environment variable: where the ranks of a launch without torchrun meet
# NCCL then connects its ranks by sockets of this machine.
BY_SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
# What else may be in the way with some drivers.
CAREFUL = BY_SOCKETS | {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
}


def start(stage: Stage, *, timeout_s: float = 60.0) -> None:
    """Start the default process group, as recipes do, with all ranks on the first device. A collective.

    NCCL refuses two ranks on one device of a machine. With a host's name of its own each rank is on another machine.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # shows where a rank hangs
    compute_alike()
    rank = int(os.environ["RANK"])
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "LOCAL_RANK": "0"}
    dist.init_process_group(
        "gloo" if stage.is_rehearsal else "cuda:nccl,cpu:gloo",
        init_method=os.environ.get(STORE, "env://"),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )


def of_all_ranks(value: Any) -> list[Any]:
    """The ``value`` of each rank, by way of the host. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def backend_name(stage: Stage) -> str:
    """What connects the ranks, for a text."""
    return "gloo on the CPU" if stage.is_rehearsal else "a stand-in for NCCL" if stage.is_simulated else "NCCL"
