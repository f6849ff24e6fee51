"""Run a recipe as a program: config names, process group, errors as one sentence, exit status."""

import atexit
import contextlib
import fcntl
import json
import logging
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torchtune_adaptive.errors import CheckpointError, InputError, RunEnded, reason_of
from torchtune_adaptive.stock.installed import require_torchtune

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from torchtune_adaptive.stock.recipe import AdaptiveRecipe


def check_first() -> None:
    """End the program with one sentence if a package is missing or a value is invalid, before torch is imported.

    A recipe calls this before its other imports. It also filters messages that torch's libraries print when they are
    imported. On several nodes it checks no values: a node that refuses one has to notify the others, as ``launch``
    does.
    """
    filter_messages()
    try:
        require_torchtune()
        from torchtune_adaptive.stock.checks import check_run

        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
            return
        check_run(sys.argv[1:], ranks=int(os.environ.get("WORLD_SIZE", 1)))
    except InputError as error:
        _say_once(str(error))
        _leave(1)


def filter_messages() -> None:
    """Filter messages of other libraries in this process that a user can do nothing about."""
    # torchao below 0.16, the last that torchtune 0.6.1 can import, has C++ extensions for older versions of torch only.
    # The recipes use none of them.
    skipped = "Skipping import of cpp extensions due to incompatible torch version"
    logging.getLogger("torchao").addFilter(lambda record: not record.getMessage().startswith(skipped))
    # torchdata's data loader calls it on every pass. It does nothing.
    warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning, r"torchdata\.")


def launch(recipe_class: "type[AdaptiveRecipe]") -> NoReturn:
    """Run a recipe as a program: its config and overrides are the program's arguments.

    An invalid value ends it with one sentence per node and status 1, any other error with its traceback. After a
    signal to end, it saves and exits with status 75. If another node has ended, this one ends too, with a sentence and
    status 1. Without a launcher this process is the only rank; a single-device recipe refuses several.
    """
    from torchtune import config

    from torchtune_adaptive.stock.configs import resolve_config_argument
    from torchtune_adaptive.training.nodes import watch_nodes  # needs torch
    from torchtune_adaptive.training.signals import end_as_asked

    def recipe_main(cfg: "DictConfig") -> None:
        run_recipe(recipe_class, cfg)

    recipe_main.__doc__ = sys.modules["__main__"].__doc__  # shown by --help
    if recipe_class.on_several_ranks:
        _run_alone_without_torchrun()
    end_as_asked()
    nodes = watch_nodes(_say_once)
    try:
        processes = int(os.environ.get("WORLD_SIZE", 1))
        if processes > 1 and not recipe_class.on_several_ranks:
            raise InputError(f"`--nproc_per_node` must be 1 for a single-device recipe, but is {processes} instead.")
        sys.argv = [sys.argv[0], *resolve_config_argument(sys.argv[1:])]
        config.parse(recipe_main)()
    except (InputError, CheckpointError) as error:
        _say_once(str(error))
        nodes.close(str(error))
        _leave(1)
    except RunEnded as end:
        _say_once(str(end))
        nodes.close(None)
        _leave(end.status)
    except SystemExit as end:
        if end.code:
            raise
    except Exception as error:
        if isinstance(error, RuntimeError):  # as of a collective whose other side is gone
            nodes.wait_for_news()
        sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]  # torch's hook names the rank on every line
        _report(f"{reason_of(error)}.")
        nodes.close(f"{reason_of(error)}.")
        _leave(1)  # the interpreter's shutdown could wait for collectives that never complete
    nodes.close(None)
    _leave(0)


def run_recipe(recipe_class: "type[AdaptiveRecipe]", cfg: "DictConfig") -> None:
    """Set up, train and clean up. A collective of all ranks of the launch.

    Raises:
        InputError: a value is invalid.
        RunEnded: training is already complete, a signal has ended the run, or the config asks only for the search.
    """
    from torchtune_adaptive.settings import named_by_path

    with named_by_path():
        _set_up_and_train(recipe_class, cfg)


def _set_up_and_train(recipe_class: "type[AdaptiveRecipe]", cfg: "DictConfig") -> None:
    from omegaconf import OmegaConf
    from torchtune import config, training, utils

    from torchtune_adaptive.stock.checks import check_device
    from torchtune_adaptive.stock.load import start_process_group

    check_device(cfg)
    if cfg.get("device") is None:
        OmegaConf.update(cfg, "device", utils.get_device().type)  # as a recipe for one device does
    if recipe_class.on_several_ranks:
        device_type = str(cfg.device).partition(":")[0]
        on_cpu = device_type == "cpu"
        backend = "gloo" if on_cpu else training.get_distributed_backend(device_type, offload_ops_to_cpu=True)
        start_process_group(backend)
    if cfg.get("fsdp_cpu_offload", False):
        training.set_torch_num_threads()  # the optimizer then runs on all cores of the CPU
    recipe = recipe_class(cfg=cfg)
    try:
        recipe.setup(cfg=cfg)
        config.log_config(recipe_name=recipe_class.__name__, cfg=cfg)
        with recipe.listening():
            recipe.train()
    except RunEnded:
        recipe.cleanup()
        raise
    recipe.cleanup()


def _run_alone_without_torchrun() -> None:
    """Without a launcher, make this process the only rank."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")


def _say_once(sentence: str) -> None:
    """Print ``sentence``, with the recipe's name, if no other rank of this node has printed one.

    A file in torchrun's folder of this launch records it. Its lock keeps the ranks apart, so that the launcher does not
    end a rank that is about to print. Without torchrun each process prints.
    """
    _report(sentence)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # torchrun's, in a folder for each rank
    try:
        file = (Path(error_file).parent.parent / "torchtune_adaptive_said").open("a+") if error_file else None
    except OSError:
        file = None
    with file or contextlib.nullcontext():
        if file is not None:
            fcntl.lockf(file, fcntl.LOCK_EX)
            file.seek(0)
        if file is None or not file.read():
            print(f"{Path(sys.argv[0]).stem}: {sentence}", file=sys.stderr, flush=True)
        if file is not None:
            file.write("said")


def _report(sentence: str) -> None:
    """Have the report that torchrun prints at the end, after its traceback, close with ``sentence``."""
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": {"message": sentence, "extraInfo": details}}))


def _leave(status: int) -> NoReturn:
    """Exit with ``status``. With several ranks, skip the interpreter's shutdown.

    A gloo thread that releases a tensor during the shutdown aborts the process, and the launcher would then report a
    complete run as failed. Threads are joined, exit hooks are run and output is flushed first, as in any exit.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(status)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # a checkpoint may still be in progress
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
