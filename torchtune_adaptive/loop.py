"""The only training loop: what a stock recipe trains, with a batch size that is searched for and may grow.

Shapes in comments: B rows of a micro-batch, S tokens of a row.
"""

import functools
import gc
import operator
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from omegaconf import DictConfig
from torch.distributed.tensor import DTensor
from torchtune import training, utils
from torchtune.training.lr_schedulers import get_lr
from tqdm import tqdm

from torchtune_adaptive.memory.out_of_memory import comes_from_out_of_memory, is_out_of_memory_in_collective
from torchtune_adaptive.micro_batch import AdaptiveMicroBatch
from torchtune_adaptive.micro_step import MicroStep, own_norm_squared
from torchtune_adaptive.worst_case import Row

log = utils.get_logger("DEBUG")


@dataclass(frozen=True)
class StepTotals:
    """One optimizer step over all ranks. ``grad_norm`` is None without clipping, ``measured`` empty but for measured
    steps."""

    loss: float
    num_tokens: int
    grad_norm: float | None
    measured: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sums:
    """Of an optimizer step, over all ranks. ``measured`` holds the sums of ``gradient_norms`` in measured steps."""

    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    measured: torch.Tensor


class AdaptiveLoop(AdaptiveMicroBatch):
    """``train`` for a stock recipe below it, which brings model, optimizer, data and checkpoints.

    Seams: ``_micro_step`` (forward to backward of one micro-batch), ``_finish_window`` (what follows the
    last micro-step of an optimizer step), ``_save``.
    """

    world_size: int
    _metric_logger: Any
    _profiler: Any
    _clip_grad_norm: float | str | None
    _log_every_n_steps: int
    _log_peak_memory_stats: bool
    profiler_profile_memory: bool
    profiler_wait_steps: int
    profiler_warmup_steps: int
    profiler_active_steps: int

    def setup(self, cfg: DictConfig) -> None:
        """Set up as stock does, then search for the batch size if the config asks for it. A collective."""
        super().setup(cfg)  # pyright: ignore[reportAttributeAccessIssue]
        self._adapt(cfg)

    def train(self) -> None:
        """Train for the epochs that are left, and save after each. A collective."""
        self._free_before_training()
        self._zero_gradients()
        self._profiler.start()
        for epoch in range(self.epochs_run, self.total_epochs):
            self._before_epoch(epoch)
            self._train_epoch(epoch)
            self.epochs_run += 1
            self._save_state()
            self._save(epoch)
        self._profiler.stop()

    def _train_epoch(self, epoch: int) -> None:
        progress = tqdm(total=self._steps_per_epoch, disable=not self._is_rank_zero)
        self._dataloader.sampler.set_epoch(epoch)
        started = time.perf_counter()
        for step, window in enumerate(self._windows(), start=1):
            records_memory = self._records_memory_history(epoch)
            if records_memory and step == self._first_active_step():
                torch.cuda.memory._record_memory_history()
            totals = self._metered(self._train_step, window)
            self.global_step += 1
            if totals.measured:
                self._observe(totals.measured, num_tokens=totals.num_tokens, samples=self._samples_in(window))
            if self._lr_scheduler is not None:
                self._lr_scheduler.step()
            progress.update(1)
            progress.set_description(f"{epoch + 1}|{self.global_step}|Loss: {totals.loss}")
            self._log_step(totals, seconds=time.perf_counter() - started)
            started = time.perf_counter()
            if records_memory and step == self._first_active_step() + self.profiler_active_steps:
                torch.cuda.memory._record_memory_history(enabled=None)
            self._profiler.step()
            if step == self.max_steps_per_epoch:
                break
        progress.close()

    def _train_step(self, window: list[Row]) -> StepTotals:
        """One optimizer step over ``window``, whatever memory there is for its micro-batches. A collective.

        Raises:
            RuntimeError: out of memory after all ranks had agreed that the micro-steps went well.
        """
        micro_steps = self._survive(window)
        try:
            return self._finish_window(micro_steps)
        except Exception as error:
            if not comes_from_out_of_memory(error) and not is_out_of_memory_in_collective(error):
                raise
            raise RuntimeError(
                f"out of memory in phase {self._phase!r} of step {self.global_step + 1}, when parameters and optimizer"
                " state may be half updated: the run must end, and may resume from its last checkpoint;"
                " an 8-bit optimizer, LoRA or more ranks would need less"
            ) from error

    def _run_micro_batches(self, micro_batches: list[list[Row]]) -> StepTotals:
        return self._finish_window(functools.reduce(operator.add, map(self._micro_step, micro_batches)))

    def _micro_step(self, rows: Sequence[Row]) -> MicroStep:
        """Forward, loss and backward of one micro-batch."""
        self._enter_phase("forward")
        batch = self._collated(rows)
        utils.batch_to_device(batch, self._device)
        labels = batch.pop("labels")  # [B, S]
        counted = labels if self._first_tokens_count else labels[..., 1:]
        num_tokens = (counted != self._loss_fn.ignore_index).sum()
        with self.activations_handling_ctx:
            logits = self._model(**batch)
        self._enter_phase("loss")
        shifted = F.pad(labels[..., 1:], (0, 1), value=self._loss_fn.ignore_index)  # [B, S]
        if not isinstance(logits, list):
            shifted, logits = shifted.reshape(-1), logits.reshape(-1, logits.size(-1))
        # The loss is a mean; times its tokens it is a sum, which the step divides by the tokens of all micro-steps.
        loss_sum = self._loss_fn(logits, shifted) * num_tokens
        del logits, shifted
        self._enter_phase("backward")
        self._backward(loss_sum, num_tokens)
        # The mean over no tokens is not a number; smaller micro-batches may have rows that are masked throughout.
        return MicroStep(torch.where(num_tokens > 0, loss_sum.detach(), 0.0), num_tokens)

    def _backward(self, loss_sum: torch.Tensor, num_tokens: torch.Tensor) -> None:
        loss_sum.backward()

    def _finish_window(self, micro_steps: MicroStep) -> StepTotals:
        """Add up over ranks, normalise the gradients by all tokens, clip, and step. A collective."""
        self._enter_phase("clip")
        sums = self._totals(micro_steps)
        # FSDP2 divides gradients by the number of ranks; this multiplies them back.
        training.scale_grads(self._model, self.world_size / sums.num_tokens)
        grad_norm = None
        if self._clip_grad_norm is not None:
            grad_norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm=float(self._clip_grad_norm))
            if isinstance(grad_norm, DTensor):
                grad_norm = grad_norm.full_tensor()
        self._enter_phase("optimizer")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return self._step_totals(sums, grad_norm)

    def _totals(self, micro_steps: MicroStep) -> Sums:
        """Loss sum, token count and what is measured over all ranks, in one all-reduce. A collective.

        In float64, which holds token counts exactly and rounds two ranks' sum as their own type would.
        """
        totals = torch.stack((micro_steps.loss_sum.double(), micro_steps.num_tokens.double()))
        if micro_steps.small_batch is not None:
            norm_squared = own_norm_squared(self._model).to(totals.device)
            totals = torch.cat((totals, micro_steps.small_batch, norm_squared[None]))
        dist.all_reduce(totals)
        return Sums(totals[0].to(micro_steps.loss_sum.dtype), totals[1].long(), totals[2:])

    def _step_totals(self, sums: Sums, grad_norm: torch.Tensor | None) -> StepTotals:
        """The figures on the host, at the price of one wait for the device."""
        loss = (sums.num_tokens.reciprocal() * sums.loss_sum).double()  # rounded as stock's number over a tensor is
        norm = loss if grad_norm is None else grad_norm.to(loss)
        figures = torch.stack((loss, sums.num_tokens.double(), norm))
        loss_here, num_tokens, norm_here, *measured = torch.cat((figures, sums.measured)).tolist()
        return StepTotals(loss_here, int(num_tokens), None if grad_norm is None else norm_here, tuple(measured))

    def _log_step(self, totals: StepTotals, *, seconds: float) -> None:
        if self.global_step % self._log_every_n_steps or not self._is_rank_zero:
            return
        metrics: dict[str, Any] = {
            "loss": totals.loss,
            "lr": self._learning_rate(),
            "tokens_per_second_per_gpu": totals.num_tokens / (seconds * self.world_size),
            "global_batch_size": self._samples_per_step_at(self._batch_size),
            self._limit.key: self._limit.size,
            "padding": self._padding(),
            "oom_retries": self._oom_retries,
        }
        metrics |= self._measured()
        if not self._is_global:
            metrics["batch_size"] = self._batch_size
        if self._meter is not None:
            metrics["peak_memory_bytes"] = self._meter.peak_bytes
        if self._log_peak_memory_stats:
            metrics |= training.get_memory_stats(device=self._device)
        if self._meter is not None:
            self._meter.reset()
        if totals.grad_norm is not None:
            metrics["grad_norm"] = totals.grad_norm
        self._metric_logger.log_dict(metrics, step=self.global_step)

    def _learning_rate(self) -> float:
        return get_lr(self._optimizer)

    def _zero_gradients(self) -> None:
        self._optimizer.zero_grad()

    def _free_before_training(self) -> None:
        if self._device.type != "cpu":
            training.cleanup_before_training()

    def _records_memory_history(self, epoch: int) -> bool:
        """Whether the profiler is to record CUDA's memory history, as in stock in the first epoch and on rank 0."""
        return self._is_rank_zero and epoch == 0 and self._device.type == "cuda" and self.profiler_profile_memory

    def _first_active_step(self) -> int:
        """The first step (from 1) that the profiler records; it goes on for its active steps and one more."""
        return self.profiler_wait_steps + self.profiler_warmup_steps + 1

    def _save(self, epoch: int) -> None:
        """Save a checkpoint after ``epoch``. A collective."""
        raise NotImplementedError

    def cleanup(self) -> None:
        """Close the logger, then end the process group together, with nothing left that holds it. A collective."""
        if self._is_rank_zero:
            self._metric_logger.close()
        dist.barrier()
        vars(self).clear()  # a device mesh held by the model would keep the group's threads alive
        gc.collect()
        dist.destroy_process_group()
