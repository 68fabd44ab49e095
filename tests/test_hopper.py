"""Hopper's machine on the CPU device and under the x-ray: common/hopper.h."""

import re

import pytest
import torch
from test_simt import SCHEDULES, Bench

from stages.toolkit.kernels import call

BROKEN = {  # the kind of fault, and its line if the kernel has one
    "box_no_wait": "copy in flight",
    "ring_one_arrives": "race",
    "ring_no_meeting": "race",
    "product_no_fence": "missing fence",
    "product_no_wait": "copy in flight",
    "cluster_no_wait": "copy in flight",
    "cluster_no_start": "race",
    "store_no_wait": "read in flight",
}
ENDED = {  # what the device says
    "box_no_init": r"arrive_expecting: the barrier at byte \d+ of dynamic shared memory has had no init",
    "box_more_bytes": r"deadlock: 64 threads wait at wait, hopper.cu:\d+, for parity 0 of the barrier at byte 2048 .* "
    r"in its phase 0, which lacks 0 of 1 arrivals and 16 bytes",
}


def wide(x: torch.Tensor) -> torch.Tensor:
    """x, its rows and columns filled up with zeros to 200."""
    return torch.nn.functional.pad(x, (0, 200 - x.shape[1], 0, 200 - x.shape[0]))


def factor(x, name):
    a_by_k, b_by_k = (word == "true" for word in name.split("_")[1:])
    b = torch.cat([x.T, torch.zeros_like(x)], 1) if b_by_k else torch.cat([x, x], 1)
    return (x if a_by_k else x.T) @ b


SQUARE = torch.randint(-3, 4, (64, 64)).float()
RIGHT = {  # x, and what y is
    "box": (torch.randn(12, 85).half(), lambda x: wide(x)[3:19, 40:104]),
    "ring": (torch.randint(-9, 9, (112, 64)).half(), lambda x: x.view(7, 16, 64).sum(0)),
    **{
        f"product_{a}_{b}": (SQUARE.half(), lambda x, name=f"product_{a}_{b}": factor(x, name))
        for a in ("true", "false")
        for b in ("true", "false")
    },
    "product_by_threads": (SQUARE.half(), lambda x: 2 * factor(x, "product_true_false")),
    "cluster": (torch.randn(32, 64).half(), lambda x: torch.cat([x, x])),
    "store": (
        torch.zeros(32, 64).half(),
        lambda x: torch.arange(32 * 64).view(32, 64) % 512 + torch.arange(2).repeat_interleave(16)[:, None] * 1000,
    ),
}


@pytest.fixture(scope="module")
def hopper(tmp_path_factory):
    yield Bench("hopper", tmp_path_factory.mktemp("hopper"))


def padded(x: torch.Tensor) -> torch.Tensor:
    """x in rows that begin at multiples of 16 bytes."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 8))[:, : x.shape[1]]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}{s[1]}")
@pytest.mark.parametrize("name", RIGHT)
def test_right_and_without_a_fault(hopper, name, schedule):
    x, truth = RIGHT[name]
    x = padded(x)
    wanted = truth(x.float())
    for variant, module in hopper.modules.items():
        module.configure(schedule=schedule[0], seed=schedule[1])
        y = torch.full(wanted.shape, torch.nan, dtype=torch.half)
        if variant == "xray":
            recording, message = hopper.xray(name, x, y)
            assert (recording["faults"], message) == ([], None)
        else:
            hopper.simt(name, x, y)
        assert torch.equal(y.float(), wanted.float())


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_told_with_its_line(hopper, name):
    source = name.rsplit("_no_", 1)[0].removesuffix("_one_arrives")
    x, truth = RIGHT[{"product": "product_by_threads"}.get(source, source)]
    y = torch.zeros(truth(x.float()).shape, dtype=torch.half)
    kind = BROKEN[name]
    for schedule, seed in SCHEDULES:
        hopper.modules["xray"].configure(schedule=schedule, seed=seed)
        recording, _ = hopper.xray(name, padded(x), y)
        found = {(fault["kind"], fault["line"]) for fault in recording["faults"]}
        if (kind, hopper.line_of(name)) in found:
            break
    assert (kind, hopper.line_of(name)) in found


@pytest.mark.parametrize("variant", ["simt", "xray"])
@pytest.mark.parametrize("name", ENDED)
def test_what_cannot_go_on_ends(hopper, name, variant):
    x = torch.zeros(32, 64).half()
    hopper.modules[variant].configure(schedule="forward")
    with pytest.raises(RuntimeError) as error:
        call(hopper.modules[variant], "run", (name, x, torch.zeros(64, 64).half()))
    assert re.search(ENDED[name], str(error.value)), str(error.value)


def test_every_kernel_is_tested(hopper):
    names = re.findall(r'^  [A-Z_]+\("(\w+)"', hopper.source.read_text(), re.MULTILINE)
    assert sorted(names) == sorted({*RIGHT, *BROKEN, *ENDED})


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(16, 60).half(), "rows that begin at multiples of 16 bytes, got strides 60, 1"),
        (torch.zeros(64, 16).half().mT, "got strides 1, 16"),
        (torch.zeros(0, 64).half(), "1 to 2\\^31 - 1 rows and columns, got 0 x 64"),
    ],
    ids=["pitch", "columns", "empty"],
)
def test_what_the_copy_engine_does_not_take(hopper, x, words):
    with pytest.raises(ValueError, match=words):
        hopper.simt("box", x, torch.zeros(16, 64).half())
