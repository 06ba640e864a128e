"""The batch script's agents: one srun beside all attempts, started again where it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest
from fakes.script_loop import alive, calls, starter, wait_for

from ftslurm.agent.keep import LONG_S
from ftslurm.agent.main import LEADER_WITHIN_S

SRUN_OF_AGENTS = "echo $$ >>agents\nexec sleep 200"


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A loop with agents."""
    loop = starter(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run_dir = tmp_path / "it's a $(touch x) run"
    (run_dir / "submit").mkdir()
    for number in ("0001", "0002"):
        (run_dir / "attempts" / number).mkdir(parents=True)

    def start(agent=SRUN_OF_AGENTS, **values):
        return loop(agent=agent, **values)

    return start


def recovered(run_dir):
    """With what arguments, last; the agents may come later still."""
    return [call[4:] for call in calls(run_dir) if call[2] == "recover"][-1]


def wait_until_gone(*pids):
    deadline = time.monotonic() + 60
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def test_agents_are_started_once_for_all_attempts_and_end_with_the_job(watched):
    process, run_dir = watched(
        claim=["0 go 1 n1 20001", "0 go 2 n1 20002"],
        recover=["0 restart", "0 stop"],
        ranks="while [ ! -e agents ]; do sleep 0.02; done\nexit 9",
    )
    assert process.wait(90) == 1
    (pid,) = (run_dir / "agents").read_text().split()
    wait_until_gone(pid)
    assert [call[1] for call in calls(run_dir)].count("ftslurm.agent") == 1


def test_a_short_job_ends_without_having_had_agents(watched):
    process, run_dir = watched(
        agent=SRUN_OF_AGENTS, agents_after_s=600, claim=["0 go 1 n1 20001"], recover=["0 done"]
    )
    assert process.wait(90) == 0
    assert not (run_dir / "agents").exists()


def test_agents_that_begin_late_come_with_a_further_attempt(watched, tmp_path):
    """A USR1 that the keeper cannot hear yet is lost."""
    answer = "[[ -e agents ]] && echo 0 done >recover || echo 0 restart >recover\n"
    (tmp_path / "it's a $(touch x) run" / "recover-hook").write_text(answer)
    process, run_dir = watched(
        agent=SRUN_OF_AGENTS,
        agents_after_s=600,
        claim=["0 go 1 n1 20001", *["0 go 2 n1 20002"] * 200],
        ranks="sleep 0.1\nexit 9",
    )
    assert process.wait(200) == 0
    (pid,) = (run_dir / "agents").read_text().split()
    wait_until_gone(pid)


def test_agents_that_begin_late_come_beside_the_ranks_of_a_longer_attempt(watched):
    process, run_dir = watched(
        agent=SRUN_OF_AGENTS,
        agents_after_s=1,
        claim=["0 go 1 n1 20001"],
        recover=["0 done"],
        ranks="while [ ! -e agents ]; do sleep 0.02; done\nexit 0",
    )
    assert process.wait(90) == 0
    assert [call[1] for call in calls(run_dir)].count("ftslurm.agent") == 1


def test_agents_that_have_ended_are_started_again_before_the_next_attempt(watched):
    process, run_dir = watched(
        agent="echo $$ >>agents\nexit 1",
        claim=["0 go 1 n1 20001", "0 go 2 n1 20002"],
        recover=["0 restart", "0 done"],
        ranks="until [[ $(grep -c . agents) -ge $FTSLURM_ATTEMPT ]]; do sleep 0.02; done\nexit 9",
    )
    assert process.wait(90) == 0
    assert len((run_dir / "agents").read_text().split()) >= 2


def test_agents_that_end_while_ranks_run_are_started_again_beside_them(watched):
    """As when the leader's agent is killed, or the only one."""
    process, run_dir = watched(
        agent="echo $$ >>agents\n[[ $(wc -l <agents) -gt 1 ]] && { touch go; exec sleep 30; }\n"
        "exit 137",
        claim=["0 go 1 n1 20001"],
        recover=["0 done"],
        ranks="while [ ! -e go ]; do sleep 0.02; done\nexit 0",
    )
    assert process.wait(90) == 0
    first, second = (run_dir / "agents").read_text().split()
    wait_until_gone(second)
    assert recovered(run_dir) == ["--attempt", "1", "--rc", "0"]


def test_agents_that_do_not_go_hold_the_job_for_two_seconds_at_most(watched, tmp_path):
    """As srun is held by a dead node."""
    hook = "while [ ! -e go ]; do sleep 0.02; done\n"
    (tmp_path / "it's a $(touch x) run" / "claim-hook").write_text(hook)
    process, run_dir = watched(agent=f"trap '' TERM\n{SRUN_OF_AGENTS}", claim=["0 done"])
    wait_for(run_dir / "agents")
    begun = time.monotonic()
    (run_dir / "go").touch()
    try:
        assert process.wait(90) == 0
        assert 1.9 < time.monotonic() - begun < 60
    finally:
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("claim, code", [("3", 3), ("0 go 1 n1 20001", 1), ("0 done", 0)])
def test_the_last_word_of_the_figures_comes_after_the_decision_and_changes_no_code(
    watched, claim, code
):
    process, run_dir = watched(
        agent=SRUN_OF_AGENTS,
        claim=[claim],
        recover=["0 stop"],
        ranks="exit 137",
        metrics='[[ $6 == "/of/the node" ]] && cp calls told\nexit 9',
    )
    assert process.wait(90) == code
    told = [line.split("|") for line in (run_dir / "told").read_text().splitlines()]
    recover = ["recover"] if "go" in claim else []
    verbs = [words[2] for words in told if words[1] == "ftslurm"]
    assert verbs == ["claim", *recover, "metrics"]


def test_the_signals_of_a_jobs_end_do_not_cut_the_last_word_short_and_a_hang_does_not_last(watched):
    process, run_dir = watched(
        agent=SRUN_OF_AGENTS,
        claim=["0 done"],
        metrics="touch up\nwhile [ ! -e go ]; do sleep 0.02; done\ntouch told",
    )
    wait_for(run_dir / "up")
    begun = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.killpg(process.pid, number)
    try:
        assert process.wait(90) == 0
        assert time.monotonic() - begun < 60
        (run_dir / "go").touch()
        wait_for(run_dir / "told")
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_what_the_launcher_says_is_kept_and_passed_on_and_its_code_is_its_own(watched, capfd):
    process, run_dir = watched(
        claim=["0 go 1 n1 20001"], recover=["0 stop"], ranks="echo task 3: Killed >&2\nexit 137"
    )
    assert process.wait(90) == 1
    kept = (run_dir / "attempts" / "0001" / "launcher.log").read_text()
    assert kept == "task 3: Killed\n" and kept in capfd.readouterr().err
    assert recovered(run_dir) == ["--attempt", "1", "--rc", "137"]


def test_a_term_to_all_that_the_shell_started_leaves_the_launcher_somebody_to_talk_to(watched):
    process, run_dir = watched(
        claim=["0 go 1 n1 20001"],
        recover=["0 requeued"],
        ranks="trap '' TERM\ntouch up\nwhile [ ! -e go ]; do sleep 0.02; done\n"
        "echo last words >&2\nexit 75",
    )
    wait_for(run_dir / "up")
    os.killpg(process.pid, signal.SIGTERM)
    time.sleep(0.1)
    (run_dir / "go").touch()
    assert process.wait(90) == 0
    assert (run_dir / "attempts" / "0001" / "launcher.log").read_text() == "last words\n"
    assert recovered(run_dir) == ["--attempt", "1", "--rc", "75", "--term"]


def test_the_keeper_leaves_with_the_script_that_started_it(tmp_path):
    argv = [sys.executable, "-m", "ftslurm.agent.keep", "sh", "-c", "echo $$ >>srun; exec sleep 60"]
    shell = ["bash", "-c", '"$@" & echo $! >keeper; wait', "train.sbatch", *argv]
    with subprocess.Popen(shell, cwd=tmp_path) as script:
        wait_for(tmp_path / "srun")
        script.kill()
    pids = [(tmp_path / name).read_text() for name in ("keeper", "srun")]
    wait_until_gone(*pids)


def test_a_process_that_has_the_number_of_a_keeper_that_died_is_left_alone(watched, tmp_path):
    process, run_dir = watched(claim=["0 done"])
    assert process.wait(90) == 0
    _, _, rest = (run_dir / "train.sbatch").read_text().partition("\nwatch() {")
    watch = "watch() {" + rest.partition("\n}\n")[0] + "\n}\n"
    with subprocess.Popen(["sleep", "60"]) as stranger:
        script = (
            f"set -u; cd {tmp_path}; mkdir submit; FTSLURM_RUN_DIR=. SLURM_JOB_ID=7 python=false\n"
            f"{watch}agents={stranger.pid}; watch; wait $agents; echo $?\n"
            "python=sleep; watch() { :; }; sleep 60 & agents=$!\n"
            f"{watch}watch; wait $agents; echo $?\n"
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=100)
        assert stranger.poll() is None
        stranger.kill()
    # Another one is started for it; what is the keeper is woken.
    assert done.stdout.split() == ["1", str(128 + signal.SIGUSR1)], done.stderr


def test_a_keeper_that_cannot_start_the_agents_tries_again(tmp_path):
    """As with a full process table."""
    argv = [sys.executable, "-m", "ftslurm.agent.keep", str(tmp_path / "srun")]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, cwd=tmp_path, text=True) as keeper:
        try:
            assert "the agents are not started" in keeper.stderr.readline()
            (tmp_path / "next").write_text("#!/bin/sh\ntouch up\nexec sleep 60\n")
            (tmp_path / "next").chmod(0o755)
            (tmp_path / "next").rename(tmp_path / "srun")
            wait_for(tmp_path / "up")
        finally:
            keeper.terminate()
        assert keeper.wait(60) == 0


