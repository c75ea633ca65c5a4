"""Compiles csrc into one shared library for each target, and binds it with ctypes.

A checkout compiles on first use (`load`), into build/kernels under a name that is a digest of the
sources and flags; an image compiles ahead of time (`--output`), and an installed
package without sources takes what is in hs_kernels/lib. From the command line:

    python -m hs_kernels.build                     every target, whole
    python -m hs_kernels.build --target 90a        one target
    python -m hs_kernels.build --smoke             one instance of each source, no library
    python -m hs_kernels.build --target 90a --output kernels/hs_kernels/lib
"""

import argparse
import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from filelock import FileLock

PACKAGE = Path(__file__).resolve().parent
SOURCES = PACKAGE.parents[1] / "csrc"
BUILT = PACKAGE.parents[1] / "build" / "kernels"
AHEAD_OF_TIME = PACKAGE / "lib"
TARGETS = ("80", "86", "89", "90a")
FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v")
COMPILE_SECONDS = 900

# ptxas says in these warnings that it serialised or ignored what a kernel is built on.
_BROKEN_PROMISE = re.compile(r"\(C75\d\d\)|C75\d\d:")


class BuildError(RuntimeError):
    """The compiler is missing, or refused, or warned of what we do not ship."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """An nvcc and what its `--version` says."""

    path: Path
    version: str

    @property
    def root(self) -> Path:
        return self.path.parents[1]


@cache
def find_compiler() -> Compiler:
    """nvcc from PATH, else from the PyPI package nvidia-cuda-nvcc."""
    candidates = [Path(found) for found in [shutil.which("nvcc")] if found]
    candidates += [Path(entry) / "nvidia" / "cu13" / "bin" / "nvcc" for entry in sys.path if entry]
    for path in candidates:
        if not path.is_file():
            continue
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
        if done.returncode == 0:
            return Compiler(path, done.stdout.strip().splitlines()[-1])
    raise BuildError(
        "no nvcc: neither on PATH nor from the package nvidia-cuda-nvcc "
        "(pip install 'hierasparse-runtime[cuda]')"
    )


def target_of(capability: tuple[int, int]) -> str:
    """The target that a device of this compute capability runs."""
    major, minor = capability
    if (major, minor) == (9, 0):
        return "90a"
    # Machine code of sm_8x runs on every later 8.y.
    runnable = [t for t in TARGETS if t.isdigit() and int(t) // 10 == major]
    runnable = [t for t in runnable if int(t) % 10 <= minor]
    if not runnable:
        raise BuildError(f"no kernels for compute capability {major}.{minor}; targets: {TARGETS}")
    return runnable[-1]


def sources(target: str) -> list[Path]:
    """The files compiled for a target; *_sm90.cu only for Hopper."""
    files = sorted(SOURCES.glob("*.cu"))
    return [f for f in files if target == "90a" or not f.stem.endswith("_sm90")]


def flags(target: str) -> list[str]:
    chosen = [f"-I{SOURCES / 'include'}", f"-gencode=arch=compute_{target},code=sm_{target}"]
    if target != "90a":
        chosen.append("-DHS_AMPERE_COPIES")  # cp.async in place of bulk copies
    return [*FLAGS, *chosen]


def digest(target: str, extra: Sequence[str] = ()) -> str:
    """Of the sources and flags of a target's library; the same with or without a compiler here."""
    h = hashlib.sha256()
    for part in (target, *FLAGS, *extra):
        h.update(part.encode() + b"\0")
    files = sources(target) + sorted((SOURCES / "include").rglob("*.*h"))
    for path in [*files, PACKAGE / "build.py"]:
        h.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return h.hexdigest()[:16]


def library_name(target: str, tag: str) -> str:
    return f"libhs_sm{target}_{tag}.so"


