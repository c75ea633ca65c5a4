"""What this process would serve on: CUDA devices, or the CPU. Asks torch, changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Device:
    """One device as torch sees it (so CUDA_VISIBLE_DEVICES has been applied).

    `capability` is (major, minor) of a CUDA device, None of a CPU. `free_bytes` and `driver` are
    None where nobody can tell without taking memory on the device.
    """

    kind: str  # "cpu" or "cuda"
    name: str
    total_bytes: int
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    driver: str | None = None


def probe_devices(wanted: str = "auto") -> list[Device]:
    """The CUDA devices, or the CPU if there are none; `wanted` is "auto", "cuda" or "cpu".

    Empty when CUDA devices are wanted and there are none. Creates no CUDA context.
    """
    if wanted != "cpu":
        cuda = _cuda_devices()
        if cuda or wanted == "cuda":
            return cuda
    return [_cpu()]


def _cuda_devices() -> list[Device]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Device(
                kind="cuda",
                name=properties.name,
                total_bytes=properties.total_memory,
                free_bytes=_nvml_free_bytes(str(properties.uuid)),
                capability=(properties.major, properties.minor),
                driver=_nvml_driver(),
            )
        )
    return found


def _cpu() -> Device:
    meminfo = dict(
        line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line
    )
    total = _kibibytes(meminfo.get("MemTotal"))
    free = _kibibytes(meminfo.get("MemAvailable"))
    limit = _read("/sys/fs/cgroup/memory.max").strip()  # a container's share, "max" without one
    if limit.isdigit():
        used = _read("/sys/fs/cgroup/memory.current").strip()
        total = min(total, int(limit))
        free = min(free, int(limit) - int(used) if used.isdigit() else free)
    names = [
        line.split(":", 1)[1].strip()
        for line in _read("/proc/cpuinfo").splitlines()
        if line.startswith("model name")
    ]
    return Device(kind="cpu", name=names[0] if names else "CPU", total_bytes=total, free_bytes=free)


def _kibibytes(text: str | None) -> int:
    return int(text.split()[0]) << 10 if text else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _nvml_driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # NVML is information only: no library, no permission, an old driver
        return None
    return driver.decode() if isinstance(driver, bytes) else str(driver)


def _nvml_free_bytes(uuid: str) -> int | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        full = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(full)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except Exception:  # as above
        return None
