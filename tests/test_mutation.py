"""The tool that breaks kernels, on planted ones; then every stage: each of its mutants has to be caught."""

import subprocess

import pytest
import torch
from conftest import XRAYED

import stages
from stages.toolkit import build, compilers, mutate, operator
from stages.toolkit.cli import main
from stages.toolkit.errors import NotAvailable

SOURCE = r"""
#define GUARD(i) if (i < n) // not code of the device
constexpr int TILE = 32, WIDE = 2;
constexpr int PAD = 4;  // words
constexpr int STRIDE = TILE + 1;  // padded, or a column would lie in one bank
/* if (a < b) */
__device__ int swizzled(int row, int column) { return column ^ (row % 8); }

template <typename T, int N>
__global__ void __launch_bounds__(256) kernel(View<const T, 2> x, int64_t n, View<T, 2> y) {
  __shared__ T a[TILE][TILE + 1], b[8][TILE + PAD];
  __shared__ alignas(16) T c[2 * TILE + 2];
  const int i = threadIdx.x;
  if constexpr (N < 3) return;
  static_assert(N < 9, "a < b");
  for (int k = 0; k < n; ++k) a[i][k] = k >= n ? T(0) : x(i, k);
  if (!(i < n && x(i, 0) <= T('<'))) return;
  if (i >= n || f(i, i > 2) == 0) { return; }
  const bool inside = i + 1 < n;
  const T v = __shfl_sync(0xffffffffu, static_cast<T>(inside), 0);
  if (inside) __syncthreads();
  barrier.wait(k); cp::async_wait<0>();
  __syncwarp(0xffu);  // "quoted"
  async_copy<sizeof(T) * 4>(&a[i][0], &x(i, 0), inside);
  for (int k = 0; k < N; ++k) async_commit();
  while (i <
         n) step();
  y(i, i ^ 1) = b[i ^ N][0];  // swizzle
  y(i, i ^ 2) = v << 3;
}

void launcher() { if (a < b) __syncthreads(); }
"""


def test_every_place_is_found_and_nothing_else():
    found = [(m.kind, m.line, m.change) for m in mutate.mutants(SOURCE)]
    assert found == [
        ("padding", 4, "PAD = 4 -> 0"),
        ("padding", 5, "+ 1 removed"),
        ("swizzle", 7, "^ (row % 8) removed"),
        ("padding", 11, "+ 1 removed from a bound"),
        ("padding", 12, "+ 2 removed from a bound"),
        ("off by one", 16, "k < n -> k <= n"),
        ("off by one", 16, "k >= n -> k > n"),
        ("bounds", 16, "k >= n -> false"),
        ("bounds", 16, "k >= n -> true"),
        ("off by one", 17, "i < n -> i <= n"),
        ("bounds", 17, "i < n -> true"),
        ("off by one", 17, "x(i, 0) <= T('<') -> x(i, 0) < T('<')"),
        ("bounds", 17, "x(i, 0) <= T('<') -> true"),
        ("off by one", 18, "i >= n -> i > n"),
        ("bounds", 18, "i >= n -> false"),
        ("off by one", 18, "i > 2 -> i >= 2"),
        ("bounds", 18, "i > 2 -> false"),
        ("off by one", 19, "i + 1 < n -> i + 1 <= n"),
        ("bounds", 19, "i + 1 < n -> true"),
        ("barrier", 21, "__syncthreads() removed"),
        ("barrier", 22, "barrier.wait(k) removed"),
        ("barrier", 22, "cp::async_wait<0>() removed"),
        ("barrier", 23, "__syncwarp(0xffu) removed"),
        ("barrier", 24, "async_copy<sizeof(T) * 4>(&a[i][0], &x(i, 0), inside) removed"),
        ("barrier", 25, "async_commit() removed"),
        ("off by one", 25, "k < N -> k <= N"),
        ("off by one", 26, "i < n -> i <= n"),
        ("swizzle", 28, "^ 1 removed"),
        ("swizzle", 28, "^ N removed"),
    ]


