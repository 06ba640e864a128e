"""The planner: formulas against a simulation that shares none of them, and published figures."""

from __future__ import annotations

import json
import math
import re
import shlex
import time

import pytest

from ftslurm.cli import main
from ftslurm.plan.capacity import peers_pay_from
from ftslurm.plan.failures import SIZES, mtbf_s
from ftslurm.plan.intervals import (
    Costs,
    after_failure_s,
    daly_s,
    exact_s,
    expected_s,
    waste,
    young_s,
)
from ftslurm.plan.options import _EXAMPLES
from ftslurm.plan.plan import Ask, plan
from ftslurm.plan.published import rows
from ftslurm.plan.simulate import play
from ftslurm.report.fleet import Fleet
from ftslurm.report.jobs import AttemptReport, JobReport
from ftslurm.report.text import fleet_lines
from ftslurm.scheduler.hostlist import expand

M = mtbf_s(16_384)

REGIMES = {
    "cheap saves, no restart": (Costs(2.6, 0.0), None),
    "restarts of minutes": (Costs(2.6, 300.0), None),
    "saves of a minute": (Costs(60.0, 600.0), None),
    "durable a minute later": (Costs(0.5, 300.0, 60.0), None),
    "saves of 10 minutes, restarts of an hour": (Costs(600.0, 3600.0), None),
    "an interval four times too long": (Costs(2.6, 300.0), 960.0),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_the_formulas_agree_with_the_simulation(regime: str) -> None:
    costs, interval_s = REGIMES[regime]
    interval_s = interval_s or exact_s(costs.stall_s, M)
    said = waste(interval_s, costs, M)
    seen = play(interval_s, costs, M, work_s=20_000 * M, seed=1).waste
    for share in ("stall", "lost", "restart"):
        assert getattr(seen, share) == pytest.approx(getattr(said, share), rel=0.03), share


def test_where_failures_come_in_bursts_the_formulas_no_longer_hold() -> None:
    costs = Costs(2.6, 300.0)
    interval_s = exact_s(costs.stall_s, M)
    said = waste(interval_s, costs, M).total
    seen = play(interval_s, costs, M, work_s=20_000 * M, seed=1, shape=0.4).waste.total
    assert seen < 0.9 * said  # failures of one burst fall into one restart and one interval


def test_a_lag_as_long_as_the_time_between_failures_breaks_the_formula() -> None:
    costs = Costs(2.6, 0.0, lag_s=M)
    said = waste(240.0, costs, M).total
    seen = play(240.0, costs, M, work_s=2_000 * M, seed=1).waste.total
    assert abs(seen - said) > 0.001


@pytest.mark.parametrize("stall_s", [0.01, 1.0, 60.0, 3600.0])
def test_no_other_interval_is_better_than_the_exact_one(stall_s: float) -> None:
    costs = Costs(stall_s, 300.0)
    best_s = exact_s(stall_s, M)
    best = expected_s(best_s, costs, M) / best_s
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        other_s = factor * best_s
        assert expected_s(other_s, costs, M) / other_s > best


def test_daly_is_nearer_to_the_exact_interval_than_young_where_saves_are_dear() -> None:
    for stall_s in (60.0, 600.0, 3000.0):
        exact = exact_s(stall_s, M)
        assert abs(daly_s(stall_s, M) - exact) < abs(young_s(stall_s, M) - exact)
    assert daly_s(3 * M, M) == M


def test_the_shares_and_the_goodput_make_a_whole() -> None:
    for costs, interval_s in REGIMES.values():
        found = waste(interval_s or exact_s(costs.stall_s, M), costs, M)
        assert found.stall + found.lost + found.restart + found.goodput == pytest.approx(1.0)
        assert min(found.stall, found.lost, found.restart, found.goodput) >= 0.0


def test_a_run_that_never_ends_is_told_and_not_an_overflow(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert math.isinf(expected_s(1e9, Costs(1.0, 1.0), 1.0))
    assert main(["plan", "--gpus", "100000000000", "--restart", "86400"]) == 0
    assert "does not end" in capsys.readouterr().out


PUBLISHED = {
    "between failures on 1,024 GPUs": (49, 0.5),
    "between failures on 8,192 GPUs": (6, 0.5),
    "between failures on 16,384 GPUs": (3, 0.5),
    "between failures on 100,000 GPUs": (0.5, 0.05),
    "interruptions of 16,384 GPUs in 54 days": (419, 8),
    "waste at 4 minutes": (2.1, 0.05),
    "naive waste, (4 min + 60 min) / MTBF": (35, 0.5),
    "a failure of 512 GPUs: load and train again": (75, 25),  # "the most" of it
    "the same: detection": (0, 10),
    "bytes a parameter": (14, 0),
    "with BF16 gradients": (16, 0),
    "state of 70B parameters": (980, 0),
    "three of them": (3, 0.1),
    "and 20 % of room": (2.94 * 1.2, 1e-9),
    "and 30 % of room": (2.94 * 1.3, 1e-9),
}


@pytest.mark.parametrize("what", PUBLISHED)
def test_a_published_figure_comes_out_as_published(what: str) -> None:
    row = next(one for one in rows() if one.what == what)
    value, off = PUBLISHED[what]
    print(f"{what}: published {row.published}, ours {row.value:.4g} {row.unit}")
    assert row.value == pytest.approx(value, abs=max(off, 1e-9))


def test_the_naive_third_is_nearly_all_the_restart_of_an_hour() -> None:
    by_name = {one.what: one for one in rows()}
    exact = by_name["the same by the exact expectation"].value
    restart = 100 * waste(240.0, Costs(2.6, 3600.0), M).restart
    assert 25 < restart < exact < 35


def test_what_a_failure_costs_is_split_and_the_dearest_part_is_named_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """512 GPUs, 50 GB: loading and training again cost more than detection."""
    asked = ["--gpus", "512", "--state-gb", "50", "--persist", "0", "--interval", "240",
             "--restart", "detect=10,leave=45,start=75,load=25"]  # fmt: skip
    assert main(["plan", *asked]) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "a failure costs" in one]
    assert line.split("costs", 1)[1].strip() == (
        "4.58 min in the mean: trained again 120 s (44%), start 75 s (27%), leave 45 s (16%), "
        "load 25 s (9%), detect 10 s (4%)"
    )
    assert main(["plan", *asked, "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["after_failure_s"]
    assert parts == {"detect": 10.0, "leave": 45.0, "start": 75.0, "load": 25.0, "again": 120.0}


def test_the_time_between_failures_is_taken_as_report_prints_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = AttemptReport(
        state="FAILED", cause="gpu", sentence="", start_at=0.0, end_at=3600.0, wait_s=0.0,
        elapsed_s=3600.0, num_nodes=1000, gpus=8000, nodes="n[1-1000]", node="n1",
    )  # fmt: skip
    fleet = Fleet()
    fleet.add(JobReport("7", "a", "ada", "lab", "gpu", "failed", [one]), expand=expand)
    assert fleet.gpu_mtbf_h == 8000.0
    told = " ".join(" ".join(fleet_lines(fleet, None)).split())
    printed = re.search(r"([\d,]+) GPU-hours for each fault .* as `ftslurm plan --gpu-mtbf`", told)
    assert printed is not None and printed[1] == "8,000"
    assert main(["plan", "--gpus", "8", "--gpu-mtbf", printed[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["gpu_mtbf_h"] == 8000.0


@pytest.mark.parametrize("interval_s", [240.0, 600.0])
def test_the_split_of_a_failure_is_what_the_simulation_sees(interval_s: float) -> None:
    costs = Costs(1.0, 155.0)
    between_s = mtbf_s(512)
    played = play(interval_s, costs, between_s, work_s=20_000 * between_s, seed=3)
    seen_s = played.wall_s * (played.waste.lost + played.waste.restart) / played.failures
    said_s = sum(after_failure_s({"restart": 155.0}, interval_s, 0.0).values())
    assert seen_s == pytest.approx(said_s, rel=0.02)


def test_peers_pay_sooner_the_longer_a_restart_takes() -> None:
    def pays_from(restart_s: float) -> int:
        return peers_pay_from(
            Costs(1.0, restart_s, 30.0),
            peer_restart_s=40.0, peer_share=0.7, overhead=0.01, gpu_mtbf_h=50_000.0,
        )  # fmt: skip

    assert 0 < pays_from(1800.0) < pays_from(600.0) < pays_from(180.0)
    assert pays_from(30.0) == 0  # slower than what it would replace


def test_the_table_goes_to_131072_gpus_in_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.process_time()
    assert main(["plan", "--table"]) == 0
    taken_s = time.process_time() - began
    out = capsys.readouterr().out
    print(f"{taken_s:.3f} s")
    assert taken_s < 5.0
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == [f"{one:,}" for one in SIZES]
    assert "131,072" in out


def examples() -> list[list[str]]:
    """Of --help, as they stand there."""
    told = re.sub(r"\\\n *", " ", _EXAMPLES)
    lines = [line.split("   ")[0] for line in told.splitlines() if line.startswith("  ftslurm")]
    return [shlex.split(line)[1:] for line in lines]


def test_there_are_examples_to_run() -> None:
    assert len(examples()) == 6 and ["plan", "--table"] in examples()
    assert any("first_step=10" in words[-1] for words in examples())


@pytest.mark.parametrize("words", examples(), ids=" ".join)
def test_every_example_of_the_help_runs(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 8


def test_json_says_the_same_as_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--gpus", "1,024", "--params", "70e9", "--restart", "detect=10,load=170"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    found = record["plan"]
    assert record["schema_version"] == 1
    assert found["storage"]["one_bytes"] == 980e9
    assert "980 GB" in text
    assert "detect 10 + load 170" in text
    assert f"{100 * (1 - sum(found['waste'].values())):.2f} %" in text


@pytest.mark.parametrize("interval", ["1e18", "1e-12", "1e9"])
def test_an_interval_with_which_a_run_does_not_end_is_what_is_blamed(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "1024", "--interval", interval]) == 0
    out = capsys.readouterr().out
    assert f"save {'less' if interval == '1e-12' else 'more'} often: checkpoint.interval_s=" in out
    assert "does not end" not in out
    assert max(map(len, out.splitlines())) < 200


EXTREME = ["", "--stall 1e18", "--stall 1e-12", "--persist 1e18", "--restart a=1e18,b=1e18",
           "--gpu-mtbf 1e18", "--gpu-mtbf 1e-12", "--interval 1e18",
           "--interval 1e-12"]  # fmt: skip


@pytest.mark.parametrize("size", ["--gpus 1e18", "--gpus 1", "--table"])
@pytest.mark.parametrize("costs", EXTREME)
def test_what_is_extreme_is_told_in_numbers_that_are_finite_and_lines_that_end(
    size: str, costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", *size.split(), *costs.split()]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert not re.search(r"\b(inf|nan)\b", text)
    assert max(map(len, text.splitlines())) < 260
    assert main([*asked, "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))


def test_what_is_wasted_and_the_goodput_are_told_to_the_same_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--gpus", "1", "--gpu-mtbf", "5000"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("1 GPU, 5,000 h between failures of one\n")
    (wasted,) = re.findall(r"wasted +([\d.]+) %", out)
    (goodput,) = re.findall(r"goodput +([\d.]+) %", out)
    assert float(wasted) + float(goodput) == pytest.approx(100.0, abs=0.011)
    assert re.search(r"trained again 50\.\d min \(9\d%\), restart 180 s", out)


def test_peers_pay_from_where_the_simulation_says_so() -> None:
    costs, helped = Costs(1.0, 600.0, 30.0), Costs(1.0, 0.7 * 40.0 + 0.3 * 600.0, 30.0)
    pays_from = peers_pay_from(
        costs, peer_restart_s=40.0, peer_share=0.7, overhead=0.01, gpu_mtbf_h=50_000.0
    )

    def gained(gpus: int) -> float:
        between_s = mtbf_s(gpus)
        interval_s = plan(Ask(gpus, 50_000.0, costs)).interval_s
        with_, without = (
            play(interval_s, one, between_s, work_s=20_000 * between_s, seed=5).waste.goodput
            for one in (helped, costs)
        )
        return with_ * 0.99 - without

    assert gained(int(1.25 * pays_from)) > 0.0 > gained(int(0.8 * pays_from))


def test_an_interval_of_ones_own_is_judged_and_bettered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--gpus", "512", "--interval", "1800", "--restart", "30"]) == 0
    out = capsys.readouterr().out
    best_s = plan(Ask(512, 50_000.0, Costs(1.0, 30.0, 30.0))).interval_s
    assert f"checkpoint.interval_s={best_s:.0f} checkpoint.interval_steps=0" in out


def test_where_the_lag_bounds_the_interval_no_balance_is_claimed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for persist, told in (("600", "durable too late to save every"), ("0", "balance")):
        asked = ["--gpus", "131072", "--restart", "1", "--stall", "1", "--persist", persist]
        assert main(["plan", *asked]) == 0
        (advice,) = [line for line in capsys.readouterr().out.splitlines() if "advice" in line]
        assert told in advice


def test_a_simulation_that_is_given_up_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftslurm.plan.simulate.MAX_FAILURES", 100)
    assert main(["plan", "--gpus", "131072", "--simulate", "1000"]) == 0
    assert "; given up, with" in capsys.readouterr().out
    assert main(["plan", "--gpus", "131072", "--simulate", "1000", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulated"]["is_done"] is False
    assert main(["plan", "--gpus", "8", "--simulate", "1"]) == 0
    assert "given up" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name them with --gpus"),
        (["--gpus", "0"], "not above 0"),
        (["--gpus", "1.5"], "no whole number"),
        (["--gpus", "8", "--restart", "detect=10,detect=5"], "write e.g."),
        (["--gpus", "8", "--stall", "nan"], "no number from 0 on\n"),
        (["--gpus", "8", "--stall", "1,5"], "`1,5` is no number"),
        (["--gpus", "-5"], "`-5` is no number from 0 on"),
        (["--gpus", "1k"], "leave the unit out"),
        (["--gpus", "8", "--params", "70B"], "`70B` is no number from 0 on; leave the unit out"),
        (["--gpus", "8", "--restart", "3m"], "leave the unit out"),
        (["--gpus", "8", "--restart", "detect=10,load"], "`load` has no seconds"),
        (["--gpus", "8", "--params", "7e9", "--state-gb", "50"], "leave --state-gb out, or --p"),
        (["--gpus", "8", "--table"], "leave --gpus out, or --table"),
        (["--table", "--simulate", "3"], "leave --simulate out, or --table"),
        (["--table", "--params", "7e9"], "leave --params out, or --table"),
        (["--gpus", "8", "--gpu-mtbf", "1e-320"], "`1e-320` is beyond all that"),
        (["--gpus", "8", "--simulate", "1e308"], "`1e308` is beyond all that"),
        (["--gpus", "8", "--simulate", "1", "--burst", "0.001"], "no shape between 0.1 and 10"),
        (["--published", "--gpus", "8"], "leave --gpus out, or --published"),
        (["--published", "--table"], "leave --table out, or --published"),
        (["--gpus", "8", "--burst", "0.5"], "--burst is for --simulate"),
        (["--gpus", "8", "--seed", "7"], "--seed is for --simulate"),
        (["--gpus", "8", "--bytes-per-param", "16"], "--bytes-per-param is for --params"),
        (["--gpus", "8", "--state-gb", "9", "--bytes-per-param", "16"], "is for --params"),
        (["--gpus", "8", "--keep", "5"], "that follows from --params or --state-gb"),
        (["--table", "--grace", "30"], "that follows from --params or --state-gb"),
        (["--gpus", "8", "--restart", "load=9,again=5"], "follows from the interval"),
        (["--gpus", "8", "--interval", "0"], "not above 0"),
    ],
)
def test_a_wrong_option_is_refused_with_a_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["plan", *arguments])
    except SystemExit as ended:
        code = int(str(ended.code))
    said = capsys.readouterr()
    assert code == 2
    assert told in said.err
