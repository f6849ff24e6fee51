"""Run a recipe as a program: config names, process group, errors as one sentence, exit status."""

import atexit
import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torchtune_adaptive.errors import CheckpointError, InputError, RunEnded, reason_of
from torchtune_adaptive.output import filter_messages, tolerate_lost_output
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
    tolerate_lost_output()
    filter_messages()
    try:
        require_torchtune()
        from torchtune_adaptive.stock.checks import check_run

        if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
            return
        check_run(sys.argv[1:], ranks=_ranks())
    except InputError as error:
        _say_once(str(error))
        _leave(1)


def require_one_rank(ranks: int) -> None:
    """Check the number of ranks of a single-device recipe.

    Raises:
        InputError: it is not 1.
    """
    if ranks > 1:
        raise InputError(f"`--nproc_per_node` must be 1 for a single-device recipe, but is {ranks} instead.")


def launch(recipe_class: "type[AdaptiveRecipe]") -> NoReturn:
    """Run a recipe as a program: its config and overrides are the program's arguments.

    An invalid value, or code of the run that would end the process, ends it with one sentence per node and status 1,
    any other error with its traceback. After a signal to end, it saves and exits with status 75. If another node has
    ended, this one ends too, with a sentence and status 1. Without a launcher this process is the only rank; a
    single-device recipe refuses several. Output that cannot be written is lost, and ends nothing.
    """
    tolerate_lost_output()
    from torchtune import config

    from torchtune_adaptive.stock.configs import resolve_config_argument
    from torchtune_adaptive.training.nodes import watch_nodes  # needs torch
    from torchtune_adaptive.training.signals import end_as_asked

    def recipe_main(cfg: "DictConfig") -> None:
        try:
            run_recipe(recipe_class, cfg)
        except Exception:
            raise
        except BaseException as end:  # of a data set, a loss, ...: its status could be taken for the run's
            raise InputError(f"Code of the run raised {reason_of(end)}.") from end

    recipe_main.__doc__ = sys.modules["__main__"].__doc__  # shown by --help
    if recipe_class.on_several_ranks and "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    end_as_asked()
    nodes = watch_nodes(_say_once)
    try:
        if not recipe_class.on_several_ranks:
            require_one_rank(_ranks())
        sys.argv = [sys.argv[0], *resolve_config_argument(sys.argv[1:])]
        config.parse(recipe_main)()
    except (InputError, CheckpointError) as error:
        if isinstance(error.__cause__, RuntimeError):
            nodes.wait_for_news()
        _say_once(str(error))
        nodes.close(str(error))
        _leave(1)
    except RunEnded as end:
        _say_once(str(end))
        nodes.close(None)
        _leave(end.status)
    except SystemExit as end:  # of torchtune's parser of the arguments
        if end.code:
            raise
    except Exception as error:
        if isinstance(error, RuntimeError):  # as of a collective whose other side is gone
            nodes.wait_for_news()
        if isinstance(error, RuntimeError) and _is_said():
            reason = "another rank has ended the run, and said why"
        else:
            reason = reason_of(error)
            sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]  # torch's names the rank on each line
        _report(f"{reason}.")
        nodes.close(f"{reason}.")
        _leave(1)  # the interpreter's shutdown could wait for collectives that never complete
    nodes.close(None)
    _leave(0)


def run_recipe(recipe_class: "type[AdaptiveRecipe]", cfg: "DictConfig") -> None:
    """Set up, train and clean up. A collective of all ranks of the launch.

    Raises:
        InputError: a value is invalid.
        RunEnded: training is already complete, a signal has ended the run, or the config asks only for the search.
    """
    from omegaconf import OmegaConf
    from torchtune import config, training, utils

    from torchtune_adaptive.settings import named_by_path
    from torchtune_adaptive.stock.checks import check_device
    from torchtune_adaptive.stock.load import start_process_group

    with named_by_path():
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


def _ranks() -> int:
    """The number of ranks. Without a launcher it is 1, whatever an earlier one has left in the environment."""
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def _say_once(sentence: str) -> None:
    """Print ``sentence``, with the recipe's name, if no other rank of this node has printed one.

    A file in torchrun's folder of this launch records it. Its lock keeps the ranks apart, so that the launcher does not
    end a rank that is about to print. Without torchrun each process prints.
    """
    _report(sentence)
    with contextlib.ExitStack() as stack:
        is_said = False
        if path := _said_path():
            with contextlib.suppress(OSError):  # as on a full disk: then each rank prints
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
                stack.callback(os.close, descriptor)  # which also unlocks it
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
                is_said = bool(os.read(descriptor, 1))
                os.write(descriptor, b"said")
        if not is_said:
            print(f"{Path(sys.argv[0]).stem}: {sentence}", file=sys.stderr, flush=True)


def _is_said() -> bool:
    """Whether a rank of this node has printed a sentence."""
    path = _said_path()
    return path is not None and path.exists() and path.stat().st_size > 0


def _said_path() -> Path | None:
    """The file that records a sentence; None without torchrun, which has a folder for each rank."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent.parent / "torchtune_adaptive_said" if error_file else None


def _report(sentence: str) -> None:
    """Have the report that torchrun prints at the end, after its traceback, close with ``sentence``."""
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        details = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            content = json.dumps({"message": {"message": sentence, "extraInfo": details}})
            Path(error_file).write_text(content, encoding="utf-8")


def _leave(status: int) -> NoReturn:
    """Exit with ``status``. With several ranks, skip the interpreter's shutdown.

    A gloo thread that releases a tensor during the shutdown aborts the process, and the launcher would then report a
    complete run as failed. Threads are joined, exit hooks are run and output is flushed first, as in any exit.
    """
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(status)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # a checkpoint may still be in progress
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
