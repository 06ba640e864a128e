"""Where a rank begins and ends: from environment and run.json to the user's loop and out.

Leaves normally when the run has finished, by SystemExit(RANK_STOPPED) when it stopped, and on any
error at once: the error is written down, then the process ends without running destructors, since
those of gloo and NCCL and background threads may wait for peers that are gone. Heavy imports come
late, so that a wrong environment or run.json costs no seconds and their settings are in place.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, Optional

from ftslurm.errors import (
    RANK_DONE,
    RANK_FAILED,
    RANK_NEVER_RETRY,
    RANK_STOPPED,
    CheckpointError,
    CodeError,
    DataError,
    FtslurmError,
    RunError,
    SpecError,
    UsageError,
)
from ftslurm.run.attempts import FAILED, Outcome, write_outcome
from ftslurm.run.pulse import Pulse
from ftslurm.run.rank import RankEnvironment, stop_flag, write_rank_error
from ftslurm.run.record import RunRecord
from ftslurm.run.secret import open_record, without_secrets
from ftslurm.run.spec_check import check
from ftslurm.run.stack_dump import write_stacks_on_signal
from ftslurm.run.value import write_value

if TYPE_CHECKING:
    from ftslurm.train.session import Session

log = logging.getLogger("ftslurm.rank")

# What gloo says when a peer's process has ended; a rank that hears it is not the one that failed.
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "failed to recv",
)


class PeerLost(RunError):
    """The echo of another rank's end; the first failure is in another rank's record."""


class QuickEnd:
    """Ends the process after its exit handlers, without taking its modules apart.

    That takes torch a second on an idle core (seen: 6 to 16 s with 10 processes on two), out of a
    grace period that the batch script still needs.
    """

    code: Optional[int] = None
    """Set once all is durable; None: end as usual."""

    def __call__(self) -> None:
        if self.code is not None:
            logging.shutdown()
            _end_now(self.code)


def main() -> None:
    """Train as this rank of this attempt."""
    try:
        env = RankEnvironment.read()
    except FtslurmError as error:
        print(f"ftslurm: error: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(RANK_NEVER_RETRY) from None
    stop_flag.install()
    configure_log(env)
    pulse = Pulse.open(env)
    write_stacks_on_signal(pulse)
    quick_end = QuickEnd()
    # Exit handlers run in reverse: this one after all that the loop and its libraries add.
    atexit.register(quick_end)
    session: Optional[Session] = None
    try:
        record = open_record(env.layout)
        check(record.spec)
        prepare_libraries(record)
        session = open_session(env, record, pulse)
        value = load_entry(record.spec.entry)(session)
        if env.rank == 0:
            keep_value(env, value)
        session.finish()
    except SystemExit as error:
        if session is None or not session.has_ended:
            fail(env, session, RunError(f"the loop called sys.exit({error.code}) before its end"))
        if session.is_save_abandoned:
            _end_now(RANK_STOPPED)
        _close()
        pulse.remove()
        quick_end.code = RANK_STOPPED
        raise
    except BaseException as error:  # noqa: BLE001 - whatever it is, it ends this rank, on record
        fail(env, session, error)
    _close()
    pulse.remove()
    quick_end.code = RANK_DONE


def prepare_libraries(record: RunRecord) -> None:
    """Settings that torch and its libraries read when they are loaded, then torch's own."""
    is_asked = limit_openmp(record)
    import torch

    from ftslurm.replay import determinism

    if not is_asked:
        torch.set_num_threads(record.spec.cluster.cpus_per_task)
    if record.spec.deterministic:
        determinism.prepare_environment(os.environ)
        determinism.switch_on()
    # The same on every rank until state is restored, so that all build the same model.
    determinism.seed_all(record.spec.seed, stream="build")


def limit_openmp(record: RunRecord) -> bool:
    """Before torch is loaded; whether the run has its own word, kept in run.json, on threads."""
    # 1, or the other OpenMP libraries and each worker of a loader would take all cores they see;
    # torch itself gets its own number.
    asked = record.spec.cluster.env.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = asked or "1"
    return bool(asked)


