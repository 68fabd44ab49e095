"""The build, on a small tree of its own: two tiny stages without torch or pybind11, so that a build takes a second."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from stages.toolkit import build, check_cuda, header
from stages.toolkit.compilers import BuildError, gencode, parse_architectures

REPOSITORY = Path(__file__).resolve().parents[1]
VARIABLES = "STAGES USE_CUDA DEBUG TORCH_CUDA_ARCH_LIST CUDA_HOME CXX PYTHONPATH".split()
has_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not on PATH")

KERNEL = """
#include "common/value.h"
#ifdef __CUDACC__
template <typename T>
__global__ void store(T* out) { *out = VALUE; }
int answer() {
  store<float><<<1, 1>>>(nullptr);
  return VALUE;
}
#else
int device_value();
int answer() { return device_value() + VALUE; }
#endif
"""
BINDING = """
#include <Python.h>
int answer();
static PyObject* call(PyObject*, PyObject*) { return PyLong_FromLong(answer()); }
static PyMethodDef methods[] = {{"answer", call, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT PyObject* PyInit__simt() { return PyModule_Create(&module); }
EXPORT PyObject* PyInit__xray() { return PyModule_Create(&module); }
EXPORT PyObject* PyInit__cuda() { return PyModule_Create(&module); }
"""
DEVICE = """
int device_value() { return 40; }
extern "C" void __tsan_init() {}  // what g++ and clang++ call in an instrumented module
"""
FILES = {
    "common/value.h": "constexpr int VALUE = 2;\n",
    "common/simt/runtime.cpp": DEVICE,
    "stages/__init__.py": "import types\ndef load(name): return types.SimpleNamespace()\n",
    "stages/10_first/kernel.cu": KERNEL,
    "stages/10_first/binding.cpp": BINDING,
    "stages/11_second/kernel.cu": KERNEL,
    "stages/11_second/binding.cpp": BINDING,
    "README.md": "A tree for tests.\n",
}
# Builds a module at first use and calls it, as the package does.
USE = """
import importlib.util, sys
sys.path.insert(0, sys.argv[3] if len(sys.argv) > 3 else "stages")
from toolkit import build
path = build.ensure(sys.argv[1], sys.argv[2])
spec = importlib.util.spec_from_file_location("stages._" + sys.argv[2], path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.answer())
"""


class Tree:
    """A checkout in a temporary folder, and what a user does in it."""

    def __init__(self, root: Path):
        self.root = root
        for name, text in FILES.items():
            self.write(name, text)
        for name in ["setup.py", "pyproject.toml", "LICENSE"]:
            shutil.copy(REPOSITORY / name, root)
        shutil.copytree(REPOSITORY / "stages" / "toolkit", root / "stages" / "toolkit")
        self.env = {key: value for key, value in os.environ.items() if key not in VARIABLES}
        self.env |= {"USE_CUDA": "0", "CXX": str(self.tool("cxx")), "XDG_CACHE_HOME": str(root / "cache")}

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def tool(self, name: str, before: str = "", program: str = "g++") -> Path:
        """A compiler that writes down what it compiles, and does something else `before`."""
        text = f'#!/bin/sh\nfor word; do case "$word" in *.cu|*.cpp) echo "$word" >> "{self.root}/log";; esac; done\n'
        path = self.write(f"bin/{name}", f'{text}{before}\nexec {program} "$@"\n')
        path.chmod(0o755)
        return path

    def compiled(self) -> list[str]:
        """What was compiled since the last call, such as 10_first/kernel.cu; once for each variant."""
        log = self.root / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return sorted("/".join(Path(line).parts[-2:]) for line in lines)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, *arguments]

    def run(self, *arguments: str, **env: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*arguments), cwd=self.root, env=self.env | env, capture_output=True, text=True, timeout=120
        )

    def setup(self, **env: str) -> subprocess.CompletedProcess:
        return self.run("setup.py", "build_ext", "--inplace", **env)

    def use(self, variant: str = "simt", **env: str) -> int:
        done = self.run("-c", USE, "10_first", variant, **env)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def start(self, *arguments: str) -> subprocess.Popen:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            self.command(*arguments), cwd=self.root, env=self.env, stdout=pipe, stderr=pipe, text=True,
            # A test runner in the background may have been told to ignore Ctrl-C, and its children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def modules(self) -> list[str]:
        return sorted(str(path.relative_to(self.root)).partition(".")[0] for path in self.root.glob("stages/*/*.so"))


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "a tree")  # with a space, which a user's folder may have too


def failed(done: subprocess.CompletedProcess, *words: str) -> None:
    """Checks that a command failed with a message that holds these words, and with no traceback."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Words to lists


def test_architectures():
    assert parse_architectures("8.0;9.0a") == ["8.0", "9.0a"]
    assert parse_architectures("Ampere;Hopper") == ["8.0", "8.6", "9.0a"]
    assert parse_architectures("hopper, 8.0+PTX  8.0+PTX") == ["9.0a", "8.0+PTX"]
    assert parse_architectures("Ampere+PTX") == ["8.0", "8.6+PTX"]
    assert gencode("9.0a") == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert gencode("8.6+PTX") == [f"-gencode=arch=compute_86,code={code}_86" for code in ("sm", "compute")]


@pytest.mark.parametrize("text", ["9.9", "Pascal", "8.0;sm_90", "8.0+SASS", "80", "+PTX"])
def test_unknown_architecture(text):
    with pytest.raises(BuildError, match=r"TORCH_CUDA_ARCH_LIST=.*is unknown; allowed: Ampere, .*8\.0.*9\.0a"):
        parse_architectures(text)


HOPPER = "// Stage 10: first\n//\n// Needs     compute capability 9.0: wgmma is\n//           Hopper's own.\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "10_first" / "kernel.cu"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_what_a_kernel_needs(tmp_path):
    assert header.capability(written(tmp_path, HOPPER + KERNEL)) == "9.0"
    for text in ("", KERNEL, "// Stage 10: first\n//\n// Problem   x\n\n// Needs     compute capability 9.0\n"):
        assert header.capability(written(tmp_path, text)) is None
    for words in ("compute capability 9.9", "compute capability 9.00", "compute capability", "sm_90a"):
        allowed = r"; allowed: `Needs compute capability X`, X one of 8\.0, 8\.6, .*9\.0, 10\.0"
        with pytest.raises(BuildError, match=f"^10_first/kernel.cu: its header says `Needs {words}`{allowed}"):
            header.capability(written(tmp_path, f"// Stage 10: first\n// Needs     {words}\n//           and more\n"))


def test_a_kernel_is_compiled_for_what_it_needs_alone(tmp_path):
    anywhere, hopper = written(tmp_path, KERNEL), written(tmp_path / "10_first", HOPPER + KERNEL)
    assert build.runnable("10_first", anywhere, ["8.0", "9.0+PTX"]) == ["8.0", "9.0+PTX"]
    for asked in (["8.0", "9.0a"], ["9.0"], ["9.0+PTX", "12.0"], ["9.0a+PTX", "9.0"]):
        assert build.runnable("10_first", hopper, asked) == ["9.0a"]
    words = "^10_first: its CUDA module needs a GPU of compute capability 9.0, but is to be built for 8.0, 10.0a; T"
    with pytest.raises(build.OtherGPUs, match=words):
        build.runnable("10_first", hopper, ["8.0", "10.0a"])


def test_choice_of_stages(tree):
    def select(text):
        done = tree.run(
            "-c", f"import sys; sys.path[0] = 'stages'\nfrom toolkit import build\nprint(build.select({text!r}))"
        )
        return done.stdout.strip() or done.stderr.strip().splitlines()[-1]

    assert select("11") == select("second") == select("sec") == select("11_s") == "['11_second']"
    assert select("11, 10") == select("all") == select("10;all") == "['10_first', '11_second']"
    assert "stage '1' could be 10_first, 11_second" in select("1")
    assert "stage 'secnod' is unknown; nearest: 11_second" in select("secnod")
    assert "stage 'zzz' is unknown; there are: 10_first, 11_second" in select("zzz")


# ---------------------------------------------------------------------------------------------------------------------
# What is built, and when again


def test_setup_builds_what_is_asked_for(tree):
    done = tree.setup(STAGES="11")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^building 11_second \(simt, xray\) \.\.\. \d+\.\d s$", done.stderr, re.MULTILINE)
    assert tree.modules() == ["stages/11_second/_simt", "stages/11_second/_xray"]
    done = tree.setup()
    assert done.returncode == 0, done.stderr
    assert len(tree.modules()) == 4
    # The CPU device is compiled once for both stages, a binding once for both variants, a kernel once for each.
    kernels = ["10_first/kernel.cu"] * 2 + ["11_second/kernel.cu"] * 2
    everything = sorted(["10_first/binding.cpp", "11_second/binding.cpp", "simt/runtime.cpp", *kernels])
    assert tree.compiled() == everything
    assert tree.setup().returncode == 0 and tree.compiled() == []
    assert tree.run("setup.py", "build_ext", "--inplace", "--force").returncode == 0 and tree.compiled() == everything


def test_rebuilds_what_changed_and_only_that(tree):
    assert tree.use() == 42
    assert tree.compiled() == ["10_first/binding.cpp", "10_first/kernel.cu", "simt/runtime.cpp"]
    assert tree.use() == 42
    assert tree.compiled() == []
    tree.write("common/value.h", "constexpr int VALUE = 3;\n")
    assert tree.use() == 43
    assert tree.compiled() == ["10_first/kernel.cu"]
    tree.write("common/simt/runtime.cpp", DEVICE.replace("40", "50"))
    assert tree.use() == 53
    assert tree.compiled() == ["simt/runtime.cpp"]
    tree.write("stages/10_first/binding.cpp", BINDING.replace("answer());", "answer() + 1);"))
    assert tree.use() == 54
    assert tree.compiled() == ["10_first/binding.cpp"]
    next(tree.root.glob("stages/10_first/_simt*.so")).write_bytes(b"not a module")
    assert tree.use() == 54
    assert tree.compiled() == []


def test_flags_and_compiler_rebuild(tree):
    tree.use()
    tree.compiled()
    assert tree.use(DEBUG="1") == 42
    assert tree.compiled() == ["10_first/binding.cpp", "10_first/kernel.cu"]  # and not the CPU device
    assert tree.use(DEBUG="0") == 42
    assert tree.compiled() == ["10_first/binding.cpp", "10_first/kernel.cu"]
    assert tree.use(CXX=str(tree.tool("other"))) == 42
    assert tree.compiled() == ["10_first/binding.cpp", "10_first/kernel.cu", "simt/runtime.cpp"]


@pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is not on PATH")
def test_clang(tree):
    clang = str(tree.tool("clang", program="clang++"))
    assert tree.use("simt", CXX=clang) == tree.use("xray", CXX=clang) == 42
    assert tree.compiled().count("10_first/kernel.cu") == 2


def test_header_edited_while_its_reader_compiles(tree):
    # Reads everything, edits the header, and goes on with what it had read.
    edited = f"echo 'constexpr int VALUE = 7;' > '{tree.root}/common/value.h'"
    edit = f'case "$*" in *kernel.cu*) g++ "$@" && {edited}; exit;; esac'
    compiler = str(tree.tool("editing", before=edit))
    assert tree.use(CXX=compiler) == 42
    tree.tool("editing")
    tree.compiled()
    assert tree.use(CXX=compiler) == 47
    assert tree.compiled() == ["10_first/kernel.cu"]


def test_any_kernel_into_any_folder(tree):
    tree.use()
    tree.compiled()
    tree.write("elsewhere/kernel.cu", KERNEL.replace("device_value() +", "EXTRA +"))
    code = """if True:
        import sys; sys.path[0] = "stages"
        from pathlib import Path
        from toolkit import build
        binding = Path("stages/10_first/binding.cpp")
        print(build.build_module("elsewhere/kernel.cu", binding, "simt", "out", ["-DEXTRA=5"]))
    """
    done = tree.run("-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == tree.root / "out" and Path(done.stdout.strip()).is_file()
    assert tree.compiled() == ["elsewhere/kernel.cu"]  # the stage's binding serves as it is


def test_compile_commands(tree):
    for stage in ["10", "11"]:
        assert tree.setup(STAGES=stage).returncode == 0
    entries = json.loads((tree.root / "compile_commands.json").read_text())
    files = [str(Path(entry["file"]).relative_to(tree.root)) for entry in entries]
    assert files == sorted(name for name in FILES if name.endswith((".cu", ".cpp")))
    for entry in entries:
        command = [*entry["arguments"], "-fsyntax-only"]
        assert subprocess.run(command, cwd=entry["directory"]).returncode == 0
    shutil.rmtree(tree.root / "stages" / "11_second")
    assert tree.setup().returncode == 0
    entries = json.loads((tree.root / "compile_commands.json").read_text())
    assert not [entry for entry in entries if "11_second" in entry["file"]]


# ---------------------------------------------------------------------------------------------------------------------
# Failures


def test_failed_compile_shows_the_compilers_lines(tree):
    tree.write("stages/10_first/kernel.cu", KERNEL.replace("return device_value()", "return device_valeu()"))
    message = ["10_first: compiling kernel.cu (", "stages/10_first/kernel.cu:12", "device_valeu", "error"]
    done = tree.setup(STAGES="10")
    failed(done, *message)
    assert len(done.stderr.splitlines()) < 20
    assert tree.modules() == []
    log = tree.root / re.search(r"whole output: (.*)", done.stderr)[1]
    assert "-std=c++20" in log.read_text() and "device_valeu" in log.read_text()

    # The process that asked lives on, and works once the source does.
    code = f"""if True:
        import sys; sys.path[0] = "stages"
        from pathlib import Path
        from toolkit import build
        try:
            build.ensure("10_first", "simt")
        except build.BuildError as error:
            print(error)
        Path("stages/10_first/kernel.cu").write_text({KERNEL!r})
        print(build.ensure("10_first", "simt").exists())
    """
    done = tree.run("-c", code)
    assert done.returncode == 0, done.stderr
    assert message[0] in done.stdout and done.stdout.endswith("True\n")


def test_failure_ends_the_other_compilers(tree):
    slow = tree.tool("slow", before='case "$*" in *11_*binding.cpp*) exec sleep 60;; esac')
    tree.write("stages/10_first/kernel.cu", "#error on purpose\n")
    began = time.monotonic()
    failed(tree.setup(STAGES="10,11", CXX=str(slow)), "on purpose")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"CXX": "nonexistent"}, ["CXX=nonexistent", "g++ or clang++"]),
        ({"CXX": "true"}, ["CXX=true", "g++ or clang++"]),
        ({"CXX": "", "PATH": "/nonexistent"}, ["no C++ compiler found", "g++", "clang++", "CXX"]),
        ({"STAGES": "frist"}, ["stage 'frist' is unknown; nearest: 10_first"]),
        ({"USE_CUDA": "yes"}, ["USE_CUDA=yes", "0, 1 or unset"]),
        ({"DEBUG": "2"}, ["DEBUG=2", "0, 1 or unset"]),
        ({"USE_CUDA": "1", "CUDA_HOME": "/nonexistent"}, ["USE_CUDA=1", "CUDA_HOME=/nonexistent", "no nvcc"]),
    ],
)
def test_wrong_environment(tree, env, words):
    done = tree.setup(**env)
    failed(done, *words)
    assert len(done.stderr.splitlines()) < 4, done.stderr
    assert tree.modules() == []