def test_the_agents_begin_with_the_signals_of_a_new_process(tmp_path):
    """What is ignored or blocked stays so in what is started, as what these tests ignore does."""
    told = ["grep", "^Sig[BI]", "/proc/self/status"]
    new = subprocess.run(told, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    argv = [sys.executable, "-m", "ftslurm.agent.keep", *told]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=tmp_path, text=True) as keeper:
        try:
            masks = [keeper.stdout.readline().rstrip() for _ in range(2)]
        finally:
            keeper.terminate()
        assert keeper.wait(60) == 0
    assert masks == new


def test_a_keeper_that_was_begun_with_sigchld_ignored_starts_the_agents_again_too(tmp_path):
    """Of a child that ends, the kernel would keep nothing (wait(2), NOTES)."""
    start = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    start += "os.execv(sys.executable, [sys.executable, '-m', 'ftslurm.agent.keep', *sys.argv[1:]])"
    command = ["sh", "-c", "[ -e once ] && touch twice; touch once"]
    with subprocess.Popen([sys.executable, "-c", start, *command], cwd=tmp_path) as keeper:
        try:
            wait_for(tmp_path / "twice")
        finally:
            keeper.terminate()
        assert keeper.wait(60) == 0


def test_agents_without_a_leader_are_started_again_after_longer_and_longer_pauses():
    assert LONG_S >= LEADER_WITHIN_S + 60, "they have lived for so long and done nothing"
