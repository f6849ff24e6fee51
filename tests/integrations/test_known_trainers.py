"""Trainers and arguments with which training cannot recover are refused by name."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchtune_adaptive import InputError
from torchtune_adaptive.integrations.known_trainers import has_own_loss, samples_are_pairs, why_refused, why_whole


def trainer(**changes: Any) -> Any:
    """A trainer on two processes; ``changes`` are to whatever has the name: itself, its arguments, its accelerator."""
    one = SimpleNamespace(is_model_parallel=False, loss_types=["sigmoid"], _is_vlm=False)
    one.args = SimpleNamespace(
        auto_find_batch_size=False,
        n_gpu=1,
        torch_compile=False,
        dataloader_drop_last=False,
        train_sampling_strategy="random",
        optim="adamw_torch",
        activation_offloading=False,
    )
    one.accelerator = SimpleNamespace(num_processes=2, even_batches=True, scaler=None)
    sizes = {name: changes.pop(name, 1) for name in ("tp_size", "cp_size", "sp_size")}
    vars(one).update({f"get_{name}": lambda size=size: size for name, size in sizes.items()})
    one.accelerator.distributed_type = SimpleNamespace(value=changes.pop("processes", "MULTI_GPU"))
    one.accelerator.state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=changes.pop("fsdp_version", 2)))
    for name, value in changes.items():
        owner = next(owner for owner in (one, one.args, one.accelerator) if name in vars(owner))
        setattr(owner, name, value)
    return one


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auto_find_batch_size": True}, "`auto_find_batch_size` must be off"),
        ({"n_gpu": 2}, "A process must train on one device, but has 2"),
        ({"is_model_parallel": True}, "A `device_map` must not"),
        (
            {"processes": "DEEPSPEED"},
            "Processes must be connected by DistributedDataParallel or FSDP2, not by DEEPSPEED",
        ),
        ({"fsdp_version": 1}, "`fsdp_version` must be 2, but is 1 instead"),
        ({"tp_size": 2}, "but their sizes are (2, 1, 1)"),
        ({"cp_size": 3}, "but their sizes are (1, 3, 1)"),
        ({"sp_size": 4}, "but their sizes are (1, 1, 4)"),
        ({"torch_compile": True}, "`torch_compile` needs a single process"),
        ({"even_batches": False}, "`even_batches` or `dataloader_drop_last`"),
        ({"train_sampling_strategy": "batch_rebalance"}, "'batch_rebalance' needs a single process"),
        ({"optim": "OptimizerNames.ADALOMO"}, "'OptimizerNames.ADALOMO' steps in the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, "'galore_adamw_layerwise' steps in the backward pass"),
        ({"activation_offloading": True}, "`activation_offloading` must be off"),
        ({"_is_vlm": True}, "takes images"),
    ],
)
def test_arguments_that_do_not_allow_recovery_are_refused(changes: dict[str, Any], reason: str) -> None:
    assert why_refused(trainer()) == ""
    assert reason in why_refused(trainer(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"even_batches": False, "dataloader_drop_last": True},
        {"even_batches": False, "num_processes": 1},
        {"torch_compile": True, "num_processes": 1},
        {"train_sampling_strategy": "batch_rebalance", "num_processes": 1},
    ],
)
def test_what_matters_for_several_processes_or_the_last_batch_only_is_allowed(changes: dict[str, Any]) -> None:
    assert why_refused(trainer(**changes)) == ""


@pytest.mark.parametrize("loss", ["aot", "aot_unpaired", "sft"])
def test_batches_stay_whole_for_losses_that_are_no_mean_over_pairs(loss: str) -> None:
    assert why_whole(trainer()) == why_whole(SimpleNamespace()) == ""
    assert why_whole(trainer(loss_types=["sigmoid", loss])) == f"`loss_type` ['{loss}'] mixes them"


def test_a_loss_is_a_users_own_unless_it_is_transformers_or_trls() -> None:
    def of(module: str, function: Any = None) -> Any:
        def compute_loss(_: Any) -> None: ...

        compute_loss.__module__ = module
        return type("Mine", (), {"compute_loss": compute_loss, "compute_loss_func": function})()

    assert not has_own_loss(of("trl.trainer.sft_trainer"))
    assert not has_own_loss(of("transformers.trainer"))
    assert has_own_loss(of("__main__"))
    assert has_own_loss(of("transformers.trainer", len))


def of_package(package: str, name: str, base: type = object) -> type:
    return type(name, (base,), {"__module__": f"{package}.trainer", "samples_are_pairs": None})


def test_an_unknown_trainer_is_refused_by_name_unless_it_declares_its_batches() -> None:
    known = of_package("trl", "SFTTrainer")
    assert samples_are_pairs(type("Mine", (known,), {})) is False
    assert samples_are_pairs(type("Mine", (known,), {"samples_are_pairs": True})) is True
    for unknown in (of_package("trl", "KTOTrainer"), of_package("trl", "GKDTrainer", known)):
        with pytest.raises(InputError, match=f"{unknown.__name__} is not supported: its batches may be no rows"):
            samples_are_pairs(type("Mine", (unknown,), {}))
        assert samples_are_pairs(type("Mine", (unknown,), {"samples_are_pairs": True})) is True
    newer = of_package("transformers", "NewTrainer")
    with pytest.raises(InputError, match="NewTrainer is not a known trainer: declare its batches by"):
        samples_are_pairs(type("Mine", (newer,), {}))
