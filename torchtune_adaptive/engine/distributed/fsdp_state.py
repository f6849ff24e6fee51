"""Access to FSDP2's private state. No other module touches it, and nothing here communicates.

The tests of recovery pass with torch 2.9.1, 2.10.0, 2.11.0, 2.12.1, 2.13.0 and 2.15.0.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter  # also for the ledger
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchtune_adaptive.engine.distributed.functional_collectives import CannotRecordError, drop_unfinished_masks

# Of the setters of resharding after a forward and a backward pass, of gradients' reductions, and of unsharding.
_GROUP_SETTINGS = (
    "post_forward_mesh_info",
    "reshard_after_backward",
    "reduce_grads",
    "all_reduce_grads",
    "unshard_in_backward",
)


class Communicators(NamedTuple):
    """The communication functions and groups of one FSDP2 module that has parameters of its own.

    ``shard_group`` gathers its parameters. ``replicate_group`` reduces its gradients under HSDP and between replicas by
    ``replicate_op``, otherwise it is None.
    """

    module: FSDPModule
    all_gather: AllGather
    reduce_scatter: ReduceScatter
    all_reduce_hook: Any
    shard_group: dist.ProcessGroup | None
    replicate_group: dist.ProcessGroup | None
    replicate_op: Any


def communicators(model: nn.Module) -> list[Communicators]:
    """Return the communicators of all FSDP2 modules of ``model``, in the order of ``model.modules()``.

    Raises:
        CannotRecordError: a module is sharded over several meshes or not by FSDP2.
    """
    found = []
    for module in model.modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            way = "shard its modules by `fully_shard` (FSDP2) instead"
            if isinstance(module, DistributedDataParallel):
                way = "pass that module itself as `model`, without models that are not trained"
            raise CannotRecordError(f"a module within it is in a {type(module).__name__}: {way}")
        if not isinstance(module, FSDPModule):
            continue
        groups = list(param_groups([module._get_fsdp_state()]))
        if len(groups) > 1:
            raise CannotRecordError(f"a module of type {type(module).__name__} is sharded over several meshes")
        for group in groups:
            has_own_division = group.gradient_divide_factor is not None or group.force_sum_reduction_for_comms
            found.append(
                Communicators(
                    module,
                    group._all_gather_comm,
                    group._reduce_scatter_comm,
                    group._all_reduce_hook,
                    getattr(group.mesh_info, "shard_process_group", None),
                    getattr(group.mesh_info, "replicate_process_group", None),
                    dist.ReduceOp.SUM if has_own_division else dist.ReduceOp.AVG,
                )
            )
    return found


def param_groups(states: list[Any]) -> Iterator[Any]:
    """FSDP2's parameter groups in the ``states`` of its modules."""
    for state in states:
        groups = getattr(state, "_fsdp_param_groups", None)  # torch < 2.13: at most one group per module
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        yield from groups


def fsdp_states(model: nn.Module) -> list[Any]:
    """FSDP2's states of the modules of ``model``."""
    return [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]


def awaits_another_backward(model: nn.Module) -> bool:
    """Whether ``set_is_last_backward(False)`` is in force: FSDP2 then keeps its order of modules for the next pass."""
    return not all(state._state_ctx.is_last_backward for state in fsdp_states(model))


def drop_forward_passes(states: list[Any]) -> None:
    """Drop what FSDP2 keeps of forward passes without a backward pass, as of a validation or a reference model.

    It keeps their order, parameters for the backward pass, parameters gathered ahead that no module used, and modules
    whose group did not run as a whole. The next micro-step would gather others than usual. Gradients stay. Parameters
    that ``unshard`` has gathered are dropped too, also before the first forward pass.
    """
    for state in states:
        if state._is_root is not None:  # None before the first forward pass
            _reset_forward(state)
    for group in param_groups(states):
        if (pending := group._all_gather_result) is not None:
            if pending.all_gather_event is not None:
                group.device_handle.current_stream().wait_event(pending.all_gather_event)
            if pending.all_gather_work is not None:
                pending.all_gather_work.wait()
            group._all_gather_result = None
        group._training_state = TrainingState.IDLE
        group._post_forward_indices.clear()
        group._to_sharded()


