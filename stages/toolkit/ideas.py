"""What each idea of stage 16 is worth: the kernel with one more of them at a time, timed beside torch.matmul.

    python -m stages.toolkit.ideas --out stages/measured/ideas.json

needs a GPU of compute capability 9.0 and nvcc. Notebook 16 shows what is recorded, if that is of the kernel as it
stands. All are made of stage 16's kernel by changes of its text, which take ideas out.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.toolkit import bench, build, kernels, lab, mutate, nsight, verify
from stages.toolkit.compilers import capture
from stages.toolkit.errors import NotAvailable

RECORD = build.PACKAGE / "measured" / "ideas.json"
STAGE, DTYPE = "16", torch.bfloat16
PRODUCTS_A_CYCLE = 2048  # multiply-adds of 16 bits by the tensor cores of a Hopper multiprocessor
CALLS = 50  # in a row, so that the time they take is the card's
SIZES = ((4096, 4096, 4096), (8192, 8192, 8192))

ROUNDS = """  const int64_t rounds = ceil_div(down * across, multiprocessors(stream) / CLUSTER);
  const int64_t clusters = ceil_div(down * across, rounds);
"""

# The ideas in the order of the lesson, and how the kernel is written without them.
IDEAS: dict[str, dict[str, str]] = {
    "one tile": {},
    "a ring of two tiles": {"STAGES = 4;": "STAGES = 1;"},
    "a ring of four": {"STAGES = 4;": "STAGES = 2;"},
    "the next product is asked for before the last is done": {
        "      int before = 0;\n": "",
        """        wgmma_wait<1>();  // the step before is done
        if (speaks && step > 0) arrive_at(thread, shared->free[before]);
        before = at.stage;
""": """        wgmma_wait<0>(sum);
        if (speaks) arrive_at(thread, shared->free[at.stage]);
""",
        "      if (speaks) arrive_at(thread, shared->free[before]);\n": "",
    },
    "blocks that stay": {ROUNDS: "  const int64_t clusters = down * across;\n"},
    "clusters of two": {"CLUSTER = 2;": "CLUSTER = 1;"},
    "tiles of C in groups": {"GROUP = 8;": "GROUP = 1;"},
    "along k there and back": {
        "const bool back = n / clusters % 2 == 1;": "",
        "(back ? steps - 1 - step : step)": "step",
    },
    "rounds that are full": {
        ROUNDS: "  const int64_t clusters = std::min(down * across, multiprocessors(stream) / CLUSTER);\n"
    },
}


def variants() -> dict[str, lab.Kernel]:
    """The kernel with the first idea, with the first two and so on; the last one is as it stands.

    Raises:
        ValueError: The kernel's text is another one than the changes are for.
    """
    found, own, changes = {}, lab.kernel(STAGE, DTYPE), {}
    for name, without in reversed(IDEAS.items()):
        found[name] = lab.edit(own, changes) if changes else own
        changes = changes | without  # of two changes of a text the one of the earlier idea
    return dict(reversed(found.items()))


def fingerprint() -> str:
    """Of the kernel as it stands, comments aside."""
    return mutate.fingerprint(lab.kernel(STAGE).source.read_text(encoding="utf-8"))


def caller(name: str, kernel: lab.Kernel) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that multiplies on the GPU by one of the kernels."""
    own = kernel.stage.kernels.module
    module = kernels.load(f"ideas.{name}._cuda", kernel.module("cuda")) if kernel.changed else own("cuda")

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        c = a.new_empty(a.shape[0], b.shape[1])
        module.matmul(a, b, c, (c.device.index, torch.cuda.current_stream().cuda_stream))
        return c

    return multiply


