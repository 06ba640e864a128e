"""What of a configuration is settled at submit, and what is left to the node, whole."""

import pickle
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from ftslurm.errors import SpecError
from ftslurm.hydra_app.settle import settle

SECRET = "s3cret-Value"
RESOLVERS = {
    "my_upper": str.upper,
    "my_cached": str.upper,
    "my_len": len,
    "my_join": lambda *words: "+".join(map(str, words)),
    "my_number": lambda text: {SECRET: 7}[text],
    "my_split": lambda text: text.split("-"),
    "my_dice": lambda: f"dice{secrets.token_hex(4)}",
    "my_id": lambda: f"id{secrets.token_hex(4)}",
    "my_yaml": OmegaConf.to_yaml,
    "my_missing": lambda group, key: OmegaConf.is_missing(group, key),
    "my_range": lambda end: list(range(end)),
    "my_pair": lambda: (1, "b"),
    "my_map": lambda: {"a": [1], "b.c": None},
    "my_class": lambda: Typed,
    "my_objects": lambda: [Typed, 1],
    "my_typed": lambda: Typed(length=1),
    "my_text": lambda text: text,
    "my_fault": lambda: 1 / 0,
}


@dataclass(frozen=True)
class Typed:
    length: int = "${my_len:${oc.env:API_KEY}}"
    number: int = "${my_number:${oc.env:API_KEY}}"
    inner: Any = field(default_factory=lambda: ["${my_upper:${oc.env:API_KEY}}"])


SETTLED = {
    "fixed": "${my_upper:ab}",
    "of_env": "${oc.env:PLAIN}",
    "same": "${.fixed}",
    "not": "???",
}


@pytest.fixture(autouse=True, scope="module")
def resolvers():
    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, use_cache=name in ("my_cached", "my_id"))
    yield
    for name in RESOLVERS:
        OmegaConf.clear_resolver(name)


@pytest.fixture(autouse=True)
def environ(monkeypatch):
    monkeypatch.setenv("API_KEY", SECRET)
    monkeypatch.setenv("PLAIN", "p")


def is_left(name, value, *, has_default):
    return name == "API_KEY" or (value is None and not has_default)


def settled(values):
    """(the configuration as the node has it, the keys that were left)."""
    config = OmegaConf.create(values)
    left = settle(config, is_left)
    kept = pickle.dumps(config)
    for word in (SECRET, SECRET.upper(), "OC.ENV"):
        assert word.encode() not in kept, "neither the secret nor what a resolver makes of it"
    return pickle.loads(kept), left


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${oc.env:API_KEY}", SECRET),
        ("a-${oc.env:API_KEY}-b", f"a-{SECRET}-b"),
        ("${my_upper:${oc.env:API_KEY}}", SECRET.upper()),
        ("${my_upper:x-${oc.env:API_KEY}}", f"X-{SECRET.upper()}"),
        ("${my_join:1,${my_upper:${oc.env:API_KEY}}}", f"1+{SECRET.upper()}"),
        ("${my_upper:${key}}", SECRET.upper()),
        ("${my_upper:${upper}}", SECRET.upper()),
        ("${upper}", SECRET.upper()),
        ("${my_cached:${key}}", SECRET.upper()),
        ("${my_len:${key}}", len(SECRET)),
        ("${my_number:${key}}", 7),
        ("${my_split:${key}}", ["s3cret", "Value"]),
        ("${oc.env:NOT_SET,${key}}", SECRET),
        ("${oc.env:NOT_SET,${oc.env:API_KEY}}", SECRET),
        ("${group}", {"upper": SECRET.upper(), "fixed": "AB"}),
        ("${list}", ["x", SECRET.upper()]),
        ("${list[1]}", SECRET.upper()),
        ("${oc.select:nowhere,${key}}", SECRET),
    ],
)
@pytest.mark.parametrize("shape", ["value", "list", "deep"])
def test_a_value_with_a_secret_in_it_is_left_whole_and_the_node_has_what_hydra_would(
    text, value, shape
):
    held = {"value": text, "list": [1, text], "deep": {"a": [{"b.c": text}]}}[shape]
    got, left = settled(
        {
            "held": held,
            "key": "${oc.env:API_KEY}",
            "upper": "${my_upper:${oc.env:API_KEY}}",
            "group": {"upper": "${my_upper:${key}}", "fixed": "${my_upper:ab}"},
            "list": ["${my_join:x}", "${upper}"],
            **SETTLED,
        }
    )
    place = {"value": "held", "list": "held[1]", "deep": "held.a[0].b.c"}[shape]
    assert place in left and {"key", "upper", "group.upper", "list[1]"} <= set(left)
    whole = {"value": value, "list": [1, value], "deep": {"a": [{"b.c": value}]}}[shape]
    assert OmegaConf.to_container(got, resolve=True)["held"] == whole
    plain = OmegaConf.to_container(got)
    assert {name: plain[name] for name in SETTLED} == {
        "fixed": "AB", "of_env": "p", "same": "AB", "not": "???"}  # fmt: skip
    assert plain["group"]["fixed"] == "AB" and plain["list"][0] == "x"


