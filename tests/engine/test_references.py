"""Generators and modules that a micro-step refers to are found, also those that methods and other files name."""

import random
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import nn

from torchtune_adaptive.engine.references import generators_within_reach, modules_within_reach

GENERATOR, LOSS = np.random.default_rng(0), nn.BatchNorm1d(2)
QUEUE = deque([random.Random(2)])
another_file = types.ModuleType("another_file")
exec("import random\ngenerator = random.Random(0)\ndef draw(): return generator.random()", vars(another_file))


class Augmentation:
    generator = random.Random(1)  # of the class

    def apply(self) -> float:
        return self.generator.random() + self.apply_again()

    def apply_again(self) -> float:
        return self.apply()

    __call__ = apply


class Layer(nn.Module):
    def forward(self, rows: Any) -> Any:
        return self.noisy(rows)

    def noisy(self, rows: Any) -> Any:
        return rows * self.factor

    @property
    def factor(self) -> float:
        return GENERATOR.random()


class Holding(nn.Module):
    held: Any = None

    def forward(self, rows: Any) -> Any:
        return rows


class Trainer:
    def __init__(self) -> None:
        self.augmentation = Augmentation()

    def micro_step(self, rows: Any) -> Any:
        return self.loss(rows) * self.augmentation.apply()

    def loss(self, rows: Any) -> Any:
        return LOSS(rows) * self.scale()

    @staticmethod
    def scale() -> float:
        return GENERATOR.random()


@dataclass(slots=True)
class Slots:
    generator: random.Random


augmentation = Augmentation()
REFERRING: dict[str, tuple[Callable[..., Any], Any]] = {
    "a function of another file": (lambda: another_file.draw(), another_file.generator),
    "an object that is called": (lambda: augmentation(), Augmentation.generator),
    "a method of an object": (lambda: augmentation.apply(), Augmentation.generator),
    "a static method that another method calls": (Trainer().micro_step, GENERATOR),
    "a method of an attribute": (Trainer().micro_step, Augmentation.generator),
    "a queue": (lambda: QUEUE[0].random(), QUEUE[0]),
}


@pytest.mark.parametrize("case", REFERRING)
def test_a_generator_is_found_by(case: str) -> None:
    function, expected = REFERRING[case]
    assert expected in generators_within_reach(function)


def test_a_generator_that_a_forward_pass_refers_to_is_found() -> None:
    assert generators_within_reach(lambda: None, [nn.Linear(1, 1), Layer()]) == [GENERATOR]


@pytest.mark.parametrize(
    "hold",
    [
        lambda generator: [generator],
        lambda generator: {"rows": (generator, 0.5)},
        Slots,
        lambda generator: types.SimpleNamespace(mask=types.SimpleNamespace(generator=generator)),
        lambda generator: generator.random,
    ],
)
def test_a_generator_within_an_attribute_of_a_module_is_found(hold: Callable[[Any], Any]) -> None:
    layer, generator = nn.Sequential(Holding()), random.Random(0)
    layer[0].held = hold(generator)
    assert generators_within_reach(lambda: None, layer.modules()) == [generator]


def test_a_generator_is_found_if_the_class_of_the_layer_was_made_by_torch() -> None:
    """As FSDP2 makes one."""
    layer = Layer()
    layer.__class__ = type("FSDPLayer", (Layer,), {"__module__": "torch.distributed"})
    assert generators_within_reach(lambda: None, [layer]) == [GENERATOR]


def test_a_loss_that_another_method_refers_to_is_found() -> None:
    assert LOSS in modules_within_reach(nn.Linear(1, 1), Trainer().micro_step)


@pytest.mark.parametrize(
    "hold", [lambda loss: {"a": loss}, lambda loss: [loss], lambda loss: types.SimpleNamespace(a=loss)]
)
def test_a_loss_within_an_attribute_of_a_module_is_found(hold: Callable[..., Any]) -> None:
    layer, loss = Holding(), nn.BatchNorm1d(2)
    layer.held = hold(loss)
    assert loss in modules_within_reach(nn.Sequential(layer), lambda: None)
