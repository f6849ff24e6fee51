"""A recipe with faults, run as a module by ``tune run``; the environment says which recipe, and where it fails.

FAULTY_RECIPE is JSON: {"kind": "full" or "lora", "strike": a function of torchtune_adaptive.testing, "faults":
[[step, micro-step, rank, place], ...]}. A fault may have a fifth value: the phase in which its place counts.
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
        (step, micro_step): testing.Fault(
            place, ranks=[rank], phase=phase[0] if phase else None, strike=getattr(testing, plan["strike"])
        )
        for step, micro_step, rank, place, *phase in plan["faults"]
    }
    recipe_class = getattr(recipe, name[plan["kind"]])
    with testing.faults_in(recipe_class, faults):
        launch(recipe_class)
