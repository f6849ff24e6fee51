"""Reinforcement learning by PPO on one device, with the largest micro-batches that fit beside its four models.

    tune run adaptive_ppo_full_finetune_single_device --config CONFIG use_maximum_batch_size=True

CONFIG is the stock config of PPO. ``batch_size`` and ``ppo_batch_size`` do not change, because they affect training.
The search finds the number of answers generated at once (``forward_batch_size``) and trained on at once
(``ppo_batch_size`` divided by ``gradient_accumulation_steps``). Step checkpoints are written at the ends of turns.
"""

from torchtune_adaptive.launch import check_first, launch

if __name__ == "__main__":
    check_first()  # the imports below take seconds


from torchtune_adaptive.ppo.recipe import AdaptivePPOFullFinetuneRecipeSingleDevice

if __name__ == "__main__":
    launch(AdaptivePPOFullFinetuneRecipeSingleDevice)
