"""Sizes that earlier searches found, kept for runs under the same conditions."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torchtune import utils

from torchtune_adaptive.cache import KeptFiles, Question, user_cache_folder
from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.memory.meter import device_memory_bytes
from torchtune_adaptive.search.found_size import FoundSize
from torchtune_adaptive.settings import AdaptiveSettings

log = utils.get_logger("DEBUG")

_KEPT_FILES = 512
# Keys of a config on which memory does not depend, with all that is below them. Any other key counts.
_WITHOUT_EFFECT = (
    *("seed", "shuffle", "epochs", "max_steps_per_epoch", "resume_from_checkpoint", "optimizer.lr", "lr_scheduler"),
    *("output_dir", "checkpointer", "ref_checkpointer", "teacher_checkpointer", "save_adapter_weights_only"),
    *("metric_logger", "log_every_n_steps", "log_level", "log_peak_memory_stats", "profiler"),
)
# These count by their results: the lengths, keys and number of rows, and the settings named below.
_LOOKED_AT = ("dataset", "tokenizer", "batch_size", "use_maximum_batch_size", "batch_increase_function", "adaptive")
_SETTINGS = ("power_of_two", "max_batch_size", "memory_limit_bytes", "margin", "max_tokens_per_micro_batch")
_SETTINGS += ("global_batch_size", "growth_limit", "objective")
_ALLOCATOR_OPTIONS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def sizes_of_searches(
    config: Mapping[str, Any],
    settings: AdaptiveSettings,
    *,
    recipe: str,
    device: torch.device,
    consensus: Consensus,
) -> "FoundSizes | None":
    """Where a run's search keeps its sizes and looks for earlier ones; None if it does neither. A collective.

    For the arguments see ``conditions``.
    """
    if not settings.searches or not (settings.search_only or settings.reuse_found_size):
        return None
    under = conditions(config, settings, recipe=recipe, device=device, consensus=consensus)
    return FoundSizes(under, consensus, user_cache_folder("sizes"), reads=settings.reuse_found_size)


class FoundSizes:
    """Reads and writes sizes in files of ``folder``. A file that cannot be read is ignored.

    Args:
        conditions: the run's own, as ``conditions`` gives them.
        reads: whether sizes found earlier are used.
    """

    def __init__(self, conditions: Mapping[str, Any], consensus: Consensus, folder: Path, *, reads: bool) -> None:
        self._conditions = dict(conditions)
        self._consensus = consensus
        self._files = KeptFiles(folder, ending=".json", most=_KEPT_FILES)
        self._reads = reads

    def known(self, **asked: Any) -> FoundSize | None:
        """What was found under the same conditions for what is ``asked``; None if nothing was. A collective."""
        if not self._reads:
            return None
        return self._consensus.ask_rank_zero(lambda: self._read(Question(self._conditions, asked)))

    def keep(self, found: FoundSize, **asked: Any) -> None:
        """Keep what was found; where that is not possible, it is logged. Only rank 0 writes."""
        if self._consensus.rank == 0:
            try:
                self._files.write(Question(self._conditions, asked), found.as_json())
            except OSError as error:
                log.warning(f"The size found cannot be kept for later runs: {reason_of(error)}.")

    def _read(self, question: Question) -> FoundSize | None:
        found = self._files.read(question, FoundSize.from_json)
        if not question.is_kept:
            log.info("No size is reused, because components of other packages may have changed: searching.")
        elif found is None:
            log.info("No size was found before under the same conditions: searching.")
        return found


def conditions(
    config: Mapping[str, Any], settings: AdaptiveSettings, *, recipe: str, device: torch.device, consensus: Consensus
) -> dict[str, Any]:
    """All that the memory of a run's step depends on, but for its rows. A collective.

    Args:
        config: of the run, by dotted keys.
        recipe: the name of its class.
    """
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else device.type
    limits = () if on_gpu else (resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_DATA))
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", consensus.world_size))
    machines = consensus.from_all_ranks((name, device_memory_bytes(device), limits, ranks_of_node))
    left_out = _WITHOUT_EFFECT + _LOOKED_AT
    return {
        "recipe": recipe,
        "config": {key: value for key, value in config.items() if not _is_below(key, left_out)},
        "settings": {key: getattr(settings, key) for key in _SETTINGS},
        "machines": machines,
        "allocator": [os.environ.get(option) for option in _ALLOCATOR_OPTIONS],
    }


def _is_below(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)
