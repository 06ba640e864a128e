"""`ftslurm submit`: compose, freeze, submit; with --wait, follow to the end.

Prints the job id and the run directory. A dry run shows what would be done and writes nothing.
`ftslurm run` (program.py) does the same through `submit_new`.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Optional

from ftslurm.errors import EXIT_FAILED, EXIT_OK, RunError, SchedulerError, UsageError, warn
from ftslurm.recovery.ending import Ending
from ftslurm.recovery.on_record import jobs_on_record
from ftslurm.run.jobs import BY_SUBMIT, add_job
from ftslurm.run.layout import RunLayout
from ftslurm.run.record import find_run, read_record
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import Scheduler
from ftslurm.scheduler.sbatch import RefusedError
from ftslurm.submit.checks import Checks
from ftslurm.submit.compose import compose_run
from ftslurm.submit.follow import Follower
from ftslurm.submit.freeze import Plan, freeze, plan_run
from ftslurm.submit.place import open_choices, say_opened, site_of
from ftslurm.submit.program_files import with_program
from ftslurm.submit.say import print_json, speaker

_EPILOG = """examples:
  ftslurm submit experiment=main --wait           a first run, followed to its end
  ftslurm submit experiment=gpt_fsdp cluster=slurm cluster.nodes=4 cluster.partition=gpu
  ftslurm submit entry=mytrain:train steps=1000 user.width=64 --config-dir ~/myconf
  ftslurm submit experiment=gpt_ddp --dry-run     script and plan; nothing is written
  ftslurm submit --follow runs/main-20261129-150000-3f9a
  ftslurm submit -m optim.lr=1e-4,3e-4 seed=0,1   a sweep of four runs, followed to its end
  ftslurm submit -m hydra/sweeper=optuna hydra.sweeper.n_trials=8 'optim.lr=interval(1e-4,1e-2)'

In an override, commas and brackets have a meaning of their own. A value that holds some takes two
pairs of quotes, the outer ones for the shell: 'cluster.exclude="n[1-3,5]"'.

Keys and config groups: conf/ and ftslurm/run/spec.py. Without `cluster=...` the run goes to Slurm
where sbatch is found, else to this machine. `entry=rank:module:function` runs a function as the
whole rank, without torch (see ftslurm/submit/rank.py)."""


def main(argv: Optional[list[str]] = None) -> int:
    typed = sys.argv[2:] if argv is None else argv
    options = _options(typed)
    say = speaker(as_json=options.json)
    if options.multirun:
        from ftslurm.submit.sweep_command import submit_sweep

        return submit_sweep(options, ["ftslurm", "submit", *typed], say)
    if options.follow is not None:
        if options.overrides or options.dry_run:
            raise UsageError("--follow takes a run directory only; overrides are for a new run")
        return _follow(RunLayout(find_run(options.follow)), options, say)
    return submit_new(options, say)


def submit_new(
    options: argparse.Namespace, say: Callable[[str], None], *, program: Sequence[str] = ()
) -> int:
    """Plan, and as the options say show, submit and follow; the exit code."""
    plan, scheduler = _plan(options, say, program)
    if options.dry_run:
        _show_plan(plan, say, as_json=options.json)
        return EXIT_OK
    job_id = _submit(plan, scheduler, say)
    if options.wait:
        return _follow(plan.layout, options, say)
    say(f"follow it:     ftslurm submit --follow {shlex.quote(str(plan.layout.root))}")
    if options.json:
        print_json(_identity(plan.layout, job_id))
    return EXIT_OK


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ftslurm submit",
        description="Compose a run from conf/ and overrides, freeze it and submit it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument(
        "--drill",
        action="store_true",
        help="with --wait: preempt the run once on purpose, when a step is committed "
        "(also as the override drill=true)",
    )
    parser.add_argument(
        "--follow",
        metavar="RUN",
        help="follow a run submitted before: its directory, or its id under ./runs",
    )
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="a sweep: one run for each combination of the values that are named (KEY=A,B), "
        "followed to its end",
    )
    parser.add_argument(
        "--detach", action="store_true", help="with -m: return when everything is queued"
    )
    parser.add_argument(
        "--parallelism", type=int, metavar="N", help="with -m: at most N runs at a time"
    )
    options = parser.parse_intermixed_args(argv)
    for word in [word for word in options.overrides if word.startswith("drill=")]:
        options.overrides.remove(word)
        if word not in ("drill=true", "drill=false"):
            raise UsageError(f"`{word}` is no choice; write drill=true or drill=false")
        options.drill = word == "drill=true"
    if not options.multirun and (options.detach or options.parallelism is not None):
        raise UsageError("--detach and --parallelism are of a sweep; add -m")
    if options.multirun and (options.drill or options.follow is not None):
        raise UsageError("--drill and --follow are of one run; leave them or -m out")
    waits = options.wait or options.follow is not None
    if options.drill and not waits and not options.dry_run:
        raise UsageError("a drill needs --wait: it is the follower that sends the signal")
    return options


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is asked in the same way of a loop and of a program."""
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="KEY=VALUE, GROUP=OPTION")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="options beside conf/'s")
    parser.add_argument("--dry-run", action="store_true", help="show script and plan, do nothing")
    parser.add_argument("--wait", action="store_true", help="follow the run to its end")
    parser.add_argument("--json", action="store_true", help="result as JSON, talk to stderr")


