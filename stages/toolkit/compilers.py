"""What to compile with: the flags, the environment variables that change them, and the compilers of this machine."""

import contextlib
import functools
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path


class BuildError(RuntimeError):
    """A build failed. The message is short and complete: what was asked, what is allowed, the compiler's own lines."""


class MissingTool(BuildError):
    """A compiler, or headers that it needs, are not on this machine."""


# ---------------------------------------------------------------------------------------------------------------------
# Flags, by what is compiled: for every compiler, for one of them, and for the two values of DEBUG.

HOST = "-std=c++20 -fPIC -fvisibility=hidden -pthread -Wall -Wextra -Wno-unknown-pragmas"
# A thread of the CPU device has a stack of 64 KiB for what a GPU calls local memory.
KERNEL = f"-x c++ {HOST} -Wframe-larger-than=49152"
REFUSE_FRAME = {"g++": "-Werror=frame-larger-than=49152", "clang++": "-Werror=frame-larger-than"}
FLAGS = {
    "simt": {
        "all": KERNEL,
        **REFUSE_FRAME,
        # With -O2 kernels run as fast, or a quarter faster at best, and take nearly twice as long to compile.
        "release": "-O1 -ftree-slp-vectorize -funroll-loops -g1",
        "debug": "-O0 -g",
    },
    # Instrumented like -fsanitize=thread, but never linked with it: common/simt has the callbacks. With g++ an index
    # outside its array, which memory alone would not tell, ends in a trap (clang's traps have no line). Optimisations
    # that split, merge or move accesses are off, so that an access counted is an access written; a call that ends a
    # kernel stays a call, whose return address tells its line. DEBUG changes nothing.
    "xray": {
        "all": f"{KERNEL} -g1 -fsanitize=thread -fno-optimize-sibling-calls",
        "g++": f"{REFUSE_FRAME['g++']} -O2 -fsanitize=bounds -fsanitize-undefined-trap-on-error -fno-tree-sra"
        " -fno-tree-pre -fno-code-hoisting -fno-thread-jumps -fno-tree-tail-merge -fno-tree-loop-distribute-patterns"
        " -fno-move-loop-stores --param=tsan-instrument-func-entry-exit=0",
        "clang++": f"{REFUSE_FRAME['clang++']} -O1 -mllvm -tsan-instrument-func-entry-exit=0"
        " -mllvm -tsan-instrument-read-before-write=1 -mllvm -simplifycfg-sink-common=false"
        " -mllvm -simplifycfg-hoist-common=false -mllvm -simplifycfg-merge-cond-stores=false",
    },
    "binding": {  # with -O2 a call costs the same to a few hundredths of a microsecond
        "all": HOST,
        "release": "-Og -g1",
        "debug": "-O0 -g",
    },
    # The CPU device itself: hot, and not what a learner debugs.
    "runtime": {
        "all": f"{HOST} -O3 -g1",
    },
    "cuda": {
        "all": "-x cu -std=c++20 --expt-relaxed-constexpr -Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
        "release": "-O3 -lineinfo",
        "debug": "-O0 -g -G",  # -G brings line information of its own
    },
}
GXX_X86_64 = "-mtls-dialect=gnu2"  # `__shared__` is thread_local; with TLS descriptors reaching it costs least
LINK = "-shared -pthread -Wl,--exclude-libs,ALL"  # hides the static cudart, or torch's own would take its calls
LINK_CUDA = "-lcudart_static -lrt -lpthread -ldl"

VARIANTS = ("simt", "xray", "cuda")
ARCHITECTURES = "8.0 8.6 8.7 8.9 9.0 9.0a 10.0 10.0a 10.3 10.3a 11.0 12.0 12.0a 12.1".split()
ARCHITECTURE_NAMES = {"Ampere": "8.0 8.6", "Ada": "8.9", "Hopper": "9.0a", "Blackwell": "10.0 12.0"}
DEFAULT_ARCHITECTURES = ["8.0", "9.0a"]