def compile_source(source: Path, target: str, output: Path, extra: Sequence[str] = ()) -> str:
    """One object file. Gives ptxas' report; raises BuildError on errors and C75xx warnings."""
    command = [str(find_compiler().path), *flags(target), *extra]
    command += ["-c", str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    report = done.stdout + done.stderr
    if done.returncode != 0:
        raise BuildError(f"{source.name} for sm_{target}: nvcc failed\n{report}")
    if _BROKEN_PROMISE.search(report):
        output.unlink(missing_ok=True)
        lines = [line for line in report.splitlines() if _BROKEN_PROMISE.search(line)]
        raise BuildError(f"{source.name} for sm_{target}: " + "\n".join(lines))
    return report


def spills(report: str) -> dict[str, int]:
    """Bytes of spill stores of each kernel that has any, from the report of ptxas."""
    found = {}
    name = ""
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name = match[1]
        elif (match := re.search(r"(\d+) bytes spill stores", line)) and int(match[1]):
            found[name] = int(match[1])
    return found


def build(
    target: str, output: Path | None = None, extra: Sequence[str] = (), jobs: int = 2
) -> Path:
    """The library of a target, compiled unless a current one exists. `extra` are compiler flags."""
    if target not in TARGETS:
        raise BuildError(f"unknown target {target!r}; targets: {TARGETS}")
    tag = digest(target, extra)
    library = (output or BUILT) / library_name(target, tag)
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock"), timeout=COMPILE_SECONDS):
        if library.exists():
            return library
        work = library.with_suffix(".objects")
        work.mkdir(exist_ok=True)
        try:
            files = sources(target)
            objects = [work / f"{f.stem}.o" for f in files]
            with ThreadPoolExecutor(max_workers=jobs) as pool:
                list(
                    pool.map(
                        lambda pair: compile_source(pair[0], target, pair[1], extra),
                        zip(files, objects, strict=True),
                    )
                )
            root = find_compiler().root
            made = work / library.name
            command = [str(find_compiler().path), "-shared", "-cudart", "static"]
            command += [f"-L{root / 'lib'}", f"-L{root / 'lib64'}"]
            command += [*map(str, objects), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            if done.returncode != 0:
                raise BuildError(f"linking {library.name} failed\n{done.stdout}{done.stderr}")
            made.replace(library)  # at once, so that a reader never sees half a library
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return library


def smoke(targets: Sequence[str] = TARGETS, jobs: int = 2) -> list[str]:
    """Compiles one instance of each source for each target; gives one line for each pair.

    A target whose sources have not changed since they last compiled is not compiled again.
    """
    lines = []
    for target in targets:
        log = BUILT / f"smoke_sm{target}_{digest(target, ['-DHS_SMOKE'])}.log"
        if not log.exists():
            log.parent.mkdir(parents=True, exist_ok=True)
            text = "\n".join(_smoke(target, jobs))
            log.write_text(text)
        lines += log.read_text().splitlines()
    return lines


def _smoke(target: str, jobs: int) -> list[str]:
    def one(source: Path) -> str:
        output = Path(work) / f"{source.stem}.o"
        spilled = spills(compile_source(source, target, output, ["-DHS_SMOKE"]))
        return f"{source.name} sm_{target}: ok" + (f", spills {spilled}" if spilled else "")

    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(max_workers=jobs) as pool:
        return list(pool.map(one, sources(target)))


def find_library(target: str) -> Path:
    """The library ahead of time if it is current or there are no sources, else `build`."""
    if SOURCES.is_dir():
        current = AHEAD_OF_TIME / library_name(target, digest(target))
        return current if current.exists() else build(target)
    shipped = sorted(AHEAD_OF_TIME.glob(library_name(target, "*")))
    if len(shipped) != 1:
        raise BuildError(f"{len(shipped)} libraries for sm_{target} in {AHEAD_OF_TIME}, not one")
    return shipped[0]


@cache
def load(target: str) -> ctypes.CDLL:
    """The bound library; loading it needs a CUDA driver."""
    library = ctypes.CDLL(str(find_library(target)))
    library.hs_error_string.restype = ctypes.c_char_p
    library.hs_error_string.argtypes = [ctypes.c_int]
    return library


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hs_kernels.build", description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--smoke", action="store_true", help="one instance of each, no library")
    parser.add_argument("--output", type=Path, help="folder of the libraries")
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args(arguments)
    targets = chosen.target or list(TARGETS)
    try:
        if chosen.smoke:
            print("\n".join(smoke(targets, chosen.jobs)))
        else:
            for target in targets:
                print(build(target, chosen.output, jobs=chosen.jobs))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
