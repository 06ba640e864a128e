"""Which node is bad, told from nodes that were tried alone and in pairs: who meets whom, and what
follows.

Pure. Nothing is held against a number of its own, only against the peers: a node is slow when the
best of all that it took part in is far from what is usual among the nodes. So one good partner
clears a node, whatever its other partners and its links are like. It holds while more than half of
the nodes are good; where nobody can say which half that is, nobody is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

HBM, GEMM, P2P, PAIR = "hbm", "gemm", "p2p", "pair"

WORDS = {
    HBM: "a memory test",
    GEMM: "multiplying matrices",
    P2P: "an exchange among its ranks",
    PAIR: "an all-reduce with another node",
}

MOST_EXTRA_ROUNDS = 4
"""Beyond those of everybody, for nodes that no partner has cleared."""

LINK_TRIALS = 3
"""That a link has to fail before it is told of. Nothing follows from it."""

Pair = tuple[str, str]
Subject = tuple[str, Optional[int]]
"""A node, or one rank on it."""


@dataclass(frozen=True)
class Trial:
    """One thing that was tried: by a rank alone, by a node's ranks, or by two nodes together."""

    what: str
    """hbm | gemm | p2p | pair"""
    nodes: tuple[str, ...]
    """Two of a pair, else one."""
    seconds: Optional[float]
    """None: it did not come to its end."""
    rank: Optional[int] = None
    """None: of the nodes as a whole."""
    wrong: str = ""
    """Bits came back other than they were: needs no peer to be judged by. The end of a
    sentence on whom they came back to."""
    why: str = ""
    """Why it did not come to its end."""


@dataclass(frozen=True)
class Limits:
    """From where on a best time is slow."""

    factor: Mapping[str, float]
    """Times the usual, by what was tried."""
    excess_s: Mapping[str, float]
    """And at least so much above it."""

    def bound_s(self, usual_s: float, what: str) -> float:
        """A best time above it is slow. How long a memory test takes is held against nobody."""
        factor = self.factor.get(what, float("inf"))
        return max(factor * usual_s, usual_s + self.excess_s.get(what, 0.0))


# dlrover calls a node slow at twice the median of its peers. A GPU at full load is within some
# percent of its like. Where processes share cores, fair shares alone make factors of two and three.
GPU_LIMITS = Limits({GEMM: 1.5, P2P: 2.0, PAIR: 2.0}, {P2P: 0.0005, PAIR: 0.0005})
CPU_LIMITS = Limits({GEMM: 4.0, P2P: 4.0, PAIR: 4.0}, {P2P: 0.03, PAIR: 0.03})


@dataclass(frozen=True)
class Standing:
    """How everybody did at one thing."""

    best: dict[Subject, Optional[float]]
    usual_s: Optional[float] = None
    """None: most did not come to an end, so nothing is usual."""
    slow: set[Subject] = field(default_factory=set)
    failed: set[Subject] = field(default_factory=set)
    """Never came to an end, where most did."""

    def is_clear(self, subject: Subject) -> bool:
        is_bad = subject in self.slow or subject in self.failed
        return self.usual_s is not None and subject in self.best and not is_bad


@dataclass(frozen=True)
class Judgement:
    bad: dict[str, str] = field(default_factory=dict)
    """Node -> what is wrong with it, as a sentence on `it`."""
    links: list[Pair] = field(default_factory=list)
    """Slow or dead between two nodes that are well with others."""
    notes: list[str] = field(default_factory=list)
    """What was seen and held against nobody."""


def worst(told: Sequence[Trial]) -> Trial:
    """Of what several ranks tell of one trial that they had together."""
    for trial in told:
        if trial.wrong or trial.seconds is None:
            return trial
    return max(told, key=lambda trial: trial.seconds or 0.0)