def open_session(env: RankEnvironment, record: RunRecord, pulse: Pulse) -> Session:
    """Meet the other ranks. Collective."""
    from ftslurm.train.beats import prepare_nccl
    from ftslurm.train.device_clock import gpu_name
    from ftslurm.train.distributed import open_groups
    from ftslurm.train.session import Session

    pulse.measure_over(record.spec.recovery.straggler_window_steps)
    prepare_nccl(os.environ, env, pulse)
    groups = open_groups(env, record.spec, run_id=record.run_id)
    if groups.device.type == "cuda":
        pulse.devices_wait(gpu_name(groups.device))
    log.info("rank %d of %d on %s, %s", env.rank, env.world_size, env.node, groups.device)
    return Session(env, record, groups, stop_flag, pulse=pulse)


def keep_value(env: RankEnvironment, value: Any) -> None:
    """What the loop returned. It may return whatever it likes; only a sweep that needs its value
    then misses it."""
    try:
        write_value(env.layout, value)
    except SpecError as error:
        log.warning("%s", error)


def load_entry(dotted: str) -> Callable[[Any], Any]:
    """The function behind `package.module:function`."""
    module_name, _, name = dotted.partition(":")
    try:
        function: Callable[[Any], Any] = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"entry `{dotted}` cannot be loaded ({error}); name a function of a module in the "
            "run's code folder as package.module:function"
        ) from error
    return function


def fail(env: RankEnvironment, session: Optional[Session], error: BaseException) -> NoReturn:
    """Write down what happened and end this process, whatever its threads and peers do."""
    step = None if session is None else session.step
    is_restoring = session is not None and session.is_restoring
    error = named(error, rank=env.rank)
    has_trained = session is not None and session.has_trained
    hopeless = is_hopeless(error, is_restoring=is_restoring, has_trained=has_trained)
    try:
        log.error("rank %d failed at step %s", env.rank, step, exc_info=error)
        write_rank_error(env, error, step=step)
        if hopeless and env.rank == 0 and not env.attempt_layout.outcome_json.exists():
            reason = without_secrets(str(error)) or type(error).__name__
            outcome = Outcome(
                FAILED, step or 0, None, reason=reason, retry=False, written_at=time.time()
            )
            write_outcome(env.attempt_layout, outcome)
    except OSError:
        log.exception("rank %d could not write down why it failed", env.rank)
    finally:
        _end_now(RANK_NEVER_RETRY if hopeless else RANK_FAILED)


def is_hopeless(error: BaseException, *, is_restoring: bool, has_trained: bool) -> bool:
    """Whether the same start would fail the same way: configuration, data, nothing to restore.

    Data that could be read for a step is the right data: one read error later is no such thing.
    """
    if isinstance(error, CheckpointError):
        return is_restoring
    if isinstance(error, DataError):
        return not has_trained
    return isinstance(error, (SpecError, UsageError, CodeError))


def named(error: BaseException, *, rank: int) -> BaseException:
    """`error`, or PeerLost from it when it only says that another rank has gone."""
    text = str(error)
    if isinstance(error, RuntimeError) and any(words in text for words in _PEER_GONE):
        lost = PeerLost(f"rank {rank} lost another rank in a collective ({text.splitlines()[0]})")
        lost.__cause__ = error
        return lost
    return error


def configure_log(env: RankEnvironment) -> None:
    """UTC, to stderr, with rank and attempt; torch's own loggers only from warnings on."""
    formatter = _Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)s rank={env.rank} attempt={env.attempt} %(message)s",
        "%Y-%m-%dT%H:%M:%S",
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("ftslurm").setLevel(logging.INFO)


class _Formatter(logging.Formatter):
    """Leaves out the secrets of the spec, from tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def end_children() -> None:
    """Kill what this process started (loader workers), which may ignore TERM.

    With proctrack/linuxproc a child that lingers keeps srun, and so the allocation, waiting.
    """
    # torch's handler would raise for a worker that is killed on purpose.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()


def _close() -> None:
    from ftslurm.train.distributed import close_groups

    end_children()
    close_groups()


def _end_now(code: int) -> NoReturn:
    try:
        end_children()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
