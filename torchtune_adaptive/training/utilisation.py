"""How far training is from the peak of its card: model FLOPs utilisation (MFU)."""

from collections.abc import Callable
from dataclasses import dataclass

from torchtune_adaptive.engine.flops import MatrixProducts, peak_flops
from torchtune_adaptive.training.batch.micro_batches import MicroBatch, MicroBatcher
from torchtune_adaptive.training.objectives import Loss
from torchtune_adaptive.training.train_step import TrainStep


@dataclass(eq=False)
class Utilisation:
    """The share of a card's peak that a model's own operations need, as in appendix B of arXiv:2204.02311.

    Operations of one micro-step are counted. Later ones are taken to need as many per token, padding included; but only
    tokens that are no padding are work. So padding, recomputation and waiting lower the utilisation.

    Attributes:
        peak: floating point operations of the card per second; None if it is not known: then nothing is counted.
        flops_per_token: of this rank's part of a micro-step; None before the first one.
    """

    micro_batches: MicroBatcher
    peak: float | None
    flops_per_token: float | None = None

    @classmethod
    def of(cls, step: TrainStep, micro_batches: MicroBatcher) -> "Utilisation":
        """That of the device and the weights of ``step``."""
        dtypes = {parameter.dtype for parameter in step.policy.model.parameters() if parameter.requires_grad}
        return cls(micro_batches, peak_flops(step.device, dtypes.pop()) if len(dtypes) == 1 else None)

    def counting(self, micro_step: Callable[[MicroBatch], Loss]) -> Callable[[MicroBatch], Loss]:
        """``micro_step``, whose first call that succeeds is counted."""

        def counted(micro_batch: MicroBatch) -> Loss:
            if self.peak is None or self.flops_per_token is not None:
                return micro_step(micro_batch)
            with MatrixProducts() as products:
                loss = micro_step(micro_batch)
            self.flops_per_token = products.flops / self.micro_batches.padded_tokens(micro_batch)
            return loss

        return counted

    def share(self, num_tokens: int, seconds: float) -> float | None:
        """The utilisation in steps of so many tokens of this rank, without padding; None if it is not known."""
        if self.peak is None or self.flops_per_token is None:
            return None
        return self.flops_per_token * num_tokens / seconds / self.peak
