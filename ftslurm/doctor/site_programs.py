"""Prolog, Epilog and HealthCheckProgram: are ours among them, and are they run so that they help?

Pure. A program of the site's own may well call ours; nobody can tell that from its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ftslurm.doctor.cluster import Cluster
from ftslurm.doctor.line import Line, ok, warn

OURS = ("prolog.sh", "epilog.sh", "healthcheck.sh")
OUR_EPILOG_S = 60
"""What the epilog's probe and its calls of Slurm take at most, with some room."""
OUR_PROLOG_S = 20
NO_TIMEOUT = ("65534", "65535", "0", "")

_INSTALL = "have the site install the node part (`make install-node`, slurm/site/README.md)"


def check_prolog(cluster: Cluster) -> Line:
    return _check_program(cluster, "Prolog", "prolog.sh", "no Prolog")


def check_epilog(cluster: Cluster) -> Line:
    missing = "no Epilog: a requeued job may land on the node that broke it"
    return _check_program(cluster, "Epilog", "epilog.sh", missing)


def check_prolog_hold(cluster: Cluster) -> Line:
    name = "slurm.prolog_hold"
    if not cluster.all("Prolog"):
        return ok(name, "no Prolog whose failure could hold a job")
    if "nohold_on_prolog_fail" in cluster.words("SchedulerParameters"):
        return ok(name, "SchedulerParameters=nohold_on_prolog_fail")
    return warn(
        name,
        "SchedulerParameters without nohold_on_prolog_fail",
        "a job whose prolog finds a sick node is held until somebody releases it"
        " (`ftslurm resume`); set SchedulerParameters=nohold_on_prolog_fail",
    )


def check_prolog_flags(cluster: Cluster) -> Line:
    name = "slurm.prolog_flags"
    if not cluster.all("Prolog"):
        return ok(name, "no Prolog to run")
    told = cluster.get("PrologFlags")
    if {"Alloc", "Contain", "X11", "NoHold", "RunInJob"} & cluster.words("PrologFlags"):
        return ok(name, f"PrologFlags={told}")
    return warn(
        name,
        f"PrologFlags={told or '(null)'}, without Alloc",
        "the prolog runs only when a step begins, with the job's time running;"
        " set PrologFlags=Alloc",
    )


def check_health_check(cluster: Cluster) -> Line:
    name, program = "slurm.health_check", cluster.get("HealthCheckProgram")
    if not program or not cluster.number("HealthCheckInterval"):
        return warn(
            name,
            "no HealthCheckProgram runs: nodes are looked at only around jobs, and"
            " no drain of ours is lifted",
            _INSTALL,
        )
    if _ours_in(program) != ["healthcheck.sh"]:
        return warn(
            name,
            f"HealthCheckProgram={program}: nobody can tell from here whether it calls ours,"
            " without which no drain of ours is lifted",
            "call PREFIX/site/healthcheck.sh from it",
        )
    states = cluster.words("HealthCheckNodeState")
    # A drained node is an idle one with a flag; without a job it is neither ALLOC nor MIXED.
    if not states & {"ANY", "IDLE", ""} or states & {"START_ONLY", "REBOOT_ONLY"}:
        return warn(
            name,
            f"HealthCheckNodeState={cluster.get('HealthCheckNodeState')} never sees a drained node",
            "no drain of ours is lifted; set HealthCheckNodeState=ANY,CYCLE",
        )
    return ok(name, f"HealthCheckProgram={program} every {cluster.get('HealthCheckInterval')}")


def check_timeouts(cluster: Cluster) -> Line:
    """25.05 and later print EpilogTimeout and PrologTimeout as soon as one of them is set, and
    PrologEpilogTimeout otherwise (26.05, seen)."""
    name, told = "slurm.epilog_timeout", {}
    for kind, least_s in (("Prolog", OUR_PROLOG_S), ("Epilog", OUR_EPILOG_S)):
        if not cluster.all(kind):
            continue
        own = f"{kind}Timeout"
        key = own if cluster.get(own) else "PrologEpilogTimeout"
        value = told[key] = cluster.get(key)
        if value in NO_TIMEOUT:
            return warn(
                name,
                f"{key} is not set: a {kind} that hangs keeps its node for ever",
                f"set it to some minutes, never below {least_s} s",
            )
        if cluster.number(key) < least_s:
            return warn(
                name,
                f"{key}={value}",
                f"what we do in a {kind} may take {least_s} s on a sick node, and is killed"
                " before it has drained it",
            )
    limits = [f"{key}={value}" for key, value in told.items()]
    return ok(name, ", ".join(limits) or "no program of the site to wait for")


def _check_program(cluster: Cluster, key: str, script: str, missing: str) -> Line:
    name, programs = f"slurm.{key.lower()}", cluster.all(key)
    if not programs:
        return warn(name, missing, _INSTALL)
    told = ", ".join(f"{key}={one}" for one in programs)
    called = sorted({one for program in programs for one in _ours_in(program)})
    others = [one for one in called if one != script]
    if others:
        todo = f"name PREFIX/site/{script} itself"
        return warn(name, f"{told} runs {_and(others)} of ours as well", todo)
    if not called:
        return warn(
            name,
            f"{told}: nobody can tell from here whether it calls ours",
            f"call PREFIX/site/{script} from it and hand on its exit code",
        )
    return ok(name, told)


def _ours_in(program: str) -> list[str]:
    """Those of our scripts that a path or a pattern (glob(7)) of Slurm's takes in."""
    folder, _, pattern = program.rpartition("/")
    if not fnmatchcase("site", folder.rpartition("/")[2]):
        return []
    return [script for script in OURS if fnmatchcase(script, pattern)]


def _and(names: Sequence[str]) -> str:
    return " and ".join(names)
