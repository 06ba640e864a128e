"""Do all nodes see the same folder, how late, and are they alike? Tried, in a small job of N nodes.

Conducts: tells the nodes' tasks (node_trial.py) what to do and gathers what they say; judges
nothing (node_lines.py does). A minute at most once the job has begun, most of it waiting for a file
to come into sight. Makes a folder of its own below the one that is tried, which is gone afterwards.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Protocol

from ftslurm.doctor import node_trial
from ftslurm.doctor.folder_checks import own_folder
from ftslurm.doctor.line import Line, fail
from ftslurm.doctor.node_facts import Clock, NodeFacts, Trialled, names
from ftslurm.doctor.node_lines import judge
from ftslurm.doctor.spoken import Pieces, order_line
from ftslurm.doctor.watch import LOOKS_S
from ftslurm.errors import SchedulerError
from ftslurm.scheduler.on_nodes import OnNodes

QUEUE_S = 300.0
"""So long the job may wait for its turn."""
ANSWER_S = 30.0
IMPORT_S = 120.0
WRITE_S = 60.0
NUM_CLAIMS = 40
NUM_CLOCK_LOOKS = 5
RANKS_IMPORT = "torch"

_OF_A_JOB = re.compile(r"\btasks? \d|has been allocated|[Ll]aunch (for|failed)")
"""What srun says of a job that it has: `n1: task 0: Exited with exit code 2`, `job 7 has been
allocated resources`, `Application launch failed` (22.05)."""

Say = Callable[[str], None]


class Nodes(Protocol):
    """As scheduler.on_nodes.OnNodes."""

    words: list[str]
    is_inside: bool

    def say(self, line: str) -> None: ...

    def hear(self, timeout_s: float) -> Optional[str]: ...

    @property
    def rc(self) -> Optional[int]: ...

    def close(self) -> None: ...


class TrialEnded(SchedulerError):
    """The job had begun and is gone, or nodes of it do not answer; the text has srun's word."""


class NoJob(SchedulerError):
    """No node has answered and srun has named none: the job never began, as far as can be told."""


def check_across(
    runs: Path,
    *,
    nodes: int,
    where: Mapping[str, str],
    staged_bytes: Optional[float],
    stop_signal: str,
    size_bytes: int,
    say: Say,
    open_nodes: Callable[..., Nodes] = OnNodes,
) -> list[Line]:
    """`size_bytes`: written by each node to measure; 0: not measured."""
    try:
        with own_folder(runs) as own:
            mine = [] if "SLURM_JOB_ID" in os.environ else ["own"]
            command = [sys.executable, "-m", node_trial.__name__, str(own), *mine]
            there = open_nodes(command, nodes=nodes, where=where, on_word=say)
            try:
                conductor = Conductor(there, nodes, say, queue_s=QUEUE_S)
                found = conductor.conduct(staged_bytes, stop_signal, size_bytes)
            finally:
                there.say(order_line(0, node_trial.BYE, {}))
                there.close()
    except OSError as error:
        todo = "name a folder that you can write to, with --runs"
        return [fail("folder.writable", f"`{runs}`: {error.strerror or error}", todo)]
    except TrialEnded as error:
        return [fail("across.job", f"the trial broke off: {error}", _BROKE_OFF)]
    except SchedulerError as error:
        todo = (
            "have the nodes first (`salloc`) and ask there, or name --partition, --account, --qos"
        )
        return [fail("across.job", f"no job of {nodes} nodes could be had: {error}", todo)]
    return judge(found)


_BROKE_OFF = (
    "ask again; where it happens again, look at those nodes, and whether the job was preempted"
)


