"""Installs the simulated GPU into the environment of the Python that runs this; README.md says what it is.

    python -m tests.simulated_gpu.install HEADERS

HEADERS is the folder with ``cuda_runtime_api.h``. torch must be installed there as it is for CUDA, but without the
libraries that it needs: `pip install --no-deps`.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_SOURCES = Path(__file__).parent
_LIBRARY = "libcudart_simulated.so"
_OF_THE_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so|ld-linux")
_OF_NVIDIA = re.compile(
    r"(__)?(cuda|cublas|cusparse|cufft|curand|cusolver|cudnn|nccl|cupti|nvrtc|nvshmem|cuFile|cu[A-Z])"
)
_NVML = "libnvidia-ml.so.1"  # torch opens it when it first needs it
_REQUIREMENTS = re.compile(r"^Requires-Dist: (cuda|nvidia|triton).*\n", re.MULTILINE)


def main() -> None:
    """Build the libraries, and put them where torch finds them."""
    headers = Path(sys.argv[1]) if len(sys.argv) == 2 else Path()
    if not (headers / "cuda_runtime_api.h").exists():
        raise SystemExit(f"HEADERS must be the folder with cuda_runtime_api.h, but is '{headers}'.")
    spec = importlib.util.find_spec("torch")  # torch cannot be imported yet
    if spec is None or spec.origin is None:
        raise SystemExit("torch must be installed before the simulated GPU is, but is not.")
    torch = Path(spec.origin).parent
    with tempfile.TemporaryDirectory() as directory:
        _install_runtime(torch, headers, Path(directory))
        _install_values(torch, headers, Path(directory))
    for metadata in torch.parent.glob("torch-*.dist-info/METADATA"):
        metadata.write_text(_REQUIREMENTS.sub("", metadata.read_text()))  # pip would download what is replaced here


def _install_runtime(torch: Path, headers: Path, directory: Path) -> None:
    """One library in the place of all that torch looks for: the functions here, and for the others "success"."""
    libraries = sorted(path for path in (torch / "lib").glob("*.so") if path.name != _LIBRARY)
    objects = [_compiled(_SOURCES / f"{name}.cc", headers, directory) for name in ("runtime", "math_libraries", "nccl")]
    defined = {line.split()[-1] for one in objects for line in _lines("nm", "--defined-only", one) if " T " in line}
    wanted = {
        line.split()[-1].partition("@")[0]
        for library in [*libraries, *torch.glob("_C*.so")]
        for line in _lines("nm", "-D", "--undefined-only", library)
    }
    others = sorted(name for name in wanted - defined if _OF_NVIDIA.match(name))
    stubs = directory / "stubs.c"
    stubs.write_text("\n".join(f"long {name}(void) {{ return 0; }}" for name in others) + "\n")
    _run("gcc", "-w", "-fPIC", "-fno-builtin", "-c", stubs, "-o", directory / "stubs.o")
    _run("g++", "-shared", "-o", directory / _LIBRARY, *objects, directory / "stubs.o", "-lrt", "-ldl")
    _replace(directory / _LIBRARY, torch / "lib" / _LIBRARY)
    needed = {
        match[1]
        for library in libraries
        for line in _lines("readelf", "-d", library)
        if (match := re.search(r"\(NEEDED\).*\[(.*)\]", line))
    }
    for name in sorted(needed | {_NVML}):
        link = torch / "lib" / name
        if not _OF_THE_SYSTEM.match(name) and (link.is_symlink() or not link.exists()):
            link.unlink(missing_ok=True)
            link.symlink_to(_LIBRARY)


def _install_values(torch: Path, headers: Path, directory: Path) -> None:
    """A package that torch loads whenever it is imported: its entry point is in the group `torch.backends`."""
    package, about = torch.parent / "simulated_gpu_values", torch.parent / "simulated_gpu_values-1.0.dist-info"
    for folder in (package, about):
        folder.mkdir(exist_ok=True)
    include = torch / "include"
    paths = [f"-I{one}" for one in (include, include / "torch/csrc/api/include", headers)]
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    built = directory / "libvalues.so"
    _run("g++", "-std=c++20", "-O1", "-fPIC", "-shared", *paths, _SOURCES / "values.cc", "-o", built, *libraries)
    _replace(built, package / built.name)
    (package / "__init__.py").write_text(
        "from pathlib import Path\n\n\ndef load() -> None:\n    import torch\n\n"
        '    torch.ops.load_library(str(Path(__file__).with_name("libvalues.so")))\n'
    )
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated_gpu_values\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[torch.backends]\nsimulated_gpu_values = simulated_gpu_values:load\n")
    files = [path for folder in (package, about) for path in folder.iterdir()]
    (about / "RECORD").write_text("".join(f"{path.relative_to(torch.parent)},,\n" for path in files))


def _replace(built: Path, installed: Path) -> None:
    """Install a library; processes that use the one before keep it."""
    new = installed.with_suffix(".new")
    shutil.copy(built, new)
    new.replace(installed)


def _compiled(source: Path, headers: Path, directory: Path) -> Path:
    output = directory / f"{source.stem}.o"
    _run("g++", "-std=c++17", "-O2", "-fPIC", "-Wall", f"-I{headers}", "-c", source, "-o", output)
    return output


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def _lines(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    main()
