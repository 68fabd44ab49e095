"""The comparison of the x-ray with Nsight Compute, as far as it goes without a GPU: a recorded answer of ncu."""

import os
import sys
from dataclasses import replace

import pytest
import torch

import stages
from stages.toolkit import nsight
from stages.toolkit.errors import NotAvailable
from stages.toolkit.report import METRICS

KERNEL = "void matmul_shared<float>(View<const T1, 2>, View<const T1, 2>, View<T1, 2>)"
FRONT = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size"]
FRONT += ["Grid Size", "Device", "CC"]


def answer(*launches: dict[str, int], grid=(4, 1, 1), block=(32, 32, 1), kernel=KERNEL, number="{:,}") -> str:
    """What ncu prints for these counts, with the noise around it."""

    def line(cells) -> str:
        return ",".join(f'"{cell}"' for cell in cells)

    metrics = sorted(METRICS, key=METRICS.get)  # ncu sorts them by name
    rows = [
        "==PROF== Connected to process 4711 (/usr/bin/python3.11)",
        "building 12_matmul_shared (cuda) ... 5.0 s",
        '==PROF== Profiling "matmul_shared" - 0: 0%....50%....100% - 4 passes',
        "==PROF== Disconnected from process 4711",
        line([*FRONT, *(METRICS[name] for name in metrics)]),
        line([""] * len(FRONT) + ["sector" if "sector" in name else "request" for name in metrics]),
    ]
    for i, counts in enumerate(launches):
        front = [str(i), "4711", "python3.11", "127.0.0.1", kernel, "1", "7", str(block), str(grid), "0", "9.0"]
        rows.append(line([*front, *(number.format(counts[name]) for name in metrics)]))
        rows.append("something that the program printed")
    return "\n".join(rows) + "\n"


@pytest.fixture(scope="module")
def cases():
    return nsight.cases_of(stages.load("12"), [(64, 64, 64), (33, 63, 127)], ["float32"])  # four blocks in both


@pytest.mark.parametrize("number", ["{:,}", "{}", "{}.0", "{:.2f}"])
def test_ncu_is_read_between_other_lines(number):
    counts = {name: 1_048_576 + i for i, name in enumerate(METRICS)}
    (first, second) = nsight.parse(answer(counts, counts, number=number))
    assert first == second
    assert (first.kernel, first.grid, first.block) == (KERNEL, (4, 1, 1), (32, 32, 1))
    assert first.counts == counts


@pytest.mark.parametrize(
    "text, words",
    [
        ("==WARNING== No kernels were profiled.\n", "no kernel was profiled"),
        (answer(), "no kernel was profiled"),
        (answer(dict.fromkeys(METRICS, 1), number="n/a"), "not a whole number"),
        (answer(dict.fromkeys(METRICS, 1)).replace(METRICS["load_sectors"], "other"), "no column l1tex__t_sectors"),
    ],
)
def test_what_is_missing_is_said(text, words):
    with pytest.raises(ValueError, match=words):
        nsight.parse(text)


def test_base_name():
    for kernel in ("matmul_shared<float>", KERNEL, "matmul_shared", "void a::matmul_shared<float, 3>(int)"):
        assert nsight.base_name(kernel) == "matmul_shared"


def test_equal_counts(cases):
    rows = nsight.compare(cases, nsight.parse(answer(*(case.counts for case in cases))))
    assert len(rows) == 2 * len(METRICS)
    assert all(row["hardware"] == row["xray"] and row["reason"] == "" for row in rows)
    assert nsight.failures(rows) == []
    assert "The x-ray counts the same in 18 of 18." in nsight.table(rows)
    (sectors,) = (row for row in rows if row["count"] == "load_sectors" and row["size"] == [64, 64, 64])
    assert sectors["hardware"] == 2048 and sectors["metric"] == "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum"


@pytest.mark.parametrize("name, change, reason", [
    ("shared_load_wavefronts", -8192, nsight.MERGED),
    ("shared_store_conflicts", 5, nsight.ARBITRATION),
    ("shared_store_wavefronts", 5, ""),
    ("shared_copy_wavefronts", 5, nsight.COPIES),
])  # fmt: skip
def test_a_shared_count_that_differs_is_told_and_no_failure(cases, name, change, reason):
    counts = [dict(case.counts) for case in cases]
    counts[0][name] += change
    rows = nsight.compare(cases, nsight.parse(answer(*counts)))
    (different,) = (row for row in rows if row["hardware"] != row["xray"])
    assert (different["count"], different["reason"]) == (name, reason)
    assert nsight.failures(rows) == []
    text = nsight.table(rows)
    assert "in 17 of 18. Different (*):" in text and (reason or "no reason known") in text
    assert max(map(len, text.splitlines())) <= 110


def test_waits_of_the_pipe_are_told_from_conflicts(cases):
    counts = [dict(case.counts) for case in cases]
    for name in ("shared_load_wavefronts", "shared_load_conflicts"):
        counts[0][name] += 7
    rows = nsight.compare(cases, nsight.parse(answer(*counts)))
    assert [row["reason"] for row in rows if row["hardware"] != row["xray"]] == [nsight.WAITS] * 2


def test_what_is_never_read_is_told(cases):
    counts = [dict(case.counts) for case in cases]
    counts[0]["shared_load_wavefronts"] = 0
    rows = nsight.compare(cases, nsight.parse(answer(*counts)))
    assert nsight.UNUSED in [row["reason"] for row in rows if row["hardware"] != row["xray"]]


