"""A recipe with faults, run as a module by ``tune run``; the environment says which recipe, and where it fails.

FAULTY_RECIPE is JSON: {"kind": "full" or "lora", "faults": [[step, micro-step, rank, place], ...]}.
"""

import json
import os
from importlib import import_module

from torchtune_adaptive import testing
from torchtune_adaptive.launch import launch

if __name__ == "__main__":
    plan = json.loads(os.environ["FAULTY_RECIPE"])
    recipe = import_module(f"adaptive_{plan['kind']}_finetune_distributed")
    name = {"full": "AdaptiveFullFinetuneRecipeDistributed", "lora": "AdaptiveLoRAFinetuneRecipeDistributed"}
    faults = {
        (step, micro_step): testing.Fault(place, ranks=[rank]) for step, micro_step, rank, place in plan["faults"]
    }
    recipe_class = getattr(recipe, name[plan["kind"]])
    with testing.faults_in(recipe_class, faults):
        launch(recipe_class)
