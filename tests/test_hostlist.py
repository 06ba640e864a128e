"""Hostlists expand as `scontrol show hostnames` does, and what is malformed is refused."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftslurm.errors import UsageError
from ftslurm.scheduler.hostlist import MAX_HOSTS, compress, expand


@pytest.mark.parametrize(("text", "names"), [
    ("n1", ["n1"]),
    ("login", ["login"]),
    ("n[1-3]", ["n1", "n2", "n3"]),
    ("n[01-03]", ["n01", "n02", "n03"]),
    ("n[08-10]", ["n08", "n09", "n10"]),
    ("n[1,3,5-6]", ["n1", "n3", "n5", "n6"]),
    ("n[1-2],m[7],gpu", ["n1", "n2", "m7", "gpu"]),
    ("n[1-3]-ib", ["n1-ib", "n2-ib", "n3-ib"]),
    ("rack[0-1]_n[01-03]",
     [f"rack{rack}_n{node:02d}" for rack in (0, 1) for node in (1, 2, 3)]),
    ("r[0-1]n[1-2]c[0,3].site.org",
     [f"r{r}n{n}c{c}.site.org" for r in (0, 1) for n in (1, 2) for c in (0, 3)]),
    ("n[9-11]", ["n9", "n10", "n11"]),
    ("n[098-101]", ["n098", "n099", "n100", "n101"]),
])  # fmt: skip
def test_a_hostlist_expands_in_slurms_order(text, names):
    assert expand(text) == names


@pytest.mark.parametrize("text", [
    "", ",", "n1,", ",n1", "n[", "n]", "n[1", "n1]", "n[]", "n[a]", "n[1-]", "n[-3]", "n[3-1]",
    "n[1--2]", "n[1-2-3]", "n[[1-2]]", "n[1-2]]", "n[1;2]", "n 1", "n[1, 2]", "n$(id)", "n[1-2],,m",
    "n'1", "(null)", "n[1-3",
])  # fmt: skip
def test_a_malformed_hostlist_is_refused_with_a_sentence(text):
    with pytest.raises(UsageError, match="hostlist"):
        expand(text)


@pytest.mark.parametrize("text", [
    "n[0-999999999999]", "r[0-999]n[0-999]", "n[0-65535],m1",
    "a[0-9]b[0-9]c[0-9]d[0-9]e[0-9]f[0-9]g[0-9]h[0-9]i[0-9]j[0-9]",
])  # fmt: skip
def test_an_expansion_beyond_all_clusters_is_refused_before_it_is_built(text):
    started = time.process_time()
    with pytest.raises(UsageError, match=f"more than {MAX_HOSTS}"):
        expand(text)
    assert time.process_time() - started < 5


name = st.from_regex(r"[a-z]{1,3}(_[a-z]{1,2})?[0-9]{0,4}(-ib|\.x)?", fullmatch=True)


@settings(deadline=None)  # a busy machine is no failure
@given(st.lists(name, min_size=1, max_size=40))
def test_compress_then_expand_gives_the_names_back(names):
    assert expand(compress(names)) == names


@settings(deadline=None)
@given(
    st.integers(0, 200), st.integers(1, 60), st.integers(0, 5), st.sampled_from(["", "-ib", "x"])
)
def test_a_range_of_names_becomes_one_bracket(first, count, width, suffix):
    names = [f"n{number:0{width}d}{suffix}" for number in range(first, first + count)]
    text = compress(names)
    assert expand(text) == names
    assert text.count("[") <= 2


def test_a_known_list_is_compressed_as_slurm_writes_it():
    assert compress(["n01", "n02", "n03", "n07"]) == "n[01-03,07]"
    assert compress(["ftn1"]) == "ftn1"


@settings(deadline=None)
@given(st.text(alphabet="n1-[],_ab0", max_size=24))
def test_any_text_either_expands_or_is_refused(text):
    try:
        names = expand(text)
    except UsageError:
        return
    assert names and all(name and not set(name) & set("[],") for name in names)
