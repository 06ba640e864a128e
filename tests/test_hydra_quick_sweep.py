"""Whatever the overrides of a task are, the quick way to its frozen configuration comes to what
Hydra's own composition, frozen without any short cut, comes to."""

import itertools
import pickle
from dataclasses import dataclass, field, make_dataclass
from enum import Enum

import pytest
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from hydra.version import VersionBase
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from ftslurm.hydra_app.common_part import take_common
from ftslurm.hydra_app.frozen import freeze_config
from ftslurm.hydra_app.quick_loader import QuickLoader
from ftslurm.submit.override import plain_override


class Color(Enum):
    RED = 1


@dataclass
class Net:
    width: int = 4
    rate: float = 0.5
    tags: list[str] = field(default_factory=lambda: ["a"])
    sizes: dict[str, int] = field(default_factory=dict)


CONFIG = """defaults:
  - net
  - db: a
  - optional extra: null
  - _self_
lr: 0.1
name: base
from_name: ${name}-${lr}
far: ${from_name}/${db.port}
whole_db: ${db}
now: ${now:%f}
later: ${now:%f-%H}
number: ${hydra.job.num}
through: ${hydra:job.num}
dirname: ${hydra.job.override_dirname}
home: ${oc.env:HOME}
key: ${oc.env:MY_API_KEY}
absent: ${oc.env:NOT_SET_HERE}
wanted: ???
needs_wanted: ${wanted}
n: {x: 1, y: {z: 2}, ref: "${n.x}", near: "${.x}"}
l: [1, "${lr}", {k: "${name}"}]
d: {a: 1}
escaped: \\${name}
text: "$APP ${name}"
"""
MORE = """nested: ${n.${pick}}
pick: x
loud: ${oc.select:name,none}
backslash: "${name} \\\\${lr}"
"""
APPS = {
    "references of known forms": (CONFIG, []),
    "a subdir of overrides": (
        CONFIG,
        [
            "hydra.sweep.subdir='${hydra.job.override_dirname}'",
            "hydra.job.config.override_dirname.exclude_keys=[lr]",
        ],
    ),
    "references of any form": (CONFIG + MORE, []),
    "an option refers to a value": (CONFIG, ["hydra.launcher.cluster.job_name='${name}'"]),
}
WORDS = {
    "lr": [
        "1",
        "0.25",
        "1e-3",
        "null",
        "'a,b'",
        "[1,2]",
        "${n.x}",
        "${hydra.job.num}",
        "1,2",
        "glob(*)",
        "???",
        "007",
        "1_0",
        ".5",
        "inf",
    ],
    "name": ["x", "'a,b'", '"it\'s"', "'[a-b]'", "${now:%f}", "'${db.port}-$'", "''", "a=b", "1"],
    "wanted": ["3", "${lr}", "${oc.env:MY_API_KEY}"],
    "db": ["a", "b", "{port: 5}"],
    "db.port": ["9", "${n.x}"],
    "+extra": ["more"],
    "net.width": ["8", "1_0", "${n.x}", "no"],
    "net.tags": ["[x,y]", "[]", "['p,q']"],
    "+net.sizes.big": ["7", "no"],
    "net.rate": ["3", "${lr}"],
    "n": ["{x: 3}", "{y: {z: 5}}", "null", "5"],
    "n.x": ["4", "${lr}"],
    "n.y.z": ["6"],
    "~n.y": [None],
    "~db": [None],
    "+new": ["1", "{a: [1, {b: 2}]}", "${name}", "null"],
    "++d.b": ["2", "'${d.a}'"],
    "d": ["{c: 3}", "null", "5"],
    "l": ["[]", "[5,6]", "['${name}']", "null", "5"],
    "whole_db.port": ["1"],
    "later": ["1"],
    "unknown": ["1"],
    "home": ["here"],
}


