"""One task's configuration frozen, and read again by whoever asks what the task has returned."""

import dataclasses
import functools
import os
import pickle

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from ftslurm.errors import RunError, SpecError
from ftslurm.hydra_app.frozen import CONFIG, freeze_config
from ftslurm.hydra_app.job_return import configs_of_task, job_return
from ftslurm.hydra_app.native import NativeSweep
from ftslurm.run.layout import RunLayout
from ftslurm.submit.sweep_course import TaskResult

SECRET = "correct-horse"  # of a shape that nobody would take for one


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    monkeypatch.delenv("SLURM_CHDIR", raising=False)
    monkeypatch.chdir(tmp_path)
    OmegaConf.register_new_resolver("shout", lambda text: text.upper() + "X", use_cache=True)
    yield
    OmegaConf.clear_resolver("shout")


def frozen(tmp_path, *overrides):
    conf = tmp_path / "conf"
    conf.mkdir(exist_ok=True)
    (conf / "config.yaml").write_text("lr: 0.5\n")
    words = ["hydra/launcher=ftslurm", *overrides]
    with initialize_config_dir(str(conf), version_base="1.3", job_name="app"):
        config = compose("config", words, return_hydra_config=True)
    return freeze_config(config, run_id="app-0000", number=0, overrides=[])


@pytest.mark.parametrize("key", ["dir", "subdir"])
@pytest.mark.parametrize(
    "value",
    [
        "out/${oc.env:MY_API_KEY}",
        "out/${shout:${oc.env:MY_API_KEY}}",
        "${oc.env:MY_API_KEY,x}",
        "${shout:${token}}",
    ],
)
def test_a_secret_in_the_name_of_hydras_folder_is_refused(tmp_path, key, value):
    refused = rf"task 0: `hydra\.sweep\.{key}` takes its value from MY_API_KEY, which may be a sec"
    with pytest.raises(SpecError, match=refused):
        frozen(tmp_path, f"hydra.sweep.{key}='{value}'", "+token=${oc.env:MY_API_KEY}")


def test_of_a_secret_in_an_option_of_the_launcher_it_is_said_to_leave_it_to_the_environment(
    tmp_path,
):
    with pytest.raises(SpecError, match="leave it to the environment, which the job inh") as said:
        frozen(tmp_path, "+hydra.launcher.cluster.env.K=${oc.env:MY_API_KEY}")
    assert "`hydra.launcher.cluster.env.K` takes its value from MY_API_KEY" in str(said.value)
    assert "give the value" not in str(said.value)


def test_an_option_of_the_launcher_that_the_node_would_look_up_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"RANK, which is looked up .* give the value itself"):
        frozen(tmp_path, "+hydra.launcher.cluster.env.K=${oc.env:RANK}")


@pytest.mark.parametrize("value", ["${oc.env:SLURM_CHDIR}", "${nowhere}"])
def test_a_folder_to_work_in_that_cannot_be_settled_is_one_sentence(tmp_path, value):
    with pytest.raises(SpecError, match="task 0") as said:
        frozen(tmp_path, f"hydra.job.chdir={value}")
    assert ("SLURM_CHDIR" if "SLURM" in value else "nowhere") in str(said.value)


def test_what_a_resolver_makes_of_a_secret_is_in_no_file(tmp_path):
    made = frozen(tmp_path, "+loud='${shout:${oc.env:MY_API_KEY}}-${shout:x}'")
    assert SECRET.upper().encode() not in made.data and SECRET.encode() not in made.data
    assert pickle.loads(made.data).loud == f"{SECRET.upper()}X-XX"


@pytest.fixture
def returned(tmp_path):
    layout = RunLayout(tmp_path / "app-0000")
    layout.submit.mkdir(parents=True)
    for folder in (layout.root, layout.submit):
        folder.chmod(0o755)
    (layout.submit / CONFIG).write_bytes(frozen(tmp_path).data)
    read = functools.partial(configs_of_task, layout)
    job = job_return(read, overrides=[], working_dir="", name="app", finished=True, value=1.0)
    return layout, job


def test_a_configuration_is_not_read_from_a_folder_that_others_may_write_in(returned):
    layout, job = returned
    layout.submit.chmod(0o777)
    with pytest.raises(RunError, match="may be written by others"):
        job.cfg  # noqa: B018
    layout.submit.chmod(0o755)
    assert job.cfg == {"lr": 0.5}


def test_a_configuration_that_is_not_there_is_told_in_a_sentence(returned):
    layout, job = returned
    os.unlink(layout.submit / CONFIG)  # noqa: PTH108
    with pytest.raises(RunError, match="is not there, and the task's configuration was in it"):
        repr(job)


def test_what_a_task_has_returned_can_be_changed_and_copied_like_hydras_own(returned):
    _, job = returned
    other = dataclasses.replace(job, working_dir="there")
    assert other.working_dir == "there" and other.cfg == {"lr": 0.5}
    assert list(other.hydra_cfg) == ["hydra"]
    job.cfg = OmegaConf.create({"lr": 2})
    assert job.cfg.lr == 2 and pickle.loads(pickle.dumps(job)).cfg.lr == 2


def test_a_sweeper_of_our_own_runs_finds_the_configuration_of_each_task(tmp_path):
    for number in (3, 4):
        layout = RunLayout(tmp_path / str(number))
        layout.root.mkdir()
        layout.config_yaml.write_text(f"seed: {number}\n")

    def launch(overrides, first):
        return [TaskResult(first + n, "", n == 0, "failed", 0.5) for n in range(len(overrides))]

    sweep = NativeSweep(launch, lambda number: RunLayout(tmp_path / str(number)))
    done, failed = sweep.launch([["seed=3"], ["seed=4"]], 3)
    assert (done.cfg.seed, done.return_value, done.overrides) == (3, 0.5, ["seed=3"])
    assert failed.cfg.seed == 4
    with pytest.raises(Exception, match="failed"):
        failed.return_value  # noqa: B018
