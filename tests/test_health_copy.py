"""The copy that root runs: nobody else's to change, and not to be led astray.

Where there is a Python 3.9, it is the one that the copy runs with.
"""

import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from fakes.nvml.nodes import build
from health_probes import ProbedNode
from node_copy import PYTHON, ROOT, call
from test_python39 import interpreters, is_39

from ftslurm.health.settings import HealthSettings
from ftslurm.health.settings_file import to_record

SITE = sorted((ROOT / "slurm" / "site").glob("*.sh"))
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root installs what root runs")


@pytest.fixture(scope="module")
def python():
    """3.9 by its real path, since a shim of pyenv wants an environment; else this system's."""
    for found in interpreters():
        if is_39(found):
            return Path(call(found, "-c", "import sys, os; print(os.path.realpath(sys.executable))")
                        .stdout.strip())  # fmt: skip
    return PYTHON


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """Eight healthy GPUs, in a library that needs nothing of the environment."""
    folder = tmp_path_factory.mktemp("node")
    library = build(folder, f'-DSTATE_FILE="{folder / "gpus"}"')
    node = ProbedNode(folder, str(library), gpus=8)
    node.now = time.time()
    node.boot("boot-one")
    return node


@pytest.fixture(scope="module")
def copy(tmp_path_factory, python, node):
    """Installed from a fresh tree, by Python alone; the tree is gone when the copy is used."""
    folder = tmp_path_factory.mktemp("installed")
    tree, prefix = folder / "tree", folder / "opt" / "ftslurm"
    left_out = shutil.ignore_patterns("__pycache__", "cluster")
    for name in ("ftslurm", "slurm"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    (tree / "health.json").write_text(json.dumps(to_record(node.settings)))
    (folder / "bin").mkdir()
    scontrol = folder / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    scontrol.chmod(0o755)
    argv = ["--prefix", prefix, "--settings", tree / "health.json", "--python", python]
    script = [PYTHON, "-I", "-S", tree / "slurm/install_node.py"]
    # A caller with the strictest umask, and Slurm in a folder of its own.
    conf = folder / "bin" / "slurm it.conf"
    conf.touch()
    environ = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_CONF": str(conf)}
    done = call("sh", "-c", 'umask 077; exec "$@"', "sh", *script, *argv, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{prefix}/bin/ftslurm-health is installed") and not done.stderr
    shutil.rmtree(tree)
    return prefix


def healthy(copy, **more):
    done = call(copy / "bin" / "ftslurm-health", "probe", **more)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


# what is there


def test_it_looks_at_eight_gpus_with_the_standard_library_alone(copy, python):
    assert healthy(copy).startswith("OK - 8 GPUs, nothing found (")
    record = json.loads(call(copy / "bin/ftslurm-health", "probe", "--json").stdout)
    assert (record["word"], record["gpus"], record["complaints"]) == ("ok", 8, [])
    assert f"python={python}\n" in (copy / "bin/ftslurm-health").read_text()


def test_all_of_it_is_roots_and_nobody_else_may_write(copy):
    runnable = set((copy / "site").iterdir()) | set((copy / "bin").iterdir())
    assert {path.name for path in runnable} == {
        "ftslurm-health", "prolog.sh", "epilog.sh", "healthcheck.sh",
    }  # fmt: skip
    places = [copy, *copy.rglob("*")]
    assert len(places) > 80
    for path in places:
        found = path.lstat()
        assert (found.st_uid, found.st_gid) == (0, 0), path
        mode = stat.S_IMODE(found.st_mode)
        if path.is_symlink():
            assert path == copy / "lib", path
        elif path.is_dir() or path in runnable:
            assert mode == 0o755, path
        else:
            assert mode == 0o644, path


def test_it_has_what_a_node_needs_and_no_more(copy):
    modules = {path.relative_to(copy / "lib/ftslurm").as_posix()
               for path in (copy / "lib/ftslurm").rglob("*.py")}  # fmt: skip
    health = {f"health/{path.name}" for path in (ROOT / "ftslurm/health").glob("*.py")}
    assert modules == health | {"__init__.py", "errors.py", "faults.py", "files.py"}
    compiled = [path.stem.partition(".")[0] for path in copy.rglob("*.pyc")]
    assert len(compiled) == len(modules)


def test_a_look_writes_nothing_into_it(copy):
    before = {path: path.lstat().st_mtime_ns for path in copy.rglob("*")}
    healthy(copy)
    assert {path: path.lstat().st_mtime_ns for path in copy.rglob("*")} == before


def test_what_it_lacks_is_a_sentence(copy, tmp_path):
    done = call(copy / "bin/ftslurm-health", "settings", "--out", tmp_path / "x")
    assert done.returncode == 3 and done.stderr.count("\n") == 1
    assert "this copy has only what a node needs" in done.stderr


def test_any_user_may_look_with_it(copy):
    """In a folder that one may enter; without a right on the state, and without acting."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        prefix = Path(name) / "ftslurm"
        prefix.parent.chmod(0o755)
        shutil.copytree(copy, prefix, symlinks=True)
        (prefix / "etc" / "health.json").write_text(json.dumps(to_record(HealthSettings())))
        command = prefix / "bin" / "ftslurm-health"
        command.write_text(
            re.sub(r"^python=.*", f"python={PYTHON}", command.read_text(), flags=re.M)
        )
        switch = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
        done = call(*switch, command, "probe", "--explain")
        assert "look       probe" in done.stdout, done.stderr
        assert "complaint" not in done.stdout and not done.stderr


def test_slurms_own_places_are_known(copy, tmp_path):
    """A HealthCheckProgram has no SLURM_CONF, and Slurm may be anywhere."""
    slurm = copy.parent.parent / "bin"
    probe = (
        (copy / "bin" / "ftslurm-health")
        .read_text()
        .replace('"$python" -I', 'sh -c env "$python" -I')
    )
    script = tmp_path / "bin" / "ftslurm-health"
    script.parent.mkdir()
    script.write_text(probe)
    said = call("sh", script, env={}, cwd=tmp_path).stdout
    assert "PWD=/\n" in said  # no folder of anybody's is held by a look
    assert '"$python" -I -S "$prefix/lib/' in (copy / "bin" / "ftslurm-health").read_text()
    assert f"PATH={slurm}:/usr/sbin:/usr/bin:/sbin:/bin\n" in said
    assert f"SLURM_CONF={slurm}/slurm it.conf\n" in said
    assert "SLURM_CONF=/else\n" in call("sh", script, env={"SLURM_CONF": "/else"}).stdout


# what a user may plant

MARK = "import pathlib; pathlib.Path({!r}).touch()\n"
LIBRARY = """#include <fcntl.h>
__attribute__((constructor)) static void mark(void) { open("%s", O_CREAT | O_WRONLY, 0644); }
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """(environment, folder, mark): whatever of a user's is executed leaves the mark."""
    folder = tmp_path_factory.mktemp("planted") / "theirs"
    mark = folder.parent / "mark"
    (folder / "ftslurm" / "health").mkdir(parents=True)
    names = ("json", "sitecustomize", "usercustomize", "argparse", "signal", "start")
    for name in (*names, "ftslurm/__init__", "ftslurm/health/__init__", "ftslurm/health/command"):
        (folder / f"{name}.py").write_text(MARK.format(str(mark)))
    for name in ("python3", "env", "dirname", "readlink", "scontrol", "nvidia-smi"):
        (folder / name).write_text(f"#!/bin/sh\n: > {mark}\n")
        (folder / name).chmod(0o755)
    (folder / "profile").write_text(f": > {mark}\n")
    source = folder / "evil.c"
    source.write_text(LIBRARY % mark)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    environ = {
        "PATH": f"{folder}:/usr/bin:/bin", "PYTHONPATH": str(folder), "HOME": str(folder),
        "PYTHONSTARTUP": str(folder / "json.py"), "PYTHONUSERBASE": str(folder),
        "PYTHONINSPECT": "1", "LD_LIBRARY_PATH": str(folder), "BASH_ENV": str(folder / "profile"),
        "ENV": str(folder / "profile"), "FTSLURM_FAULTS": "enospc@write_file",
    }  # fmt: skip
    return environ, folder, mark


@pytest.fixture
def traps(planted):
    planted[2].unlink(missing_ok=True)
    return planted


def test_the_traps_would_catch(traps):
    environ, folder, mark = traps
    for argv in (
        ["python3"],
        [PYTHON, "-c", "import json"],
        ["bash", "-c", ":"],
        [PYTHON, "-I", "-c", "import ctypes; ctypes.CDLL('libnvidia-ml.so.1')"],
    ):
        mark.unlink(missing_ok=True)
        call("env", *argv, env=environ, cwd=folder)
        assert mark.exists(), argv


@pytest.mark.parametrize("word", ["probe", "prolog", "epilog", "periodic"])
def test_nothing_of_a_users_is_executed(copy, traps, node, word, tmp_path):
    environ, folder, mark = traps
    settings = tmp_path / "health.json"
    # By its name, which the loader looks for; and a state of its own.
    record = {**to_record(node.settings), "nvml_library": "libnvidia-ml.so.1"}
    settings.write_text(json.dumps({**record, "state_dir": str(tmp_path / "state")}))
    script = {"probe": "bin/ftslurm-health", "periodic": "site/healthcheck.sh"}
    argv = [copy / script.get(word, f"site/{word}.sh")]
    argv += ["probe"] if word == "probe" else []
    done = call(*argv, "--settings", settings, "--explain", env=environ, cwd=folder)
    assert not mark.exists()
    assert "look       " + word in done.stdout, done.stderr


def test_what_slurm_says_of_the_job_is_handed_on(copy, node, tmp_path):
    settings = tmp_path / "health.json"
    record = {**to_record(node.settings), "state_dir": str(tmp_path / "state")}
    settings.write_text(json.dumps(record))
    environ = {
        "SLURM_JOB_ID": "77", "SLURM_JOB_USER": "alice smith", "SLURM_JOB_GPUS": "0,1",
        "SLURMD_NODENAME": "n0004", "SLURM_JOB_UID": "1000",
    }  # fmt: skip
    done = call(copy / "bin/ftslurm-health", "prolog", "--settings", settings, "--json",
                env=environ)  # fmt: skip
    record = json.loads(done.stdout)
    assert (record["job"], record["node"]) == ("77", "n0004")


# what the site's scripts hand to Slurm


@pytest.fixture
def stub(tmp_path):
    """The site's scripts beside a command that ends as it is told."""
    for name in ("bin", "site"):
        (tmp_path / name).mkdir()
    for script in SITE:
        shutil.copy(script, tmp_path / "site")

    def ends_with(body):
        command = tmp_path / "bin" / "ftslurm-health"
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
        return tmp_path / "site"

    return ends_with


@pytest.mark.parametrize(("body", "code"), [
    ("exit 0", 0), ("exit 86", 1), ("exit 1", 0), ("exit 2", 0), ("exit 3", 0), ("exit 127", 0),
    ("kill -9 $$", 0), ("kill -ALRM $$", 0), ("exec /no/such/python", 0),
])  # fmt: skip
def test_only_a_sick_node_is_taken_out_of_service_never_one_whose_probe_broke(stub, body, code):
    site = stub(body)
    # Its own PATH cannot be led astray, so the log of this machine is taken out of the script.
    log = site.parent / "log"
    for script in site.iterdir():
        script.write_text(script.read_text().replace("timeout 2 logger", f"echo >> {log}"))
    assert call(site / "prolog.sh").returncode == code
    assert call(site / "epilog.sh").returncode == code
    assert call(site / "healthcheck.sh").returncode == 0
    said = log.read_text() if log.exists() else ""
    assert said.count("the look broke, exit code") == (0 if body == "exit 0" else 3 - 2 * code)


@pytest.mark.parametrize("script", ["prolog.sh", "epilog.sh"])
def test_a_python_that_cannot_start_takes_no_node_out_of_service(stub, tmp_path, script):
    """It ends with 1 itself: here its standard library is not where it looks."""
    empty = tmp_path / "python"
    empty.mkdir()
    python = f'PYTHONHOME={empty} exec "{PYTHON}" -S -c ""'
    site = stub(python)
    assert call(site.parent / "bin" / "ftslurm-health").returncode == 1
    assert call(site / script).returncode == 0


def test_the_scripts_work_through_a_link_and_hand_on_arguments(stub, tmp_path):
    site = stub('echo "$@"')
    link = tmp_path / "50-ftslurm"
    link.symlink_to(site / "epilog.sh")
    assert call(link, "--settings", "/x y").stdout == "epilog --settings /x y\n"


@pytest.mark.parametrize("script", SITE, ids=lambda path: path.name)
def test_a_script_is_short_and_brings_its_own_path(script):
    lines = script.read_text().splitlines()
    own = [line for line in lines if re.fullmatch(r"PATH=(\S*)/usr/sbin:/usr/bin:/sbin:/bin", line)]
    assert len(lines) < 60 and len(own) == 1


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say():
    done = call("shellcheck", *SITE)
    assert done.returncode == 0, done.stdout
