"""From a config to its step's peaks, over fake tensors and few layers: the process that ``planner`` starts.

``python -m torchtune_adaptive.fake_plan OUTPUT`` reads a request as JSON from standard input, and writes its answer as
JSON to the file OUTPUT: peaks, or why there are none.
"""

import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

from torchtune_adaptive.errors import InputError, reason_of
from torchtune_adaptive.memory.timeline import Timeline, sum_of_timelines
from torchtune_adaptive.plan.calibration import make_trainer
from torchtune_adaptive.plan.fake_recipe import FakeRecipe
from torchtune_adaptive.plan.layer_extrapolation import of_more_layers
from torchtune_adaptive.plan.step_peaks import Lines, StepPeaks, TracedStep
from torchtune_adaptive.plan.trace import CUDA_GRANULARITY_BYTES, StepTrace
from torchtune_adaptive.refuse import refuse_long_rows
from torchtune_adaptive.search.strategies import SMALL_BATCH_SIZES

# First and last layers differ from those between, and in some models every second one does.
_FEWEST_LAYERS, _PERIOD = 4, 2
_FEWEST_LAYERS_OFFLOADING = 8  # the stash of activations holds those of five

Timelines = dict[str, Timeline]


def trace_config(
    cfg: DictConfig, *, world_size: int, seq_lens: Sequence[int], shows_progress: bool = False
) -> TracedStep:
    """Peaks of the first rank's step for rows of each of ``seq_lens`` tokens.

    Layers repeat: two models of a few layers give the one of all, and a third one shows whether they do. If not, the
    whole model is traced.

    Raises:
        InputError: the config cannot be planned; the message says why.
    """
    with _Steps(cfg, world_size=world_size, shows_progress=shows_progress) as steps:
        layers = steps.layers_that_tell(seq_lens[0])
        lengths = len(set(seq_lens))
        steps.expect((lengths + min(lengths, 2) * len(SMALL_BATCH_SIZES)) * len(layers))
        peaks = steps.peaks(seq_lens, layers)
        figures = steps.figures(layers)  # after steps, which made the optimizers' state
    return TracedStep(peaks, num_layers=steps.num_layers, traced_layers=layers, **figures)


def trace_layers(cfg: DictConfig, *, world_size: int, seq_len: int) -> tuple[int, ...]:
    """The numbers of layers of the models by which ``trace_config`` tells the whole one, or its own number alone."""
    with _Steps(cfg, world_size=world_size, shows_progress=False) as steps:
        return steps.layers_that_tell(seq_len)


