"""Make a small data set, tokenizer and model for the demo, the tests and the `tiny/*` configs, without downloads.

The data are the docstrings of Python's standard library: the prompt is a signature, the answer its docstring. In a
pair of answers, the rejected one is another function's docstring.
Run ``python -m torchtune_adaptive.tiny [OUTPUT_DIR]``.
"""

import argparse
import ast
import functools
import hashlib
import io
import json
import os
import platform
import random
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torchtune.data import Message
from torchtune.models.llama2 import llama2, llama2_tokenizer
from tqdm import tqdm

DEFAULT_OUTPUT_DIR = "/tmp/torchtune_adaptive_tiny"  # the `tiny_dir` of configs/tiny/*.yaml
DATA_NAME, PAIRS_NAME, STAMP_NAME = "docstrings.json", "preferences.json", "tiny.json"
TOKENIZER_NAME, MODEL_NAME = "tokenizer.model", "model.pt"
MODEL_GEOMETRY = {
    "vocab_size": 2048,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 4,
    "embed_dim": 128,
    "intermediate_dim": 384,
    "max_seq_len": 512,
}
# A longer prompt could fill the configs' `max_seq_len` of 256 tokens, and leave a sample without unmasked labels.
MAX_SIGNATURE_CHARS = 200
SKIPPED_DIRS = frozenset({"dist-packages", "ensurepip", "idlelib", "lib2to3", "site-packages", "test", "tests"})


def make_tiny_assets(
    output_dir: str | Path, *, seed: int = 0, num_samples: int | None = None, force: bool = False
) -> None:
    """Write instruction data, preference data, a tokenizer trained on them and a random model to `output_dir`.

    Existing assets are kept if they are complete and were made with the same arguments. Otherwise they are written
    again. The same arguments, Python and libraries give the same bytes. The tokenizer does not depend on arguments.
    Args:
        seed: random seed of the samples' order and the model's weights.
        num_samples: number of samples to write; None: all, several thousand.
        force: always write the assets again.

    Raises:
        ValueError: `output_dir` cannot be written, or `num_samples` is below 1 or above the docstrings found.
    """
    target = Path(output_dir)
    arguments = {"seed": seed, "num_samples": num_samples, "python": platform.python_version(), **MODEL_GEOMETRY}
    if not force and _is_complete(target, arguments):
        return
    with _partial_directory(target) as partial_name:
        partial = Path(partial_name)
        _write_data(partial, seed=seed, num_samples=num_samples)
        (partial / TOKENIZER_NAME).write_bytes(_tokenizer())
        _write_model(partial, seed=seed)
        digests = {name: _digest(partial / name) for name in (DATA_NAME, PAIRS_NAME, TOKENIZER_NAME, MODEL_NAME)}
        stamp = {"arguments": arguments, "sha256": digests}
        (partial / STAMP_NAME).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        for name in (*digests, STAMP_NAME):  # the stamp comes last, because it marks the others as complete
            os.replace(partial / name, target / name)


def _is_complete(target: Path, arguments: dict[str, Any]) -> bool:
    """Whether the assets in `target` were made with `arguments` and have not changed since."""
    try:
        stamp = json.loads((target / STAMP_NAME).read_text(encoding="utf-8"))
        digests = stamp["sha256"].items()
        return stamp["arguments"] == arguments and all(_digest(target / name) == digest for name, digest in digests)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # missing, truncated or of another program
        return False


