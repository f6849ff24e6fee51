"""Check a config before its run: all that needs no torch, whose import takes seconds."""

from collections.abc import Sequence

from omegaconf import DictConfig

from torchtune_adaptive.settings import AdaptiveSettings, named_by_path
from torchtune_adaptive.stock.configs import config_of, is_ppo
from torchtune_adaptive.stock.input_files import check_input_files
from torchtune_adaptive.stock.options import check_finds_sizes_only, check_options, check_turns
from torchtune_adaptive.stock.top_level_keys import check_top_level_keys


@named_by_path()
def check_config(cfg: DictConfig, *, ranks: int) -> AdaptiveSettings:
    """The settings in ``cfg``, whose interpolations must be unresolved.

    Raises:
        InputError: a key or a value is refused.
    """
    check_top_level_keys(cfg)
    settings = AdaptiveSettings.from_cfg(cfg)
    if is_ppo(cfg):
        check_finds_sizes_only(settings, method="PPO")
    check_options(cfg, settings, ranks=ranks)
    if is_ppo(cfg):
        check_turns(cfg)
    return settings


def check_run(arguments: Sequence[str], *, ranks: int) -> None:
    """Check the config and the overrides in the ``arguments`` of a recipe, and the files that the run reads.

    Raises:
        InputError: a key or a value is refused, or a file does not exist.
    """
    cfg = config_of(arguments)
    if cfg is not None:  # the user does not ask for help
        check_config(cfg, ranks=ranks)
        check_input_files(cfg)