@pytest.fixture(scope="module", params=APPS, ids=str)
def loaders(request, tmp_path_factory):
    """(Hydra's, ours, the sweep's configuration)."""
    patch = pytest.MonkeyPatch()
    text, of_hydra = APPS[request.param]
    folder = tmp_path_factory.mktemp("app")
    patch.chdir(folder)
    patch.setenv("MY_API_KEY", "correct-horse")
    patch.delenv("NOT_SET_HERE", raising=False)
    for name, content in {
        "config.yaml": text,
        "db/a.yaml": "port: 1\nhost: ${name}\n",
        "db/b.yaml": "port: 2\nhost: h\n",
        "extra/more.yaml": "k: ${db.port}\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    ConfigStore.instance().store(name="net", node={"net": Net})
    base = VersionBase.instance().version_base
    version.setbase("1.3")
    app = Hydra.create_main_hydra2("app", create_config_search_path(str(folder)))
    given_ = ["hydra/launcher=ftslurm", "hydra.launcher.cluster.nodes=2"]
    master = app.config_loader.load_configuration("config", [*given_, *of_hydra], RunMode.MULTIRUN)
    assert master.now and master.hydra.sweep.dir  # asked for before the first task, so kept
    yield app.config_loader, QuickLoader(app.config_loader), master
    GlobalHydra.instance().clear()
    VersionBase.instance().version_base = base
    patch.undo()


@some.composite
def overrides(draw):
    """Of two tasks, of the same keys."""
    keys = draw(some.lists(some.sampled_from(list(WORDS)), max_size=4, unique=True))
    tasks = ([], [])
    for key, words in itertools.product(keys, tasks):
        value = draw(some.sampled_from(WORDS[key]))
        words.append(key if value is None else f"{key}={value}")
    return tasks


def whole(node):
    """All that a configuration is, types and flags included, nothing resolved."""
    what = node._metadata
    kind = (type(node), what.ref_type, what.object_type, what.optional, what.flags)
    value = node._value()
    if isinstance(node, DictConfig) and isinstance(value, dict):
        value = {key: whole(item) for key, item in value.items()}
    elif isinstance(node, ListConfig) and isinstance(value, list):
        value = [whole(item) for item in value]
    return kind, value


def outcome(work):
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the same, whichever it is
        return type(error), str(error)


def frozen(made):
    config = pickle.loads(made.data)
    # When a task was composed is its own affair: all that was not asked for before.
    if "later" in config and not isinstance(config.later, int):
        config.later = "then"
    return whole(config), made.options, made.overrides, made.working_dir


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(overrides())
def test_the_quick_way_comes_to_what_hydras_own_comes_to(loaders, tasks):
    (theirs, ours, master), (words, before) = loaders, tasks

    def composed(loader):
        return lambda: whole(loader.load_sweep_config(master, words))

    wanted = outcome(composed(theirs))
    for _ in range(3):  # left to Hydra, from a new base, from a known one
        assert outcome(composed(ours)) == wanted

    for number in (0, 7):
        name = {"run_id": f"app-{number:04d}", "number": number}

        def slow(name=name):
            config = theirs.load_sweep_config(master, words)
            return frozen(freeze_config(config, overrides=words, **name))

        def quick(name=name):
            return frozen(ours.freeze(master, words, **name))

        wanted = outcome(slow)
        assert outcome(quick) == wanted
        outcome(lambda: ours.freeze(master, before, run_id="before", number=3))
        assert outcome(quick) == wanted  # of its kind, after another


SUCCESSIONS = [
    ("n=5", "n=null", "n=5"),
    ("n=null", "n=5", "n=null"),
    ("l=5", "l=null"),
    ("d=null", "d=5", "d=null"),
    ("+new=null", "+new=1", "+new=null"),
    ("name=null", "name=1", "name=a"),
    ("whole_db.port=1", "whole_db.port=2"),
    ("later=1", "later=null"),
    ("+net.sizes.big=1", "+net.sizes.big=2"),
    ("+extra.a=1", "+extra.a=2"),
    ("lr=1", "lr=2", "lr=no", "lr=3"),
    ("net.width=1", "net.width=no", "net.width=2"),
]


@pytest.mark.parametrize("words", SUCCESSIONS, ids=" ".join)
def test_a_task_made_of_the_one_before_is_as_if_it_were_the_first(loaders, words):
    theirs, ours, master = loaders
    outcome(lambda: ours.load_sweep_config(master, [words[0]]))  # left to Hydra
    for number, word in enumerate(words):
        name = {"run_id": f"app-{number}", "number": number}

        def slow(word=word, name=name):
            config = theirs.load_sweep_config(master, [word])
            return frozen(freeze_config(config, overrides=[word], **name))

        def quick(word=word, name=name):
            return frozen(ours.freeze(master, [word], **name))

        assert outcome(quick) == outcome(slow)


def test_of_tasks_of_one_kind_the_first_alone_is_copied(loaders, monkeypatch):
    _, ours, master = loaders
    for value in (1, 2):  # left to Hydra, and what all begin with
        ours.freeze(master, [f"net.rate={value}"], run_id="a", number=value)
    (begun,) = [one for kind, one in ours._begun.items() if "net.rate" in str(kind)]
    if begun.common is None or "pick" in master:
        return
    monkeypatch.setattr(begun, "copied", None)
    for value in (3, 4):
        made = ours.freeze(master, [f"net.rate={value}"], run_id="a", number=value)
        assert pickle.loads(made.data).net.rate == value


def test_what_tasks_have_in_common_is_settled_once(loaders):
    theirs, _, master = loaders
    config = theirs.load_sweep_config(master, [])
    common = take_common(config, ["name"])
    if "pick" in config or "${" in str(OmegaConf.to_container(master.hydra.launcher)):
        assert common is None
        return
    left = {".".join(map(str, place)) for place in common.places if place[0] != "hydra"}
    # The db, and who refers to it, because one of its options does to the name.
    assert left == {
        "from_name", "far", "whole_db", "db.host", "later", "number", "through", "dirname", "home",
        "key", "absent", "l.2.k", "escaped", "text",
    }  # fmt: skip
    assert (config.n.ref, config.n.near, config.l[1]) == (1, 1, 0.1)


@pytest.mark.parametrize(
    ("kind", "values", "text", "key"),
    [
        (dict[Color, str], {Color.RED: "${name}"}, "${group.RED}", "name"),
        (dict[bool, str], {True: "${name}"}, "${group.true}", "name"),
        (dict[int, str], {1: "a"}, "${group.1}", "group.01"),
        (list[str], ["a", "${name}"], "${group.01}", "name"),
        (list[str], ["a", "b"], "${.group.1}", "group.0_1"),
    ],
)
def test_a_reference_to_a_key_that_is_written_in_another_way_is_left_to_each_task(
    kind, values, text, key
):
    made = make_dataclass("Group", [("group", kind), ("name", str), ("text", str)])
    hydra = {"overrides": {}, "launcher": {"_target_": "x"}, "callbacks": {}, "job": {}}
    hydra["job"]["env_copy"] = []
    config = OmegaConf.create({"hydra": hydra})
    with open_dict(config):
        for name, node in OmegaConf.structured(made(values, "base", text))._content.items():
            config._set_item_impl(name, node)
    common = take_common(config, [key])
    assert common is None or ("text",) in common.places
    assert OmegaConf.to_container(config)["text"] == text


@pytest.mark.parametrize("text", ["lr=1", "+a.b=x", "++a/b=1.5e-3", "a=-0", "a=+7", "a=9e9"])
def test_a_plain_override_is_read_without_hydras_parser_as_by_it(text):
    theirs = OverridesParser.create().parse_override(text)
    assert repr(plain_override(text)) == repr(theirs)


@settings(max_examples=300, deadline=None)
@given(some.from_regex(r"\A(\+{0,3}|~)[a-z_.@/]{0,4}=[-+0-9a-zA-Z_.'\[\]$,]{0,6}\Z"))
def test_an_override_is_read_without_hydras_parser_only_as_it_would_read_it(text):
    ours = plain_override(text)
    if ours is not None:
        assert repr(ours) == repr(OverridesParser.create().parse_override(text))


@pytest.mark.parametrize(
    "text", ["a=true", "a=NULL", "a=inf", "a=x-y", "a=", "a=1,2", "~a=1", "a@b=1", "a=01", "a=${b}"]
)
def test_what_is_not_plain_is_left_to_hydras_parser(text):
    assert plain_override(text) is None
