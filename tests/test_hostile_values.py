"""Whatever a spec holds reaches bash, srun and sbatch as it is, or is refused by its key."""

import dataclasses
import shlex
import subprocess
import tempfile
import typing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.errors import SpecError
from ftslurm.run.spec import ClusterSpec, RecoverySpec, RunSpec
from ftslurm.run.spec_check import check
from ftslurm.scheduler.launch import LOGS, nodes_argv, ranks_argv
from ftslurm.submit.render import check_values, rank_python, render_script, sbatch_options

HOSTILE = [
    "a b",
    "$(touch pwned)",
    "`touch pwned`",
    "a; touch pwned",
    "a & touch pwned #",
    "' touch pwned '",
    '"; touch pwned; "',
    "'\"'\"'",
    "\\",
    "\\'",
    "$HOME ${IFS} $1",
    "*",
    "~/x",
    "!!",
    "{a,b}",
    "<(id)",
    "-x",
    "--wrap=id",
    "#SBATCH --uid=0",
    "%j%t",
    "naïve-ß-名前-🙂",
    "e\u0301",
    " ",
    "a\nb",
    "a\n#SBATCH --uid=0\ntouch pwned",
    "a\rb",
    "a\0b",
    "a\x1b[0m",
    "a\u2028b",
    "\ud800",
    "",
    "x" * 10_000,
    "{{ run_id }}",
    "{% for %}",
]
WITHOUT_AGENTS = RecoverySpec(agents=False)
# Called as `python -S -m ftslurm VERB`: answers for claim and recover.
PYTHON = """#!/bin/bash
case $4 in
  claim) echo go 1 n1 20001 0 ;;
  recover) echo done ;;
esac
"""
# srun, sbatch: note what they are given.
NOTES = """#!/bin/bash
printf '%s\\0' "$@" >"$NOTES/${0##*/}.argv"
env -0 >"$NOTES/${0##*/}.env"
"""
# What a hostile text is put into, where it cannot stand alone.
FRAMES = {
    "export": "ALL,X={}",
    "srun": "--x-option={}",
    "sbatch": "--x-option={}",
    "setup": None,  # bash by intent: see below
    "environment_dir": "/tmp/{}",
}


class Machine:
    """A folder with false commands and a run directory whose name is as hostile as it may be."""

    def __init__(self, folder, run_name="run"):
        self.folder = folder
        for name in ("bin", "notes", "cwd"):
            (folder / name).mkdir()
        for name, text in (("python", PYTHON), ("srun", NOTES), ("sbatch", NOTES)):
            self._command(folder / "bin" / name, text)
        self.python = str(folder / "bin" / "python")
        self.run_dir = folder / run_name
        (self.run_dir / "code").mkdir(parents=True)

    def _command(self, path, text):
        path.write_text(text)
        path.chmod(0o755)

    def rendered(self, spec):
        return render_script(
            spec,
            run_id="r",
            run_dir=self.run_dir,
            python=self.python,
            python_path=[self.run_dir / "code"],
            launch=ranks_argv(
                spec.cluster, WITHOUT_AGENTS, python=self.python, run_dir=self.run_dir
            ),
            on_nodes=nodes_argv(spec.cluster, WITHOUT_AGENTS),
        )

    def bash(self, *argv):
        environ = {
            "PATH": f"{self.folder / 'bin'}:/usr/bin:/bin",
            "NOTES": str(self.folder / "notes"),
            "HOME": "/nonexistent",
        }
        done = subprocess.run(
            ["bash", *argv], cwd=self.folder / "cwd", env=environ, capture_output=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert not list(self.folder.rglob("pwned*")), "the text was executed"

    def seen(self, name):
        data = (self.folder / "notes" / name).read_bytes().decode(errors="surrogateescape")
        return data.split("\0")[:-1]

    def variables(self):
        return dict(item.split("=", 1) for item in self.seen("srun.env"))

    def run_script(self, spec):
        script = self.folder / "train.sbatch"
        script.write_text(self.rendered(spec))
        self.bash(str(script))


def texts_of(kind):
    """Names of the fields that hold text, with a maker of a value around one text."""
    makers = {
        str: lambda text: text,
        typing.Optional[str]: lambda text: text,
        list[str]: lambda text: [text],
        dict[str, str]: lambda text: {"FIELD": text},
    }
    hints = typing.get_type_hints(kind)
    return {
        item.name: makers[hints[item.name]]
        for item in dataclasses.fields(kind)
        if hints[item.name] in makers
    }


def placed(cluster, key, text):
    frame = FRAMES.get(key, "{}")
    value = texts_of(ClusterSpec)[key](frame.replace("{}", text) if frame else text)
    return dataclasses.replace(cluster, **{key: value})


def accepted(machine, spec):
    """True: it may be rendered; False: refused by key."""
    try:
        check_values(spec, machine.run_dir)
        check(spec)
    except SpecError as error:
        assert str(error).isprintable() and len(str(error)) < 400, error
        return False
    return True


def assert_bash_sees(machine, spec):
    """The whole command line of the ranks, and every variable, as the spec has them."""
    cluster = spec.cluster
    machine.run_script(spec)
    logs = f"{machine.run_dir}/attempts/0001/logs"
    launch = ranks_argv(cluster, WITHOUT_AGENTS, python=machine.python, run_dir=machine.run_dir)
    prefix = [machine.python, "-m", "ftslurm.node.prefix", *cluster.container]
    rank = [rank_python(cluster, machine.python, None), "-u", "-m", "ftslurm.submit.rank"]
    argv = [*launch, *(prefix if cluster.container else []), *rank, f"{machine.run_dir}/submit"]
    assert machine.seen("srun.argv") == [word.replace(LOGS, logs) for word in argv][1:]
    variables = machine.variables()
    assert {name: variables[name] for name in cluster.env} == cluster.env
    assert variables["FTSLURM_RUN_DIR"] == str(machine.run_dir)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:24])
