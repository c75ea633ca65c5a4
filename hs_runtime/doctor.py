"""What stands between this machine and a serving process: a list of checks, each with its remedy.

A check never raises: a missing library is a finding.
"""

from __future__ import annotations

import importlib
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, Final

from hs_kernels import build
from hs_runtime.config import (
    CACHE_VARIABLE,
    PLUGIN_GROUP,
    PLUGIN_NAME,
    cache_dir,
    plugin_filter,
)
from hs_runtime.demo_model import demo_model_folder
from hs_runtime.device import Device, probe_devices

SGLANG_VERSION: Final = "0.5.17"
LEAST_CAPABILITY: Final = (8, 0)  # the first with 2:4 sparse tensor cores
_PYTHON_VERSIONS: Final = ((3, 11), (3, 12))
_LEAST_FREE_BYTES: Final = 4 << 30  # the demonstration model, its cache and three Python processes


@dataclass(frozen=True, slots=True)
class Check:
    """One finding; `passed` False prevents serving. `remedy` is empty when nothing need be done."""

    name: str
    passed: bool
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    checks: tuple[Check, ...]
    devices: tuple[Device, ...]
    refusals: tuple[dict[str, str], ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {"passed": self.passed, **asdict(self)}


def examine(device: str = "auto") -> Report:
    """Look at versions, plugin, devices, kernels, memory and disk; starts nothing."""
    devices: list[Device] = []
    checks = [_python(), *(_distribution(name) for name in ("torch", "transformers"))]
    checks += [_sglang(), _plugin()]
    try:
        devices = probe_devices(device)
    except ImportError as error:
        checks.append(Check("device", False, str(error), "install torch: pip install -e ."))
    else:
        checks += _devices(devices, device)
        checks.append(_kernels(devices))
    refusal_check, refusals = _refusals()
    checks += [refusal_check, _cache()]
    return Report(tuple(checks), tuple(devices), tuple(refusals))


def _python() -> Check:
    version = sys.version_info[:2]
    return Check(
        "python",
        version in _PYTHON_VERSIONS,
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "" if version in _PYTHON_VERSIONS else "use Python 3.11 or 3.12",
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _distribution(name: str) -> Check:
    version = _version(name)
    return Check(
        name,
        version is not None,
        version or "not installed",
        "" if version else "pip install -e . (SGLang brings it)",
    )


def _sglang() -> Check:
    version = _version("sglang")
    fits = version == SGLANG_VERSION
    return Check(
        "sglang",
        fits,
        version or "not installed",
        "" if fits else f"pip install sglang=={SGLANG_VERSION}: the plugin binds to its internals",
    )


def _plugin() -> Check:
    found = [
        entry for entry in metadata.entry_points(group=PLUGIN_GROUP) if entry.name == PLUGIN_NAME
    ]
    allowed = plugin_filter()
    if not found:
        return Check(
            "plugin",
            False,
            f"no entry point {PLUGIN_NAME} in the group {PLUGIN_GROUP}",
            "install the project (pip install -e .); a source tree on the path is not enough",
        )
    if allowed is not None and PLUGIN_NAME not in allowed:
        return Check(
            "plugin",
            False,
            f"SGLANG_PLUGINS admits only {', '.join(sorted(allowed)) or 'nothing'}",
            f"unset SGLANG_PLUGINS or add {PLUGIN_NAME}",
        )
    return Check("plugin", True, f"{found[0].name} -> {found[0].value}")


def _devices(devices: Sequence[Device], wanted: str) -> list[Check]:
    if not devices:
        return [
            Check(
                "device",
                False,
                f"no {wanted} device is visible to torch",
                "install a driver, check CUDA_VISIBLE_DEVICES, or serve with --device cpu",
            )
        ]
    checks = []
    for index, device in enumerate(devices):
        name = f"device {index}"
        memory = f"{device.total_bytes / 2**30:.1f} GiB"
        if device.free_bytes is not None:
            memory += f", {device.free_bytes / 2**30:.1f} GiB free"
        if device.capability is None:
            short = (device.free_bytes or device.total_bytes) < _LEAST_FREE_BYTES
            checks.append(
                Check(
                    name,
                    not short,
                    f"{device.name} (no CUDA device), {memory}",
                    f"free {_LEAST_FREE_BYTES >> 30} GiB of memory" if short else "",
                )
            )
            continue
        fits = device.capability >= LEAST_CAPABILITY
        major, minor = device.capability
        checks.append(
            Check(
                name,
                fits,
                f"{device.name}, compute capability {major}.{minor}, {memory}, "
                f"driver {device.driver or 'unknown'}",
                "" if fits else "2:4 sparse tensor cores begin with compute capability 8.0",
            )
        )
    return checks


def _kernels(devices: Sequence[Device]) -> Check:
    capabilities = sorted({device.capability for device in devices if device.capability})
    if not capabilities:
        return Check("kernels", True, "reference operators (torch, float32)")
    try:
        targets = [build.target_of(capability) for capability in capabilities]
        states = [f"sm_{target}: {_library_state(target)}" for target in targets]
    except build.BuildError as error:
        return Check("kernels", False, str(error), "pip install -e '.[cuda]', or another device")
    ours = all(capability == (9, 0) for capability in capabilities)
    prefill = "our dense kernel" if ours else "torch's attention"
    return Check("kernels", True, f"{', '.join(states)}; prefill by {prefill}")


def _library_state(target: str) -> str:
    """Whether the kernels lie ready; raises BuildError if they do not and cannot be compiled."""
    if not build.SOURCES.is_dir():
        return f"ready ({build.find_library(target).name})"  # installed without sources
    name = build.library_name(target, build.digest(target))
    if any((folder / name).exists() for folder in (build.AHEAD_OF_TIME, build.BUILT)):
        return f"ready ({name})"
    return f"compiled at the first start ({build.find_compiler().version})"


def _refusals() -> tuple[Check, list[dict[str, str]]]:
    try:
        seam = importlib.import_module("hs_runtime.sglang_seam")
        refusals = [dict(row) for row in seam.refusal_table()]
    except ImportError as error:
        return Check("seam", False, str(error), "reinstall with pip install -e ."), []
    return Check("seam", True, f"{len(refusals)} SGLang options are refused at start"), refusals


def _cache() -> Check:
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    model = demo_model_folder(folder)
    state = "demonstration model ready" if model.is_dir() else "demonstration model not yet fetched"
    return Check("cache", True, f"{folder} (${CACHE_VARIABLE}), {free / 1e9:.1f} GB free, {state}")
