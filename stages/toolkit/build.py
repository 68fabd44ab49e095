"""Build the modules of the stages: which files, which flags, what is out of date.

A stage `stages/12_matmul_shared/` has two sources, `kernel.cu` and `binding.cpp`, and up to three modules from them:

    _simt   kernel.cu by g++ or clang++     + binding + common/simt     runs on the CPU device
    _xray   the same, instrumented          + binding + common/simt     runs on the CPU device, counted and checked
    _cuda   kernel.cu by nvcc               + binding + CUDA's runtime  runs on a GPU

A stage whose kernel is written in Triton has a `kernel.py` in their place, which nothing has to be built of. A kernel
that runs on some GPUs only says so in its header, `// Needs     compute capability 9.0: ...`: it is compiled for these
alone, by the architecture that has their own instructions, 9.0a.

Every object and every module is one `Unit`: a command, an output, and beside it a small json "stamp" that says what it
was made from. A unit is out of date when its command, its compiler or any file in its stamp has changed. `setup.py`
calls `build`, the first use of a stage calls `ensure`; flags and compilers are in compilers.py. Only the standard
library is needed here, neither torch nor a GPU.

Environment: STAGES (read by setup.py), USE_CUDA=0/1, DEBUG=1, TORCH_CUDA_ARCH_LIST, CUDA_HOME, CXX.
"""

import contextlib
import difflib
import fcntl
import functools
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from . import header
from .compilers import (
    LINK,
    LINK_CUDA,
    VARIANTS,
    BuildError,
    Compiler,
    MissingTool,
    architectures,
    capability_of,
    cudart,
    default_variants,
    gencode,
    host_compiler,
    nvcc,
    nvcc_host,
    own_architecture,
    python_includes,
    switch,
)

# ---------------------------------------------------------------------------------------------------------------------
# Places. In a checkout modules go beside their sources and objects into build/. An installed package is left as it was
# delivered: modules shipped with it are used, others go to the user's cache.

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
INCLUDE = PACKAGE / "_include" if (PACKAGE / "_include").is_dir() else ROOT  # holds common/; the former if installed
IN_CHECKOUT = INCLUDE == ROOT and os.access(ROOT, os.W_OK) and os.access(PACKAGE, os.W_OK)
ABI = sysconfig.get_config_var("SOABI")  # names the Python that a module is for, such as cpython-311-x86_64-linux-gnu
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
if IN_CHECKOUT:
    OBJECTS = ROOT / "build" / "objects" / ABI
else:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    OBJECTS = cache / "kernel-stages" / hashlib.sha256(str(PACKAGE).encode()).hexdigest()[:12] / ABI


def module_path(name: str, variant: str) -> Path:
    """Where the module of a stage is, or will be."""
    file = f"_{variant}{SUFFIX}"
    return (PACKAGE if IN_CHECKOUT or (PACKAGE / name / file).exists() else OBJECTS) / name / file


def stage_names() -> list[str]:
    """The names of all stages, such as "12_matmul_shared", in order."""
    return sorted(folder.name for folder in PACKAGE.glob("[0-9]*_*") if kernel_of(folder.name))


def kernel_of(name: str) -> Path | None:
    """The file of a stage's kernel: CUDA C++ in kernel.cu, or Triton in kernel.py; None if there is neither."""
    return next((path for path in (PACKAGE / name / "kernel.cu", PACKAGE / name / "kernel.py") if path.exists()), None)


def has_modules(name: str) -> bool:
    """Whether there is something to build of a stage: of CUDA C++ there is, Triton compiles at the first call."""
    return (PACKAGE / name / "kernel.cu").exists()


