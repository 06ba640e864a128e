"""The planner: formulas against a simulation that shares none of them, and published figures."""

from __future__ import annotations

import json
import math
import time

import pytest

from ftslurm.cli import main
from ftslurm.plan.capacity import peers_pay_from
from ftslurm.plan.failures import SIZES, mtbf_s
from ftslurm.plan.intervals import Costs, daly_s, exact_s, expected_s, waste, young_s
from ftslurm.plan.plan import Ask, plan
from ftslurm.plan.published import rows
from ftslurm.plan.simulate import play

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


def test_peers_pay_sooner_the_longer_a_restart_takes() -> None:
    def pays_from(restart_s: float) -> int:
        return peers_pay_from(
            Costs(1.0, restart_s, 30.0),
            peer_restart_s=40.0, peer_share=0.7, overhead=0.01, gpu_mtbf_h=50_000.0,
        )  # fmt: skip

    assert 0 < pays_from(1800.0) < pays_from(600.0) < pays_from(180.0)
    assert pays_from(30.0) == 0  # slower than what it would replace


def test_the_table_goes_to_131072_gpus_in_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    began = time.perf_counter()
    assert main(["plan", "--table"]) == 0
    taken_s = time.perf_counter() - began
    out = capsys.readouterr().out
    print(f"{taken_s:.3f} s")
    assert taken_s < 5.0
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == [f"{one:,}" for one in SIZES]
    assert "131,072" in out


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
        (["--gpus", "8", "--stall", "nan"], "no number"),
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
