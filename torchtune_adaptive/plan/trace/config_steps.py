"""Trace train steps of a config on fake tensors, with few of the model's layers where they repeat."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from omegaconf import DictConfig

from torchtune_adaptive.engine.memory.out_of_memory import only_new_garbage
from torchtune_adaptive.engine.progress import Bar
from torchtune_adaptive.engine.search.strategies import SMALL_BATCH_SIZES
from torchtune_adaptive.errors import InputError, TracingError
from torchtune_adaptive.plan.host_memory import HostFigures
from torchtune_adaptive.plan.trace.as_cuda import computed_as_on_cuda
from torchtune_adaptive.plan.trace.events import Events, extended, with_bytes_of
from torchtune_adaptive.plan.trace.fake_recipe import FakeRecipe
from torchtune_adaptive.plan.trace.fake_step import treated_as_real
from torchtune_adaptive.plan.trace.restored import fake_process_group, settings_restored
from torchtune_adaptive.plan.trace.step_events import StepEvents, TracedStep
from torchtune_adaptive.plan.trace.untraceable import why_untraceable
from torchtune_adaptive.training.batch.row_format import check_row_length

# The first and the last layer differ from those between, and in some models every second layer differs from its
# neighbours, or every n-th one is fused with images.
_FEWEST_LAYERS, _PERIOD = 4, 2
_FEWEST_LAYERS_OFFLOADING = 8  # activation offloading keeps the activations of five layers
_FEWEST_PASSES = 3  # of a loop over rows, whose first and last pass differ from those between


def trace_config(
    cfg: DictConfig, *, world_size: int, seq_lens: Sequence[int], shows_progress: bool = False
) -> TracedStep:
    """Trace the step of rank 0 for rows of each of ``seq_lens`` tokens.

    If layers repeat, two models of a few layers are traced, from which the whole model's events follow. A third model
    checks that layers do repeat. Otherwise the whole model is traced. If a method has several models of equal depth,
    all are traced with few layers. Models of different depths are traced whole.

    Raises:
        InputError: the config cannot be planned; the message says why.
    """
    with steps_of(cfg, world_size=world_size, shows_progress=shows_progress) as steps:
        layers = steps.layers_to_trace(seq_lens[0])
        lengths = steps.lengths(seq_lens, layers)
        figures = steps.grown(layers, FakeRecipe.figures)  # after the steps, which create the optimizer state
        host = HostFigures.from_flat(steps.grown(layers, FakeRecipe.host_figures))
        return TracedStep(lengths, num_layers=steps.num_layers, traced_layers=layers, host=host, **figures)


@contextmanager
def steps_of(cfg: DictConfig, *, world_size: int, shows_progress: bool = False) -> Iterator["ConfigSteps"]:
    """Context: traces steps of ``cfg``. Afterwards torch is as before.

    Raises:
        InputError: the config cannot be planned, or code that it names fails; the message says why.
    """
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
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # code that the config names may end the process
        raise TracingError(f"A train step of the config cannot be traced: {why_untraceable(error)}.") from error


class ConfigSteps:
    """Traces steps of one config's model, built with all or only a few of its layers.

    Attributes:
        num_layers: number of layers of the whole trained model.
    """

    def __init__(self, cfg: DictConfig, progress: Any) -> None:
        self._cfg = cfg
        self._recipes: dict[int, FakeRecipe] = {}
        self._traced: dict[tuple[int, int, int], Events] = {}  # by layers, batch size and tokens per row
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

        Two small models are enough if the events of a third one follow from theirs.
        """
        first = self._fewest_layers + self.num_layers % self._period
        second, third = first + self._period, first + 2 * self._period
        if not self._grows or third >= self.num_layers or self._recipe(first).num_layers != first:
            return (self.num_layers,)
        few, more, most = (self.events(layers, SMALL_BATCH_SIZES[0], seq_len) for layers in (first, second, third))
        return (first, second) if extended(few, more, 2) == most else (self.num_layers,)

    def lengths(self, seq_lens: Sequence[int], layers: tuple[int, ...]) -> tuple[StepEvents, ...]:
        """The whole model's step for each row length, from models with these numbers of ``layers``."""
        self._progress.reset(total=self._num_steps(seq_lens, layers))
        return tuple(self._step(seq_len, layers) for seq_len in seq_lens)

    def grown(self, layers: tuple[int, ...], figures_of: Callable[[FakeRecipe], dict[str, int]]) -> dict[str, int]:
        """Figures of the whole model that grow linearly with its number of layers."""
        few, more = (figures_of(self._recipe(num_layers)) for num_layers in (layers[0], layers[-1]))
        periods = (self.num_layers - layers[0]) // self._period
        return {name: few[name] + periods * (more[name] - few[name]) for name in few}

    def _num_steps(self, seq_lens: Sequence[int], layers: tuple[int, ...]) -> int:
        """Number of steps that ``lengths`` still has to trace if few layers and rows are enough."""
        steps = {(layers[0], rows, seq_len) for rows in (1, *SMALL_BATCH_SIZES) for seq_len in seq_lens}
        return len(steps - self._traced.keys()) + len(layers) - 1  # a step of one row often has other events

    def _step(self, seq_len: int, layers: tuple[int, ...]) -> StepEvents:
        """The step of a length, with as many rows as it takes for those of more rows to follow.

        Raises:
            InputError: they do not follow from up to ``_FEWEST_PASSES`` + 1 rows.
        """
        fewest = min(layers)
        periods = (self.num_layers - fewest) // self._period if len(layers) > 1 else 0
        for most in range(SMALL_BATCH_SIZES[1], _FEWEST_PASSES + 2):
            traced = {rows: self._of_layers(layers, rows, seq_len) for rows in range(1, most + 1)}
            loads = tuple(self._recipe(number).loads for number in layers)
            step = StepEvents(seq_len, traced, periods, loads=loads)
            if step.follows(1) and step.follows(most + 1) and self._is_confirmed(step, fewest):
                return step
        if len(layers) > 1:
            return self._step(seq_len, (self.num_layers,))
        raise InputError(
            f"A step cannot be planned whose memory with more rows does not follow from that with {_FEWEST_PASSES} and"
            f" {_FEWEST_PASSES + 1} rows of {seq_len} tokens."
        )

    def _of_layers(self, layers: tuple[int, ...], batch_size: int, seq_len: int) -> tuple[Events, ...]:
        """Events of a step of the models with these numbers of layers.

        Those of the second model are worked out from the first one's, if another size or length was traced of both and
        changed nothing but bytes.
        """
        few = self.events(layers[0], batch_size, seq_len)
        if len(layers) == 1:
            return (few,)
        if (layers[1], batch_size, seq_len) not in self._traced:
            for (num_layers, rows, length), more in list(self._traced.items()):
                known = self._traced.get((layers[0], rows, length))
                if num_layers == layers[1] and known and (found := with_bytes_of(few, known, more)):
                    return few, found
        return few, self.events(layers[1], batch_size, seq_len)

    def _is_confirmed(self, step: StepEvents, num_layers: int) -> bool:
        """Whether, if a step loops over rows, one of more rows has the events that follow for it."""
        *_, small, large = sorted(step.traced)
        few, more = step.traced[small][0], step.traced[large][0]
        return len(few) == len(more) or extended(few, more, 2) == self.events(num_layers, large + 1, step.seq_len)

    def events(self, num_layers: int, batch_size: int, seq_len: int) -> Events:
        """Events of a traced step of a model with ``num_layers`` layers. It is traced only once."""
        key = num_layers, batch_size, seq_len
        if key not in self._traced:
            recipe = self._recipe(num_layers)
            for model in recipe.models:
                check_row_length(seq_len, model)
            self._progress.set_postfix_str(f"{num_layers} layers, batch {batch_size} of {seq_len} tokens")
            self._traced[key] = recipe.trace(batch_size, seq_len).events()
            self._progress.update()
        return self._traced[key]

    def _recipe(self, num_layers: int | None) -> FakeRecipe:
        """The recipe with a model of ``num_layers`` layers (None: all). It is built only once."""
        if num_layers is None or num_layers not in self._recipes:
            recipe = FakeRecipe(self._cfg, num_layers=num_layers)
            num_layers = num_layers or recipe.num_layers
            self._recipes[num_layers] = recipe
        return self._recipes[num_layers]
