"""A spare with other GPUs takes no node's place, on real Slurm with gres of two types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest
from batch_runs import daemon_away
from lab import Lab, wait_until
from sick_runs import SickRun

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600), pytest.mark.full]

ODD = "n3"


class Types:
    """slurm.conf and gres.conf of the lab, in which one node's GPUs are of another type."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.slurm_conf = Path(lab.environment["SLURM_CONF"])
        self.gres_conf = self.slurm_conf.with_name("gres.conf")
        self.before = {path: path.read_text() for path in (self.slurm_conf, self.gres_conf)}

    def put(self) -> None:
        for path, text in self.before.items():
            lines = [one for line in text.splitlines() for one in self._typed(line)]
            self._write(path, "\n".join(lines) + "\n")
        self._begin_anew({name: "a100" if name == ODD else "h100" for name in self.lab.nodes})

    def restore(self) -> None:
        for path, text in self.before.items():
            self._write(path, text)
        self._begin_anew(dict.fromkeys(self.lab.nodes, ""))

    def _typed(self, line: str) -> list[str]:
        """A line for each node of one that is for all."""
        match = re.match(r"NodeName=\S+", line)
        if match is None:
            return [line]
        typed = []
        for number, name in enumerate(self.lab.nodes):
            kind = "a100" if name == ODD else "h100"
            own = line.replace(match[0], f"NodeName={name}", 1)
            addresses = re.search(r"NodeAddr=(\S+)", own)
            if addresses is not None:
                own = own.replace(addresses[1], addresses[1].split(",")[number])
            own = own.replace("Gres=gpu:", f"Gres=gpu:{kind}:")
            typed.append(own.replace("Name=gpu ", f"Name=gpu Type={kind} "))
        return typed

    def _write(self, path: Path, text: str) -> None:
        beside = path.with_suffix(".typed")
        beside.write_text(text)
        beside.replace(path)

    def _begin_anew(self, types: dict[str, str]) -> None:
        """When it is only reconfigured, 22.05 shows the types and refuses every step with gres."""
        for node in self.lab.nodes:
            self.lab.kill(node)
        with daemon_away(self.lab, "slurmctld", verb="stop"):
            pass
        for node in self.lab.nodes:
            self.lab.start(node)
        wanted = {f"{name} {f'gpu:{kind}:2' if kind else 'gpu:2'}" for name, kind in types.items()}
        seen: set[str] = set()

        def agree() -> Optional[bool]:
            argv = ["sinfo", "--noheader", "--Node", "--format=%N %G %T"]
            shown = self.lab.run_as_root(*argv, check=False).splitlines()
            seen.clear()
            seen.update(line.rpartition(" ")[0].partition("(")[0] for line in shown)
            return (seen == wanted and all(line.endswith(" idle") for line in shown)) or None

        wait_until(agree, timeout_s=120, seen=lambda: f"{seen}, expected {wanted}")


@pytest.fixture
def types(lab: Lab) -> Iterator[Types]:
    made = Types(lab)
    try:
        made.put()
        yield made
    finally:
        made.restore()


def test_a_node_that_fails_is_replaced_by_the_spare_with_its_gpus_and_by_no_other(
    lab: Lab, types: Types
) -> None:
    more = ["cluster.spares=2", "cluster.gpus_per_node=1"]
    run = SickRun(lab, "types", *more, sick="n2")
    run.end_as("COMPLETED")
    first, second = run.attempts
    assert (first.nodes, first.spares) == (["n1", "n2"], ["n4"]), run.says()
    why = "can stand in for none of the others: its GPUs are 2 x a100 where 2 x h100 are needed"
    assert first.excluded == {ODD: why}
    assert (second.nodes, second.spares) == (["n1", "n4"], []), run.says()
    assert second.restart_count == 0 and second.excluded[ODD] == why
    told = run.ftslurm("status", str(run.run.layout.root), "--attempt", "2")
    assert f"{ODD} (left out, {why})" in told
