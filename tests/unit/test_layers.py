"""The architecture as a table: what each module may import. Files are parsed, nothing is run."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = {
    "hs_kernels": ROOT / "kernels",
    "hs_runtime": ROOT,
    "hs_server": ROOT / "server",
}

# An upgrade of SGLang is a review of these ten files.
IMPORT_SGLANG = {
    "hs_runtime.pool.kv_pool",
    "hs_runtime.pool.allocator",
    "hs_runtime.pool.radix_cache",
    "hs_runtime.scheduler.request_slots",
    "hs_runtime.scheduler.prefill_adder",
    "hs_runtime.attention.backend",
    "hs_runtime.sglang_seam",
    "hs_runtime.spawn",
    "hs_runtime.evaluation.engine",
    "hs_server.engine",
}

# What of ours a part may import, by the longest prefix that matches the importing module. A part
# may always import itself.
FREE = ("hs_runtime.config", "hs_runtime.metrics", "hs_runtime.__init__")
WIRING = ("hs_runtime", "hs_kernels")
MAY_IMPORT = {
    "hs_kernels": (),
    "hs_runtime.__init__": (),
    "hs_runtime.metrics": ("hs_runtime.policies",),
    "hs_runtime.device": (),
    "hs_runtime.policies": (),
    "hs_runtime.config": ("hs_runtime.policies.policy",),
    "hs_runtime.pool": ("hs_kernels", *FREE),
    "hs_runtime.scheduler": ("hs_runtime.policies", *FREE),
    "hs_runtime.attention": ("hs_runtime.pool", "hs_kernels", *FREE),
    "hs_runtime.compression": (
        "hs_runtime.policies",
        "hs_runtime.scheduler",
        "hs_runtime.pool",
        "hs_kernels",
        *FREE,
    ),
    "hs_runtime.batching": (
        "hs_runtime.attention.plan",
        "hs_runtime.compression",
        "hs_runtime.scheduler",
        *FREE,
    ),
    # SGLang's shapes of these things stand above what decides: they hand requests over to it.
    "hs_runtime.pool.radix_cache": (
        "hs_runtime.batching",
        "hs_runtime.compression",
        "hs_runtime.policies",
        "hs_runtime.pool",
        "hs_runtime.scheduler",
        *FREE,
    ),
    "hs_runtime.scheduler.request_slots": (
        "hs_runtime.compression",
        "hs_runtime.policies",
        *FREE,
    ),
    "hs_runtime.scheduler.prefill_adder": (
        "hs_runtime.compression",
        "hs_runtime.scheduler",
        *FREE,
    ),
    "hs_runtime.demo_model": FREE,
    "hs_runtime.calibration": ("hs_runtime.policies", "hs_kernels", *FREE),
    "hs_runtime.launch": ("hs_runtime.device", *FREE),
    "hs_runtime.capacity": (
        "hs_runtime.device",
        "hs_runtime.launch",
        "hs_runtime.policies",
        "hs_runtime.pool.sizing",
        "hs_runtime.scheduler",
        "hs_kernels.block_format",
        *FREE,
    ),
    "hs_runtime.evaluation": (
        "hs_runtime.device",
        "hs_runtime.launch",
        "hs_runtime.policies",
        *FREE,
    ),
    "hs_runtime.evaluation.engine": WIRING,
    "hs_runtime.sglang_seam": WIRING,
    "hs_runtime.spawn": WIRING,
    # Commands; the seam and the server are looked up when the command runs, not at import.
    "hs_runtime.doctor": WIRING,
    "hs_runtime.cli": WIRING,
    "hs_server": ("hs_runtime",),
}

# Upward imports inside a function, each with its reason to exist: `serve` starts the server.
LAZY_UPWARD = {("hs_runtime.cli", "hs_server.__main__")}

# Foreign packages that only some parts may import, at module level or inside functions.
ONLY = {
    "sglang": IMPORT_SGLANG,
    "sgl_kernel": IMPORT_SGLANG,
    "tilelang": {"hs_kernels.portable"},
    "fastapi": {"hs_server"},
    "starlette": {"hs_server"},
    "uvicorn": {"hs_server"},
    "http_sf": {"hs_server"},
    "typer": {"hs_runtime.cli"},
    "gguf": {"hs_runtime.demo_model"},
    "hypothesis": set(),
    "pytest": set(),
    "tests": set(),
}


def modules() -> dict[str, Path]:
    found = {}
    for package, root in SOURCE_ROOTS.items():
        for path in sorted((root / package).rglob("*.py")):
            found[".".join(path.relative_to(root).with_suffix("").parts)] = path
    return found


MODULES = modules()


def is_part(module: str, part: str) -> bool:
    return module == part or module.startswith(part + ".")


def imports(module: str) -> Iterator[tuple[str, bool, int]]:
    """(imported module, whether at module level, line), relative imports made absolute.

    `from package import name` counts as `package.name` when that is one of our modules. Imports
    under `if TYPE_CHECKING:` are declarations, and are left out.
    """
    yield from _imports(module, ast.parse(MODULES[module].read_text(encoding="utf-8")), True)


def _imports(module: str, node: ast.AST, at_top: bool) -> Iterator[tuple[str, bool, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, at_top, child.lineno
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parents = module.split(".")[: -child.level]
                base = ".".join([*parents, base] if base else parents)
            for alias in child.names:
                name = f"{base}.{alias.name}"
                yield (name if name in MODULES else base), at_top, child.lineno
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            for other in child.orelse:
                yield from _imports(module, other, at_top)
        else:
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(module, child, at_top and not function)


def row_of(module: str) -> str:
    rows = [part for part in MAY_IMPORT if is_part(module, part)]
    assert rows, f"{module} has no row in MAY_IMPORT: say which layer it belongs to"
    return max(rows, key=len)


def as_module(name: str) -> str:
    return f"{name}.__init__" if f"{name}.__init__" in MODULES else name


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    row = row_of(module)
    wrong = []
    for imported, _, line in imports(module):
        if imported.split(".")[0] not in SOURCE_ROOTS or (module, imported) in LAZY_UPWARD:
            continue
        target = as_module(imported)
        if not any(is_part(target, part) for part in (row, *MAY_IMPORT[row])):
            wrong.append(f"line {line}: {imported}")
    assert not wrong, f"{module} may import {MAY_IMPORT[row]} of ours, not {wrong}"


@pytest.mark.parametrize("module", MODULES)
def test_foreign_packages_stay_where_they_belong(module: str) -> None:
    wrong = [
        f"line {line}: {imported}"
        for imported, _, line in imports(module)
        if (owners := ONLY.get(imported.split(".")[0])) is not None
        and not any(is_part(module, owner) for owner in owners)
    ]
    assert not wrong, f"{module} imports {wrong}"


def test_what_decides_does_not_know_sglang() -> None:
    """In the product, only modules that import SGLang import modules that do."""
    wrong = [
        (module, imported)
        for module in MODULES
        if is_part(module, "hs_runtime") and module not in IMPORT_SGLANG
        for imported, _, _ in imports(module)
        if imported in IMPORT_SGLANG
    ]
    assert not wrong


def test_upward_imports_are_inside_functions() -> None:
    found = {
        (module, imported): at_top
        for module in MODULES
        for imported, at_top, _ in imports(module)
        if (module, imported) in LAZY_UPWARD
    }
    assert found == {pair: False for pair in LAZY_UPWARD}


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and f"{node.value.id}.{node.attr}" in (
            "os.environ",
            "os.environb",
            "os.getenv",
            "os.putenv",
            "os.unsetenv",
        )
    return (
        isinstance(node, ast.ImportFrom)
        and node.module == "os"
        and any(alias.name in ("environ", "environb", "getenv") for alias in node.names)
    )


def test_only_config_reads_the_environment() -> None:
    readers = {
        module
        for module, path in MODULES.items()
        if any(map(reads_environment, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert readers == {"hs_runtime.config"}


def test_the_source_roots_do_not_shadow_other_packages() -> None:
    """SGLang depends on a package named `kernels`; a root `kernels/__init__.py` would hide it."""
    assert not [name for name in ("kernels", "server") if (ROOT / name / "__init__.py").exists()]


def test_modules_without_sglang_import_without_it() -> None:
    """In one fresh interpreter in which SGLang, CUDA code and the web framework do not exist."""
    blocked = ("sglang", "sgl_kernel", "tilelang", "flashinfer", "triton", "tvm_ffi")
    names = [
        name.removesuffix(".__init__")
        for name in MODULES
        if name not in IMPORT_SGLANG and name != "hs_kernels.portable"
    ]
    program = (
        "import importlib, sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(map(str, SOURCE_ROOTS.values())), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
