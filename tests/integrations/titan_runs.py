"""Short trainings of a tiny model with torchtitan's own ``Trainer`` and with ``AdaptiveTrainer``, on CPU ranks."""

# pyright: reportMissingImports=false

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch

import tests.integrations.torchtitan_on_cpus  # noqa: F401  before any other module of torchtitan

# isort: split
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from torchtune_adaptive import MemoryEvent
from torchtune_adaptive.integrations.torchtitan import AdaptiveConfig, AdaptiveTrainer
from torchtune_adaptive.testing import wrap_micro_steps

ROWS, TOKENS, STEPS = 4, 32, 3  # rows of a batch, tokens of a row, optimizer steps
VOCABULARY, IGNORED = 2048, 0.2  # of the tokens, in the loss


class Documents(BaseDataLoader):
    """Endless rows of this rank, each of which packs two documents. Some tokens do not count in the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True  # of a validator, which sets it

    def __init__(self, config: Any, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self._generator = torch.Generator().manual_seed(dp_rank)
        self._shape = local_batch_size, seq_len

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        rows, tokens = self._shape
        while True:
            row = torch.randint(VOCABULARY, (rows, tokens + 1), generator=self._generator)
            is_ignored = torch.rand(self._shape, generator=self._generator) < IGNORED
            first = int(torch.randint(1, tokens, (), generator=self._generator))  # tokens of the first document
            positions = torch.cat((torch.arange(first), torch.arange(tokens - first))).repeat(rows, 1)
            yield {"input": row[:, :-1], "positions": positions}, row[:, 1:].masked_fill(is_ignored, IGNORE_INDEX)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


class NoTokenizer(BaseTokenizer):
    """For data that are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        self.eos_id = 0

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def plain_config(*, chunked: bool = False, accumulate: int = 1, replicas: int = 1) -> Trainer.Config:
    """The config of torchtitan's own trainer. All ranks of a replica shard it."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the default has no backward on CPUs
    loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=loss, num_chunks=4) if chunked else loss,
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=ROWS,
            global_batch_size=ROWS * accumulate * int(os.environ.get("WORLD_SIZE", 1)),
            seq_len=TOKENS,
            steps=STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=replicas,
            spmd_backend="partial_dtensor",  # the default needs a newer torch on several ranks
        ),
        dataloader=Documents.Config(),
        tokenizer=NoTokenizer.Config(),
        validator=Validator.Config(enable=True, freq=2, steps=1, dataloader=Documents.Config()),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=0),
        dump_folder=os.environ["FOLDER_OF_TRAINERS"],
    )


class RecordingTrainer(Trainer):
    """Another subclass of ``Trainer``: it records the rows of each micro-step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        rows: list[int] = field(default_factory=list)

    def post_dataloading_process(self, input_dict: Any, labels: torch.Tensor) -> Any:
        self.config.rows.append(len(labels))
        return super().post_dataloading_process(input_dict, labels)


class AdaptiveRecordingTrainer(AdaptiveTrainer, RecordingTrainer):
    """Both."""

    @dataclass(kw_only=True, slots=True)
    class Config(RecordingTrainer.Config):
        adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)


def adaptive_config() -> AdaptiveTrainer.Config:
    """A function of a config registry, for ``--module tests.integrations.titan_runs --config adaptive_config``."""
    return AdaptiveTrainer.Config.of(plain_config(chunked=True, accumulate=2))


@dataclass(frozen=True)
class Run:
    """What a training has left, and what it has logged: step, losses, gradient norm, other metrics."""

    tensors: dict[str, torch.Tensor]
    logged: list[tuple[Any, ...]]
    train_state: dict[str, Any]
    events: tuple[MemoryEvent, ...] = ()
    micro_batch_size: int | None = None

    def has_tensors_of(self, other: "Run") -> bool:
        """Whether model and optimizer are equal bit for bit."""
        same_names = self.tensors.keys() == other.tensors.keys()
        return same_names and all(torch.equal(tensor, other.tensors[name]) for name, tensor in self.tensors.items())

    def equals(self, other: "Run") -> bool:
        """Whether both are equal bit for bit."""
        same = self.logged == other.logged and self.train_state == other.train_state
        return same and self.has_tensors_of(other)


# `around(trainer, step, number, run)` runs micro-step `number` of optimizer step `step`. Both are counted from 0.
Around = Callable[[Any, int, int, Callable[[], Any]], Any]


def train(config: Trainer.Config, around: Around | None = None, *, told: int | None = None) -> Run:
    """Train from the same start. With ``told``, micro-batches have this size in the second optimizer step."""
    torch.manual_seed(0)
    trainer = config.build()
    logged: list[tuple[Any, ...]] = []

    def log(step: int, *figures: float, extra_metrics: dict[str, Any]) -> None:
        logged.append((step, *figures, extra_metrics))
        if told is not None:
            trainer.recoverable._cutter.size = told if step == 1 else ROWS

    trainer.metrics_processor.log = log
    if around is not None:
        _wrap(trainer, around)
    with contextlib.closing(trainer), mock.patch("torchtitan.trainer.time.sleep"):  # two seconds, for other ranks
        trainer.train()
    model, optimizer = trainer.model_parts[0].state_dict(), trainer.optimizers.state_dict()
    tensors = {name: _whole(value) for name, value in (model | optimizer).items() if isinstance(value, torch.Tensor)}
    recoverable = getattr(trainer, "recoverable", None)
    of_recovery = () if recoverable is None else (recoverable.events, recoverable.micro_batch_size)
    return Run(tensors, logged, trainer.state_dict(), *of_recovery)


def recovering(
    config: Trainer.Config,
    micro_batch_size: int | Literal["search"] | None = None,
    *,
    memory_limit: str | None = None,
) -> AdaptiveTrainer.Config:
    """The same training with recovery."""
    adaptive = AdaptiveTrainer.Config.of(config)
    adaptive.adaptive = AdaptiveConfig(micro_batch_size=micro_batch_size, memory_limit=memory_limit)
    return adaptive


def _wrap(trainer: AdaptiveTrainer, around: Around) -> None:
    """Run micro-steps through ``around``: the step that has them is made in the first optimizer step."""
    make = trainer._recoverable_step

    def make_and_wrap(rows: Any) -> Any:
        step = make(rows)
        wrap_micro_steps(step, lambda number, run: around(trainer, trainer.step - 1, number, run))
        return step

    trainer._recoverable_step = make_and_wrap


def _whole(tensor: Any) -> torch.Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()
