"""`ftslurm submit -m`: what a sweep over our own configs is made of, and what it comes to."""

import argparse
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ftslurm.cli import main
from ftslurm.errors import SpecError
from ftslurm.run.sweep_layout import SweepLayout
from ftslurm.submit.compose import compose_run
from ftslurm.submit.compose_sweep import SweepComposer, expand
from ftslurm.submit.sweep_command import Native
from ftslurm.submit.sweep_course import Course, TaskResult

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
        ["name=${seed}", "user.a=${name}", "cluster.env.A=${optim.lr}"],
    ],
)
def test_a_task_is_composed_to_the_letter_like_a_single_run(overrides):
    composer = SweepComposer(None, OPEN)
    composer.compose(["seed=99", *overrides])  # which leaves nothing behind for the next
    assert composer.compose(overrides) == compose_run(overrides, open_choices=OPEN)


COMPOSER, ANEW = SweepComposer(None, OPEN), SweepComposer(None, OPEN)
"""Shared, as to read conf/ takes half a second."""


def outcome(composer, words, *, anew=False):
    if anew:
        composer._working = None  # as Hydra does it
    try:
        return composer.compose(words)
    except SpecError as error:
        return str(error)


@pytest.mark.parametrize(
    "tasks",
    [
        [["seed=1", "user.a=x"], ["seed=2", "user.a=x"], ["seed=2", 'user.a="1"'], ["seed=2"]],
        [["user.a=1", "user.b=2"], ["user.b=1", "user.a=2"], ["user.a=null", "user.b=true"]],
        [["user={a:1}", "user.b=2"], ["user={b:3}", "user.b=2"], ["user={b:3}", "user.b=1"]],
        [["user.a={b:1}"], ["user.a={c:1}"], ["user.a=1"], ["user.a=[1,2]"], ["user.a=[3]"]],
        [["user.a=1", "user.a.b=2"], ["user.a=2", "user.a.b=2"], ["user.a=2", "user.a.b=3"]],
        [["seed=1", "user.a=${seed}"], ["seed=2", "user.a=${seed}"], ["seed=3", "user.a=$x"]],
        [["cluster.env.A=b"], ["cluster.env.A=${oc.env:HOME}"], ["cluster.env.A=c"]],
        [["cluster.partition=a"], ["cluster.partition=null"], ["cluster.partition=b"]],
        [
            ["model=tiny", "optim.lr=1"],
            ["model=small", "optim.lr=1"],
            ["model=small", "optim.lr=2"],
        ],
        [["optim.lr=1e-3", "steps=5"], ["optim.lr=2e-3", "steps=6"], ["optim.lr=2e-3", "steps=7"]],
        [["seed=1", "seed=2"], ["seed=2", "seed=1"], ["seed=3"], ["++seed=4"], ["seed=5"]],
        [["+user.a=1"], ["+user.a=2"], ["user.a=3"]],
        [["user.a=[1]", f"user.a.0={n}", "user.b=5"] for n in (2, 3)],
        [["user.a=[1]", "user.b=2"], ["user.a=[1]", "user.b=3"]],
    ],
    ids=lambda tasks: " ".join(tasks[0]),
)
def test_a_task_is_the_same_whatever_was_composed_before_it(tasks):
    for words in [*tasks, *reversed(tasks), tasks[0]]:
        alone, found = outcome(ANEW, words, anew=True), outcome(COMPOSER, words)
        assert found == alone and list(found.spec.user) == list(alone.spec.user)
        found.spec.user["left"] = found.spec.cluster.env["LEFT"] = "behind"


@given(
    tasks=some.lists(
        some.tuples(
            some.sampled_from(["seed=1", "seed=2", "seed=0.5", "seed=x"]),
            some.sampled_from(
                ["user.a=1", "user.a=[1]", "user.a={b:1}", "user.a=${seed}", "user.c=0"]
            ),
            some.sampled_from(["user.a.b=1", "user.a.b=2", "steps=0", "steps=5", "model=small"]),
        ),
        min_size=2,
        max_size=5,
    )
)
@settings(max_examples=12, deadline=None)
def test_tasks_in_any_order_are_what_each_is_alone(tasks):
    for words in tasks:
        assert outcome(COMPOSER, words) == outcome(ANEW, words, anew=True)


KEYS = ["seed", "name", "user.a", "user.b.c", "cluster.env.A", "optim.lr", "checkpoint.digest"]
VALUES = ["1", "007", "1e5", ".5", "1_0", "inf", "null", "yes", "x", "'a,b'", "[1,x]", "{k: 1}",
          "''", "???", "${seed}", "${user.a}-x", "${oc.env:HOME}", "a=b", "2024-01-01",
          "é"]  # fmt: skip


@given(
    keys=some.lists(some.sampled_from(KEYS), min_size=1, max_size=3),
    values=some.lists(
        some.lists(some.sampled_from(VALUES), min_size=3, max_size=3), min_size=3, max_size=3
    ),
)
@settings(max_examples=5, deadline=None)
def test_tasks_of_any_values_are_what_hydra_makes_of_each(keys, values):
    for task in values:
        words = [f"{key}={value}" for key, value in zip(keys, task)]
        found = outcome(COMPOSER, words)
        try:
            assert found == compose_run(words, open_choices=OPEN)
        except SpecError as error:
            assert found == str(error)