def test_a_mutant_differs_in_one_place_and_keeps_its_lines():
    lines = SOURCE.splitlines()
    for mutant in mutate.mutants(SOURCE):
        changed = mutant.source.splitlines()
        assert len(changed) == len(lines)
        assert mutant.line in [n for n, pair in enumerate(zip(lines, changed, strict=True), 1) if pair[0] != pair[1]]
        assert sum(a != b for a, b in zip(lines, changed, strict=True)) <= 2  # one test stands on two lines
    assert "b[8][TILE + PAD]" in mutate.mutants(SOURCE)[0].source


# Stage 12 with B's tile stored by columns, which the padding keeps free of conflicts: its counts are those of stage 12.
PADDED = {
    "b_tile[TILE][TILE];": "b_tile[TILE][TILE + 1];",
    "b_tile[y][x] = ": "b_tile[x][y] = ",
    "b_tile[k][x]": "b_tile[x][k]",
}
# ... and with a test that does nothing: there are no more threads.
REDUNDANT = {"  if (row < rows && col < cols)": "  if (x < TILE && row < rows && col < cols)"}
SURVIVOR = "if (x < TILE && row < rows && col < cols) c(row, col) = T(sum);  [x < TILE -> {}]"


@pytest.fixture
def planted(tmp_path):
    def plant(*changes: dict[str, str]):
        source = stages.load("12").source.read_text()
        for old, new in (item for change in changes for item in change.items()):
            assert source.count(old) == 1
            source = source.replace(old, new)
        (tmp_path / "kernel.cu").write_text(source)
        return tmp_path / "kernel.cu"

    return plant


def only(monkeypatch, *wanted: str) -> None:
    """Try these mutants alone: the others take their time and are tried elsewhere."""
    all_of = mutate.mutants
    monkeypatch.setattr(mutate, "mutants", lambda source: [m for m in all_of(source) if m.change in wanted])


def test_a_padding_is_missed_by_the_counts(planted, monkeypatch):
    only(monkeypatch, "+ 1 removed from a bound")
    (outcome,) = mutate.run(stages.load("12"), planted(PADDED))
    assert outcome.kind == "padding"
    assert any("shared load wavefronts, not" in text for text in outcome.caught)
    assert not any("output" in text for text in outcome.caught)  # the values are right, only slow to come


def test_a_survivor_is_reported_and_may_be_excused(planted, monkeypatch):
    only(monkeypatch, "x < TILE -> true", "x < TILE -> x <= TILE", "__syncthreads() removed")
    stage, kernel = stages.load("12"), planted(REDUNDANT)
    outcomes = mutate.run(stage, kernel)
    assert [o.survived for o in outcomes] == [False, False, True, True]
    assert [o.kind for o in outcomes if not o.survived] == ["barrier", "barrier"]
    assert all(any(text.startswith("race, line") for text in o.caught) for o in outcomes[:2])
    text = mutate.table(stage, outcomes)
    assert "2 of 4 mutants caught" in text
    for change in ("true", "x <= TILE"):
        assert f"SURVIVED: kernel.cu:50  {SURVIVOR.format(change)}" in text

    only(monkeypatch, "x < TILE -> true")
    excuse = {SURVIVOR.format("true"): "a block has TILE columns"}
    (outcome,) = mutate.run(stage, kernel, excuse)
    assert not outcome.survived and outcome.excuse == "a block has TILE columns"
    assert "0 of 1 mutants caught, 1 of no consequence" in mutate.table(stage, [outcome])
    with pytest.raises(NotAvailable, match="EQUIVALENT has an entry that is no survivor of this kernel: other"):
        mutate.run(stage, kernel, {**excuse, "other": "?"})


def test_a_kernel_that_is_wrong_from_the_start_is_refused(planted):
    wrong = planted({"T(sum);": "T(sum + 1);"})
    with pytest.raises(NotAvailable, match="12_matmul_shared: the kernel as it stands does not pass: output off by"):
        mutate.run(stages.load("12"), wrong)