def select(text: str) -> list[str]:
    """The stages that a list like "12", "30,32", "matmul_sh" or "all" names: numbers, names, unambiguous prefixes."""
    names, chosen = stage_names(), []
    for word in filter(None, re.split(r"[\s,;]+", text)):
        if word == "all":
            chosen += names
            continue
        keys = {key: name for name in names for key in (name, *name.split("_", 1))}
        found = [keys[word]] if word in keys else sorted({name for key, name in keys.items() if key.startswith(word)})
        if len(found) != 1:
            near = found or sorted({keys[key] for key in difflib.get_close_matches(word, keys, n=3, cutoff=0.5)})
            verb = "could be" if found else "is unknown; nearest:" if near else "is unknown; there are:"
            raise BuildError(f"stage {word!r} {verb} {', '.join(near or names)}")
        chosen += found
    return sorted(set(chosen))


# ---------------------------------------------------------------------------------------------------------------------
# Units: what a stage consists of.


@dataclass(frozen=True)
class Unit:
    """One file and the command that makes it."""

    label: str  # whose file it is, for messages
    output: Path
    stamp: Path
    command: tuple[str, ...]  # without the output
    version: str  # of the compiler
    inputs: tuple[Path, ...]
    links: bool = False  # or compiles
    python: bool = False  # needs the headers of Python and pybind11


def compile_unit(kind: str, label: str, source: Path, folder: Path, compiler: Compiler, extra=()) -> Unit:
    """The object of one source, to lie in `folder`."""
    command = (*compiler.command, *compiler.flags(kind), *extra, f"-I{INCLUDE}", "-c", str(source))
    output = folder / (f"{source.stem}.{kind}.o" if kind in VARIANTS else f"{source.stem}.o")
    # Python's headers stay out of the stamp: pip compiles against a pybind11 of its own that is gone afterwards.
    python = kind == "binding" or (kind == "runtime" and source.stem == "python")
    return Unit(label, output, output.with_suffix(".json"), command, compiler.version, (source,), python=python)


def runtime_units() -> list[Unit]:
    """The CPU device, common/simt: the same objects for every stage."""
    sources = sorted((INCLUDE / "common" / "simt").glob("*.cpp"))
    return [compile_unit("runtime", "common/simt", path, OBJECTS / "runtime", host_compiler()) for path in sources]


@dataclass(frozen=True)
class Plan:
    """All that belongs to the modules of one kernel."""

    label: str
    variants: tuple[str, ...]
    objects: list[Unit]
    modules: list[Unit]

    def is_fresh(self) -> bool:
        return all(map(is_fresh, self.objects + self.modules))


def plan_of(label, kernel: Path, binding: Path, variants, objects: Path, module_of, extra=(), first_use=False) -> Plan:
    """The units of a kernel and its binding. `module_of(variant)` says where a module goes."""
    host = host_compiler()
    # A stage's own binding is compiled once, also for the changed kernels that `build_module` is given.
    shared = OBJECTS / binding.parent.name if binding.parent.parent == PACKAGE else objects
    units, modules = [compile_unit("binding", label, binding, shared, host)], []
    runtime = runtime_units() if set(variants) - {"cuda"} else []
    for variant in variants:
        if variant == "cuda":
            targets = gpu_targets(label, kernel, objects / "kernel.cuda.json", first_use)
            flags = (*targets, *nvcc_host(), *extra)
            units.append(compile_unit("cuda", label, kernel, objects, nvcc(), flags))
            used, libraries = [units[-1], units[0]], [f"-L{cudart(nvcc().home)}", *LINK_CUDA.split()]
        else:
            units.append(compile_unit(variant, label, kernel, objects, host, extra))
            # The CPU device first: of an inline function that both have, the linker keeps the first, and the device
            # must not run the kernel's instrumented copy.
            used, libraries = [*runtime, units[0], units[-1]], []
        inputs = tuple(unit.output for unit in used)
        command = (*host.command, *LINK.split(), *map(str, inputs), *libraries)
        stamp = objects / f"_{variant}.json"
        modules.append(Unit(label, module_of(variant), stamp, command, host.version, inputs, links=True))
    return Plan(label, tuple(variants), runtime + units, modules)


