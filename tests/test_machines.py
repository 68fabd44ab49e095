"""What was measured on several machines, in one file: nothing is lost, and nothing changes its machine."""

import copy
import json

import pytest

from stages.toolkit import build, machines, nsight

OLD = {"card": "A Card", "driver": "1.2", "torch": "2"}
NEW = {"card": "Another Card", "driver": "1.2", "torch": "2"}


def rows(*stages, ms=1.0, **more):
    return [{"stage": stage, "ms": ms, **more} for stage in stages]


def run(machine, *stages, date="2026-01-01", ms=1.0):
    return {**machine, "date": date, "records": rows(*stages, ms=ms)}


def where(recorded):
    """The stages of each machine, in the order of the file."""
    return [(machine["card"], [row["stage"] for row in machine["records"]]) for machine in recorded]


def test_a_file_has_rows_of_two_machines():
    recorded = machines.joined([], run(OLD, "b", "a"), "records")
    assert recorded == [{**OLD, "records": rows("a", "b", date="2026-01-01")}]
    recorded = machines.joined(recorded, run(NEW, "c", date="2026-02-02", ms=2.0), "records")
    assert recorded == [
        {**OLD, "records": rows("a", "b", date="2026-01-01")},
        {**NEW, "records": rows("c", date="2026-02-02", ms=2.0)},
    ]


def test_measuring_anew_replaces_the_rows_of_those_stages_alone():
    recorded = machines.joined([], run(OLD, "a", "a", "b", "c"), "records")
    before = copy.deepcopy(recorded)
    recorded = machines.joined(recorded, run(NEW, "b", "d", ms=2.0), "records")
    assert where(recorded) == [("A Card", ["a", "a", "c"]), ("Another Card", ["b", "d"])]
    assert recorded[0]["records"] == [row for row in before[0]["records"] if row["stage"] != "b"]
    again = machines.joined(recorded, run(OLD, "b", date="2026-03-03", ms=3.0), "records")
    assert where(again) == [("A Card", ["a", "a", "b", "c"]), ("Another Card", ["d"])]
    assert {(row["stage"], row["ms"], row["date"]) for row in again[0]["records"]} == {
        ("a", 1.0, "2026-01-01"),
        ("b", 3.0, "2026-03-03"),
        ("c", 1.0, "2026-01-01"),
    }
    assert where(recorded) == [("A Card", ["a", "a", "c"]), ("Another Card", ["b", "d"])]  # is as it was
    assert where(machines.joined(again, run(OLD, "d"), "records")) == [("A Card", ["a", "a", "b", "c", "d"])]


def test_a_run_that_measures_nothing_changes_nothing():
    recorded = machines.joined([], run(OLD, "a"), "records")
    assert machines.joined(recorded, run(NEW), "records") == recorded


@pytest.mark.parametrize("key", OLD)
def test_another_card_or_version_is_another_machine(key):
    other = OLD | {key: "another"}
    recorded = machines.joined(machines.joined([], run(OLD, "a"), "records"), run(other, "b"), "records")
    assert [len(machine["records"]) for machine in recorded] == [1, 1]
    assert machines.different(recorded[1], recorded[0], "records") == f"{key} another"
    assert machines.different(recorded[0], recorded[0], "records") == ""
    del recorded[1][key]
    assert machines.different(recorded[1], recorded[0], "records") == f"{key} not known"


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "a" / "nsight.json"
    assert nsight.read(path) == machines.read(path) == []
    case = {"size": [3, 4], "dtype": "float32"}
    load = {"count": "load_sectors", "metric": nsight.METRICS["load_sectors"]}
    equal = {**case, **load, "hardware": 7, "xray": 7, "reason": ""}
    other = {**case, **load, "hardware": 7, "xray": 8, "reason": "why"}
    nsight.add(path, {**OLD, "date": "2026-01-01", "rows": [{"stage": "a", **equal}, {"stage": "b", **other}]})
    nsight.add(path, {**NEW, "date": "2026-02-02", "rows": [{"stage": "c", **equal}, {"stage": "a", **other}]})
    found = [
        {**OLD, "rows": [{"stage": "b", **other, "date": "2026-01-01"}]},
        {**NEW, "rows": [{"stage": s, **row, "date": "2026-02-02"} for s, row in (("a", other), ("c", equal))]},
    ]
    assert nsight.read(path) == found
    assert sum('"stage"' in line for line in path.read_text().splitlines()) == 3  # a line for each call
    nsight.write(tmp_path / "again.json", found)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_the_recorded_files_are_of_that_form(tmp_path):
    bench, counts = build.PACKAGE / "measured" / "bench.json", build.PACKAGE / "measured" / "nsight.json"
    assert bench.read_text(encoding="utf-8") == json.dumps(machines.read(bench), indent=1) + "\n"
    nsight.write(tmp_path / "again.json", nsight.read(counts))
    assert (tmp_path / "again.json").read_bytes() == counts.read_bytes()
    for recorded, part in ((machines.read(bench), "records"), (nsight.read(counts), "rows")):
        assert recorded
        stages = [stage for machine in recorded for stage in {row["stage"] for row in machine[part]}]
        assert len(stages) == len(set(stages))  # each on one machine
        for machine in recorded:
            assert machine["card"] and all(row["date"] for row in machine[part])
            assert {row.get("card", machine["card"]) for row in machine[part]} == {machine["card"]}
            assert [other for other in recorded if not machines.different(machine, other, part)] == [machine]