def test_the_types_of_what_is_left_stay_and_so_does_what_is_frozen():
    got, left = settled({"typed": Typed})
    assert list(left) == ["typed.length", "typed.number", "typed.inner[0]"]
    assert (got.typed.length, got.typed.number) == (len(SECRET), 7)
    assert OmegaConf.get_type(got.typed) is Typed and OmegaConf.is_readonly(got.typed)


def test_where_nothing_is_left_all_is_settled_and_a_dice_is_thrown_once():
    got, left = settled({"dice": "${my_dice:}", "again": "${dice}", "n": "${my_cached:ab}"})
    assert left == {} and got.dice == got.again
    assert OmegaConf.to_container(got) == {"dice": got.dice, "again": got.dice, "n": "AB"}


def test_now_is_the_time_of_the_submit_also_beside_a_secret(monkeypatch):
    from hydra.core.utils import setup_globals

    setup_globals()
    got, _ = settled({"now": "${now:%f}", "both": "${now:%f}-${oc.env:API_KEY}"})
    assert got.both == f"{got.now}-{SECRET}"


def test_what_cannot_be_resolved_is_told():
    with pytest.raises(InterpolationResolutionError, match="KeyError"):
        settle(OmegaConf.create({"a": "${my_number:x}", "b": "${oc.env:API_KEY}"}), is_left)


def test_a_text_with_a_secret_in_it_is_settled_but_for_the_reference():
    got, left = settled(
        {
            "name": "run-${my_id:}",
            "store": "s3://${oc.env:API_KEY}@bucket/run-${my_id:}/${my_dice:}/${.key}",
            "key": "${oc.env:API_KEY}",
        }
    )
    text = OmegaConf.to_container(got)["store"]
    dice = text.split("/")[-2]
    assert dice.startswith("dice") and list(left) == ["store", "key"]
    assert text == f"s3://${{oc.env:API_KEY}}@bucket/{got.name}/{dice}/${{.key}}"
    assert got.store == got.store == f"s3://{SECRET}@bucket/{got.name}/{dice}/{SECRET}"


@pytest.mark.parametrize(
    "text",
    [
        "${my_upper:${oc.env:API_KEY}-${my_dice:}}",
        "a-${my_join:${my_upper:'${key} ${my_dice:}'},b}",
        "${oc.env:API_KEY,${my_dice:}}",
        "${my_join:[${oc.env:API_KEY},${my_upper:${my_dice:}}]}",
    ],
)
def test_what_only_the_node_can_resolve_may_not_draw_at_random_there(text):
    with pytest.raises(SpecError, match=r"`deep\.held\[0\]`.*something else each time") as refused:
        settled({"deep": {"held": [text]}, "key": "${oc.env:API_KEY}"})
    assert "${my_dice:}}" in str(refused.value) or "`${my_dice:}`" in str(refused.value)
    got, _ = settled(
        {
            "drawn": "${my_dice:}",
            "held": text.replace("${my_dice:}", "${drawn}"),
            "key": "${oc.env:API_KEY}",
        }
    )
    assert got.held == got.held, "with a key of its own it is the same for all"


def test_what_a_resolver_with_a_cache_has_drawn_is_the_same_in_what_only_the_node_can_resolve():
    got, _ = settled(
        {
            "held": "${my_upper:${oc.env:API_KEY}-${my_id:}}",
            "name": "${my_id:}",
        }
    )
    assert got.held == f"{SECRET}-{got.name}".upper()


@pytest.mark.parametrize("text", ["${my_yaml:${group}}", "${my_missing:${group},key}"])
def test_a_resolver_that_looks_at_a_group_sees_the_reference_as_it_was_written(text):
    values = {"group": {"a": 1, "key": "${oc.env:API_KEY,none}"}, "held": text}
    got, left = settled(values)
    assert got.held == OmegaConf.create(values).held and list(left) == ["group.key"]