# ---------------------------------------------------------------------------------------------------------------------
# Compilers


@dataclass(frozen=True)
class Compiler:
    """A compiler that was found: its command, which kind it is, its own words on its version."""

    command: tuple[str, ...]
    kind: str  # g++, clang++ or nvcc
    version: str
    x86_64: bool = False  # what it compiles for
    home: Path | None = None  # nvcc only: the toolkit's folder

    def flags(self, what: str) -> list[str]:
        """The flags for compiling `what`, a key of FLAGS."""
        table = FLAGS[what]
        parts = [table["all"], table.get(self.kind, ""), table.get("debug" if switch("DEBUG") else "release", "")]
        if self.kind == "g++" and self.x86_64:
            parts.append(GXX_X86_64)
        return " ".join(parts).split()


def switch(variable: str) -> bool | None:
    """The value of an environment variable that is 0, 1 or unset."""
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise BuildError(f"{variable}={value}: must be 0, 1 or unset")
    return None if value == "" else value == "1"


def capture(*command: str) -> str | None:
    """What a command prints, or None if it cannot be run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def host_compiler() -> Compiler:
    """The C++ compiler: CXX if that is set, else the first found of g++, clang++, c++."""
    return _host_compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@functools.cache
def _host_compiler(cxx: str, path: str) -> Compiler:
    for name in [cxx] if cxx else ["g++", "clang++", "c++"]:
        command = (name,) if shutil.which(name) else tuple(shlex.split(name))  # "ccache g++" is two words
        macros = dict(re.findall(r"#define (\w+) (.*)", capture(*command, "-dM", "-E", "-x", "c++", os.devnull) or ""))
        if "__GNUC__" in macros:  # which clang++ says as well
            kind = "clang++" if "__clang__" in macros else "g++"
            version = macros["__VERSION__"].strip('"')
            return Compiler(command, kind, f"{kind} {version}", x86_64="__x86_64__" in macros)
    if cxx:
        raise MissingTool(f"CXX={cxx}: not a C++ compiler that runs here; give g++ or clang++, or leave CXX unset")
    raise MissingTool("no C++ compiler found: install g++ or clang++, or set CXX to one")


def nvcc() -> Compiler:
    """CUDA's compiler: CUDA_HOME/bin/nvcc if that is set, else nvcc on PATH, else /usr/local/cuda/bin/nvcc."""
    return _nvcc(os.environ.get("CUDA_HOME", ""), os.environ.get("PATH", ""))


@functools.cache
def _nvcc(cuda_home: str, path: str) -> Compiler:
    for command in [f"{cuda_home}/bin/nvcc"] if cuda_home else ["nvcc", "/usr/local/cuda/bin/nvcc"]:
        # nvcc on PATH may be a script or a link; only nvcc itself knows where the rest of its toolkit is.
        version, dryrun = capture(command, "--version"), capture(command, "--dryrun", "-x", "cu", "-E", os.devnull)
        top = re.search(r"^#\$ TOP=(.*)$", dryrun or "", re.MULTILINE)
        if version and top:
            return Compiler((command,), "nvcc", version.splitlines()[-1], home=Path(os.path.realpath(top[1].strip())))
    if cuda_home:
        raise MissingTool(f"CUDA_HOME={cuda_home}: no nvcc that runs in its bin; give CUDA's folder, or leave it unset")
    raise MissingTool("nvcc not found on PATH or in /usr/local/cuda: install the CUDA toolkit or set CUDA_HOME")


def default_variants() -> tuple[str, ...]:
    """What is built without a choice: the CPU device's modules, and CUDA's as USE_CUDA says, or if nvcc is there."""
    use_cuda = switch("USE_CUDA")
    if use_cuda is None:
        with contextlib.suppress(MissingTool):
            use_cuda = bool(nvcc())
    elif use_cuda:
        try:
            nvcc()
        except MissingTool as error:
            raise MissingTool(f"USE_CUDA=1, but {error}") from None
    return VARIANTS if use_cuda else VARIANTS[:2]


