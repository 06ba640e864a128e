"""Ranks forked from a standby that has torch train the same bits as cold ones."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import launch
import pytest

from ftslurm.files import read_json
from ftslurm.node.standby_command import rank_modules, standby_modules
from ftslurm.replay.trace import read_trace
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import CheckpointSpec, ClusterSpec, ParallelSpec, RecoverySpec, RunSpec
from ftslurm.submit.executor import write_call
from ftslurm.train.build import build_python_stdlib

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

WORLD_SIZE = 2
DEADLINE_S = 150


class Job:
    """One run whose attempts are started by hand, with or without a standby."""

    def __init__(self, root: Path, spec: RunSpec, data: Path) -> None:
        self.spec = spec
        self.layout = launch.prepare(root, spec, data_path=data)
        self.layout.submit.mkdir(mode=0o700)
        write_call(self.layout.submit)
        self.layout.call.chmod(0o600)
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        self.environ = {
            **kept,
            "PYTHONPATH": ":".join(launch.PYTHON_PATH),
            "FTSLURM_RUN_DIR": str(root),
            "SLURM_JOB_ID": f"train-{os.getpid()}-{root.name}",
            "SUBMITIT_EXECUTOR": "ftslurm",
            "MASTER_ADDR": "127.0.0.1",
        }

    def start_standby(self) -> subprocess.Popen[str]:
        argv = [sys.executable, "-u", "-m", *standby_modules(self.spec)]
        standby = subprocess.Popen(
            argv, env=self.environ, cwd=self.layout.code, stderr=subprocess.PIPE, text=True
        )
        assert standby.stderr is not None
        self.ready = standby.stderr.readline()
        assert "is ready" in self.ready, self.ready + standby.stderr.read()
        return standby

    def run_attempt(self, faults: str = "") -> int:
        number = launch.claim_attempt(self.layout)
        self.logs = self.layout.attempt(number).logs
        environ = {
            **self.environ,
            "FTSLURM_ATTEMPT": str(number),
            "MASTER_PORT": str(launch.free_port()),
            "FTSLURM_FAULTS": faults,
        }
        argv = [sys.executable, "-m", "ftslurm.scheduler.local_ranks", f"--ntasks={WORLD_SIZE}",
                f"--output={self.logs}/rank-%t.log", "--", sys.executable, "-u", "-m",
                *rank_modules(self.spec), str(self.layout.submit)]  # fmt: skip
        done = subprocess.run(argv, env=environ, cwd=self.layout.code, timeout=DEADLINE_S)
        return done.returncode

    def says(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.logs.iterdir()))


def trained(layout: RunLayout) -> tuple[str, dict[int, str]]:
    losses = {step: row.loss.hex() for step, row in read_trace(layout).items()}
    return read_json(layout.done)["parameter_digest"], losses


def make_spec(strategy: str, *, standby: bool) -> RunSpec:
    return RunSpec(
        steps=10,
        cluster=ClusterSpec(scheduler="local", tasks_per_node=WORLD_SIZE),
        parallel=ParallelSpec(strategy=strategy),
        checkpoint=CheckpointSpec(interval_steps=3, interval_s=0),
        recovery=RecoverySpec(standby=standby),
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("data") / "stdlib.h5"
    build_python_stdlib(path)
    return path


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_forked_ranks_train_the_same_bits_as_cold_ones(
    tmp_path: Path, data: Path, strategy: str
) -> None:
    cold = Job(tmp_path / "cold", make_spec(strategy, standby=False), data)
    assert cold.run_attempt() == 0, cold.says()

    kill = "kill@step:rank=1:step=8:attempt=1"
    forked = Job(tmp_path / "forked", make_spec(strategy, standby=True), data)
    assert forked.run_attempt(kill) == 128 + signal.SIGKILL, forked.says()
    assert forked.says().count("this rank starts cold") == WORLD_SIZE
    standby = forked.start_standby()
    try:
        again = "kill@step:rank=0:step=9:attempt=2"
        for faults, code in ((again, 128 + signal.SIGKILL), ("", 0)):
            assert forked.run_attempt(faults) == code, forked.says()
            assert forked.says().count(f"forked from standby {standby.pid}\n") == WORLD_SIZE
            assert len(list(Path(f"/proc/{standby.pid}/task").iterdir())) == 1
    finally:
        standby.terminate()
        assert standby.wait(60) == 0
    found = re.search(r"(\d+) modules, (\d+) MiB \(PSS\)", forked.ready)
    assert found and int(found[1]) > 1500 and 100 < int(found[2]) < 1500, forked.ready
    assert trained(forked.layout) == trained(cold.layout)
    assert sorted(trained(forked.layout)[1]) == list(range(1, 11))
