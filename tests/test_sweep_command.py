"""`ftslurm submit -m`: what a sweep over our own configs is made of, and what it comes to."""

import json

import pytest

from ftslurm.cli import main
from ftslurm.errors import SpecError
from ftslurm.submit.compose import compose_run
from ftslurm.submit.compose_sweep import SweepComposer, expand

OPEN = {"cluster": "local"}
ENTRY = """
import time

from ftslurm.errors import RANK_DONE, RANK_FAILED
from ftslurm.files import write_json
from ftslurm.run.rank import RankEnvironment
from ftslurm.run.record import read_record
from ftslurm.run.value import write_value


def main():
    env = RankEnvironment.read()
    spec = read_record(env.layout).spec
    write_value(env.layout, spec.user["x"] ** 2 + spec.seed / 10)
    if spec.user["x"] > 3:
        return RANK_FAILED
    write_json(env.layout.done, {"schema_version": 1, "attempt": env.attempt, "finished_at": 1})
    return RANK_DONE
"""
LOCAL = ("entry=rank:mine:main", "cluster=local", "cluster.tasks_per_node=1",
         "recovery.max_failures=0")  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_last_key_varies_fastest_and_a_list_or_a_quoted_text_is_one_value():
    assert expand(["seed=0,1", "user.a=[1,2]", 'user.b="x,y"', "steps=range(5,7)"]) == [
        ["seed=0", "user.a=[1,2]", 'user.b="x,y"', "steps=5"],
        ["seed=0", "user.a=[1,2]", 'user.b="x,y"', "steps=6"],
        ["seed=1", "user.a=[1,2]", 'user.b="x,y"', "steps=5"],
        ["seed=1", "user.a=[1,2]", 'user.b="x,y"', "steps=6"],
    ]


def test_a_range_without_single_values_asks_for_another_sweeper():
    with pytest.raises(SpecError, match="hydra/sweeper=optuna"):
        expand(["optim.lr=interval(0.1,0.2)"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.lr=0.25", "seed=7", "user.a={b: [1, x]}", "name=x"],
        ["experiment=main", "model=tiny", "steps=12", "recovery=large", "recovery.max_failures=9"],
        ["cluster=slurm", "cluster.nodes=3", 'cluster.exclude="n[1-3,5]"', "cluster.env.A=b"],
        ["experiment=main", "experiment=null", "optim.lr=3e-4"],
    ],
)
def test_a_task_is_composed_to_the_letter_like_a_single_run(overrides):
    composer = SweepComposer(None, OPEN)
    composer.compose(["seed=99", *overrides])  # which leaves nothing behind for the next
    assert composer.compose(overrides) == compose_run(overrides, open_choices=OPEN)


@pytest.mark.parametrize(
    "override",
    ["seed=much", "sed=1", "model=huge", "optim.lr=[1]", "steps=0", "~steps", "hydra.x=1"],
)
def test_a_task_is_refused_with_the_words_of_a_single_run(override):
    with pytest.raises(SpecError) as single:
        compose_run([override], open_choices=OPEN)
    with pytest.raises(SpecError) as task:
        SweepComposer(None, OPEN).compose([override])
    assert str(task.value) == str(single.value)


def test_a_bad_value_in_the_last_task_leaves_nothing_written(folder, capsys):
    words = [f"user.x={','.join(map(str, range(96)))}", "seed=0,never"]
    assert main(["submit", "-m", *LOCAL, *words]) == 2
    assert "task 1 (" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("seed=range(5,1)",), "has no task"),
        (["--drill"], "--drill"),
        (["--detach"], "detach"),
        (["--parallelism", "0"], "parallelism is 0"),
        (["run_id=mine"], "run_id"),
        (["hydra/launcher=basic"], "hydra/launcher"),
        (["hydra/sweeper=nix"], "hydra/sweeper"),
        (["hydra.sweeper.n_trials=3"], "of a sweeper that was not chosen"),
        (["hydra/sweeper=optuna", "--dry-run"], "dry run"),
    ],
)
def test_what_a_sweep_cannot_have_is_refused_in_a_sentence(folder, capsys, words, named):
    assert main(["submit", "-m", *LOCAL, "user.x=1", *words]) in (1, 2)
    said = capsys.readouterr().err
    assert named in said and said.count("ftslurm: error:") == 1 and "Traceback" not in said
    assert not (folder / "runs").exists()


def test_options_of_a_sweep_without_m_are_refused(folder, capsys):
    assert main(["submit", *LOCAL, "--detach"]) == 2
    assert "add -m" in capsys.readouterr().err


def test_a_dry_run_shows_tasks_and_first_script_and_writes_nothing(folder, capsys):
    assert main(["submit", "-m", *LOCAL, "user.x=1,2", "seed=0,1", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "tasks:          4" in said and "#SBATCH" in said
    assert main(["submit", "-m", *LOCAL, "user.x=1,2", "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [task["overrides"][-1] for task in shown["tasks"]] == ["user.x=1", "user.x=2"]
    assert not (folder / "runs").exists()


def test_values_come_back_and_a_failed_task_is_named_by_the_exit_code(folder, capsys):
    code = main(["submit", "-m", *LOCAL, "user.x=0.1,4", "--json"])
    told = json.loads(capsys.readouterr().out)
    tasks = told["tasks"]
    assert [(task["finished"], task["value"]) for task in tasks] == [(True, 0.1**2), (False, None)]
    assert code == 1
    assert tasks[1]["run_id"] == f"{told['sweep_id']}-0001"