class Conductor:
    def __init__(
        self,
        nodes: Nodes,
        count: int,
        say: Say,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        queue_s: float,
    ) -> None:
        self._nodes, self._count, self._say = nodes, count, say
        self._clock, self._now, self._queue_s = clock, now, queue_s
        self._pieces = Pieces()
        self._number = 0
        self.facts = [NodeFacts(task) for task in range(count)]

    def conduct(self, staged_bytes: Optional[float], stop_signal: str, size_bytes: int) -> Trialled:
        self._say(f"asking Slurm for {self._count} nodes")
        self._meet(staged_bytes, stop_signal)
        self._say(f"on {names([one.node for one in self.facts])}")
        made = self._make_and_watch()
        if made:
            self._claim()
        self._look_at_clocks()
        if size_bytes:
            self._say("each node writes at once, to measure")
            for place in ("/dev/shm", "/tmp", *(["runs"] if made else [])):
                self._write(place, size_bytes)
        self._say(f"{self.facts[0].node} imports {RANKS_IMPORT}, as a rank does when it begins")
        answers = self._ask("rank_start", IMPORT_S, tasks=[0], module=RANKS_IMPORT)
        self.facts[0].rank_start = answers.get(0)
        if made:
            self._await_sight()
        return Trialled(self.facts, RANKS_IMPORT, made)

    def _meet(self, staged_bytes: Optional[float], stop_signal: str) -> None:
        answers = self._ask("hello", self._queue_s, staged_bytes=staged_bytes, signal=stop_signal)
        if not answers:
            raise self._ended()(f"no node answered in {self._queue_s:.0f} s; {self._last_word()}")
        for task, facts in answers.items():
            self.facts[task].hello = facts
        if len(answers) < self._count:
            there = names([self.facts[task].node for task in sorted(answers)])
            raise TrialEnded(
                f"of {self._count} nodes {there} answered, and no other in {self._queue_s:.0f} s;"
                f" {self._last_word()}"
            )

    def _make_and_watch(self) -> bool:
        """Whether the first node could make what the others are to see."""
        old = {"grows": "12", "journal": "12", "pointer": "old"}
        first = self._make(new=old)
        # Without patience: a node that does not see them yet, does not see the folder either.
        missed = self._ask(
            "miss", ANSWER_S, names=["new"], read=["journal", "pointer"], stat=["grows"]
        )
        for task, facts in missed.items():
            self.facts[task].missed = facts
        more = {"grows": "345", "journal": "345"}
        changed = {"pointer": "changed"}
        second = self._make(new={"new": "1"}, longer=more, replaced=changed)
        self._ask(
            "watch",
            ANSWER_S,
            new="new",
            longer=["grows", 5],
            journal=["journal", 5],
            replaced=["pointer", "changed"],
        )
        return "error" not in {**first, **second}

    def _make(self, **what: Any) -> dict[str, Any]:
        answers = self._ask("make", ANSWER_S, tasks=[0], **what)
        if 0 not in answers:
            raise TrialEnded(
                f"{self.facts[0].node} has not made some small files in the folder within"
                f" {ANSWER_S:.0f} s; {self._last_word()}"
            )
        return answers[0]

    def _claim(self) -> None:
        for task, facts in self._ask("claim", WRITE_S, count=NUM_CLAIMS).items():
            self.facts[task].claims = facts

    def _look_at_clocks(self) -> None:
        """The shortest way there and back tells best how far a clock is off."""
        for _ in range(NUM_CLOCK_LOOKS):
            asked_at, began = self._now(), self._clock()
            for task, facts in self._ask("time", ANSWER_S, on_answer=True).items():
                half_s = (facts["heard"] - began) / 2
                clock = Clock(facts["at"] - asked_at - half_s, half_s)
                best = self.facts[task].clock
                if best is None or clock.within_s < best.within_s:
                    self.facts[task].clock = clock

    def _write(self, place: str, size_bytes: int) -> None:
        for task, facts in self._ask("write", WRITE_S, place=place, bytes=size_bytes).items():
            self.facts[task].rates[place] = facts

    def _await_sight(self) -> None:
        deadline, told_at = self._clock() + LOOKS_S + ANSWER_S, self._clock()
        while True:
            for task, facts in self._ask("seen", ANSWER_S).items():
                self.facts[task].seen = facts
            waiting = [one.node for one in self.facts if one.waits]
            longest_s = max((one.looked_s for one in self.facts), default=0.0)
            if not waiting or longest_s > LOOKS_S or self._clock() > deadline:
                return
            if self._clock() >= told_at:
                told_at = self._clock() + 10.0
                self._say(f"{names(waiting)} does not see everything yet ({longest_s:.0f} s)")
            self._nodes.hear(0.5)

    def _ask(
        self,
        what: str,
        timeout_s: float,
        *,
        tasks: Optional[Sequence[int]] = None,
        on_answer: bool = False,
        **values: Any,
    ) -> dict[int, dict[str, Any]]:
        """Task -> answer, of those that answered in time; `on_answer`: with when it was heard."""
        self._number += 1
        self._nodes.say(order_line(self._number, what, {**values, "tasks": tasks}))
        answers: dict[int, dict[str, Any]] = {}
        deadline = self._clock() + timeout_s
        while len(answers) < self._count and self._clock() < deadline:
            line = self._nodes.hear(min(0.5, deadline - self._clock()))
            if line is None:
                if self._nodes.rc is not None:
                    ended = TrialEnded if answers else self._ended()
                    raise ended(f"srun ended with {self._nodes.rc}; {self._last_word()}")
                continue
            answer = self._pieces.add(line)
            if answer is None or answer.order != self._number:
                continue
            heard = {"heard": self._clock()} if on_answer else {}
            answers[answer.task] = {**answer.facts, **heard}
        return {task: facts for task, facts in answers.items() if not facts.get("is_other")}

    def _ended(self) -> type[SchedulerError]:
        """Inside an allocation there is a job; outside, srun says when it has one, and which of its
        tasks ended how."""
        has_begun = self._nodes.is_inside or any(one.hello for one in self.facts)
        named = any(_OF_A_JOB.search(word) for word in self._nodes.words)
        return TrialEnded if has_begun or named else NoJob

    def _last_word(self) -> str:
        words = self._nodes.words
        return f"it said: {words[-1]}" if words else "it said nothing"
