"""What stands for Liger's fused loss. Liger itself: ``tests/integrations/test_plans_of_trl.py``."""

import pytest
import torch

from tests.plan.hugging_face.test_model import OperationsSeen
from torchtune_adaptive.errors import InputError
from torchtune_adaptive.plan.hugging_face.liger import _loss_by_chunks, liger_as_on_cuda


@pytest.mark.parametrize("is_learnt", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_takes_gradients_and_one_chunk_of_logits(is_learnt: bool, dtype: torch.dtype) -> None:
    rows = torch.randn(96, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(64, 8, dtype=dtype, requires_grad=is_learnt)
    with torch.no_grad(), OperationsSeen() as seen:
        targets = torch.zeros(96, dtype=torch.long)
        loss, *_, grad_rows, grad_weight, grad_bias = _loss_by_chunks(rows, weight, targets)
    assert loss is not None
    assert loss.shape == ()
    assert grad_rows is not None
    assert (grad_rows.shape, grad_rows.dtype) == (rows.shape, dtype)
    assert (grad_weight is not None, grad_bias) == (is_learnt, None)
    assert {shape for shape in seen.shapes if shape[-1:] == (64,)} - {(8, 64)} == {(24, 64)}  # 2 x 96 / (64 / 8)


def test_it_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "liger_kernel", None)
    with pytest.raises(InputError) as caught, liger_as_on_cuda():
        pass
    assert str(caught.value) == "A plan of Liger's kernels needs liger-kernel: `pip install liger-kernel` installs it."
