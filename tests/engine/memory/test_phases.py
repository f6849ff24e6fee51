"""The phase of a train step follows the models' forwards, and is reported to the meter."""

import torch
from torch import nn

from torchtune_adaptive.engine.memory.cpu_meter import CpuMeter
from torchtune_adaptive.engine.memory.phases import Phases, phases_by_hooks


class Model(nn.Module):
    """Notes the phase in which its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: Phases | None = None
        self.seen: list[str] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        assert self.phases is not None
        self.seen.append(self.phases.now)
        return inputs * 2


def test_the_forward_of_each_model_in_a_list_enters_forward() -> None:
    meter = CpuMeter()
    student, teacher = Model(), Model()
    phases = Phases([nn.ModuleList([student, teacher])], meter)
    student.phases = teacher.phases = phases
    student(torch.ones(1))
    assert (student.seen, phases.now) == (["forward"], "loss")
    teacher(torch.ones(1))
    phases.enter("backward")
    assert (teacher.seen, phases.now) == (["forward"], "backward")
    assert list(meter.phase_peak_bytes) == ["forward", "loss", "backward"]


def test_a_train_step_with_several_models_has_the_phases_of_one() -> None:
    student, teacher = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(student.parameters())
    entered: list[str] = []
    with phases_by_hooks(nn.ModuleList([student, teacher]), [optimizer], entered.append):
        (student(torch.ones(1)) - teacher(torch.ones(1))).backward()
        optimizer.step()
    assert entered == ["forward", "backward", "forward", "backward", "optimizer"]


def test_other_hooks_of_the_model_run_in_its_forward() -> None:
    """FSDP2's hooks, for example, which gather and free parameters."""
    model = Model()
    seen: list[tuple[str, str]] = []
    model.register_forward_pre_hook(lambda *_: seen.append(("before", phases.now)), prepend=True)
    model.register_forward_hook(lambda *_: seen.append(("after", phases.now)))
    model.phases = phases = Phases([model], None)
    model(torch.ones(1))
    assert seen == [("before", "forward"), ("after", "forward")]
