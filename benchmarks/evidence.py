"""Write ``docs/evidence.md``: a table of all results, and what was not measured.

    python -m benchmarks.evidence

Measures nothing itself: run the benchmarks first, for example by ``make bench``.
"""

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence.md"
# What each result answers, in the document's order. Those of GPUs come first, whatever their names.
QUESTIONS = {
    "search_cpu": "How does the search compare with those of other projects?",
    "search_simulated_gpu": "And where it is torch's own allocator for CUDA that runs out of memory?",
    "search_accuracy_cpu": "Does each strategy find the largest batch size that fits?",
    "forecast_accuracy_cpu": "Is the predicted memory of a step right?",
    "loop_accuracy_cpu": "And that of a step of any loop, with models of transformers and peft?",
    "allocator_events_cpu": "Is it right for compiled code and for torchao's optimizers?",
    "published_gpu": "Do plans agree with published measurements of GPU memory?",
    "published_hugging_face": "And plans of Hugging Face models?",
    "plan_cost_cpu": "How long does a plan take?",
    "host_memory_cpu": "Is the predicted host memory right?",
    "recovery_cpu": "Does training continue correctly after out-of-memory errors?",
    "after_errors_cpu": "What does training lose after an error?",
    "after_errors_simulated": "And if it is torch's own allocator for CUDA that runs out of memory?",
    "recovery_cost_cpu": "What does `RecoverableStep` cost in a plain loop?",
    "auto_find_batch_size_cpu": "What does an error in the middle of training cost with `transformers.Trainer`?",
    "auto_find_batch_size_cuda": "And on a GPU?",
    "loop_cpu": "How fast are the recipes compared with torchtune's?",
    "host_growth_cpu": "Does host memory grow with the steps of a sharded model?",
    "crashes_cpu": "Does a killed run continue with the same results?",
    "slurm_cpu": "What becomes of a job of Slurm?",
    "cut_cable_cpu": "What becomes of training when the cable between two machines is cut?",
    "checkpoints_cpu": "What do checkpoints of steps cost?",
    "digests_cpu": "And their digests?",
    "stock_starts_cpu": "Do torchtune's configs start with our recipes?",
    "stock_starts_simulated": "And those that need a GPU?",
    "tokens_cpu": "What does a token budget save?",
    "objective_cpu": "Is the largest batch the fastest?",
    "growth_study_cpu": "Does growth train better, or sooner?",
    "growth_cpu": "How do steps and learning rate follow a growing batch?",
    "gpu_simulated": "How much memory does torch's allocator for CUDA take, and does the search find what fits?",
    "gpu_rehearsal_cpu": "Does the program that measures on a GPU run?",
}
ABOUT_GPUS = "What holds on a GPU?"
NOT_MEASURED = (
    "Several GPUs, and so NCCL between them; any GPU but an H200, which had three times a quarter of an hour.",
    "More than four ranks; two real machines.",
    "Pretrained weights and real data sets. Models here are small and random, data is made up. Large models are"
    " [planned](stock_configs.md), not run.",
    "Kernels of bitsandbytes for CUDA, which compute nothing on the simulated GPU. Its optimizers train on CPUs here;"
    " plans of them are compared with published figures.",
    "Whether growth trains a model of any size that people use better, or sooner.",
    "The searches of Composer and SkyRL, which need CUDA and Ray; other projects' searches on several ranks, which do"
    " not agree between ranks.",
    "torch 2.10 to 2.12 with images or tensor parallelism: the tests of everything else passed. All tests pass with"
    " torch 2.9 on Python 3.10, and with torch 2.13 on Python 3.12. Growth of host memory is measured with each torch;"
    " all other figures are of torch 2.13 with Python 3.11. With torch 2.15 only the tests of `engine` and of plans of"
    " loops.",
)


def main() -> None:
    """Write the document."""
    DOCUMENT.write_text(document())
    print(f"Written to {DOCUMENT}")


def document() -> str:
    """What is measured, and what is not."""
    found = {path.stem: path.read_text() for path in sorted(RESULTS.glob("*.md"))}
    gpus = [stem for stem in found if stem.startswith("gpu_") and stem not in QUESTIONS]
    unasked = found.keys() - QUESTIONS.keys() - set(gpus)
    if unasked:
        raise SystemExit(f"results must have a question in `QUESTIONS`, but there is none for {sorted(unasked)}")
    stems = [*gpus, *(stem for stem in QUESTIONS if stem in found)]
    lines = [
        "# Evidence",
        "",
        "Figures in this documentation are from these results, or from a test that is named beside them. Each result"
        " names its command, date, commit and machine, and `tests/documents/test_figures.py` compares the pages with"
        " them. `make bench` measures again on a CPU, `make exhaustive` runs the long tests, `make gpu` measures on a"
        " GPU.",
        "",
        "| question | result | commit |",
        "| --- | --- | --- |",
        *(_entry(stem, found[stem]) for stem in stems),
        "",
        "## Not measured",
        "",
        *(f"- {item}" for item in NOT_MEASURED),
    ]
    return "\n".join(lines) + "\n"


def _entry(stem: str, text: str) -> str:
    title = text.splitlines()[0].removeprefix("# ")
    commits = dict.fromkeys(re.findall(r"\bcommit ([0-9a-f]{7,}(?: with changes)?)", text))
    link = f"../benchmarks/results/{stem}.md"
    return f"| {QUESTIONS.get(stem, ABOUT_GPUS)} | [{title}]({link}) | {', '.join(commits)} |"


if __name__ == "__main__":
    main()
