"""The batch script and sbatch's arguments, for friendly and for hostile values."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ftslurm.errors import SpecError
from ftslurm.health.settings import HealthSettings
from ftslurm.node.environment import Environment
from ftslurm.run.spec import PROGRAM_ENTRY, ClusterSpec, RecoverySpec, RunSpec
from ftslurm.scheduler.launch import (
    agents_argv,
    nodes_argv,
    preflight_argv,
    ranks_argv,
    standbys_argv,
)
from ftslurm.scheduler.protocol import Site
from ftslurm.submit.deadline import emergency_deadline_s
from ftslurm.submit.render import check_values, render_script, sbatch_options

TESTS = Path(__file__).resolve().parent
GOLDEN = TESTS / "golden"
HOSTILE = [
    "a b",
    "$(touch x)",
    '"',
    "'",
    "`id`",
    "a;b",
    "-x",
    "--wrap=id",
    "\\",
    "%j",
    "naïve-ß-名前",
    "#",
]
REFUSED = ["", "a\nb", "a\rb", "a\0b", "a\x1b[0m", "a\u2028b", "a\u00a0b", "\ud800", "x" * 10_000]


def spec(recovery=None, preflight="on_suspicion", **cluster):
    values = {"scheduler": "slurm", "nodes": 2, "tasks_per_node": 4, "cpus_per_task": 3, **cluster}
    return RunSpec(
        name="golden",
        cluster=ClusterSpec(**values),
        recovery=recovery or RecoverySpec(),
        health=HealthSettings(preflight=preflight),
    )


def rendered(
    chosen,
    *,
    run_dir=Path("/runs/golden-1"),
    python="/env/bin/python",
    environment=None,
    live_folder=None,
):
    return render_script(
        chosen,
        run_id="golden-20261129-150000-0a1b",
        run_dir=run_dir,
        python=python,
        python_path=[run_dir / "code", run_dir / "code" / "src"],
        launch=ranks_argv(chosen.cluster, chosen.recovery, python=python, run_dir=run_dir),
        on_nodes=nodes_argv(chosen.cluster, chosen.recovery),
        agents=agents_argv(chosen.cluster, chosen.recovery),
        standbys=standbys_argv(chosen.cluster, chosen.recovery),
        preflight=preflight_argv(chosen.cluster, chosen.recovery, chosen.health, run_dir=run_dir),
        environment=environment,
        live_folder=live_folder,
    )


# A site's all: modules, a container, an environment, a network, a spare node.
SITE = spec(
    gpus_per_task=1,
    spares=1,
    setup=["module load cuda/12.4 # site's own", "source /etc/site.sh"],
    env={"NCCL_IB_HCA": "mlx5", "GREETING": "it's"},
    interface="ib0",
    container=["bwrap", "--dev-bind", "/", "/", "--bind", "{run_dir}", "{run_dir}"],
    environment="/shared/env.tar",
)
UNPACKED = Environment(Path("/shared/env.tar"), Path("/tmp/ftslurm-1000-0123456789abcdef"))
SPECS = {
    "slurm": spec(gpus_per_node=4, mem="64G", time="1-02:00:00", signal="USR2", wait_s=30),
    "slurm-cpu": spec(),
    "slurm-alone": spec(RecoverySpec(agents=False), preflight="never"),
    "slurm-standby": spec(RecoverySpec(standby=True), gpus_per_node=4, spares=1),
    "local": spec(scheduler="local", nodes=1, tasks_per_node=2),
    "site": SITE,
}


def rendered_golden(name):
    return rendered(SPECS[name], environment=UNPACKED if name == "site" else None)


@pytest.mark.parametrize("name", SPECS)
def test_the_script_is_the_golden_one(name):
    golden = GOLDEN / f"train-{name}.sbatch"
    assert rendered_golden(name) == golden.read_text(), (
        f"look at the change, then mend {golden.name}"
    )


def test_what_decides_starts_without_site_unless_ftslurm_may_be_installed_there(tmp_path):
    decides = re.compile(r'"\$python"( -S)? -m (ftslurm(?:\.agent(?:\.keep)?)?) ')
    frozen, live = rendered(SPECS["slurm"]), rendered(SPECS["slurm"], live_folder=tmp_path)
    told = [("ftslurm", " -S"), ("ftslurm.agent.keep", " -S"), ("ftslurm.agent", " -S")]
    assert [(name, site) for site, name in decides.findall(frozen)] == told
    assert {site for site, _ in decides.findall(live)} == {""}
    assert '"$python" -u -m ftslurm.submit.rank ' in frozen, "it loads what is installed"
    program = replace(SPECS["slurm"], entry=PROGRAM_ENTRY, program=["true"])
    assert '"$python" -S -u -m ftslurm.submit.rank ' in rendered(program)
    assert '"$python" -u -m ftslurm.submit.rank ' in rendered(program, live_folder=tmp_path)


@pytest.mark.parametrize("name", SPECS)
def test_bash_and_shellcheck_accept_the_script(name, tmp_path):
    script = tmp_path / "train.sbatch"
    run_dir = Path('/runs/it\'s a "run"')
    script.write_text(rendered(SPECS[name], run_dir=run_dir, environment=UNPACKED))
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "inside", [{}, {"container": ["env"]}, {"container_image": "i", "rank_python": "python3"}]
)
def test_an_interpreter_of_the_archive_is_checked_only_where_it_can_be_run(inside):
    """In a container's archive bin/python may link to what only the image has."""
    text = rendered(spec(environment="/shared/env.tar", **inside), environment=UNPACKED)
    (line,) = (line for line in text.splitlines() if "ftslurm.node.unpack" in line)
    words = line.partition("ftslurm.node.unpack ")[2].split()
    checked = [] if inside else [f"{UNPACKED.folder}/bin/python"]
    assert words == ["/shared/env.tar", str(UNPACKED.folder), *checked, "&"]