@pytest.mark.parametrize(
    "override",
    [
        "seed=much",
        "sed=1",
        "model=huge",
        "optim.lr=[1]",
        "steps=0",
        "~steps",
        "hydra.x=1",
        "user=${seed}",
        "cluster.setup=${name}",
        "cluster.env=${name}",
        "name=${user}",
    ],
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
        (["seed=range(5,1)"], "`seed=range(5,1)` names no value at all"),
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


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        ([], 1),
        (["model=glob(*)"], 2),
        (["model=glob(*,exclude=t*)"], 1),
        (["seed=0", "seed=1,2"], 2),
        (["seed=1", "seed=2"], 1),
        (["seed=1,2,1"], 3),
        (["seed=range(5)"], 5),
        (["seed=tag(a,choice(1,2))"], 2),
        (["seed=sort(3,1,2)"], 3),
        (["seed=int(1,2)"], 2),
        (["++seed=1,2"], 2),
        (["+user.y=1,2"], 2),
        (["user={a:1},{a:2}"], 2),
        (['user.y="a,b",c'], 2),
        (["experiment=main,null"], 2),
        (["hydra/sweeper=basic", "seed=1,2"], 2),
        (["model=glob(zzz*)"], "fits no option; model has small, tiny"),
        (["user.y=glob(*)"], "there is no group `user.y`"),
        (["seed=1,2", "seed=3"], "`seed=1,2` is followed by `seed=3`"),
        (["+user.y=1,2", "user.y=3,4"], "`+user.y=1,2` is followed by `user.y=3,4`"),
        (["seed="], "could not be converted"),
        (["seed=1,"], "not in Hydra's grammar"),
        (["seed=choice()"], "not in Hydra's grammar"),
        (["seed=range(1,5,0)"], "cannot be counted through"),
        (["seed=range(0.0,1.0,0.0)"], "cannot be counted through"),
        (["seed=range(1000000000)"], "names more than 100,000 values"),
        (["seed=range(1000)", "user.y=range(1000)"], "1000 x 1000 tasks, more than 100,000"),
        (["seed"], "`seed` is no override"),
        ([""], "is no override"),
        (["~user.x=1,2"], "takes a key away"),
        (["+seed=1,2"], "Could not append"),
        (["seed@y=1,2"], "does not exist"),
        (["model=tiny,nope"], "task 1 ("),
        (["runs_dir=a,b"], "the tasks of a sweep lie in one folder"),
        (["user.y=${nope},1"], "'nope' not found"),
        (["user.y=[1]", "user.y.b=1,2"], "'b'"),
        (["optim.lr=1e-4,1e400"], "cannot be kept"),
        (["hydra/sweeper=a,b"], "a dry run shows the tasks"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_an_odd_command_line_works_or_is_refused_in_a_sentence(folder, capsys, words, tasks):
    code = main(["submit", "-m", "--dry-run", *LOCAL, "user.x=1", *words])
    told = capsys.readouterr()
    if isinstance(tasks, int):
        assert code == 0 and f"tasks:          {tasks}\n" in told.out
    else:
        assert code == 2 and tasks in told.err and told.err.count("\n") == 1
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


@pytest.mark.parametrize(("detach", "counted"), [(True, []), (False, ["0 of 1 tasks finished;"])])
def test_detached_only_what_slurm_has_refused_is_told_of(folder, monkeypatch, detach, counted):
    refused = [TaskResult(1, "x-0001", False, "was not queued: no such partition", None)]
    monkeypatch.setattr(Course, "begin", lambda *_: SweepLayout(folder / "runs" / "x"))
    monkeypatch.setattr(Course, "launch", lambda *_: refused)
    told = []
    options = argparse.Namespace(
        config_dir=None, parallelism=None, detach=detach, dry_run=False, json=False
    )
    sweep = Native(options, [], "basic", told.append)
    assert sweep.all_at_once([[*LOCAL, "user.x=1"], [*LOCAL, "user.x=2"]]) == 1
    assert told[-1] == "task 1 (x-0001) was not queued: no such partition"
    assert [line.partition(" /")[0] for line in told if "finished" in line] == counted


def test_ctrl_c_while_tasks_are_composed_says_that_nothing_is_queued(folder, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(SweepComposer, "compose", interrupted)
    assert main(["submit", "-m", *LOCAL, "user.x=1,2"]) == 1
    assert "stopped; nothing was written, nothing was submitted" in capsys.readouterr().out
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (AssertionError(), "the sweeper has raised AssertionError ("),
        (KeyError("x"), "the sweeper has raised KeyError: 'x' ("),
        (ValueError("n_trials is 0"), "error: n_trials is 0\n"),
    ],
)
def test_a_bug_of_a_sweeper_is_told_with_its_kind_and_its_place(
    folder, capsys, monkeypatch, error, said
):
    def multirun(*_, **__):
        raise error

    monkeypatch.setattr("hydra._internal.hydra.Hydra.multirun", multirun)
    assert main(["submit", "-m", *LOCAL, "user.x=1", "hydra/sweeper=mine"]) == 2
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert (f"{__file__}:" in told) is not isinstance(error, ValueError)


def test_tasks_that_a_later_override_makes_equal_are_named_before_anything_is_queued(
    folder, capsys
):
    words = ["submit", "-m", "--dry-run", *LOCAL, "user.x=1,2,3", "user={x: 5}"]
    assert main(words) == 0
    said = capsys.readouterr()
    line = "tasks 0 and 1 are the same configuration; 1 more repeat another\n"
    assert line in said.out + said.err
    assert main(["submit", "-m", "--dry-run", *LOCAL, "user.x=1,2", "seed=1"]) == 0
    said = capsys.readouterr()
    assert "same configuration" not in said.out + said.err