class KeptSettings:
    """FSDP2's settings of the modules with these ``states``, as they are now.

    A micro-step may change them for a while: a chunked loss gathers the output layer once for all chunks, and reduces
    its gradients with the last one. An error in between leaves them changed, and the module then issues other
    collectives than on the other ranks.
    """

    def __init__(self, states: list[Any]) -> None:
        self._states = [
            (state, state._auto_reshard_after_forward, state._state_ctx.is_last_backward) for state in states
        ]
        self._groups = [
            (group, [(name, getattr(group, name)) for name in _GROUP_SETTINGS]) for group in param_groups(states)
        ]

    def is_like(self, other: "KeptSettings") -> bool:
        """Whether both have the same settings of the same modules."""
        return self._states == other._states and self._groups == other._groups

    def restore(self) -> None:
        """Restore the settings. A first forward pass in between may have made a module the root."""
        for group, settings in self._groups:
            for name, value in settings:
                setattr(group, name, value)
        for state, is_automatic, is_last_backward in self._states:
            state._auto_reshard_after_forward = is_automatic
            state._state_ctx.is_last_backward = is_last_backward
            if state._is_root and is_automatic:
                for group in param_groups([state]):
                    group.post_forward_mesh_info = None  # as FSDP2 sets it in the first forward pass


def reset_after_failure(model: nn.Module) -> None:
    """Reset ``model`` after an exception in forward or backward, so that it can run a new step.

    This drops FSDP2's state of the aborted step, reshards the parameters and sets all gradients to None. On a model
    without FSDP2 it only sets the gradients to None. Call it after the ``except`` block, on every rank that aborted
    its step. With tensor parallelism it also drops masks of DTensor. It does not restore settings: see
    ``KeptSettings``.

    ``FSDPModule.reset_iter_state`` (since torch 2.13) is called where it exists, but is not enough. It keeps unsharded
    gradients, to which the next backward pass would add, and the buffers of an all-gather that failed in its copy-out.
    """
    states = [state for state in fsdp_states(model) if state._is_root is not None]  # None before the first forward
    for state in states:
        if state._is_root and hasattr(FSDPModule, "reset_iter_state"):
            state._reset_iter_state()
    for state in states:
        _reset_state(state)
    for group in param_groups(states):
        _reset_group(group)
    for parameter in model.parameters():
        parameter.grad = None
    if any(_has_tensor_parallelism(parameter, states) for parameter in model.parameters()):
        drop_unfinished_masks()


def _has_tensor_parallelism(parameter: nn.Parameter, states: list[Any]) -> bool:
    """Whether a parameter is sharded by more than FSDP2. HSDP looks alike, which does no harm."""
    return isinstance(parameter, DTensor) and (not states or parameter.device_mesh.ndim > 1)


def _reset_state(state: Any) -> None:
    """Reset each field that ``reset_iter_state`` resets, for torch versions without it. Delete with torch < 2.13."""
    _reset_forward(state)
    state._state_ctx.post_backward_final_callback_queued = False
    if hasattr(state._comm_ctx, "reduce_scatter_state"):  # up to torch 2.11; replaced by the two containers below
        state._comm_ctx.reduce_scatter_state = None
    for name in ("reduce_scatter_states", "_last_post_reduce_events"):
        getattr(state._comm_ctx, name, []).clear()


def _reset_forward(state: Any) -> None:
    state._training_state = TrainingState.IDLE
    state._state_ctx.iter_forward_root = None
    state._comm_ctx.all_gather_state = None
    state._comm_ctx.post_forward_order.clear()
    state._modules_to_run_forward.clear()


def _reset_group(group: Any) -> None:
    group._training_state = TrainingState.IDLE
    group._post_forward_indices.clear()
    group._all_gather_result = None
    group._post_reduce_event = None
    group._reshard_after_forward_event = None
    group._partial_reduce_output = None
    group._all_reduce_state = None
    for parameter in group.fsdp_params:
        if "unsharded_accumulated_grad" in vars(parameter):  # up to torch 2.13; later that of `_unsharded_param`
            parameter.unsharded_accumulated_grad = None
        parameter.grad_offload_event = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
        # Always, even if the group's state says sharded: an all-gather that failed in its copy-out still has buffers.
        parameter.to_sharded()
        parameter._sharded_post_forward_param = None
        parameter._sharded_post_forward_param_data = None
    group._sharded_state = ShardedState.SHARDED
