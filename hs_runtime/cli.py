"""`hs-runtime`: the one command line. Each command gathers values and hands over; no logic here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hs_runtime import __version__
from hs_runtime.config import (
    DEMO_MODEL,
    PLUGIN_FILTER_VARIABLE,
    PLUGIN_NAME,
    PREFILL_KERNELS,
    ConfigError,
    RuntimeConfig,
    quiet_foreign_warnings,
    read_api_key,
    set_process_environment,
)
from hs_runtime.demo_model import MODEL_NAME as DEMO_MODEL_NAME
from hs_runtime.demo_model import DemoModelError, demo_model_folder, ensure_demo_model
from hs_runtime.device import probe_devices
from hs_runtime.launch import CPU_MAX_REQUESTS, LaunchPlan, plan_launch
from hs_runtime.policies.policy import (
    ANCHORS,
    PRESETS,
    Costliest,
    PolicyError,
    ServerConstants,
    parse_layers,
    parse_policy,
)

if TYPE_CHECKING:
    from hs_runtime.policies.pruner import Pruner

app = typer.Typer(
    help="Serve long contexts from a KV cache whose blocks are dense or 2:4-sparse.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DEVICES = ("auto", "cpu", "cuda")
_DEFAULTS = ServerConstants()
_MEASURED_PRUNER = "calibrated"  # whose cost in each layer `calibrate` measures
_MARKS = {"bytes": "", "prefill": "'", "page ids": "*"}  # of numbers, by what bounds them


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
    dense_layers: Annotated[
        str,
        typer.Option(
            help="Layers whose KV stays dense under every policy: their numbers from 0 on, e.g. "
            "3,7,12, or costliest:8 for those that cost most by the calibration file."
        ),
    ] = "",
    pruner: Annotated[
        str,
        typer.Option(
            help="magnitude, calibrated, channel or random. Default: calibrated with a "
            "calibration file, else magnitude."
        ),
    ] = "",
    calibration: Annotated[
        Path | None,
        typer.Option(help="File of `hs-runtime calibrate`. Default: the one beside the model."),
    ] = None,
    prefill_kernel: Annotated[
        str,
        typer.Option(help=f"How prefill reads sparse blocks: {' | '.join(PREFILL_KERNELS)}."),
    ] = "auto",
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
        dense = _layers(dense_layers)
        config = RuntimeConfig(
            constants=_constants(sink=sink, window=window, segment=segment, anchor=anchor),
            default_policy=parse_policy(default_policy),
            model_path=model,
            served_model_name=served_model_name,
            host=host,
            port=port,
            api_key_file=str(api_key_file.resolve()) if api_key_file else "",
            cors_origins=tuple(cors_origin or ()),
            drain_seconds=drain_seconds,
            kv_cache_bytes=_size_bytes(kv_cache) if kv_cache else 0,
            prefill_kernel=prefill_kernel,
        )
        read_api_key(config.api_key_file)  # a missing key is found before the model loads
        config, plan = _resolve(
            *(config, device, context.args, pruner, calibration, dense), fetch=not dry_run
        )
        _check_stored(config.constants)
    except (ConfigError, PolicyError, DemoModelError) as error:
        typer.secho(f"hs-runtime serve: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    if not pruner and not config.constants.calibration:
        typer.echo(
            f"no calibration of {config.model_name}: pruner {config.constants.pruner}, which loses "
            f"more ({_how_to_calibrate(config.model_path)})",
            err=True,
        )
    if isinstance(dense, Costliest) and config.constants.pruner != _MEASURED_PRUNER:
        typer.echo(_other_costs(config.constants.pruner), err=True)
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
        typer.Option(
            help="kl, copy, passkey, multi, keyvalue, ruler, longbench, speed; or KIND@TOKENS, "
            "e.g. kl@6144; repeatable. Default: kl."
        ),
    ] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            help="Presets, 'paper', 'unstructured', 'fp8', or e.g. "
            "decode=1/0.5 (K/V) or max+pruner=magnitude; repeatable."
        ),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "--model-path", help="Folder or hub name, as for `serve`.")
    ] = DEMO_MODEL,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text file or folder of them. Default: bundled novels; repeatable."),
    ] = None,
    longbench: Annotated[
        Path | None, typer.Option(help="Folder with LongBench's .jsonl files.")
    ] = None,
    documents: Annotated[
        int, typer.Option(min=1, help="Documents of the suites kl and copy.")
    ] = 10,
    prompts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Prompts of a retrieval suite, or of each task of ruler and longbench (0: all).",
        ),
    ] = 40,
    streams: Annotated[int, typer.Option(min=1, help="Requests at once in the suite speed.")] = 1,
    steps: Annotated[int, typer.Option(min=2, help="Decode steps after each document.")] = 128,
    scored_prompt: Annotated[
        int, typer.Option(min=0, help="Last tokens of a document's prompt that are scored.")
    ] = 1024,
    device: Annotated[str, typer.Option(help=" | ".join(_DEVICES))] = "auto",
    segment: Annotated[int, typer.Option(help="As for `serve`.")] = _DEFAULTS.segment,
    window: Annotated[int, typer.Option(help="As for `serve`.")] = _DEFAULTS.window,
    sink: Annotated[int, typer.Option(help="As for `serve`.")] = _DEFAULTS.sink,
    dense_layers: Annotated[
        str,
        typer.Option(help="As for `serve`; of one arm: max+dense_layers=3/7/12, or =costliest:8."),
    ] = "",
    pruner: Annotated[
        str,
        typer.Option(
            help="magnitude, calibrated, channel, random, unstructured. Default: calibrated with a "
            "calibration file, else magnitude."
        ),
    ] = "",
    calibration: Annotated[
        Path | None, typer.Option(help="File written by `hs-runtime calibrate`.")
    ] = None,
    kv_cache: Annotated[str, typer.Option(help="Size of the KV cache, as for `serve`.")] = "",
    layers: Annotated[
        bool, typer.Option("--layers", help="Instead: K and V by layer, and what 2:4 drops.")
    ] = False,
    wants_advice: Annotated[
        bool, typer.Option("--recommend", help="Name the arm with the least KV within the budget.")
    ] = False,
    kl_budget: Annotated[
        float, typer.Option(help="For --recommend: KL to dense, in nats a token.")
    ] = 0.05,
) -> None:
    """Measure what policies cost in answers, through the engine that serves them.

    Every arm is a policy, compared with dense on the same tokens: KL, NLL and agreement of the next
    token (suite kl), retrieval, LongBench, speed. `results.md`, `.json` and plots go to the output.

    Example: hs-runtime eval --suite kl,passkey --arms dense,light,balanced,max --output DIR
    """
    from hs_runtime.evaluation.arms import parse_arm, parse_arms
    from hs_runtime.evaluation.cases import Wishes
    from hs_runtime.evaluation.measure import Target
    from hs_runtime.evaluation.model import Language, fingerprint, vocabulary_size
    from hs_runtime.evaluation.run import (
        TABLE,
        parse_suites,
        recommendation,
        run_layers,
        run_suites,
    )
    from hs_runtime.evaluation.session import EvaluationError, Terminated
    from hs_runtime.evaluation.texts import bundled_texts, read_texts

    def say(line: str) -> None:
        typer.echo(line, err=True)

    try:
        dense = _layers(dense_layers)
        if layers and dense:
            raise ConfigError(
                "--layers looks at layers as they are pruned, and --dense-layers prunes some of "
                "them not at all (give one of the two)"
            )
        config = RuntimeConfig(
            constants=_constants(sink=sink, window=window, segment=segment),
            model_path=model,
            kv_cache_bytes=_size_bytes(kv_cache) if kv_cache else 0,
        )
        suites = parse_suites(suite or ["kl"])
        texts = read_texts(text) if text else bundled_texts()
        config, plan = _resolve(
            *(config, device, context.args, pruner, calibration, dense),
            fetch=True,
            keep_file=True,
        )
        file = Path(config.calibration_path) if config.calibration_path else None
        digest = _digest(file) if file else ""
        costs = partial(_layer_costs, file, config.model_path)
        chosen = parse_arms(arms or [",".join(PRESETS)], config.constants, digest, costs)
        described = _model_config(config.model_path)
        for arm in chosen:
            _check_layers(arm.constants, described)
            if arm.constants.dense_layers:
                say(f"{arm.name}: always dense are layers {_listed(arm.constants.dense_layers)}")
        by_cost = [a for a in chosen if isinstance(dense, Costliest) or "costliest:" in a.name]
        for other in sorted({arm.constants.pruner for arm in by_cost} - {_MEASURED_PRUNER}):
            say(_other_costs(other))
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
        language = Language.load(config.model_path)
        wishes = Wishes(
            documents=documents,
            prompts=prompts,
            streams=streams,
            steps=steps,
            scored_prompt=scored_prompt,
        )
        if layers:
            arm = parse_arm("dense", config.constants, digest)
            typer.echo(run_layers(target, arm, texts, language, wishes, output, say))
            return
        rows = run_suites(
            *(target, chosen, suites, texts, language, wishes, output, say, longbench),
            constants=config.constants,
            calibration=digest,
        )
        typer.echo((output / TABLE).read_text(encoding="utf-8"))
        if wants_advice:
            own_pruner = "calibrated" if file else _DEFAULTS.pruner
            typer.echo(recommendation(rows, chosen, kl_budget, own_pruner))
    except KeyboardInterrupt as stop:
        if not layers:  # they are measured in one go
            say(f"stopped: the same command goes on with what is not done yet in {output}")
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None
    except (ConfigError, PolicyError, DemoModelError, EvaluationError) as error:
        typer.secho(f"hs-runtime eval: {error}", fg="red", err=True)
        raise typer.Exit(2) from None


@app.command()
def calibrate(
    model: Annotated[
        str,
        typer.Option("--model", "--model-path", help="Folder with the model; or 'demo'."),
    ] = DEMO_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="Text to read, UTF-8. Default: a bundled one, in English.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many of its tokens are read.")] = 9216,
    output: Annotated[
        Path | None, typer.Option(help="File to write. Default: beside the model.")
    ] = None,
    device: Annotated[str, typer.Option(help=" | ".join(_DEVICES))] = "auto",
) -> None:
    """Measure a model once, so that pruning costs less; `serve` finds the file.

    The model reads the text with its own weights: for the statistics of its queries and keys, then
    once more for what pruning costs in each layer. That takes minutes for a small one on a CPU.
    Costs of layers are those under the default --sink and --window, with all blocks between sparse.
    """
    from hs_runtime.calibration import FILE_NAME, read_layer_costs, save_calibration
    from hs_runtime.calibration.calibrate import calibrate as measure
    from hs_runtime.calibration.calibrate import read_text

    try:
        devices = probe_devices(_device_name(device))
        if not devices:
            raise ConfigError("device: 'cuda' and torch sees no CUDA device")
        path = str(ensure_demo_model()) if model == DEMO_MODEL else model
        if _model_config(path) is None:
            raise ConfigError(f"model: {model!r} is no folder on this disk (download it)")
        target = output or Path(path).expanduser() / FILE_NAME
        if not target.parent.is_dir():  # found before the model reads for minutes
            raise ConfigError(f"output: {target.parent} is no folder")
        made = measure(path, read_text(text), tokens=tokens, device=devices[0].kind)
        try:
            save_calibration(made, target)
        except OSError as error:
            raise ConfigError(f"output: cannot write {target} ({error})") from error
    except (ConfigError, DemoModelError) as error:
        typer.secho(f"hs-runtime calibrate: {error}", fg="red", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"{target}: {target.stat().st_size / 1e6:.1f} MB from {made.tokens} tokens")
    costs = read_layer_costs(target)
    ranked = sorted(range(len(costs)), key=lambda layer: -costs[layer])
    typer.echo("layers by what pruning costs: " + _listed(ranked))


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
    dense_layers: Annotated[
        str, typer.Option(help="For --capacity: as for `serve`, e.g. 3,7,12 or costliest:8.")
    ] = "",
    calibration: Annotated[
        Path | None, typer.Option(help="For --capacity: as for `serve`.")
    ] = None,
) -> None:
    """Say what this machine can serve, and what would stop it (exit code 1)."""
    from hs_runtime.doctor import examine

    try:
        if show_capacity:
            dense = _layers(dense_layers)
            _print_capacity(_device_name(device), model, kv_cache, dense, calibration, as_json)
            return
        if model != DEMO_MODEL or kv_cache or dense_layers or calibration:
            raise ConfigError(
                "--model, --kv-cache, --dense-layers and --calibration go with --capacity"
            )
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


def _print_capacity(
    device_name: str,
    model: str,
    kv_cache: str,
    dense: tuple[int, ...] | Costliest,
    calibration: Path | None,
    as_json: bool,
) -> None:
    from hs_runtime.capacity import (
        ANSWER_TOKENS,
        BOUNDS,
        LENGTHS,
        KVShape,
        capacity,
        kv_bytes_of,
    )

    devices = probe_devices(device_name)
    if not devices:
        raise ConfigError(f"device: {device_name!r} and torch sees none")
    path = str(_fetched_demo_model() or "") if model == DEMO_MODEL else model
    if not path:
        raise ConfigError(
            "model: the demonstration model is not here yet (`hs-runtime serve` fetches it; "
            "or give --model FOLDER)"
        )
    config = _model_config(path)
    if config is None:
        raise ConfigError(f"model: {model!r} is no folder on this disk")
    size = _size_bytes(kv_cache) if kv_cache else kv_bytes_of(devices[0], path, config)
    file = _calibration_file(path, model == DEMO_MODEL, calibration, dense)
    constants = _constants(dense_layers=_dense_layers(dense, file, path))
    shape = KVShape.of(config, devices[0])
    context = int(config.get("max_position_embeddings") or LENGTHS[-1] + ANSWER_TOKENS)
    found = capacity(
        shape,
        size,
        constants,
        [n for n in LENGTHS if n < context] or LENGTHS[:1],
        centered=file is not None,
    )
    if as_json:
        told = {"dtype": shape.format.dtype, "dense_layers": list(constants.dense_layers)}
        typer.echo(json.dumps(asdict(found) | told, indent=2))
        return
    typer.echo(
        f"{found.kv_bytes / 2**30:.2f} GiB of KV cache in {shape.format.dtype}, "
        f"{found.dense_tokens} tokens if all are dense. Requests at once, each with an answer of "
        f"{found.answer_tokens} tokens:\n"
    )
    typer.echo("prompt  " + "".join(f"{name:>10}" for name in PRESETS))
    for length, fits in found.requests.items():
        bounds = found.bounds[length]
        cells = (f"{fits[name]}{_MARKS[bounds[name]]}" for name in PRESETS)
        typer.echo(f"{length >> 10:>5}K  " + "".join(f"{cell:>10}" for cell in cells))
    seen = {bound for row in found.bounds.values() for bound in row.values()}
    notes = [f"{mark} {BOUNDS[bound]}" for bound, mark in _MARKS.items() if mark and bound in seen]
    if notes:
        typer.echo("\n" + "\n".join(notes))
    if constants.dense_layers:
        typer.echo(f"\nAlways dense: layers {_listed(constants.dense_layers)}.")
    if devices[0].kind == "cpu":
        typer.echo(f"\nOn a CPU `serve` runs {CPU_MAX_REQUESTS} at once (--max-running-requests).")


def _resolve(
    config: RuntimeConfig,
    device: str,
    passed: list[str],
    pruner: str,
    calibration: Path | None,
    dense: tuple[int, ...] | Costliest,
    *,
    fetch: bool,
    keep_file: bool = False,
) -> tuple[RuntimeConfig, LaunchPlan]:
    """Find the device, the model and its calibration, and settle what depends on them.

    `keep_file` names the calibration file even if the pruner needs none: others of this run may.
    """
    _check_pruner(pruner)
    devices = probe_devices(_device_name(device))
    if not devices:
        raise ConfigError("device: 'cuda' and torch sees no CUDA device (see `hs-runtime doctor`)")
    is_demo = config.model_path == DEMO_MODEL
    described = None
    if is_demo:
        folder = ensure_demo_model() if fetch else _fetched_demo_model()
        name = config.served_model_name or DEMO_MODEL_NAME
        config = replace(config, model_path=str(folder or DEMO_MODEL), served_model_name=name)
    if config.model_path != DEMO_MODEL:
        described = _model_config(config.model_path)
    plan = plan_launch(
        devices[0],
        config.model_path,
        described,
        passed,
        kv_cache_bytes=config.kv_cache_bytes,
    )
    file = None
    by_cost = isinstance(dense, Costliest)
    if keep_file or by_cost or not pruner or _check_pruner(pruner).needs_calibration:
        without = "" if keep_file else ", or choose --pruner magnitude"
        file = _calibration_file(config.model_path, is_demo, calibration, dense, without)
    elif calibration is not None:
        _existing(calibration, "calibration")  # not read: this pruner has no use for it
    chosen = pruner or ("calibrated" if file else _DEFAULTS.pruner)
    needed = _check_pruner(chosen).needs_calibration
    if needed and file is None:
        raise ConfigError(
            f"pruner: {chosen!r} needs --calibration FILE ({_how_to_calibrate(config.model_path)})"
        )
    settled = {
        "chunk": plan.chunk,
        "pruner": chosen,
        "calibration": _digest(file) if file and needed else "",
        "dense_layers": _dense_layers(dense, file, config.model_path),
    }
    config = replace(
        config,
        constants=_constants(**{**_as_dict(config.constants), **settled}),
        calibration_path=str(file) if file and (needed or keep_file) else "",
        kv_cache_bytes=plan.kv_cache_bytes,
    )
    _check_layers(config.constants, described)
    return config, plan


def _fetched_demo_model() -> Path | None:
    folder = demo_model_folder()
    return folder if folder.is_dir() else None


def _calibration_file(
    model_path: str,
    is_demo: bool,
    given: Path | None,
    dense: tuple[int, ...] | Costliest,
    without: str = "",
) -> Path | None:
    """The calibration of a model, checked: the given file, else its own, else None. Refusals name
    the wish for dense layers that needs the file, and end in how to do `without`."""
    from hs_runtime.calibration import default_file, load_calibration

    is_folder = model_path != DEMO_MODEL and Path(model_path).expanduser().is_dir()
    if given is not None and not is_folder and not is_demo:
        raise ConfigError(
            f"calibration: whether it was made for {model_path!r} can only be checked against a "
            "folder (download the model, and give --model FOLDER)"
        )
    file = Path(_existing(given, "calibration")) if given else None
    file = file or default_file(model_path, is_demo=is_demo)
    if file is not None:
        try:
            load_calibration(file, model_path if is_folder else None)
        except ConfigError as error:
            if not isinstance(dense, Costliest):
                raise ConfigError(f"{error}{without}") from error
            numbers = " and layers by number" if without else ""
            raise ConfigError(f"dense_layers='{dense}': {error}{without}{numbers}") from error
    return file


def _check_pruner(name: str) -> Pruner:
    from hs_runtime.policies.pruner import build_pruner  # torch, which `--help` need not wait for

    try:
        return build_pruner(name or _DEFAULTS.pruner)
    except ValueError as error:
        raise ConfigError(f"pruner: {error}") from error


def _check_stored(constants: ServerConstants) -> None:
    """A server stores blocks; what cannot be stored 2:4 is for the evaluation to simulate."""
    if not _check_pruner(constants.pruner).is_stored:
        raise ConfigError(
            f"pruner: {constants.pruner!r} keeps what a 2:4 block cannot hold, so it can only be "
            f"simulated (hs-runtime eval --arms {constants.pruner})"
        )


def _layers(text: str) -> tuple[int, ...] | Costliest:
    try:
        return parse_layers(text)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _dense_layers(
    wish: tuple[int, ...] | Costliest, file: Path | None, model_path: str
) -> tuple[int, ...]:
    """The numbers of the layers; `file` is the model's calibration."""
    if not isinstance(wish, Costliest):
        return wish
    try:
        costs = _layer_costs(file, model_path)
    except ConfigError as error:
        raise ConfigError(f"dense_layers='{wish}': {error}") from error
    try:
        return wish.of(costs)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _layer_costs(file: Path | None, model_path: str) -> list[float]:
    from hs_runtime.calibration import read_layer_costs

    try:
        if file is None:
            raise ConfigError(
                "which layers cost most is in a calibration file, and there is none: "
                + _how_to_calibrate(model_path)
            )
        return read_layer_costs(file, model_path)
    except ConfigError as error:
        raise ConfigError(f"{error}, or choose layers by number") from error


def _other_costs(pruner: str) -> str:
    return (
        f"costs of layers were measured with pruner {_MEASURED_PRUNER}; with {pruner} others may "
        "cost most"
    )


def _how_to_calibrate(model_path: str) -> str:
    from hs_runtime.calibration import how_to_make

    return how_to_make(model_path)


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def _check_layers(constants: ServerConstants, described: Mapping[str, Any] | None) -> None:
    """Dense layers against the model's config.json; without one the engine checks at start."""
    count = (described or {}).get("num_hidden_layers")
    if constants.dense_layers and isinstance(count, int):
        try:
            constants.mixed_layers(count)
        except ValueError as error:
            raise ConfigError(str(error)) from error


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
    from hs_runtime.calibration import digest

    return digest(path)


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