@pytest.mark.parametrize(("plant", "words"), [({}, ""), ({"T(sum);": "T(sum + 1);"}, "output off by")])
def test_mutants_are_of_the_dtype_that_a_stage_takes(plant, words, planted, tmp_path, monkeypatch):
    stage = stages.load("12")
    monkeypatch.setattr(stage, "dtypes", (torch.float16, torch.bfloat16))
    monkeypatch.setattr(stage, "problems", ((8, 16, 40),))
    monkeypatch.setattr(operator, "empty", operator.empty)  # `check` has another one
    flags = (*mutate.FLAGS, stage.type_only)
    module = build.build_module(planted(plant), stage.folder / "binding.cpp", "xray", tmp_path, flags)
    found = mutate.check(stage, module)
    assert found[0].startswith(words) if words else found == []
    with stage.kernels.replaced(simt=module), pytest.raises(ValueError, match="was built for float16 alone"):
        stage.matmul(torch.ones(1, 1), torch.ones(1, 1))


@pytest.mark.parametrize("line, words", [
    ("*reinterpret_cast<volatile int*>(16) = 1;", "crash|segmentation|memory"),
    ("while (a(row, 0) == a(row, 0)) {}", "deadlock|for ever|no end|time"),
])  # fmt: skip
def test_a_crash_and_an_endless_loop_are_caught(planted, line, words):
    broken = planted({"  Accumulator<T> sum = 0;": f"  {line} Accumulator<T> sum = 0;"})
    with pytest.raises(NotAvailable, match=f"does not pass: .*({words})"):
        mutate.run(stages.load("12"), broken)


def test_only_computing_ends_a_mutant():
    module = build.ensure("30_vlstm_forward", "xray")
    assert mutate.isolated("30_vlstm_forward", module, seconds=1) == ["no end: it computed for 1 s"]
    assert mutate.isolated("30_vlstm_forward", module) == []


def test_mutants_do_not_read_the_headers_again(tmp_path):
    kernel, host = stages.load("12").source, compilers.host_compiler()
    flags = [*host.flags("xray"), *mutate.FLAGS, f"-I{build.INCLUDE}"]

    def read(*more: str) -> str:
        command = [*host.command, *flags, *more, "-H", "-fsyntax-only", str(kernel)]  # -H: tell what is read
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr

    assert "common/view.h" in read()
    assert "common/view.h" not in read(*mutate.parsed_headers(kernel.read_text(), tmp_path, mutate.FLAGS))


def test_the_command_lists_mutants(capsys):
    assert main(["mutate", "12", "--list"]) == 0
    assert "k0 + x < inner -> k0 + x <= inner" in capsys.readouterr().out


def test_a_record_knows_the_kernel_but_not_its_comments(monkeypatch, tmp_path):
    monkeypatch.setattr(mutate, "RECORD", tmp_path / "mutants.json")
    assert mutate.read_record() == {}
    only(monkeypatch, "__syncthreads() removed")
    assert main(["mutate", "12", "--record"]) == 0
    source = stages.load("12").source.read_text()
    entry = {"kernel": mutate.fingerprint(source), "mutants": 2, "caught": 2, "of no consequence": 0, "survived": 0}
    assert mutate.read_record() == {"12_matmul_shared": entry}
    commented = source.replace("  __syncthreads();", "  // a word\n  __syncthreads();")
    assert commented != source and mutate.fingerprint(commented) == mutate.fingerprint(source)
    assert mutate.fingerprint(source.replace("__syncthreads()", "(void)0", 1)) != mutate.fingerprint(source)


@pytest.mark.parametrize("name", XRAYED)
def test_every_mutant_of_a_stage_has_been_caught(name):
    """By `python -m stages mutate NN --record`, which is to be run after a change of a kernel."""
    source = stages.load(name).source.read_text()
    entry = mutate.read_record()[name]
    assert entry["kernel"] == mutate.fingerprint(source)
    assert entry["mutants"] == len(mutate.mutants(source)) and entry["survived"] == 0


@pytest.mark.parametrize("name", XRAYED)
def test_some_mutants_of_a_stage_are_caught_again(name):
    stage = stages.load(name)
    outcomes = mutate.run(stage, some=2)
    assert outcomes
    assert not any(outcome.survived for outcome in outcomes), mutate.table(stage, outcomes)