def test_a_hostile_text_in_every_key_is_seen_as_it_is_or_refused_by_the_key(text, tmp_path):
    machine = Machine(tmp_path)
    spec, taken = RunSpec(cluster=ClusterSpec(container=["true"])), []
    for key in texts_of(ClusterSpec):
        if key in ("scheduler", "signal", "time", "environment", "setup", "python", "exclude"):
            continue  # choices and shapes of their own, a file, and bash itself: see below
        if key in ("container_image", "mounts"):
            base = dataclasses.replace(spec.cluster, container=[], container_image="i")
            changed = placed(dataclasses.replace(base, rank_python="p"), key, text)
            if accepted(machine, dataclasses.replace(spec, cluster=changed)):
                only = Machine(Path(tempfile.mkdtemp(dir=tmp_path)))
                assert_bash_sees(only, RunSpec(cluster=changed))
            continue
        changed = dataclasses.replace(spec, cluster=placed(spec.cluster, key, text))
        if accepted(machine, changed):
            spec = changed
            taken.append(key)
    assert_bash_sees(machine, spec)
    options = sbatch_options(spec.cluster, log="/x/%j.out")
    machine.bash("-c", f"sbatch {shlex.join(options)}")
    assert machine.seen("sbatch.argv") == options
    bare = set(taken) - set(FRAMES) - {"env"}
    assert bool(bare) == (0 < len(text) < 5000 and text.isprintable()), taken


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:24])
def test_a_line_of_setup_is_run_as_the_one_line_it_is(text, tmp_path):
    machine = Machine(tmp_path)
    spec = RunSpec(cluster=ClusterSpec(setup=[f"export SEEN={shlex.quote(text)} # last"]))
    if accepted(machine, spec):
        machine.run_script(spec)
        assert machine.variables()["SEEN"] == text
    else:
        assert not text.isprintable() or len(text) > 4000


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text)[:24])
def test_a_folder_with_a_hostile_name_is_used_or_refused(text, tmp_path):
    try:
        machine = Machine(tmp_path, run_name=f"x{text}x")
    except (OSError, ValueError):
        return  # the file system refuses it
    spec = RunSpec(cluster=ClusterSpec(container=["true", "--bind={run_dir}:{run_dir}:ro"]))
    if accepted(machine, spec):
        machine.run_script(spec)
        assert machine.variables()["FTSLURM_RUN_DIR"] == str(machine.run_dir)
        assert f"--bind={machine.run_dir}:{machine.run_dir}:ro" in machine.seen("srun.argv")
    else:
        assert not text.isprintable() or set(text) & set("%\\:")


@pytest.mark.parametrize(
    "key", [name for name in texts_of(RunSpec) if name not in ("name", "run_id")]
)
def test_no_text_outside_of_cluster_reaches_the_script(key, tmp_path):
    machine = Machine(tmp_path)
    text = texts_of(RunSpec)[key]("'\"; touch pwned\n#SBATCH --uid=0")
    # A program's rank is started otherwise than one of a loop, whatever the program's words.
    plain = RunSpec(program=["true"]) if key == "program" else RunSpec()
    assert machine.rendered(RunSpec(**{key: text})) == machine.rendered(plain)


@given(
    text=st.text(
        st.one_of(
            st.sampled_from("'\"`$(){}[]<>|&;\\!*?~#= -%:,@\n\t"),
            st.characters(exclude_categories=["Cs"]),
        ),
        max_size=40,
    )
)
@settings(max_examples=40, deadline=None)
def test_any_text_is_seen_as_it_is_or_refused(text):
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        cluster = ClusterSpec(
            container=["true", text], env={"A": text}, comment=text, srun=[f"--x-option={text}"]
        )
        spec = RunSpec(cluster=cluster)
        if accepted(machine, spec):
            assert_bash_sees(machine, spec)
        else:
            assert not text or not text.isprintable() or "=" in text
