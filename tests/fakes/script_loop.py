"""The batch script's loop, run by bash with an interpreter of the tests' own in place of Python."""

import os
import subprocess
import sys
import time

from ftslurm.node.environment import Environment
from ftslurm.run.spec import ClusterSpec, RecoverySpec, RunSpec
from ftslurm.scheduler.launch import LOGS
from ftslurm.submit.render import render_script

# Notes its arguments; `claim` and `recover` answer with the next line of the file of that name
# (exit code, then what is printed), a rank runs the file `ranks`.
INTERPRETER = """#!/bin/bash
cd "$FTSLURM_RUN_DIR" || exit
[[ $1 != -S ]] || shift
printf -v call '%s|' "$@"
echo "$call" >>calls # in one write: claim and agents come at the same time
case $3 in
  claim | recover)
    [[ ! -e $3-hook ]] || . "./$3-hook"
    read -r rc words <"$3"
    sed -i 1d "$3"
    echo "$words"
    exit "$rc"
    ;;
esac
[[ $2 == ftslurm.node.unpack ]] && . ./unpack
[[ $2 == ftslurm.node.preflight ]] && . ./preflight
[[ $2 == ftslurm.agent ]] && . ./agent
[[ $3 == metrics ]] && . ./metrics
[[ $2 == ftslurm.agent.keep ]] && exec PYTHON "$@"
. ./ranks
"""


def starter(tmp_path):
    """Of the rendered loop with an interpreter of the test's own."""
    run_dir = tmp_path / "it's a $(touch x) run"
    (run_dir / "code").mkdir(parents=True)
    fake = tmp_path / "python"
    fake.write_text(INTERPRETER.replace("PYTHON", sys.executable, 1))
    fake.chmod(0o755)

    def start(
        *,
        claim=(),
        recover=(),
        ranks="exit 0",
        unpack="exit 0",
        preflight="",
        agent="",
        agents_after_s=0,
        metrics="",
        **cluster,
    ):
        (run_dir / "claim").write_text("".join(f"{line}\n" for line in claim))
        (run_dir / "recover").write_text("".join(f"{line}\n" for line in recover))
        (run_dir / "ranks").write_text(ranks)
        (run_dir / "unpack").write_text(unpack)
        (run_dir / "preflight").write_text(preflight)
        (run_dir / "agent").write_text(agent)
        (run_dir / "metrics").write_text(metrics)
        recovery = RecoverySpec(metrics_dir="/of/the node" if metrics else None)
        after = ["--after", str(agents_after_s)] if agents_after_s else []
        environment = Environment(tmp_path / "env.tar", tmp_path / "unpacked")
        script = run_dir / "train.sbatch"
        script.write_text(
            render_script(
                RunSpec(cluster=ClusterSpec(**cluster), recovery=recovery),
                run_id="loop",
                run_dir=run_dir,
                python=str(fake),
                python_path=[run_dir / "code"],
                launch=["env", f"SEEN_LOGS={LOGS}/rank-%t.log"],
                on_nodes=["env", "ON=nodes"],
                agents=[*after, "env", "AGENT=1"] if agent else [],
                preflight=["srun", "--nodes=1"] if preflight else [],
                environment=environment if "environment" in cluster else None,
            )
        )
        process = subprocess.Popen(["bash", script], env=os.environ, start_new_session=True)
        return process, run_dir

    return start


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.01)


def calls(run_dir):
    return [line.split("|")[:-1] for line in (run_dir / "calls").read_text().splitlines()]


def alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True
