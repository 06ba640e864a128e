"""The names, kinds and meanings of all metrics of a run, as data. Pure.

Each series carries run_id; what else it is told apart by is in `labels`. A run has some 60 series,
however long it is and however many ranks it has. What no record tells has no series: never a 0.
"""

from __future__ import annotations

from dataclasses import dataclass

GAUGE, COUNTER, SUMMARY = "gauge", "counter", "summary"
PREFIX = "ftslurm_"
TIER = ("tier",)


@dataclass(frozen=True)
class Family:
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    """Besides run_id."""


_RUN = {
    "run_info": Family(GAUGE, "Always 1: whose run, where, in which job.",
                       ("user", "cluster", "job_id")),
    "metrics_timestamp_seconds": Family(GAUGE, "When these figures were read."),
    "run_active": Family(GAUGE, "1 while an attempt is under way, training or not."),
    "run_training": Family(GAUGE, "1 while the newest attempt trains."),
    "run_waiting": Family(GAUGE, "1 while the run waits for its job: queued, held or paused."),
    "run_finished": Family(GAUGE, "1 once the run is done."),
    "run_needs_person": Family(
        GAUGE, "1 once it has stopped, or its job is gone, and it will not go on by itself."),
    "last_sign_timestamp_seconds": Family(GAUGE, "When the run last gave a sign of itself."),
    "step": Family(GAUGE, "Steps trained, without those that were trained again."),
    "steps_planned": Family(GAUGE, "Steps after which the run is done."),
    "restored_step": Family(GAUGE, "Step that the newest attempt goes on from."),
    "tokens_per_second": Family(GAUGE, "Tokens trained a second, now."),
}  # fmt: skip
_CHECKPOINTS = {
    "checkpoint_last_success_timestamp_seconds": Family(GAUGE, "When a step was last committed."),
    "checkpoint_last_success_step": Family(GAUGE, "Newest committed step."),
    "checkpoint_planned_interval_seconds": Family(GAUGE, "Time between saves, as planned now."),
    "checkpoint_uncommitted_since_timestamp_seconds": Family(
        GAUGE, "Since when the newest attempt trains what is not committed yet."),
    "checkpoint_durability_lag_seconds": Family(
        GAUGE, "From the copy of the state to its commit, of the newest save."),
    "checkpoint_save_seconds": Family(
        SUMMARY, "From the copy of the state to its commit, of all committed saves."),
    "checkpoint_load_seconds": Family(
        SUMMARY, "Reading and verifying a step at the start of an attempt."),
    "checkpoint_queue_depth": Family(GAUGE, "Saves of the newest attempt that are under way."),
    "checkpoint_unfinished": Family(
        GAUGE, "Versions on disk without a commit, with those that are under way."),
    "checkpoint_saves_failed_total": Family(COUNTER, "Saves that failed."),
    "checkpoint_saves_failed_in_a_row": Family(GAUGE, "Failed saves since the newest commit."),
    "checkpoint_saves_skipped_total": Family(
        COUNTER, "Saves left out since the one before was under way."),
    "checkpoint_bytes": Family(GAUGE, "Size of the newest save."),
    "checkpoint_disk_free_bytes": Family(
        GAUGE, "Room on the checkpoints' file system, whatever a quota leaves of it."),
    "checkpoint_quarantined": Family(GAUGE, "Steps that were rejected and put aside."),
    "checkpoint_fallbacks_total": Family(
        COUNTER, "Restores of an older step than the newest committed one."),
    "checkpoint_last_fallback_timestamp_seconds": Family(GAUGE, "When that last happened."),
}  # fmt: skip
_FAILURES = {
    "rpo_steps": Family(GAUGE, "Steps that a failure now would cost."),
    "rpo_tokens": Family(GAUGE, "Tokens that a failure now would cost."),
    "lost_steps_total": Family(COUNTER, "Steps trained in vain so far."),
    "lost_tokens_total": Family(COUNTER, "Tokens trained in vain so far."),
    "last_failure_lost_steps": Family(GAUGE, "Steps that the newest failure has cost."),
    "last_failure_lost_tokens": Family(GAUGE, "Tokens that the newest failure has cost."),
    "last_failure_timestamp_seconds": Family(GAUGE, "When the newest failure happened."),
    "last_recovery_timestamp_seconds": Family(GAUGE, "First new step after the newest failure."),
    "down_since_timestamp_seconds": Family(
        GAUGE, "A failure happened then, and no new step has been trained since."),
    "mttd_seconds": Family(GAUGE, "From the newest failure to its detection."),
    "rto_seconds": Family(GAUGE, "From the newest failure to the first new step after it."),
    "fingerprint_steps": Family(
        GAUGE, "Steps trained again after a restore, by whether samples, tokens and loss were those"
        " of before to the last bit, as far as they have to be: equal or differ.", ("state",)),
    "fingerprint_last_differ_timestamp_seconds": Family(
        GAUGE, "When the newest attempt began that trained a step otherwise than before."),
    "attempts_total": Family(COUNTER, "Attempts begun."),
    "attempts_ended": Family(GAUGE, "Attempts by what has cut them short.", ("cause",)),
    "goodput_ratio": Family(GAUGE, "Time of steps that count, in the time allocated."),
    "node_seconds": Family(
        GAUGE, "Where the time of the nodes went; that in the queue is beside the allocated.",
        ("part",)),
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    **_RUN,
    **{name: Family(one.kind, one.help, TIER) for name, one in _CHECKPOINTS.items()},
    **_FAILURES,
}
"""By name without the prefix, in the order in which they are shown."""