def stage_plan(name: str, variants, first_use=False) -> Plan:
    """The plan of a stage in its usual places."""
    kernel, binding = PACKAGE / name / "kernel.cu", PACKAGE / name / "binding.cpp"
    module_of = functools.partial(module_path, name)
    return plan_of(name, kernel, binding, variants, OBJECTS / name, module_of, first_use=first_use)


class OtherGPUs(BuildError):
    """A kernel runs on none of the GPUs that it should be compiled for."""


def runnable(label: str, kernel: Path, asked: Sequence[str]) -> list[str]:
    """Of the architectures asked for those that a kernel runs on: all, or the one that its header needs.

    Raises OtherGPUs: that is not among them.
    """
    needed = header.capability(kernel)
    if needed is None:
        return list(asked)
    if needed in map(capability_of, asked):
        return [own_architecture(needed)]
    raise OtherGPUs(
        f"{label}: its CUDA module needs a GPU of compute capability {needed}, but is to be built for "
        f"{', '.join(asked)}; TORCH_CUDA_ARCH_LIST={own_architecture(needed)} builds it for such a GPU"
    )


def gpu_targets(label: str, kernel: Path, stamp: Path, first_use: bool) -> list[str]:
    """The flags that say which GPUs a kernel is compiled for."""
    targets = [flag for architecture in runnable(label, kernel, architectures()) for flag in gencode(architecture)]
    if first_use and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
        # An explicit build was told more GPUs than this machine's: keep them.
        built = [flag for flag in read_json(stamp).get("command", []) if flag.startswith("-gencode=")]
        targets = built if set(targets) <= set(built) else targets
    return targets


# ---------------------------------------------------------------------------------------------------------------------
# Making units: what is out of date, and running compilers.


def state(path: str | Path) -> list[int] | None:
    """What tells one version of a file from another."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_mtime_ns, found.st_size]


def read_json(path: Path):
    """The content of a json file, or an empty dict if there is none that can be read."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def write_json(path: Path, content) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(content, indent=1))
    os.replace(part, path)


def is_fresh(unit: Unit) -> bool:
    """Whether the file is there and made by this command, by this compiler, from files that have not changed since."""
    stamp = read_json(unit.stamp)
    return (
        stamp.get("command") == list(unit.command)
        and stamp.get("compiler") == unit.version
        and all(then is not None and state(path) == then for path, then in stamp["files"].items())
    )


class Stopped(Exception):
    """Another part of the same build has failed, or Ctrl-C was pressed."""


class Runner:
    """Runs compilers, at most `jobs` at a time, and can end all of them."""

    def __init__(self, jobs: int | None = None):
        self.jobs = jobs or len(os.sched_getaffinity(0))
        self.slots = threading.Semaphore(self.jobs)
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen] = set()
        self.stopped = False

    def run(self, command: list[str]) -> tuple[int, str]:
        """Runs one command; gives its exit code and what it printed."""
        with self.slots:
            with self.lock:
                self.check()
                # A session of its own, so that `stop` reaches all the processes that a compiler consists of.
                streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
                process = subprocess.Popen(command, **streams, text=True, errors="replace", start_new_session=True)
                self.running.add(process)
            output, _ = process.communicate()
            with self.lock:
                self.running.discard(process)
        self.check()
        return process.returncode, output

    def all(self, tasks, threads: int) -> list:
        """Calls functions side by side and gives their results; a failure or Ctrl-C ends everything that runs."""
        with ThreadPoolExecutor(max(threads, 1)) as pool:
            whole = False
            try:
                futures = [pool.submit(task) for task in tasks]  # Ctrl-C may come here too, with compilers running
                wait(futures, return_when=FIRST_EXCEPTION)
                whole = all(future.done() and not future.exception() for future in futures)
            finally:
                if not whole:
                    self.stop()
        errors = [error for future in futures if (error := future.exception())]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, Stopped))  # the cause, not what it stopped
        return [future.result() for future in futures]

    def check(self) -> None:
        if self.stopped:
            raise Stopped

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for process in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