def under_load(call: Callable[[], object], seconds: float = 2.0) -> dict[str, float]:
    """Power in W, clock in MHz and their limits, by the driver, while the card does nothing but these calls; their ms.

    Raises:
        NotAvailable: There is no nvidia-smi, or it does not say.
    """
    values = ("power.draw", "power.limit", "clocks.sm", "clocks.max.sm")
    index = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    ask = ("nvidia-smi", f"--id=GPU-{index}", f"--query-gpu={','.join(values)}", "--format=csv,noheader,nounits")
    with ThreadPoolExecutor(1) as pool:
        began, answer = time.monotonic(), None
        while answer is None or not answer.done():
            start = time.monotonic()
            for _ in range(CALLS):
                call()
            torch.cuda.synchronize()
            ms = (time.monotonic() - start) * 1000 / CALLS
            if answer is None and time.monotonic() > began + seconds:
                answer = pool.submit(capture, *ask)
    try:
        found = [float(value) for value in (answer.result() or "").split(",")]
        return {"ms": ms, **dict(zip(("watts", "most_watts", "mhz", "most_mhz"), found, strict=True))}
    except ValueError:
        raise NotAvailable(f"{' '.join(ask)} does not tell the card's power and clock: {answer.result()}") from None


def record() -> dict[str, object]:
    """Milliseconds of each kernel and of torch.matmul for each size, the card under the last one, and which machine.

    Raises:
        NotAvailable: There is no GPU, or another one.
        AssertionError: A kernel's result is wrong.
    """
    if not torch.cuda.is_available():
        raise NotAvailable("this torch finds no GPU here: there is nothing to record")
    stage = lab.kernel(STAGE).stage
    stage.kernels.check(torch.device("cuda", torch.cuda.current_device()))
    calls = {name: caller(name, kernel) for name, kernel in variants().items()}
    rows = []
    for values in SIZES:
        sizes = stage.sizes(values)
        a, b = stage.family.make(sizes, DTYPE, "cuda")
        expected, most = torch.matmul(a, b), 2 * stage.family.tolerance(sizes, DTYPE)["output"]
        for name, call in calls.items():
            assert verify.relative_error(call(a, b), expected) <= most, f"wrong with the ideas up to {name!r}"
        times = bench.in_turn([torch.matmul, *calls.values()], bench.rotated((a, b)))
        rows.append({"sizes": list(values), "torch.matmul": times[0], "ms": dict(zip(calls, times[1:], strict=True))})
        load = under_load(lambda call=call, a=a, b=b: call(a, b))
    name = str(DTYPE).removeprefix("torch.")
    processors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    load["multiprocessors"] = processors
    return {**nsight.machine(), "kernel": fingerprint(), "dtype": name, "unit": "ms", "rows": rows, "load": load}


def recorded() -> dict[str, Any] | None:
    """What was recorded of the kernel as it stands; None: nothing."""
    if not RECORD.exists():
        return None
    found = json.loads(RECORD.read_text(encoding="utf-8"))
    return found if found["kernel"] == fingerprint() else None


def table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a table of a record."""
    header = ["with"]
    for row in found["rows"]:
        header += ["x".join(map(str, row["sizes"])) + ", ms", "TFLOP/s", "% of torch.matmul"]
    lines = []
    for name in found["rows"][0]["ms"]:
        line = [name]
        for row in found["rows"]:
            m, n, k = row["sizes"]
            ms = row["ms"][name]
            line += [f"{ms:.4g}", f"{2 * m * n * k / ms / 1e9:.0f}", f"{100 * row['torch.matmul'] / ms:.1f}"]
        lines.append(line)
    return header, lines


def limit(found: Mapping[str, Any]) -> str:
    """In words, from a record: the power the card draws, the clock that this leaves, how busy its tensor cores are."""
    load, (m, n, k) = found["load"], found["rows"][-1]["sizes"]
    cycles = m * n * k / PRODUCTS_A_CYCLE / load["multiprocessors"]
    return (
        f"While it multiplies {m} x {k} by {k} x {n}, one product after the other, in {load['ms']:.4g} ms each, the "
        f"card draws {load['watts']:.0f} of {load['most_watts']:.0f} W, and its multiprocessors run at "
        f"{load['mhz']:.0f} of {load['most_mhz']:.0f} MHz. Of the cycles that leaves, the tensor cores are at work "
        f"in {100 * cycles / (load['ms'] * load['mhz'] * 1000):.0f} %."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.toolkit.ideas", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=RECORD, metavar="FILE", help="where the record goes")
    options = parser.parse_args(arguments)
    try:
        found = record()
    except (NotAvailable, build.BuildError) as error:
        print(f"error: {error}")
        return 1
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    header, rows = table(found)
    print(lab.render.table(header, rows, "<" + ">" * (len(header) - 1)))
    print(limit(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
