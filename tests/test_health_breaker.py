"""Many nodes drain at once: few stay, the same ones in the eyes of each, whatever the order."""

import random
import threading
from pathlib import Path

import pytest
from fakes.slurm_fleet import LATE, NOW, Fleet, FleetNode, fleet
from health_nodes import GPUS
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.health import latch
from ftslurm.health.breaker import STANDING, decide, is_hardware_xid
from ftslurm.health.drain import act
from ftslurm.health.node_state import Drain
from ftslurm.health.settings import HealthSettings
from ftslurm.health.state_dir import StateDir
from ftslurm.health.verdict import Verdict

SITE = HealthSettings()
WINDOW_S = SITE.breaker_window_s
SLACK_S = 1.1


def limit_of(gpu_nodes: int) -> int:
    return max(2, gpu_nodes * 5 // 100)


def names(drains: list[Drain], gpu_nodes: int = 40) -> list[str]:
    """Those that stay, each by its own view."""
    return [one.node for one in drains if decide(drains, one.node, gpu_nodes, SITE).keeps]


def drains(*codes: str, step_s: float = 1.0) -> list[Drain]:
    return [Drain(f"n{i:02}", code, NOW + i * step_s) for i, code in enumerate(codes)]


@pytest.mark.parametrize(("gpu_nodes", "limit"), [(0, 2), (4, 2), (59, 2), (60, 3), (1000, 50)])
def test_the_limit_is_two_nodes_or_a_twentieth(gpu_nodes: int, limit: int) -> None:
    many = drains(*["XID79"] * (limit + 3), step_s=0.0)
    assert names(many, gpu_nodes) == [f"n{i:02}" for i in range(limit)]
    assert sorted(names(many[::-1], gpu_nodes)) == names(many, gpu_nodes), "in whatever order"


def test_the_share_is_counted_as_a_person_would() -> None:
    site = HealthSettings(breaker_share=0.29)
    many = drains(*["XID79"] * 40, step_s=0.0)
    assert sum(decide(many, one.node, 100, site).keeps for one in many) == 29


def test_what_was_drained_before_the_window_leaves_room() -> None:
    assert names(drains(*["XID79"] * 6, step_s=WINDOW_S / 2)) == [f"n{i:02}" for i in range(6)]
    assert names(drains(*["XID79"] * 3, step_s=WINDOW_S / 2 - 1)) == ["n00", "n01"]


@pytest.mark.parametrize("code", ["XID119", "NVLINK-DOWN", "IB-DOWN"])
def test_one_false_drain_after_another_ends_at_three_windows_worth(code: str) -> None:
    """However slow: each by itself is within what its window may hold."""
    slow = drains(*[code] * 60, step_s=WINDOW_S + 10)
    assert names(slow, 40) == [f"n{i:02}" for i in range(STANDING * limit_of(40))]
    assert len(names(slow, 200)) == STANDING * limit_of(200) == 30
    refused = decide(slow, "n31", 40, SITE).sentence
    assert "6 nodes are drained by us already" in refused
    assert decide(slow[:5] + slow[9:10], "n09", 40, SITE).keeps, "one that is lifted leaves room"


def test_one_signature_on_three_nodes_is_not_the_nodes_fault_unless_the_hardware_says_so() -> None:
    assert names(drains("DRIVER", "DRIVER", "DRIVER", "XID79"), 1000) == ["n00", "n01", "n03"]
    assert names(drains("DRIVER", "IB-DOWN", "DRIVER", "IB-DOWN"), 1000) == [
        "n00", "n01", "n02", "n03",
    ]  # fmt: skip
    assert len(names(drains(*["XID79"] * 9), 1000)) == 9
    sentence = decide(drains(*["DRIVER"] * 3), "n02", 1000, SITE).sentence
    assert "3 nodes show DRIVER" in sentence


@pytest.mark.parametrize(
    ("code", "is_hardware"),
    [("XID79", True), ("XID48", True), ("SXID12020", True), ("XID999", True), ("XID13", False),
     ("XID31", False), ("GPU-LOST", False), ("XID", False), ("NXID7", False), ("ACTION2", False)],
)  # fmt: skip
def test_an_xid_of_a_program_is_none_of_the_hardware(code: str, is_hardware: bool) -> None:
    assert is_hardware_xid(code) is is_hardware


CODES = st.sampled_from(["XID79", "XID48", "DRIVER", "IB-DOWN"])
WAVE = st.lists(
    st.tuples(
        CODES,
        st.floats(0, 3 * WINDOW_S) | st.floats(0, 3),  # when its drain lands
        st.floats(SLACK_S, 4),  # how long after it counts
        st.floats(0, 5),  # how long after that it has taken its drain back
    ),
    min_size=1,
    max_size=24,
)


@given(wave=WAVE, gpu_nodes=st.sampled_from([0, 8, 60, 100, 400]), shuffle=st.randoms())
@settings(max_examples=400, deadline=None)
def test_after_any_interleaving_the_same_few_stay(wave, gpu_nodes, shuffle) -> None:
    """Each node drains, counts a moment later, and takes its drain back some time after that."""
    order = list(range(len(wave)))
    shuffle.shuffle(order)
    every = [
        Drain(f"n{order[i]:02}", code, float(int(NOW + at)))
        for i, (code, at, _, _) in enumerate(wave)
    ]
    gone_at: dict[str, float] = {}
    counts = sorted((NOW + at + wait_s, i) for i, (_, at, wait_s, _) in enumerate(wave))
    for now, i in counts:
        standing = [
            one
            for one, (_, at, _, _) in zip(every, wave)
            if NOW + at <= now and gone_at.get(one.node, now + 1) > now
        ]
        if not decide(standing, every[i].node, gpu_nodes, SITE).keeps:
            gone_at[every[i].node] = now + wave[i][3]
    stayed = [one for one in every if one.node not in gone_at]

    assert sorted(one.node for one in stayed) == sorted(names(every, gpu_nodes))
    assert sorted(names(stayed, gpu_nodes)) == sorted(one.node for one in stayed)
    for one in stayed:
        near = [other for other in stayed if 0 <= one.at - other.at < WINDOW_S]
        assert len(near) <= limit_of(gpu_nodes)
        if not is_hardware_xid(one.code):
            assert sum(other.code == one.code for other in near) < SITE.breaker_same


class Turns:
    """Lets one thread at a time go on to its next call of Slurm, in an order drawn by the test."""

    def __init__(self, cluster: Fleet, draw) -> None:
        self.cluster, self.draw = cluster, draw
        self.lock = threading.Condition()
        self.waiting: dict[str, float] = {}
        self.running = 0

    def wait(self, name: str, seconds: float) -> None:
        with self.lock:
            self.waiting[name] = self.cluster.now + seconds
            self.running -= 1
            self._next()
            self.lock.wait_for(lambda: name not in self.waiting)

    def done(self) -> None:
        with self.lock:
            self.running -= 1
            self._next()

    def _next(self) -> None:
        if self.running or not self.waiting:
            return
        due = sorted(name for name, at in self.waiting.items() if at <= self.cluster.now)
        if not due or self.draw.random() < 0.2:
            self.cluster.now = max(min(self.waiting.values()), self.cluster.now + 0.3)
            due = due or sorted(self.waiting, key=lambda name: self.waiting[name])[:1]
        del self.waiting[self.draw.choice(due)]
        self.running = 1
        self.lock.notify_all()


def drain_at_once(cluster: Fleet, folder: Path, draw, code: str) -> dict[str, str]:
    """Each node's word, of epilogs that all begin in the same moment."""
    turns, words = Turns(cluster, draw), {}
    turns.running = len(cluster.nodes)

    def epilog(name: str) -> None:
        def run(argv, deadline_s):
            turns.wait(name, 0.0)
            return cluster.run(argv, deadline_s)

        with StateDir(folder / name) as state:
            words[name] = act(
                [Verdict("drain", code, GPUS[1], "it is sick", "rule", "test", auto_resume=True)],
                SITE, name, state, context="epilog", boot_id="b", looked_at=cluster.now,
                runner=run, clock=lambda: cluster.now,
                sleep=lambda seconds: turns.wait(name, seconds), random=draw.random,
            ).word  # fmt: skip
        turns.done()

    threads = [threading.Thread(target=epilog, args=(name,)) for name in cluster.nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return words


@pytest.mark.parametrize("code", ["DRIVER", "XID79"])
@pytest.mark.parametrize("seed", range(12))
def test_six_epilogs_at_once_leave_two_nodes_drained(tmp_path: Path, seed: int, code: str) -> None:
    cluster = fleet(*(f"n{i}" for i in range(6)))
    words = drain_at_once(cluster, tmp_path, random.Random(seed), code)
    first_two = [name for _, name in sorted(cluster.drains)[:2]]
    assert sorted(words.values()) == ["drained"] * 2 + ["undone"] * 4
    assert sorted(cluster.drained()) == sorted(first_two)
    assert all(words[name] == "drained" for name in first_two)


def test_a_node_whose_drain_was_taken_back_only_reports_until_a_person_resets_it(
    tmp_path: Path,
) -> None:
    cluster = fleet("n1")
    site = HealthSettings(breaker_nodes=0, breaker_share=0.0)
    sick = [Verdict("drain", "DRIVER", None, "no driver", "driver", "test", auto_resume=True)]
    times = {"boot_id": "b", "looked_at": NOW, "runner": cluster.run, "clock": lambda: NOW,
             "sleep": lambda _: None, "random": lambda: 0.0}  # fmt: skip
    with StateDir(tmp_path / "state") as state:
        undone = act(sick, site, "n1", state, context="epilog", **times)
        assert (undone.word, undone.exit_code, undone.calls) == ("undone", 0, 4)
        assert cluster.nodes["n1"].state == "IDLE"
        assert cluster.nodes["n1"].reason == ""
        cluster.calls.clear()
        for context in ("prolog", "epilog", "periodic"):
            shown = act(sick, SITE, "n1", state, context=context, **times)
            assert (shown.word, shown.exit_code, shown.calls) == ("shadow", 0, 0)
            assert "ftslurm health breaker --reset" in shown.sentence
        assert cluster.calls == []
        assert "no more than 0 of 1 GPU nodes" in latch.reset(state, NOW)
        assert act(sick, SITE, "n1", state, context="epilog", **times).word == "drained"
        assert latch.reset(state, NOW) == "the breaker has not tripped on this node"


@pytest.fixture
def latched(tmp_path: Path):
    """(fleet, look(verdict, ...)) of n1, whose drain for DRIVER was just taken back."""
    cluster = fleet(*(f"n{i}" for i in range(1, 9)))
    for name in ("n2", "n3"):
        cluster.nodes[name] = FleetNode("IDLE+DRAIN", "ftslurm:DRIVER boot=1 x", "root", NOW - 5)
    with StateDir(tmp_path / "state") as state:

        def look(*codes: str, context: str = "epilog", boot_id: str = "b"):
            cluster.calls.clear()
            told = {"source": "test", "auto_resume": True, "needs": "reboot"}
            sick = [Verdict("drain", one, GPUS[1], "sick", one.lower(), **told) for one in codes]
            return act(sick, SITE, "n1", state, context=context, boot_id=boot_id,
                       runner=cluster.run, looked_at=cluster.now, clock=lambda: cluster.now,
                       sleep=lambda _: None, random=lambda: 0.0)  # fmt: skip

        assert look("DRIVER").word == "undone"
        yield cluster, look


def test_a_tripped_breaker_lets_hardware_xids_through_up_to_its_quota(latched) -> None:
    cluster, look = latched
    assert look("XID79").word == "undone", "two of eight are drained within ten minutes"
    assert look("DRIVER").word == "shadow"
    cluster.now += WINDOW_S
    assert look("DRIVER").word == "shadow"
    assert look("XID31").word == "shadow", "a program's"
    assert look("DRIVER", "XID79").word == "drained"
    assert "XID79" in cluster.nodes["n1"].reason
    for _ in range(5):  # what the latch keeps it from draining for is no health
        cluster.now += 100
        told = look("DRIVER", context="periodic", boot_id="b2")
        assert told.word == "already", "it would be lifted after three healthy looks"
    assert look(boot_id="b2").word == "already", "and is not taken back by the latch"


def test_a_hardware_drain_that_is_not_counted_yet_is_not_taken_back_by_the_latch(latched) -> None:
    cluster, look = latched
    cluster.now += WINDOW_S
    cluster.broken["sinfo"] = LATE
    assert look("XID79").word == "drained"
    cluster.broken.clear()
    assert look(context="periodic").word == "drained"
    assert cluster.nodes["n1"].is_drained


def test_the_latch_lasts_a_day_unless_it_trips_again(latched) -> None:
    cluster, look = latched
    cluster.now += latch.HOLDS_S - 60
    assert look("DRIVER").word == "shadow"
    cluster.now += 120
    for name in ("n2", "n3"):
        cluster.nodes[name].at = cluster.now - 5
    assert look("DRIVER").word == "undone"
    assert look("DRIVER").word == "shadow"
    cluster.now += latch.HOLDS_S + WINDOW_S
    assert look("DRIVER").word == "drained"


def test_a_clock_that_is_set_back_does_not_hold_the_latch_for_longer(latched) -> None:
    cluster, look = latched
    cluster.now -= 3600
    assert look("DRIVER").word == "shadow"
    cluster.now -= latch.HOLDS_S
    assert look("DRIVER").word != "shadow"


def test_a_record_of_the_breaker_that_cannot_be_read_has_tripped(tmp_path: Path) -> None:
    cluster = fleet("n1")
    sick = [Verdict("drain", "DRIVER", None, "no driver", "driver", "test")]
    with StateDir(tmp_path / "state") as state:
        (tmp_path / "state" / "breaker.json").write_text("{torn")
        shown = act(sick, SITE, "n1", state, context="epilog", boot_id="b", looked_at=NOW,
                    runner=cluster.run)  # fmt: skip
        assert (shown.word, shown.calls) == ("shadow", 0)
        latch.reset(state, NOW)
        assert not (tmp_path / "state" / "breaker.json").exists()