def test_the_body_of_the_script_is_short():
    lines = rendered(SPECS["slurm"]).splitlines()
    # Without comments, and an option that has a line of its own.
    body = [line for line in lines if line.strip() and not line.lstrip().startswith(("#", "--"))]
    assert len(body) < 90


@pytest.mark.parametrize(
    "change, named",
    [
        ({"cluster": ClusterSpec(container=["env"])}, "container"),
        ({"cluster": ClusterSpec(container_image="i", rank_python="python3")}, "container"),
        ({"program": ["true"]}, "program"),
    ],
)
def test_a_standby_that_could_never_serve_is_refused(change, named):
    chosen = spec(RecoverySpec(standby=True))
    for name, value in change.items():
        setattr(chosen, name, value)
    with pytest.raises(SpecError, match=f"recovery.standby is on and the r.* {named}"):
        check_values(chosen, Path("/runs/a"))
    chosen.recovery.standby = False
    check_values(chosen, Path("/runs/a"))


def test_a_local_job_has_its_standby_too():
    text = rendered(spec(RecoverySpec(standby=True), scheduler="local", nodes=1))
    assert 'env -u FTSLURM_ATTEMPT \\\n    "$python" -u -m ftslurm.node.standby ' in text
    assert '"$python" -u -m ftslurm.node.standby_rank ftslurm.submit.rank "$FTSLURM' in text


def header(chosen):
    lines = rendered(chosen).splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"nodes": 2, "spares": 3}, "--nodes=5"),
        ({"gpus_per_node": 4}, "--gpus-per-node=4"),
        ({"gpus_per_task": 2, "tasks_per_node": 4}, "--gpus-per-node=8"),
    ],
)
def test_what_is_counted_is_a_line_of_the_script(values, line):
    assert line in header(spec(**values))


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"licenses": "matlab:2"}, "--licenses=matlab:2"),
        ({"switches": "1@00:10:00"}, "--switches=1@00:10:00"),
        ({"mail_user": "a@example.org"}, "--mail-user=a@example.org"),
        ({"mail_type": "FAIL,END"}, "--mail-type=FAIL,END"),
        ({"sbatch": ["--exclusive", "--gres=gpu:h100:8"]}, "--gres=gpu:h100:8"),
    ],
)
def test_the_rest_is_among_the_arguments_of_sbatch(values, option):
    chosen = spec(**values)
    assert option in sbatch_options(chosen.cluster, log="x")
    assert rendered(chosen) == rendered(SPECS["slurm-cpu"])