@contextlib.contextmanager
def locked(path: Path, runner: Runner):
    """Holds a lock against other processes and threads. Waiting for it can be interrupted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                runner.check()
                time.sleep(0.05)
        yield


def make(unit: Unit, runner: Runner) -> str:
    """Brings one file up to date and gives the compiler's warnings. The file appears whole or not at all."""
    with locked(unit.stamp.with_suffix(".lock"), runner):
        if is_fresh(unit):  # perhaps since a moment ago, by another process
            return ""
        unit.output.parent.mkdir(parents=True, exist_ok=True)
        part = unit.output.with_name(f".{unit.output.name}.{os.getpid()}")
        depfile = unit.stamp.with_name(f".{unit.stamp.stem}.{os.getpid()}.d")
        command = [*unit.command, *(python_includes() if unit.python else [])]
        depends = [] if unit.links else ["-MMD", "-MT", "object", "-MF", str(depfile)]
        try:
            depfile.touch()
            started = depfile.stat().st_mtime_ns
            code, output = runner.run([*command, *depends, "-o", str(part)])
            if code != 0 or not part.exists():
                raise BuildError(failure(unit, code, output, [*command, "-o", str(unit.output)]))
            os.replace(part, unit.output)
            rest = depfile.read_text().replace("\\\n", " ").partition(":")[2]  # "object: source header ..."
            headers = {re.sub(r"\\(.)", r"\1", word) for word in re.findall(r"(?:\\.|[^\s\\])+", rest)}
            files = {path: state(path) for path in sorted({*map(str, unit.inputs), *headers})}
            # A file edited since the compiler started may have been read before: such a file never counts as unchanged.
            now = time.time_ns()
            files = {path: None if then and started < then[0] <= now else then for path, then in files.items()}
            files[str(unit.output)] = state(unit.output)
            write_json(unit.stamp, {"command": unit.command, "compiler": unit.version, "files": files})
            return shorten(output)
        finally:
            part.unlink(missing_ok=True)
            depfile.unlink(missing_ok=True)


def shorten(text: str) -> str:
    return text.replace(f"{ROOT}/", "").strip()


def failure(unit: Unit, code: int, output: str, command: list[str]) -> str:
    """The message of a failed command: what failed, the compiler's first lines, and where all of them are."""
    log = unit.stamp.with_suffix(".log")
    log.write_text(f"{shlex.join(command)}\n{output}")
    lines = shorten(output).splitlines() or ["(no output)"]
    first = next((number for number, line in enumerate(lines) if re.search(r"\berror\b", line)), 0)
    lines = lines[max(0, first - 3) :]  # with the "included from" before it
    if len(lines) > 12:
        lines[12:] = [f"({len(lines) - 12} more lines)"]
    variant = unit.output.stem.partition(".")[2]
    what = unit.output.name if unit.links else unit.inputs[0].name + (f" ({variant})" if variant else "")
    verb, compiler = "linking" if unit.links else "compiling", Path(command[0]).name
    head = f"{unit.label}: {verb} {what} failed: {compiler}, exit code {code}"
    return "\n  ".join([head, *lines, f"command and whole output: {shorten(str(log))}"])


def carry_out(plan: Plan, runner: Runner, progress: bool, alone: bool = True) -> None:
    """Brings the modules of one kernel up to date: the objects side by side, then the links."""
    if plan.is_fresh():
        return
    began, line = time.monotonic(), f"building {plan.label} ({', '.join(plan.variants)}) ... "
    if progress and alone:
        print(line, end="", file=sys.stderr, flush=True)
    end, warnings = "failed", []
    try:
        for units in plan.objects, plan.modules:
            stale = [functools.partial(make, unit, runner) for unit in units if not is_fresh(unit)]
            warnings += filter(None, runner.all(stale, len(stale)))
        end = f"{time.monotonic() - began:.1f} s"
    finally:
        if progress and (alone or end != "failed"):
            print("\n".join([end if alone else line + end, *warnings]), file=sys.stderr, flush=True)


