
import os
import adaptive_full_finetune_distributed as module
from torchtune_adaptive.launch import launch
class Failing(module.AdaptiveFullFinetuneRecipeDistributed):
    def before_step(self, step):
        if step == 2 and os.environ["RANK"] == "0": raise ValueError("a bug of the user")
module.AdaptiveFullFinetuneRecipeDistributed = Failing
if __name__ == "__main__": launch(module.recipe_main)
