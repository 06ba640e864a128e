"""recovery.standby from `ftslurm submit` to the end of the run, without Slurm and without torch."""

import contextlib
from pathlib import Path

from fakes.chain import Chain, wait_for
from fakes.project import slow_while


def test_a_run_goes_on_from_forked_ranks_as_from_cold_ones(tmp_path):
    faults = "kill@step:rank=1:step=25:attempt=1"
    seen = {}
    for kind in ("cold", "forked"):
        folder = tmp_path / kind
        folder.mkdir()
        chain = Chain(folder)
        held = folder / "held"
        held.touch()
        standby = f"recovery.standby={kind == 'forked'}"
        run = chain.submit(standby, *slow_while(held, since=2), faults=faults)
        if kind == "forked":
            wait_for(lambda says=run.says: "is ready after" in says(), run.says)
        held.unlink()
        chain.wait("COMPLETED")
        assert run.decisions() == ["restart", "done"], run.says()
        seen[kind] = (run.digest, run.losses)
        logs = [path.read_text() for path in run.layout.attempt(2).logs.iterdir()]
        assert all(("forked from standby" in log) == (kind == "forked") for log in logs), run.says()
    assert seen["forked"] == seen["cold"]
    mine = f"FTSLURM_RUN_DIR={run.layout.root}".encode()
    assert not [pid for pid in pids() if mine in environ_of(pid)], "nothing is left"


def pids():
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def environ_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []
