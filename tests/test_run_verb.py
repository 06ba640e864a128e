"""`ftslurm run -- COMMAND` as a person meets it: what is refused, what is taken along and kept."""

import subprocess
import sys

import pytest
import yaml

from ftslurm.cli import main as cli
from ftslurm.errors import SpecError
from ftslurm.run.record import read_record
from ftslurm.run.spec import PROGRAM_ENTRY, ClusterSpec, RunSpec
from ftslurm.scheduler import open_scheduler
from ftslurm.submit.compose import compose
from ftslurm.submit.freeze import freeze, plan_run
from ftslurm.submit.program_files import left_behind, with_program
from ftslurm.submit.snapshot import plan_snapshot

WORDS = [
    "python3",
    "a b",
    "x'y\"z",
    "",
    "ü€😀",
    "$HOME `id` ${a",
    "--",
    "new\nline",
    "\\1",
    "\udcff",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A submitter's working folder without git, with python3 on PATH."""
    (tmp_path / "train.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "bin"
    bare.mkdir()
    for name in ("bash", "git", "python3"):
        (bare / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(bare))
    for name in ("SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def frozen(folder, *words):
    """The run directory of a program, without a scheduler having heard of it."""
    base, text = compose(["cluster=local"])
    spec, text = with_program(base, text, words)
    scheduler = open_scheduler("local")
    plan = plan_run(spec, text, scheduler, scheduler.site(), folder=folder)
    freeze(plan)
    return plan.layout


def taken(folder, *words):
    snapshot = plan_snapshot(folder, entry=PROGRAM_ENTRY, program=words)
    return {source.name for source in snapshot.sources if not source.name.startswith("ftslurm/")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "write it after `--`"),
        (["cluster=local"], "write it after `--`"),
        (["cluster=local", "--"], "write it after `--`"),
        (["--", ""], "write it after `--`"),
        (["--", "no-such-command"], "`no-such-command` is not on PATH"),
        (["--", "train.py"], "write ./train.py"),
        (["--", "./train.py"], "may not be executed; chmod +x"),
        (["--", "./nothing"], "is not in the code that the run takes along"),
        (["--", "/nowhere/prog"], "no file here that can be executed"),
        (["--", "python3", "trian.py"], "`trian.py` is not in the code"),
        (["--", "python3", "-u", "-X", "dev", "trian.py"], "`trian.py` is not in the code"),
        (["--", "python3", "a\0b"], "holds a NUL"),
        (["steps=100", "--", "python3", "train.py"], "`steps=100` would have no effect"),
        (["optim.lr=1", "--", "python3", "train.py"], "would have no effect"),
        (["checkpoint.keep_last=1", "--", "python3", "train.py"], "would have no effect"),
        (["entry=a:b", "--", "python3", "train.py"], "would have no effect"),
        (["cluster.node=2", "--", "python3", "train.py"], "did you mean `cluster.nodes`"),
    ],
)
def test_what_cannot_run_is_one_sentence_at_submit(folder, capsys, arguments, says):
    assert cli(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("ftslurm: error: ") and err.count("\n") == 1
    assert not (folder / "runs").exists()


def test_a_program_as_an_override_of_submit_is_refused(folder, capsys):
    assert cli(["submit", "program=[python3,train.py]", "cluster=local"]) == 2
    assert "ftslurm run ... -- COMMAND" in capsys.readouterr().err


def test_where_the_ranks_path_is_another_one_a_command_is_not_looked_for(folder, capsys):
    given = ["cluster=slurm", "cluster.setup=[module load x]", "--dry-run"]
    assert cli(["run", *given, "--", "no-such-command"]) == 0


def test_a_dry_run_shows_the_program_and_writes_nothing(folder, capsys):
    words = ["python3", "train.py", "--name", "a b"]
    assert cli(["run", "cluster=local", "--dry-run", "--", *words]) == 0
    out = capsys.readouterr().out
    assert "program:        python3 train.py --name 'a b'" in out
    assert "data:           the program's own" in out
    assert not (folder / "runs").exists()


def test_every_word_is_kept_as_it_was_typed_and_no_token_store_is_built(folder):
    layout = frozen(folder, *WORDS)
    record = read_record(layout)
    assert record.spec.program == WORDS
    assert record.data_path is None and not (folder / "runs" / "datasets").exists()
    config = yaml.safe_load(layout.config_yaml.read_text())
    assert config["program"] == WORDS and config["entry"] == PROGRAM_ENTRY


def test_a_secret_that_the_shell_put_into_a_word_is_refused(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    with pytest.raises(SpecError, match="word 2 .* WANDB_API_KEY") as caught:
        with_program(RunSpec(), "entry: x\nprogram: []\n", ["a", "b", "--key=0123456789abcdef"])
    assert "0123456789abcdef" not in str(caught.value)


def test_without_git_the_sources_and_the_files_that_are_named_are_taken(folder):
    for name in (
        "other.py", "pkg/__init__.py", "pkg/data/x.txt", "loose/not.py", "conf/run.yaml",
        "conf/by_option.yaml", "data.bin", ".env", "../outside.yaml",
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    words = ["python3", "train.py", "conf/run.yaml", "--config=conf/../conf/by_option.yaml"]
    words += ["../outside.yaml", ".env", str(folder / "data.bin"), "conf", "no/such"]
    assert taken(folder, *words) == {
        "train.py", "other.py", "pkg/__init__.py", "pkg/data/x.txt", "conf/run.yaml",
        "conf/by_option.yaml",
    }  # fmt: skip


def test_a_program_runs_in_the_folder_it_was_submitted_from(folder):
    place = folder / "exp" / "one"
    place.mkdir(parents=True)
    (place / "go.py").write_text("")
    (folder / "lib.py").write_text("")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    layout = frozen(place, "python3", "go.py")
    assert read_record(layout).code_place == "exp/one"
    assert (layout.code / "exp" / "one" / "go.py").is_file() and (layout.code / "lib.py").is_file()


def test_a_folder_with_nothing_to_take_along_is_there_all_the_same(folder):
    place = folder / "empty"
    place.mkdir()
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    layout = frozen(place, "/bin/true")
    assert (layout.code / "empty").is_dir()


def test_data_that_is_not_taken_along_is_told(folder, capsys):
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / ".gitignore").write_text("data/\nx.bin\n/bin/\n")
    (folder / "data").mkdir()
    (folder / "data" / "tokens").write_text("")
    (folder / "x.bin").write_text("")
    words = ["python3", "train.py", "--data=data/tokens", "data", "x.bin", ".", "--x", "no/such"]
    snapshot = plan_snapshot(folder, entry=PROGRAM_ENTRY, program=words)
    assert list(left_behind(snapshot, words)) == ["data/tokens", "data", "x.bin"]
    assert cli(["run", "cluster=local", "--dry-run", "--", *words[:3]]) == 0
    err = capsys.readouterr().err
    assert "warning: `data/tokens` is here but not in the run's copy" in err


def test_a_program_and_a_loop_are_told_apart_by_their_specs():
    from ftslurm.run.spec_check import check

    check(RunSpec(entry=PROGRAM_ENTRY, program=["x"], cluster=ClusterSpec()))
    for spec in (RunSpec(program=["x"]), RunSpec(entry=PROGRAM_ENTRY)):
        with pytest.raises(SpecError, match="ftslurm run"):
            check(spec)


def test_the_verb_answers_help_without_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "ftslurm", "run", "--help"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "-- COMMAND [ARG ...]" in done.stdout
