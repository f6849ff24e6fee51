"""Models as they were before torchtune 0.5, whose norms keep 2 bytes less of each value for backward.

A point that was published before (github.com/pytorch/torchtune/pull/2054) names them in its overrides.
"""

from unittest import mock

import torch
from torchtune.models.llama3_2 import llama3_2_3b as llama3_2_3b_of_0_6
from torchtune.modules import RMSNorm, TransformerDecoder


class EarlierNorm(RMSNorm):
    """Keeps its input for backward as float32, but the values that it scales in the input's own dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize ``x``, of any shape."""
        x_fp32 = x.float()
        inverse = torch.rsqrt(x_fp32.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x_fp32 * inverse).to(x.dtype) * self.scale


def llama3_2_3b() -> TransformerDecoder:
    """Llama 3.2 of 3B parameters."""
    with mock.patch("torchtune.models.llama3_2._component_builders.RMSNorm", EarlierNorm):
        return llama3_2_3b_of_0_6()
