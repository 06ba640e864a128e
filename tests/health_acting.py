"""A node of a fleet that acts on what it is told to have found, for the tests of that."""

from dataclasses import replace
from pathlib import Path

from fakes.slurm_fleet import FleetNode, fleet
from health_nodes import GPUS, signal
from health_nodes import node as reading_of

from ftslurm.health.drain import Action, act
from ftslurm.health.settings import HealthSettings
from ftslurm.health.state_dir import StateDir
from ftslurm.health.verdict import Verdict

SITE = HealthSettings()
ADMIN = "fan, ticket 4711"


def verdict(word: str = "drain", code: str = "XID79", **rest: object) -> Verdict:
    given = {"gpu": GPUS[3], "sentence": "a GPU fell off", "rule": f"rule-{code}",
             "source": "test", "auto_resume": True, "needs": "reboot", **rest}  # fmt: skip
    return Verdict(word, code, **given)


HUNG = verdict(code="DRV-HANG", gpu=None, rule="driver-hang")
SOFT = verdict(code="GPU-COUNT", gpu=None, rule="gpu-count")
UP = signal("rdma_state", "ACTIVE", None, where="mlx5_0/1")
DOWN = replace(UP, value="DOWN")
HEALTHY = reading_of("h100", UP)
PORT = verdict(code="IB-DOWN", rule="rdma-state", needs="", gpu=None, signals=(DOWN,))


class Node:
    """n1 of a fleet, and the folder that it keeps its state in."""

    def __init__(self, folder: Path) -> None:
        self.fleet = fleet(*(f"n{i}" for i in range(1, 9)))
        self.state = StateDir(folder / "state")
        self.boot_id = "b001-0000"
        self.slept: list[float] = []

    def act(self, *verdicts: Verdict, context: str = "epilog", site=SITE, **rest) -> Action:
        self.fleet.calls.clear()
        given = {"runner": self.fleet.run, "clock": lambda: self.fleet.now, "reading": HEALTHY,
                 "baseline": HEALTHY, **rest}  # fmt: skip
        return act(
            verdicts, site, "n1", self.state, context=context, boot_id=self.boot_id,
            looked_at=self.fleet.now, sleep=self.slept.append, random=lambda: 0.5, **given,
        )  # fmt: skip

    def look_again(self, *verdicts: Verdict, after_s: float = 60.0, **rest) -> Action:
        self.fleet.now += after_s
        return self.act(*verdicts, context="periodic", **rest)

    @property
    def kinds(self) -> list[str]:
        return [call[0] if call[0] == "sinfo" else call[1] for call in self.fleet.calls]

    @property
    def mine(self) -> FleetNode:
        return self.fleet.nodes["n1"]