def test_wrong_architecture(tree, request):
    tree.write("cuda/bin/nvcc", '#!/bin/sh\necho "#$ TOP=/nonexistent"\n').chmod(0o755)
    env = {"USE_CUDA": "1", "CUDA_HOME": str(tree.root / "cuda")}
    failed(tree.setup(TORCH_CUDA_ARCH_LIST="8.0;Volta", **env), "TORCH_CUDA_ARCH_LIST=8.0;Volta", "'Volta'", "Hopper")
    failed(tree.setup(**env), "no libcudart_static.a")


def test_without_nvcc_the_rest_is_built(tree):
    done = tree.setup(USE_CUDA="", CUDA_HOME="/nonexistent", STAGES="10")
    assert done.returncode == 0, done.stderr
    assert tree.modules() == ["stages/10_first/_simt", "stages/10_first/_xray"]


def test_missing_headers(tree):
    code = """if True:
        import sys; sys.path[0] = "stages"
        import importlib.util, sysconfig
        from toolkit import build
        {break_it}
        build.ensure("10_first", "simt")
    """
    done = tree.run("-c", code.format(break_it="importlib.util.find_spec = lambda name: None"))
    assert "10_first: its module _simt is not built yet, and pybind11 is not installed" in done.stderr
    done = tree.run("-c", code.format(break_it="sysconfig.get_path = lambda name: '/nonexistent'"))
    assert "10_first: its module _simt is not built yet, and no Python.h in /nonexistent" in done.stderr


