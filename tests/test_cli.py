"""The command line: every command, its answers and its exit codes."""

import json
import subprocess
import sys

import pytest
import torch

import stages
from stages.toolkit import bench, build, chapter, cli, profile

COMMANDS = ["list", "info", "build", "run", "test", "xray", "bench", "profile", "chapter", "diff", "accuracy"]
COMMANDS += ["device"]


@pytest.fixture
def call(capsys):
    """Runs a command in this process: its exit code, what it printed, what it complained."""

    def run(*arguments):
        try:
            code = cli.main(arguments)
        except SystemExit as end:  # argparse
            code = end.code
        return (code, *capsys.readouterr())

    return run


def test_the_module_runs():
    command = [sys.executable, "-m", "stages", "list"]
    assert "matmul_shared" in subprocess.check_output(command, cwd=build.PACKAGE.parent, text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, call):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"example:  python -m stages {command}" in out
    assert max(map(len, out.splitlines())) <= 100


def test_help_lists_every_command(call):
    code, out, _ = call("--help")
    assert code == 0
    assert all(f"\n    {command} " in out for command in COMMANDS)
    assert call()[0] == 2


def test_list(call):
    code, out, _ = call("list")
    assert code == 0
    for name in stages.names():
        assert f"{name[:2]}  {name[3:]}  " in out
        assert stages.load(name).lesson in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("name", stages.names())
def test_info(name, call):
    code, out, _ = call("info", name[:2])
    assert code == 0
    stage = stages.load(name)
    assert out.startswith(f"{name}: {stage.title}\n")
    assert stage.header["Idea"].splitlines()[0] in out
    assert f"stages.load('{stage.operator}').{stage.family.CALL}" in out


@pytest.mark.parametrize("command", ["info", "build", "run", "test", "xray", "bench"])
def test_an_unknown_stage_is_answered_with_the_nearest(command, call):
    code, _, complaint = call(command, "matmul_sharde")
    assert code == 2
    assert complaint.startswith("error: no stage is called 'matmul_sharde'; nearest: 12_matmul_shared, ")
    assert complaint.count("\n") == 1


def test_build(call, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "build", lambda *names, **options: asked.append((*names, options)) or [])
    assert call("build", "12", "0", "--variant", "simt", "-j", "1")[0] == 0
    assert asked[0] == (["12_matmul_shared", "00_axpy"], ["simt"], {"jobs": 1, "force": False})
    assert call("build", "all", "--force")[0] == 0
    assert asked[1] == (stages.names(), None, {"jobs": None, "force": True})


@pytest.mark.parametrize("name", stages.names())
def test_run(name, call):
    in_triton = stages.load(name).in_triton
    if in_triton:
        pytest.importorskip("triton")
    code, out, _ = call("run", name, "--device", "cpu")
    assert code == 0
    assert out.endswith(f"{name}: passed\n")
    assert ("has no x-ray" if in_triton else "No faults.") in out and "WRONG" not in out
    assert all(str(dtype).removeprefix("torch.") in out for dtype in stages.load(name).dtypes)
    assert max(map(len, out.splitlines())) <= 100


def test_what_there_is_not_of_a_kernel_in_triton(call):
    for command, words in (
        (("xray",), "46_scan_triton has no x-ray: its kernel is written in Triton, and the CPU device runs and counts"),
        (("bench", "--device", "cpu"), "46_scan_triton: without a GPU `bench` measures the CPU device, which"),
        (("mutate",), "46_scan_triton: `mutate` breaks CUDA C++ and has the x-ray look at it; of a kernel in Triton"),
        (("mutate", "--list"), "46_scan_triton: `mutate` breaks CUDA C++"),
    ):
        code, out, complaint = call(command[0], "46", *command[1:])
        assert (code, out) == (1, "") and complaint.startswith(f"error: {words}") and complaint.count("\n") == 1
    code, out, _ = call("build", "46")
    assert (code, out) == (0, "nothing to build: 46_scan_triton is in Triton, which compiles at the first call\n")
    code, out, _ = call("diff", "44", "46")
    assert code == 0
    assert all(" ".join(stages.load(n).header["Idea"].split()) in " ".join(out.split()) for n in ("44", "46"))
    assert "kernel.cu is in CUDA C++, " in out and "kernel.py in Triton, " in out and "@@" not in out


