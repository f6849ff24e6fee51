"""Trace a step of a run: the trainer's own, which runs as the train step of any loop."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn

from torchtune_adaptive.engine.search.strategies import SMALL_BATCH_SIZES
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.output import quietly
from torchtune_adaptive.plan.hugging_face.quantized import unpacked
from torchtune_adaptive.plan.hugging_face.replicas import setup_of_replicas
from torchtune_adaptive.plan.hugging_face.run import HuggingFaceRun
from torchtune_adaptive.plan.hugging_face.training import training_of, without_torchao
from torchtune_adaptive.plan.hugging_face.trl_stand_ins import tokens_of_a_tile
from torchtune_adaptive.plan.trace.events import Events, extended, with_bytes_of
from torchtune_adaptive.plan.trace.loop import TracedLoop, trace_loop

_OFFLOADED_BYTES = 1024  # of the smallest tensor that TRL offloads (trl/models/activation_offloading.py)


class RunTracer:
    """Traces steps of a run, with the whole model or with so many of its layers."""

    def __init__(self, run: HuggingFaceRun) -> None:
        self._run = run

    def trace(self) -> TracedLoop:
        """Trace a step, with few of the model's layers if the whole model's events follow from theirs.

        Raises:
            InputError: the run cannot be planned; the message says why.
        """
        # Of a trace they may be packed. Besides, this loads the model's module before Liger changes it.
        num_parameters = self._whole_parameters
        counts, found = self.few_layers(), None
        with suppress(InputError):  # a model may not be built with few layers; whole it may be
            found = None if counts is None else self.traced_with(*counts)
        whole = self._run.model.num_layers
        if found is None:
            found = replace(self.traced(None, sizes=self.sizes()), traced_layers=(whole,) if whole else ())
        return replace(found, num_layers=whole, num_parameters=num_parameters)

    def traced_with(self, first: int, second: int, third: int) -> TracedLoop | None:
        """The step, from models of these numbers of layers; None if the whole model's does not follow from theirs."""
        whole = self._run.model.num_layers
        periods = (whole - first) // (second - first)
        one, two = self._num_parameters(first), self._num_parameters(second)
        # Layers beyond the third model may differ, as in a mixture of experts whose last layers are dense.
        if self._whole_parameters != one + periods * (two - one):
            return None
        small, *others = self.sizes()
        few = self.traced(first, sizes=(small, *others))
        more = self.traced(second, sizes=(small, 1))
        most = self.traced(third, sizes=(small,))
        if extended(few.events(small), more.events(small), 2) != most.events(small):
            return None
        steps = {1: (few.events(1), more.events(1)), small: (few.events(small), more.events(small))}
        alike = {size: with_bytes_of(few.events(size), few.events(small), more.events(small)) for size in others}
        unlike = [size for size, events in alike.items() if events is None and size not in steps]
        apart = self.traced(second, sizes=(small, *unlike)) if unlike else more
        for size in others:
            steps.setdefault(size, (few.events(size), alike[size] or apart.events(size)))
        step = replace(few.step, traced=dict(sorted(steps.items())), periods=periods)
        if not (step.follows(1) and step.follows(max(steps) + 1)):
            return None
        return replace(few, lengths=(step,), traced_layers=(first, second))

    @cached_property
    def _whole_parameters(self) -> int:
        """Parameters of the whole model."""
        return self._num_parameters(None)

    def _num_parameters(self, num_layers: int | None) -> int:
        """Parameters of the model with so many layers, adapters included."""
        return sum(one.numel() for one in self._built(num_layers).parameters())

    def _built(self, num_layers: int | None) -> nn.Module:
        """The model with so many layers and its adapters, without memory. Quantized weights are not packed."""
        with quietly(), unpacked(), without_torchao(), torch.device("meta"):
            return self._run.with_adapters(self._run.model.build(num_layers))

    @cached_property
    def _whole_packed(self) -> nn.Module:
        """The whole model, with its quantized weights packed."""
        model = self._built(None)
        if (quantized := self._run.model.quantized) is not None:
            quantized.pack_without_scales(model)
        return model

    @cached_property
    def _loads(self) -> list[Events]:
        """How quantized weights are loaded onto a GPU. Others are loaded in host memory."""
        if (quantized := self._run.model.quantized) is None:
            return []
        with quietly(), torch.device("meta"):
            return quantized.loads(self._run.model.build())

    def sizes(self) -> list[int]:
        """Numbers of samples to trace: the first two fill a tile of TRL's loss, whose size then grows no more.

        Where rows follow one another, a third tells what grows with the square of all tokens: a matrix of attention.
        The others are smaller. If activations are offloaded, all tensors of two of them are large enough for that.
        """
        tokens = (self._run.usual_len - 1) * (2 if self._run.trainer == "dpo" else 1)
        tile = 0 if self._run.trainer == "transformers" else tokens_of_a_tile()
        offloaded = _OFFLOADED_BYTES if self._run.run_keys.training.get("activation_offloading") else 0
        small, least = (max(SMALL_BATCH_SIZES[0], fewest // max(1, tokens) + 1) for fewest in (tile, offloaded))
        more = 2 + self._run.is_joined
        return [*range(small, small + more), *range(1, min(small, least + more))]

    def traced(self, num_layers: int | None, *, sizes: Sequence[int]) -> TracedLoop:
        """The step with so many layers (None: all), traced with these numbers of samples."""
        with training_of(self._run, num_layers) as training:
            traced = trace_loop(
                training.build_model,
                training.build_optimizer,
                training.train_step,
                training.make_batch,
                ranks=self._run.ranks,
                sizes=sizes,
                values_are_fixed=True,
                keeps_on_host=lambda: training.keeps_on_host,
            )
        replicas = training.options_of_ddp
        setup = () if replicas is None else setup_of_replicas(self._whole_packed, replicas)
        step = replace(traced.step, setup=setup, loads=(self._loads,))
        return replace(traced, lengths=(step,))

    def few_layers(self) -> tuple[int, int, int] | None:
        """Numbers of layers from which the whole model may follow; None if it has too few to be worth it.

        None with TRL's offloading too: what it keeps of earlier layers follows no pattern of layers.
        """
        whole = self._run.model.num_layers
        if not whole or self._run.run_keys.training.get("activation_offloading"):
            return None
        kinds = self._run.model.kinds_of_layers
        period = next(length for length in range(1, whole + 1) if kinds[length:] == kinds[: len(kinds) - length])
        period = math.lcm(2, period)
        first = max(4, 2 * period) + whole % period
        counts = first, first + period, first + 2 * period
        return counts if counts[2] < whole else None
