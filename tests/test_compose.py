"""conf/ and overrides become one spec, and what is misspelt becomes one helpful sentence."""

import dataclasses
from pathlib import Path

import pytest

from ftslurm.errors import SpecError
from ftslurm.run.spec import RunSpec, to_dict
from ftslurm.submit.assets import conf_folder
from ftslurm.submit.compose import compose, compose_run
from ftslurm.submit.render import check_values


def refused(*overrides, config_dir=None):
    with pytest.raises(SpecError) as caught:
        compose(list(overrides), config_dir)
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


@pytest.fixture
def own(tmp_path):
    """A user's config folder; returns a writer of options."""

    def write(name, text):
        path = tmp_path / "own conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path / "own conf"

    return write


def test_nothing_asked_for_gives_the_dataclasses_own_defaults_but_for_the_model_groups():
    spec, _ = compose([])
    assert spec == RunSpec()


@pytest.mark.parametrize("name", ["main", "gpt_ddp", "gpt_fsdp"])
@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_every_experiment_composes_on_every_cluster(name, cluster):
    spec, text = compose([f"experiment={name}", f"cluster={cluster}"])
    assert spec.cluster.scheduler == cluster
    assert spec.parallel.strategy == ("fsdp" if name == "gpt_fsdp" else "ddp")
    assert f"steps: {spec.steps}" in text


