"""Output that cannot be written ends no run: it is complete, saved, and ends with status 0."""

import errno
import os
import pty
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.checkout import REPOSITORY, environment
from tests.support.recipe_runs import shallow_assets
from torchtune_adaptive import output
from torchtune_adaptive.output import tolerate_lost_output

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")

OUT, ERR = 1, 2
LARGEST_BYTES = 50_000_000  # of a file: above the checkpoints
BIN = Path(sys.executable).parent


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Closes what a test has opened."""
    with ExitStack() as stack:
        yield stack


def lost(kind: str, directory: Path, stack: ExitStack) -> int:
    """A descriptor that cannot be written; of "closed" one that ``run`` will close in its process."""
    match kind:
        case "full" | "closed":
            made = os.open("/dev/full", os.O_WRONLY)
        case "gone":
            reader, made = os.pipe()
            os.close(reader)
        case "hung up":
            other, made = pty.openpty()
            os.close(other)
        case "too large":
            made = os.open(directory / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.truncate(made, LARGEST_BYTES)
        case "never read":
            reader, made = os.pipe()
            stack.callback(os.close, reader)
            os.set_blocking(made, False)
            with suppress(BlockingIOError):
                while True:
                    os.write(made, bytes(4096))
        case _:
            raise ValueError(kind)
    stack.callback(os.close, made)
    return made


def run(
    command: list[str], kind: str, numbers: tuple[int, ...], stack: ExitStack, directory: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with standard output, error or both, given by their numbers, of a kind."""
    descriptor = lost(kind, directory, stack)

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_BYTES, resource.RLIM_INFINITY))
        for number in (0, *numbers) if kind == "closed" else ():
            os.close(number)

    return subprocess.run(
        command,
        cwd=directory,
        env=environment(**{"PYTHONUNBUFFERED": ""} | variables),
        stdout=descriptor if OUT in numbers else subprocess.PIPE,
        stderr=descriptor if ERR in numbers else subprocess.PIPE,
        preexec_fn=prepare,
        text=True,
        timeout=600,
        check=False,
    )


# ---- a program without torch

PROGRAM = r"""
import logging, sys, warnings
logging.warning("before")
from torchtune_adaptive.output import tolerate_lost_output
tolerate_lost_output()
tolerate_lost_output()
assert open("/dev/null").fileno() > 2
for place in range(3):
    print("out", place, flush=True)
    print("err", place, file=sys.stderr)
    logging.warning("logged")
print("\xe9", "\u20ac" * 100_000)
warnings.warn("\xe9")
sys.exit(int(sys.argv[1]))
"""
KINDS = {
    "closed": None,
    "full": errno.ENOSPC,
    "gone": errno.EPIPE,
    "hung up": errno.EIO,
    "too large": errno.EFBIG,
    "never read": errno.EAGAIN,
}
STREAMS = {(OUT,): "output", (ERR,): "error", (OUT, ERR): "both"}


@pytest.mark.parametrize(
    ("kind", "numbers", "unbuffered"),
    [
        *((kind, (OUT,), "") for kind in KINDS),
        *((kind, numbers, "1") for kind in ("closed", "full", "never read") for numbers in ((ERR,), (OUT, ERR))),
    ],
)
def test_a_program_keeps_its_status_and_its_other_stream_reports_the_loss_once(
    kind: str, numbers: tuple[int, ...], unbuffered: str, stack: ExitStack, tmp_path: Path
) -> None:
    """A stream that was closed from the start is not meant to be read."""
    status = 3 if unbuffered else 0
    ended = run(
        [sys.executable, "-c", PROGRAM, str(status)], kind, numbers, stack, tmp_path, PYTHONUNBUFFERED=unbuffered
    )
    assert ended.returncode == status, ended.stderr
    if len(numbers) == 1:
        other, name = (ended.stderr, "err") if OUT in numbers else (ended.stdout, "out")
        lines = [line for line in other.splitlines() if line.startswith(("out", "err"))]
        assert lines == [f"{name} {place}" for place in range(3)]
        code = KINDS[kind]
        reason = os.strerror(code) if code not in (None, errno.EAGAIN) else "its reader has stopped reading"
        sentence = f"Standard {STREAMS[numbers]} cannot be written: {reason}. This does not end the run.\n"
        assert other.count("cannot be written") == other.count(sentence) == (code is not None)