@pytest.mark.parametrize("name", nsight.EXACT)
def test_a_global_count_that_differs_is_a_failure(cases, name):
    counts = [dict(case.counts) for case in cases]
    counts[1][name] += 1
    (failure,) = nsight.failures(nsight.compare(cases, nsight.parse(answer(*counts))))
    assert failure.startswith("12_matmul_shared, 33x63x127, float32: " + METRICS[name])


@pytest.mark.parametrize("name", nsight.EXACT)
def test_blocks_that_wait_may_look_more_or_less_often_but_store_no_less(cases, name):
    for change, failures in ((5, 0), (-1, int(name not in nsight.LOADS))):
        counts = [dict(case.counts) for case in cases]
        counts[1][name] += change
        rows = nsight.compare([replace(case, waits=True) for case in cases], nsight.parse(answer(*counts)))
        assert len(nsight.failures(rows)) == failures
        assert ("look again and again" in nsight.table(rows)) == (not failures)


def test_other_launches_cannot_be_compared(cases):
    counts = [case.counts for case in cases]
    for text, words in (
        (answer(counts[0]), "1 launches on the CPU device, 0 on the GPU"),
        (answer(*counts, counts[0]), "1 more launches on the GPU"),
        (answer(*counts, grid=(5, 1, 1)), r"on the GPU \('matmul_shared', \(5, 1, 1\)"),
        (answer(*counts, kernel="void other<float>(int)"), "on the GPU .*other"),
    ):
        with pytest.raises(ValueError, match=words):
            nsight.compare(cases, nsight.parse(text))


def test_empty_problems_launch_nothing_and_are_left_out(monkeypatch):
    stage = stages.load("00")
    assert nsight.cases_of(stage, [(0,)], ["float32"]) == []
    assert set(stage.family.PROBLEMS) | set(stage.bench["cpu"]) == set(nsight.problems(stage))
    monkeypatch.setattr(stage, "problems", ((7,),))
    assert {(7,)} | set(stage.bench["cpu"]) == set(nsight.problems(stage))


def test_what_cannot_be_compared_is_left_out(monkeypatch, capsys):
    narrow, hopper = stages.load("11"), stages.load("12")
    monkeypatch.setattr(narrow, "dtypes", (torch.float16,))
    monkeypatch.setattr(hopper.kernels, "capability", "9.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Card")
    monkeypatch.setattr(nsight, "find_ncu", lambda given: "ncu")
    monkeypatch.setattr(nsight.build, "build", lambda *_: None)
    monkeypatch.setattr(nsight, "machine", lambda ncu: {})
    assert nsight.record([narrow.name, hopper.name], dtypes=["float32", "bfloat16"]) == {"rows": []}
    assert capsys.readouterr().err == (
        "left out: 11_matmul_coalesced takes none of float32, bfloat16\n"
        "left out: 12_matmul_shared needs a GPU of compute capability 9.0, and A Card (cuda) has 8.0\n"
    )


@pytest.fixture
def fake_ncu(tmp_path, monkeypatch):
    """An ncu that writes a given answer to its log and ends with a given code."""
    program = tmp_path / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "if '--version' in sys.argv: print('Version 2025.1.0.0 (build 1)'); sys.exit()\n"
        "open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write(open(os.environ['FAKE_ANSWER']).read())\n"
        "sys.exit(int(os.environ.get('FAKE_CODE', 0)))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("FAKE_ANSWER", str(tmp_path / "answer"))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "answer"


def test_the_whole_command(fake_ncu, cases, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card")
    monkeypatch.setattr(nsight.build, "build", lambda *_: None)
    monkeypatch.setattr(nsight, "machine", lambda ncu: {"card": "A Card", "date": "2026-01-01"})
    fake_ncu.write_text(answer(cases[0].counts))
    line = [
        "--stages",
        "12",
        "--size",
        "64x64x64",
        "--dtypes",
        "float32",
        "--json",
        str(tmp_path / "a" / "nsight.json"),
    ]
    assert nsight.main(line) == 0
    assert "all requests and sectors equal" in capsys.readouterr().out
    (written,) = nsight.read(tmp_path / "a" / "nsight.json")
    again = tmp_path / "again.json"
    nsight.write(again, [written])
    assert nsight.read(again) == [written]
    assert written["card"] == "A Card"
    assert {row["count"]: row["hardware"] for row in written["rows"]} == dict(cases[0].counts)

    fake_ncu.write_text(answer(replace(cases[0], counts={**cases[0].counts, "load_sectors": 1}).counts))
    assert nsight.main(line) == 1
    assert "DIFFERENT: 12_matmul_shared, 64x64x64, float32: l1tex__t_sectors" in capsys.readouterr().out

    fake_ncu.write_text("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission ...\n")
    assert nsight.main(line) == 1
    assert "run this as root" in capsys.readouterr().err

    fake_ncu.write_text(answer(cases[0].counts))
    monkeypatch.setenv("FAKE_CODE", "9")
    assert nsight.main(line) == 1
    assert "12_matmul_shared: ncu: exit code 9; its last lines" in capsys.readouterr().err


def test_without_a_gpu_or_ncu(monkeypatch, capsys):
    if not torch.cuda.is_available():
        assert nsight.main(["--stages", "00"]) == 1
        assert "finds no GPU" in capsys.readouterr().err
    with pytest.raises(NotAvailable, match="--ncu /no/such/ncu: no such command"):
        nsight.find_ncu("/no/such/ncu")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(nsight, "PLACES", ())
    with pytest.raises(NotAvailable, match="no ncu"):
        nsight.find_ncu()
