"""The form of stages/measured/bench.json and nsight.json: a list of machines, each with what was measured on it.

    [{"card": "NVIDIA H100 80GB HBM3", "driver": ..., "cuda": ..., "torch": ..., "nvcc": ..., "ncu": ...,
      "records": [{"stage": "00_axpy", ..., "date": "2026-11-28"}, ...]},
     {"card": "NVIDIA H200", ...}]

A machine is a card and the versions of all that was used there; another driver is another machine. The rows are the
"records" in bench.json, the "rows" of `nsight.read` in nsight.json, and each has the date of its run. A stage measured
anew loses the rows that it had, on whatever machine; all others stay where they are. So a stage is on one machine at a
time, and whatever compares rows takes those of one machine.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """The machines in a file; none if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def joined(recorded: Iterable[Mapping[str, Any]], run: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    """The machines that are recorded, with the rows of a new run in place of all that they have of its stages.

    Args:
        recorded: The machines. They are not changed.
        run: What `nsight.machine` gives, and the new rows.
        part: Where the rows are: "records" or "rows".
    """
    new = [row | {"date": run["date"]} for row in run[part]]
    stages = {row["stage"] for row in new}
    found = [{**machine, part: [row for row in machine[part] if row["stage"] not in stages]} for machine in recorded]
    here = {key: value for key, value in run.items() if key not in ("date", part)}
    own = next((machine for machine in found if not different(machine, here, part)), None)
    if own is None:
        own = {**here, part: []}
        found.append(own)
    own[part] = sorted(own[part] + new, key=lambda row: row["stage"])
    return [machine for machine in found if machine[part]]


def different(machine: Mapping[str, Any], other: Mapping[str, Any], part: str) -> str:
    """In what a machine is another one than the other: "card NVIDIA H200"; "" if it is the same."""
    keys = [key for key in {**other, **machine} if key != part and machine.get(key) != other.get(key)]
    return ", ".join(f"{key} {machine.get(key) or 'not known'}" for key in keys)
