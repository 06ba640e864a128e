"""Whether a partition that is for some groups only is for this user, too.

Slurm goes by the groups that the user's name has where slurmctld runs, whatever those of a process
are (slurm.conf(5), AllowGroups); here it is judged by what this machine knows of them.
"""

from __future__ import annotations

import grp
import os
import pwd


def may_use(allowed: str, uid: int) -> bool:
    """`allowed`: names with commas, or ALL. Slurm refuses root nothing. True as well where this
    machine does not know the user, or one of the groups."""
    names = allowed.split(",")
    if uid == 0 or "ALL" in names:
        return True
    try:
        user = pwd.getpwuid(uid)
        wanted = {grp.getgrnam(name).gr_gid for name in names}
    except KeyError:
        return True
    return not wanted.isdisjoint(os.getgrouplist(user.pw_name, user.pw_gid))
