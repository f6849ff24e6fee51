"""What DistributedDataParallel takes beside a model: buffers to send the weights, and buckets for gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from torchtune_adaptive.plan.trace.events import BEFORE, REBUILT, Event, Events

_KIND = "other tensors"
_MIB = 2**20
_SENT_BYTES = 250 * _MIB  # of a buffer: `broadcast_bucket_size` of DDP
_SENT_AT_ONCE = 2  # buffers (`broadcast_coalesced` of torch/csrc/distributed/c10d/comm.cpp)
_FIRST_BUCKET_MIB, _BUCKET_MIB = 1, 25  # by default


@contextmanager
def not_replicated() -> Iterator[dict[str, Any]]:
    """Context: DDP does not wrap a model. Its steps take no memory but what ``setup_of_replicas`` returns.

    Yields the options that DDP would have had.
    """
    given: dict[str, Any] = {}

    class AsItIs:
        def __new__(cls, module: nn.Module, **options: Any) -> Any:
            given.update(options)
            return module

    with mock.patch.object(nn.parallel, "DistributedDataParallel", AsItIs):
        yield given


def setup_of_replicas(model: nn.Module, options: dict[str, Any]) -> Events:
    """The events of DDP's set-up for ``model``, once its weights are there.

    Weights are sent in buffers. Gradients are reduced in buckets: DDP begins with a single one, and makes several once
    it knows in which order gradients come. If some may be missing, it makes several from the start.
    """
    found = _sent([*model.parameters(), *model.buffers()])
    own_mib = options.get("bucket_cap_mb")
    limits_mib = [own_mib] if own_mib else [_FIRST_BUCKET_MIB, _BUCKET_MIB]
    trained = [one for one in model.parameters() if one.requires_grad]
    buckets = [sum(one.nbytes for one in bucket) for bucket in _grouped(trained[::-1], limits_mib)]
    if options.get("find_unused_parameters"):
        return (*found, *(Event(BEFORE, "bucket", _KIND, num_bytes) for num_bytes in buckets))
    single = [Event(BEFORE, "bucket", _KIND, sum(buckets)), Event(BEFORE, REBUILT, _KIND, 0, taken=len(found))]
    return (*found, *single, *(Event(BEFORE, REBUILT, _KIND, num_bytes) for num_bytes in buckets))


def _sent(weights: Sequence[torch.Tensor]) -> Events:
    """The buffers in which weights are sent. A weight that would fill one is sent as it is."""
    found: list[Event] = []
    in_flight: list[int] = []  # the events that took the buffers
    for weights_of_one in [*_grouped(weights, [_SENT_BYTES // _MIB]), *[[]] * _SENT_AT_ONCE]:
        if len(in_flight) == _SENT_AT_ONCE:
            found.append(Event(BEFORE, "sent", _KIND, 0, taken=in_flight.pop(0)))
        in_flight.append(len(found))
        num_bytes = sum(one.nbytes for one in weights_of_one) if len(weights_of_one) > 1 else 0
        found.append(Event(BEFORE, "sent", _KIND, num_bytes))
    return tuple(found)


def _grouped(tensors: Sequence[torch.Tensor], limits_mib: Sequence[float]) -> list[list[torch.Tensor]]:
    """The tensors in groups of one type that are closed once they have so many MiB, the last limit for all further."""
    by_size: Any = dist._compute_bucket_assignment_by_size  # pyright: ignore[reportPrivateImportUsage]
    groups, _ = by_size(list(tensors), [int(one * _MIB) for one in limits_mib])
    return [[tensors[place] for place in group] for group in groups]
