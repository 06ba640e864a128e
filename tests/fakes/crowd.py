"""Many members of a large job in one process: whole ones, or puppets that only report.

`python -m fakes.crowd PORT NODES RANKS`: puppets of all nodes but the first, each with RANKS
ranks that train, each on a connection of its own to the leader. Ends when its standard input does.
"""

import dataclasses
import functools
import sys
import threading
import time
from pathlib import Path

from ftslurm.agent.duty import Duty
from ftslurm.agent.loop import Loop
from ftslurm.agent.main import allow_many_files
from ftslurm.agent.report import NodeReport, to_row
from ftslurm.run.heartbeat import RankView

KEY = b"k" * 32
STEP_S = 0.5


def node_name(number):
    return f"n{number:04d}"


class Healthy:
    """A node whose ranks train; stands for its Duty."""

    def __init__(self, number, ranks):
        self.node = node_name(number)
        self._first, self._ranks = number * ranks, ranks

    @functools.lru_cache(maxsize=1)  # noqa: B019 - lives as long as its test
    def look(self, attempt):
        values = {
            "node": self.node, "attempt": attempt, "phase": "training", "step": 1234,
            "pid": 1000, "start_ticks": 5, "age_s": 0.1, "phase_age_s": 60.0,
            "step_age_s": 0.1, "step_wall_s": STEP_S, "step_own_s": 0.4, "step_cpu_s": 0.39,
            "window_wall_s": STEP_S, "window_own_s": 0.4, "usual_step_s": STEP_S,
            "collective_seq": 1234 * 12, "collective": "all_reduce [1048576] float32",
            "in_collective": True, "collective_age_s": 0.1, "alive": True, "proc_state": "R",
        }  # fmt: skip
        names = [item.name for item in dataclasses.fields(RankView) if item.name != "rank"]
        values = {name: values.get(name, 0.0) for name in names}
        return [RankView(rank=self._first + i, **values) for i in range(self._ranks)]

    def carry_out(self, order):
        if order["do"] == "probe":
            duty = Duty(Path("/nowhere"), self.node, KEY, {})
            return {"seen": duty.probe(order["host"], order["port"])}
        return {"left": []}

    def end_launcher(self, attempt):
        return []


class Puppet:
    """One member as the leader sees it."""

    def __init__(self, loop, number, ranks, port, own_port):
        self.port, self.own_port = port, own_port
        self.loop, self.node = loop, node_name(number)
        self.rows = [to_row(view) for view in Healthy(number, ranks).look(1)]
        self.link, self.reports = None, False

    def connect(self):
        self.loop.connect("127.0.0.1", self.port, self, self.connected)

    def connected(self, link, why):
        if link is None:  # so many at once, on a machine that has other work
            self.loop.later(1.0, self.connect)
            return
        self.link = link
        link.send({"t": "hello", "node": self.node, "host": "127.0.0.1", "port": self.own_port})

    def received(self, link, message):
        if message["t"] == "welcome" and not self.reports:
            self.reports = True
            self.loop.every(1.0, self.report)
        elif message["t"] == "beat":
            link.send({"t": "pong", "id": message["id"], "at": time.time()})

    def closed(self, link, why):
        self.connect()

    def report(self):
        now = time.monotonic()
        report = NodeReport(now, 0.0, 1, self.rows)
        self.link.send({"t": "report", "nodes": {self.node: report.to_wire(now)}})


class Answering:
    """At the port of every puppet: it is there."""

    def received(self, link, message):
        link.send({"t": "probed", "hears": True})

    def closed(self, link, why):
        pass


def main(port, nodes, ranks):
    allow_many_files()
    loop = Loop(KEY)
    own_port = loop.listen("127.0.0.1", Answering)
    for number in range(1, int(nodes)):
        loop.later(number * 0.004, Puppet(loop, number, int(ranks), int(port), own_port).connect)
    ended = functools.partial(loop.from_thread, loop.stop)
    threading.Thread(target=lambda: (sys.stdin.read(), ended()), daemon=True).start()
    loop.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