EXAMPLES = sorted(path.stem for path in (conf_folder() / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_cluster_of_conf_can_be_submitted_to(name):
    """The worked examples among them: what they show is what may be asked for."""
    spec, _ = compose([f"cluster={name}"])
    check_values(spec, Path("/runs"))


def test_the_examples_show_what_sites_ask_about():
    assert set(EXAMPLES) == {"local", "slurm", "gpu_nodes", "apptainer", "pyxis", "no_requeue"}
    assert compose(["cluster=no_requeue"])[0].recovery.continue_by == "resubmit"
    assert compose(["cluster=gpu_nodes"])[0].cluster.env["NCCL_IB_HCA"] == "mlx5"


def test_overrides_win_over_an_experiment_and_reach_every_level():
    spec, _ = compose(["experiment=main", "steps=7", "cluster.nodes=3", "optim.lr=2e-4"])
    assert (spec.steps, spec.cluster.nodes, spec.optim.lr) == (7, 3, 2e-4)


def test_a_table_of_the_recovery_takes_single_names_and_only_those_it_knows():
    given = [
        "recovery.budgets.hang=5",
        "recovery.budgets.node=1",
        "recovery.phase_limit_s.saving=60",
    ]
    recovery = compose(given)[0].recovery
    assert (recovery.budgets["hang"], recovery.budgets["node"]) == (5, 1)
    assert recovery.budgets["storage"] == RunSpec().recovery.budgets["storage"]
    assert recovery.phase_limit_s["saving"] == 60
    with pytest.raises(SpecError, match="recovery.budgets has `hangs`; it takes hang, "):
        compose(["recovery.budgets.hangs=5"])


def test_the_default_file_says_what_the_spec_does():
    assert compose([])[0].recovery == RunSpec().recovery


def test_values_of_ones_own_need_no_plus():
    spec, _ = compose(["user.width=64", "user.names=[a,b]", "+user.deep.er=true"])
    assert spec.user == {"width": 64, "names": ["a", "b"], "deep": {"er": True}}


@pytest.mark.parametrize(
    "override, near, listed",
    [
        ("cluster.node=2", "`cluster.nodes`", "tasks_per_node"),
        ("+cluster.node=2", "`cluster.nodes`", "tasks_per_node"),
        ("++optim.learning_rate=1", "", "lr"),
        ("clutser=local", "`cluster`", "experiment"),
        ("stesp=3", "`steps`", "steps"),
        ("checkpoint.interval_step=3", "`checkpoint.interval_steps`", "keep_last"),
        ("cluster.nodes.x=3", "`cluster.nodes`", "tasks_per_node"),
    ],
)
def test_a_misspelt_key_names_the_nearest_and_lists_the_valid(override, near, listed):
    text = refused(override)
    assert text.startswith("no key `")
    assert near in text and listed in text.partition("keys")[2]


@pytest.mark.parametrize("override", ["experiment=mian", "parallel=dpp", "cluster=solar"])
def test_a_misspelt_option_lists_the_valid(override):
    group, _, option = override.partition("=")
    text = refused(override)
    assert f"{group} has no option `{option}`" in text and "choose" in text


@pytest.mark.parametrize(
    "override, says",
    [
        ("steps=abc", "'abc'"),
        ("cluster.nodes=1.5", "Integer"),
        ("steps=1,2", "several values"),
        ("cluster.exclude=n1,n2", "quote it: 'cluster.exclude=\"n1,n2\"'"),
        ("user.names=a,b", "quote it: 'user.names=\"a,b\"'"),
        ("~steps", "takes a key away"),
        ("steps", "write KEY=VALUE"),
        ("=3", "write KEY=VALUE"),
        ("cluster.exclude=n[1-3,5]", "'cluster.exclude=\"n[1-3,5]\"'"),
        ("hydra.verbose=true", "no effect"),
        ("hydra/launcher=basic", "no effect"),
        ("model=null", "choose small, tiny"),
        ("optim.lr=nan", "run.json"),
        ("cluster.nodes=0", "at least 1"),
        ("user.x=${oc.env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE"),
        ("user.x=${optim.nope}", "nope"),
    ],
)
def test_what_cannot_be_is_one_sentence_that_says_why(override, says):
    assert says in refused(override)


@pytest.mark.parametrize(
    ("key", "says"),
    [("user", "`run`, and has to be a map"), ("cluster.setup", "`run`, and has to be a list")],
)
def test_what_a_list_or_a_map_refers_to_has_to_be_one(key, says):
    assert says in refused("name=run", f"{key}=${{name}}")


def test_a_key_below_what_is_no_map_is_refused_in_a_sentence():
    assert "(++user=${name} ++user.x=1)" in refused("user=${name}", "user.x=1")


def test_numbers_are_not_told_to_be_quoted():
    assert "quote" not in refused("steps=1,2") and "quote" not in refused("model=tiny,small")


@pytest.mark.parametrize(
    "overrides, same_as",
    [
        (["experiment=null"], []),
        (["experiment=null", "steps=3"], ["steps=3"]),
        (["experiment=main", "experiment=null"], []),
        (["experiment=null", "experiment=main"], ["experiment=main"]),
    ],
)
def test_the_default_experiment_can_be_written_out(overrides, same_as):
    assert compose(overrides) == compose(same_as)


def test_a_quoted_hostlist_is_taken_as_it_is():
    spec, _ = compose(['cluster.exclude="n[1-3,5]"'])
    assert spec.cluster.exclude == "n[1-3,5]"


def test_secrets_stay_references_wherever_they_are_used(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "sk-very-secret")
    monkeypatch.setenv("TEAM", "blue")
    monkeypatch.setenv("DB_PASS", "sk-very-secret-too")
    monkeypatch.setenv("SLURM_JWT", "sk-very-secret-as-well")
    spec, text = compose(
        [
            "user.key=${oc.env:WANDB_API_KEY}",
            "user.again=${user.key}",
            "user.url=https://u:${oc.env:WANDB_API_KEY}@host",
            "user.spare=${oc.env:HF_TOKEN,none}",
            "user.team=${oc.env:TEAM}",
            "user.db=${oc.env:DB_PASS}",
            "user.jwt=${oc.env:SLURM_JWT}",
        ]
    )
    assert "sk-very-secret" not in text and "sk-very-secret" not in str(to_dict(spec))
    assert spec.user["again"] == "${oc.env:WANDB_API_KEY}"
    assert spec.user["url"] == "https://u:${oc.env:WANDB_API_KEY}@host"
    assert spec.user["spare"] == "${oc.env:HF_TOKEN,none}"
    assert spec.user["team"] == "blue"


def test_composing_leaves_the_resolver_as_it_was(monkeypatch):
    from omegaconf import OmegaConf

    monkeypatch.setenv("MY_TOKEN", "t")
    compose(["user.a=${oc.env:MY_TOKEN}"])
    assert OmegaConf.create({"a": "${oc.env:MY_TOKEN}"}).a == "t"


def test_an_open_choice_is_filled_only_when_nobody_made_it(own):
    folder = own("cluster/h100.yaml", "partition: gpu\ngpus_per_node: 8\n")
    own("experiment/big.yaml", "# @package _global_\ndefaults:\n  - override /cluster: h100\n")
    fill = {"cluster": "local"}
    assert compose_run([], open_choices=fill).spec.cluster.scheduler == "local"
    assert compose_run([], open_choices=fill).opened == fill
    assert compose_run(["cluster=slurm"], open_choices=fill).spec.cluster.scheduler == "slurm"
    big = compose_run(["experiment=big"], folder, open_choices=fill)
    assert big.spec.cluster.partition == "gpu" and big.opened == {}


def test_a_folder_of_ones_own_adds_options(own):
    folder = own("experiment/mine.yaml", "# @package _global_\nsteps: 77\nuser: {a: 1}\n")
    spec, _ = compose(["experiment=mine", "model=small"], folder)
    assert (spec.steps, spec.user, spec.model.layers) == (77, {"a": 1}, 6)
    assert "mine" in refused("experiment=main2", config_dir=folder)


@pytest.mark.parametrize(
    "name, text, says",
    [
        (
            "cluster/h.yaml",
            "nodez: 2\n",
            "no key `cluster.nodez` (in `cluster/h.yaml`), did you mean",
        ),
        ("experiment/h.yaml", "# @package _global_\nstepz: 2\n", "did you mean `steps`"),
        (
            "experiment/h.yaml",
            "# @package _global_\nhydra: {nope: 1}\n",
            "'nope' not in 'HydraConf'",
        ),
        ("experiment/h.yaml", "# @package _global_\nsteps: [\n", "h.yaml"),
        ("experiment/h.yaml", "# @package _global_\nsteps: x\n", "experiment/h"),
        (
            "experiment/h.yaml",
            "# @package _global_\nuser: {a: !!binary aGk=}\n",
            "cannot be kept in run.json (Object of type bytes",
        ),
        (
            "experiment/h.yaml",
            "# @package _global_\nuser: {a: !!set {b}}\n",
            "`user.a`: Value 'set' is not a supported",
        ),
    ],
)
def test_a_mistake_in_a_file_of_ones_own_names_the_file(own, name, text, says):
    folder = own(name, text)
    assert says in refused(f"{name.partition('/')[0]}=h", config_dir=folder)


def test_a_file_that_would_stay_unread_is_refused(own):
    folder = own("cluster/slurm.yaml", "nodes: 2\n")
    assert "would be hidden" in refused(config_dir=folder)


def test_a_missing_folder_is_refused(tmp_path):
    assert "is no folder" in refused(config_dir=tmp_path / "none")


def test_conf_says_what_the_dataclasses_say_where_it_repeats_a_default():
    spec, _ = compose(["data=python_stdlib", "optim=adamw", "checkpoint=default", "model=tiny"])
    for name in ("data", "optim", "checkpoint", "recovery", "health", "model", "parallel"):
        assert dataclasses.asdict(getattr(spec, name)) == dataclasses.asdict(
            getattr(RunSpec(), name)
        )
