"""The rooms and who may import whom, as data; the code is held against it."""

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "ftslurm"

# A room imports from itself and from lower ranks only, except where EXTRA says so.
RANK = {
    "errors": 0, "parent": 0, "faults": 1, "files": 2, "health": 3, "plan": 3, "run": 4,
    "scheduler": 5, "checkpoint": 5, "replay": 5, "program": 5, "diagnosis": 6,
    "recovery": 7, "node": 7, "sweep": 8, "agent": 9, "submit": 9, "operate": 9, "report": 9,
    "doctor": 9, "train": 9, "hydra_app": 10, "metrics": 10, "cli": 11,
    "__main__": 12, "__init__": 12,
}  # fmt: skip
HEAVY = {"torch", "numpy", "h5py"}
# Files, or a whole room.
OWNERS = {
    "hydra": {"submit/compose.py", "submit/compose_sweep.py", "submit/override.py", "hydra_app"},
    "omegaconf": {"submit/compose.py", "submit/compose_sweep.py", "hydra_app"},
    "submitit": {"submit/executor.py"},
    "jinja2": {"submit/render.py"},
    "prometheus_client": {"metrics/exposition.py"},
}
HEAVY_ROOMS = {"train"}
HEAVY_FILES = {"replay/determinism.py"}
# The verbs read what checkpoint/ knows; run/story.py is of a verb that lives with the facts it
# shows, and which nodes are excluded it tells by the rule that excludes them; run/status.py tells
# whether a job is held by what the other verbs ask.
# The settings of the nodes' own copy, which has no submit/, are composed where there is one.
# A program is tied to its rank as a rank is to the local scheduler.
# A task that has ended hands on to the others of its sweep.
# Submit says by the way what doctor sees without asking Slurm, and hands a sweep whose tasks
# follow from the values of others to Hydra.
EXTRA = {("run/story.py", "checkpoint"), ("run/story.py", "recovery"),
         ("run/status.py", "operate"),
         ("recovery/claim.py", "node"), ("recovery/ask_agents.py", "agent"),
         ("recovery/recover.py", "sweep"),
         ("program/child.py", "scheduler"), ("health/command.py", "submit"),
         ("submit/checks.py", "doctor"), ("submit/sweep_command.py", "hydra_app")}  # fmt: skip
# Deciding is pure: no clock, no files, no processes.
PURE = ["train/pace.py", "run/planned.py", "submit/preemption.py",
        "recovery/policy.py", "scheduler/hostlist.py", "run/layout.py", "run/spec.py",
        "run/spec_check.py", "run/timeline.py", "recovery/exclusion.py", "diagnosis/classify.py",
        "recovery/budgets.py", "recovery/sentences.py", "recovery/ending.py",
        "recovery/job_meant.py", "recovery/case.py", "recovery/likeness.py",
        "diagnosis/signatures.py", "diagnosis/signatures_ranks.py", "diagnosis/reading.py",
        "diagnosis/signatures_system.py", "diagnosis/node_clues.py", "diagnosis/causes.py",
        "diagnosis/health_clues.py", "diagnosis/kernel_clock.py",
        "diagnosis/hang.py", "diagnosis/stragglers.py", "health/signals.py",
        "health/kernel_line.py", "health/xid_table.py", "health/decision_table.py",
        "health/verdict.py", "health/history.py", "health/verdicts.py",
        "health/verdicts_rows.py", "health/verdicts_kernel.py", "health/settings.py",
        "health/report.py", "health/explain.py",
        "health/reason.py", "health/node_state.py", "health/breaker.py",
        "health/memory.py", "health/second_look.py",
        "health/resume.py", "health/pairwise.py", "node/preflight_lines.py",
        "node/preflight_report.py", "plan/failures.py", "plan/intervals.py", "plan/capacity.py",
        "plan/plan.py", "plan/published.py", "plan/tables.py",
        "report/logical.py", "report/fold.py", "report/lemons.py", "report/jobs.py",
        "report/fleet.py", "report/advice.py", "report/attempt_end.py", "report/records.py",
        "report/page.py", "report/page_charts.py", "report/page_style.py",
        "report/drains.py", "report/phases.py",
        "doctor/line.py", "doctor/slurm_checks.py", "doctor/cluster.py", "doctor/preemption.py",
        "doctor/let_in.py",
        "doctor/site_programs.py", "doctor/gpu_models.py", "doctor/answer.py",
        "doctor/checklist.py", "doctor/checklist_saves.py", "doctor/checklist_failures.py",
        "doctor/node_facts.py", "doctor/node_lines.py", "doctor/view_lines.py",
        "doctor/spoken.py", "doctor/bucket_lines.py", "metrics/families.py",
        "metrics/samples.py", "metrics/saves.py"]  # fmt: skip


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Dotted names this file imports, anywhere in it, `ftslurm.x` for our own."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def room(relative: str) -> str:
    return relative.split("/")[0].removesuffix(".py")


def test_imports_point_down() -> None:
    for path in modules():
        check_direction(path)


def check_direction(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    here = room(relative)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "ftslurm" or len(parts) < 2 or parts[1] not in RANK:
            continue
        there = parts[1]
        if there == here or (relative, there) in EXTRA:
            continue
        assert there != "train", f"{relative} imports {name}: only the command line leads there"
        assert RANK[there] < RANK[here], f"{relative} imports {name}, which is not below it"


def test_each_library_has_one_owner() -> None:
    for path in modules():
        check_owners(path)


def check_owners(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    for top in {name.split(".")[0] for name in imported(path)}:
        if top in HEAVY:
            assert room(relative) in HEAVY_ROOMS or relative in HEAVY_FILES, f"{relative}: {top}"
        if top in OWNERS:
            is_owner = relative in OWNERS[top] or room(relative) in OWNERS[top]
            assert is_owner, f"{relative} imports {top}; {OWNERS[top]} owns it"
        # A frozen configuration holds objects of its program's own; no state is restored by it.
        if top == "pickle" and relative != "hydra_app/frozen.py":
            raise AssertionError(f"{relative} imports pickle; nothing of ours is restored by it")


@pytest.mark.parametrize("relative", PURE)
def test_what_decides_does_nothing_else(relative: str) -> None:
    tops = {name.split(".")[0] for name in imported(PACKAGE / relative)}
    assert not tops & {"os", "subprocess", "time", "socket", "shutil", "random", "signal"}, tops


def test_only_the_scheduler_room_names_slurm_commands() -> None:
    commands = {"sbatch", "srun", "scontrol", "squeue", "sacct", "scancel", "sinfo", "sacctmgr"}
    for path in modules():
        relative = path.relative_to(PACKAGE).as_posix()
        # The copy that root runs on a node has no scheduler room.
        if room(relative) == "scheduler" or relative == "health/slurm_node.py":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
                first = node.elts[0]
                if isinstance(first, ast.Constant) and first.value in commands:
                    raise AssertionError(f"{relative}:{node.lineno} builds a `{first.value}` argv")