def test_a_built_module_outlives_its_compiler(tree):
    tree.use()
    done = tree.run("-c", USE, "10_first", "simt", CXX="nonexistent")
    assert done.stdout == "42\n"
    assert "using _simt as it was built" in done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Several at once, and interruptions


def test_two_processes_build_once(tree):
    tree.tool("cxx", before="sleep 0.5")
    users = [tree.start("-c", USE, "10_first", variant) for variant in ("simt", "simt", "xray")]
    for user in users:
        output, errors = user.communicate(timeout=60)
        assert (user.returncode, output) == (0, "42\n"), errors
    assert tree.compiled() == ["10_first/binding.cpp", *["10_first/kernel.cu"] * 2, "simt/runtime.cpp"]


def living(group: str) -> list[str]:
    """The processes of a process group that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = status.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if process_group == group and state != "Z":
            found.append(status.parent.name)
    return found


def test_ctrl_c(tree):
    # A compiler that has written half of its output when it is interrupted, and has a child of its own.
    half = f'for last; do :; done; echo half > "$last"; echo $$ >> "{tree.root}/pids"; sleep 61 & wait'
    tree.tool("cxx", before=f'case "$*" in *kernel.cu*) {half};; esac')
    process, pids = tree.start("setup.py", "build_ext", "--inplace"), tree.root / "pids"
    deadline = time.monotonic() + 30
    while not pids.exists() or not pids.read_text().endswith("\n"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert all(len(living(group)) == 2 for group in pids.read_text().split())  # the compiler and its child
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode not in (0, None)
    assert "Traceback" not in errors
    assert [pid for group in pids.read_text().split() for pid in living(group)] == []
    assert tree.modules() == []
    assert not [path for path in tree.root.rglob(".*") if path.is_file()]  # nothing half-written
    tree.tool("cxx")
    assert tree.use() == 42


def test_ctrl_c_before_all_tasks_are_handed_out():
    runner = build.Runner()

    def tasks():
        yield lambda: runner.run(["sleep", "61"])
        while not runner.running:
            time.sleep(0.01)
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        runner.all(tasks(), 1)
    assert time.monotonic() - began < 30 and not runner.running


# ---------------------------------------------------------------------------------------------------------------------
# Installed packages


def wheel(tree, **env: str) -> Path:
    shutil.rmtree(tree.root / "wheels", ignore_errors=True)
    pip = ["-m", "pip", "wheel", "-q", ".", "--no-deps", "--no-build-isolation", "-w", "wheels"]
    done = tree.run(*pip, **env)
    assert done.returncode == 0, done.stderr
    return next((tree.root / "wheels").glob("*.whl"))


def test_wheels(tree):
    sources = {name for name in FILES if name.startswith("stages/")}
    sources |= {f"stages/_include/{name}" for name in FILES if name.startswith("common/")}
    tree.setup()

    plain = wheel(tree)
    names = set(zipfile.ZipFile(plain).namelist())
    assert plain.name.endswith("-py3-none-any.whl")
    assert sources <= names and not [name for name in names if name.endswith(".so")]
    zipfile.ZipFile(plain).extractall(tree.root / "site")

    assert "-py3-none-any" not in wheel(tree, STAGES="11").name
    names = zipfile.ZipFile(wheel(tree, STAGES="10")).namelist()  # none of the modules of the build before
    modules = sorted(name.partition(".")[0] for name in names if name.endswith(".so"))
    assert modules == ["stages/10_first/_simt", "stages/10_first/_xray"]

    # Installed, what is not shipped is built at its first use, and not into the package.
    shutil.rmtree(tree.root / "common")
    before = sorted((tree.root / "site").rglob("*.so"))
    tree.compiled()
    done = tree.run("-c", USE, "10_first", "simt", "site/stages", PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout == "42\n", done.stderr
    assert sorted((tree.root / "site").rglob("*.so")) == before
    assert len(list((tree.root / "cache").rglob("*.so"))) == 1
    assert "simt/runtime.cpp" in tree.compiled()


# ---------------------------------------------------------------------------------------------------------------------
# CUDA


@has_nvcc
def test_cuda_without_a_gpu(tree):
    tree.write("bin/nvidia-smi", "#!/bin/sh\necho 9.0\n").chmod(0o755)
    path = f"{tree.root}/bin:{os.environ['PATH']}"
    done = tree.setup(STAGES="10", USE_CUDA="1", TORCH_CUDA_ARCH_LIST="8.0;9.0a", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "(simt, xray, cuda)" in done.stderr
    # This machine's GPU is one of those that it was built for: nothing to do at first use.
    done = tree.run("-c", USE, "10_first", "cuda", USE_CUDA="", PATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    tree.write("common/value.h", "constexpr int VALUE = 3;\n")
    assert tree.use("cuda", USE_CUDA="", PATH=path) == 3


@has_nvcc
def test_cuda_of_a_kernel_that_runs_on_some_gpus_only(tree):
    tree.write("stages/10_first/kernel.cu", HOPPER + KERNEL)
    words = "10_first: its CUDA module needs a GPU of compute capability 9.0, but is to be built for 8.0; TORCH_CUDA"
    alone = tree.setup(STAGES="10", USE_CUDA="1", TORCH_CUDA_ARCH_LIST="8.0")
    failed(alone, f"error: {words}")
    assert tree.modules() == []
    done = tree.run("-c", USE, "10_first", "cuda", USE_CUDA="", TORCH_CUDA_ARCH_LIST="8.0")
    assert done.returncode == 1 and f"OtherGPUs: {words}" in done.stderr

    done = tree.setup(USE_CUDA="1", TORCH_CUDA_ARCH_LIST="8.0")
    assert done.returncode == 0, done.stderr
    assert f"left out: {words}" in done.stderr
    every = {f"stages/{name}/_{variant}" for name in ("10_first", "11_second") for variant in ("simt", "xray", "cuda")}
    assert set(tree.modules()) == every - {"stages/10_first/_cuda"}
    names = zipfile.ZipFile(wheel(tree, STAGES="all", USE_CUDA="1", TORCH_CUDA_ARCH_LIST="8.0")).namelist()
    assert {name.partition(".")[0] for name in names if name.endswith(".so")} == every - {"stages/10_first/_cuda"}

    assert tree.setup(STAGES="10", USE_CUDA="1", TORCH_CUDA_ARCH_LIST="8.0;9.0a").returncode == 0
    (stamp,) = tree.root.glob("build/objects/*/10_first/kernel.cuda.json")
    command = json.loads(stamp.read_text())["command"]
    assert [word for word in command if word.startswith("-gencode=")] == gencode("9.0a")


def test_reading_ptxas():
    text = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5storeIfEvPT_' for 'sm_90a'
ptxas info    : Function properties for _Z5storeIfEvPT_
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 65 registers, used 1 barriers, 49156 bytes smem, 400 bytes cmem[0]
"""
    (kernel,) = check_cuda.parse_ptxas(text)
    assert (kernel.architecture, kernel.registers, kernel.shared, kernel.stack) == ("sm_90a", 65, 49156, 8)
    assert kernel.spill == 40
    assert len(kernel.complaints(registers=64, spills=False)) == 4
    assert len(kernel.complaints(registers=65, spills=True)) == 1  # shared memory


