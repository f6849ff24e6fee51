"""The recipe of PPO: torchtune's own training loop, with the largest micro-batches that fit beside its four models."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune import rlhf, utils
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX
from torchtune.modules import delete_kv_caches
from torchtune.rlhf import Trajectory

from torchtune_adaptive.engine.distributed.consensus import Consensus
from torchtune_adaptive.engine.distributed.rank_states import RankStates
from torchtune_adaptive.engine.distributed.snapshot import keep_random_states
from torchtune_adaptive.engine.loop import Loop
from torchtune_adaptive.engine.memory.devices import allowed_bytes
from torchtune_adaptive.errors import InputError, RunEnded, cannot_recover
from torchtune_adaptive.ppo.checkpoints import LastCheckpointer, PromptBatches, resuming_with_value_model
from torchtune_adaptive.ppo.checks import check_ppo_config, check_ppo_models
from torchtune_adaptive.ppo.turn_sizes import TurnSizes, find_turn_sizes
from torchtune_adaptive.stock.checkpoints import AtomicCheckpointer
from torchtune_adaptive.stock.checks import check_components
from torchtune_adaptive.stock.configs import flattened
from torchtune_adaptive.stock.identity import identity, method_of_recipe
from torchtune_adaptive.stock.load import load_stock_recipe, setting_up, with_samples
from torchtune_adaptive.stock.resume import checkpoint_folder, find_checkpoint, latest_epoch, lock_output
from torchtune_adaptive.training.batch.row_format import TokenRows, check_row_length
from torchtune_adaptive.training.checkpoints.steps import StepCheckpoints
from torchtune_adaptive.training.found_config import end_search
from torchtune_adaptive.training.metrics import TolerantLogger
from torchtune_adaptive.training.run_log import RunLog
from torchtune_adaptive.training.run_state import AdaptiveState
from torchtune_adaptive.training.signals import StopRequest
from torchtune_adaptive.training.step_log import NotFinite, log_end

log = utils.get_logger("DEBUG")

WHY_UNRECOVERABLE = "PPO is trained by torchtune's own loop"

# Config keys that determine the steps of a turn. If they change, a run cannot resume at the same position.
_OF_A_TURN = ("batch_size", "ppo_batch_size", "ppo_epochs")

StockRecipe = load_stock_recipe("ppo_full_finetune_single_device").PPOFullFinetuneRecipeSingleDevice


class AdaptivePPOFullFinetuneRecipeSingleDevice(StockRecipe):
    """The stock recipe with its own training loop, and with the sizes that a search found."""

    on_several_ranks = False

    def __init__(self, cfg: DictConfig) -> None:
        self._settings = check_ppo_config(cfg)
        check_components(cfg)
        self._stop_request, self._consensus = StopRequest(), Consensus()
        self._rows = TokenRows(CROSS_ENTROPY_IGNORE_IDX)
        self._folder, self._values_folder = checkpoint_folder(cfg), checkpoint_folder(cfg, "value_checkpointer")
        if self._folder.path.resolve() == self._values_folder.path.resolve():
            raise InputError(
                "`value_checkpointer.output_dir` and the policy's folder must differ, but both are"
                f" {str(self._values_folder.path)!r}."
            )
        all_steps = cfg.num_steps // cfg.batch_size * _steps_per_turn(cfg)
        self._resumed = find_checkpoint(
            cfg,
            self._folder,
            self._consensus,
            method=method_of_recipe(type(self)),
            is_last=lambda one: one.state is not None and one.state.global_step >= all_steps,
        )
        self._values_folder.lock()
        self._output_lock = lock_output(cfg, self._consensus)
        self._cfg = resuming_with_value_model(cfg, self._resumed, self._consensus)
        with setting_up():
            super().__init__(cfg=self._cfg)

    def setup(self, cfg: DictConfig) -> None:
        """Set up as the stock recipe does, resume from a checkpoint, and search for the sizes if the config says so.

        Raises:
            RunEnded: the config asks only for the search.
        """
        with setting_up(), latest_epoch(self._cfg, self._resumed):
            super().setup(self._cfg)
        self._metric_logger = TolerantLogger(self._metric_logger)
        with keep_random_states([self._rng]):  # the data set's transforms may use them
            self._rows.sample(self._dataloader.dataset, 0)
        check_ppo_models(self._policy_model, self._reward_model, self._dataloader.dataset)
        if len(self._dataloader) == 0:  # torchtune would end at once, without training or saving
            prompts = len(self._dataloader.dataset)
            raise InputError(
                f"`batch_size` must be at most {prompts}, the prompts of `dataset`, but is {self.batch_size} instead."
            )
        if self._settings.oom_recovery:
            log.info(str(cannot_recover(WHY_UNRECOVERABLE)))
        self._steps_per_turn = _steps_per_turn(cfg)
        self._run = identity(
            self._cfg, method_of_recipe(type(self)), self._resumed, self._folder, self._consensus, has_frozen=False
        )
        sizes, found = self._set_up_checkpoints(flattened(cfg)), None
        if sizes is not None:
            self._use(*sizes)
        elif self._settings.searches:
            found = self._use_largest_sizes()
        self._begin_log(found)
        if self._settings.searches and cfg.get("compile", False):
            torch.compiler.reset()  # code compiled for probes would make the sizes of training dynamic
        if self._settings.search_only:
            values = {"forward_batch_size": self._forward_batch_size}
            values["gradient_accumulation_steps"] = self._gradient_accumulation_steps
            seq_len = None if found is None else found.seq_len
            end_search(cfg, values, seq_len=seq_len, consensus=self._consensus)

    def train(self) -> None:
        """Train by torchtune's own loop, and save after turns and epochs."""
        try:
            super().train()
            self._steps.wait()
        except RunEnded:
            self._log_summary("ended by a signal")
            raise
        self._log_summary("complete")

    def generate_trajectory_batched(self, input_ids: torch.Tensor) -> Trajectory:
        """As in the stock recipe, after a check of the length of prompts with answers."""
        self._row_length(input_ids.shape[1])
        return super().generate_trajectory_batched(input_ids)

    def cleanup_after_step(self, *args: Any) -> None:
        """Called at the end of a turn: save a step checkpoint if it is due. After the last turn the epoch is saved.

        Raises:
            RunEnded: a signal has ended the run, and the run is saved.
            CheckpointError: a signal has ended the run, but the run cannot be saved.
        """
        super().cleanup_after_step(*args)
        losses = torch.stack([one.loss for one in args[1]]).tolist()  # of the turn's optimizer steps
        for step, loss in enumerate(losses, start=self.global_step - len(losses) + 1):
            self._not_finite.look(step, loss=loss)
        if self._steps_run < self._total_steps:
            stop = self._stop_request.is_made()
            self._steps.after_steps(self.global_step, steps=self._steps_per_turn, stop=stop, state=self._state)
        self._run_log.checkpoints(self._folder.finished)

    def save_checkpoint(self, epoch: int, is_intermediate_checkpoint: bool = False) -> None:
        """Save as the stock recipe does. The policy comes last, because its folder marks the epoch as complete.

        Raises:
            CheckpointError: the last epoch's checkpoint cannot be written. After other epochs training continues.
        """
        self._steps.wait()
        policy, value = self._policy_checkpointer, self._value_checkpointer
        for one in (policy, value):
            one.set_state(self._state())
        super().save_checkpoint(epoch, is_intermediate_checkpoint)
        is_last = not is_intermediate_checkpoint
        if value.check_saved(self._consensus, is_last=is_last):
            policy.save_now()
            policy.check_saved(self._consensus, is_last=is_last)

    def models(self) -> list[nn.Module]:
        """All models on the device, the trained ones first."""
        return [self._policy_model, self._value_model, self._ref_policy_model, self._reward_model]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer of both trained models, or one per parameter."""
        return list(self._optim_ckpt_wrapper.optim_map.values()) if self._optimizer_in_bwd else [self._optimizer]

    def listening(self) -> AbstractContextManager[None]:
        """Context: after SIGTERM, SIGUSR1 or SIGHUP, ``train`` finishes its turn, saves and ends."""
        return self._stop_request.listening()

    def _begin_log(self, found: TurnSizes | None) -> None:
        """Begin the run's log, with what the searches have found."""
        step = self.global_step
        self._run_log = RunLog(self._output_dir, writes=True)
        if not self._settings.search_only:
            self._folder.claim(self._run.id, resumed=self._resumed)
        self._run_log.begin(
            step=step,
            run=self._run.id,
            search_only=self._settings.search_only,
            time=time.time(),
            epoch=self._epochs_run,
            epochs=self._total_epochs,
            ranks=1,
            memory_limit_bytes=allowed_bytes(self._device, self._settings.memory_limit_bytes),
            checkpoint=None if self._resumed is None else str(self._resumed.path),
        )
        resumed = None if self._resumed is None else (self._resumed.path, step)
        self._not_finite = NotFinite(self._run_log, self._folder.finished, resumed)
        if found is None:
            return
        chosen = {
            "generated": {"forward_batch_size": self._forward_batch_size},
            "trained": {"gradient_accumulation_steps": self._gradient_accumulation_steps},
        }
        for of, result in found.searches.items():
            self._run_log.search(result, step=step, seq_len=found.seq_len, of=of, chosen=chosen[of])

    def _log_summary(self, how: str) -> None:
        self._run_log.checkpoints(self._folder.finished)
        sizes = f"{self._forward_batch_size} generated, {self._ppo_backward_batch_size} trained on"
        log_end(
            self._run_log,
            how,
            step=self.global_step,
            epochs_run=self._epochs_run,
            rows={"answers at once": sizes},
            checkpoints=self._folder.finished,
            metrics=self._cfg.metric_logger.get("log_dir"),
        )

    def _set_up_checkpoints(self, config: dict[str, Any]) -> tuple[int, int] | None:
        """Resume from the checkpoint. Returns the sizes of its run, None if they must be searched again."""
        self._policy_checkpointer = LastCheckpointer(self._policy_checkpointer, self._folder)
        self._values_folder.discard_unfinished()
        self._value_checkpointer = AtomicCheckpointer(self._value_checkpointer, self._values_folder)
        trained = nn.ModuleDict({"policy": self._policy_model, "value": self._value_model})
        self._steps = StepCheckpoints(self._folder, trained, self.optimizers(), self._settings, self._consensus)
        self._rank_states = RankStates(self._consensus, self._device, generators=[self._rng])
        self._dataloader = PromptBatches(self._dataloader, restore_random=self._rank_states.restore)
        self._config = config
        saved = self._steps.load(self._resumed, config=config)
        return None if saved is None else self._resume(saved)

    def _resume(self, saved: AdaptiveState) -> tuple[int, int] | None:
        """Continue from ``saved``, which had the same turns. Returns its sizes, None if something else has changed."""
        for key in _OF_A_TURN:
            if (before := saved.config.get(key)) != (now := self._config[key]):
                raise InputError(f"`{key}` must be {before} as in the checkpoint, but is {now} instead.")
        self._epochs_run, self.global_step = saved.epochs_run, saved.global_step
        self._steps_run = saved.global_step // self._steps_per_turn
        if self._steps_run >= self._total_steps:  # torchtune's loop would not end at its own limit
            assert self._resumed is not None
            raise InputError(
                f"`num_steps` must be at least {(self._steps_run + 1) * self.batch_size} to resume from"
                f" {str(self._resumed.path)!r}, but is {self._cfg.num_steps} instead."
            )
        self._dataloader.done = saved.epoch_samples // saved.batch_size
        own = self._rank_states.load(saved.rank_states)
        assert own is not None, "a run on one device has saved one rank"
        if changes := saved.changes(self._state()):
            log.info(f"resumed with changes: {'; '.join(changes)}")
            return None
        return own["generated"], saved.micro_batch_limit

    def _update_recipe_state(self, ckpt_dict: dict[str, Any]) -> None:
        """Use torchtune's own state for its checkpoints. Otherwise the position is in this package's state."""
        if self._resumed is None or self._resumed.state is None:
            super()._update_recipe_state(ckpt_dict)

    def _state(self) -> AdaptiveState:
        """The state of the run between turns."""
        return AdaptiveState(
            run=self._run,
            epochs_run=self._epochs_run,
            epoch_samples=self._dataloader.done * self.batch_size,
            schedule_steps=0,
            batch_size=self.batch_size,
            is_global=False,
            reference_samples=self.batch_size,
            samples_per_step=self._ppo_batch_size,
            global_step=self.global_step,
            micro_batch=None,
            micro_batch_limit=self._ppo_backward_batch_size,
            micro_batch_unit="rows",
            left_over=(0, 0),
            padding=(0, 0),
            dataset_samples=len(self._dataloader.dataset),
            ranks=1,
            memory_limit_bytes=allowed_bytes(self._device, self._settings.memory_limit_bytes),
            rank_states=self._rank_states.now(generated=self._forward_batch_size),
            optimizer=self._steps.options(),
            config=self._config,
            backoff={},
        )

    def _use_largest_sizes(self) -> TurnSizes:
        """Search for the sizes, and use them."""
        before = self._forward_batch_size, self._ppo_backward_batch_size
        with keep_random_states([self._rng]):
            try:
                sizes = self._find_sizes()
            finally:
                self._use(*before)
        self._use(sizes.generated, sizes.trained)
        return sizes

    def _find_sizes(self) -> TurnSizes:
        """The largest sizes whose turn fits, on prompts of the greatest length. Restores all state."""
        prompt = self._rows.worst_case(
            self._dataloader.dataset,
            seq_len=self._settings.seq_len,
            tokenizer_max_seq_len=getattr(self._tokenizer, "max_seq_len", None),
            consensus=self._consensus,
        )["tokens"]
        seq_len = self._row_length(len(prompt))
        prompts = [prompt] * self.batch_size
        loop = Loop(
            micro_step=lambda sizes: self._turn(prompts, *sizes),
            model=nn.ModuleList(self.models()),
            optimizers=self.optimizers(),
            device=self._device,
            consensus=self._consensus,
            release=self._release,
        )
        sizes = find_turn_sizes(
            loop,
            self._settings.search_options,
            answers=self.batch_size,
            answers_per_step=self._ppo_batch_size,
            seq_len=seq_len,
        )
        if self._optimizer_in_bwd and sizes.trained < self._ppo_batch_size:
            raise InputError(
                f"With `optimizer_in_bwd: True`, `ppo_batch_size` must be at most {sizes.trained}, which fit at once,"
                f" but is {self._ppo_batch_size} instead."
            )
        return sizes

    def _turn(self, prompts: Sequence[Any], generated: int, trained: int) -> None:
        """The part of a turn with the highest memory: generate the last answers, then train two micro-steps."""
        batch = torch.stack([*map(torch.as_tensor, prompts)]).to(self._device)  # [answers, prompt tokens]
        micro_steps = min(2, self._ppo_batch_size // trained)
        with torch.no_grad():
            # Answers of the previous turn, and earlier ones of this turn, are in memory too. Copies of one answer stand
            # for them, which saves time.
            self._use(1, trained)
            one = self.generate_trajectory(batch[:1])
            before = [values.repeat_interleave(len(batch), 0) for values in one]
            earlier = [values.repeat_interleave(len(batch) - generated, 0) for values in one]
            self._use(generated, trained)
            last = self.generate_trajectory(batch[:generated])
            trajectory = Trajectory(*(torch.cat(values) for values in zip(earlier, last, strict=True)))
            del one, before, earlier, last
        rewards, *_kl = rlhf.get_rewards_ppo(
            trajectory.scores, trajectory.logprobs, trajectory.ref_logprobs, self._kl_coeff, trajectory.value_seq_idxs
        )
        masks = ~trajectory.response_padding_masks
        advantages, returns = rlhf.estimate_advantages(
            trajectory.values, rewards, self._gamma, self._lmbda, masks=masks
        )
        chosen = torch.arange(trained, device=self._device)
        statistics = []
        for _ in range(micro_steps):
            part = Trajectory(*(values.index_select(0, chosen) for values in trajectory))
            statistics.append(self.ppo_step(part, advantages[chosen], returns[chosen], batch.shape[1]))
            del part
        if not self._optimizer_in_bwd:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def _use(self, generated: int, trained: int) -> None:
        """Use these sizes for generation and training from now on."""
        self._forward_batch_size, self._ppo_backward_batch_size = generated, trained
        self._gradient_accumulation_steps = self._ppo_batch_size // trained

    def _row_length(self, prompt_tokens: int) -> int:
        """Tokens of a prompt with its answer, checked against every model."""
        length = prompt_tokens + self._max_generated_tokens
        for model in self.models():
            check_row_length(length, model)
        return length

    def _setup_data(self, *args: Any, **kwargs: Any) -> Any:
        return with_samples(super()._setup_data(*args, **kwargs))

    def _release(self) -> None:
        """Free the memory of a failed turn outside of parameters: the key-value cache."""
        if self._policy_model.caches_are_setup():
            delete_kv_caches(self._policy_model)


def _steps_per_turn(cfg: DictConfig) -> int:
    """Optimizer steps of a turn."""
    return cfg.ppo_epochs * (cfg.batch_size // cfg.ppo_batch_size)
