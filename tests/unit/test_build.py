"""The compiler driver: what is compiled, when it is compiled again, and what it refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from hs_kernels import build


def test_importing_the_ops_compiles_nothing() -> None:
    code = (
        "import sys, hs_kernels.ops; "
        "assert 'hs_kernels.cuda' not in sys.modules and 'hs_kernels.build' not in sys.modules"
    )
    root = Path(build.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=120)


@pytest.mark.parametrize(
    ("capability", "target"),
    [((8, 0), "80"), ((8, 6), "86"), ((8, 7), "86"), ((8, 9), "89"), ((9, 0), "90a")],
)
def test_a_device_runs_the_nearest_target(capability: tuple[int, int], target: str) -> None:
    assert build.target_of(capability) == target


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (12, 0)])
def test_a_device_without_kernels_is_an_error(capability: tuple[int, int]) -> None:
    with pytest.raises(build.BuildError, match=f"{capability[0]}.{capability[1]}"):
        build.target_of(capability)


def test_hopper_sources_are_compiled_for_hopper_alone() -> None:
    everywhere = {f.name for f in build.sources("80")}
    assert {"decode.cu", "compress.cu", "refs.cu", "merge_states.cu"} <= everywhere
    assert not any("sm90" in name for name in everywhere)
    assert everywhere <= {f.name for f in build.sources("90a")}


def test_the_digest_follows_sources_headers_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "include" / "hs").mkdir(parents=True)
    source, header = tmp_path / "a.cu", tmp_path / "include" / "hs" / "a.cuh"
    source.write_text("int a;")
    header.write_text("int b;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    seen = [build.digest("80"), build.digest("90a"), build.digest("80", ["-DX"])]
    source.write_text("int c;")
    seen.append(build.digest("80"))
    header.write_text("int d;")
    seen.append(build.digest("80"))
    assert len(set(seen)) == len(seen)
    assert build.digest("80") == seen[-1]


def test_spills_are_read_from_the_report() -> None:
    report = (
        "ptxas info    : Compiling entry function '_Zone' for 'sm_90a'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Compiling entry function '_Ztwo' for 'sm_90a'\n"
        "    16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads\n"
    )
    assert build.spills(report) == {"_Ztwo": 24}


def _pretend_compiler(folder: Path, script: str) -> build.Compiler:
    path = folder / "bin" / "nvcc"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return build.Compiler(path, "pretend")


def test_a_serialised_kernel_does_not_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warning = "ptxas info : (C7510) Potential Performance Loss: wgmma serialized in 'f'"
    compiler = _pretend_compiler(tmp_path, f'echo "{warning}" >&2')
    monkeypatch.setattr(build, "find_compiler", lambda: compiler)
    with pytest.raises(build.BuildError, match="C7510"):
        build.compile_source(tmp_path / "f.cu", "90a", tmp_path / "f.o")


def test_a_compile_error_shows_what_the_compiler_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = _pretend_compiler(tmp_path, "echo 'f.cu(3): error: no' >&2; exit 2")
    monkeypatch.setattr(build, "find_compiler", lambda: compiler)
    with pytest.raises(build.BuildError, match=r"f\.cu\(3\): error: no"):
        build.compile_source(tmp_path / "f.cu", "80", tmp_path / "f.o")


def test_a_package_without_sources_takes_the_library_it_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SOURCES", tmp_path / "absent")
    monkeypatch.setattr(build, "AHEAD_OF_TIME", tmp_path)
    with pytest.raises(build.BuildError, match="0 libraries"):
        build.find_library("90a")
    shipped = tmp_path / build.library_name("90a", "0123")
    shipped.touch()
    assert build.find_library("90a") == shipped


def _compiler_or_skip() -> build.Compiler:
    try:
        return build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.mark.timeout(480)
def test_every_source_compiles_for_every_target() -> None:
    """The smoke set: one instance of each source and target."""
    _compiler_or_skip()
    lines = build.smoke()
    assert len(lines) == sum(len(build.sources(t)) for t in build.TARGETS)
    assert not [line for line in lines if ": ok" not in line]
