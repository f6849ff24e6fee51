"""The batch size of a recipe: searched for before training, grown at epoch boundaries, set in one place."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtune import utils

from torchtune_adaptive.consensus import Consensus
from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.expectation import expected_batch_size
from torchtune_adaptive.finder import search
from torchtune_adaptive.horizon import Horizon
from torchtune_adaptive.meter import meter_for
from torchtune_adaptive.rate import follow, refuse_unfollowing
from torchtune_adaptive.refuse import (
    refuse_impossible_limit,
    refuse_large_start,
    refuse_long_rows,
    refuse_small_data,
    refuse_unsearchable,
    samples_per_step,
)
from torchtune_adaptive.report import AdaptiveReport, past_history, probe_table, summary
from torchtune_adaptive.schedule import Growth, next_batch_size, rehearse
from torchtune_adaptive.search import SearchResult
from torchtune_adaptive.settings import AdaptiveSettings
from torchtune_adaptive.snapshot import keep_random_states
from torchtune_adaptive.worst_case import Row, window_maker, worst_case_row

log = utils.get_logger("DEBUG")


class AdaptiveBatch:
    """Keeps the batch size of the stock recipe below it, and all that depends on it.

    The annotated attributes are the stock recipe's own, as its ``setup`` leaves them.
    """

    world_size: int
    epochs_run: int
    total_epochs: int
    max_steps_per_epoch: int | None
    global_step: int
    _device: torch.device
    _is_rank_zero: bool
    _model: nn.Module
    _optimizer: torch.optim.Optimizer
    _loss_fn: Any
    _tokenizer: Any
    _dataloader: Any  # a StatefulDataLoader over a StatefulDistributedSampler
    _lr_scheduler: Any
    _gradient_accumulation_steps: int
    _steps_per_epoch: int
    _output_dir: str
    _setup_lr_scheduler: Callable[..., Any]

    def __init__(self, cfg: DictConfig) -> None:
        self._adaptive = AdaptiveSettings.from_cfg(cfg)
        if self._adaptive.searches:
            refuse_unsearchable(cfg)
        super().__init__(cfg=cfg)  # pyright: ignore[reportCallIssue]
        if self._adaptive.searches:
            refuse_impossible_limit(self._adaptive, self._device)
        self._consensus = Consensus()

    def _adapt(self, cfg: DictConfig) -> None:
        """Set up the meter, and search for the batch size if the config asks for it. A collective."""
        limited = self._device.type == "cpu" and self._adaptive.memory_limit_bytes is not None  # there it costs time
        metered = limited or self._device.type == "cuda"
        self._meter = meter_for(self._device, self._model, self._optimizer) if metered else None
        self._report = AdaptiveReport(history=past_history(self._output_dir, before_epoch=self.epochs_run))
        self._probe_row: Row | None = None
        if self._adaptive.batch_increase_function is not None and self._lr_scheduler is not None:
            refuse_unfollowing(self._lr_scheduler)
        if self._adaptive.searches:
            with keep_random_states():  # the data set's transforms and the user's function may draw from them
                self._rehearse_growth(cfg.batch_size, maximum=None)
                self._start_from(self._search(cfg), cfg)
        if self._steps_per_epoch == 0:
            self._refuse_small_data(self._dataloader.batch_size)
        if self._meter is not None:
            self._meter.limit_bytes = self._adaptive.memory_limit_bytes
            self._meter.exact = False
            self._meter.reset()

    def _search(self, cfg: DictConfig) -> SearchResult:
        """The largest batch size that fits, by whole train steps on the longest rows. A collective."""
        assert self._meter is not None
        bound = self._samples_per_rank() // self._gradient_accumulation_steps
        if bound == 0:
            self._refuse_small_data(1)
        self._probe_row, seq_len = self._worst_row()
        result = search(
            self._probe_step,
            window_maker(self._probe_row, micro_batches=self._gradient_accumulation_steps),
            model=self._model,
            optimizer=self._optimizer,
            device=self._device,
            meter=self._meter,
            settings=self._adaptive,
            consensus=self._consensus,
            start=cfg.batch_size,
            bound=min(bound, self._adaptive.max_batch_size or bound),
            expected=expected_batch_size(
                cfg, seq_len=seq_len, settings=self._adaptive, meter=self._meter, consensus=self._consensus
            ),
        )
        self._renew_offloading()
        self._report.result, self._report.seq_len = result, seq_len
        utils.log_rank_zero(log, f"Probes as rank 0 saw them:\n{probe_table(result)}\n{summary(result, seq_len)}")
        return result

    def _worst_row(self) -> tuple[Row, int]:
        """The longest row that training can meet, and its tokens. A collective."""
        longest = getattr(self._tokenizer, "max_seq_len", None)
        row, seq_len = worst_case_row(
            self._dataloader.dataset,
            seq_len=self._adaptive.seq_len,
            tokenizer_max_seq_len=longest,
            consensus=self._consensus,
        )
        refuse_long_rows(seq_len, self._model)
        if longest is not None and seq_len < longest:
            utils.log_rank_zero(
                log, f"Rows may have {longest} tokens, but probes have {seq_len}: longer ones may not fit."
            )
        return row, seq_len

    def _probe_step(self, window: list[list[Row]]) -> None:
        """One optimizer step over ``window``."""
        self._renew_offloading()
        self._run_window(window)

    def _run_window(self, window: list[list[Row]]) -> Any:
        """One optimizer step over a window of micro-batches, come what may. A collective."""
        raise NotImplementedError

    def _renew_offloading(self) -> None:
        """Activation offloading keeps a step's tensors in its context, which a failed step leaves unusable."""
        self.activations_handling_ctx = type(self.activations_handling_ctx)()

    def _start_from(self, result: SearchResult, cfg: DictConfig) -> None:
        """Take up the batch size the search or the config gives, and where the schedule has brought it on resuming."""
        first = result.batch_size if self._adaptive.use_maximum_batch_size else cfg.batch_size
        refuse_large_start(first, result.exact_batch_size, bound=result.bound)
        self._maximum = result.batch_size
        growths = self._rehearse_growth(first, maximum=self._maximum)
        sizes = [growth.batch_size for growth in growths] or [first] * self.total_epochs
        present = sizes[self.epochs_run - 1] if self.epochs_run else first
        self._set_batch_size(first)
        self._restart_schedule(cfg, sizes[: self.epochs_run], present)
        reason = f"{result.strategy} search" if self._adaptive.use_maximum_batch_size else "config"
        self._decide(present, reason if not self.epochs_run else f"{reason}, resumed at epoch {self.epochs_run}")

    def _restart_schedule(self, cfg: DictConfig, past_sizes: list[int], present: int) -> None:
        """Build the learning rate schedule for the first batch size, and go to where past epochs have brought it."""
        first_steps = self._steps_per_epoch
        self._horizon = Horizon(first_steps)
        self.global_step = sum(self._steps_at(size) for size in past_sizes)
        if self._lr_scheduler is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = copy.deepcopy(group["initial_lr"])  # a tensor is changed in place: not to be shared
            self._lr_scheduler = self._setup_lr_scheduler(
                cfg_lr_scheduler=cfg.lr_scheduler,
                num_training_steps=self.total_epochs * first_steps,
                last_epoch=self.epochs_run * first_steps - 1,
            )
        if self._adaptive.batch_increase_function is None:
            return
        if self._lr_scheduler is not None:
            follow(self._lr_scheduler, self._horizon, step=self.global_step)
        self._set_batch_size(present)
        if self.epochs_run:
            self._horizon.change(epoch=self.epochs_run, step=self.global_step, steps_per_epoch=self._steps_per_epoch)

    def _before_epoch(self, epoch: int) -> None:
        """Ask the user's function for this epoch's increase, and follow it up to the maximum. A collective."""
        function = self._adaptive.batch_increase_function
        if function is None:
            return
        batch_size = self._dataloader.batch_size
        growth = self._consensus.ask_rank_zero(
            lambda: next_batch_size(function, epoch=epoch, batch_size=batch_size, maximum=self._maximum)
        )
        if growth.increment:
            utils.log_rank_zero(log, growth.reason)
        if growth.granted:
            self._set_batch_size(growth.batch_size)
            self._horizon.change(epoch=epoch, step=self.global_step, steps_per_epoch=self._steps_per_epoch)
            self._decide(growth.batch_size, growth.reason, epoch=epoch)

    def _rehearse_growth(self, batch_size: int, *, maximum: int | None) -> list[Growth]:
        """What the user's function, if there is one, will answer for every epoch. A collective."""
        function = self._adaptive.batch_increase_function
        if function is None:
            return []
        return self._consensus.ask_rank_zero(
            lambda: rehearse(function, total_epochs=self.total_epochs, batch_size=batch_size, maximum=maximum)
        )

    def _set_batch_size(self, batch_size: int) -> None:
        """The only writer of the batch size: data loader, steps per epoch and torchtune's label cache follow it."""
        loader = self._dataloader
        self._dataloader = StatefulDataLoader(
            loader.dataset,
            batch_size=batch_size,
            sampler=loader.sampler,
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
        )
        self._steps_per_epoch = self._steps_at(batch_size)
        self.ignore_labels_cache = torch.full((batch_size, 1), self._loss_fn.ignore_index, device=self._device)

    def _steps_at(self, batch_size: int) -> int:
        """Optimizer steps per epoch at ``batch_size`` rows per rank."""
        steps = self._samples_per_rank() // batch_size // self._gradient_accumulation_steps
        return steps if self.max_steps_per_epoch is None else min(steps, self.max_steps_per_epoch)

    def _samples_per_rank(self) -> int:
        return len(self._dataloader.sampler)

    def _decide(self, batch_size: int, reason: str, epoch: int | None = None) -> None:
        """Note a decision on the batch size in the report, aloud and on disk."""
        utils.log_rank_zero(
            log, f"batch_size {batch_size} ({reason}): {samples_per_step(batch_size, *self._micro_steps_and_ranks())}"
        )
        self._note(reason, epoch=epoch)

    def _note(self, reason: str, *, epoch: int | None = None, **figures: int) -> None:
        """Add an entry to the report's history, and write it."""
        epoch = self.epochs_run if epoch is None else epoch
        self._report.decided(epoch=epoch, batch_size=self._dataloader.batch_size, reason=reason, **figures)
        if self._is_rank_zero:
            try:
                log.info(f"Report written to {self._report.write(self._output_dir)}")
            except OSError as error:  # on this rank alone, perhaps in mid-training, which need not end for it
                log.warning(f"Report not written: {reason_of(error)}")

    def _refuse_small_data(self, batch_size: int) -> None:
        micro_steps, ranks = self._micro_steps_and_ranks()
        refuse_small_data(len(self._dataloader.dataset), batch_size=batch_size, micro_steps=micro_steps, ranks=ranks)

    def _micro_steps_and_ranks(self) -> tuple[int, int]:
        return self._gradient_accumulation_steps, self._dataloader.sampler.num_replicas
