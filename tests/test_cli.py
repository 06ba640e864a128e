"""What becomes of a verb whose words nobody takes: it is done, and is not to be done again."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftslurm import cli

ROOT = Path(__file__).resolve().parent.parent
VERB = "import sys; from ftslurm import cli; cli.VERBS['x'] = ('x:main', ''); sys.exit(cli.main())"


@pytest.fixture
def verb(tmp_path):
    """argv of a verb that leaves a file and says a word; then come more lines of it."""

    def made(*more):
        lines = ["import pathlib", "def main(argv):", "    pathlib.Path('done').touch()",
                 "    print('a word')", *(f"    {line}" for line in more)]  # fmt: skip
        (tmp_path / "x.py").write_text("\n".join([*lines, "    return 0"]))
        return [sys.executable, "-c", VERB, "x"]

    return made


def ended(argv, folder, **settings):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    env.pop("PYTHONUNBUFFERED", None)
    settings = {"stderr": subprocess.PIPE, "text": True, "timeout": 30, **settings}
    return subprocess.run(argv, cwd=folder, env=env, check=False, **settings)


def test_a_reader_that_has_seen_enough_hears_no_complaint(verb, tmp_path):
    for more in ((), ("print('word ' * 10_000)",)):
        reader, writer = os.pipe()
        os.close(reader)
        done = ended(verb(*more), tmp_path, stdout=writer)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_the_terminal_cannot_show_ends_no_verb(verb, tmp_path):
    for encoding in ("ascii", "latin-1", "utf-8"):
        argv = ["env", f"PYTHONIOENCODING={encoding}", *verb(r"print('\u8bad-\udce9-7')")]
        done = ended(argv, tmp_path, stdout=subprocess.PIPE, encoding="utf-8", errors="replace")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("?-?-7\n" if encoding != "utf-8" else "\u8bad-?-7\n")


def test_a_path_of_odd_bytes_comes_out_as_it_is_where_python_lets_it(verb, tmp_path):
    argv = ["env", "PYTHONIOENCODING=utf-8:surrogateescape", *verb(r"print('/runs/\udce9')")]
    done = ended(argv, tmp_path, stdout=subprocess.PIPE, text=False)
    assert (done.returncode, done.stdout[-8:]) == (0, b"/runs/\xe9\n")


def test_a_full_disk_below_stdout_has_nobody_do_again_what_is_done(verb, tmp_path):
    with open("/dev/full", "w") as full:
        done = ended(verb(), tmp_path, stdout=full)
    assert done.returncode == 1 and (tmp_path / "done").exists()
    assert "it is done, and what was to be said of it could not be written" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_verb_that_fails_meanwhile_is_still_to_be_tried_again(verb, tmp_path):
    done = ended(verb("raise OSError('the file server is away')"), tmp_path)
    assert done.returncode == 75
    assert done.stderr == "ftslurm: error: the file server is away; try again\n"


@pytest.mark.parametrize(("number", "code", "advice"), [
    (errno.ELOOP, 75, "mend the link, or try again where it is an automounter's"),
    (errno.ENAMETOOLONG, 2, "name a shorter path"),
    (errno.ENOTDIR, 2, "a file stands where the path has a folder: name another path"),
    (errno.EISDIR, 2, "name a file"),
    (errno.EEXIST, 75, "move away what stands there, then try again"),
    (errno.EACCES, 75, "see whether you may, then try again"),
    (errno.EIO, 75, "try again"),
])  # fmt: skip
def test_what_never_passes_is_not_to_be_tried_again(number, code, advice, monkeypatch, capsys):
    def fail(arguments):
        raise OSError(number, "so it is", "/runs/x")

    monkeypatch.setitem(sys.modules, "verb_x", SimpleNamespace(main=fail))
    monkeypatch.setitem(cli.VERBS, "x", ("verb_x:main", ""))
    assert cli.main(["x"]) == code
    assert capsys.readouterr().err.endswith(f"so it is: '/runs/x'; {advice}\n")


def test_a_verb_that_is_interrupted_ends_in_a_sentence(verb, tmp_path):
    done = ended(verb("raise KeyboardInterrupt"), tmp_path)
    assert done.returncode == 130 and done.stderr == "ftslurm: x was interrupted\n"


def test_without_a_stdout_a_verb_ends_as_ever(verb, tmp_path):
    argv = ["sh", "-c", 'exec "$@" >&-', "sh", *verb()]
    done = ended(argv, tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and (tmp_path / "done").exists()
