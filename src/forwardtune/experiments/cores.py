"""How many cores this process may use, and how many of them others leave free."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS, MEMBERSHIP, LOAD = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/loadavg")


def allowed() -> int:
    """The cores that the system lets us use: those of our affinity, as far as the quota of our cgroups goes."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(mine, quota())))


def free() -> int:
    """The allowed cores that are idle, at least one."""
    return max(1, min(allowed(), round((os.cpu_count() or 1) - busy())))


def quota(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float:
    """Cores' worth of time that our control groups, or those around them, may use; infinite if nothing limits them."""
    limits = [math.inf]
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            top = cgroups / controllers
            own = top / path.lstrip("/")
            for folder in (own, *own.parents):
                limits.extend(_limits(folder))
                if folder == top:
                    break
    return min(limits)


def _limits(folder: Path) -> Iterator[float]:
    """Of one group, in the files of version 2 or 1: a quota and the period it is for, in microseconds."""
    with suppress(OSError, ValueError):
        most, period = (folder / "cpu.max").read_text().split()
        yield int(most) / int(period)  # not a number if there is no limit: "max"
    with suppress(OSError, ValueError):
        most, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(most) > 0:
            yield int(most) / int(period)


def busy(load: Path = LOAD) -> float:
    """Cores that others use: the load of the last minute or, if that is less, of this moment.

    After a program has ended the first still counts it, and the second counts one that runs for an instant.
    """
    try:
        lately, *_, now, _ = load.read_text().split()
        return min(float(lately), int(now.partition("/")[0]) - 1)
    except (OSError, ValueError):
        return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
