"""`ftslurm save RUN`: a running run saves at its next step boundary and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Optional

from ftslurm.errors import RunError, UsageError
from ftslurm.operate.answer import Answer, add_json, finish, finish_sweep, parser, tell
from ftslurm.operate.standing import OpenRun, Standing, open_run
from ftslurm.operate.sweep_cancel import save_sweep
from ftslurm.run.attempts import numbers, read_events
from ftslurm.run.control import LOOK_INTERVAL_S, SAVE
from ftslurm.run.sweep_layout import find_sweep

POLL_S = 0.5
ASK_JOB_EVERY_S = 10.0
LAST_WORD_S = 5.0
"""The journal's line is written before the order's file goes; a shared file system may show the two
the other way round."""

_EPILOG = """examples:
  ftslurm save runs/gpt-20260301-120000-3f9a
  ftslurm save runs/gpt-20260301-120000-3f9a --wait --json
  ftslurm save runs/SWEEP                        its tasks that run

results: ordered | saved | failed (the save did not commit; the run goes on) | not_saved (the run
ended first). Without a right on the run directory, leave an empty file RUN_ID.save in the run's
recovery.control_dir."""


def main(argv: Optional[list[str]] = None) -> int:
    made = parser("save", "Have a running run save now and go on.", _EPILOG, of_sweeps=True)
    made.add_argument("--wait", action="store_true", help="until the save has committed")
    add_json(made)
    options = made.parse_args(argv)
    sweep = find_sweep(options.run)
    if sweep is not None:
        if options.wait:
            raise UsageError("--wait is of one run; look at the logs of the sweep's tasks")
        return finish_sweep(save_sweep(sweep), sweep, as_json=options.json)
    run = open_run(options.run)
    answer = save(run, wait=options.wait)
    return finish(SAVE, answer, run, as_json=options.json)


def save(run: OpenRun, *, wait: bool, sleep: Callable[[float], None] = time.sleep) -> Answer:
    standing = run.look()
    _require_training(standing)
    answered = len(_answers(run))
    place = run.control.give(SAVE)
    text = f"the order is `{place}`; rank 0 looks every {LOOK_INTERVAL_S:g} s"
    if not wait:
        return Answer("ordered", f"{text}, all ranks save at the next step", True, _id(standing))
    tell(f"{text}; {standing.step_words}")
    return _wait(run, answered, sleep)


def _wait(run: OpenRun, answered: int, sleep: Callable[[float], None]) -> Answer:
    looked_at = time.monotonic()
    gone_at: Optional[float] = None
    while True:
        answers = _answers(run)[answered:]
        if answers:
            return _answer(answers[-1])
        now = time.monotonic()
        if gone_at is None and not run.control.is_given(SAVE):
            gone_at = now
        is_mute = gone_at is not None and now - gone_at >= LAST_WORD_S
        if is_mute or now - looked_at >= ASK_JOB_EVERY_S:
            looked_at = now
            standing = run.look()
            if is_mute or standing.done or standing.is_over or standing.state.is_waiting:
                return _after_end(run, answered, standing)
        sleep(POLL_S)


def _after_end(run: OpenRun, answered: int, standing: Standing) -> Answer:
    """The order is gone, or there is nobody any more to obey it."""
    answers = _answers(run)[answered:]
    if answers:
        return _answer(answers[-1])
    run.control.take_away(SAVE)
    if standing.done:
        return Answer("saved", "the run has finished, its last step is saved")
    return Answer(
        "not_saved",
        f"the run left before it obeyed, the order is taken back; {standing.step_words}",
        False,
        _id(standing),
    )


def _answer(event: dict[str, Any]) -> Answer:
    step = event.get("step")
    if event["kind"] == "order_done":
        return Answer("saved", f"step {step} is committed")
    why = event.get("reason") or "see its logs"
    return Answer("failed", f"the save of step {step} failed, the run goes on: {why}", False)


def _answers(run: OpenRun) -> list[dict[str, Any]]:
    """What rank 0 has said of saves that were ordered, over all attempts."""
    return [
        event
        for number in numbers(run.layout)
        for event in read_events(run.layout.attempt(number))
        if event["kind"] in ("order_done", "order_failed") and event.get("order") == SAVE
    ]


def _require_training(standing: Standing) -> None:
    job = f"job {standing.job.job_id}"
    if standing.is_program:
        raise RunError("the run is a program of your own, which saves when it sees fit")
    if standing.done:
        raise RunError("the run has finished, its last step is saved; there is nothing to order")
    if standing.is_over:
        raise RunError(
            f"the run is not running ({standing.why_over}); what it has committed is kept"
        )
    if standing.state.is_waiting:
        raise RunError(
            f"the run does not train, {job} is {standing.state.word} ({standing.state.reason}); "
            "what it has committed is kept"
        )


def _id(standing: Standing) -> str:
    return standing.job.job_id