# ---------------------------------------------------------------------------------------------------------------------
# GPU architectures


def architectures() -> list[str]:
    """The GPU architectures to compile for: TORCH_CUDA_ARCH_LIST, else this machine's GPUs, else 8.0 and 9.0a."""
    text = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip(" ,;")
    return parse_architectures(text) if text else list(gpu_architectures()) or DEFAULT_ARCHITECTURES


def parse_architectures(text: str) -> list[str]:
    """Numbers and names to architectures: "Ampere;9.0a+PTX" gives 8.0, 8.6, 9.0a+PTX."""
    names = {name.lower(): numbers.split() for name, numbers in ARCHITECTURE_NAMES.items()}
    result = []
    for word in filter(None, re.split(r"[\s,;]+", text)):
        base, plus, ptx = word.partition("+")
        numbers = names.get(base.lower(), [base])
        if numbers[0] not in ARCHITECTURES or (plus and ptx.upper() != "PTX"):
            allowed = f"{', '.join(ARCHITECTURE_NAMES)}, {', '.join(ARCHITECTURES)}, each with or without +PTX"
            raise BuildError(f"TORCH_CUDA_ARCH_LIST={text}: {word!r} is unknown; allowed: {allowed}")
        result += numbers[:-1] + [numbers[-1] + ("+PTX" if plus else "")]
    return list(dict.fromkeys(result))


@functools.cache
def gpu_architectures() -> tuple[str, ...]:
    """The architectures of the GPUs in this machine, by nvidia-smi; Hopper's with its own instructions, 9.0a."""
    text = capture("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader") or ""
    found = sorted(set(re.findall(r"^\d+\.\d$", text, re.MULTILINE)))
    return tuple("9.0a" if number == "9.0" else number for number in found)


def capability_of(architecture: str) -> str:
    """The compute capability of an architecture's GPUs: "9.0" for 9.0, 9.0a and 9.0a+PTX."""
    return architecture.removesuffix("+PTX").rstrip("a")


def own_architecture(capability: str) -> str:
    """The architecture with the instructions that only GPUs of a compute capability have, if there is one: 9.0a."""
    return f"{capability}a" if f"{capability}a" in ARCHITECTURES else capability


def gencode(architecture: str) -> list[str]:
    """nvcc's flags for one architecture: machine code, and with +PTX also code that later GPUs translate."""
    number = architecture.removesuffix("+PTX").replace(".", "")
    codes = [f"sm_{number}"] + ([f"compute_{number}"] if architecture.endswith("+PTX") else [])
    return [f"-gencode=arch=compute_{number},code={code}" for code in codes]


# ---------------------------------------------------------------------------------------------------------------------
# Headers and libraries of others


def nvcc_host() -> list[str]:
    """nvcc's flag for using the same g++ as the rest; with clang++ nvcc is left to its own choice."""
    host = host_compiler()
    path = shutil.which(host.command[-1]) if host.kind == "g++" else None
    return [f"-ccbin={path}"] if path else []


def cudart(home: Path) -> Path:
    """The folder of CUDA's static runtime library inside a toolkit."""
    for pattern in ("lib64", "lib", f"targets/{platform.machine()}*/lib", "targets/*/lib"):
        if found := sorted(home.glob(f"{pattern}/libcudart_static.a")):
            return found[0].parent
    raise MissingTool(f"CUDA toolkit in {home}: no libcudart_static.a in its lib64; install its development files")


def python_includes() -> list[str]:
    """The header folders of Python and pybind11, as compiler flags."""
    python = Path(sysconfig.get_path("include"))
    if not (python / "Python.h").is_file():
        raise MissingTool(f"no Python.h in {python}: install the headers of this Python (on Debian: python3-dev)")
    pybind11 = importlib.util.find_spec("pybind11")
    if pybind11 is None:
        raise MissingTool(f"pybind11 is not installed for {sys.executable}: pip install pybind11")
    return [f"-isystem{python}", f"-isystem{Path(pybind11.origin).parent / 'include'}"]