def stand(trials: Iterable[Trial], what: str, limits: Limits) -> Standing:
    best: dict[Subject, Optional[float]] = {}
    for trial in trials:
        if trial.what == what:
            for node in trial.nodes:
                subject = (node, trial.rank)
                times = [s for s in (best.get(subject), _seconds(trial)) if s is not None]
                best[subject] = min(times, default=None)
    known = sorted(seconds for seconds in best.values() if seconds is not None)
    if 2 * len(known) <= len(best):
        return Standing(best)
    # The lower median: of two the faster is the measure.
    usual_s = known[(len(known) - 1) // 2]
    bound_s = limits.bound_s(usual_s, what)
    return Standing(
        best,
        usual_s,
        {subject for subject, seconds in best.items() if seconds is not None and seconds > bound_s},
        {subject for subject, seconds in best.items() if seconds is None},
    )


def apart(trials: Sequence[Trial], limits: Limits) -> set[Subject]:
    """Who is slow, or failed, at what is done alone."""
    standings = [stand(trials, what, limits) for what in (HBM, GEMM, P2P)]
    return {subject for one in standings for subject in one.slow | one.failed}


def next_round(
    nodes: Sequence[str], trials: Sequence[Trial], limits: Limits, done: int
) -> list[Pair]:
    """Who meets whom after `done` rounds; empty: all that can be told is told.

    Three rounds of everybody, one of two nodes. dlrover's two are not enough where bad nodes are
    many: with 2 of 5 there may be no pair of good ones among them. Then those that no partner has
    cleared meet nodes that are clear, until they have met two; and clear ones that were slow with
    each other meet again.
    """
    everybodys = _rounds_of_all(len(nodes))
    if done < everybodys:
        return _circle(nodes, done)
    if done >= everybodys + MOST_EXTRA_ROUNDS:
        return []
    # By the fastest, not by what is usual: whoever met only bad partners is not clear yet.
    best = stand(trials, PAIR, limits).best
    fastest_s = min((seconds for seconds in best.values() if seconds is not None), default=0.0)
    bound_s = limits.bound_s(fastest_s, PAIR)
    clear = {node for node in nodes if _is_within(best.get((node, None)), bound_s)}
    free, pairs = [node for node in nodes if node in clear], []
    for node in nodes:
        met = _met(node, trials)
        strangers = [other for other in free if other not in met]
        if node not in clear and strangers and len(met & clear) < 2:
            free.remove(strangers[0])
            pairs.append((node, strangers[0]))
    for pair, times in _slow_pairs(trials, bound_s).items():
        if len(times) < LINK_TRIALS and set(pair) <= set(free):
            free = [node for node in free if node not in pair]
            pairs.append(pair)
    return pairs


def judge(
    trials: Sequence[Trial],
    limits: Limits,
    *,
    nodes: Collection[str],
    silent: Optional[Mapping[str, str]] = None,
) -> Judgement:
    """`silent`: node -> how it fell silent, as such a sentence."""
    bad: dict[str, list[str]] = {}
    notes: list[str] = []
    for node, what in (silent or {}).items():
        if 2 * len(silent or {}) < len(nodes):
            bad.setdefault(node, []).append(what)
        else:
            notes.append(f"{node}: {what}, and so did others, so it is not named")
    for part in (HBM, GEMM, P2P):
        for node, what in _judge_alone(trials, part, limits):
            (bad.setdefault(node, []) if node else notes).append(what)
    standing = stand(trials, PAIR, limits)
    if standing.usual_s is None and standing.best:
        notes.append("most nodes came through no all-reduce with another, so none is named for it")
    for node, _ in sorted(standing.slow | standing.failed, key=str):
        what, met = _told(standing, PAIR, (node, None), trials), _met(node, trials)
        if node in bad:
            continue
        if len(met) >= 2 and any(standing.is_clear((other, None)) for other in met):
            bad[node] = [what]
        else:
            notes.append(f"{node}: {what}, which may be its partner's doing")
    named = {node: "; ".join(dict.fromkeys(said)) for node, said in bad.items()}
    links = _links(standing, trials, limits)
    if 2 * len(named) > len(nodes) > 1:
        notes += [
            f"{node}: {what}; most others are no better, so it is not named"
            for node, what in named.items()
        ]
        named = {}
    return Judgement(named, links, notes)


def _judge_alone(trials: Sequence[Trial], part: str, limits: Limits) -> list[tuple[str, str]]:
    """(node, what it did), of what needs no other node; ("", note): held against nobody."""
    mine = [trial for trial in trials if trial.what == part]
    told = [
        (trial.nodes[0], f"{_whose(trial.rank)} {trial.wrong}") for trial in mine if trial.wrong
    ]
    wrong = {(trial.nodes[0], trial.rank) for trial in mine if trial.wrong}
    standing = stand(mine, part, limits)
    if standing.usual_s is None and len(wrong) < len(standing.best):
        why = next((f" ({trial.why})" for trial in mine if trial.why), "")
        return [
            *told,
            ("", f"half or more did not come through {WORDS[part]}{why}, so none is named for it"),
        ]
    apart = sorted((standing.slow | standing.failed) - wrong, key=str)
    return told + [(subject[0], _told(standing, part, subject, mine)) for subject in apart]


def _seconds(trial: Trial) -> Optional[float]:
    return None if trial.wrong else trial.seconds


def _rounds_of_all(count: int) -> int:
    if count < 2:
        return 0
    return min(3, count - 1 + count % 2)


def _circle(nodes: Sequence[str], number: int) -> list[Pair]:
    """Round `number` of a tournament in which each meets each: one stays, the others move on by a
    place. Of an odd number another one has no partner each time."""
    places: list[Optional[str]] = [*nodes, *([None] if len(nodes) % 2 else [])]
    shift = number % (len(places) - 1)
    moving = places[1:]
    places = [places[0], *moving[len(moving) - shift :], *moving[: len(moving) - shift]]
    half = len(places) // 2
    met = zip(places[:half], reversed(places[half:]))
    return [(one, other) for one, other in met if one is not None and other is not None]


def _met(node: str, trials: Iterable[Trial]) -> set[str]:
    """Its partners, itself not among them."""
    pairs = [trial.nodes for trial in trials if trial.what == PAIR and node in trial.nodes]
    return {other for nodes in pairs for other in nodes} - {node}


def _links(standing: Standing, trials: Sequence[Trial], limits: Limits) -> list[Pair]:
    """Slow or dead each time, between two nodes that are well with others."""
    if standing.usual_s is None:
        return []
    slow = _slow_pairs(trials, limits.bound_s(standing.usual_s, PAIR))
    return [
        pair
        for pair, times in slow.items()
        if len(times) >= LINK_TRIALS and all(standing.is_clear((node, None)) for node in pair)
    ]


def _slow_pairs(trials: Iterable[Trial], bound_s: float) -> dict[Pair, list[Optional[float]]]:
    """Pairs that were never within the bound, with all their times."""
    times: dict[Pair, list[Optional[float]]] = {}
    for trial in trials:
        if trial.what == PAIR:
            one, other = sorted(trial.nodes)
            times.setdefault((one, other), []).append(_seconds(trial))
    return {
        pair: told
        for pair, told in times.items()
        if not any(_is_within(seconds, bound_s) for seconds in told)
    }


def _is_within(seconds: Optional[float], bound_s: float) -> bool:
    return seconds is not None and seconds <= bound_s


def _told(standing: Standing, what: str, subject: Subject, trials: Iterable[Trial]) -> str:
    whose, seconds = _whose(subject[1]), standing.best[subject]
    if seconds is None:
        whys = [
            trial.why
            for trial in trials
            if trial.what == what and subject[0] in trial.nodes and trial.rank == subject[1]
        ]
        why = next((f" ({text})" for text in whys if text), "")
        return f"{whose} did not come through {WORDS[what]}{why}"
    usual_s = standing.usual_s or seconds
    return (
        f"{whose} takes {_shown(seconds)} at best for {WORDS[what]}, {seconds / usual_s:.1f} times "
        f"the usual {_shown(usual_s)}"
    )


def _whose(rank: Optional[int]) -> str:
    return "it" if rank is None else f"rank {rank} on it"


def _shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