class _Steps:
    """Traces steps of one config's model, built with more or fewer layers.

    Attributes:
        num_layers: layers of the whole model.
    """

    def __init__(self, cfg: DictConfig, *, world_size: int, shows_progress: bool) -> None:
        self._cfg = cfg
        self._world_size = world_size
        self._recipes: dict[int, FakeRecipe] = {}
        self._traced: dict[tuple[int, int, int], Timelines] = {}  # some are asked for twice
        self._progress = tqdm(desc="tracing", unit=" steps", disable=not shows_progress)
        offloading = cfg.get("enable_activation_offloading", False)
        self._fewest_layers = _FEWEST_LAYERS_OFFLOADING if offloading else _FEWEST_LAYERS
        try:
            self.num_layers = self._recipe(self._fewest_layers).true_num_layers
        except InputError:  # of a model that cannot be built with few layers, or not at all
            self.num_layers = self._recipe(None).num_layers

    def __enter__(self) -> "_Steps":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()

    def expect(self, more: int) -> None:
        """Show that so many more steps will be traced."""
        self._progress.total = self._progress.n + more

    def layers_that_tell(self, seq_len: int) -> tuple[int, ...]:
        """Two numbers of layers from which that of the whole model follows, or that one alone."""
        few = self._fewest_layers + self.num_layers % _PERIOD
        layers = few, few + _PERIOD
        third = few + 2 * _PERIOD
        # Selective checkpointing wraps every n-th layer, of which few layers may have none.
        buildable = self._fewest_layers in self._recipes and self._cfg.get("ac_mode", None) is None
        if not buildable or third >= self.num_layers or self._recipe(few).num_layers != few:
            return (self.num_layers,)
        batch_size = SMALL_BATCH_SIZES[0]
        told = self._extrapolated(layers, third, batch_size, seq_len)
        if told is None or _peaks(told) != _peaks(self._timelines(third, batch_size, seq_len)):
            return (self.num_layers,)
        # Two other models must tell the same of the whole: the first two might tell only what they have themselves.
        whole, others = (
            self._extrapolated(pair, self.num_layers, batch_size, seq_len) for pair in (layers, (layers[1], third))
        )
        alike = whole is not None and others is not None and _peaks(whole) == _peaks(others)
        return layers if alike else (self.num_layers,)

    def peaks(self, seq_lens: Sequence[int], layers: tuple[int, ...]) -> tuple[StepPeaks, ...]:
        """Peaks of the whole model's step by the length of rows, told by models of so many ``layers``.

        The shortest and the longest length tell those between.
        """
        short_len, long_len = min(seq_lens), max(seq_lens)
        ends = {seq_len: self._lines(seq_len, layers) for seq_len in (short_len, long_len)}
        found: list[StepPeaks] = []
        for seq_len in seq_lens:
            lines = ends.get(seq_len)
            if lines is None:
                short, long = ends[short_len], ends[long_len]
                lines = short.between(seq_len, own_len=short_len, other=long, other_len=long_len)
            lines = lines or self._lines(seq_len, layers)
            single = self._told(layers, 1, seq_len)
            found.append(StepPeaks.from_lines(seq_len, single=single, growing=lines))
        return tuple(found)

    def _lines(self, seq_len: int, layers: tuple[int, ...]) -> Lines:
        small, large = (self._told(layers, batch_size, seq_len) for batch_size in SMALL_BATCH_SIZES)
        lines = Lines.from_timelines(small, large)
        if lines is None:
            raise InputError(
                f"The model must run the same operations at batch sizes {' and '.join(map(str, SMALL_BATCH_SIZES))}"
                f" to be planned, but does not (rows of {seq_len} tokens)."
            )
        return lines

    def _told(self, layers: tuple[int, ...], batch_size: int, seq_len: int) -> Timelines:
        """The whole model's timelines."""
        told = self._extrapolated(layers, self.num_layers, batch_size, seq_len) if len(layers) > 1 else None
        return told or self._timelines(self.num_layers, batch_size, seq_len)

    def figures(self, layers: tuple[int, ...]) -> dict[str, int]:
        """What else is a line in the number of layers, for the whole model."""
        few, more = self._recipe(layers[0]).figures(), self._recipe(layers[-1]).figures()
        periods = (self.num_layers - layers[0]) // _PERIOD
        return {name: few[name] + periods * (more[name] - few[name]) for name in few}

    def _extrapolated(
        self, layers: tuple[int, ...], num_layers: int, batch_size: int, seq_len: int
    ) -> Timelines | None:
        few, more = (self._timelines(count, batch_size, seq_len) for count in layers)
        told: Timelines = {}
        for kind in few:
            timeline = of_more_layers(few[kind], more[kind], layers=(layers[0], layers[1]), num_layers=num_layers)
            if timeline is None:
                return None
            told[kind] = timeline
        return told

    def _timelines(self, num_layers: int, batch_size: int, seq_len: int) -> Timelines:
        key = num_layers, batch_size, seq_len
        if key not in self._traced:
            self._traced[key] = self._trace(*key)
        return self._traced[key]

    def _trace(self, num_layers: int, batch_size: int, seq_len: int) -> Timelines:
        refuse_long_rows(seq_len, self._recipe(num_layers).model)
        self._progress.set_postfix_str(f"{num_layers} layers, batch {batch_size} of {seq_len} tokens")
        timelines = self._recipe(num_layers).trace(batch_size, seq_len).timelines(batch_size)
        self._progress.update()
        return timelines

    def _recipe(self, num_layers: int | None) -> FakeRecipe:
        """The recipe with so many layers; None: all."""
        if num_layers is None or num_layers not in self._recipes:
            try:
                recipe = FakeRecipe(self._cfg, world_size=self._world_size, num_layers=num_layers)
            except InputError:
                raise
            except Exception as error:  # the config's components are anyone's code: whatever it raises is reported
                raise InputError(
                    f"The config must be one that its recipe can set up, but failed: {reason_of(error)}."
                ) from error
            num_layers = num_layers or recipe.num_layers
            self._recipes[num_layers] = recipe
        return self._recipes[num_layers]


def _peaks(timelines: Timelines) -> dict[str, int]:
    """Peak of each phase."""
    total = sum_of_timelines(timelines.values())
    peaks: dict[str, int] = {}
    for phase, live_bytes in zip(total.phases, total.live_bytes, strict=True):
        peaks[phase] = max(live_bytes, peaks.get(phase, 0))
    return peaks


def trace_calibration(batch_size: int, seq_len: int) -> int:
    """Peak bytes of a steady train step of the model that a calibration trains."""
    trace = StepTrace(granularity_bytes=CUDA_GRANULARITY_BYTES)
    with FakeTensorMode():
        trainer = make_trainer(torch.device("cpu"))
        tokens_BS = torch.zeros(batch_size, seq_len, dtype=torch.long)
        trainer.train_step(tokens_BS)
        trace.mark([list(trainer.model.parameters()), list(trainer.model.buffers()), tokens_BS], "parameters")
        trace.mark([list(state.values()) for state in trainer.optimizer.state.values()], "optimizer state")
        with trace:
            trainer.train_step(tokens_BS)
    return max(sum_of_timelines(trace.timelines(batch_size).values()).live_bytes)


def main() -> None:
    """Answer the request on standard input."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    request: dict[str, Any] = json.load(sys.stdin)
    try:
        if "config" in request:
            answer = trace_config(OmegaConf.create(request.pop("config")), **request).as_json()
        else:
            answer = {"peak_bytes": trace_calibration(**request)}
    except InputError as error:
        answer = {"refused": str(error)}
    Path(sys.argv[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
