"""The batch script's loop, run by bash with an interpreter of the test's own in place of Python."""

import os
import signal
import time

import pytest
from fakes.script_loop import calls, starter, wait_for


@pytest.fixture
def loop(tmp_path):
    return starter(tmp_path)


def test_a_finished_run_ends_the_job_at_once(loop):
    process, run_dir = loop(claim=["0 done"])
    assert process.wait(90) == 0
    assert calls(run_dir) == [["-m", "ftslurm", "claim", str(run_dir)]]
    assert not list(run_dir.rglob("x")), "the path's $(touch x) was run"


def test_the_loop_restarts_until_recover_says_otherwise(loop):
    process, run_dir = loop(
        claim=["0 go 8 n1 20001", "0 go 9 n1 20002"],
        recover=["0 restart", "0 done"],
        ranks='echo "$MASTER_ADDR $MASTER_PORT $FTSLURM_ATTEMPT $SEEN_LOGS" >>seen\nexit 75',
    )
    assert process.wait(90) == 0
    logs = run_dir / "attempts"
    assert (run_dir / "seen").read_text().splitlines() == [
        f"n1 20001 8 {logs}/0008/logs/rank-%t.log",
        f"n1 20002 9 {logs}/0009/logs/rank-%t.log",
    ]
    recover = [call for call in calls(run_dir) if call[2] == "recover"]
    assert [call[4:] for call in recover] == [
        ["--attempt", "8", "--rc", "75"],
        ["--attempt", "9", "--rc", "75"],
    ]
    ranks = [call for call in calls(run_dir) if "ftslurm.submit.rank" in call]
    assert ranks == [["-u", "-m", "ftslurm.submit.rank", f"{run_dir}/submit"]] * 2


@pytest.mark.parametrize(
    "claim, recover, code",
    [
        (["3"], [], 3),
        (["0 perhaps"], [], 1),
        (["0 requeued"], [], 0),
        (["0 go 1 n1 20001"], ["0 requeued"], 0),
        (["0 go 1 n1 20001"], ["0 stop"], 1),
        (["0 go 1 n1 20001"], ["2"], 1),
        # A file system that is away for a moment is asked again.
        (["75", "0 go 1 n1 20001 0"], ["0 requeued"], 0),
        (["0 go 1 n1 20001 0"], ["75", "0 requeued"], 0),
    ],
)
def test_the_job_leaves_with_the_code_that_fits(loop, claim, recover, code):
    process, _ = loop(claim=claim, recover=recover)
    assert process.wait(90) == code


@pytest.mark.parametrize("claim", ["126", "127", "1"])
def test_a_file_system_that_is_away_is_waited_for_though_no_python_can_say_so(loop, claim):
    process, run_dir = loop(claim=[claim, "0 done"])
    assert process.wait(90) == 0
    assert len(calls(run_dir)) == 2


def test_an_error_of_a_verb_is_final_where_the_run_can_be_read(loop, tmp_path):
    run_json = tmp_path / "it's a $(touch x) run" / "run.json"
    run_json.touch()
    process, run_dir = loop(claim=["1", "0 done"])
    assert process.wait(90) == 1
    assert len(calls(run_dir)) == 1


def test_the_source_is_waited_for(loop, tmp_path):
    code = tmp_path / "it's a $(touch x) run" / "code"
    code.rmdir()
    process, run_dir = loop(claim=["0 done"])
    time.sleep(0.3)
    code.mkdir()
    assert process.wait(90) == 0
    assert len(calls(run_dir)) == 1


@pytest.mark.parametrize(
    "number, option", [(signal.SIGTERM, ["--term"]), (signal.SIGUSR1, []), (signal.SIGUSR2, [])]
)
def test_a_signal_to_the_shell_ends_neither_it_nor_its_wait(loop, number, option):
    process, run_dir = loop(
        claim=["0 go 1 n1 20001"],
        recover=["0 requeued"],
        ranks="touch up\nwhile [ ! -e go ]; do sleep 0.02; done\nexit 9",
    )
    wait_for(run_dir / "up")
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.02)
    (run_dir / "go").touch()
    assert process.wait(90) == 0
    assert calls(run_dir)[-1][4:] == ["--attempt", "1", "--rc", "9", *option]


def test_the_terms_of_its_own_requeue_do_not_kill_recover(loop, tmp_path):
    hook = "touch asking\nwhile [ ! -e go ]; do sleep 0.02; done\n"
    (tmp_path / "it's a $(touch x) run" / "recover-hook").write_text(hook)
    process, run_dir = loop(claim=["0 go 1 n1 20001"], recover=["0 requeued"], ranks="exit 75")
    wait_for(run_dir / "asking")
    for _ in range(3):  # as Slurm does: to the shell and all that it started
        os.killpg(process.pid, signal.SIGTERM)
    (run_dir / "go").touch()
    assert process.wait(90) == 0


ASKED, NOT_ASKED = "0 go 1 n1 20001 0 n1 1 preflight", "0 go 1 n1 20001 0 n1 1"


