"""Make a small data set, tokenizer and model for the demo, the tests and the `tiny/*` configs, without downloads.

The data are the docstrings of Python's standard library: the prompt is a signature, the answer its docstring. In a
pair of answers, the rejected one is another function's docstring.
Run ``python -m torchtune_adaptive.tiny [OUTPUT_DIR]``.
"""

import argparse
import ast
import functools
import io
import json
import platform
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from tqdm import tqdm

from torchtune_adaptive.files import write_atomically, writing
from torchtune_adaptive.output import filter_messages

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


def make_tiny_assets(output_dir: str | Path, *, num_samples: int | None = None) -> None:
    """Write instruction data, preference data, a tokenizer trained on them and a random model to `output_dir`.

    Existing assets are kept if they were made with the same arguments. The same arguments, Python and libraries give
    the same bytes. The tokenizer does not depend on arguments.

    Args:
        num_samples: number of samples to write; None: all, several thousand.

    Raises:
        ValueError: `output_dir` cannot be written, or `num_samples` is below 1 or above the docstrings found.
    """
    target = Path(output_dir)
    made_from = json.dumps({"num_samples": num_samples, "python": platform.python_version(), **MODEL_GEOMETRY})
    stamp = target / STAMP_NAME
    with writing("output_dir", target, kind="folder"):
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == made_from:
            return
        stamp.unlink(missing_ok=True)
        target.mkdir(parents=True, exist_ok=True)
    _write_data(target, num_samples=num_samples)
    (target / TOKENIZER_NAME).write_bytes(_tokenizer())
    _write_model(target)
    write_atomically(stamp, made_from)  # the last, because it marks the others as complete


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
        if isinstance(child, ast.expr):  # which has no functions with names
            continue
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


def _write_data(directory: Path, *, num_samples: int | None) -> None:
    samples = list(_stdlib_samples())
    if num_samples is not None and not 1 <= num_samples <= len(samples):
        raise ValueError(f"`num_samples` must be in [1, {len(samples)}], but is {num_samples} instead.")
    random.Random(0).shuffle(samples)
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


def _write_model(directory: Path) -> None:
    """Write a torchtune state dict of random weights, without a change of the caller's random generator."""
    filter_messages()
    from torchtune.models.llama2 import llama2  # prints messages

    with torch.random.fork_rng(devices=[]):  # GPU generators are not used here
        torch.default_generator.manual_seed(0)
        model = llama2(**MODEL_GEOMETRY)
    torch.save(model.state_dict(), directory / MODEL_NAME)


def main() -> None:
    """Make the assets."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_adaptive.tiny", description="Make a small data set, tokenizer and model."
    )
    parser.add_argument("output_dir", nargs="?", default=DEFAULT_OUTPUT_DIR, help="default: %(default)s")
    parser.add_argument("--num-samples", type=int, help="number of samples to write, default: every docstring found")
    options = parser.parse_args()
    try:
        make_tiny_assets(**vars(options))
    except ValueError as error:
        sys.exit(str(error))
    print(f"Data, tokenizer and model are in {options.output_dir}.")


if __name__ == "__main__":
    main()
