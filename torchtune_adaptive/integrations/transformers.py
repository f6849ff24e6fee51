"""Search and recovery in ``transformers.Trainer`` and in TRL's trainers.

    class MyTrainer(AdaptiveTrainerMixin, SFTTrainer): ...

    MyTrainer(model, args=args, train_dataset=rows).train()

Global batch, learning rate and number of optimizer steps are those of the trainer. Only the forward and backward passes
of an optimizer step are run in smaller parts, all of them together after its last batch has come.
"""

import copy
import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from torchtune_adaptive.engine.distributed.fsdp_state import drop_forward_passes, fsdp_states
from torchtune_adaptive.engine.memory.devices import limit_bytes_of
from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.recovery.watch import MemoryEvent, MemoryPressure
from torchtune_adaptive.errors import CannotCutError, InputError, require_one_of
from torchtune_adaptive.integrations.batches import TrainerBatches
from torchtune_adaptive.integrations.checkpointing import ChosenCheckpointing
from torchtune_adaptive.integrations.flat_batches import WithLengths, as_flat, as_rows, check_same_again
from torchtune_adaptive.integrations.known_trainers import (
    check_parameters,
    has_own_loss,
    samples_are_pairs,
    why_refused,
    why_whole,
)
from torchtune_adaptive.integrations.late_gathers import LateGathers, LateValue, kept_too_long, with_attributes
from torchtune_adaptive.integrations.micro_batch_search import MicroBatchSearch
from torchtune_adaptive.integrations.trainer_batch import TrainerBatch

log = logging.getLogger(__name__)
_MOST_TRIALS = 4  # of samples that differ more than those before
_STEPS_TO_LOOK_AT = 64  # for such samples: to look waits for the device
_TRIAL_WEIGHT_OF_FP16 = 2**-6  # a gradient that the scaler has let overflow tells nothing
_Trainer: Any = object  # the class whose methods the mixin calls