def write_compile_commands(units: list[Unit]) -> None:
    """Merges commands into compile_commands.json, from which editors know how to read the sources."""
    if not IN_CHECKOUT:
        return
    path = ROOT / "compile_commands.json"
    with locked(OBJECTS / "compile_commands.lock", Runner()):
        old = read_json(path) or []
        entries = {entry["file"]: entry for entry in old if Path(entry["file"]).exists()}
        for unit in units:
            arguments = [*unit.command, *(python_includes() if unit.python else []), "-o", str(unit.output)]
            file = str(unit.inputs[0])
            entries[file] = {"directory": str(ROOT), "file": file, "arguments": arguments, "output": str(unit.output)}
        entries = [entries[file] for file in sorted(entries)]
        if entries != old:
            write_json(path, entries)


# ---------------------------------------------------------------------------------------------------------------------
# What others call.


def build(names, variants=None, *, jobs: int | None = None, progress: bool = True, force: bool = False) -> list[Path]:
    """Builds modules of stages, as far as they are out of date, and gives the files of all that were asked for.

    names: full names, as `select` gives them; those that have no modules are passed over. variants: of "simt", "xray",
    "cuda"; by default the first two, and "cuda" as USE_CUDA says. jobs: how many compilers at a time, by default one a
    core. force: rebuild all the same. Of several stages, the CUDA module of one that runs on none of the GPUs to
    build for is left out, which stderr says.
    Raises BuildError. Compilers still running are ended then, and on Ctrl-C.
    """
    variants = default_variants() if variants is None else tuple(variants)
    names = list(filter(has_modules, names))
    runner, plans = Runner(jobs), []
    for name in names:
        try:
            plans.append(stage_plan(name, variants))
        except OtherGPUs as error:
            if len(names) == 1:
                raise
            print(f"left out: {error}", file=sys.stderr)
            if others := [variant for variant in variants if variant != "cuda"]:
                plans.append(stage_plan(name, others))
    write_compile_commands([unit for name in names for unit in stage_plan(name, ("simt",)).objects])
    if force:
        for unit in [unit for plan in plans for unit in plan.objects + plan.modules]:
            unit.stamp.unlink(missing_ok=True)
    tasks = [functools.partial(carry_out, plan, runner, progress, alone=len(plans) == 1) for plan in plans]
    runner.all(tasks, min(len(tasks), runner.jobs))
    return [unit.output for plan in plans for unit in plan.modules]


def ensure(name: str, variant: str, *, progress: bool = True) -> Path:
    """The module of a stage, built now if it is missing or out of date."""
    module = module_path(name, variant)
    if not IN_CHECKOUT and module.is_relative_to(PACKAGE):
        return module  # shipped
    if variant == "cuda" and switch("USE_CUDA") is False:
        raise BuildError(f"{name}: its CUDA module is asked for, but USE_CUDA=0")
    try:
        carry_out(stage_plan(name, (variant,), first_use=True), Runner(), progress)
    except MissingTool as error:
        if not module.exists():
            raise MissingTool(f"{name}: its module _{variant} is not built yet, and {error}") from None
        print(f"{name}: {error}; using _{variant} as it was built", file=sys.stderr)
    return module


def build_module(
    kernel: Path, binding: Path, variant: str, output_dir: Path, extra_flags=(), *, progress=False
) -> Path:
    """Builds one module from any kernel into any folder, for tools that try out changed kernels.

    extra_flags: more flags for the compiler of the kernel; an -I among them comes before that of common/.
    """
    kernel, binding, output_dir = (Path(path).resolve() for path in (kernel, binding, output_dir))
    module = output_dir / f"_{variant}{SUFFIX}"
    label = f"{kernel.parent.name}/{kernel.name}"
    plan = plan_of(
        label, kernel, binding, (variant,), output_dir / "objects", lambda variant: module, tuple(extra_flags)
    )
    carry_out(plan, Runner(), progress)
    return module