def _partial_directory(target: Path) -> "tempfile.TemporaryDirectory[str]":
    try:
        target.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=target, prefix=".tiny-")
    except OSError as error:
        where = f"{str(target)!r} instead ({error.strerror})"
        raise ValueError(f"`output_dir` must be a directory that can be written, but is {where}.") from error


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@functools.cache
def _stdlib_samples() -> tuple[tuple[str, str], ...]:
    """Every distinct (signature, docstring) of the standard library's functions and methods, without imports."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(stdlib.rglob("*.py")) if SKIPPED_DIRS.isdisjoint(path.relative_to(stdlib).parts)]
    found: dict[tuple[str, str], None] = {}
    for path in tqdm(paths, desc="Reading docstrings", unit="file", disable=None):
        found.update(dict.fromkeys(_documented_functions(ast.parse(path.read_bytes()), prefix="")))
    if not found:
        raise ValueError(f"Python's standard library must come with its sources, but {str(stdlib)!r} has none instead.")
    return tuple(found)


def _documented_functions(node: ast.AST, *, prefix: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.ClassDef):
            inner = f"{prefix}{child.name}."
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            keyword = "async def" if isinstance(child, ast.AsyncFunctionDef) else "def"
            returns = f" -> {ast.unparse(child.returns)}" if child.returns else ""
            signature = f"{keyword} {prefix}{child.name}({ast.unparse(child.args)}){returns}"
            docstring = (ast.get_docstring(child) or "").strip()
            if docstring and len(signature) <= MAX_SIGNATURE_CHARS:
                yield signature, docstring
        yield from _documented_functions(child, prefix=inner)


def _write_data(directory: Path, *, seed: int, num_samples: int | None) -> None:
    samples = list(_stdlib_samples())
    if num_samples is not None and not 1 <= num_samples <= len(samples):
        raise ValueError(f"`num_samples` must be in [1, {len(samples)}], but is {num_samples} instead.")
    random.Random(seed).shuffle(samples)
    samples = samples[:num_samples]
    _write_lines(directory / DATA_NAME, [{"input": signature, "output": docstring} for signature, docstring in samples])
    others = samples[1:] + samples[:1]
    pairs = zip(samples, others, strict=True)
    conversations = [
        {"chosen": _conversation(*sample), "rejected": _conversation(sample[0], other[1])} for sample, other in pairs
    ]
    _write_lines(directory / PAIRS_NAME, conversations)


def _conversation(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


@functools.cache
def _tokenizer() -> bytes:
    """Train a lossless SentencePiece model: it keeps whitespace, and encodes unknown characters as bytes."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"{signature} {docstring}" for signature, docstring in _stdlib_samples()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=MODEL_GEOMETRY["vocab_size"],
        user_defined_symbols=["\n", "[INST]", "[/INST]"],  # the last two are in llama2_tokenizer's template
        byte_fallback=True,
        character_coverage=0.9995,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        max_sentence_length=1 << 16,  # bytes
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def _write_model(directory: Path, *, seed: int) -> None:
    """Write a torchtune state dict of random weights, without a change of the caller's random generator."""
    with torch.random.fork_rng(devices=[]):  # GPU generators are not used here
        torch.default_generator.manual_seed(seed)
        model = llama2(**MODEL_GEOMETRY)
    torch.save(model.state_dict(), directory / MODEL_NAME)


def describe_tiny_assets(output_dir: str | Path) -> str:
    """A table of the assets' paths and sizes. Lengths are before truncation to `max_seq_len`."""
    directory = Path(output_dir)
    tokenizer = llama2_tokenizer(str(directory / TOKENIZER_NAME))
    lengths = []
    for sample in map(json.loads, (directory / DATA_NAME).read_text(encoding="utf-8").splitlines()):
        messages = [Message("user", sample["input"]), Message("assistant", sample["output"])]
        lengths.append(len(tokenizer({"messages": messages})["tokens"]))
    mean, median = statistics.fmean(lengths), statistics.median(lengths)
    parameters = sum(weight.numel() for weight in torch.load(directory / MODEL_NAME, weights_only=True).values())
    return (
        f"instruction data  {directory / DATA_NAME}  {len(lengths)} samples, "
        f"tokens per sample: mean {mean:.1f}, median {median:g}, max {max(lengths)}\n"
        f"preferences       {directory / PAIRS_NAME}  {len(lengths)} pairs\n"
        f"tokenizer         {directory / TOKENIZER_NAME}  {tokenizer.vocab_size} pieces\n"
        f"model             {directory / MODEL_NAME}  {parameters} parameters"
    )


def main() -> None:
    """Make the assets and print their paths and sizes."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_adaptive.tiny", description="Make a small data set, tokenizer and model."
    )
    parser.add_argument("output_dir", nargs="?", default=DEFAULT_OUTPUT_DIR, help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the samples' order and the weights, default: %(default)s"
    )
    parser.add_argument(
        "--num-samples", type=int, default=None, help="number of samples to write, default: every docstring found"
    )
    parser.add_argument("--force", action="store_true", help="write existing files again")
    options = parser.parse_args()
    try:
        make_tiny_assets(**vars(options))
    except ValueError as error:
        sys.exit(str(error))
    print(describe_tiny_assets(options.output_dir))


if __name__ == "__main__":
    main()
