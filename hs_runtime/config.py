"""The one configuration value, and the only place that reads the environment.

`RuntimeConfig` is made once, by the command line. The processes that SGLang spawns read the same
value back from one environment variable, so that no process can disagree with another.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from hs_runtime.policies.policy import DENSE, PolicyError, ServerConstants, SparsityPolicy

CONFIG_VARIABLE: Final = "HS_RUNTIME_CONFIG"
CACHE_VARIABLE: Final = "HS_CACHE_DIR"
API_KEY_VARIABLE: Final = "HS_API_KEY"
PLUGIN_FILTER_VARIABLE: Final = "SGLANG_PLUGINS"  # SGLang's: which plugins it may load
BACKEND_NAME: Final = "hierasparse"
PLUGIN_GROUP: Final = "sglang.srt.plugins"
PLUGIN_NAME: Final = "hierasparse"
FAULTS: Final = ("compression", "device")
PREFILL_KERNELS: Final = ("auto", "expanded", "torch", "sparse")
DEMO_MODEL: Final = "demo"


class ConfigError(ValueError):
    """A setting that cannot be served. The message names the setting, the value and the choices."""


def cache_dir() -> Path:
    """Where downloads, converted models and built kernels are kept: $HS_CACHE_DIR or ~/.cache."""
    chosen = os.environ.get(CACHE_VARIABLE, "")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "hierasparse"


def plugin_filter() -> frozenset[str] | None:
    """The only plugins that SGLang may load, None when it may load all that are installed."""
    names = os.environ.get(PLUGIN_FILTER_VARIABLE, "").split(",")
    return frozenset(name.strip() for name in names if name.strip()) or None


def read_api_key(file: str) -> bytes | None:
    """The key that clients must send: the text of `file`, else $HS_API_KEY, else None.

    Never part of RuntimeConfig, which is printed and handed to other processes. Raises ConfigError
    when the file cannot be read or the key is empty.
    """
    if not file:
        return os.environ.get(API_KEY_VARIABLE, "").strip().encode("utf-8") or None
    try:
        key = Path(file).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"api_key_file: cannot read {file}: {error.strerror}") from error
    if not key:
        raise ConfigError(f"api_key_file: {file} is empty")
    return key


def set_process_environment(settings: dict[str, str]) -> None:
    """Set variables for this process and those it will spawn.

    SGLang takes a few of its own switches from the environment only; they are set through here so
    that `os.environ` has one reader and one writer.
    """
    os.environ.update(settings)


def default_process_environment(settings: dict[str, str]) -> None:
    """The same, for variables that the user has not set."""
    set_process_environment({k: v for k, v in settings.items() if k not in os.environ})


def quiet_foreign_warnings() -> None:
    """Drop the UserWarnings that SGLang's imports raise in every process, about devices we do not
    use, unless the user chose what to see."""
    if not os.environ.get("PYTHONWARNINGS"):
        set_process_environment({"PYTHONWARNINGS": "ignore::UserWarning"})
        warnings.filterwarnings("ignore", category=UserWarning)


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Everything that is the server's and not the request's.

    `calibration_path` is the file, `constants.calibration` the digest of its content.
    `kv_cache_bytes` is the size of the arena of all layers on one rank; 0 takes what SGLang's own
    memory profile leaves. `check_integrity` verifies the pool's conservation laws whenever the
    scheduler is idle, `check_integrity_always` also after every planned batch (slow: for tests).
    `check_ranks` compares what the tensor-parallel ranks count after every batch (slow: for tests).
    `injected_fault` is for tests too: "compression:7" lets every seventh compression of a batch
    fail, "device:7" as if the device had. `drain_seconds` bounds how long a stopping server waits
    for its requests. `prefill_kernel`: "expanded" unpacks the sparse blocks that prefill reads and
    attends with our dense kernel (Hopper), "torch" with torch's attention (any device), "sparse"
    reads them where they lie; "auto" takes the first of these that the device has, and the last on
    a CPU.
    """

    constants: ServerConstants = field(default_factory=ServerConstants)
    default_policy: SparsityPolicy = DENSE
    calibration_path: str = ""
    model_path: str = DEMO_MODEL
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 30000
    api_key_file: str = ""
    cors_origins: tuple[str, ...] = ()
    max_request_bytes: int = 8 << 20
    max_running_streams: int = 256
    drain_seconds: float = 30.0
    kv_cache_bytes: int = 0
    check_integrity: bool = True
    check_integrity_always: bool = False
    check_ranks: bool = False
    injected_fault: str = ""
    prefill_kernel: str = "auto"

    def __post_init__(self) -> None:
        if not self.model_path:
            raise ConfigError(f"model: empty (give a folder, or '{DEMO_MODEL}')")
        if not self.host:
            raise ConfigError(
                "host: empty (127.0.0.1 serves this machine, 0.0.0.0 every interface)"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} (0 to 65535; 0 takes a free one)")
        for name in ("max_request_bytes", "max_running_streams", "drain_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}: {getattr(self, name)} (must be above 0)")
        if self.kv_cache_bytes < 0:
            raise ConfigError(
                f"kv_cache_bytes: {self.kv_cache_bytes} (0 takes what SGLang's profile leaves)"
            )
        kind, _, period = self.injected_fault.partition(":")
        if self.injected_fault and (kind not in FAULTS or not period.isdecimal() or period == "0"):
            raise ConfigError(
                f"injected_fault: {self.injected_fault!r} ({' or '.join(FAULTS)}, ':', a number)"
            )
        if self.prefill_kernel not in PREFILL_KERNELS:
            raise ConfigError(
                f"prefill_kernel: {self.prefill_kernel!r} (choose {', '.join(PREFILL_KERNELS)})"
            )
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(
                    f"cors_origins: {origin!r} (an http:// or https:// origin, or '*')"
                )

    @property
    def model_name(self) -> str:
        """The name that clients use in the `model` field."""
        return self.served_model_name or Path(self.model_path).name or self.model_path

    def to_json(self) -> str:
        """One canonical line; `from_json` gives back an equal value."""
        values = asdict(self)
        values["default_policy"] = json.loads(self.default_policy.to_json())
        values["constants"] = self.constants.as_dict()
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RuntimeConfig:
        """Raises ConfigError when the text is no JSON object or holds an unknown name."""
        try:
            values: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{CONFIG_VARIABLE}: not JSON ({error})") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{CONFIG_VARIABLE}: not a JSON object")
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(
                f"{CONFIG_VARIABLE}: unknown {', '.join(unknown)} (known: {', '.join(known)})"
            )
        if "constants" in values:
            values["constants"] = _constants(values["constants"])
        try:
            if "default_policy" in values:
                text = json.dumps(values["default_policy"])
                values["default_policy"] = SparsityPolicy.from_json(text)
            if "cors_origins" in values:
                values["cors_origins"] = tuple(values["cors_origins"])
            return cls(**values)
        except (PolicyError, TypeError) as error:
            raise ConfigError(f"{CONFIG_VARIABLE}: {error}") from error

    def to_env(self) -> dict[str, str]:
        """Publish to the processes this one spawns; returns the variable that was set."""
        variable = {CONFIG_VARIABLE: self.to_json()}
        set_process_environment(variable)
        return variable

    @classmethod
    def from_env(cls) -> RuntimeConfig:
        """The published value; the defaults when nobody published one."""
        text = os.environ.get(CONFIG_VARIABLE, "")
        return _published(text) if text else cls()


@lru_cache(maxsize=4)
def _published(text: str) -> RuntimeConfig:
    """Every request asks for its server's configuration, so it is read once."""
    return RuntimeConfig.from_json(text)


def is_published() -> bool:
    """Whether this process descends from `hs-runtime serve` (or a test that called `to_env`).

    SGLang loads every installed plugin, so a stock `sglang serve` in the same environment loads
    ours too and must not be changed by it.
    """
    return bool(os.environ.get(CONFIG_VARIABLE))


def _constants(values: Any) -> ServerConstants:
    if not isinstance(values, dict):
        raise ConfigError(f"constants: {values!r} (a JSON object)")
    known = [each.name for each in fields(ServerConstants)]
    if unknown := sorted(set(values) - set(known)):
        raise ConfigError(f"constants: unknown {', '.join(unknown)} (known: {', '.join(known)})")
    try:
        return ServerConstants(**values)
    except ValueError as error:
        raise ConfigError(f"constants: {error}") from error
