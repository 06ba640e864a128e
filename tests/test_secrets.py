"""A secret is in no file of a run: not of its configuration, its code, its diff or its journal."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ftslurm.errors import SpecError
from ftslurm.files import write_json
from ftslurm.run import secret
from ftslurm.run.layout import RunLayout
from ftslurm.run.secret import open_record, reference, references, resolve, without_secrets
from ftslurm.run.spec import ClusterSpec, RunSpec, to_dict
from ftslurm.scheduler import open_scheduler
from ftslurm.submit.compose import compose
from ftslurm.submit.freeze import freeze, plan_run
from ftslurm.submit.secret_files import has_secret_name
from ftslurm.submit.snapshot import copy, plan_snapshot

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 90

PLANTED = "planted-5ecret-value"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(secret, "_known", {})


def where_it_is(folder, value=PLANTED):
    """Every file or link below `folder` that holds the value."""
    found = []
    for path in folder.rglob("*"):
        data = os.fsencode(path.readlink()) if path.is_symlink() else b""
        if path.is_file():
            data += path.read_bytes()
        if value.encode() in data:
            found.append(str(path.relative_to(folder)))
    return found


# --- references: unresolved on disk, resolved in a rank's memory


def test_references_are_resolved_wherever_they_are_in_user_values():
    environ = {"MY_KEY": "k-1234", "HOST_TOKEN": "t"}
    value = {
        "key": "${oc.env:MY_KEY}",
        "url": "https://u:${oc.env:MY_KEY}@${oc.env:HOST_TOKEN}/x",
        "deep": [{"more": ["${oc.env:MY_KEY}"]}],
        "number": 3,
    }
    assert resolve(value, environ, key="user") == {
        "key": "k-1234",
        "url": "https://u:k-1234@t/x",
        "deep": [{"more": ["k-1234"]}],
        "number": 3,
    }


@pytest.mark.parametrize(
    "default, value",
    [("none", "none"), ("", ""), (None, None), ("a,b}c", "a,b}c"), ('say "x"', 'say "x"')],
)
def test_a_default_survives_the_way_over_the_disk(default, value):
    assert resolve(reference("MY_KEY", default), {}, key="user.k") == value
    assert resolve(reference("MY_KEY", default), {"MY_KEY": "set"}, key="user.k") == "set"


def test_a_secret_that_the_ranks_do_not_have_is_named():
    with pytest.raises(SpecError, match=r"^user\.a\[1\] is `\${oc.env:MY_KEY}`, but MY_KEY is not"):
        resolve({"a": ["x", "${oc.env:MY_KEY}"]}, {}, key="user")


def test_what_is_written_later_is_without_what_was_resolved():
    resolve("${oc.env:MY_KEY} ${oc.env:PASS}", {"MY_KEY": "k-1234", "PASS": "no"}, key="user")
    assert without_secrets("401 for k-1234, no more") == "401 for ${oc.env:MY_KEY}, no more"


def test_a_rank_reads_its_record_with_the_secrets_in_place(tmp_path):
    layout = RunLayout(tmp_path)
    spec = to_dict(RunSpec(user={"key": "${oc.env:MY_KEY}"}))
    write_json(
        layout.run_json, {"schema_version": 1, "run_id": "r", "spec": spec, "scheduler": "local"}
    )
    assert open_record(layout, {"MY_KEY": "k-1"}).spec.user == {"key": "k-1"}


def test_references_are_found_by_key():
    values = {"a": {"b": ["${oc.env:X_KEY}"]}, "user": {"c": "${oc.env:Y_KEY,1} ${oc.env:Z_KEY}"}}
    assert list(references(values)) == [
        ("a.b[0]", "X_KEY"), ("user.c", "Y_KEY"), ("user.c", "Z_KEY"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "override, kept",
    [
        ("user.x=${oc.env:MY_KEY}", "${oc.env:MY_KEY}"),
        ("user.x=${oc.env:my_api_key}", "${oc.env:my_api_key}"),
        ('user.x="${oc.decode:${oc.env:MY_KEY}}"', "${oc.env:MY_KEY}"),
        ('user.x="${oc.env:NOT_THERE,${oc.env:MY_KEY}}"', "${oc.env:MY_KEY}"),
        ('user.x="${oc.env:MY_KEY,${oc.env:TEAM}}"', "${oc.env:MY_KEY,blue}"),
        ("user.x=${oc.env:MY_KEY,null}", "${oc.env:MY_KEY,null}"),
        ("user.x=${oc.env:DATABASE}", "${oc.env:DATABASE}"),
        ("user.x=${oc.env:TEAM}", "blue"),
    ],
)
def test_no_way_of_asking_for_a_secret_puts_it_on_disk(monkeypatch, override, kept):
    monkeypatch.setenv("MY_KEY", PLANTED)
    monkeypatch.setenv("my_api_key", PLANTED)
    monkeypatch.setenv("DATABASE", f"postgres://me:{PLANTED}@host/db")
    monkeypatch.setenv("TEAM", "blue")
    spec, text = compose([override])
    assert spec.user["x"] == kept
    assert PLANTED not in text and PLANTED not in str(to_dict(spec))


def test_what_omegaconf_writes_for_a_reference_resolves_in_a_rank(monkeypatch):
    monkeypatch.setenv("MY_KEY", PLANTED)
    spec, _ = compose(["user.x=${oc.env:MY_KEY}", "user.y=${user.x}", "user.z=a-${user.y}"])
    found = resolve(spec.user, os.environ, key="user")
    assert found == {"x": PLANTED, "y": PLANTED, "z": f"a-{PLANTED}"}


@pytest.mark.parametrize("key", ["cluster.comment", "name", "cluster.env.WANDB"])
def test_a_secret_outside_the_users_own_values_is_refused(monkeypatch, key):
    monkeypatch.setenv("MY_KEY", PLANTED)
    with pytest.raises(SpecError, match="takes its value from MY_KEY, which may be a secret"):
        compose([f"{key}=${{oc.env:MY_KEY}}"])


# --- files that may hold secrets


@pytest.mark.parametrize(
    "name",
    [
        ".env", ".ENV", ".env.local", ".env-prod", ".env~", "#.env#", ".envrc", "sub/.Env",
        "prod.env", "deploy/Server.KEY", "server.key.bak", "tls.pem.old", "id_rsa", "ID_ED25519",
        "id_rsa-work", "id_ecdsa_sk", ".netrc", "_netrc", ".pgpass", "kubeconfig",
        "my-secrets.yaml", "aws_credentials", "password.txt", "api_key", "openai-apikey.txt",
        "hf_token", "token.json",
        "my.service-account.json", ".ssh/config", ".aws/config", "conf/secrets/prod.yaml",
        ".env/prod", "store.jks", "x.ppk",
    ],
)  # fmt: skip
def test_a_file_with_such_a_name_is_left_out(name):
    assert has_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "secrets.py", "secrets/__init__.py", "credentials.pyi", "conf/token.yaml", "tokenizer.json",
        "added_tokens.json", "special_tokens_map.json", "keyboard.txt", "monkey.yaml", "env.yaml",
        "environment.yml", "conf/env/prod.yaml", "passport.txt", "README.md", "key.py", "keys.yaml",
    ],
)  # fmt: skip
def test_source_and_configuration_are_not_taken_for_secrets(name):
    assert not has_secret_name(name)


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "protocol.file.allow=always"]  # fmt: skip # noqa: E501
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def write(root, **texts):
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{PLANTED}\n-----END OPENSSH PRIVATE KEY-----\n"
ENV = f"API_KEY={PLANTED}\n"


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repo"
    write(
        root, **{"mytrain.py": "def train(session): ...\n", "sub/work.py": "train = 1", ".env": ENV}
    )
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "first")
    return root


def frozen(folder, entry="mytrain:train"):
    spec = RunSpec(entry=entry, cluster=ClusterSpec(scheduler="local"))
    scheduler = open_scheduler("local")
    plan = plan_run(spec, "name: run\n", scheduler, scheduler.site(), folder=folder)
    freeze(plan)
    return plan


def modified(root):
    write(root, **{".env": f"{ENV}# more\n"})


def modified_and_staged(root):
    modified(root)
    git(root, "add", "-A")


def removed_from_git_too(root):
    git(root, "rm", "-q", ".env")


def removed_from_git_only(root):
    git(root, "rm", "-q", "--cached", ".env")


def deleted(root):
    (root / ".env").unlink()


def renamed_in_git(root):
    git(root, "mv", ".env", "settings.ini")


def renamed_and_edited(root):
    git(root, "mv", ".env", "settings.ini")
    write(root, **{"settings.ini": f"{ENV}x=1\n"})


def moved_without_git(root):
    (root / ".env").rename(root / "settings.ini")


def copied(root):
    write(root, **{"notes/old.txt": ENV})


def untracked_in_another_case(root):
    write(root, **{"sub/.ENV.prod": ENV})


def in_a_folder_of_secrets(root):
    write(root, **{"conf/secrets/prod.yaml": ENV})


def a_private_key_by_its_name(root):
    write(root, **{"deploy/server.key": KEY})


def a_private_key_by_its_first_line(root):
    write(root, **{"deploy/host": KEY})


def a_private_key_that_was_removed(root):
    write(root, **{"deploy/host": KEY, "deploy/notes.md": f"```\n{KEY}```\n"})
    git(root, "add", "-A")
    git(root, "commit", "-qm", "with keys")
    git(root, "rm", "-rq", "deploy")


def behind_links(root):
    (root / "conf").symlink_to(".env")
    (root.parent / "far.env").write_text(ENV)
    (root / "far").symlink_to(root.parent / "far.env")
    (root / "up").symlink_to("sub/../../far.env")


def shown_by_the_users_own_git_settings(root):
    modified(root)
    show = root.parent / "show"
    show.write_text(f"#!/bin/sh\ncat {root}/.env\n")
    show.chmod(0o755)
    git(root, "config", "diff.external", str(show))
    git(root, "config", "color.ui", "always")
    write(root, **{"mytrain.py": "def train(session): return 1\n"})


def in_a_submodule(root):
    inner = root.parent / "inner"
    write(inner, **{"lib.py": "", ".env": f"API_KEY={PLANTED}\n"})
    git(inner, "init", "-q")
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "inner")
    git(root, "submodule", "add", "-q", str(inner), "inner")
    git(root, "commit", "-qm", "with a submodule")
    git(root, "config", "diff.submodule", "diff")
    write(root, **{"inner/.env": f"{ENV}# changed\n"})
    git(root / "inner", "commit", "-qam", "changed")


def in_a_repository_inside(root):
    write(root, **{"nested/lib.py": "", "nested/.env": ENV})
    git(root / "nested", "init", "-q")


@pytest.mark.parametrize(
    "hide",
    [
        modified, modified_and_staged, removed_from_git_too, removed_from_git_only, deleted,
        renamed_in_git, renamed_and_edited, moved_without_git, copied, untracked_in_another_case,
        in_a_folder_of_secrets, a_private_key_by_its_name, a_private_key_by_its_first_line,
        a_private_key_that_was_removed, behind_links, shown_by_the_users_own_git_settings,
        in_a_submodule, in_a_repository_inside,
    ],
)  # fmt: skip
def test_neither_copy_nor_diff_holds_what_was_in_a_secret_file(repository, hide, tmp_path):
    hide(repository)
    planned = plan_snapshot(repository, entry="mytrain:train")
    copy(planned, tmp_path / "code")
    assert where_it_is(tmp_path / "code") == []
    assert PLANTED.encode() not in planned.diff
    assert {"mytrain.py", "sub/work.py"} <= {source.name for source in planned.sources}


def test_no_file_of_a_frozen_run_holds_a_secret(repository):
    for hide in (modified, copied, a_private_key_by_its_name, a_private_key_by_its_first_line):
        hide(repository)
    assert where_it_is(frozen(repository).layout.root) == []


def test_a_secret_file_above_the_folder_that_is_submitted_from_stays_there(repository):
    assert where_it_is(frozen(repository / "sub", entry="work:train").layout.root) == []


def test_without_git_a_package_leaves_its_secret_files_and_says_so(tmp_path):
    write(
        tmp_path,
        **{"pkg/__init__.py": "train = 1", "pkg/.env": ENV, "pkg/host": KEY, "pkg/a.txt": ENV},
    )
    plan = frozen(tmp_path, entry="pkg:train")
    assert plan.snapshot.left_out == ["pkg/.env", "pkg/a.txt", "pkg/host"]
    assert where_it_is(plan.layout.root) == []


def test_the_diff_still_holds_all_else(repository):
    modified(repository)
    write(repository, **{"mytrain.py": "def train(session): return 1\n", "sub/work.py": "x = 1\n"})
    difference = (frozen(repository).layout.submit / "code.diff").read_text()
    assert "return 1" in difference and "x = 1" in difference and ".env" not in difference


# --- a whole run

RANK = f"""
import sys
from ftslurm.run.rank import RankEnvironment, stop_flag
from ftslurm.run.secret import open_record
def main():
    env = RankEnvironment.read()
    user = open_record(env.layout).spec.user
    assert user["again"] == user["key"] and len(user["key"]) == {len(PLANTED)}, "not resolved"
    if env.rank == 0:
        print("rank 0 has it", flush=True)
    raise RuntimeError(f"401 for https://me:{{user['again']}}@host")
