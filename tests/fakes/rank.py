"""A rank without torch that speaks the whole protocol between a batch script and its ranks.

Selected by `entry: rank:tests.fakes.rank:main`. It trains a few KB of integers: each step mixes in
the sum over all ranks, so one step trained twice, left out or restored wrongly changes every number
after it. Checkpoints, trace, progress, outcome, events and DONE are the real ones; an operator's
orders are obeyed. It beats. `spec.user`: `step_s` is the time a step takes, `faults` a plan as in
FTSLURM_FAULTS, `skip: {rank, step, attempt}` has a rank leave out the exchange of a step. From the
step `slow_from` on a step takes `slow_step_s` in the first `slow_attempts`, and in all while there
is a file `slow_while`: without it, it is over at once.
"""

import hashlib
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

from ftslurm import faults
from ftslurm.checkpoint.fence import refuse_superseded
from ftslurm.checkpoint.records import IndexEntry, Manifest, Parent
from ftslurm.checkpoint.shard import TensorData, read_index, read_tensor, write_shard
from ftslurm.checkpoint.store import CheckpointStore
from ftslurm.errors import (
    RANK_DONE,
    RANK_FAILED,
    RANK_NEVER_RETRY,
    RANK_STOPPED,
    CheckpointError,
    RunError,
)
from ftslurm.files import read_json, write_json
from ftslurm.replay.trace import TraceRow, TraceWriter
from ftslurm.run.attempts import (
    FINISHED,
    STOPPED,
    Outcome,
    Progress,
    append_event,
    read_attempt,
    write_outcome,
    write_progress,
)
from ftslurm.run.control import LEAVING, SAVE, ControlFiles, of_strength, strength
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment, stop_flag, write_rank_error
from ftslurm.run.spec import from_dict
from ftslurm.run.stack_dump import write_stacks_on_signal

NUM_VALUES = 256
MASK = 2**64 - 1
MEETING_DEADLINE_S = 60
SILENCE_S = 120


class PeerLost(RunError):
    """The echo of another rank's end."""


class Peers:
    """A star over TCP: every exchange is an all-gather of one JSON value, hence a barrier too.

    What two ranks exchange has to have the same name, as gloo and NCCL go by order and shape: a
    rank that leaves out an exchange waits for ever in the next, and the others wait for it.
    """

    def __init__(self, env, pulse):
        self.rank, self.world_size = env.rank, env.world_size
        self._streams = {}
        self._early = {}
        self._pulse = pulse
        if self.rank == 0:
            self._host(env.master_port)
        else:
            self._streams[0] = self._reach(env.master_addr, env.master_port)
            self._send(0, self.rank)

    def exchange(self, value, name="exchange"):
        """Values of all ranks, in order of rank, on all ranks."""
        with self._pulse.collective(name):
            if self.rank:
                self._send(0, [name, value])
                return self._receive(0, name)
            others = [self._receive(rank, name) for rank in range(1, self.world_size)]
            for rank in range(1, self.world_size):
                self._send(rank, [name, [value, *others]])
            return [value, *others]

    def _host(self, port):
        with socket.create_server(("", port), backlog=self.world_size) as server:
            server.settimeout(MEETING_DEADLINE_S)
            while len(self._streams) < self.world_size - 1:
                connection, _ = server.accept()
                stream = connection.makefile("rwb")
                self._streams[json.loads(stream.readline())] = stream

    def _reach(self, address, port):
        deadline = time.monotonic() + MEETING_DEADLINE_S
        while True:
            try:
                connection = socket.create_connection((address, port), timeout=5)
                # A peer that waits for its file system says nothing for a minute.
                connection.settimeout(SILENCE_S)
                return connection.makefile("rwb")
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _send(self, rank, value):
        try:
            self._streams[rank].write(json.dumps(value).encode() + b"\n")
            self._streams[rank].flush()
        except OSError as error:
            raise PeerLost(f"rank {self.rank} lost rank {rank} ({error})") from None

    def _receive(self, rank, name):
        while (rank, name) not in self._early:
            try:
                line = self._streams[rank].readline()
            except OSError as error:
                raise PeerLost(f"rank {self.rank} lost rank {rank} ({error})") from None
            if not line.endswith(b"\n"):
                raise PeerLost(f"rank {self.rank} lost rank {rank}")
            sent, value = json.loads(line)
            self._early[rank, sent] = value
        return self._early.pop((rank, name))


