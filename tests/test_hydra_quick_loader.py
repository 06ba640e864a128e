"""The quick loader gives for each task what Hydra's own gives, and refuses what that refuses."""

import pytest
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import OmegaConf

from ftslurm.hydra_app.quick_loader import QuickLoader

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
        ["~n", "lr=4"],
        [],
    ],
    ids=" ".join,
)
def test_a_task_is_what_hydra_makes_of_it(loaders, overrides):
    theirs, ours, master = loaders
    wanted = theirs.load_sweep_config(master, overrides)
    for _ in range(3):  # as the first of its kind, from a new base and from a known one
        found = ours.load_sweep_config(master, overrides)
        assert found == wanted and found.hydra == wanted.hydra
        assert found.now == wanted.now == master.now
        assert OmegaConf.get_type(found.hydra) is OmegaConf.get_type(wanted.hydra)
        found.lr = -1  # which the next one does not see


@pytest.mark.parametrize("overrides", [["lr=1", "no=2"], ["+lr=1"], ["db=c"], ["lr=[1]", "n=3"]])
def test_a_task_is_refused_where_hydra_refuses_it(loaders, overrides):
    theirs, ours, master = loaders
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
