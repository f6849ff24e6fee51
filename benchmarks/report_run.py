"""The run that the documents' report shows: full finetuning on two CPU ranks that runs out of memory twice.

The errors are injected. Started by ``scripts/pictures``.
"""

from adaptive_full_finetune_distributed import AdaptiveFullFinetuneRecipeDistributed

from torchtune_adaptive.launch import launch
from torchtune_adaptive.testing import Fault, faults_in

# By optimizer step and micro-step, from 0.
FAULTS = {
    (24, 0): Fault(0, ranks=[1], phase="backward"),
    (68, 0): Fault(0, ranks=[0], phase="forward"),
}

if __name__ == "__main__":
    with faults_in(AdaptiveFullFinetuneRecipeDistributed, FAULTS):
        launch(AdaptiveFullFinetuneRecipeDistributed)