@has_nvcc
def test_check_of_kernels(tree):
    def check(body, stage=""):
        tree.write("stages/__init__.py", f"import types\ndef load(name): return types.SimpleNamespace({stage})\n")
        tree.write("stages/10_first/kernel.cu", f"__global__ void kernel(float* x, int n) {{ {body} }}\n")
        return tree.run("-m", "stages.toolkit.check_cuda", "10")

    source = tree.root / "stages/10_first/kernel.cu"
    source.write_text(HOPPER + source.read_text())
    done = tree.run("-m", "stages.toolkit.check_cuda", "10")
    assert done.returncode == 0 and re.findall("sm_[0-9a]+", done.stdout) == ["sm_90a"], done.stderr
    frame = "float kept[64]; for (int i = 0; i < n; ++i) kept[i & 63] = x[i]; x[0] = kept[n & 63];"
    done = check("x[0] = n;")
    assert done.returncode == 0, done.stderr
    assert re.search(r"10_first +kernel +sm_80 .*\n10_first +kernel +sm_90a ", done.stdout)
    failed(check("x[0] = n;", "registers=2"), "10_first: kernel on sm_90a", "the stage's budget is 2")
    failed(check(frame), "a stack frame of 256 bytes, which the stage does not announce")
    assert check(frame, "spills=True").returncode == 0
    failed(check("int unused = 3; x[0] = n;"), "unused", "never referenced")
    failed(check("x[0] = m;"), "10_first: compiling kernel.cu (cuda) failed", "identifier")