ASCII_ONLY = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_characters_that_an_ascii_locale_lacks_are_escaped(stack: ExitStack, tmp_path: Path) -> None:
    ended = run([sys.executable, "-c", PROGRAM, "0"], "full", (), stack, tmp_path, **ASCII_ONLY)
    assert ended.returncode == 0
    assert ended.stdout.endswith(r"\u20ac" + "\n")
    assert r"UserWarning: \xe9" in ended.stderr


def test_a_config_is_read_as_utf_8_in_an_ascii_locale(stack: ExitStack, tmp_path: Path) -> None:
    config = (REPOSITORY / "configs/tiny/full.yaml").read_text(encoding="utf-8")
    config = config.replace("/tmp/torchtune_adaptive/tiny/full", "/tmp/größe  # größer")
    (tmp_path / "config.yaml").write_text(config, encoding="utf-8")
    recipe = "adaptive_full_finetune_single_device"
    command = [sys.executable, str(REPOSITORY / f"recipes/{recipe}.py"), "--config", "config.yaml"]
    ended = run(command, "full", (), stack, tmp_path, **ASCII_ONLY)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    sentence = "`output_dir` must be in the file system's encoding (ascii), but is "
    assert ended.stderr.startswith(f"{recipe}: {sentence}")


def test_a_refusal_before_torch_is_imported_keeps_its_status(stack: ExitStack, tmp_path: Path) -> None:
    recipe = str(REPOSITORY / "recipes/adaptive_full_finetune_single_device.py")
    ended = run([sys.executable, recipe, "--config", "tiny/full", "epochs=0"], "full", (ERR,), stack, tmp_path)
    assert ended.returncode == 1
    assert ended.stdout.startswith("Standard error cannot be written: ")


def test_a_slow_reader_of_a_pipe_that_does_not_block_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_LONGEST_WAIT_S", 600.0)  # a busy machine is slow
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    content, written = bytes(range(256)) * 4096, []

    def write() -> None:
        with open(writer, "wb", buffering=0) as file:
            written.append(output._TolerantWrite(writer, file.write)(content))

    thread = threading.Thread(target=write)
    thread.start()
    with open(reader, "rb") as received:
        assert received.read() == content
    thread.join()
    assert written == [len(content)]


def test_the_streams_of_a_test_or_a_notebook_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    tolerate_lost_output()
    assert (sys.stdout, sys.stderr) == before
    print("seen")
    assert capsys.readouterr().out == "seen\n"


# ---- runs


def arguments(recipe: str, tiny_dir: Path, output_dir: Path) -> list[str]:
    return [
        f"adaptive_full_finetune_{recipe}",
        "--config",
        "tiny/full",
        f"tiny_dir={shallow_assets(tiny_dir)}",
        f"output_dir={output_dir}",
        *("model.num_layers=2", "epochs=1", "max_steps_per_epoch=2", "batch_size=2", "tokenizer.max_seq_len=64"),
        *("adaptive.memory_limit=null", "adaptive.oom_recovery=False", "dataset.split=train[:16]"),
    ]


def check_saved(output_dir: Path) -> None:
    assert (output_dir / "epoch_0" / "model-00001-of-00001.bin").stat().st_size > 0
    for path in output_dir.rglob("*.bin"):  # nothing that was printed is in a checkpoint
        assert b"Loss: " not in path.read_bytes()


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        pytest.param(kind, numbers, marks=() if (kind, numbers) == ("gone", (OUT, ERR)) else pytest.mark.exhaustive)
        for kind in KINDS
        for numbers in STREAMS
    ],
)
def test_a_run_on_one_rank_is_complete(
    kind: str, numbers: tuple[int, ...], stack: ExitStack, tiny_dir: Path, tmp_path: Path
) -> None:
    command = [str(BIN / "tune"), "run", *arguments("single_device", tiny_dir, tmp_path / "out")]
    ended = run(command, kind, numbers, stack, tmp_path)
    assert ended.returncode == 0, ended.stderr
    check_saved(tmp_path / "out")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "status"),
    # torchtune's launcher prints a line itself: Python ends it with 120 when it cannot write that.
    [("closed", 0), ("full", 120), ("gone", 120)],
)
def test_a_run_on_two_ranks_is_complete(
    kind: str, status: int, stack: ExitStack, tiny_dir: Path, tmp_path: Path
) -> None:
    """The status 0 means that all ranks have ended with 0."""
    options = arguments("distributed", tiny_dir, tmp_path / "out")
    ended = run([str(BIN / "tune"), "run", "--nproc_per_node", "2", *options], kind, (OUT, ERR), stack, tmp_path)
    assert ended.returncode == status, ended.stderr
    check_saved(tmp_path / "out")