class AdaptiveTrainerMixin(_Trainer):
    """Runs each optimizer step in micro-batches that fit, and again in smaller ones if memory runs out.

    Args:
        micro_batch_size: samples per micro-batch, the same on every rank. None: as many as fit, at most those of an
            optimizer step; a search before the first step finds out. A micro-batch has samples of several batches only
            if a trial shows that this changes no more than rounding.
        memory_limit: memory that this rank may use, in bytes or as text such as "80GiB". None: what the device has
            free. A CPU needs one for a search.
        speed: "auto": among the sizes that fit, with gradient checkpointing as it is, without, and in some or all
            layers, take what trains fastest, by the steps of the first batches. None: take the largest that fits.

    Raises:
        InputError: the trainer, or one of its arguments, does not allow recovery.
    """

    samples_are_pairs: ClassVar[bool | None] = None
    """Whether a sample has a row in the first and one in the second half of a batch. None: as the base class."""
    counters: ClassVar[tuple[str, ...]] = ("_metrics", "_total_train_tokens")
    """Attributes that a forward pass changes. They are restored before it runs again."""

    def __init__(
        self,
        *args: Any,
        micro_batch_size: int | None = None,
        memory_limit: int | str | None = None,
        speed: Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> None:
        are_pairs = samples_are_pairs(type(self))
        self._limit_bytes = limit_bytes_of(memory_limit)  # a wrong one is refused before data is prepared
        super().__init__(*args, **kwargs)
        if reason := why_refused(self):
            raise InputError(reason)
        if speed is not None:
            require_one_of("speed", speed, ("auto",))
            if micro_batch_size is not None:
                raise InputError(
                    f"`speed` chooses the micro-batch itself: leave `micro_batch_size` {micro_batch_size} out."
                )
        self._speed = speed
        self._checkpointing = ChosenCheckpointing()
        self._micro_batch_size = micro_batch_size  # None: each training searches
        size = self.args.per_device_train_batch_size if micro_batch_size is None else micro_batch_size
        self._batches = TrainerBatches(size, rows_per_sample=2 if are_pairs else 1)
        tokens = (
            getattr(one, "pad_token_id", None) for one in (self.processing_class, getattr(self.model, "config", None))
        )
        self._batches.pad_token = next((one for one in tokens if one is not None), 0)
        self._batches.ignores_labels, self._batches.why_whole = not has_own_loss(self), why_whole(self)
        if self.accelerator.scaler is not None:
            self._batches.trial_weight = _TRIAL_WEIGHT_OF_FP16
        self._joins = False  # whether micro-batches may have samples of several batches
        self._trials_left = self._steps_to_look_at = 0
        self._is_provisional = False  # whether the next step decides about the micro-batch
        self._epoch = 0
        self._held: list[TrainerBatch] = []
        self._recoverable: RecoverableStep[Any] | None = None
        self._gathers = LateGathers(self.accelerator)
        self._held_logs: list[Any] = []  # the arguments of calls of ``log``
        self._counted: dict[str, Any] = {}  # the counters before the optimizer step
        self._memory_logs: dict[str, int] = {}
        self.memory_events: list[MemoryEvent] = []

    @property
    def _is_flat(self) -> bool:
        """Whether TRL puts the samples of a batch into one row."""
        return getattr(self, "padding_free", False)

    @property
    def micro_batch_size(self) -> int:
        """The current number of samples in a micro-batch."""
        return self._batches.size

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the base class does.

        Raises:
            NothingFitsError: a single sample does not fit. Raised on every rank.
            CannotRecoverError: recovery is not possible for this model.
        """
        self._held.clear()
        self._held_logs.clear()
        if self.model is not None:  # a hyperparameter search has none between its trials
            # As of `predict`: whole parameters look like those of adapters.
            drop_forward_passes(fsdp_states(self.model))
        try:
            return super().train(*args, **kwargs)
        finally:
            self._checkpointing.restore()
            self._close_step()

    def _close_step(self) -> None:
        if self._recoverable is not None:
            self._recoverable.close()
            self._recoverable = None

    def get_train_dataloader(self) -> Any:
        """As the base class; flat batches also tell how many tokens each sample has."""
        if not self._is_flat:
            return super().get_train_dataloader()
        with with_attributes(self, data_collator=WithLengths(self.data_collator)):
            return super().get_train_dataloader()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Keep a batch. With the last one of an optimizer step, run the forward and backward passes of all.

        Returns the sum of their losses, and 0 for the batches before. Outside of ``train`` it is the base class's.
        """
        if not self.is_in_train:
            return super().training_step(model, inputs, num_items_in_batch)
        if self._is_flat and self._recoverable is None:
            check_same_again(inputs, self.data_collator)
        self._held.append(TrainerBatch(as_rows(inputs), num_items_in_batch, self.current_gradient_accumulation_steps))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._held = self._held, []
        counters = (*self.counters, "_held_logs")
        self._counted = {name: copy.deepcopy(getattr(self, name)) for name in counters if hasattr(self, name)}
        try:
            loss = self._run_step(model, batches)
        except BaseException:
            self._release()  # or a caller that goes on would keep late values that nothing computes
            raise
        logs, self._held_logs = self._held_logs, []
        for positional, named in logs:
            self.log(*positional, **named)
        return loss

    def _run_step(self, model: nn.Module, batches: list[TrainerBatch]) -> torch.Tensor:
        """Run the forward and backward passes of an optimizer step: the sum of their losses. A collective."""
        if callable(train := getattr(self.optimizer, "train", None)):
            train()  # writes to parameters if it is a schedule-free one, which a micro-step must not
        step, is_new = self._recoverable, False
        if step is None or self._is_provisional:
            step, is_new = self._make_step(model, batches), True
            self._recoverable = step
        self._try_differences(step, batches, is_new=is_new)
        if self._epoch != (epoch := int(self.state.epoch or 0)):
            self._epoch = epoch
            step.try_larger()
        loss = step(batches)
        self.__dict__.update(self._gathers.finish({name: getattr(self, name) for name in self._counted}))
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the base class does, with the events since the last training log.

        Raises:
            InputError: a value that was gathered in a loss is logged after its step, by way of an attribute.
        """
        if "loss" in logs or "train_loss" in logs:
            logs.update(self._memory_logs)
            self._memory_logs = {}
        super().log(logs, *args, **kwargs)
        logged = self.state.log_history[-1:]  # also what a class below adds
        if any(isinstance(value, LateValue) for entry in logged for value in entry.values()):
            raise kept_too_long()

    def _hold_log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Keep what a loss logs until its optimizer step has succeeded."""
        self._held_logs.append([[dict(logs), *args], kwargs])

    def _make_step(self, model: nn.Module, batches: list[TrainerBatch]) -> RecoverableStep[Any]:
        check_parameters(model)
        self._gathers = LateGathers(self.accelerator)  # each trial of a hyperparameter search makes an accelerator
        size = self._micro_batch_size or self.args.per_device_train_batch_size  # which may have changed
        self._batches.size = self._batches.whole_size = size
        self._batches.forget_trials()
        self._trials_left, self._batches.joins = _MOST_TRIALS, False
        # A training that is resumed may begin with the last step of an epoch, which has fewer batches than others.
        is_short = len(batches) < self.args.gradient_accumulation_steps
        self._is_provisional = is_short and self._recoverable is None
        self._close_step()
        searches = self._micro_batch_size is None and not self._is_provisional and self._can_search()
        if searches or size > self.args.per_device_train_batch_size:
            step = self._recoverable_step(model)
            try:
                self._batches.joins = not step.any_rank(not self._batches.can_be_joined(batches))
                self._batches.joins = self._batches.joins and self._can_join(step, batches)
            finally:
                step.close()
        self._joins = self._batches.joins
        if searches:
            self._search(model, batches)
        return self._recoverable_step(model)

    def _recoverable_step(self, model: nn.Module) -> RecoverableStep[Any]:
        return RecoverableStep(
            model if isinstance(model, DistributedDataParallel) else self._with_reference(model),
            partial(self._micro_step, model),
            micro_batch_size=self._batches,
            optimizer=self.optimizer.optimizer,  # torch's, not accelerate's
            reduce="last" if self._reduces_once() else "each",
            release=self._release,
            on_event=self._on_event,
            steps_done=self.state.global_step,
            memory_limit=self._limit_bytes,
        )

    def _can_join(self, step: RecoverableStep[Any], batches: list[TrainerBatch]) -> bool:
        """Whether samples of several batches, padded to one length, train as in batches of their own. A collective."""
        try:
            step.dry_run(batches)
        except CannotCutError as error:
            log.info("A micro-batch has samples of one batch only. %s", error)
            return False
        return self._batches.factor is not None

    def _try_differences(self, step: RecoverableStep[Any], batches: list[TrainerBatch], *, is_new: bool) -> None:
        """Repeat the trial of ``step`` if samples differ more than those before, and join batches if that is safe.

        A collective.
        """
        cutter = self._batches
        self._steps_to_look_at = _STEPS_TO_LOOK_AT if is_new else max(self._steps_to_look_at - 1, 0)
        cutter.joins = self._joins and not step.any_rank(not cutter.can_be_joined(batches))
        while (
            self._trials_left
            and self._steps_to_look_at
            and (is_new or (step.recovers and cutter.factor is not None))
            and step.any_rank(cutter.tells_more(batches))
        ):
            self._trials_left, is_new = self._trials_left - 1, False
            if cutter.joins:
                self._joins = cutter.joins = self._can_join(step, batches)
            if not cutter.joins:
                step.prepare(batches)
            if not step.any_rank(cutter.trial_samples.has_told_more):
                break
        cutter.joins = cutter.joins and not step.any_rank(cutter.lacks_padding(batches))

    def _with_reference(self, model: nn.Module) -> nn.Module:
        """``model``, together with the reference model of DPO if there is one."""
        reference = getattr(self, "ref_model", None)
        return model if reference is None else nn.ModuleList([model, reference])

    def _reduces_once(self) -> bool:
        """Whether FSDP2 reduces gradients only with the last batch of an optimizer step, as the trainer does."""
        reduces_each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return self.args.gradient_accumulation_steps > 1 and not reduces_each

    def _micro_step(self, model: nn.Module, micro_batch: TrainerBatch) -> torch.Tensor:
        self._checkpointing.keep()
        own = {"log": self._hold_log, "current_gradient_accumulation_steps": micro_batch.divisor}
        with self._gathers.collected(), with_attributes(self, **own), self._scaled_by(micro_batch.weight):
            inputs = as_flat(micro_batch.inputs, self.data_collator) if self._is_flat else micro_batch.inputs
            loss = super().training_step(model, inputs, micro_batch.num_items)
        return loss if micro_batch.weight == 1 else loss * micro_batch.weight

    @contextmanager
    def _scaled_by(self, weight: float) -> Iterator[None]:
        """Context of a micro-step whose loss is multiplied by ``weight`` before its backward pass.

        Raises:
            InputError: on exit, the trainer has run another backward pass, but had not in the trial.
        """
        backward, is_scaled = self.accelerator.backward, False

        def scaled(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            nonlocal is_scaled
            is_scaled = True
            backward(loss if weight == 1 else loss * weight, *args, **kwargs)

        with with_attributes(self.accelerator, backward=scaled):
            yield
        self._batches.can_scale = is_scaled
        if weight != 1 and not is_scaled:
            raise InputError(
                "A loss that must be scaled needs a `training_step` that calls `self.accelerator.backward`."
            )

    def _release(self) -> None:
        """Undo what failed micro-steps have changed in the trainer."""
        self._gathers.clear()
        self.__dict__.update(copy.deepcopy(self._counted))

    def _can_search(self) -> bool:
        if self.args.device.type == "cuda" or self._limit_bytes is not None:
            return True
        if self._speed is not None:
            raise InputError(f"`speed` needs `memory_limit` on a {self.args.device.type}.")
        log.info(
            "The micro-batch is `per_device_train_batch_size` (%d): a %s needs `memory_limit` for a search.",
            self._batches.size,
            self.args.device.type,
        )
        return False

    def _search(self, model: Any, batches: list[TrainerBatch]) -> None:
        """Find the micro-batch size, and with ``speed`` how to checkpoint. A collective."""
        model = model.module if isinstance(model, DistributedDataParallel) else model  # whose reducer cannot be reset
        search = MicroBatchSearch(
            self,
            self._with_reference(model),
            partial(self._whole_step, model),
            release=self._release,
            cutter=self._batches,
            batches=batches,
            memory_limit=self._limit_bytes,
        )
        size = search.largest() if self._speed is None else search.fastest(model, self._checkpointing)
        self._batches.size = self._batches.whole_size = size

    def _whole_step(self, model: Any, micro_batches: Sequence[TrainerBatch]) -> torch.Tensor:
        """An optimizer step without recovery and without a trace in the trainer; the sum of its losses."""
        reduces_once = self._reduces_once() and hasattr(model, "set_requires_gradient_sync")
        model.zero_grad()
        loss = torch.zeros((), device=self.args.device)
        for number, batch in enumerate(micro_batches, start=1):
            if reduces_once:
                model.set_requires_gradient_sync(number == len(micro_batches))
            loss += self._micro_step(model, batch)
        self.optimizer.optimizer.step()
        self._release()
        return loss

    def _on_event(self, event: MemoryEvent) -> None:
        """Log ``event``, and pass it to the callbacks that have a method for it."""
        if self.is_world_process_zero() and event.is_logged:
            log.log(logging.WARNING if event.pressure else logging.INFO, "%s", event)
        self.memory_events.append(event)
        retries = self._memory_logs.get("memory/retries", 0) + (event.pressure is MemoryPressure.OUT_OF_MEMORY)
        self._memory_logs = {"memory/micro_batch_size": event.after, "memory/retries": retries}
        for callback in self.callback_handler.callbacks:
            if hasattr(callback, "on_memory_event"):
                callback.on_memory_event(self.args, self.state, self.control, event=event, model=self.model)


class AdaptiveTrainer(AdaptiveTrainerMixin, Trainer):
    """``transformers.Trainer`` with search and recovery."""


_TRL_TRAINERS = {f"Adaptive{name}": name for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer")}


def __getattr__(name: str) -> Any:
    """``AdaptiveSFTTrainer``, ``AdaptiveDPOTrainer`` and ``AdaptiveRewardTrainer``, created at first use.

    Raises:
        ImportError: TRL is not installed.
    """
    if name not in _TRL_TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        trl = importlib.import_module("trl")
    except ModuleNotFoundError as error:
        raise ImportError(f"`{name}` needs the package `trl`, which is not installed.") from error
    base = getattr(trl, _TRL_TRAINERS[name])
    options = {"__module__": __name__, "__doc__": f"``trl.{base.__name__}`` with search and recovery."}
    return globals().setdefault(name, type(name, (AdaptiveTrainerMixin, base), options))
