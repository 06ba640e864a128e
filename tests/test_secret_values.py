"""A secret that the submitter's shell has put into a text is found, and what is none is not."""

from pathlib import Path

import pytest

from ftslurm.errors import SpecError
from ftslurm.run.secret import held_secret, texts
from ftslurm.submit.compose import compose
from ftslurm.submit.keepable import check_keepable

ROOT = Path(__file__).resolve().parent.parent
PLANTED = "planted-5ecret-value"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("user.wandb_api_key={}", "user.wandb_api_key"),
        ("user.deep=[1,{{x: a-{}-b}}]", "user.deep[1].x"),
        ("user.named={{{}: 1}}", "user.named"),
        ('cluster.setup=["wandb login {}"]', "cluster.setup[0]"),
        ("cluster.comment={}", "cluster.comment"),
        ("cluster.env.WANDB={}", "cluster.env.WANDB"),
    ],
)
def test_a_secret_that_the_shell_put_into_an_override_is_refused(monkeypatch, override, key):
    monkeypatch.setenv("WANDB_API_KEY", PLANTED)
    with pytest.raises(SpecError) as caught:
        compose([override.format(PLANTED)])
    says = str(caught.value)
    assert says.startswith(f"{key} holds the value of WANDB_API_KEY") and PLANTED not in says
    way_out = "write '${oc.env:WANDB_API_KEY}'" if key.startswith("user") else "leave it to the env"
    assert way_out in says and "env -u WANDB_API_KEY" in says


@pytest.mark.parametrize(
    "secret", ['say "5ecret"\\', "two\nlines\tof 5ecret", "geh\u00e4im-5ecret"]
)
def test_a_secret_of_signs_that_a_file_writes_in_another_way_is_refused(monkeypatch, secret):
    monkeypatch.setenv("MY_TOKEN", secret)
    with pytest.raises(SpecError, match="user.x holds the value of MY_TOKEN"):
        check_keepable({"user": {"x": f"a {secret} b"}})


def test_an_own_config_file_that_holds_a_secret_is_refused_as_well(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\nuser: {{t: {PLANTED}}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"user\.t holds the value of HF_TOKEN"):
        compose(["experiment=mine"], tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567"),
        ("HF_TOKEN", "hf_AbCdEfGhIjKlMnOp"),
        ("AWS_SECRET_ACCESS_KEY", "/wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"),
        ("SLURM_JWT", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJ4In0.c2ln"),
        ("AUTHORIZATION", "Basic bWU6cHc5OQ=="),
        ("HF_TOKENIZER_TOKEN", "hf_AbCdEfGhIjKlMnOp"),
        ("MAIL_PASSWORD", "abcdefghijklmnop"),
        ("PASSPHRASE", "correct horse battery staple"),
        ("PROXY_AUTH", "me:hunter22"),
        ("DATABASE", "postgres://me:pw@host/db"),
        ("TOKEN_URL", "https://host/x?sig=abc12"),
    ],
)
def test_a_value_that_may_be_a_secret_is_found_in_a_text(name, value):
    assert held_secret(f"a {value} b", {"HOME": "/root", name: value}) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SSH_AUTH_SOCK", "/tmp/ssh-XXXXgone/agent.1234"),
        ("XAUTHORITY", "/home/me/.Xauthority9"),
        ("KRB5CCNAME", "FILE:/tmp/krb5cc_1000"),
        ("KRB5_KEYFILE", "FILE:/tmp/krb5cc_1000"),
        ("DBUS_SESSION_BUS_ADDRESS", "unix:path=/run/user/1000/bus"),
        ("SSH_ASKPASS", "/usr/libexec/openssh/askpass2"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "tests/test_secrets.py"),
        ("PASS_PATH", "/usr/bin:/opt/x9/bin"),
        ("GIT_AUTHOR_NAME", "Jane Q. Miller 3rd"),
        ("GIT_AUTHOR_EMAIL", "jane2@uni.example"),
        ("AUTH_MAIL", "jane.m2@uni.example"),
        ("SLURM_AUTH_TYPE", "auth/munge"),
        ("AUTH_METHOD", "kerberos"),
        ("KEY_POLICY", "Required"),
        ("TOKENIZER_NAME", "meta-llama/Llama-2-7b-hf"),
        ("TOKENS_PER_BATCH", "1048576x1"),
        ("NUM_KEYS", "100000000"),
        ("OS_AUTH_URL", "https://keystone.example:5000/v3"),
        ("API_KEY", "short12"),
        ("TEAM", "blue-team-2024"),
    ],
)
def test_what_is_no_secret_of_the_environment_may_be_in_a_text(monkeypatch, name, value):
    monkeypatch.chdir(ROOT)
    assert held_secret(f"a {value} b", {name: value}) is None


def test_texts_are_found_by_key_with_the_names_of_keys():
    values = {"a": {"b": ["x", 1, {"c": "y"}]}, "n": None}
    assert list(texts(values)) == [
        ("", "a"), ("a", "b"), ("a.b[0]", "x"), ("a.b[2]", "c"), ("a.b[2].c", "y"), ("", "n"),
    ]  # fmt: skip
