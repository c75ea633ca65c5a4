"""Arms, cases, records and tables of the evaluation. No engine runs."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hs_runtime.config import ConfigError
from hs_runtime.device import Device
from hs_runtime.evaluation.arms import parse_arm, parse_arms
from hs_runtime.evaluation.cases import COPIED, SUITES, Case, Wishes
from hs_runtime.evaluation.measure import (
    Pending,
    References,
    Speed,
    Target,
    item_inputs,
    measure,
)
from hs_runtime.evaluation.model import fingerprint, vocabulary_size
from hs_runtime.evaluation.plots import can_plot, plot_layers, plot_pareto
from hs_runtime.evaluation.presets import (
    measured_presets,
    preset_numbers,
    preset_table,
    shipped_presets,
)
from hs_runtime.evaluation.records import FILE, Record, Records, Sums
from hs_runtime.evaluation.report import markdown, recommend, rows_of
from hs_runtime.evaluation.run import (
    CONTEXTS,
    ROWS,
    TABLE,
    build_items,
    parse_suites,
    recommendation,
    write_tables,
)
from hs_runtime.evaluation.session import Order, terminated_in_order
from hs_runtime.evaluation.tap import TokenScores
from hs_runtime.evaluation.texts import Text, bundled_texts, cut_documents, read_texts
from hs_runtime.policies import PRESETS
from hs_runtime.policies.policy import ServerConstants, parse_policy
from tests.support.languages import language

CONSTANTS = ServerConstants(chunk=2048)
WISHES = Wishes(documents=3, prompts=4, steps=16, scored_prompt=32)


# ---- arms ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_an_arm_under_the_given_constants(name: str) -> None:
    arm = parse_arm(name, CONSTANTS)
    assert (arm.policy, arm.constants) == (PRESETS[name], CONSTANTS)


def test_numbers_and_constants_can_be_given() -> None:
    arm = parse_arm("prefill=0/0.5+decode=1/1+segment=512+anchor=segment", CONSTANTS)
    assert arm.policy.prefill.as_numbers() == {"k": 0.0, "v": 0.5}
    assert arm.policy.decode.as_numbers() == {"k": 1.0, "v": 1.0}
    assert arm.constants == replace(CONSTANTS, segment=512)
    assert parse_arm("prefill=0/1", CONSTANTS).policy == PRESETS["balanced"]
    assert parse_arm("fast+pruner=magnitude", CONSTANTS).policy == PRESETS["fast"]


def test_the_papers_rule_has_a_name() -> None:
    arm = parse_arm("paper", replace(CONSTANTS, segment=512))
    assert arm.policy == PRESETS["max"]
    assert (arm.constants.anchor, arm.constants.pruner) == ("chunk", "magnitude")
    assert parse_arm("fp8", CONSTANTS).stock


def test_a_calibration_goes_to_the_pruners_that_need_one() -> None:
    calibrated = replace(CONSTANTS, pruner="calibrated", calibration="abc")
    assert parse_arm("max", calibrated, "abc").constants.calibration == "abc"
    assert parse_arm("max+pruner=magnitude", calibrated, "abc").constants.calibration == ""
    with pytest.raises(ConfigError, match="needs --calibration"):
        parse_arm("max+pruner=calibrated", CONSTANTS)


@pytest.mark.parametrize(
    "text",
    ["nonsense", "max+light", "decode=2/1", "decode=1", "max+segment=100", "max+pruner=no",
     "max+segment=x", "prefill=1/1+decode=0/0", "max+anchor=no", "", "max+", "decode="],
)  # fmt: skip
def test_an_arm_that_cannot_be_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="arms: ") as caught:
        parse_arm(text, CONSTANTS)
    assert text in str(caught.value)


def test_arms_are_separated_by_commas_and_named_once() -> None:
    assert [arm.name for arm in parse_arms(["dense, max", "light"], CONSTANTS)] == [
        "dense",
        "max",
        "light",
    ]
    with pytest.raises(ConfigError, match="max given twice"):
        parse_arms(["max,max"], CONSTANTS)
    with pytest.raises(ConfigError, match="none given"):
        parse_arms([" , "], CONSTANTS)
    with pytest.raises(ConfigError, match=r"'5\+sink=0' .*max\+dense_layers=1/3/5\+sink=0\)"):
        parse_arms(["dense,max+dense_layers=1/3,5+sink=0"], CONSTANTS)


# ---- texts and cases ----------------------------------------------------------------------------


def test_the_bundled_texts_are_long_and_different() -> None:
    texts = bundled_texts()
    assert len(texts) == len({each.text for each in texts}) == 12
    assert all(30_000 < len(each.text) < 34_000 for each in texts)


def test_documents_do_not_overlap_and_take_turns() -> None:
    texts = [Text("a", "x" * 250), Text("b", "y" * 120)]
    found = cut_documents(texts, language().tokenize, count=3, length=100)
    assert [each.name for each in found] == ["a", "b", "a +100"]
    assert all(len(each.tokens) == 100 for each in found)
    with pytest.raises(ConfigError, match="the 2 texts give 3"):
        cut_documents(texts, language().tokenize, count=4, length=100)


def test_texts_are_read_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.md").write_text("three")
    found = read_texts([tmp_path, tmp_path / "c.md"])
    assert [(each.name, each.text) for each in found] == [
        ("a", "one"),
        ("b", "two"),
        ("c", "three"),
    ]
    with pytest.raises(ConfigError, match="does not exist"):
        read_texts([tmp_path / "no"])
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="text: "):
        read_texts([tmp_path / "bad.txt"])


def cases(kind: str, context: int = 1200) -> list[Case]:
    build, _ = SUITES[kind]
    return build(f"{kind}@{context}", bundled_texts(), language().tokenize, context, WISHES)


@pytest.mark.parametrize("kind", SUITES)
def test_every_case_can_be_run_and_is_made_again_alike(kind: str) -> None:
    found = cases(kind)
    assert found == cases(kind)
    assert len({each.name for each in found}) == len(found)
    assert len(found) == (WISHES.documents if kind in ("kl", "copy") else WISHES.prompts)
    for each in found:
        assert 0 < each.scored[0] and each.scored[-1] < len(each.tokens)
        assert each.prefill_scored + each.decode_scored == each.scored
        assert each.decode_scored


def test_a_document_is_scored_at_the_end_of_its_prompt_and_after_it() -> None:
    (case, *_) = cases("kl")
    assert case.prefill_scored == tuple(range(1200 + 1 - 32, 1200 + 1))
    assert case.decode_scored == tuple(range(1201, 1200 + 1 + WISHES.steps))
    build, _ = SUITES["kl"]
    wishes = replace(WISHES, scored_prompt=0)
    (case, *_) = build("kl", bundled_texts(), language().tokenize, 1200, wishes)
    assert not case.prefill_scored


def test_a_copied_passage_was_seen_before_the_window() -> None:
    for case in cases("copy"):
        copied = case.tokens[case.scored[0] : case.scored[-1] + 1]
        assert len(copied) == COPIED
        text = "".join(map(chr, case.tokens[: case.prompt]))
        assert 300 <= case.prompt - text.rindex("".join(map(chr, copied))) <= 1100


@pytest.mark.parametrize("kind", ["passkey", "multi", "keyvalue"])
def test_an_answer_lies_once_before_the_dense_window(kind: str) -> None:
    for case in cases(kind):
        answer = "".join(map(chr, case.tokens[case.scored[0] :])).strip()
        assert case.exact and answer.isdecimal() and case.scored[-1] == len(case.tokens) - 1
        prompt = "".join(map(chr, case.tokens[: case.prompt]))
        assert answer in prompt[64 : case.prompt - 256]
        assert answer not in prompt[case.prompt - 256 :] + prompt[:64]


def test_too_short_a_context_is_refused() -> None:
    for kind in ("copy", "passkey", "multi", "keyvalue"):
        with pytest.raises(ConfigError, match="context"):
            cases(kind, 300)


def test_suites_have_a_context_of_their_own_unless_given() -> None:
    found = parse_suites(["kl, passkey@2048", "speed"])
    assert [each.name for each in found] == [
        "kl@6144",
        "passkey@2048",
        f"speed@{CONTEXTS['speed']}",
    ]
    for wrong in ("nonsense", "kl@", "kl@x", "kl@0", ""):
        with pytest.raises(ConfigError, match="suite: "):
            parse_suites([wrong])


def test_a_model_that_begins_with_a_token_gets_it() -> None:
    (suite,) = parse_suites(["kl@1000"])
    plain = build_items(suite, bundled_texts(), language(), WISHES)[0]
    begun = build_items(suite, bundled_texts(), language(1, 2), WISHES)[0]
    assert isinstance(plain, Case) and isinstance(begun, Case)
    assert begun.tokens == (1, 2, *plain.tokens) and begun.prompt == plain.prompt + 2
    assert [p - 2 for p in begun.scored] == list(plain.scored)
    (speed,) = build_items(
        *(parse_suites(["speed@100"])), bundled_texts(), language(9), replace(WISHES, streams=2)
    )
    assert isinstance(speed, Speed) and [len(each) for each in speed.prompts] == [101, 101]


# ---- records ------------------------------------------------------------------------------------


def scores(*kl: float) -> TokenScores:
    n = len(kl)
    return TokenScores(tuple(range(n)), kl, (2.0,) * n, (1.5,) * n, (True,) * n, (False,) * n)


def record(
    suite: str, arm: str, case: str, kl: tuple[float, ...] = (0.1, 0.3), **more: object
) -> Record:
    sums = Sums.of(scores(*kl), range(len(kl)))
    assert sums is not None
    values = {"inputs": "x", "kv_bytes": 60, "dense_bytes": 100, **more}
    return Record(suite, arm, case, parts={"decode": sums}, **values)  # type: ignore[arg-type]


def test_what_is_finished_is_found_again(tmp_path: Path) -> None:
    records = Records(tmp_path / "out")
    first = record("kl", "max", "a")
    assert not records.has("kl", "max", "a", "x")
    records.add(first)
    records.add(record("kl", "max", "b"))
    again = Records(tmp_path / "out")
    assert again.has("kl", "max", "a", "x") and again.all()[0] == first
    assert not again.has("kl", "light", "a", "x")


def test_other_inputs_are_not_mixed_in(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.add(record("kl", "max", "a"))
    with pytest.raises(ConfigError, match="choose another --output"):
        Records(tmp_path).has("kl", "max", "a", "other")


def test_a_line_that_a_kill_cut_off_is_measured_again(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.add(record("kl", "max", "a"))
    records.add(record("kl", "max", "b"))
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole[:-20])
    again = Records(tmp_path)
    assert again.has("kl", "max", "a", "x") and not again.has("kl", "max", "b", "x")
    again.add(record("kl", "max", "b"))
    assert (tmp_path / FILE).read_text() == whole
    (tmp_path / FILE).write_text("{}\n" + whole)
    with pytest.raises(ConfigError, match="line 1"):
        Records(tmp_path)


def test_inputs_are_model_tokens_and_arm_but_not_names() -> None:
    target = Target(Device("cpu", "CPU", 1), "model", None, "weights", 100)
    case = Case("kl", "a", (1, 2, 3), 1, (2,))
    arm = parse_arm("max", CONSTANTS)
    same = item_inputs(target, replace(arm, name="other"), replace(case, name="b"))
    assert item_inputs(target, arm, case) == same
    for other in (
        item_inputs(replace(target, fingerprint="others"), arm, case),
        item_inputs(target, parse_arm("light", CONSTANTS), case),
        item_inputs(target, parse_arm("max+segment=512", CONSTANTS), case),
        item_inputs(target, arm, replace(case, tokens=(1, 2, 4))),
        item_inputs(target, arm, replace(case, scored=(1, 2))),
    ):
        assert other != same


def test_a_model_is_known_by_its_config_and_weights(tmp_path: Path) -> None:
    config = {"vocab_size": 320}
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    first = fingerprint(str(tmp_path), config)
    assert first == fingerprint(str(tmp_path), config)
    (tmp_path / "model.safetensors").write_bytes(b"Weights")
    assert first != fingerprint(str(tmp_path), config)
    assert first != fingerprint(str(tmp_path), {"vocab_size": 321})
    assert vocabulary_size("m", config) == vocabulary_size("m", {"text_config": config}) == 320
    with pytest.raises(ConfigError, match="no vocab_size"):
        vocabulary_size("m", {})


# ---- tables -------------------------------------------------------------------------------------


def measured() -> list[Record]:
    return [
        record("kl", "dense", "a", (0.0, 0.0), kv_bytes=100),
        record("kl", "light", "a", (0.01, 0.03), kv_bytes=80),
        record("kl", "light", "b", (0.02, 0.06, 0.01), kv_bytes=80),
        record("kl", "max", "a", (0.2, 0.4)),
        record("copy", "light", "a", (0.5,), score=1.0, kv_bytes=80),
        record("copy", "light", "b", (0.1,), score=0.0, category="hard", kv_bytes=80),
        record("speed", "light", "one", (0.0,), values={"TPOT ms": 4.0}),
        record("speed", "max", "one", (0.0,), values={"TPOT ms": 3.0}),
    ]


def test_means_are_over_tokens_and_errors_over_cases() -> None:
    rows = {(row.suite, row.arm): row for row in rows_of(measured())}
    light = rows["kl", "light"]
    assert light.cases == 2 and light.prefill is None and light.decode is not None
    assert light.decode.tokens == 5 and light.decode.kl == pytest.approx(0.13 / 5)
    assert light.decode.kl_error == pytest.approx(0.005)
    assert light.decode.nll_gain == pytest.approx(0.5) and light.decode.agreement == 1.0
    assert light.kv_share == 0.8 and light.score is None
    assert rows["copy", "light"].score == 0.5 and rows["copy", "light"].categories == {"hard": 0.0}
    assert math.isnan(rows["kl", "max"].decode.kl_error)  # type: ignore[union-attr]


def test_tables_are_written_for_people_and_for_programs(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for each in measured():
        records.add(each)
    rows = write_tables(records, "model")
    text = (tmp_path / TABLE).read_text()
    assert text == markdown(rows, "Answers of model under each policy")
    assert "| `light` | 2 | 0.800 | 0.0260 ± 0.0050 | +0.5000 | 1.000 |" in text
    assert "## copy" in text and "| `max` | 1 | 0.600 |" in text
    loaded = json.loads((tmp_path / ROWS).read_text())
    assert loaded[0]["decode"]["kl_error"] is None and len(loaded) == len(rows)


def test_the_cheapest_arm_within_the_budget_is_recommended() -> None:
    rows = [row for row in rows_of(measured()) if row.suite != "speed"]
    arms = parse_arms(["dense,light,max"], CONSTANTS)
    assert recommend(rows, 0.01).arm == "dense"  # type: ignore[union-attr]
    assert recommend(rows, 0.3).arm == "light"  # type: ignore[union-attr]
    assert "recommended: light (KL 0.3" in recommendation(rows, arms, 0.3)
    rows = [row for row in rows if row.arm == "max"]
    assert recommend(rows, 0.1) is None
    with pytest.raises(ConfigError, match=r"no arm is within 0\.1 \(measured: max 0\.3000\)"):
        recommendation(rows, arms, 0.1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max+dense_layers=7/3", "by --default-policy max --dense-layers 3,7"),
        ("max+pruner=random", "by --default-policy max --pruner random"),
        (
            "paper",
            "by --default-policy max --pruner magnitude --anchor chunk --chunked-prefill-size 2048",
        ),
        ("light+window=512", "by --default-policy light --window 512"),
        ("unstructured", "pruner unstructured can only be simulated"),
        ("fp8", "--kv-cache-dtype fp8_e4m3"),
    ],
)
def test_what_is_recommended_is_the_arm_and_how_to_serve_it(name: str, said: str) -> None:
    calibrated = replace(CONSTANTS, pruner="calibrated")
    arms = parse_arms([f"max,{name}"], calibrated, "digest")
    rows = rows_of([record("kl", "max", "a", (0.9,)), record("kl", name, "a", (0.1,))])
    first, second = recommendation(rows, arms, 0.2, "calibrated").splitlines()
    assert first.startswith(f"recommended: {name} (KL 0.1000")
    assert second.removesuffix(".").endswith(said)
    assert "An earlier run measured" in recommendation(rows, arms[:1], 0.2)


def test_a_policy_without_a_name_is_served_by_its_numbers() -> None:
    (arm,) = parse_arms(["decode=0.5/1"], CONSTANTS)
    words = arm.serve_options("magnitude")
    assert words[0] == "--default-policy" and parse_policy(words[1]) == arm.policy


ABOUT = {"model": "model", "text": "texts", "device": "CPU", "date": "2026-01-01"}


def test_presets_carry_what_was_measured_under_their_constants() -> None:
    records = [
        record("kl@600", "light", "a", (0.01, 0.03), kv_bytes=80),
        record("kl@600", "max", "a", (0.2, 0.4)),
        record("kl@600", "decode=0.5/1", "a", (0.2, 0.4)),
        record("kl@600", "max+segment=512", "a", (0.2, 0.4)),
        record("copy@600", "balanced", "a", (0.2, 0.4)),
        record("kl@600", "max+pruner=unknown", "a", (0.2, 0.4)),
    ]
    records += [record("kl@900", "light", "a", (0.02, 0.02), kv_bytes=80)]
    records += [record("kl@300", "light", "a", (0.5, 0.5), kv_bytes=90)]
    (found,) = preset_numbers(rows_of(records), CONSTANTS, "", ABOUT)
    assert set(found["presets"]) == {"light", "max"}
    assert found["constants"]["pruner"] == "magnitude" and found["model"] == "model"
    light = found["presets"]["light"]
    assert light["kv_share"] == 0.8 and light["prefill"]["kl"] == 0.0
    assert light["context"] == 900
    assert light["decode"] == {"tokens": 2, "kl": 0.02, "nll_gain": 0.5, "agreement": 1.0}
    table = preset_table([found])
    assert "| `light` | 900 | 0.800 | 0.0000 | 1.000 | 0.0200 | 1.000 |" in table
    assert "model, texts, pruner `magnitude`" in table and "2026-01-01" in table


def test_the_shipped_numbers_say_what_they_are_of() -> None:
    for found in shipped_presets():
        assert set(found["presets"]) <= set(PRESETS) and len(found["presets"]) > 1
        assert all(found[name] for name in ("model", "text", "device", "date"))
        constants = replace(CONSTANTS, pruner=found["constants"]["pruner"])
        assert measured_presets(constants) == found
    assert measured_presets(replace(CONSTANTS, segment=128)) is None


def test_one_reference_serves_all_engines(tmp_path: Path) -> None:
    target = Target(Device("cpu", "CPU", 1), "model", None, "weights", 100)
    case = Case("kl", "a", tuple(range(9)), 4, (3, 4, 5, 6))
    light, paper = parse_arm("light", CONSTANTS), parse_arm("paper", CONSTANTS)
    plans = [[Pending(case, (light,))], [Pending(case, (paper,))], []]
    references = References(target, tmp_path / "references", plans)
    assert references.positions(case) == case.scored, "one of the arms prunes in prefill"
    ran: list[Order] = []

    def run(orders: Sequence[Order]) -> None:
        for order in orders:
            assert order.job is not None and order.job.writes and order.policy.is_dense
            Path(order.job.reference).write_bytes(b"log-probs")
        ran.extend(orders)

    references.write_with(run, [case])
    assert references.path(case).read_bytes() == b"log-probs" and len(ran) == 1
    references.release(case)
    references.write_with(run, [case])
    assert len(ran) == 1, "made twice"
    references.release(case)
    assert not references.path(case).exists()
    references.remove_all()
    assert not (tmp_path / "references").exists()
    assert References(target, tmp_path, plans[:1]).positions(case) == (5, 6)


def test_fp8_is_refused_without_a_device(tmp_path: Path) -> None:
    target = Target(Device("cpu", "CPU", 1), "model", None, "weights", 100)
    with pytest.raises(ConfigError, match="fp8"):
        measure(target, language(), parse_arms(["fp8"], CONSTANTS), [], Records(tmp_path), print)


def test_how_much_is_done_is_said_at_the_start(tmp_path: Path) -> None:
    target = Target(Device("cpu", "CPU", 1), "model", None, "weights", 100)
    case, arms = Case("kl", "a", (1, 2, 3), 1, (2,)), parse_arms(["light,max"], CONSTANTS)
    records, said = Records(tmp_path), list[str]()
    for arm in arms:
        records.add(record("kl", arm.name, "a", inputs=item_inputs(target, arm, case)))
    measure(target, language(), arms, [case], records, said.append)
    assert said == [f"1 case under 2 arms: 2 of 2 done, and what is done is kept in {tmp_path}"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_being_terminated_unwinds_as_an_interrupt_does(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)  # as a shell's background job has SIGINT
    try:
        with pytest.raises(KeyboardInterrupt), terminated_in_order():
            signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_plots_are_drawn(tmp_path: Path) -> None:
    if not can_plot():
        pytest.skip("matplotlib is not installed")
    from hs_runtime.evaluation.layers import EDGES, LayerStatistics

    made = plot_pareto(rows_of(measured()), tmp_path)
    assert {path.name for path in made} >= {"pareto-bytes-kl.png", "pareto-speed-kl.png"}
    numpy = pytest.importorskip("numpy")
    ones = numpy.ones((3, 2, 2, 4))
    found = LayerStatistics(1, ones, ones[..., 0], numpy.ones((3, 2, len(EDGES) + 1)))
    made += plot_layers(found, "magnitude", tmp_path)
    assert all(path.stat().st_size > 5000 for path in made)
