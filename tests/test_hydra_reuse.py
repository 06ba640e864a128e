"""When one task's configuration may become the next one's, and when a copy is needed."""

from dataclasses import dataclass, field

from omegaconf import MISSING, OmegaConf

from ftslurm.hydra_app.reuse import put_back, references_at
from ftslurm.hydra_app.settle import settle


@dataclass
class Net:
    width: int = 4


@dataclass
class Typed:
    hydra: dict[str, str] = field(default_factory=dict)
    wide: Net = field(default_factory=Net)
    net: Net = MISSING


def settled(config, *places):
    """The references, once they were settled."""
    references = references_at(config, places)
    settle(config, lambda *_, **__: False, places)
    return references


def test_a_settled_reference_to_a_value_is_put_back():
    config = OmegaConf.create({"hydra": {}, "a": 1, "n": {"b": "${a}"}})
    references = settled(config, ("n", "b"))
    assert OmegaConf.to_container(config)["n"] == {"b": 1}
    assert put_back(config, references)
    config.a = 2
    assert config.n.b == 2


def test_one_in_whose_place_a_group_was_put_asks_for_a_copy():
    config = OmegaConf.create({"hydra": {}, "a": {"x": 1}, "whole": "${a}"})
    assert put_back(config, settled(config, ("whole",))) is False


def test_one_that_is_a_group_itself_asks_for_a_copy():
    config = OmegaConf.structured(Typed(net="${wide}"))
    node = config._get_node("net")
    references = settled(config, ("net",))
    assert config._get_node("net") is node and config.net.width == 4
    assert put_back(config, references) is False


def test_one_whose_group_a_value_has_taken_the_place_of_asks_for_a_copy():
    config = OmegaConf.create({"hydra": {}, "a": 1, "n": {"b": "${a}"}})
    config.n = None
    assert references_at(config, [("n", "b")]) is None
    config.n = {}
    assert references_at(config, [("n", "b")]) is None
