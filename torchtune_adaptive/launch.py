"""Run a recipe as a program: config names, process group, errors of one sentence, a clean exit."""

import atexit
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public, but not re-exported
from torchtune import config, training

from torchtune_adaptive.errors import CheckpointError, InputError, RunEnded
from torchtune_adaptive.recipe import AdaptiveRecipe
from torchtune_adaptive.signals import end_as_asked
from torchtune_adaptive.stock.configs import resolve_config_argument
from torchtune_adaptive.stock.load import start_process_group

_SAID_KEY = "torchtune_adaptive/refused"
_WAIT_FOR_RANK_ZERO = timedelta(seconds=10)


def launch(recipe_main: Callable[[], Any]) -> NoReturn:
    """Run a recipe's ``recipe_main`` (decorated by ``torchtune.config.parse``) as the whole program.

    A refused value ends it with one sentence on one rank and status 1, any other error with its traceback. A signal
    that asks for an end gives status 75, when all is saved. Without a launcher this process is the only rank.
    """
    _run_alone_without_torchrun()
    _run_and_exit(recipe_main)


def launch_on_one_device(recipe_main: Callable[[], Any]) -> NoReturn:
    """As ``launch``, for a recipe that has no ranks; several processes are refused."""

    def run() -> None:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if processes > 1:
            raise InputError(f"`--nproc_per_node` must be 1 for a single-device recipe, but is {processes} instead.")
        recipe_main()

    _run_and_exit(run)


def _run_and_exit(recipe_main: Callable[[], Any]) -> NoReturn:
    end_as_asked()
    try:
        sys.argv = [sys.argv[0], *resolve_config_argument(sys.argv[1:])]
        recipe_main()
    except (InputError, CheckpointError) as error:
        _say_once(f"{Path(sys.argv[0]).stem}: {error}")
        _leave(1)
    except RunEnded as end:
        _say_once(f"{Path(sys.argv[0]).stem}: {end}")
        _leave(end.status)
    except SystemExit as end:
        if end.code:
            raise
    except Exception:
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]  # torch's names the rank on every line
        _leave(1)  # tearing the interpreter down may mean to wait for collectives that will never be
    _leave(0)


def run_recipe(recipe_class: type[AdaptiveRecipe], cfg: DictConfig) -> None:
    """Set up, train and clean up. A collective of all ranks of the launch.

    Raises:
        RunEnded: all is trained already, a signal has ended the run, or it was to search only.
    """
    if recipe_class.on_several_ranks:
        device_type = str(cfg.device).partition(":")[0]
        on_cpu = device_type == "cpu"
        backend = "gloo" if on_cpu else training.get_distributed_backend(device_type, offload_ops_to_cpu=True)
        start_process_group(backend)
    config.log_config(recipe_name=recipe_class.__name__, cfg=cfg)
    recipe = recipe_class(cfg=cfg)
    try:
        recipe.setup(cfg=cfg)
        with recipe.listening():
            recipe.train()
    except RunEnded:
        recipe.cleanup()
        raise
    recipe.cleanup()


def _run_alone_without_torchrun() -> None:
    """Without a launcher this process is the only rank, on a free port of this machine."""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in alone.items()})


def _say_once(sentence: str) -> None:
    """Print ``sentence`` on one rank, before the launcher sees any rank exit and stops the others.

    The ranks meet in torchrun's own store, which is there before and after the process group. Rank 0
    prints; the others wait for it, and print if it does not come, as when they failed alone. Without torchrun, or when
    it is gone, each rank prints.
    """
    rank = int(os.environ.get("RANK", 0))
    store = _torchrun_store()
    if rank and store is not None:
        try:
            store.wait([_SAID_KEY], _WAIT_FOR_RANK_ZERO)
        except dist.DistError:
            print(sentence, file=sys.stderr, flush=True)
        return
    print(sentence, file=sys.stderr, flush=True)
    if store is not None:
        store.set(_SAID_KEY, "")


def _torchrun_store() -> Any:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        # Where nobody listens, as when the launcher was killed, a store would try again until its time is over.
        socket.create_connection((address, port), timeout=_WAIT_FOR_RANK_ZERO.total_seconds()).close()
        return TCPStore(address, port, is_master=False, timeout=_WAIT_FOR_RANK_ZERO)
    except (OSError, dist.DistError):
        return None


def _leave(status: int) -> NoReturn:
    """Exit with ``status``; with several ranks without the interpreter's tear-down.

    A gloo thread that gives back a tensor while the interpreter finalises aborts the process, and the
    launcher reports a failed run that was complete. Threads have ended, exit hooks have run and output is
    flushed by then, as in any exit.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(status)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # a checkpoint may still be written
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
