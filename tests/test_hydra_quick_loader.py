"""The quick loader gives for each task what Hydra's own gives, and refuses what that refuses."""

import logging
import pickle
from pathlib import Path

import pytest
from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.types import HydraContext, RunMode
from hydra.version import VersionBase
from omegaconf import OmegaConf

from ftslurm.hydra_app.launcher import Submission
from ftslurm.hydra_app.quick_loader import QuickLoader
from ftslurm.run.sweep_layout import SweepLayout

CONFIG = "defaults:\n  - db: a\n  - _self_\nlr: 0.1\nnow: ${now:%f}\nn: {x: 1}\n"


@pytest.fixture
def loaders(tmp_path):
    """(Hydra's, ours, the sweep's configuration)."""
    (tmp_path / "db").mkdir()
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "db" / "a.yaml").write_text("name: a\n")
    (tmp_path / "db" / "b.yaml").write_text("name: b\nport: 3\n")
    base = VersionBase.instance().version_base
    version.setbase("1.3")
    app = Hydra.create_main_hydra2("app", create_config_search_path(str(tmp_path)))
    given = ["hydra/launcher=ftslurm", "hydra.launcher.cluster.nodes=2"]
    master = app.config_loader.load_configuration("config", given, RunMode.MULTIRUN)
    assert master.now  # resolved once for all tasks
    yield app.config_loader, QuickLoader(app.config_loader), master
    GlobalHydra.instance().clear()
    VersionBase.instance().version_base = base


@pytest.mark.parametrize(
    "overrides",
    [
        ["db=a", "lr=1"],
        ["lr=2", "db=b", "n.x=4"],
        ["lr=3", "+z=1"],
        ["n={x: 2}", "n.x=3"],
        ["db.name=c", "db={name: d}"],
        ["~n", "lr=4"],
        [],
    ],
    ids=" ".join,
)
def test_a_task_is_what_hydra_makes_of_it(loaders, overrides):
    theirs, ours, master = loaders
    wanted = theirs.load_sweep_config(master, overrides)
    ours.load_sweep_config(master, ["db=b", "db.name=c"])  # where the group is an option's
    for _ in range(3):  # as the first of its kind, from a new base and from a known one
        found = ours.load_sweep_config(master, overrides)
        assert found == wanted and found.hydra == wanted.hydra
        assert found.now == wanted.now == master.now
        assert OmegaConf.get_type(found.hydra) is OmegaConf.get_type(wanted.hydra)
        found.lr = -1  # which the next one does not see


@pytest.mark.parametrize(
    "overrides",
    [
        ["lr=1", "no=2"],
        ["+lr=1"],
        ["db=c"],
        ["lr=[1]", "n=3"],
        ["lr=glob(*)"],
        ["lr=choice(1,2)"],
        ["lr=1,2"],
    ],
    ids=" ".join,
)
def test_a_task_is_refused_where_hydra_refuses_it(loaders, overrides):
    theirs, ours, master = loaders
    ours.load_sweep_config(master, ["lr=1"])
    outcomes = []
    for loader in (theirs, ours, ours):
        try:
            outcomes.append(loader.load_sweep_config(master, overrides) is not None)
        except Exception as error:  # noqa: BLE001 - the same, whichever it is
            outcomes.append((type(error), str(error)))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_thousand_values_of_one_key_are_read_from_files_once(loaders, monkeypatch):
    theirs, ours, master = loaders
    calls = []
    load = type(theirs).load_sweep_config

    def counted(self, *arguments):
        calls.append(arguments)
        return load(self, *arguments)

    monkeypatch.setattr(type(theirs), "load_sweep_config", counted)
    found = [ours.load_sweep_config(master, [f"lr={n}", "db=b"]).lr for n in range(50)]
    assert found == list(range(50)) and len(calls) == 2


def test_a_time_that_somebody_asks_the_sweep_for_is_from_then_on_the_tasks_too(loaders):
    _, ours, master = loaders
    for number in range(3):
        ours.load_sweep_config(master, [f"lr={number}"])
        ours.freeze(master, [f"lr={number}"], run_id="app-0000", number=number)
    asked = master.hydra.run.dir
    for number in range(3):
        config = ours.load_sweep_config(master, [f"lr={number}"])
        assert OmegaConf.get_cache(config) == OmegaConf.get_cache(master)
        made = ours.freeze(master, [f"lr={number}"], run_id="app-0000", number=number)
        assert pickle.loads(made.data).hydra.run.dir == asked


def test_a_time_in_the_sweeps_folder_is_one_for_all_tasks_whatever_the_sweeper_asks(loaders):
    theirs, *_ = loaders
    given = ["hydra/launcher=ftslurm", "hydra.sweep.dir='out/${now:%S-%f}'"]
    master = theirs.load_configuration("config", given, RunMode.MULTIRUN)
    context = HydraContext(config_loader=theirs, callbacks=Callbacks())
    Submission(context, master)
    made = [
        context.config_loader.freeze(master, [f"lr={n}"], run_id=f"app-{n:04d}", number=n)
        for n in range(3)
    ]
    folders = [Path(pickle.loads(task.data).hydra.runtime.output_dir) for task in made]
    assert [folder.name for folder in folders] == ["0", "1", "2"]
    assert len({folder.parent for folder in folders}) == 1


@pytest.fixture
def submission(loaders):
    theirs, _, master = loaders
    return Submission(HydraContext(config_loader=theirs, callbacks=Callbacks()), master)


def test_tasks_that_a_later_override_makes_equal_are_named(submission, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="ftslurm")
    layout = SweepLayout(tmp_path / "runs" / "app-1")
    submission._composed(layout, {0: ["lr=1", "db=a"], 1: ["lr=2", "db=a"], 2: ["+z=1"]})
    assert not caplog.messages
    hidden = {n: [f"lr={n}", "n.x=1", "lr=0.5"] for n in range(3)}
    submission._composed(layout, {**hidden, 3: ["lr=0.5"]})
    assert caplog.messages == ["tasks 0 and 1 are given the same values; 1 more repeat another"]


def test_a_map_takes_nothing_of_an_earlier_one_away(loaders):
    _, ours, _ = loaders
    assert ours.effective(["n={x: 1}", "n={y: 2}"]) == ("n={x: 1}", "n={y: 2}")
    assert ours.effective(["lr=1", "+z=1", "lr=2", "++z=3"]) == ("lr=2", "z=3")


def test_of_an_interruption_while_tasks_are_composed_it_is_said_that_nothing_was_submitted(
    submission, tmp_path, caplog, monkeypatch
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    caplog.set_level(logging.INFO, logger="ftslurm")
    monkeypatch.setattr(submission._context.config_loader, "freeze", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submission._composed(SweepLayout(tmp_path / "app-1"), {0: ["lr=1"]})
    (said,) = caplog.messages
    assert said.startswith("stopped; nothing of these tasks was written")
