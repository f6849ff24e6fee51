"""Plan which batch sizes of a config fit on its ranks' devices, without a device."""

from dataclasses import dataclass

from omegaconf import DictConfig

from torchtune_adaptive.engine.search.strategies import round_down_to_power_of_two
from torchtune_adaptive.errors import require_integer
from torchtune_adaptive.plan.decide import BatchSizes, Device, LengthPlan, Plan
from torchtune_adaptive.plan.gpu import Card, Overhead
from torchtune_adaptive.plan.host_memory import HostPlan, plan_host
from torchtune_adaptive.plan.trace.step_events import StepEvents, TracedStep
from torchtune_adaptive.plan.trace.tracer import Tracer
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.stock.configs import data_parallel_ranks, resolved
from torchtune_adaptive.training.batch.rank_shares import check_samples_per_step, largest_share

# Row lengths to plan if neither the user nor the config gives any.
USUAL_SEQ_LENS = (2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class ConfigLaunch:
    """What to plan: a config on ``world_size`` ranks with a ``card`` each.

    Attributes:
        title: the config's name.
        seq_lens: tokens per row; each length is planned.
        batch_sizes: rows per rank to plan beside those that fit.
        ranks_of_machine: ranks per machine, for its host memory; None: all are on one machine.
        has_group: a single rank has a process group, too, as in recipes for several.
    """

    title: str
    cfg: DictConfig
    card: Card
    world_size: int = 1
    ranks_of_machine: int | None = None
    seq_lens: tuple[int, ...]
    batch_sizes: tuple[int, ...] = ()
    has_group: bool = True

    @property
    def on_cpu(self) -> bool:
        """Whether the config trains on the CPU."""
        return str(self.cfg.device).startswith("cpu")

    def plan(self, tracer: Tracer) -> Plan:
        """Trace the step and decide what fits.

        Raises:
            InputError: the config cannot be planned; the message says why.
        """
        settings = AdaptiveSettings.from_cfg(self.cfg)
        run = _Run.of(self.cfg, settings, ranks=data_parallel_ranks(self.cfg, self.world_size))
        step = tracer.step(as_traced(self.cfg, settings), world_size=self.world_size, seq_lens=self.seq_lens)
        device = self._device(settings)
        lengths = tuple(self._length(run, one, step.sequences, device) for one in step.lengths)
        host = self._host(settings, step, lengths)
        images = "images" if step.images > 1 else "image"
        assumed = f"Assumed: {step.images} {images} of {step.tiles} tiles per row." if step.images else ""
        return Plan(
            title=self.title,
            world_size=self.world_size,
            device=device,
            step=step,
            lengths=lengths,
            host=host,
            assumptions=" ".join(filter(None, (assumed, device.overhead.note))),
        )

    def _device(self, settings: AdaptiveSettings) -> Device:
        return Device(
            name=self.card.name,
            memory_bytes=self.card.memory_bytes,
            allocator_limit_bytes=settings.memory_limit_bytes,
            margin=settings.margin,
            overhead=Overhead() if self.on_cpu else self.card.overhead(self.world_size, has_group=self.has_group),
        )

    def _length(self, run: "_Run", step: StepEvents, sequences: int, device: Device) -> LengthPlan:
        sizes = BatchSizes(step, device)
        row_tokens = sequences * step.seq_len
        used = run.rows(sizes.largest, row_tokens=row_tokens)
        tokens = row_tokens * run.samples_per_step(sizes.largest)
        return sizes.plan(used=used, searches=run.settings.searches, tokens_per_step=tokens, asked=self.batch_sizes)

    def _host(self, settings: AdaptiveSettings, step: TracedStep, lengths: tuple[LengthPlan, ...]) -> HostPlan:
        """Host memory with the largest of the shown sizes."""
        sizes = [size for length in lengths for size in length.shown]
        return plan_host(
            step.host,
            world_size=self.world_size,
            ranks=self.ranks_of_machine or self.world_size,
            on_cpu=self.on_cpu,
            saves_state=self.cfg.get("epochs", 1) != 1,
            saves_in_background=settings.save_in_background or self.cfg.get("enable_async_checkpointing", False),
            step_bytes=max(size.allocated_bytes for size in sizes),
            num_tokens=max(size.batch_size * step.sequences * (size.seq_len or 0) for size in sizes),
        )


def as_traced(cfg: DictConfig, settings: AdaptiveSettings) -> DictConfig:
    """Return ``cfg`` with two micro-steps per optimizer step if training may use any number of them.

    Two need as much memory as more: from the second one on, gradients of earlier micro-steps are in memory.
    """
    return DictConfig(resolved(cfg) | {"gradient_accumulation_steps": 2}) if settings.may_cut else cfg


@dataclass(frozen=True)
class _Run:
    """Which batch a run with these settings uses; see ``SizeFinder``, which does the same for a real run.

    Attributes:
        batch_size: the config's; None if it has none, which only a search allows.
        micro_steps: of an optimizer step, by the config.
    """

    settings: AdaptiveSettings
    ranks: int
    batch_size: int | None
    micro_steps: int

    @classmethod
    def of(cls, cfg: DictConfig, settings: AdaptiveSettings, *, ranks: int) -> "_Run":
        """The run of ``cfg`` on ``ranks`` ranks with different samples.

        Raises:
            InputError: the config does not say how many samples a step has.
        """
        batch_size, micro_steps = cfg.get("batch_size"), cfg.get("gradient_accumulation_steps", 1)
        if batch_size is not None or not settings.use_maximum_batch_size:
            require_integer("batch_size", batch_size, minimum=1)
        if settings.global_batch_size is not None:
            check_samples_per_step(settings.global_batch_size, ranks=ranks)
        micro_steps = require_integer("gradient_accumulation_steps", micro_steps, minimum=1)
        return cls(settings, ranks, batch_size, micro_steps)

    def rows(self, largest: int | None, *, row_tokens: int) -> int:
        """Rows per rank of a micro-step, if ``largest`` fit (None: any). At least 1, so that there are figures."""
        wanted, budget = self._wanted(largest), self.settings.max_tokens_per_micro_batch
        if budget is not None:
            in_step = self._share or wanted * self.micro_steps
            allowed = largest if budget == "auto" else budget // row_tokens
            return max(1, in_step if allowed is None else min(in_step, allowed))
        if self.settings.searches and wanted > (self._most(largest) or wanted):
            return self._found(largest)
        return wanted

    def samples_per_step(self, largest: int | None) -> int:
        """Samples of an optimizer step over all ranks, if ``largest`` rows of a rank fit."""
        return self.settings.global_batch_size or self._wanted(largest) * self.micro_steps * self.ranks

    def _wanted(self, largest: int | None) -> int:
        """Rows of a micro-step as far as neither memory nor a token budget makes them fewer."""
        if self.settings.use_maximum_batch_size:
            return self._share or self._found(largest)
        assert self.batch_size is not None  # or ``of`` would have refused it
        return min(self.batch_size, self._share or self.batch_size)

    def _found(self, largest: int | None) -> int:
        """What a search returns; at least 1."""
        most = self._most(largest) or 1
        return round_down_to_power_of_two(most) if self.settings.power_of_two else most

    def _most(self, largest: int | None) -> int | None:
        """The most rows that fit and are allowed."""
        return min((bound for bound in (largest, self.settings.max_batch_size) if bound is not None), default=None)

    @property
    def _share(self) -> int | None:
        """Rows of a rank in an optimizer step of ``global_batch_size`` samples."""
        samples = self.settings.global_batch_size
        return None if samples is None else largest_share(samples, ranks=self.ranks)


def row_lengths(cfg: DictConfig, settings: AdaptiveSettings) -> tuple[int, ...]:
    """Row lengths to plan if the user gives none: those of the config, else the usual ones.

    Raises:
        InputError: the config's length is not a whole number from 1 up.
    """
    if settings.seq_len is not None:
        return (settings.seq_len,)
    tokenizer_len, model_len = (_max_seq_len(cfg, block) for block in ("tokenizer", "model"))
    if tokenizer_len is not None:
        return (tokenizer_len,)
    return tuple(length for length in USUAL_SEQ_LENS if model_len is None or length <= model_len) or (model_len or 1,)


def _max_seq_len(cfg: DictConfig, block: str) -> int | None:
    values = cfg.get(block)
    length = values.get("max_seq_len") if isinstance(values, DictConfig) else None
    return None if length is None else require_integer(f"{block}.max_seq_len", length, minimum=1)
