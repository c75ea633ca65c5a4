"""`hs-runtime`: the one command line. Each command gathers values and hands over; no logic here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hs_runtime import __version__
from hs_runtime.config import (
    DEMO_MODEL,
    PLUGIN_FILTER_VARIABLE,
    PLUGIN_NAME,
    ConfigError,
    RuntimeConfig,
    cache_dir,
    quiet_foreign_warnings,
    read_api_key,
    set_process_environment,
)
from hs_runtime.demo_model import MODEL_NAME as DEMO_MODEL_NAME
from hs_runtime.demo_model import DemoModelError, ensure_demo_model
from hs_runtime.device import probe_devices
from hs_runtime.launch import LaunchPlan, plan_launch
from hs_runtime.policies.policy import ANCHORS, PRESETS, PolicyError, ServerConstants, parse_policy

app = typer.Typer(
    help="Serve long contexts from a KV cache whose blocks are dense or 2:4-sparse.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEVICES = ("auto", "cpu", "cuda")
_DEFAULTS = ServerConstants()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hs-runtime {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """The options of the program itself."""


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any other flag goes to SGLang's server arguments as it is, e.g. --tp-size 2.",
)
def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "--model-path",
            help=f"Folder or hub name; '{DEMO_MODEL}' fetches a small one.",
        ),
    ] = DEMO_MODEL,
    served_model_name: Annotated[str, typer.Option(help="Name in the API.")] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 30000,
    device: Annotated[str, typer.Option(help=" | ".join(_DEVICES))] = "auto",
    default_policy: Annotated[
        str, typer.Option(help=f"For requests that name none: {' | '.join(PRESETS)}.")
    ] = "dense",
    segment: Annotated[
        int, typer.Option(help="Tokens compressed together, and the reuse granularity.")
    ] = _DEFAULTS.segment,
    window: Annotated[
        int, typer.Option(help="Latest tokens that decode reads dense.")
    ] = _DEFAULTS.window,
    sink: Annotated[int, typer.Option(help="First tokens, always dense.")] = _DEFAULTS.sink,
    anchor: Annotated[
        str, typer.Option(help=f"Dense region of prefill: {' | '.join(ANCHORS)}.")
    ] = _DEFAULTS.anchor,
    pruner: Annotated[
        str, typer.Option(help="Default: 'calibrated' with a calibration file, else 'magnitude'.")
    ] = "",
    calibration: Annotated[
        Path | None, typer.Option(help="File written by `hs-runtime calibrate`.")
    ] = None,
    kv_cache: Annotated[
        str, typer.Option(help="Size of the KV cache, e.g. 40GiB. Default: what memory allows.")
    ] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients must send.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call; repeatable.")
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(help="How long a stopping server waits for its requests.")
    ] = 30.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started, as JSON, and stop.")
    ] = False,
) -> None:
    """Start the OpenAI-compatible server."""
    try:
        config = RuntimeConfig(
            constants=_constants(
                sink=sink,
                window=window,
                segment=segment,
                anchor=anchor,
                pruner=pruner or ("calibrated" if calibration else _DEFAULTS.pruner),
                calibration=_digest(calibration) if calibration else "",
            ),
            default_policy=parse_policy(default_policy),
            calibration_path=str(calibration.resolve()) if calibration else "",
            model_path=model,
            served_model_name=served_model_name,
            host=host,
            port=port,
            api_key_file=str(api_key_file.resolve()) if api_key_file else "",
            cors_origins=tuple(cors_origin or ()),
            drain_seconds=drain_seconds,
            kv_cache_bytes=_size_bytes(kv_cache) if kv_cache else 0,
        )
        read_api_key(config.api_key_file)  # a missing key is found before the model loads
        config, plan = _resolve(config, device, context.args, fetch=not dry_run)
    except (ConfigError, PolicyError, DemoModelError) as error:
        typer.secho(f"hs-runtime serve: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    if dry_run:
        typer.echo(
            json.dumps(
                {"config": json.loads(config.to_json()), "sglang_arguments": plan.arguments},
                indent=2,
            )
        )
        return
    # Only our plugin: the others that SGLang's dependencies install hook its command line.
    set_process_environment({PLUGIN_FILTER_VARIABLE: PLUGIN_NAME})
    quiet_foreign_warnings()
    config.to_env()
    # The product may not depend on its HTTP front at import; only this line looks up a layer.
    from hs_server.__main__ import run

    run(config, plan.arguments)


@app.command(
    name="eval",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Any other flag goes to SGLang's server arguments as it is, e.g. --tp-size 2.",
)
def evaluate(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option(help="Folder for results; a run that was stopped goes on there.")
    ],
    suite: Annotated[
        list[str] | None,
        typer.Option(help="kl | copy | passkey | multi | keyvalue, or KIND@CONTEXT; repeatable."),
    ] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            help="Presets, 'paper', 'unstructured', 'fp8', or e.g. "
            "prefill=0/1+decode=1/1+pruner=magnitude (K/V); repeatable."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "--model-path", help="Folder or hub name, as for `serve`.")
    ] = DEMO_MODEL,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file or folder of them. Default: bundled novels; repeatable."),
    ] = None,
    documents: Annotated[int, typer.Option(help="Documents of the suites kl and copy.")] = 10,
    prompts: Annotated[int, typer.Option(help="Prompts of the retrieval suites.")] = 40,
    steps: Annotated[int, typer.Option(help="Decode steps scored after each document.")] = 128,
    scored_prompt: Annotated[
        int, typer.Option(help="Last tokens of a document's prompt that are scored.")
    ] = 1024,
    device: Annotated[str, typer.Option(help=" | ".join(_DEVICES))] = "auto",
    segment: Annotated[int, typer.Option(help="As for `serve`.")] = _DEFAULTS.segment,
    window: Annotated[int, typer.Option(help="As for `serve`.")] = _DEFAULTS.window,
    sink: Annotated[int, typer.Option(help="As for `serve`.")] = _DEFAULTS.sink,
    pruner: Annotated[
        str, typer.Option(help="Default: 'calibrated' with a calibration file, else 'magnitude'.")
    ] = "",
    calibration: Annotated[
        Path | None, typer.Option(help="File written by `hs-runtime calibrate`.")
    ] = None,
    kv_cache: Annotated[str, typer.Option(help="Size of the KV cache, as for `serve`.")] = "",
) -> None:
    """Measure what policies cost in answers, through the engine that serves them."""
    from hs_runtime.evaluation.arms import parse_arms
    from hs_runtime.evaluation.cases import Wishes
    from hs_runtime.evaluation.measure import Target
    from hs_runtime.evaluation.model import Language, fingerprint, vocabulary_size
    from hs_runtime.evaluation.run import TABLE, parse_suites, run_suites
    from hs_runtime.evaluation.session import EvaluationError
    from hs_runtime.evaluation.texts import bundled_texts, read_texts

    def say(line: str) -> None:
        typer.echo(line, err=True)

    try:
        digest = _digest(calibration) if calibration else ""
        constants = _constants(
            sink=sink,
            window=window,
            segment=segment,
            pruner=pruner or ("calibrated" if calibration else _DEFAULTS.pruner),
            calibration=digest,
        )
        config = RuntimeConfig(
            constants=constants,
            calibration_path=str(calibration.resolve()) if calibration else "",
            model_path=model,
            kv_cache_bytes=_size_bytes(kv_cache) if kv_cache else 0,
        )
        suites = parse_suites(suite or ["kl"])
        texts = read_texts(text) if text else bundled_texts()
        config, plan = _resolve(config, device, context.args, fetch=True)
        chosen = parse_arms(arms or [",".join(PRESETS)], config.constants, digest)
        described = _model_config(config.model_path)
        target = Target(
            device=probe_devices(_device_name(device))[0],
            model_path=config.model_path,
            model_config=described,
            fingerprint=fingerprint(config.model_path, described),
            vocabulary=vocabulary_size(config.model_path, described),
            passed=tuple(context.args),
            kv_cache_bytes=plan.kv_cache_bytes,
            calibration_path=config.calibration_path,
        )
        wishes = Wishes(documents, prompts, steps, scored_prompt)
        language = Language.load(config.model_path)
        run_suites(target, chosen, suites, texts, language, wishes, output, say)
    except (ConfigError, PolicyError, DemoModelError, EvaluationError) as error:
        typer.secho(f"hs-runtime eval: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    typer.echo((output / TABLE).read_text(encoding="utf-8"))


@app.command()
def doctor(
    device: Annotated[str, typer.Option(help=" | ".join(_DEVICES))] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    show_capacity: Annotated[
        bool, typer.Option("--capacity", help="Print how many requests fit at once, by preset.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="For --capacity: a folder with a config.json.")
    ] = DEMO_MODEL,
    kv_cache: Annotated[
        str, typer.Option(help="For --capacity: size of the KV cache. Default: as `serve`.")
    ] = "",
) -> None:
    """Say what this machine can serve, and what would stop it (exit code 1)."""
    from hs_runtime.doctor import examine

    try:
        if show_capacity:
            _print_capacity(_device_name(device), model, kv_cache, as_json)
            return
        report = examine(_device_name(device))
    except ConfigError as error:
        typer.secho(f"hs-runtime doctor: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        for check in report.checks:
            mark = (
                typer.style("ok  ", fg="green") if check.passed else typer.style("FAIL", fg="red")
            )
            typer.echo(f"{mark} {check.name:<13} {check.detail}")
            if check.remedy:
                typer.echo(f"     {'':<13} -> {check.remedy}")
        if report.refusals:
            typer.echo("\nrefused at start (SGLang option: choose instead):")
            for refusal in report.refusals:
                typer.echo(f"  {refusal['option']}: {refusal['legal']} ({refusal['reason']})")
    if not report.passed:
        raise typer.Exit(1)


def _print_capacity(device_name: str, model: str, kv_cache: str, as_json: bool) -> None:
    from hs_runtime.capacity import KVShape, capacity, kv_bytes_of

    devices = probe_devices(device_name)
    if not devices:
        raise ConfigError(f"device: {device_name!r} and torch sees none")
    path = str(cache_dir() / "models" / DEMO_MODEL_NAME) if model == DEMO_MODEL else model
    config = _model_config(path)
    if config is None:
        raise ConfigError(f"model: {model!r} is no folder on this disk")
    size = _size_bytes(kv_cache) if kv_cache else kv_bytes_of(devices[0], path, config)
    found = capacity(KVShape.of(config, devices[0]), size, _DEFAULTS)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    typer.echo(
        f"{found.kv_bytes / 2**30:.2f} GiB of KV cache, {found.dense_tokens} tokens if all are "
        f"dense. Requests at once, each with an answer of {found.answer_tokens} tokens:\n"
    )
    typer.echo("prompt  " + "".join(f"{name:>10}" for name in PRESETS))
    for length, fits in found.requests.items():
        typer.echo(f"{length >> 10:>5}K  " + "".join(f"{fits[name]:>10}" for name in PRESETS))


def _resolve(
    config: RuntimeConfig, device: str, passed: list[str], *, fetch: bool
) -> tuple[RuntimeConfig, LaunchPlan]:
    """Find the device and the model, and settle what depends on them."""
    _check_pruner(config.constants)
    devices = probe_devices(_device_name(device))
    if not devices:
        raise ConfigError("device: 'cuda' and torch sees no CUDA device (see `hs-runtime doctor`)")
    if config.model_path == DEMO_MODEL:
        path = str(ensure_demo_model()) if fetch else DEMO_MODEL
        name = config.served_model_name or DEMO_MODEL_NAME
        config = replace(config, model_path=path, served_model_name=name)
    plan = plan_launch(
        devices[0],
        config.model_path,
        _model_config(config.model_path),
        passed,
        kv_cache_bytes=config.kv_cache_bytes,
    )
    constants = _constants(**{**_as_dict(config.constants), "chunk": plan.chunk})
    return replace(config, constants=constants, kv_cache_bytes=plan.kv_cache_bytes), plan


def _check_pruner(constants: ServerConstants) -> None:
    from hs_runtime.policies.pruner import build_pruner  # torch, which `--help` need not wait for

    try:
        pruner = build_pruner(constants.pruner)
    except ValueError as error:
        raise ConfigError(f"pruner: {error}") from error
    if pruner.needs_calibration and not constants.calibration:
        raise ConfigError(f"pruner: {constants.pruner!r} needs --calibration FILE")


def _as_dict(constants: ServerConstants) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(constants.to_json())
    return loaded


def _constants(**values: Any) -> ServerConstants:
    try:
        return ServerConstants(**values)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _device_name(text: str) -> str:
    if text not in _DEVICES:
        raise ConfigError(f"device: {text!r} (choose {', '.join(_DEVICES)})")
    return text


def _model_config(model_path: str) -> Mapping[str, Any] | None:
    """The config.json of a local folder, None for a hub name that SGLang will fetch."""
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        if model_path.startswith(("/", "./", "../", "~")):
            raise ConfigError(f"model: {model_path!r} is no folder")
        return None
    try:
        loaded = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {folder} has no readable config.json ({error})") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"model: {folder}/config.json is no JSON object")
    return loaded


def _existing(path: Path, setting: str) -> str:
    if not path.is_file():
        raise ConfigError(f"{setting}: {str(path)!r} is no file")
    return str(path.resolve())


def _digest(path: Path) -> str:
    return hashlib.sha256(Path(_existing(path, "calibration")).read_bytes()).hexdigest()


_UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "GB": 10**9, "MB": 10**6, "kB": 1000}


def _size_bytes(text: str) -> int:
    """`"40GiB"` -> 42949672960; a bare number is bytes."""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    number = text.removesuffix(unit).strip()
    try:
        size = int(float(number) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ConfigError(f"kv_cache: {text!r} (a size such as 40GiB; units: {', '.join(_UNITS)})")
    return size


def main() -> None:
    app()
