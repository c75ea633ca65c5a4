"""Our process targets, and the stand-in for `sgl_kernel` on machines without a CUDA driver.

SGLang's children import nearly all of SGLang while they unpickle their target, before any plugin
runs. What must come first is done here, because unpickling *our* target imports this module first.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hs_runtime.config import default_process_environment, set_process_environment

_STANDIN = "sgl_kernel"


def has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


class _Absent:
    """An operator of the CUDA library on a machine without a driver: calling it is an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{_STANDIN}.{self._name} needs a CUDA driver, and there is none")


class _StandinLoader(importlib.abc.Loader):
    """Loads the package without its compiled library; pure-Python submodules stay real."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def absent(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Absent(name)

        module.__getattr__ = absent  # type: ignore[method-assign]


class _StandinFinder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _STANDIN:
            return None
        real = importlib.machinery.PathFinder.find_spec(fullname, path)
        if real is None or real.submodule_search_locations is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, _StandinLoader(), is_package=True)
        spec.submodule_search_locations = list(real.submodule_search_locations)
        return spec


def prepare_process() -> None:
    """Must run before the first import of `sglang.srt` in every process. Idempotent."""
    if has_cuda_driver() or any(isinstance(each, _StandinFinder) for each in sys.meta_path):
        return
    if _STANDIN in sys.modules:
        raise RuntimeError(f"{_STANDIN} was imported before its stand-in")
    set_process_environment({"SGLANG_USE_CPU_ENGINE": "1"})
    # libgomp waits by spinning: beside another busy process a decode step of 20 ms took 800 ms.
    default_process_environment({"GOMP_SPINCOUNT": "1000"})
    sys.meta_path.insert(0, _StandinFinder())


prepare_process()  # at import: a child unpickles its target from here, before SGLang is imported


def _load_plugin() -> None:
    from sglang.srt.plugins import load_plugins

    from hs_runtime import sglang_seam

    load_plugins()
    sglang_seam.verify()


def _leave_stopping_to_the_server() -> None:
    """Ctrl-C and service runners signal the whole group; a child that ends first looks like a crash
    and would cut the drain short. The server kills its children, and they die if it does."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Target of the scheduler processes; refuses to run without the plugin."""
    _leave_stopping_to_the_server()
    from sglang.srt.managers.scheduler import run_scheduler_process

    _load_plugin()
    run_scheduler_process(*args, **kwargs)


def run_evaluated_scheduler(
    *args: Any, tap_folder: str, layers: bool = False, stock: bool = False, **kwargs: Any
) -> None:
    """Target of the scheduler processes of `hs-runtime eval`: with the tap that reads its jobs in
    `tap_folder`, and with `layers` one that adds up K and V there. `stock` is SGLang as it is, but
    for the tap. No server starts this target."""
    _leave_stopping_to_the_server()
    import torch
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins import load_plugins

    from hs_runtime import sglang_seam
    from hs_runtime.evaluation.layers import FILE, LayerTap
    from hs_runtime.evaluation.tap import ServingTap

    def is_first_rank() -> bool:
        return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0

    hooks = [*sglang_seam.TAP_HOOKS, *([sglang_seam.LAYER_HOOK] if layers else [])]
    sglang_seam.register_tap(ServingTap(tap_folder, is_first_rank))
    if layers:
        sglang_seam.register_layer_tap(LayerTap(Path(tap_folder) / FILE))
    load_plugins()
    sglang_seam.verify_hooks(hooks)
    if not stock:
        sglang_seam.verify()
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """Target of the detokenizer process."""
    _leave_stopping_to_the_server()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)
