"""The CPU device on the other processor that it knows: cross-compiled, and run by an emulator where there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest

from stages.toolkit import compilers

HERE = Path(__file__).parent / "simt"
ROOT = HERE.parent.parent
CXX, QEMU = "aarch64-linux-gnu-g++", "qemu-aarch64-static"

pytestmark = pytest.mark.skipif(
    not (shutil.which(CXX) and shutil.which(QEMU)), reason=f"needs {CXX} and {QEMU} (packages of most Linux systems)"
)


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The objects of the CPU device."""
    folder = tmp_path_factory.mktemp("aarch64")
    flags = [*compilers.HOST.split(), "-O2", "-I", str(ROOT)]
    sources = [path for path in (ROOT / "common" / "simt").glob("*.cpp") if path.stem != "python"]
    running = [
        subprocess.Popen([CXX, *flags, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]) for source in sources
    ]
    assert not any([process.wait() for process in running])
    return [folder / f"{source.stem}.o" for source in sources]


@pytest.mark.parametrize("kernels", ["operations", "faults", "matrices"])
def test_kernels_and_faults(device, kernels):
    """Fibers, barriers, warp operations, the x-ray; deadlocks and crashes that end in exceptions, one after another."""
    flags = [*compilers.HOST.split(), "-O2", "-g1", "-I", str(ROOT)]
    xray = ["-x", "c++", "-fsanitize=thread", "-fno-tree-sra"]
    define = [f"-D{kernels.upper()}"]
    folder, objects = device[0].parent, list(device)
    program = folder / kernels
    for source, extra in [(HERE / "standalone.cpp", define), (HERE / f"{kernels}.cu", xray)]:
        objects.append(folder / f"{kernels}.{source.stem}.o")
        subprocess.run([CXX, *flags, *extra, "-c", str(source), "-o", str(objects[-1])], check=True)
    subprocess.run([CXX, "-pthread", *map(str, objects), "-o", str(program)], check=True)
    done = subprocess.run(
        [QEMU, "-L", "/usr/aarch64-linux-gnu", str(program)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "WRONG" not in done.stdout and done.stdout.count(": ok") >= 20, done.stdout