@pytest.fixture
def older_card(monkeypatch):
    """A machine whose GPU is not the one that the kernel of stage 12 needs, so it is said."""
    kernels = stages.load("12").kernels
    monkeypatch.setattr(kernels, "capability", "9.0")
    monkeypatch.setattr(kernels, "instead", "11_matmul_coalesced")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Card")
    return (
        "12_matmul_shared needs a GPU of compute capability 9.0, and A Card (cuda) has 8.0: "
        "use stage 11_matmul_coalesced there\n"
    )


def test_a_stage_that_does_not_run_on_this_gpu(call, older_card):
    size = ("--size", "8,8,8")
    assert "of compute capability 9.0 alone; on others stage 11_matmul_coalesced" in call("info", "12")[1]
    for command in ("run", "bench"):
        answer = call(command, "12", *size, "--device", "cuda")
        assert answer == (1, "", f"error: --device cuda: {older_card}")
        code, out, complaint = call(command, "12", *size)
        assert code == 0 and complaint.startswith(f"on the CPU device: {older_card}")
    assert cli.pick_device(None, [stages.load("11"), stages.load("12")]) == "cuda"


def test_a_stage_without_float32(call, monkeypatch):
    monkeypatch.setattr(stages.load("12"), "dtypes", (torch.float16, torch.bfloat16))
    monkeypatch.setattr(stages.load("12"), "problems", ((8, 16, 24),))
    monkeypatch.setattr(stages.load("12"), "xray_sizes", (16, 24, 8))
    code, out, _ = call("run", "12", "--device", "cpu")
    assert code == 0
    assert out.count("8 x 16 x 24") == 2 and "float32" not in out
    assert "X-ray of M = 16, N = 24, K = 8, float16: the counts" in out
    code, out, _ = call("xray", "12")
    assert code == 0 and "\nM = 16, N = 24, K = 8, float16: the counts" in out
    bench = ("bench", "--device", "cpu", "--size", "8,8,8")
    code, out, complaint = call(*bench, "12")
    assert code == 0 and out.startswith("12_matmul_shared, float16, the CPU device")
    code, out, complaint = call(*bench, "--size", "16,16,16", "12", "11")
    assert code == 0 and out.startswith("matmul, float16, the CPU device") and "left out" not in complaint
    code, out, complaint = call(*bench, "--size", "16,16,16", "11", "12")
    assert code == 0 and out.startswith("matmul, float32, the CPU device")
    assert complaint.startswith("left out: 12_matmul_shared takes no float32\n")
    assert call("xray", "12", "--dtype", "float32")[2] == "error: --dtype float32: allowed: float16, bfloat16\n"


def test_run_fails_when_the_kernel_is_wrong(call, tmp_path):
    path = tmp_path / "fake.py"
    path.write_text("def matmul(a, b, c, stream): c.fill_(float('nan'))\n")
    with stages.load("12").kernels.replaced(simt=path):
        code, out, _ = call("run", "12", "--device", "cpu", "--size", "4,5,6", "--dtype", "float32")
    assert code == 1
    assert "WRONG: output, {'M': 4, 'N': 5, 'K': 6}, float32: error nan" in out
    assert out.endswith("12_matmul_shared: FAILED\n")


def test_test_runs_the_tests_of_the_stage(call, monkeypatch):
    commands = []
    monkeypatch.setattr(subprocess, "call", lambda command, cwd: commands.append(command) or 5)
    code, _, _ = call("test", "12", "-k", "views")
    assert code == 5
    assert commands[0][1:3] == ["-m", "pytest"]
    assert commands[0][3].endswith("tests/test_12_matmul_shared.py")
    assert commands[0][4:] == ["-k", "views"]


def test_xray(call):
    code, out, _ = call("xray", "12", "--size", "64,48,80", "--schedule", "random", "--seed", "3")
    assert code == 0
    assert "schedule random, seed 3" in out
    assert "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum" in out


