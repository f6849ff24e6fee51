"""Stand-ins for optimizers hold as much state as those of bitsandbytes and torchao."""

from typing import Any

import bitsandbytes.optim
import pytest
import torch
import torchao.optim
from omegaconf import OmegaConf
from torch import nn
from torchtune import config

from torchtune_adaptive.engine.memory.operations import plain_parts
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.trace.optimizer_stand_ins import stand_in_for_optimizer

# Numbers of elements: below 4096; not a multiple of 256 or 128; a multiple of 128 only; a multiple of both.
SHAPES = [(7, 9), (4097,), (33, 128), (64, 256)]


def parameters() -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    return made


def stand_in(component: str, **options: Any) -> Any:
    cfg = OmegaConf.create(stand_in_for_optimizer({"_component_": component, "lr": 0.1} | options))
    optimizer = config.instantiate(cfg, parameters())
    optimizer.step()
    return optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> list[int]:
    """The bytes of each parameter's state, in order, without step counts, which are on the host."""
    return [
        sum(part.nbytes for value in optimizer.state[one].values() if value.dim() for part in plain_parts(value))
        for one in optimizer.param_groups[0]["params"]
    ]


@pytest.mark.parametrize("options", [{}, {"block_size": 64}], ids=["usual blocks", "small blocks"])
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit", "AdamW4bit", "AdamWFp8"])
def test_torchaos_state_of_few_bits_is_that_of_the_optimizer_itself(name: str, options: dict[str, int]) -> None:
    itself = getattr(torchao.optim, name)(parameters(), **options)
    for parameter in itself.param_groups[0]["params"]:
        itself.state[parameter] = {f"{n}": itself._new_buffer(parameter, signed=n == 0) for n in range(2)}
    held = stand_in(f"torchao.optim.{name}", **options)
    assert state_bytes(held) == state_bytes(itself)
    assert len(set(state_bytes(held))) == len(SHAPES)


OF_BITSANDBYTES = [name for name, one in vars(bitsandbytes.optim).items() if hasattr(one, "init_state")]


def state_of_bitsandbytes(name: str, **options: Any) -> list[int]:
    """As ``state_bytes``, of the optimizer itself, without tables that all parameters share."""
    options |= {"momentum": 0.9} if name.startswith(("SGD", "LARS")) else {}
    itself = getattr(bitsandbytes.optim, name)(parameters(), lr=0.1, **options)
    (group,) = itself.param_groups
    for number, parameter in enumerate(group["params"]):
        itself.init_state(group, parameter, 0, number)
    states = [itself.state[parameter].items() for parameter in group["params"]]
    return [sum(v.nbytes for n, v in state if torch.is_tensor(v) and not n.startswith("qmap")) for state in states]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", OF_BITSANDBYTES)
def test_bitsandbytes_state_is_that_of_the_optimizer_itself(name: str) -> None:
    assert state_bytes(stand_in(f"bitsandbytes.optim.{name}")) == state_of_bitsandbytes(name)


def test_bitsandbytes_norm_of_an_update_is_kept_if_it_is_limited() -> None:
    without = stand_in("bitsandbytes.optim.LARS", max_unorm=0.0)
    assert state_bytes(without) == state_of_bitsandbytes("LARS", max_unorm=0.0)
    assert state_bytes(without) != state_of_bitsandbytes("LARS")


def test_bitsandbytes_options_choose_the_state_as_the_optimizers_name_does() -> None:
    component = "bitsandbytes.optim.AdamW"
    assert state_bytes(stand_in(component, optim_bits=8)) == state_bytes(stand_in(f"{component}8bit"))
    assert state_bytes(stand_in(f"{component}8bit", optim_bits=32)) == state_bytes(stand_in(f"{component}8bit"))
    assert state_bytes(stand_in(component, optim_bits=8, min_8bit_size=5000))[:3] == [8 * 63, 8 * 4097, 8 * 4224]

    def paged_bytes(name: str, **options: Any) -> int:
        cfg = OmegaConf.create(stand_in_for_optimizer({"_component_": name, "lr": 0.1} | options))
        large = nn.Parameter(torch.zeros(400, 400))
        large.grad = torch.zeros_like(large)
        optimizer = config.instantiate(cfg, [large])
        optimizer.step()
        return optimizer.paged_bytes

    assert paged_bytes(component, is_paged=True) == paged_bytes("bitsandbytes.optim.PagedAdamW") == 8 * 160_000


@pytest.mark.parametrize(
    ("component", "options", "sentence"),
    [
        ("bitsandbytes.optim.AdamW", {"optim_bits": 16}, "`optimizer.optim_bits` must be 8 or 32, but is 16 instead."),
        (
            "torchao.optim.CPUOffloadOptimizer",
            {},
            "`optimizer` must have a `state`, which recipes save and restore, but"
            " 'torchao.optim.CPUOffloadOptimizer' has none.",
        ),
        (
            "torchao.optim.AdamW8bit",
            {"amsgrad": True},
            "`optimizer.amsgrad` must be False for torchao.optim.AdamW8bit, whose first step fails with it.",
        ),
    ],
)
def test_what_cannot_be_planned_is_quoted_and_refused(component: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        stand_in(component, **options)
    assert str(caught.value) == sentence


def test_an_optimizer_of_another_library_has_no_stand_in() -> None:
    cfg = OmegaConf.create({"_component_": "torch.optim.AdamW", "lr": 0.1, "fused": True})
    assert stand_in_for_optimizer(cfg) is cfg