@pytest.mark.parametrize(
    "claim, preflight, started, rc",
    [
        (NOT_ASKED, "touch tried", False, 3),
        (ASKED, "touch tried", True, 3),
        (ASKED, "touch tried; exit 79", True, 79),
        (ASKED, "touch tried; exit 75", True, 75),
        # It broke, or was killed.
        (ASKED, "touch tried; exit 1", True, 3),
        (ASKED, "touch tried; kill -KILL $$", True, 3),
    ],
)
def test_ranks_start_unless_the_preflight_has_one_of_its_two_words(
    loop, claim, preflight, started, rc
):
    process, run_dir = loop(
        claim=[claim], recover=["0 requeued"], ranks="exit 3", preflight=f"{preflight}; exit 0"
    )
    assert process.wait(90) == 0
    assert (run_dir / "tried").exists() == started
    assert calls(run_dir)[-1][4:] == ["--attempt", "1", "--rc", str(rc)]
    ranks = [call for call in calls(run_dir) if "ftslurm.submit.rank" in call]
    assert len(ranks) == (rc == 3)
    steps = [call for call in calls(run_dir) if call[:2] == ["-m", "ftslurm.node.preflight"]]
    tail = [
        "srun",
        "--nodes=1",
        str(run_dir.parent / "python"),
        "-u",
        "-m",
        "ftslurm.train.preflight",
    ]
    assert [call[2:] for call in steps] == [tail] * started


def test_the_code_of_the_ranks_before_keeps_nobody_from_starting(loop):
    process, run_dir = loop(
        claim=[NOT_ASKED, "0 go 2 n1 20002 0 n1 1 preflight"],
        recover=["0 restart", "0 requeued"],
        ranks="exit 3",
        preflight="exit 0",
    )
    assert process.wait(90) == 0
    ranks = [call for call in calls(run_dir) if "ftslurm.submit.rank" in call]
    assert len(ranks) == 2


def test_lines_of_setup_run_first_and_change_nothing_of_the_loop(loop, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/the/submitter")
    process, run_dir = loop(
        claim=["0 go 1 n1 20001 0 n1", "0 go 2 n1 20002 0 n1"],
        recover=["0 restart", "0 done"],
        ranks='echo "$PYTHONPATH|$A|$B|$PWD" >>seen\nexit 75',
        setup=["export A=$((1 + 1)) PYTHONPATH=/of/a/module", "echo $NOT_SET", "set -e; IFS=x"],
        env={"B": "$A"},
    )
    assert process.wait(90) == 0
    line = f"{run_dir}/code:/of/a/module|2|$A|{run_dir}"
    assert (run_dir / "seen").read_text().splitlines() == [line] * 2


@pytest.mark.parametrize(
    ("line", "code"), [("false # why", 1), ("no-such-command", 127), ("exit 5", 5), ("if", 2)]
)
def test_a_line_of_setup_that_fails_ends_the_job_before_a_claim(loop, capfd, line, code):
    process, run_dir = loop(claim=["0 done"], setup=["true", line])
    assert process.wait(90) == code
    assert not (run_dir / "calls").exists()
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("train.sbatch: error: cluster.setup failed on ")
    assert f"at `{line}` (code {code}); mend the line" in said


def test_the_environment_is_unpacked_before_the_ranks_of_every_attempt(loop, tmp_path):
    process, run_dir = loop(
        claim=["0 go 1 n1 20001 0 n1", "0 go 2 n1 20002 0 n1"],
        recover=["0 restart", "0 done"],
        unpack='echo "unpack $ON" >>seen; exit 0',
        ranks="echo rank >>seen; exit 75",
        environment="env.tar",
        rank_python=str(tmp_path / "python"),
    )
    assert process.wait(90) == 0
    assert (run_dir / "seen").read_text().splitlines() == ["unpack nodes", "rank"] * 2
    unpack = next(call for call in calls(run_dir) if "ftslurm.node.unpack" in call)
    folders = [str(tmp_path / name) for name in ("env.tar", "unpacked", "python")]
    assert unpack == ["-m", "ftslurm.node.unpack", *folders]


def test_no_rank_is_started_where_the_environment_could_not_be_unpacked(loop):
    process, run_dir = loop(
        claim=["0 go 1 n1 20001 0 n1"],
        recover=["0 stop"],
        unpack="exit 1",
        ranks="touch started",
        environment="env.tar",
    )
    assert process.wait(90) == 1
    assert calls(run_dir)[-1][4:] == ["--attempt", "1", "--rc", "1"]
    assert not (run_dir / "started").exists()


def test_a_signal_while_the_environment_is_unpacked_ends_neither_shell_nor_wait(loop):
    process, run_dir = loop(
        claim=["0 go 1 n1 20001 0 n1"],
        recover=["0 requeued"],
        unpack="touch up\nwhile [ ! -e go ]; do sleep 0.02; done\nexit 75",
        ranks="touch started",
        environment="env.tar",
    )
    wait_for(run_dir / "up")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    (run_dir / "go").touch()
    assert process.wait(90) == 0
    assert calls(run_dir)[-1][4:] == ["--attempt", "1", "--rc", "75", "--term"]
    assert not (run_dir / "started").exists()