class FakeTraining:
    def __init__(self, env, pulse=None):
        self.env = env
        self.pulse = pulse = pulse or Pulse.unseen()
        self.record = read_json(env.layout.run_json)
        self.spec = from_dict(self.record["spec"])
        if "faults" in self.spec.user:
            os.environ[faults.ENVIRONMENT] = self.spec.user["faults"]
        pulse.measure_over(self.spec.recovery.straggler_window_steps)
        self.store = CheckpointStore(env.layout)
        self.peers = Peers(env, pulse)
        self.step = 0
        self.values = [(env.rank * 1_000_003 + i * 7919 + self.spec.seed) & MASK for i in
                       range(NUM_VALUES)]  # fmt: skip
        self.committed = None  # Parent of the next step
        self.restored_step = None
        self.trace = TraceWriter(env.layout.trace_file(env.attempt)) if env.rank == 0 else None
        control_dir = self.spec.recovery.control_dir
        self.control = ControlFiles(env.layout, self.record["run_id"], control_dir)

    def run(self):
        self.event("ranks_started")
        self.pulse.phase("restoring")
        self.restore()
        faults.point("restored", **self.facts())
        self.pulse.restored(self.step)
        self.progress("training")
        while self.step < self.spec.steps:
            stop_signal, order = self.train_one_step()
            if self.step < self.spec.steps and (stop_signal or order in LEAVING):
                return self.stop(stop_signal, order)
            interval = self.spec.checkpoint.interval_steps
            if order == SAVE or (interval and self.step % interval == 0):
                self.save()
            if order == SAVE and self.env.rank == 0:
                self.event("order_done", order=SAVE, step=self.step)
                self.control.take_away(SAVE)
        return self.finish()

    def train_one_step(self):
        """The number of a stop signal that any rank has seen, else 0, and the order that rank 0 has
        found; the same on all ranks."""
        self.pulse.step_begins()
        faults.point("step", rank=self.env.rank, step=self.step, attempt=self.env.attempt)
        self.take_time()
        if self.spec.user.get("skip") == self.facts():
            self.step += 1
            return 0, None
        order = strength(self.control.read()) if self.env.rank == 0 else 0
        own = [sum(self.values) & MASK, stop_flag.signal_number, order]
        words = self.peers.exchange(own, f"step {self.step}")
        mix = sum(word[0] for word in words) & MASK
        self.values = [
            (value * 6364136223846793005 + mix + self.step + i) & MASK
            for i, value in enumerate(self.values)
        ]
        self.step += 1
        self.pulse.step_ended(self.step)
        if self.trace:
            samples = self.step * self.spec.optim.global_batch_size
            self.trace.append(TraceRow(self.step, mix / 2**64, samples, samples, 0.0))
            if self.step == (self.restored_step or 0) + 1:
                self.event("first_step", step=self.step)
            self.progress("training", loss=mix / 2**64)
        return max(word[1] for word in words), of_strength(words[0][2])

    def take_time(self):
        user, began_at = self.spec.user, time.monotonic()
        is_late = self.step >= user.get("slow_from", 0)
        held = Path(user.get("slow_while", "/none"))
        if is_late and self.env.attempt <= user.get("slow_attempts", 0):
            time.sleep(float(user["slow_step_s"]))
        elif is_late and held.exists():
            while held.exists() and time.monotonic() < began_at + float(user["slow_step_s"]):
                time.sleep(0.05)
        else:
            time.sleep(float(user.get("step_s", 0.02)))

    def save(self):
        if self.committed is not None and self.committed.step == self.step:
            return
        with self.pulse.aside("saving"):
            temporary = None
            if self.env.rank == 0:
                temporary = str(self.store.create_temporary(self.step, self.env.attempt))
            folder = type(self.env.run_dir)(self.peers.exchange(temporary)[0])
            faults.point("staged", **self.facts())
            entries = self.peers.exchange(self.write(folder))
            if self.env.rank == 0:
                self.publish(folder, [IndexEntry(**item) for item in entries])
            parent = self.peers.exchange(self.committed and vars(self.committed))[0]
            self.committed = Parent(**parent)

    def write(self, folder):
        """This rank's part of a step; its entry in the manifest."""
        data = struct.pack(f"<{NUM_VALUES}q", *(value - 2**63 for value in self.values))
        piece = TensorData(
            key="values",
            dtype="int64",
            global_shape=(self.env.world_size * NUM_VALUES,),
            offsets=(self.env.rank * NUM_VALUES,),
            shape=(NUM_VALUES,),
            data=memoryview(data),
        )
        entry = write_shard(
            folder,
            self.env.rank,
            [piece],
            objects={},
            aliases={},
            algorithm=self.spec.checkpoint.digest,
            attempt=self.env.attempt,
            step=self.step,
        )
        return vars(entry)

    def publish(self, folder, entries):
        self.store.publish(folder, self.manifest(entries))
        newest = self.store.published()[0]
        assert newest.step == self.step, newest
        self.committed = Parent(step=newest.step, digest=newest.committed_digest)
        keep = self.spec.checkpoint
        self.store.retain(keep.keep_last, keep.keep_every_steps, set(), attempt=self.env.attempt)
        self.event("committed", step=self.step)

    def manifest(self, entries):
        batch = self.spec.optim.global_batch_size
        return Manifest(
            run_id=self.record["run_id"],
            attempt=self.env.attempt,
            step=self.step,
            parent=self.committed,
            world_size=self.env.world_size,
            parallelism={"dp": self.env.world_size, "tp": 1, "pp": 1, "cp": 1, "ep": 1},
            global_batch_size=batch,
            accumulation=0,
            epoch=0,
            samples=self.step * batch,
            tokens=self.step * batch,
            seed=self.spec.seed,
            framework="fake",
            framework_version="1",
            code_commit=None,
            config_digest=None,
            image_digest=None,
            dataset_snapshot=None,
            tokenizer_digest=None,
            digest_algorithm=self.spec.checkpoint.digest,
            indexes=entries,
            created_at=time.time(),
        )

    def restore(self):
        chosen = self.peers.exchange(self.choose() if self.env.rank == 0 else None)[0]
        if chosen is None:
            return
        path = type(self.env.run_dir)(chosen["path"])
        index = read_index(
            path, IndexEntry(**chosen["indexes"][self.env.rank]), chosen["algorithm"]
        )
        data = bytearray(NUM_VALUES * 8)
        read_tensor(path, index.tensors[0], chosen["algorithm"], memoryview(data))
        self.values = [value + 2**63 for value in struct.unpack(f"<{NUM_VALUES}q", data)]
        self.step = self.restored_step = chosen["step"]
        self.committed = Parent(step=chosen["step"], digest=chosen["digest"])
        self.event("restored", step=self.step)

    def choose(self):
        adopted = read_attempt(self.env.layout, self.env.attempt).adopted
        for stray in self.store.fence(self.env.attempt, adopted):
            self.set_aside(stray)
        choice = self.store.choose(full=False, attempt=self.env.attempt, adopted=adopted)
        if choice.path is None:
            if choice.rejected:
                raise CheckpointError(f"no checkpoint verifies: {choice.rejected[0].reason}")
            return None
        for rejected in choice.rejected:
            self.set_aside(rejected)
        manifest = choice.manifest
        digests = {item.step: item.committed_digest for item in self.store.published()}
        return {
            "path": str(choice.path),
            "step": manifest.step,
            "digest": digests[manifest.step],
            "algorithm": manifest.digest_algorithm,
            "indexes": [vars(entry) for entry in manifest.indexes],
        }

    def set_aside(self, rejected):
        self.store.quarantine(rejected)
        self.event("rejected", step=rejected.step, reason=rejected.reason)

    def stop(self, signal_number, order):
        name = {0: None, 10: "SIGUSR1", 12: "SIGUSR2", 15: "SIGTERM"}[signal_number]
        if name:
            self.event("signal", signal=name, step=self.step)
        self.save()
        self.settle(STOPPED, signal=name, order=order if order in LEAVING else None)
        return RANK_STOPPED

    def finish(self):
        self.save()
        digests = self.peers.exchange(hashlib.sha256(repr(self.values).encode()).hexdigest())
        self.settle(FINISHED)
        if self.env.rank == 0:
            digest = hashlib.sha256(repr(digests).encode()).hexdigest()
            write_json(self.env.layout.done, {
                "schema_version": 1,
                "step": self.step,
                "parameter_digest": digest,
                "attempt": self.env.attempt,
            })  # fmt: skip
        self.peers.exchange(None)
        return RANK_DONE

    def settle(self, result, signal=None, order=None):
        self.pulse.phase("leaving")
        if self.env.rank == 0:
            self.trace.close()
            refuse_superseded(self.env.layout, self.env.attempt)
            committed = self.committed.step if self.committed else None
            outcome = Outcome(result, self.step, committed, signal, order, written_at=time.time())
            write_outcome(self.env.attempt_layout, outcome)
            if order:
                self.event("order_done", order=order, step=self.step)
            if result == FINISHED or order:
                self.control.take_away(SAVE)
            self.progress(result)
        self.peers.exchange(None)

    def facts(self):
        return {"rank": self.env.rank, "step": self.step, "attempt": self.env.attempt}

    def event(self, kind, **facts):
        if self.env.rank == 0:
            append_event(self.env.attempt_layout, kind, **facts)

    def progress(self, phase, loss=None):
        if self.env.rank == 0:
            write_progress(self.env.attempt_layout, Progress(
                step=self.step,
                steps=self.spec.steps,
                loss=loss,
                restored_step=self.restored_step,
                committed_step=self.committed.step if self.committed else None,
                phase=phase,
                written_at=time.time(),
            ))  # fmt: skip


def main():
    stop_flag.install()
    env = RankEnvironment.read()
    pulse = Pulse.open(env)
    write_stacks_on_signal(pulse)
    training = None
    try:
        training = FakeTraining(env, pulse)
        code = training.run()
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends this rank, on record
        write_rank_error(env, error, step=training.step if training else None)
        print(f"rank {env.rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(RANK_NEVER_RETRY if isinstance(error, CheckpointError) else RANK_FAILED)
    pulse.remove()
    return code


if __name__ == "__main__":
    sys.exit(main())