@pytest.mark.parametrize(
    ("text", "value", "is_left"),
    [
        ("${my_range:3}", [0, 1, 2], False),
        ("${my_pair:}", [1, "b"], False),
        ("${my_map:}", {"a": [1], "b.c": None}, False),
        ("${my_class:}", Typed, True),
        ("${my_objects:}", [Typed, 1], True),
        ("${my_typed:}", Typed(length=1), True),
    ],
)
def test_a_list_or_map_that_a_resolver_gives_is_kept_and_an_object_is_left(text, value, is_left):
    got, left = settled({"held": text, "list": [text], "same": "${held}"})
    assert list(left.items()) == ([("held", ""), ("list[0]", ""), ("same", "")] if is_left else [])
    for found in (got.held, got.list[0], got.same):
        assert found == value and OmegaConf.is_config(found) is not is_left


def test_no_resolver_is_given_the_text_of_a_reference():
    given = []

    def heard(*words):
        given.append(words)
        return "heard"

    OmegaConf.register_new_resolver("my_vault", heard)
    try:
        values = {
            "login": "${my_vault:${oc.env:API_KEY}}",
            "again": "a-${my_vault:x,${login}}-${my_vault:${key}}",
            "key": "${oc.env:API_KEY}",
            "group": {"same": "${my_vault:${..key}}"},
            "whole": "${group}",
        }
        got, left = settled(values)
        assert given == [] and set(left) == {"login", "again", "key", "group.same", "whole"}
        assert got.again == "a-heard-heard" and (SECRET,) in given
    finally:
        OmegaConf.clear_resolver("my_vault")


def test_a_group_that_is_referred_to_often_is_settled_once():
    asked = []

    def noted(name, value, *, has_default):
        asked.append(name)
        return is_left(name, value, has_default=has_default)

    group = {"key": "${oc.env:API_KEY}", "deep": {"a": "${oc.env:PLAIN}"}}
    settle(OmegaConf.create({"group": group}), noted)
    alone, asked[:] = list(asked), []
    references = {f"r{number}": "${group}" for number in range(5)}
    left = settle(OmegaConf.create({**references, "group": group}), noted)
    assert asked == alone and set(left) == {*references, "group.key"}


@pytest.mark.parametrize(
    "text",
    [
        r"\${a}",
        r"\\\${a}",
        r"\\${oc.env:PLAIN}\${a}-${oc.env:API_KEY}",
        r"\${a}\\${oc.env:API_KEY}\b\\${oc.env:PLAIN}",
        r"${oc.env:BACKSLASH}${oc.env:API_KEY}$${oc.env:PLAIN}{x}",
        r"${oc.env:OPEN}a}${oc.env:API_KEY}",
        r"${oc.env:OPEN}a}",
    ],
)
def test_a_text_that_looks_like_a_reference_stays_a_text(monkeypatch, text):
    monkeypatch.setenv("BACKSLASH", "\\")
    monkeypatch.setenv("OPEN", "\\${")
    got, _ = settled({"held": text})
    assert got.held == OmegaConf.create({"held": text}).held


def test_what_fails_beside_a_secret_is_told_with_its_key():
    config = OmegaConf.create({"a": {"b": "${oc.env:API_KEY}-${my_fault:}"}})
    with pytest.raises(InterpolationResolutionError, match="ZeroDivisionError") as failed:
        settle(config, is_left)
    assert failed.value.full_key == "a.b"


NAMES = ["a", "b", "c", "d"]
WORDS = ["x", "${oc.env:API_KEY}", "${oc.env:PLAIN}", "${my_id:}", "${my_dice:}"]
DRAWN = re.compile("(DICE|ID)[0-9A-F]{8}|(dice|id)[0-9a-f]{8}")


@some.composite
def configs(draw):
    """Each value made of words and of those before it, through resolvers or not."""
    values = {}
    for name in NAMES:
        words = some.sampled_from([*WORDS, *(f"${{{before}}}" for before in values)])
        parts = draw(some.lists(words, min_size=1, max_size=3))
        text = draw(some.sampled_from(["{}", "${{my_upper:{}}}", "${{my_join:{},y}}"]))
        values[name] = text.format("-".join(parts))
    return values


@given(values=configs())
@settings(deadline=None)
def test_the_node_has_what_one_process_would_have_had(values):
    wanted = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    try:
        got, _ = settled(values)
    except SpecError as error:
        assert "${my_dice:}" in str(error)  # noqa: PT017
        return
    ranks = [OmegaConf.to_container(pickle.loads(pickle.dumps(got)), resolve=True) for _ in "ab"]
    assert ranks[0] == ranks[1], "one draw for all"
    assert {name: DRAWN.sub("?", value) for name, value in ranks[0].items()} == {
        name: DRAWN.sub("?", value) for name, value in wanted.items()
    }
    drawn = {match[0].lower() for text in ranks[0].values() for match in DRAWN.finditer(text)}
    assert len([text for text in drawn if text.startswith("id")]) <= 1
