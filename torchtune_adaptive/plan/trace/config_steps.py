"""Trace train steps of a config on fake tensors, with few of the model's layers where they repeat."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.engine.memory.out_of_memory import only_new_garbage
from torchtune_adaptive.engine.memory.timeline import Timeline, sum_of_timelines
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.search.strategies import SMALL_BATCH_SIZES
from torchtune_adaptive.errors import InputError, TracingError
from torchtune_adaptive.plan.host_memory import HostFigures
from torchtune_adaptive.plan.trace.as_cuda import computed_as_on_cuda
from torchtune_adaptive.plan.trace.fake_recipe import FakeRecipe
from torchtune_adaptive.plan.trace.fake_step import treated_as_real
from torchtune_adaptive.plan.trace.layer_extrapolation import extrapolate_layers
from torchtune_adaptive.plan.trace.peaks import StepLines, StepPeaks, TracedStep
from torchtune_adaptive.plan.trace.restored import fake_process_group, settings_restored
from torchtune_adaptive.plan.trace.untraceable import why_untraceable
from torchtune_adaptive.training.batch.row_format import check_row_length

# The first and the last layer differ from those between, and in some models every second layer differs from its
# neighbours, or every n-th one is fused with images.
_FEWEST_LAYERS, _PERIOD = 4, 2
_ROWS_TO_CHECK, _ROUNDING = 5, 1e-4
_FEWEST_LAYERS_OFFLOADING = 8  # activation offloading keeps the activations of five layers

Timelines = dict[str, Timeline]  # by kind of memory


def trace_config(
    cfg: DictConfig, *, world_size: int, seq_lens: Sequence[int], shows_progress: bool = False
) -> TracedStep:
    """Trace the step of rank 0 for rows of each of ``seq_lens`` tokens.

    If layers repeat, two models of a few layers are traced and the whole model is extrapolated from them. A third model
    checks that layers do repeat. Otherwise the whole model is traced. If a method has several models of equal depth,
    all are traced with few layers. Models of different depths are traced whole.

    Raises:
        InputError: the config cannot be planned; the message says why.
    """
    with steps_of(cfg, world_size=world_size, shows_progress=shows_progress) as steps:
        layers = steps.layers_to_trace(seq_lens[0])
        peaks = steps.peaks(seq_lens, layers)
        figures = steps.figures(layers)  # after the steps, which create the optimizer state
        host = steps.host_figures(layers)
        return TracedStep(peaks, num_layers=steps.num_layers, traced_layers=layers, host=host, **figures)


def trace_whole_step(cfg: DictConfig, *, world_size: int, batch_size: int, seq_len: int) -> Timelines:
    """Trace one step of rank 0 with all layers of the model. Errors are those of ``trace_config``."""
    with steps_of(cfg, world_size=world_size) as steps:
        return steps.timelines(steps.num_layers, batch_size, seq_len)


@contextmanager
def steps_of(cfg: DictConfig, *, world_size: int, shows_progress: bool = False) -> Iterator["ConfigSteps"]:
    """Context: traces steps of ``cfg``. Afterwards torch is as before.

    Raises:
        InputError: the config cannot be planned, or code that it names fails; the message says why.
    """
    failed: BaseException
    try:
        with ExitStack() as stack:
            stack.enter_context(settings_restored())
            stack.enter_context(fake_process_group(world_size))
            if str(cfg.device).startswith("cuda"):
                stack.enter_context(computed_as_on_cuda(compiles=cfg.get("compile", False)))
            stack.enter_context(treated_as_real())
            stack.enter_context(only_new_garbage())
            progress = stack.enter_context(Bar(desc="tracing", unit=" steps", disable=not shows_progress))
            yield ConfigSteps(cfg, progress)
            return
    except KeyboardInterrupt:
        raise
    except InputError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # during the set-up, where any error is refused
            raise error.__cause__ from None
        raise
    except BaseException as error:  # code that the config names may end the process
        failed = error
    raise TracingError(f"A train step of the config cannot be traced: {why_untraceable(failed)}.") from failed


class ConfigSteps:
    """Traces steps of one config's model, built with all or only a few of its layers.

    Attributes:
        num_layers: number of layers of the whole trained model.
    """

    def __init__(self, cfg: DictConfig, progress: Any) -> None:
        self._cfg = cfg
        self._recipes: dict[int, FakeRecipe] = {}
        self._traced: dict[tuple[int, int, int], Timelines] = {}  # by layers, batch size and tokens per row
        self._progress = progress
        offloading = cfg.get("enable_activation_offloading", False)
        self._fewest_layers = _FEWEST_LAYERS_OFFLOADING if offloading else _FEWEST_LAYERS
        self._period = _PERIOD
        # Selective checkpointing wraps every n-th layer, and a small model may have no such layer.
        self._grows = cfg.get("ac_mode", None) is None
        try:
            recipe = self._recipe(self._fewest_layers)
            self.num_layers = recipe.true_num_layers
            if recipe.fusion_interval:
                self._period = recipe.fusion_interval
                self._fewest_layers = max(self._fewest_layers, 3 * self._period)
        except InputError:  # the models cannot be built with few layers, or not at all
            self.num_layers = self._recipe(None).num_layers
            self._grows = False

    def layers_to_trace(self, seq_len: int) -> tuple[int, ...]:
        """Choose the numbers of layers of the models to trace: two small models, or only the whole model.

        Two small models are enough under two conditions: the peaks extrapolated from them are exact for a third small
        model, and the second and the third give the same peaks for the whole model.
        """
        first = self._fewest_layers + self.num_layers % self._period
        second, third = first + self._period, first + 2 * self._period
        if not self._grows or third >= self.num_layers or self._recipe(first).num_layers != first:
            return (self.num_layers,)
        batch_size = SMALL_BATCH_SIZES[0]

        def extrapolated_peaks(layers: tuple[int, int], num_layers: int) -> dict[str, int] | None:
            timelines = self._extrapolated(layers, num_layers, batch_size, seq_len)
            return None if timelines is None else _peaks(timelines)

        third_peaks = extrapolated_peaks((first, second), third)
        if third_peaks is None or third_peaks != _peaks(self.timelines(third, batch_size, seq_len)):
            return (self.num_layers,)
        whole_peaks = extrapolated_peaks((first, second), self.num_layers)
        if whole_peaks is None or whole_peaks != extrapolated_peaks((second, third), self.num_layers):
            return (self.num_layers,)
        return first, second

    def peaks(self, seq_lens: Sequence[int], layers: tuple[int, ...]) -> tuple[StepPeaks, ...]:
        """Peaks of the whole model's step for each row length, from models with these numbers of ``layers``.

        Batches of several rows are traced only for the shortest and the longest length, and interpolated for the
        others.
        """
        shortest, longest = min(seq_lens), max(seq_lens)
        self._progress.reset(total=self._num_steps(seq_lens, layers))
        traced = {seq_len: self._lines(seq_len, layers) for seq_len in (shortest, longest)}
        with_images = self._recipe(layers[0]).fusion_interval > 0
        found: list[StepPeaks] = []
        for seq_len in seq_lens:
            lines = traced.get(seq_len)
            lines = lines or traced[shortest].interpolated(seq_len, traced[longest], with_images=with_images)
            if lines is None:  # the two lengths ran different operations
                lines = self._lines(seq_len, layers)
            found.append(StepPeaks.from_lines(lines, single_row=self._whole(layers, 1, seq_len)))
        return tuple(found)

    def figures(self, layers: tuple[int, ...]) -> dict[str, int]:
        """Figures of the whole model that grow linearly with its number of layers."""
        return self._grown(layers, lambda recipe: recipe.figures())

    def host_figures(self, layers: tuple[int, ...]) -> HostFigures:
        """Figures of the whole model's host memory."""
        return HostFigures.from_flat(self._grown(layers, lambda recipe: recipe.host_figures()))

    def _grown(self, layers: tuple[int, ...], figures_of: Callable[[FakeRecipe], dict[str, int]]) -> dict[str, int]:
        few, more = (figures_of(self._recipe(num_layers)) for num_layers in (layers[0], layers[-1]))
        periods = (self.num_layers - layers[0]) // self._period
        return {name: few[name] + periods * (more[name] - few[name]) for name in few}

    def _num_steps(self, seq_lens: Sequence[int], layers: tuple[int, ...]) -> int:
        """Number of steps that ``peaks`` still has to trace if it can interpolate."""
        batches = {(batch_size, end) for batch_size in SMALL_BATCH_SIZES for end in (min(seq_lens), max(seq_lens))}
        batches |= {(1, seq_len) for seq_len in seq_lens}
        steps = {(num_layers, *batch) for num_layers in layers for batch in batches}
        return len(steps - self._traced.keys())

    def _lines(self, seq_len: int, layers: tuple[int, ...]) -> StepLines:
        small, large = (self._whole(layers, batch_size, seq_len) for batch_size in SMALL_BATCH_SIZES)
        lines = StepLines.from_timelines(small, large, seq_len=seq_len)
        if lines is None:
            sizes = " than with ".join(map(str, SMALL_BATCH_SIZES))
            raise InputError(f"A step cannot be planned that runs other operations with {sizes} rows.")
        if next(iter(small.values())).operations != lines.operations:  # they go through passes of loops over rows
            self._check_passes(lines, layers)
        return lines

    def _check_passes(self, lines: StepLines, layers: tuple[int, ...]) -> None:
        """Compare the peaks with those of a step with more rows. The allocator rounds up bytes of both."""
        rows, seq_len = _ROWS_TO_CHECK, lines.seq_len
        forecast = StepPeaks.from_lines(lines, single_row=self._whole(layers, 1, seq_len)).phases(rows)
        traced = _peaks(self._whole(layers, rows, seq_len))
        if not all(math.isclose(forecast[phase], peak, rel_tol=_ROUNDING) for phase, peak in traced.items()):
            raise InputError(
                f"A step cannot be planned whose memory with {rows} rows of {seq_len} tokens does not follow from that"
                " with fewer rows."
            )

    def _whole(self, layers: tuple[int, ...], batch_size: int, seq_len: int) -> Timelines:
        """The whole model's timelines: extrapolated from two models, else traced."""
        found = None
        if len(layers) > 1:
            found = self._extrapolated((layers[0], layers[1]), self.num_layers, batch_size, seq_len)
        return found or self.timelines(self.num_layers, batch_size, seq_len)

    def _extrapolated(
        self, layers: tuple[int, int], num_layers: int, batch_size: int, seq_len: int
    ) -> Timelines | None:
        """Timelines of a model with ``num_layers`` layers; None if the layers of the two models do not repeat."""
        few, more = (self.timelines(count, batch_size, seq_len) for count in layers)
        found: Timelines = {}
        for kind in few:
            timeline = extrapolate_layers(few[kind], more[kind], layers=layers, num_layers=num_layers)
            if timeline is None:
                return None
            found[kind] = timeline
        return found

    def timelines(self, num_layers: int, batch_size: int, seq_len: int) -> Timelines:
        """Timelines of a traced step of a model with ``num_layers`` layers. It is traced only once."""
        key = num_layers, batch_size, seq_len
        if key not in self._traced:
            recipe = self._recipe(num_layers)
            for model in recipe.models:
                check_row_length(seq_len, model)
            self._progress.set_postfix_str(f"{num_layers} layers, batch {batch_size} of {seq_len} tokens")
            self._traced[key] = recipe.trace(batch_size, seq_len).timelines(batch_size)
            self._progress.update()
        return self._traced[key]

    def _recipe(self, num_layers: int | None) -> FakeRecipe:
        """The recipe with a model of ``num_layers`` layers (None: all). It is built only once."""
        if num_layers is None or num_layers not in self._recipes:
            recipe = FakeRecipe(self._cfg, num_layers=num_layers)
            num_layers = num_layers or recipe.num_layers
            self._recipes[num_layers] = recipe
        return self._recipes[num_layers]


def _peaks(timelines: Timelines) -> dict[str, int]:
    """Peak bytes of each phase, over all kinds."""
    total = sum_of_timelines(timelines.values())
    peaks: dict[str, int] = {}
    for phase, live_bytes in zip(total.phases, total.live_bytes, strict=True):
        peaks[phase] = max(live_bytes, peaks.get(phase, 0))
    return peaks
