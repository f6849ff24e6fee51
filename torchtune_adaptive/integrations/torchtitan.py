"""torchtitan's ``Trainer`` with search, and recovery from out-of-memory errors. Its ``train_step`` runs as it is.

    torchrun -m torchtitan.train --module my_configs --config llama3_8b --adaptive.micro_batch_size 4

``my_configs`` is a module of yours, whose function ``llama3_8b`` returns an ``AdaptiveTrainer.Config``. Written for
torchtitan 0.3.0, which this package does not install.
"""

import logging
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torchtitan.trainer import Trainer  # pyright: ignore[reportMissingImports]

from torchtune_adaptive.engine.recovery.step import RecoverableStep
from torchtune_adaptive.engine.search.any_loop import find_max_batch_size
from torchtune_adaptive.errors import CannotRecoverError, InputError

log = logging.getLogger(__name__)
_LABELS = "labels of the loss"  # among the tensors of a batch; no argument of a model can have this name
_DEGREES_OF_ONE = [f"{kind}_parallel_degree" for kind in ("tensor", "context", "expert", "pipeline")]


@dataclass(kw_only=True, slots=True)
class AdaptiveConfig:
    """How an optimizer step is cut into micro-steps. The field ``adaptive`` of a trainer's config."""

    micro_batch_size: int | Literal["search"] | None = None
    """Rows per micro-step, until memory runs out. None: `training.local_batch_size`. "search": the most that fit, and
    at most all rows of a rank and step, found before the first step."""

    memory_limit: str | None = None
    """Memory that a rank may use in its micro-steps, such as 60GiB. None: what the device has free."""


class AdaptiveTrainer(Trainer):
    """Runs all batches of an optimizer step in micro-steps, which get smaller if memory runs out on any rank.

    To add this to another subclass of ``Trainer``, name it first: ``class Mine(AdaptiveTrainer, Theirs)``. The config
    of ``Mine`` then needs a field ``adaptive`` of type ``AdaptiveConfig``.

    Attributes:
        recoverable: the step that recovers, with its events. None before the first optimizer step.

    Raises:
        CannotRecoverError: the config has CUDA graphs, or a parallelism other than replicas and FSDP2's sharding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """The config of torchtitan's ``Trainer``, and a section ``adaptive``."""

        adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)

        @classmethod
        def of(cls, config: Trainer.Config) -> "AdaptiveTrainer.Config":
            """The same training, with recovery."""
            return cls(**{one.name: getattr(config, one.name) for one in fields(config)})

    def __init__(self, config: Any) -> None:
        _check_config(config)
        self.recoverable: RecoverableStep[Tensor] | None = None
        self._batches: list[dict[str, Any]] = []
        super().__init__(config)

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Tensor) -> Tensor:
        """Keep a batch, or with the last one of an optimizer step run them all. Returns their loss then, 0 before.

        Args:
            input_dict: tensors [rows, tokens, ...].
            labels: [rows, tokens].
            global_valid_tokens: the number of tokens in the loss of the optimizer step, on all ranks.

        Raises:
            InputError: the batches cannot be joined and cut by rows.
        """
        self._batches.append({**input_dict, _LABELS: labels})
        if len(self._batches) < self.gradient_accumulation_steps:
            return torch.zeros((), device=self.device)
        rows, self._batches = _joined(self._batches), []
        self._global_valid_tokens, tokens_before = global_valid_tokens, self.ntokens_seen
        if self.recoverable is None:
            self.recoverable = self._recoverable_step(rows)
        loss = self.recoverable(rows)
        self.ntokens_seen = tokens_before + rows[_LABELS].numel()  # each micro-step counts, even if it runs again
        return loss

    def close(self) -> None:
        """End recovery, and the trainer."""
        if self.recoverable is not None:
            self.recoverable.close()
        super().close()

    def _recoverable_step(self, rows: dict[str, Tensor]) -> RecoverableStep[Tensor]:
        """Made in the first optimizer step, when checkpoints have been loaded. A collective."""
        size, (model,) = self.config.adaptive.micro_batch_size, self.model_parts
        if size == "search":
            size = self._found_size(rows)
        return RecoverableStep(
            model,
            self._micro_step,
            micro_batch_size=self.config.training.local_batch_size if size is None else size,
            optimizer=list(self.optimizers),
            memory_limit=self.config.adaptive.memory_limit,
            steps_done=self.step - 1,
        )

    def _found_size(self, rows: dict[str, Tensor]) -> int:
        """The largest micro-batch of ``rows`` that fits. Their values do not matter: all have equally many tokens."""
        optimizers = list(self.optimizers)

        def train_step(micro_batch: dict[str, Tensor]) -> None:
            for _ in range(2):  # the second needs more memory: gradients exist
                self._micro_step(micro_batch)
            for one in optimizers:
                one.step()

        found = find_max_batch_size(
            train_step,
            lambda size: {name: tensor[:size] for name, tensor in rows.items()},
            model=self.model_parts[0],
            optimizer=optimizers,
            memory_limit=self.config.adaptive.memory_limit,
            max_batch_size=len(rows[_LABELS]),
        )
        log.info("The micro-batch has %d rows: %s", found.batch_size, found)
        return found.batch_size

    def _micro_step(self, rows: dict[str, Tensor]) -> Tensor:
        rows = dict(rows)
        labels, run = rows.pop(_LABELS), super().forward_backward_step
        return run(input_dict=rows, labels=labels, global_valid_tokens=self._global_valid_tokens).detach()


def _check_config(config: Any) -> None:
    """Check the settings of which torchtitan has the flags. The dry run checks the model itself."""
    refused = []
    if not config.training.disable_cuda_graphs:  # a graph has batches of one shape, and keeps gradients
        refused.append("`--training.disable_cuda_graphs` must be set")
    if config.parallelism.spmd_backend == "full_dtensor":  # the loss is a DTensor
        refused.append("`--parallelism.spmd_backend` must be partial_dtensor or spmd_types, but is full_dtensor")
    for name in _DEGREES_OF_ONE:
        if (degree := getattr(config.parallelism, name)) != 1:
            refused.append(f"`--parallelism.{name}` must be 1, but is {degree}")
    if refused:
        raise CannotRecoverError(f"For recovery from out-of-memory errors, {'; '.join(refused)}.")


def _joined(batches: list[dict[str, Any]]) -> dict[str, Tensor]:
    """All rows of ``batches``. A tensor without rows, such as the images of several rows, cannot be cut with them.

    Raises:
        InputError: a value is not a tensor [rows, tokens, ...] in each batch, with equally many tokens in all.
    """
    tokens, names = batches[0][_LABELS].shape[1:2], sorted(set[str]().union(*batches))
    for batch in batches:
        wanted = (len(batch[_LABELS]), *tokens)
        for name in names:
            shape = tuple(getattr(batch.get(name), "shape", ()))
            if shape[:2] != wanted:
                raise InputError(
                    f"`{name}` must be a tensor [rows, tokens, ...] in each batch of an optimizer step, here of"
                    f" {wanted} as the labels, but has the shape {shape} instead."
                )
    return {name: torch.cat([batch[name] for batch in batches]) for name in names}