def test_xray_as_json(call):
    code, out, _ = call("xray", "12", "--size", "32,64,96", "--dtype", "bfloat16", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["sizes"] == {"M": 32, "N": 64, "K": 96} and data["dtype"] == "bfloat16"
    expected = stages.load("12").cost(M=32, N=64, K=96, itemsize=2)
    assert data["counts"] == vars(expected)


def test_bench(call, tmp_path):
    plot = tmp_path / "bench.png"
    options = ("--device", "cpu", "--size", "16,16,16", "--size", "33,20,1", "--plot", str(plot))
    code, out, _ = call("bench", "12", *options)
    assert code == 0
    assert "16 x 16 x 16" in out and "33 x 20 x 1" in out and "ns a thread" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    code, out, _ = call("bench", "12", "--device", "cpu", "--size", "16,16,16", "--json")
    (record,) = json.loads(out)
    assert record["stage"] == "12_matmul_shared" and record["sizes"] == {"M": 16, "N": 16, "K": 16}
    assert record["ms"] > 0 and record["xray_ms"] > 0 and record["threads"] >= 256


def test_plot_of_records_from_a_gpu(tmp_path):
    record = {"stage": "12_matmul_shared", "device": "cuda", "dtype": "float32", "card": "a card", "sizes": {"M": 1}}
    record |= {"ms": 1.0, "incumbent": "torch.matmul", "incumbent_ms": 0.5}
    bench.plot([record], tmp_path / "bench.svg")
    assert "<svg" in (tmp_path / "bench.svg").read_text()


SMALL = ("--device", "cpu", "--batch", "1", "--dim", "2", "--seqlen", "3", "--dstate", "2", "--n-trials", "1")


def test_profile(call, tmp_path):
    plot = tmp_path / "profile.png"
    code, out, _ = call("profile", *SMALL, "--methods", "mamba,dirac,mamba", "--plot", str(plot))
    assert code == 0
    assert out.startswith("batch 1, dim 2, seqlen 3, dstate 2, float32, medians of 1,\nthe CPU device on ")
    assert "The coefficients alone\n" in out and "The scan\n" in out and "its own cost, not a GPU's" in out
    assert out.count("\n  mamba ") == out.count("\n  dirac ") == 2 and "zoh" not in out
    assert "Mamba's own kernel was not measured: " in out and out.endswith(f"\nplot: {plot}\n")
    assert max(map(len, out.splitlines())) <= 100
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_profile_as_json(call):
    code, out, _ = call("profile", *SMALL, "--methods", "foh", "--dtype", "complex64", "--json")
    records = json.loads(out)
    assert code == 0
    assert [(r["part"], r["by"]) for r in records] == [
        (part, by) for part in ("coefficients", "scan") for by in ("stages", "torch")
    ]
    assert all(r["method"] == "foh" and r["dtype"] == "complex64" and r["ms"] > 0 for r in records)
    assert all(r["both_ms"] > 0 for r in records)


def test_what_does_not_fit_is_said_in_its_cell(call, monkeypatch, tmp_path):
    monkeypatch.setattr(profile, "memory", lambda: 100)
    code, out, _ = call("profile", *SMALL, "--methods", "zoh", "--plot", str(tmp_path / "profile.svg"))
    assert code == 0
    alone, scan = (line.split() for line in out.splitlines() if line.startswith("  zoh "))
    assert " ".join(alone) == "zoh" + 4 * " does not fit"
    assert " ".join(scan).count("does not fit") == 2 and float(scan[1]) > 0
    assert "<svg" in (tmp_path / "profile.svg").read_text()

    def full(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 TiB.")

    def wrong(x):
        raise RuntimeError("another error")

    found = profile.times({"stages": torch.exp, "torch": full, "mamba_ssm": wrong}, (torch.ones(2),), "cpu", 1)
    assert found["stages"]["both_ms"] > 0
    assert found["torch"] == {"missing": "does not fit"} and found["mamba_ssm"] == {"missing": "another error"}
    with pytest.raises(RuntimeError, match="another error"):
        profile.times({"torch": wrong}, (torch.ones(2),), "cpu", 1)


def test_profile_of_a_gpu(tmp_path):
    common = {"sizes": {"batch": 8}, "dtype": "float32", "device": "cuda", "card": "A Card", "trials": 20}
    common |= {"method": "mamba", "part": "scan"}
    figures = {"ms": 2.0, "both_ms": 3.0, "peak_bytes": 1 << 20}
    records = [{**common, "by": "stages", **figures}, {**common, "by": "torch", **figures, "ms": 8.0}]
    records += [{**common, "by": "mamba_ssm", **figures}]
    text = profile.text(records)
    assert "A Card" in text and " ".join(text.splitlines()[6].split()) == "mamba 2 8 4 3 3 1 1 1"
    assert text.endswith("Mamba's own kernel, for mamba: 2 ms, both 3 ms, 1 MiB.")
    assert max(map(len, text.splitlines())) <= 100
    profile.plot(records, tmp_path / "profile.svg")
    assert "<svg" in (tmp_path / "profile.svg").read_text()


def test_profile_leaves_what_was_measured_when_it_is_interrupted(call, monkeypatch):
    taken = []

    def times(calls, *others, both):
        taken.append(calls)
        if len(taken) > 2:
            raise KeyboardInterrupt
        return {by: {"ms": 1.0, "both_ms": 2.0} for by in calls}

    monkeypatch.setattr(profile, "times", times)
    code, out, complaint = call("profile", *SMALL, "--methods", "zoh,foh")
    assert code == 130 and complaint == "profile: zoh\ninterrupted\n"
    assert out.count("\n  zoh ") == 2 and "\n  foh " not in out


def test_chapter(call, monkeypatch):
    record = {"stage": "12_matmul_shared", "sizes": {"M": 4096, "N": 4096, "K": 4096}, "dtype": "float32", "ms": 3.0}
    record |= {"incumbent_ms": 1.5, "ratio": 0.5, "percent_of_limit": 40.0, "limit": "arithmetic"}
    record["date"] = "2026-01-01"
    machine = {"card": "A Card", "driver": "1.2", "torch": "2", "records": [record]}
    monkeypatch.setattr(chapter, "recorded", lambda: [machine])
    code, out, _ = call("chapter", "1")
    assert code == 0
    assert out.startswith("Chapter 1, matmul, on one A Card") and "12 shared" in out and "50.0" in out
    assert max(map(len, out.splitlines())) <= 100
    assert call("chapter", "4")[1].startswith("Not measured yet.")
    family = stages.load("48").family
    sizes = dict(zip(family.SIZES, family.BENCH["cuda"][-1], strict=True))
    machine["records"].append({**record, "stage": "48_adaptive_unitary", "sizes": sizes})
    code, out, _ = call("chapter", "4")
    assert code == 0 and out.startswith("Chapter 4, ssm_adaptive_unitary, on one A Card")
    code, _, complaint = call("chapter", "x")
    assert (code, complaint) == (2, f"error: no chapter is called 'x'; there are: {', '.join(chapter.numbers())}\n")


def test_diff(call, monkeypatch):
    code, out, _ = call("diff", "11", "12")
    assert code == 0
    assert "\033" not in out  # no terminal, no colour
    assert all(" ".join(stages.load(n).header["Idea"].split()) in " ".join(out.split()) for n in ("11", "12"))
    assert "+++ stages/12_matmul_shared/kernel.cu" in out and "\n+" in out and "\n-" in out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert "\033[32m+" in call("diff", "11", "12")[1]
    assert "The code is the same." in call("diff", "12", "12")[1]


def test_device(call):
    code, out, _ = call("device")
    assert code == 0
    assert "The CPU device" in out and "cores used" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("xray", "12", "--size", "3,4"), "--size 3,4: allowed: 3 whole numbers, M,N,K of matmul(a, b, *, tf32=False)"),
        (("run", "00", "--size", "many"), "--size many: allowed: 1 whole number, N of axpy(alpha, x, y)"),
        (("profile", "--batch", "0"), "--batch 0: allowed: a whole number from 1 on"),
        (("profile", "--seqlen", "1e3"), "--seqlen 1e3: allowed: a whole number from 1 on"),
        (("profile", "--n-trials", "-1"), "--n-trials -1: allowed: a whole number from 1 on"),
        (("profile", "--dstate", "300"), "--dstate 300: allowed: at most 256 states a channel"),
        (
            ("profile", "--methods", "zoh,tustin"),
            "--methods tustin: allowed: mamba, zoh, foh, bilinear, highorder, poly, rk4, dirac, backward_euler",
        ),
        (
            ("profile", "--dtype", "int8"),
            "--dtype int8: allowed: float64, float32, float16, bfloat16, complex128, complex64",
        ),
        (("bench", "12", "--dtype", "int8"), "--dtype int8: allowed: float64, float32, float16, bfloat16"),
    ],
)
def test_wrong_options(arguments, words, call):
    code, _, complaint = call(*arguments)
    assert code == 2
    assert complaint == f"error: {words}\n"


@pytest.mark.parametrize(
    ("error", "code", "complaint"),
    [
        (stages.BuildError("no compiler"), 1, "error: no compiler\n"),
        (stages.KernelFault("deadlock"), 1, "error: deadlock\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
    ids=["build", "fault", "ctrl-c"],
)
def test_failures_are_short(error, code, complaint, call, monkeypatch):
    def fail(*names):
        raise error

    stage = stages.load("12")
    monkeypatch.setattr(stage.kernels, "_modules", {})
    monkeypatch.setattr(build, "ensure", fail)
    result = call("xray", "12")
    assert (result[0], result[2]) == (code, complaint)
