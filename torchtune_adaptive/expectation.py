"""What a plan expects to fit: where a search without a forecast of its own need look no further."""

from omegaconf import DictConfig
from torchtune import utils

from torchtune_adaptive.distributed.consensus import Consensus
from torchtune_adaptive.errors import reason_of
from torchtune_adaptive.memory.meter import MemoryMeter
from torchtune_adaptive.plan.client import trace
from torchtune_adaptive.search.strategies import usable_bytes
from torchtune_adaptive.settings import AdaptiveSettings

log = utils.get_logger("DEBUG")

_LONGEST_S = 120.0


def expected_batch_size(
    cfg: DictConfig, *, seq_len: int, settings: AdaptiveSettings, meter: MemoryMeter, consensus: Consensus
) -> int | None:
    """The largest batch size that a plan of ``cfg`` names for rank 0, or None where there is none. A collective.

    What a device adds is left out: more than this cannot fit, but for where the trace is wrong. Nothing that goes
    wrong with the plan ends the run.
    """
    if not _pays(cfg, settings):
        return None
    limit_bytes = usable_bytes(settings.memory_limit_bytes or meter.available_bytes, settings.margin)
    planned = (
        _planned(settings.traced(cfg), consensus.world_size, seq_len, limit_bytes) if consensus.rank == 0 else None
    )
    return consensus.from_rank_zero(planned)


def _pays(cfg: DictConfig, settings: AdaptiveSettings) -> bool:
    """Whether a plan, which takes some ten seconds on the host, is cheap against the probes that it saves.

    It is against steps of a model that needs a GPU. To linear extrapolation two traced steps tell more, and sooner.
    """
    return str(cfg.device).startswith("cuda") and settings.strategy != "linear_extrapolation"


def _planned(cfg: DictConfig, world_size: int, seq_len: int, limit_bytes: int) -> int | None:
    try:
        step = trace(cfg, world_size=world_size, seq_lens=[seq_len], timeout_s=_LONGEST_S)
    except Exception as error:
        log.info(f"The search is not bounded by a plan: {reason_of(error)}.")
        return None
    planned = step.peaks[0].largest_batch_size(limit_bytes)
    log.info(f"By a plan the largest batch_size that may fit is {planned}.")
    return planned or None
