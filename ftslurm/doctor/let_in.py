"""Whether a partition takes jobs of this account and this QOS. Pure.

A job that it does not take is queued all the same and waits for ever, unless EnforcePartLimits has
sbatch refuse it. QOS lists hold always. An account list holds on 22.05 always, and for the accounts
that it names; on 24.11 and 26.05 for all accounts below them, too, and only where
AccountingStorageEnforce has `associations` (seen on all three). In between nobody has looked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ftslurm.doctor.cluster import Cluster
from ftslurm.doctor.line import Line, fail, ok, skipped, warn

NAME = "slurm.let_in"
_KEYS = ("AllowAccounts", "DenyAccounts", "AllowQos", "DenyQos")


def lists_of(partition: Mapping[str, str]) -> dict[str, list[str]]:
    """Of _KEYS those that keep somebody out -> names; slurmdbd keeps them in small letters."""
    shown = {key: partition.get(key, "").lower() for key in _KEYS}
    return {key: names.split(",") for key, names in shown.items() if names not in ("", "all")}


def names_accounts(partition: Mapping[str, str]) -> bool:
    return any(key.endswith("Accounts") for key in lists_of(partition))


def check_let_in(cluster: Cluster) -> Line:
    lists = lists_of(cluster.partition)
    if not lists:
        return ok(NAME, f"partition {cluster.partition_name} is for all accounts and QOS")
    told = f"partition {cluster.partition_name} has " + ", ".join(
        f"{key}={','.join(names)}" for key, names in lists.items()
    )
    by_qos, by_account = (any(key.endswith(kind) for key in lists) for kind in ("Qos", "Accounts"))
    qos, account = cluster.qos_name, cluster.account
    if by_qos and qos and not _takes(lists, "Qos", {qos}):
        return fail(NAME, f"{told}, and your jobs are of QOS {qos}", _OTHER)
    readings = _readings(cluster, lists) if by_account and account else {True}
    if readings == {False}:
        return fail(NAME, f"{told}, and your account is {account}", _OTHER)
    if by_qos and not qos:
        return skipped(NAME, f"{told}; which QOS your jobs get is not told: --qos names it")
    if by_account and not account:
        return skipped(NAME, f"{told}; which account yours is is not told: --account names it")
    if readings != {True}:
        told += f", and your account is {account}: whether it is let in is not known"
        return warn(NAME, told, _OTHER)
    return ok(NAME, f"{told}, and takes your jobs")


_OTHER = (
    "such a job, for no other partition, is refused or waits for ever: name another account"
    " (cluster.account; here --account), another QOS (cluster.qos; --qos) or partition, or ask to"
    " be let in"
)


def _readings(cluster: Cluster, lists: Mapping[str, list[str]]) -> set[bool]:
    """Whether the account is taken; both where nobody can tell."""
    by_name = _takes(lists, "Accounts", {cluster.account})
    found = {by_name} if cluster.version < (24, 11) else set()
    if cluster.version >= (23, 2):
        if "associations" not in cluster.words("AccountingStorageEnforce"):
            found.add(True)
        elif cluster.above is not None or _names(lists, cluster.account):
            found.add(_takes(lists, "Accounts", {cluster.account, *(cluster.above or ())}))
        else:
            found |= {True, False}
    return found


def _names(lists: Mapping[str, list[str]], account: str) -> bool:
    """Whether the list that counts has it, whatever is above it."""
    counts = lists.get("AllowAccounts", lists.get("DenyAccounts", ()))
    return account.lower() in counts


def _takes(lists: Mapping[str, list[str]], kind: str, own: Collection[str]) -> bool:
    """Where there is an Allow list, Deny is not looked at (slurm.conf(5))."""
    names = {name.lower() for name in own}
    allowed = lists.get(f"Allow{kind}")
    if allowed is not None:
        return not names.isdisjoint(allowed)
    return names.isdisjoint(lists.get(f"Deny{kind}", ()))