@pytest.mark.parametrize("key", ["job_name", "comment", "constraint"])
@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_text_reaches_sbatch_as_it_is_and_the_script_not_at_all(key, value):
    chosen = spec(**{key: value})
    options = sbatch_options(chosen.cluster, log="/runs/%j.out")
    assert f"--{key.replace('_', '-')}={value}" in options
    assert rendered(chosen) == rendered(SPECS["slurm-cpu"])


@pytest.mark.parametrize("key", ["job_name", "comment", "constraint"])
@pytest.mark.parametrize("value", REFUSED)
def test_line_breaks_control_characters_and_endless_texts_are_refused(key, value):
    with pytest.raises(SpecError, match=f"cluster.{key} "):
        rendered(spec(**{key: value}))


@pytest.mark.parametrize("key", ["account", "partition", "qos", "reservation"])
@pytest.mark.parametrize("value", ["", "a b", "-p", "a\n#SBATCH --uid=0", "$(id)", "'", "x" * 300])
def test_a_name_that_slurm_cannot_have_is_refused(key, value):
    with pytest.raises(SpecError, match=f"cluster.{key} is"):
        check_values(spec(**{key: value}), Path("/runs"))


@pytest.mark.parametrize("value", ["", "64 G", "64GB; id", "-1", "lots"])
def test_memory_is_a_number_and_a_unit(value):
    with pytest.raises(SpecError, match=r"cluster\.mem"):
        rendered(spec(mem=value))


@pytest.mark.parametrize("value", ["n[1-", "n[3-1]", "a b", "n1\n", ""])
def test_a_malformed_exclude_list_is_refused(value):
    with pytest.raises(SpecError, match=r"cluster\.exclude: hostlist"):
        rendered(spec(exclude=value))


@pytest.mark.parametrize("name", ["", "-a", "a b", "a/b", "../a", "a\nb", "x" * 65])
def test_a_run_name_is_fit_for_a_folder(name):
    with pytest.raises(SpecError, match="^name is"):
        check_values(RunSpec(name=name), Path("/runs"))


@pytest.mark.parametrize("path", ["/runs/100%", "/runs/a\\b", "/runs/a\nb", "/runs/a:b"])
def test_a_path_that_slurm_or_python_would_expand_is_refused(path):
    with pytest.raises(SpecError, match="runs_dir leads to"):
        rendered(spec(), run_dir=Path(path))


def test_an_error_shows_a_hostile_value_on_one_short_line():
    with pytest.raises(SpecError) as caught:
        rendered(spec(job_name="a\n\x1b]0;" + "x" * 150))
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200


def test_every_line_of_sbatch_takes_safe_words_only():
    lines = [line for line in rendered(SPECS["slurm"]).splitlines() if line.startswith("#SBATCH")]
    assert lines
    for line in lines:
        assert line.isascii() and all(c.isalnum() or c in "-=:@ " for c in line[1:]), line


def site(**values):
    return Site(
        "slurm", "22.05.8", kill_wait_s=5, job_requeue=True, send_user_signal=True, **values
    )


@pytest.mark.parametrize(
    "chosen, where, seconds",
    [
        (spec(signal_lead_s=120), site(), 115.0),
        (spec(signal_lead_s=120, partition="low"), site(grace_s={"low": 12}), 12.0),
        (spec(signal_lead_s=120), site(grace_s={"low": 12}, default_partition="low"), 12.0),
        (spec(signal_lead_s=10, partition="low"), site(grace_s={"low": 60}), 5.0),
        (spec(partition="low"), site(grace_s={"low": 0}, preempt_mode={"low": "OFF"}), 115.0),
        (spec(partition="low"), site(grace_s={"low": 0}, preempt_mode={"low": "REQUEUE"}), 1.0),
        (spec(partition="a,b"), site(grace_s={"a": 90, "b": 30}), 30.0),
    ],
)
def test_the_emergency_deadline_is_the_shortest_warning_less_the_requeue(chosen, where, seconds):
    assert emergency_deadline_s(where, chosen) == seconds


def test_an_emergency_deadline_of_ones_own_wins():
    chosen = spec()
    chosen.checkpoint.emergency_deadline_s = 3.5
    assert emergency_deadline_s(site(), chosen) == 3.5


if __name__ == "__main__":  # python tests/test_render.py: write the golden scripts anew
    for key in SPECS:
        (GOLDEN / f"train-{key}.sbatch").write_text(rendered_golden(key))
    sys.exit(0)
