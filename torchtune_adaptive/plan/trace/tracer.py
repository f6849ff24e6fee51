"""Trace the train steps of configs without a GPU, and keep what was found."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from torchtune_adaptive.output import quietly
from torchtune_adaptive.plan.trace.cache import Answers
from torchtune_adaptive.plan.trace.keys import traced_content
from torchtune_adaptive.plan.trace.step_events import TracedStep


class Tracer:
    """Traces steps of configs on rank 0, which holds the most memory. It keeps its answers.

    Steps run in this process, on fake CPU tensors; what they change in torch is restored. No weights, tokenizer or data
    set are read.

    Args:
        folder: where answers are kept for other programs, see ``Answers``; None: only this object keeps them.
        shows_progress: show a progress bar on standard error.
    """

    def __init__(self, folder: Path | None = None, *, shows_progress: bool = False) -> None:
        self._answers = Answers(folder)
        self._shows_progress = shows_progress

    def step(self, cfg: DictConfig, *, world_size: int, seq_lens: Sequence[int]) -> TracedStep:
        """Trace a train step of the adaptive recipe for ``cfg``, with ``world_size`` ranks.

        Args:
            seq_lens: tokens per row; each length has its own peaks.

        Raises:
            InputError: the config cannot be planned; the message says why.
        """
        content = traced_content(cfg)
        questions = {length: content | {"asked": {"world_size": world_size, "seq_len": length}} for length in seq_lens}
        steps = {length: kept for length, question in questions.items() if (kept := self._answers.read(question))}
        if missing := [length for length in questions if length not in steps]:
            with quietly():
                from torchtune_adaptive.plan.trace.config_steps import trace_config  # torch takes seconds to import

                traced = trace_config(cfg, world_size=world_size, seq_lens=missing, shows_progress=self._shows_progress)
            for one in traced.lengths:
                steps[one.seq_len] = replace(traced, lengths=(one,))
                self._answers.write(questions[one.seq_len], steps[one.seq_len])
        found = [steps[length] for length in seq_lens]
        return replace(found[0], lengths=tuple(step.lengths[0] for step in found))
