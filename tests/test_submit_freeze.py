"""A run directory is whole, private and needs nothing of what it was made from."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ftslurm.errors import DataError, RunError, SpecError
from ftslurm.files import read_json
from ftslurm.run.layout import RunLayout
from ftslurm.run.spec import PROGRAM_ENTRY, ClusterSpec, DataSpec, RunSpec, to_dict
from ftslurm.scheduler import open_scheduler
from ftslurm.scheduler.protocol import Site
from ftslurm.submit import snapshot
from ftslurm.submit.dataset import wanted_dataset
from ftslurm.submit.freeze import freeze, plan_run
from ftslurm.submit.snapshot import Source, check_entry, plan_snapshot

LOCAL = ClusterSpec(scheduler="local", tasks_per_node=2)


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """A small git repository: committed, changed, new, ignored, deleted and secret files."""
    root = tmp_path / "repo"
    files = {
        "mytrain.py": "def train(session): ...\n",
        "src/lib/__init__.py": "",
        "tools/run.sh": "#!/bin/sh\n",
        "gone.py": "",
        ".gitignore": "data/\nbuilt.bin\n",
        ".env": "API_KEY=sk-secret\n",
        "deploy/server.key": "-----BEGIN PRIVATE KEY-----\n",
        "lib/secrets.py": "import secrets\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "tools" / "run.sh").chmod(0o755)
    (root / "inside").symlink_to("src/lib")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    (root / "mytrain.py").write_text("def train(session): return 1\n")
    (root / ".env").write_text("API_KEY=sk-changed\n")
    (root / "new.py").write_text("")
    (root / "gone.py").unlink()
    (root / "built.bin").write_bytes(b"\0")
    (tmp_path / "elsewhere").write_text("far away")
    (root / "outside").symlink_to(tmp_path / "elsewhere")
    (root / "nowhere").symlink_to("/nonexistent/file")
    return root


def plan(folder, *, entry="mytrain:train", runs_dir="runs", cluster=LOCAL, site=None, **values):
    spec = RunSpec(entry=entry, runs_dir=str(runs_dir), cluster=cluster, **values)
    scheduler = open_scheduler(cluster.scheduler)
    site = scheduler.site() if site is None and cluster.scheduler == "local" else site
    return plan_run(spec, "name: run\n", scheduler, site, folder=folder)


def frozen(folder, **values):
    made = plan(folder, **values)
    freeze(made)
    return made


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_a_run_directory_holds_all_a_restart_needs(repository):
    made = frozen(repository)
    layout, record = made.layout, read_json(made.layout.run_json)
    assert stat.S_IMODE(layout.root.stat().st_mode) == 0o700
    assert layout.root.parent == repository / "runs"
    assert record["run_id"] == layout.root.name and record["run_id"].startswith("run-20")
    assert record["spec"] == to_dict(made.spec)
    assert record["scheduler"] == "local" and record["site"]["scheduler"] == "local"
    assert record["emergency_deadline_s"] == 115.0
    assert record["data_path"] is None and record["image_digest"] is None
    assert record["config_digest"].startswith("sha256:")
    assert record["packages"]["submitit"].startswith("1.5.")
    assert layout.config_yaml.read_text() == "name: run\n"
    assert str(layout.root) in layout.script.read_text()
    assert (layout.submit / "train.pkl").is_file()
    for folder in (layout.steps, layout.trace, layout.attempts, layout.control):
        assert folder.is_dir()


def test_the_snapshot_takes_source_and_leaves_the_rest(repository):
    made = frozen(repository)
    code = names(made.layout.code)
    ours = {name for name in code if not name.startswith("ftslurm/")}
    assert ours == {
        ".gitignore", "mytrain.py", "new.py", "src/lib/__init__.py", "tools/run.sh",
        "lib/secrets.py",
    }  # fmt: skip
    assert {"ftslurm/cli.py", "ftslurm/submit/rank.py"} <= code
    assert made.snapshot.left_out == [".env", "deploy/server.key", "nowhere", "outside"]
    assert (made.layout.code / "mytrain.py").read_text() == "def train(session): return 1\n"
    assert os.access(made.layout.code / "tools/run.sh", os.X_OK)
    assert (made.layout.code / "inside").readlink() == Path("src/lib")


def test_commit_and_difference_are_kept_without_the_secrets(repository):
    made = frozen(repository)
    record = read_json(made.layout.run_json)["code"]
    head = subprocess.run(
        ["git", "-C", repository, "rev-parse", "HEAD"], capture_output=True, text=True
    )
    assert record["commit"] == head.stdout.strip() and record["dirty"] is True
    difference = (made.layout.submit / "code.diff").read_text()
    assert "return 1" in difference and "sk-changed" not in difference
    for path in made.layout.root.rglob("*"):
        if path.is_file():
            assert b"sk-" not in path.read_bytes(), path


def test_the_digest_is_the_contents(repository):
    first, second = frozen(repository), frozen(repository)
    digests = [read_json(made.layout.run_json)["code"]["digest"] for made in (first, second)]
    assert digests[0] == digests[1] and first.run_id != second.run_id
    (repository / "new.py").write_text("x = 1\n")
    assert read_json(frozen(repository).layout.run_json)["code"]["digest"] != digests[0]


def test_the_runs_themselves_are_no_source(repository):
    frozen(repository)
    made = plan(repository)
    assert not any(source.name.startswith("runs/") for source in made.snapshot.sources)


def test_modules_are_found_in_the_folder_of_the_submitter_the_root_and_src(repository):
    made = plan(repository / "tools", entry="lib:train", runs_dir=repository / "runs")
    code = made.layout.code
    assert f"export PYTHONPATH={code / 'tools'}:{code}:{code / 'src'}\n" in made.script


PYXIS = ClusterSpec(container_image="image", rank_python="python3", mounts=["/d:/d"])


def test_live_code_is_where_the_ranks_of_a_pyxis_container_start(repository):
    """Without it they would start in RUN/code, and no edit would ever take effect."""
    folder = repository / "tools"
    made = plan(folder, entry="lib:train", runs_dir="runs", cluster=PYXIS, code="live")
    root, run = repository, made.layout.root
    # Of the ranks and of a preflight in their place.
    (mounts,) = {line for line in made.script.splitlines() if "--container-mounts=" in line}
    first, *further, own, last = mounts.partition("=")[2].removesuffix(" \\").split(",")
    assert (first, own, last) == (f"{root}:{root}", f"{run}:{run}", "/d:/d")
    (paths,) = (line for line in made.script.splitlines() if line.startswith("export PYTHONPATH="))
    outside = [
        path for path in paths.partition("=")[2].split(":") if not path.startswith(f"{root}")
    ]
    assert further == [f"{path}:{path}" for path in outside]
    assert f"--container-workdir={folder} \\\n" in made.script

    made = plan(folder, entry="lib:train", runs_dir="runs", cluster=PYXIS)
    assert f"--container-mounts={made.layout.root}:{made.layout.root},/d:/d \\\n" in made.script
    assert f"--container-workdir={made.layout.code} \\\n" in made.script


def test_live_code_that_pyxis_cannot_mount_is_refused(repository):
    moved = repository.rename(repository.with_name("a,b"))
    runs = moved.parent / "runs"
    plan(moved, runs_dir=runs, cluster=PYXIS)
    plan(moved, runs_dir=runs, code="live")
    with pytest.raises(SpecError, match="code=live mounts .*a,b` into the container"):
        plan(moved, runs_dir=runs, cluster=PYXIS, code="live")


def test_outside_git_the_files_beside_the_entry_are_taken(tmp_path):
    for name in ("mytrain.py", "mymodel.py", "pkg/__init__.py", "pkg/data.txt", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert _foreign(plan_snapshot(tmp_path, entry="mytrain:train")) == ["mymodel.py", "mytrain.py"]
    assert _foreign(plan_snapshot(tmp_path, entry="rank:pkg.x:main")) == [
        "mymodel.py", "mytrain.py", "pkg/__init__.py", "pkg/data.txt",
    ]  # fmt: skip
    assert _foreign(plan_snapshot(tmp_path, entry="json:loads")) == []


def test_what_a_link_names_outside_is_not_taken_without_git_either(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (tmp_path / "far.py").write_text("API_KEY = 1\n")
    (folder / "mytrain.py").write_text("def train(session): ...\n")
    (folder / "near.py").symlink_to("mytrain.py")
    (folder / "far.py").symlink_to(tmp_path / "far.py")
    planned = plan_snapshot(folder, entry="mytrain:train")
    assert _foreign(planned) == ["mytrain.py", "near.py"] and planned.left_out == ["far.py"]
    with pytest.raises(SpecError, match=r"`far\.py` is a link that leads out"):
        check_entry(planned, "far:train", installed=True)


def test_what_is_copied_through_a_link_counts_with_its_size(tmp_path):
    """As in a package that an installer has linked from its cache."""
    (tmp_path / "big.py").write_bytes(b"#" * 5000)
    (tmp_path / "link.py").symlink_to(tmp_path / "big.py")
    assert Source("link.py", tmp_path / "link.py").size_bytes == 5000


def _foreign(planned):
    return [item.name for item in planned.sources if not item.name.startswith("ftslurm/")]


def test_an_entry_that_is_nowhere_is_refused_at_submit(tmp_path):
    planned = plan_snapshot(tmp_path, entry="no_such_module_here:train")
    with pytest.raises(SpecError, match="no module `no_such_module_here`"):
        check_entry(planned, "no_such_module_here:train", installed=True)
    for entry in ("json:loads", "sys:exit", "submitit:Job", "ftslurm:resume_dir"):
        check_entry(planned, entry, installed=True)


def test_an_entry_found_through_pythonpath_only_is_refused(tmp_path, monkeypatch):
    library, folder = tmp_path / "library", tmp_path / "work"
    for path in (library, folder):
        path.mkdir()
    (library / "only_on_pythonpath.py").write_text("def train(session): ...\n")
    monkeypatch.setenv("PYTHONPATH", str(library))
    monkeypatch.syspath_prepend(library)
    with pytest.raises(SpecError, match="through PYTHONPATH only .*library.* ranks do not see"):
        plan(folder, entry="only_on_pythonpath:train")
    plan(folder, entry="json:loads")
    plan(library, entry="only_on_pythonpath:train")


@pytest.mark.parametrize(
    "key, value",
    [
        ("job_name", "mine"), ("account", "a"), ("partition", "gpu"), ("qos", "high"),
        ("reservation", "r"), ("constraint", "h100"), ("exclude", "n1"), ("comment", "c"),
        ("mem", "4G"), ("wait_s", 30),
    ],
)  # fmt: skip
def test_a_key_that_only_slurm_reads_is_refused_by_the_local_scheduler(tmp_path, key, value):
    (tmp_path / "mytrain.py").write_text("def train(session): ...\n")
    with pytest.raises(SpecError, match=f"^cluster.{key} is `{value}`.* cluster=local"):
        plan(tmp_path, cluster=ClusterSpec(scheduler="local", **{key: value}))
    plan(tmp_path, cluster=ClusterSpec(**{key: value}))


def test_keys_that_the_ranks_read_are_for_both_schedulers(tmp_path):
    (tmp_path / "mytrain.py").write_text("def train(session): ...\n")
    plan(tmp_path, cluster=ClusterSpec(scheduler="local", gpus_per_node=1, cpus_per_task=2))


def test_an_interpreter_without_submitit_is_refused(tmp_path, monkeypatch):
    (tmp_path / "mytrain.py").write_text("def train(session): ...\n")
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    # What only the submitter's PYTHONPATH has, the ranks do not find.
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "submitit.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    with pytest.raises(SpecError, match="cannot import submitit.*No module named 'submitit'"):
        frozen(tmp_path, cluster=ClusterSpec(scheduler="local", python=str(bare)))
    assert list((tmp_path / "runs").iterdir()) == []
    # Frozen code is all that the rank of a program imports.
    cluster = ClusterSpec(scheduler="local", python=str(bare))
    frozen(tmp_path, entry=PROGRAM_ENTRY, program=["true"], cluster=cluster)


def test_too_much_code_names_the_biggest_files(repository, monkeypatch):
    (repository / "weights.bin").write_bytes(b"\0" * 3_000_000)
    monkeypatch.setattr(snapshot, "LIMIT_BYTES", 2 << 20)
    with pytest.raises(RunError, match=r"`weights\.bin` \(2\.9 MiB\)"):
        plan(repository)


def test_a_failure_leaves_nothing_behind(repository, monkeypatch):
    made = plan(repository)

    def no_space(path, data, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ftslurm.submit.freeze.write_atomic", no_space)
    with pytest.raises(OSError, match="No space left"):
        freeze(made)
    assert list((repository / "runs").iterdir()) == []


def test_an_existing_run_directory_is_never_touched(repository):
    made = frozen(repository)
    before = made.layout.run_json.read_bytes()
    with pytest.raises(RunError, match=f"`{made.layout.root}` exists: two runs cannot share"):
        freeze(made)
    assert made.layout.run_json.read_bytes() == before
    assert [path.name for path in (repository / "runs").iterdir()] == [made.run_id]


def test_planning_writes_nothing(repository):
    before = names(repository)
    plan(repository)
    assert names(repository) == before


@pytest.mark.parametrize(
    "entry, path, expected",
    [
        ("ftslurm.train.reference:train", None, ("runs/datasets/python-stdlib.h5", True)),
        ("mytrain:train", None, None),
        ("rank:mytrain:main", None, None),
        ("mytrain:train", "data/mine.h5", ("data/mine.h5", False)),
        ("ftslurm.train.reference:train", "/d/x.h5", ("/d/x.h5", False)),
    ],
)
def test_only_the_reference_loop_has_a_default_dataset(tmp_path, entry, path, expected):
    spec = RunSpec(entry=entry, data=DataSpec(path=path))
    wanted = wanted_dataset(spec, tmp_path / "runs", tmp_path)
    if expected is None:
        assert wanted is None
    else:
        assert (wanted.path, wanted.may_build) == (tmp_path / expected[0], expected[1])


def test_a_dataset_that_is_not_there_says_how_to_make_it(repository):
    with pytest.raises(DataError, match="ftslurm data build"):
        frozen(repository, data=DataSpec(path="mine.h5"))
    assert not [path for path in (repository / "runs").iterdir() if path.suffix != ".h5"]


def test_a_dataset_is_described_by_the_interpreter_of_the_ranks(repository):
    (repository / "mine.h5").write_bytes(b"")
    report = json.dumps({"snapshot": "sha256:1", "tokenizer_digest": "sha256:2"})
    python = repository.parent / "python"
    python.write_text(
        f"#!/bin/bash\n[[ $5 == --json ]] && echo '{report}' || exec {sys.executable} \"$@\"\n"
    )
    python.chmod(0o755)
    cluster = ClusterSpec(scheduler="local", python=str(python))
    made = frozen(repository, cluster=cluster, data=DataSpec(path="mine.h5"))
    record = read_json(made.layout.run_json)
    assert record["dataset_snapshot"] == "sha256:1" and record["tokenizer_digest"] == "sha256:2"
    assert record["data_path"] == str(repository / "mine.h5")


def test_an_interpreter_that_cannot_run_is_refused(repository):
    cluster = ClusterSpec(scheduler="local", python="/nonexistent/python")
    with pytest.raises(SpecError, match=r"cluster\.python `/nonexistent/python` cannot be run"):
        frozen(repository, cluster=cluster)


def test_a_local_run_has_one_node(repository):
    with pytest.raises(SpecError, match="has one, this machine"):
        plan(repository, cluster=ClusterSpec(scheduler="local", nodes=2))


def test_a_time_that_the_partition_never_gives_is_refused(repository):
    site = Site(
        "slurm", "22.05.8", 5, True, True, default_partition="low", max_time_s={"low": 3600}
    )
    cluster = ClusterSpec(scheduler="slurm", time="02:00:00")
    with pytest.raises(SpecError, match="partition `low` allows 3600 s"):
        plan(repository, cluster=cluster, site=site)


def test_a_relative_layout_is_absolute_in_the_script(repository, monkeypatch):
    monkeypatch.chdir(repository)
    made = plan(Path.cwd())
    assert RunLayout(made.layout.root).root.is_absolute()