def _plan(
    options: argparse.Namespace, say: Callable[[str], None], program: Sequence[str]
) -> tuple[Plan, Scheduler]:
    found = shutil.which("sbatch") is not None
    composed = compose_run(options.overrides, options.config_dir, open_choices=open_choices())
    say_opened(composed.opened, say)
    spec, text = composed.spec, composed.text
    if program:
        spec, text = with_program(spec, text, program)
    checks = Checks(Path.cwd() / Path(spec.runs_dir).expanduser())
    checks.spec(spec)
    scheduler = open_scheduler(spec.cluster.scheduler)
    try:
        site = site_of(spec, scheduler, sbatch_found=found)
    except SchedulerError as error:
        if not options.dry_run:
            raise
        warn(f"{error}; what depends on the site is left open")
        site = None
    plan = plan_run(spec, text, scheduler, site, folder=Path.cwd())
    checks.plan(plan)
    return plan, scheduler


def _show_plan(plan: Plan, say: Callable[[str], None], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                **_identity(plan.layout, None),
                "command": plan.command,
                "script": plan.script,
                "emergency_deadline_s": plan.emergency_deadline_s,
            }
        )
        return
    deadline_s = plan.emergency_deadline_s
    code = plan.snapshot
    rows = {
        "run directory": plan.layout.root,
        "ranks": f"{plan.spec.cluster.nodes} x {plan.spec.cluster.tasks_per_node}",
        **({"program": shlex.join(plan.spec.program)} if plan.spec.program else {}),
        "code": f"{len(code.sources)} files, {code.size_bytes / (1 << 20):.1f} MiB, "
        f"commit {code.commit or 'none'}{' and changes' if code.dirty else ''}",
        "left out": ", ".join(code.left_out) or "nothing",
        "data": _data_words(plan),
        "emergency save": "unknown" if deadline_s is None else f"{deadline_s:g} s at most",
        "command": plan.command or "none: the script runs here, under submitit's local executor",
    }
    for name, text in rows.items():
        say(f"{name + ':':16}{text}")
    say("")
    say(plan.script.rstrip("\n"))
    say("")
    say("dry run: nothing was written, nothing was submitted")


def _data_words(plan: Plan) -> str:
    if plan.data is None:
        return "the program's own" if plan.spec.program else "the loop's own"
    return f"{plan.data.path}{'' if plan.data.path.exists() else ' (to be built)'}"


def _submit(plan: Plan, scheduler: Scheduler, say: Callable[[str], None]) -> str:
    """Freeze and hand over; the job id. No run directory stays when there is certainly no job."""
    from ftslurm.submit.executor import submit_run

    if plan.data is not None and plan.data.may_build and not plan.data.path.exists():
        say(f"building `{plan.data.path}` from the text of Python's own library, once")
    freeze(plan)
    try:
        job_id = submit_run(plan.layout, scheduler.name)
    except RefusedError:
        shutil.rmtree(plan.layout.root)
        raise
    add_job(plan.layout, job_id, scheduler=scheduler.name, queued_by=BY_SUBMIT)
    if plan.spec.program:
        ranks = f"{plan.spec.cluster.nodes} x {plan.spec.cluster.tasks_per_node}"
        say(f"starts {ranks} times: {shlex.join(plan.spec.program)}")
    say(f"job id:        {job_id}")
    say(f"run directory: {plan.layout.root}")
    return job_id


def _follow(layout: RunLayout, options: argparse.Namespace, say: Callable[[str], None]) -> int:
    record = read_record(layout)
    if not jobs_on_record(layout, record.scheduler).jobs:
        raise RunError(f"`{layout.root}` is no run that was submitted; no job of it is known")
    follower = Follower(
        layout,
        open_scheduler(record.scheduler, run_dir=layout.root),
        lambda text: say(f"{time.strftime('%H:%M:%S')}  {text}"),
        drill_signal=record.spec.cluster.signal if options.drill else None,
    )
    try:
        ending = follower.follow()
    except KeyboardInterrupt:
        again = f"ftslurm submit --follow {shlex.quote(str(layout.root))}"
        say(f"\ndetached, the run goes on; follow it again: {again}")
        return EXIT_FAILED
    say(f"run {layout.root.name} {ending.text}")
    say(f"run directory: {layout.root}")
    if options.json:
        print_json(_result(layout, follower.job_id, ending))
    return EXIT_OK if ending.finished else EXIT_FAILED


def _identity(layout: RunLayout, job_id: Optional[str]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "run_id": layout.root.name,
        "run_dir": str(layout.root),
        "job_id": job_id,
    }


def _result(layout: RunLayout, job_id: str, ending: Ending) -> dict[str, Any]:
    return {
        **_identity(layout, job_id),
        "finished": ending.finished,
        "attempts": ending.attempts,
        "text": ending.text,
    }