"""


def test_no_file_of_a_run_that_has_ended_holds_a_secret_that_its_ranks_had(tmp_path):
    write(tmp_path, **{"myrank.py": RANK, ".env": ENV, "id_rsa": KEY, "notes.txt": ENV})
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "myrank.py", ".env")
    git(tmp_path, "commit", "-qm", "first")
    write(tmp_path, **{".env": f"{ENV}OTHER={PLANTED}\n"})
    argv = [
        sys.executable, "-m", "ftslurm", "submit", "cluster=local", "cluster.tasks_per_node=2",
        "entry=rank:myrank:main", "recovery.max_failures=0", "user.key=${oc.env:MY_KEY}",
        "user.again=${user.key}", "--json",
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "MY_KEY": PLANTED}
    done = subprocess.run(
        argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    layout, scheduler = RunLayout(Path(record["run_dir"])), None
    scheduler = open_scheduler("local", run_dir=layout.root)
    deadline = time.monotonic() + DEADLINE_S
    while not scheduler.job_state(record["job_id"]).is_ended:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "rank 0 has it" in (layout.attempt(1).logs / "rank-0.log").read_text()
    error = json.loads((layout.attempt(1).ranks / "rank-00000.json").read_text())
    assert error["message"] == "401 for https://me:${oc.env:MY_KEY}@host"
    assert "401 for" in json.loads(layout.attempt(1).decision_json.read_text())["reason"]
    assert where_it_is(layout.root) == []
