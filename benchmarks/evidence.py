"""All results in one document, ``docs/evidence.md``, and what was not measured.

    python -m benchmarks.evidence

Measures nothing itself: run what it names, for example ``make bench``, and then this.
"""

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
DOCUMENT = Path(__file__).parent.parent / "docs" / "evidence.md"
# What each result answers, in the document's order. Those of GPUs come first, whatever their names.
QUESTIONS = {
    "search_cpu": "How do the searches of other projects compare with ours?",
    "search_accuracy_cpu": "Do the recipes' searches find the largest batch that fits?",
    "forecast_accuracy_cpu": "Is the forecast of memory right?",
    "allocator_events_cpu": "Is it right without any meter, for compiled code, and with torchao's optimizers?",
    "published_gpu": "Do plans agree with peaks of GPU memory that others published?",
    "plan_cost_cpu": "What does a forecast cost?",
    "host_memory_cpu": "Is the forecast of host memory right?",
    "process_limit_cpu": "Is the size found true where the system itself limits memory?",
    "recovery_cpu": "Does training survive out-of-memory errors, and rightly?",
    "recovery_cost_cpu": "What does recovery cost a loop of one's own?",
    "host_growth_cpu": "Does host memory grow with the steps of a sharded model?",
    "crashes_cpu": "Does a run that is killed go on as if nothing had been?",
    "checkpoints_cpu": "What do checkpoints of steps cost?",
    "stock_starts_cpu": "Does any stock config start?",
    "loop_cpu": "What does the loop cost while nothing happens?",
    "tokens_cpu": "What does a token budget bring?",
    "objective_cpu": "Is the largest batch the fastest?",
    "growth_cpu": "What does growth do to steps and learning rate?",
    "gpu_rehearsal_cpu": "Does what is to be measured on a GPU run?",
}
ABOUT_GPUS = "What holds on a GPU?"
NO_GPU = (
    "**Any GPU.** No CUDA device and no NCCL has run any of this. Sizes found and planned, what the device adds to a"
    " plan, recovery from errors of CUDA's allocator, its thrashing, and speeds are measured by `python -m"
    " benchmarks.gpu` in nine minutes on one device; until somebody has, they are not known."
)
NOT_MEASURED = (
    "More than four ranks, and more than one machine; recovery with NCCL.",
    "Pretrained weights and data sets of the world: models here are small and random, data is made up. Large geometries"
    " are planned (docs/stock_configs.md), none was run.",
    "Activation offloading and bitsandbytes' optimizers in training; plans of them are compared with published peaks.",
    "Whether growth by the gradient noise scale trains a better model, or sooner.",
    "Composer's and SkyRL's searches: they need CUDA, and Ray. Peers on several ranks: those compared here have no"
    " search that agrees between ranks.",
    "torch 2.9 to 2.12: the tests pass with each, and growth of host memory is measured with each; the other figures"
    " are of torch 2.13. Python other than 3.11.",
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
        "What was measured, as its command printed it, with date, commit and machine. `make bench` measures all of it"
        " again on a CPU but what `make exhaustive` does; `make gpu` is for a GPU. This document is put together by"
        " `python -m benchmarks.evidence` from `benchmarks/results`.",
        "",
        "| question | of commit | result |",
        "| --- | --- | --- |",
        *(_entry(stem, found[stem]) for stem in stems),
        "",
        "## Not measured",
        "",
        *(f"- {item}" for item in (NOT_MEASURED if gpus else (NO_GPU, *NOT_MEASURED))),
    ]
    for stem in stems:
        lines += ["", re.sub(r"^#", "##", found[stem], flags=re.MULTILINE).rstrip()]  # one level down
    return "\n".join(lines) + "\n"


def _entry(stem: str, text: str) -> str:
    title = text.splitlines()[0].removeprefix("# ")
    commits = dict.fromkeys(re.findall(r"\bcommit ([0-9a-f]{7,}(?: with changes)?)", text))
    return f"| {QUESTIONS.get(stem, ABOUT_GPUS)} | {', '.join(commits)} | [{title}](#{_anchor(title)}) |"


def _anchor(title: str) -> str:
    """As GitHub makes them."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    main()
