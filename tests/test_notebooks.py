"""The notebooks: each runs without a GPU, in time, and its outputs are those that are committed."""

import re
import time

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the notebooks' packages: pip install -e '.[notebooks]'")
pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

import numpy as np  # noqa: E402
import torch  # noqa: E402

import stages  # noqa: E402
from stages.toolkit import build, chapter, lab, notebooks, nsight, picture, triton_kernels  # noqa: E402
from stages.toolkit.errors import NotAvailable  # noqa: E402

PATHS = notebooks.paths()
SECONDS = 60


@pytest.fixture(params=PATHS, ids=[path.stem for path in PATHS])
def path(request):
    if stages.load(request.param.stem).in_triton:
        pytest.importorskip("triton")
    return request.param


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def test_every_notebook_belongs_to_a_stage():
    assert PATHS
    assert {path.stem for path in PATHS} <= set(stages.names())


def test_it_runs_in_time_and_gives_what_is_committed(path):
    build.build(stages.names(), ("xray",), progress=False)
    for _ in range(2):  # a first run may build changed kernels, which are kept
        start = time.monotonic()
        fresh = notebooks.execute(path)
        seconds = time.monotonic() - start
        if seconds < SECONDS:
            break
    assert seconds < SECONDS
    assert notebooks.differences(nbformat.read(path, as_version=4), fresh) == []


def test_it_is_committed_as_it_was_refreshed(path):
    committed = nbformat.read(path, as_version=4)
    nbformat.validate(committed)
    assert committed == notebooks.normalised(nbformat.read(path, as_version=4))
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for output in outputs(committed) if output.output_type == "error"]
    assert not [output for output in outputs(committed) if output.get("name") == "stderr"]


def test_it_has_pictures_with_words_and_no_traces_of_a_machine(path):
    committed = nbformat.read(path, as_version=4)
    pictures = [output for output in outputs(committed) if "image/png" in output.get("data", {})]
    assert pictures
    assert all(output.data["text/plain"] and output.metadata["image/png"]["alt"] for output in pictures)
    text = "\n".join(notebooks.text(committed))
    assert not re.search(r"(?<![\w.])/(home|root|tmp|usr|work|var|Users|opt)/|<[\w.]+ object at 0x", text)
    assert str(notebooks.ROOT) not in text


def test_it_has_the_parts_of_a_lesson_and_its_links_lead_somewhere(path):
    committed = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in committed.cells if cell.cell_type == "markdown")
    assert text.startswith(f"# {path.stem[:2]} · {stages.load(path.stem).title}")
    for part in ("**The question.**", "## The idea", "## The code that matters", "## Predict, then run"):
        assert part in text
    for part in ("## The counts", "## Break it", "## What still costs", "## Exercise"):
        assert part in text
    assert all((path.parent / link).exists() for link in re.findall(r"\]\(([^)]+)\)", text))


def test_progress_and_pieces_of_streams_are_not_kept():
    def stream(name, text):
        return nbformat.v4.new_output("stream", name=name, text=text)

    cell = nbformat.v4.new_code_cell("1", execution_count=7)
    cell.outputs = [
        stream("stderr", "building 12_matmul_shared (xray) ... "),
        stream("stderr", "4.2 s\n"),
        stream("stdout", "a"),
        stream("stdout", "b\n"),
        stream("stderr", "a warning\n"),
    ]
    (cell,) = notebooks.normalised(nbformat.v4.new_notebook(cells=[cell])).cells
    assert cell.execution_count == 1
    assert [(output.name, output.text) for output in cell.outputs] == [("stdout", "ab\n"), ("stderr", "a warning\n")]


# ---------------------------------------------------------------------------------------------------------------------
# The lab


@pytest.mark.parametrize(
    ("old", "complaint"),
    [
        ("__syncthreads();", r"stands 2 times in stages/12_matmul_shared/kernel.cu, on lines \d+, \d+; give more text"),
        ("a_tile[y][x] = row <= rows;", r"is not in stages/12_matmul_shared/kernel.cu; the nearest is line \d+: 'a_"),
        ("no such text anywhere in it", r"is not in stages/12_matmul_shared/kernel.cu$"),
        (" ", "is empty; give a line of the kernel"),
    ],
)
def test_a_change_of_text_that_is_not_there_exactly_once_is_refused(old, complaint):
    with pytest.raises(ValueError, match=complaint):
        lab.change("12", {old: ""})


def test_a_kernel_has_the_options_that_its_stage_is_about_or_others():
    full, half = lab.kernel("23", causal=False), lab.kernel("23")
    size = (1, 1, 128, 16, 64)
    assert (full.options, half.options) == ({"causal": False}, {"causal": True})
    assert full.is_right(*size) and half.is_right(*size)
    for kernel in (full, half):
        assert kernel.xray(*size).counts() == kernel.formula(*size)
    assert full.formula(*size).load_sectors * 3 == half.formula(*size).load_sectors * 4


def test_a_change_leaves_the_stage_as_it_is(capsys):
    before = lab.kernel("12").source.read_bytes()
    lab.exercise("12", {"a_tile[y][k]": "a_tile[y][k"}, 32, 32, 32, at_most={})
    assert re.search(r"cannot be tried: .*failed.*\n(.*\n)*.*error", capsys.readouterr().out)
    assert lab.kernel("12").source.read_bytes() == before
    assert lab.kernel("12").is_right(32, 32, 32)


def mark_stage_00(answer):
    lab.exercise("00", answer, 1000, at_most={"threads": 256, "load_sectors": 250, "store_sectors": 125})


FOUR_A_THREAD = {
    "{ceil_div(out.size[0], THREADS)}": "{ceil_div(out.size[0], 4 * THREADS)}",
    "const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;": "",
}


def test_exercise_00(capsys):
    mark_stage_00({})
    assert "No answer yet" in capsys.readouterr().out
    line = "if (i < out.size[0])"
    apart = "for (int64_t i = blockIdx.x * 4 * THREADS + threadIdx.x, j = 0; j < 4; ++j, i += THREADS) "
    mark_stage_00(FOUR_A_THREAD | {line: apart + line})
    assert "\nSolved." in capsys.readouterr().out
    side_by_side = "for (int64_t i = 4 * (blockIdx.x * THREADS + threadIdx.x), j = 0; j < 4; ++j, ++i) "
    mark_stage_00(FOUR_A_THREAD | {line: side_by_side + line})
    assert "too much" in capsys.readouterr().out
    mark_stage_00({"if (i < out.size[0]) ": ""})
    assert "out of bounds" in capsys.readouterr().out
    mark_stage_00({"T(alpha *": "T(2 * alpha *"})
    assert "the result is wrong" in capsys.readouterr().out


def test_exercise_10(capsys):
    a, b = lab.kernel("10").arguments(64, 64, 64)
    limit = {"load_sectors": 5 * 64**3 // 32}
    for answer, reply in [
        (None, "No answer yet"),
        ((a, b), "Not yet: no faults and the right result, but too much"),
        ((a, 2 * b), "must keep their shapes and values"),
        ((a.T.contiguous().T, b), "Solved."),
    ]:
        lab.exercise_layout("10", (a, b), answer, at_most=limit)
        assert reply in capsys.readouterr().out


def test_exercise_11(capsys):
    answer = {
        "constexpr int ROWS = 8;": "constexpr int ROWS = 16;",
        "constexpr int COLS = 32;": "constexpr int COLS = 16;",
    }
    limits = {"threads": 64 * 64, "load_sectors": 4 * 64**3 // 32, "store_sectors": 64 * 64 // 8}
    lab.exercise("11", answer, 64, 64, 64, at_most=limits)
    assert "Solved." in capsys.readouterr().out


def test_exercise_12(capsys):
    base = lab.change("12", {"b_tile[y][x] = ": "b_tile[x][y] = ", "(b_tile[k][x])": "(b_tile[x][k])"})
    limits = {"shared_load_conflicts": 0, "shared_store_conflicts": 0, "load_sectors": 2048}
    lab.exercise(base, {"T b_tile[TILE][TILE]": "T b_tile[TILE][TILE + 1]"}, 64, 64, 64, at_most=limits)
    assert "Solved." in capsys.readouterr().out


def test_exercise_13(capsys):
    base = lab.change(
        "13",
        {"b_tile[k][x + SIDE * i]": "b_tile[k][x * EACH + i]", "col0 + x + SIDE * j": "col0 + x * EACH + j"},
    )
    limits = {"shared_load_conflicts": 0, "shared_store_conflicts": 0, "load_sectors": 8192}
    for words, reply in [(32, "\nSolved."), (8, "too much")]:  # a hole after so many words
        answer = {
            "T b_tile[DEPTH][TILE]": f"T b_tile[DEPTH][TILE + TILE / {words}]",
            "b_tile[k][r] = ": f"b_tile[k][r + r / {words}] = ",
            "b_tile[k][x * EACH + i]": f"b_tile[k][x * EACH + i + (x * EACH + i) / {words}]",
        }
        lab.exercise(base, answer, 256, 256, 64, at_most=limits)
        assert reply in capsys.readouterr().out


def test_exercise_20(capsys):
    size = (1, 1, 128, 32, 64)
    formula = lab.kernel("20").formula(*size)
    limits = {"barriers": formula.barriers // 2, "load_sectors": formula.load_sectors, "shared_store_conflicts": 0}
    lab.exercise("20", {"DEPTH = 64 / sizeof(Sum)": "DEPTH = 128 / sizeof(Sum)"}, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise("20", {"DEPTH = 64 / sizeof(Sum)": "DEPTH = 32 / sizeof(Sum)"}, *size, at_most=limits)
    assert "too much" in capsys.readouterr().out


def test_exercise_21(capsys):
    size = (1, 1, 64, 64, 96)
    formula = lab.kernel("21").formula(*size)
    limits = {"barriers": formula.barriers * (2 * 2 + 3) // (2 * 5), "load_sectors": formula.load_sectors}
    second = "    __syncthreads();  // everyone has read before the next tile of V overwrites\n"
    loop = "for (int64_t col0 = 0; col0 < cols; col0 += TILE) {"
    answer = {
        "s_tile[TILE][TILE], v_tile[TILE][TILE];": "s_tile[TILE][TILE], v_tiles[2][TILE][TILE];",
        loop: f"{loop} auto& v_tile = v_tiles[col0 / TILE % 2];",
        second: "",
    }
    lab.exercise("21", answer, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise("21", {second: ""}, *size, at_most=limits)
    assert "race" in capsys.readouterr().out


def test_exercise_22(capsys):
    size = (1, 1, 256, 64, 64)
    once = "for (int p = 0; p < 64 / P::DEPTH; ++p) load_rows<P>(q_head, row0, p * P::DEPTH, q_pieces[p]);"
    sums = "  Sum out[P::EACH][P::EACH] = {};\n"
    answer = {
        "__shared__ typename P::Piece q_piece, k_piece;": (
            "__shared__ typename P::Piece q_pieces[64 / P::DEPTH], k_piece;"
        ),
        sums: f"{sums}  {once}\n",
        "      load_rows<P>(q_head, row0, k0, q_piece);\n": "",
        "multiply<P>(s, q_piece, k_piece, P::DEPTH)": "multiply<P>(s, q_pieces[k0 / P::DEPTH], k_piece, P::DEPTH)",
    }
    limit = (64 * 256 + 128 * 256 * 256 // 64) // 8
    lab.exercise("22", answer, *size, at_most={"load_sectors": limit, "shared_store_conflicts": 0})
    assert "\nSolved." in capsys.readouterr().out


def test_exercise_23(capsys):
    size = (1, 1, 256, 16, 16)
    backwards = lab.change(
        "23",
        {
            "for (int64_t key0 = first; key0 < last; key0 += TILE)": (
                "for (int64_t key0 = (tiles - 1) * TILE; key0 >= 0; key0 -= TILE)"
            ),
            "const int64_t first = mask == ANTICAUSAL ? row0 : 0, last = mask == CAUSAL ? row0 + TILE : seq;": "",
            "key0 == row0 && (mask == CAUSAL ? key > row": "(mask == CAUSAL ? key0 + key > row0 + row",
            "ANTICAUSAL && key < row)": "ANTICAUSAL && key0 + key < row0 + row)",
        },
    )
    limits = {"load_sectors": lab.kernel("23").formula(*size).load_sectors}
    for start, reply in (("row0", "\nSolved."), ("row0 - TILE", "is wrong")):
        answer = {"int64_t key0 = (tiles - 1) * TILE;": f"int64_t key0 = {start};"}
        lab.exercise(backwards, answer, *size, at_most=limits)
        assert reply in capsys.readouterr().out


def test_exercise_30(capsys):
    size = (1, 1, 256, 16, 64)
    formula = lab.kernel("30").formula(*size)
    limits = {"shared_load_wavefronts": formula.shared_load_wavefronts - 1200, "barriers": formula.barriers}
    warps = "for (int flip = 16; flip; flip /= 2) sum += __shfl_xor_sync(~0u, sum, flip);"
    loop = "for (int r = 0; r < TILE; ++r) start += between[r];"
    shuffled = {"between[own] = sum;": f"{warps} if (own % 32 == 0) between[own / 32] = sum;"}
    lab.exercise("30", shuffled | {loop: "start += between[0] + between[1];"}, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise("30", shuffled | {loop: "start += between[0];"}, *size, at_most=limits)
    assert "is wrong" in capsys.readouterr().out


def test_exercise_31(capsys):
    size = (1, 1, 256, 16, 64)
    formula = lab.kernel("31").formula(*size)
    limits = {"barriers": formula.barriers - 10 + 4, "load_sectors": formula.load_sectors}
    loop, after = "  for (int64_t key0 = row0; ", "    // Only the keys that there are"
    loads = """    if (own < TILE) {
      log_f[own] = log_gate<Sum>(f, batch, head, key0 + own, false);
      input[own] = log_gate<Sum>(i, batch, head, key0 + own, gate == EXP);
    }
"""
    barrier = "    __syncthreads();  // the gates are there before anyone adds them up\n"
    first = loads.replace("key0", "row0") + barrier
    later = loads.replace("key0", "key0 - TILE").replace("own < TILE", "key0 > 0 && own < TILE")
    lab.exercise("31", {loads + barrier: "", loop: first + loop, after: later + after}, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    early = {loads + barrier: "", loop: loads.replace("key0", "row0") + loop, after: later + after}
    lab.exercise("31", early, *size, at_most=limits)
    assert "race" in capsys.readouterr().out


def test_exercise_32(capsys):
    size = (1, 1, 256, 16, 64)
    formula = lab.kernel("32").formula(*size)
    limits = {"shared_load_wavefronts": formula.shared_load_wavefronts - 128 * 10, "load_sectors": formula.load_sectors}
    read = "(s[a][b] + bias[causal ? r : key])"
    for answer, reply in (
        ("(s[a][b] + (dots ? bias[causal ? r : key] : 0))", "\nSolved."),
        ("(s[a][b] + (causal ? bias[r] : bias[key]))", "but too much"),
        ("(s[a][b] + 1)", "is wrong"),
    ):
        lab.exercise("32", {read: answer}, *size, at_most=limits)
        assert reply in capsys.readouterr().out


def test_exercise_33(capsys):
    size, blocks, steps, warps = (1, 1, 256, 64, 64), 2, 6, 4
    formula = lab.kernel("33").formula(*size)
    limits = {"load_requests": formula.load_requests - (steps - blocks) * warps * 4, "barriers": formula.barriers}
    answer = {
        "  lay_down(first, fetch(row_tile, row), fetch(first": (
            "  const Side mine = fetch(row_tile, row);\n  lay_down(first, mine, fetch(first"
        ),
        "const Side mine = more ? fetch(row_tile, row) : Side{},\n                 other =": "const Side other =",
    }
    lab.exercise("33", answer, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    hasty = {"      if (more) lay_down(next, mine, other);\n": ""}
    lab.exercise("33", hasty, *size, at_most=limits)
    assert "Not yet" in capsys.readouterr().out


def test_exercise_40(capsys):
    size, words = (2, 64, 96), 2 * 64 * 96
    limits = {"load_sectors": 2 * words // 4 + 2 * 96 // 8, "store_sectors": words // 4}
    reads = "state = Accumulator<T>(a(batch, t, channel)) * state + Accumulator<T>(b(batch, t, channel));"
    store = "h(batch, t, channel) = T(state);  // rounded where it is stored, and nowhere else"
    walk = "for (int i = 0; i < 4; ++i) bs[i] = state = as[i] * state + bs[i];"
    answer = {
        '#include "common/numeric.h"': '#include "common/numeric.h"\n#include "common/vector.h"',
        "for (int64_t t = 0; t < seq; ++t) {": "for (int64_t t = 0; t < seq; t += 4) {",
        reads: "auto as = load_vector<4>(&a(batch, t, channel)), bs = load_vector<4>(&b(batch, t, channel));",
        store: f"{walk} store_vector(&h(batch, t, channel), bs);",
    }
    time_last = lab.kernel("40", time_dim=2)
    lab.exercise(time_last, answer, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    singly = "for (int i = 0; i < 4; ++i) h(batch, t + i, channel) = bs[i];"
    lab.exercise(time_last, answer | {store: f"{walk} {singly}"}, *size, at_most=limits)
    assert "but too much" in capsys.readouterr().out


def test_exercise_41(capsys):
    size, words = (1, 128, 64), 128 * 64
    limits = {"shared_load_wavefronts": 2 * words // 32, "shared_store_wavefronts": 0, "store_sectors": words // 8}
    place = "store_vector(&b_ring[now][r][own], states);  // nobody else reads these words before all are there"
    inside = "if (t0 + r < seq && own < h_strip.cols) h(batch, t0 + r, channel0 + own) = T(state[0]);"
    lab.exercise("41", {place: inside, "h_strip.store(b_ring[now]);": ""}, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise("41", {place: inside}, *size, at_most=limits)
    assert "Not yet" in capsys.readouterr().out


def test_exercise_42(capsys):
    size, chunks = (1, 256, 64), 128
    limits = {"shared_store_wavefronts": 52 * chunks}
    store = "a_chunk[now][thread] = own.a, b_chunk[now][thread] = own.b;"
    lab.exercise("42", {store: f"if (thread < CHUNK - distance) {store}"}, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise("42", {store: f"if (thread < CHUNK - 2 * distance) {store}"}, *size, at_most=limits)
    assert "Not yet" in capsys.readouterr().out


def test_exercise_43(capsys):
    size, chunks = (1, 256, 64), 128
    up = "__syncthreads();  // the maps of the parts are there"
    down = "__syncthreads();  // the maps of the older parts and the states of the pairs are there"

    def answer(above: int, below: int) -> dict[str, str]:
        return {
            up: f"if (distance < {above}) __syncthreads(); else __syncwarp();",
            down: f"if (distance < {below}) __syncthreads(); else __syncwarp();",
        }

    lab.exercise("43", answer(4, 2), *size, at_most={"barriers": 5 * chunks})
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise("43", answer(2, 2), *size, at_most={"barriers": 5 * chunks})
    assert "race" in capsys.readouterr().out


def test_exercise_44(capsys):
    size, limits = (1, 2048, 1), {"shared_load_wavefronts": 3 * 8 * 2, "barriers": 2}
    own = "const int last = min(lane_id(), int(blockDim.x) / 32 - 1);\n"
    own += "const Map<Sum> mine{warps.a[last], warps.low[last], warps.b[last]};\n"
    shuffled = ", ".join(f"__shfl_sync(ALL, mine.{word}, warp)" for word in ("a", "low", "b"))
    answer = {
        "  Sum state = carry;": f"{own}Sum state = carry;",
        "const Map<Sum> map{warps.a[warp], warps.low[warp], warps.b[warp]};": f"const Map<Sum> map{{{shuffled}}};",
    }
    lab.exercise("44", answer, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise("44", {"  Sum state = carry;": f"{own}Sum state = carry;"}, *size, at_most=limits)


def test_exercise_45(capsys):
    size, tiles = (1, 4096, 32), 16
    limits = {"store_requests": size[1] // 4 + tiles - 1}
    tell = "place.tell_map(i * LANES + lane, map[i]);"
    look = "Told<Sum>(place.b_of(place.tile - 1, i * LANES + lane)).what"
    lab.exercise("45", {tell: f"if (place.tile > 0 && {look} != STATE) {tell}"}, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise("45", {tell: f"if ({look} != STATE) {tell}"}, *size, at_most=limits)  # before the first is no tile
    assert "Not yet" in capsys.readouterr().out


def test_exercise_46(capsys):
    pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(0)
    a = 1 - 2e-5 * torch.rand(1, 1, 1 << 15, generator=generator)
    arguments, scan = (a, torch.randn(a.shape, generator=generator)), lab.kernel("46", time_dim=2)
    answer = {
        "inside, 1.0).to(Sum)": "inside, 1.0).to(tl.float64)",
        "a_tile * state[None, :], 0.0)": "(a_tile * state[None, :]).to(Sum), 0.0)",
        "tl.where(nowhere, 0.0, a_newer * b_older)": "tl.where(nowhere, 0.0, a_newer * b_older).to(b_newer.dtype)",
    }
    for changes, reply in (
        ({}, "No answer yet."),
        (answer, "The result is right, the relative error at most 3e-06.\n\nSolved."),
        ({"inside, 1.0).to(Sum)": "inside, 1.0).to(tl.float64)"}, "Not yet. It does not compile, or does not run: "),
        ({"row(h_tile, STEPS - 1)": "row(h_tile, 0)"}, "The result is wrong, the relative error more than 3e-06."),
        ({"inside, 1.0).to(Sum)": "inside, 1.0).to(Sum) "}, "The result is right, the relative error more than 3e-06."),
        ({"no such line": ""}, "This cannot be tried: 'no such line' is not in stages/46_scan_triton/kernel.py"),
        ({"h_tile, inside)": "h_tile)"}, "This cannot be tried: out of bounds: program (9, 0, 0) reaches "),
    ):
        lab.exercise_error(scan, changes, arguments, 2, 1100, 5, at_most=3e-6)
        assert capsys.readouterr().out.startswith(reply)
    assert scan.is_right(2, 70, 33)


def test_exercise_47(capsys):
    size = (1, 64, 64)
    limits = {"shared_store_wavefronts": 0, "store_sectors": size[1] * size[2] // 4}
    place = "b_ring[now][r][lane] = T(state);  // nobody else reads this word before all are there"
    inside = "if (t0 + r < seq && lane < h_strip.cols) h(batch, t0 + r, channel0 + lane) = T(state);"
    turning = lab.kernel("47", torch.complex64)
    lab.exercise(turning, {place: inside, "h_strip.store(b_ring[now]);": ""}, *size, at_most=limits)
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise(turning, {place: inside}, *size, at_most=limits)
    assert "Not yet" in capsys.readouterr().out


def test_exercise_48(capsys):
    size = (1, 32, 64, 64)
    kept = {
        "template <typename T>\n__device__ __forceinline__ void add_product(Angles<T>& turns, const Weights<T>& x,": (
            "template <typename T, typename X>\n__device__ void add_product(Angles<T>& turns, const X& x,"
        ),
        "load_row(left[half][i], x.of_lane[2 * m + half][i][threadIdx.x % 32]);": (
            "for (int j = 0; j < 4; ++j) left[half][i][j] = x(2 * m + half, i, j);"
        ),
        "Complex<T> sum[2] = {0, 0}, from_sum": (
            "Left<T> kept[INPUTS / 8];\n    for (int k = 0; k < INPUTS / 8; ++k)\n"
            "      for (int i = 0; i < PARTS<T>; ++i) load_row(kept[k][i], shared.weights[warp].of_lane[k][i][lane]);\n"
            "    Complex<T> sum[2] = {0, 0}, from_sum"
        ),
        "add_product(turns, shared.weights[warp], ": (
            "add_product(turns, [&](int k, int i, int j) { return kept[k][i][j]; }, "
        ),
        "add_product(angles, shared.weights[warp], ": (
            "add_product(angles, [&](int k, int i, int j) { return shared.weights[warp].of_lane[k][i][lane][j]; }, "
        ),
    }
    blocks, tiles = 32, 2 * 32
    most = lab.kernel("48").formula(*size).shared_load_wavefronts - 128 * (tiles - blocks)
    lab.exercise("48", kept, *size, at_most={"shared_load_wavefronts": most})
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise("48", kept, *size, at_most={"shared_load_wavefronts": most - 1})
    assert "but too much" in capsys.readouterr().out


def test_exercise_50(capsys):
    kernel = lab.kernel("50")
    text = kernel.source.read_text()
    start = text.index("  const Elements<COUNT> elements(A.size, ")
    end = text.index("  const Vector<Real<T>, COUNT> dt = ", start)  # of the forward kernel
    kept = {
        "(grid_of<T>(A_bar.size), ": (
            "({ceil_div(A_bar.size[0] * A_bar.size[2] * A_bar.size[3], THREADS * WIDTH<T>)}, "
        ),
        text[start:end]: """
  const int64_t seq = A.size[1], inner = A.size[2] * A.size[3], sizes[4] = {A.size[0], 1, A.size[2], A.size[3]};
  const int64_t index = (int64_t(blockIdx.x) * THREADS + threadIdx.x) * COUNT;
  if (index >= A.size[0] * inner) return;
  Elements<COUNT> elements(sizes, index);
  elements.all = A.size[0] * seq * inner;
  const Vector<T, COUNT> a = elements.of(A);
  for (int64_t t = 0; t < seq; ++t) {
  elements.first.i[1] = t, elements.index = (index / inner * seq + t) * inner + index % inner;
""",
        "elements.store(gain_prev, previous);\n": "elements.store(gain_prev, previous);\n  }\n",
    }
    at_most = {"load_sectors": 80, "store_sectors": 512}
    lab.exercise(kernel, kept, 2, 4, 8, 32, at_most=at_most)
    assert "\nSolved." in capsys.readouterr().out
    lab.exercise(kernel, {"THREADS = 128": "THREADS = 64"}, 2, 4, 8, 32, at_most=at_most)
    assert "Not yet" in capsys.readouterr().out


def test_exercise_51(capsys):
    """Four states a thread: half as many threads load what all states of a channel share."""
    size, choice = (1, 32, 16, 64), "if (states_of_a_lane == 4) run"
    lab.exercise("51", {choice: "if (true) run"}, *size, at_most={"shared_load_wavefronts": 2000})
    assert "Solved." in capsys.readouterr().out
    lab.exercise("51", {choice: "if (false) run"}, *size, at_most={"shared_load_wavefronts": 2000})
    assert "Solved." not in capsys.readouterr().out


def test_exercise_53(capsys):
    """Halved once more, six terms are enough: one product less."""
    size, kernel = (8, 16, 8), lab.kernel("53", method="zoh")
    at_most = {"shared_load_wavefronts": kernel.xray(*size).counts().shared_load_wavefronts - 1}
    fewer = {"constexpr int DEGREE = sizeof(T) == 4 ? 8 : 14;": "constexpr int DEGREE = sizeof(T) == 4 ? 6 : 14;"}
    halved = {"norm > T(0.5) ? std::ilogb(norm) + 2 : 0;": "norm > T(0.25) ? std::ilogb(norm) + 3 : 0;"}
    lab.exercise(kernel, fewer | halved, *size, at_most=at_most)
    assert "Solved." in capsys.readouterr().out
    lab.exercise(kernel, halved, *size, at_most=at_most)
    assert "Solved." not in capsys.readouterr().out


def test_exercise_60(capsys):
    """Eight rows a thread: of a word of R eight products, and half as many threads."""
    size, kernel = (8, 32, 64, 64), lab.kernel("60")
    counts = kernel.xray(*size).counts()
    at_most = {"shared_load_wavefronts": 9 * counts.shared_load_wavefronts // 10, "load_sectors": counts.load_sectors}
    lab.exercise(kernel, {"constexpr int SIDE = 8;": "constexpr int SIDE = 4;"}, *size, at_most=at_most)
    assert "Solved." in capsys.readouterr().out
    lab.exercise(kernel, {"constexpr int SIDE = 8;": "constexpr int SIDE = 16;"}, *size, at_most=at_most)
    assert "Solved." not in capsys.readouterr().out


def test_exercise_14(capsys):
    base = lab.change("14", {"By::groups ? 0 : WIDE<T>": "By::groups ? 0 : 0"})
    limits = {"shared_copy_wavefronts": 4992, "shared_load_wavefronts": 12480, "shared_bytes": 36864}
    for step, reply in [(4, "\nSolved."), (8, "too much")]:
        answer = {
            "patch + k * PITCH + i0 + i,": f"patch + k * PITCH + ((i0 + i) ^ k * {step}),",
            "patch.a[k][row_of(i)]": f"patch.a[k][row_of(i) ^ k * {step}]",
        }
        lab.exercise(base, answer, 256, 256, 64, at_most=limits)
        assert reply in capsys.readouterr().out
    padded = {"By::groups ? 0 : 0": "By::groups ? 0 : WIDE<T>"}
    lab.exercise(base, padded, 256, 256, 64, at_most=limits)
    assert "too much" in capsys.readouterr().out


def test_exercise_15(capsys):
    base = lab.change(
        "15",
        {
            "row * PITCH + (chunk ^ (row % 4 * 2 + row / 4 % 2))": "row * PITCH + chunk / 8 * 8 + (chunk + row) % 8",
        },
    )
    limits = {"shared_load_conflicts": 0, "shared_store_conflicts": 0}
    for turn, reply in [("row * 2 + row / 4 % 2", "\nSolved."), ("row * 2 + row / 4", "the result is wrong")]:
        lab.exercise(base, {"(chunk + row) % 8": f"(chunk + {turn}) % 8"}, 256, 256, 256, at_most=limits)
        assert reply in capsys.readouterr().out


def test_exercise_16(capsys):
    """When all meet because a box is complete, they can be told that the other place is free."""
    size, kernel = (512, 768, 192), lab.kernel("16")
    tiles, formula = 4 * 3, kernel.formula(*size)
    shared = kernel.xray(*size).launches[0].dynamic_shared
    limits = {"barriers": formula.barriers - 8 * tiles, "shared_bytes": shared}
    first = {
        "if (thread == 0) store_wait<1>();     // the box": "// the box",
        "sync_group<WARPGROUP>(1 + consumer);  // and": "// and",
    }
    second = "    sync_group<WARPGROUP>(1 + consumer);  // all"
    for left, reply in ((0, "\nSolved."), (1, "read in flight")):
        told = {second: f"    if (thread == 0) store_wait<{left}>();\n{second}"}
        lab.exercise(kernel, first | told, *size, at_most=limits)
        assert reply in capsys.readouterr().out
    lab.exercise(kernel, {second: "    // all"}, *size, at_most=limits)
    assert "race" in capsys.readouterr().out


def test_what_a_line_costs_and_the_first_faults():
    report = lab.kernel("13").xray(128, 128, 8)
    assert lab.wavefronts(report, "b_part[i] =") == 1
    with pytest.raises(ValueError, match="no line that reads or writes shared memory holds 'c_part'"):
        lab.wavefronts(report, "c_part")
    broken = lab.change("12", {"__syncthreads();  // everyone has read before the next step overwrites": ""})
    text = lab.faults(broken.xray(32, 32, 64), most=1)
    assert text.startswith("3 faults, the first 1 of them:\n- race: ") and text.count("- race") == 1


def test_a_kernel_in_another_dtype():
    kernel = lab.kernel("12", torch.bfloat16)
    assert kernel.xray(64, 64, 64).counts() == kernel.formula(64, 64, 64) != lab.kernel("12").formula(64, 64, 64)
    assert kernel.is_right(64, 64, 64)
    assert kernel.bytes_needed(64, 64, 64) == 3 * 64 * 64 * 2


def test_a_changed_kernel_is_built_for_its_dtype():
    change = {"i < out.size[0]": "i + 1 <= out.size[0]"}
    single, half = (lab.change(lab.kernel("00", dtype), change) for dtype in (torch.float32, torch.float16))
    assert single.is_right(1000) and half.is_right(1000)
    with single.in_place(), pytest.raises(ValueError, match="built for float32 alone"):
        single.stage.function(2.0, *single.arguments(1000, dtype=torch.float64)[1:])


def test_what_a_call_is_told():
    size, kernel = (128, 256, 64), lab.kernel("16")
    assert lab.told(kernel, *size) == "No faults."
    unread = lab.change(kernel, {"wait(shared->full[at.stage], at.parity);": ""})
    text = lab.told(unread, *size)
    assert "copy in flight: kernel.cu:" in text and "boxes are still on their way" in text.splitlines()[-1]
    waits = lab.told(lab.change(kernel, {"sizeof to);": "sizeof to + 1024);"}), *size).splitlines()
    assert waits[0].startswith("deadlock: ") and all(line.startswith(("- ", "  ")) for line in waits[1:])


def test_a_kernel_of_a_stage_without_float32(monkeypatch):
    monkeypatch.setattr(stages.load("00"), "dtypes", (torch.bfloat16, torch.float16))
    kernel = lab.kernel("00")
    assert kernel.dtype is torch.bfloat16 and kernel.is_right(1000)
    assert kernel.bytes_needed(1000) == 3 * 1000 * 2 and kernel.formula(1024) == kernel.xray(1024).counts()
    changed = lab.change("00", {"i < out.size[0]": "i + 1 <= out.size[0] + 0"})
    assert changed.is_right(1000)
    with changed.in_place(), pytest.raises(ValueError, match="built for bfloat16 alone"):
        changed.stage.function(2.0, *changed.arguments(1000, dtype=torch.float32)[1:])


# ---------------------------------------------------------------------------------------------------------------------
# The pictures


def test_pictures_are_the_same_on_every_run():
    kernel = lab.kernel("11")
    first, second = (picture.product({"stage 11": kernel.xray(32, 32, 16, block=0)}, (32, 32, 16)) for _ in range(2))
    assert first.png == second.png and first.png.startswith(b"\x89PNG")
    assert first.words == "stage 11: A: 1 sector, B: 4 sectors, C: 4 sectors."


def test_where_a_state_fades():
    size = np.array([[0.0, 0.5, 1.0, 2.0], [0.25, 2.0, 1.0, 0.5]])
    shown = picture.stability({"one": size, "two": 3 + size}, (-2, 2, -1, 1))
    assert shown.words == (
        "one: fades in 75 % of the left half, 25 % of the right; two: fades in 0 % of the left half, 0 % of the right."
    )
    assert shown.png == picture.stability({"one": size, "two": 3 + size}, (-2, 2, -1, 1)).png


def test_curves_are_named_by_where_they_end():
    x = np.array([1.0, 2.0])
    shown = picture.curves({"up": {"a": (x, x), "b": (x, 2 * x)}, "down": {"a": (x, 1 / x), "b": (x, 3 / x)}}, log=True)
    assert shown.words == "up: at the right a 2, b 4; down: at the right a 0.5, b 1.5."
    assert shown.png.startswith(b"\x89PNG")


def test_lines_of_a_header():
    text = repr(picture.header("complex.h", "struct alignas", "R re, im;"))
    assert text.startswith("common/complex.h, lines ") and "R re, im;" in text
    with pytest.raises(ValueError, match="no line of common/complex.h holds 'no such line'"):
        picture.header("complex.h", "no such line", "}")


def test_weights_are_what_is_left():
    left = torch.tensor([[1.0, 0.0], [0.5, torch.nan]]).numpy()
    shown = picture.weights({"one": left, "two": 0 * left})
    assert shown.words == "one: 1.0 keys a row have at least a half; two: 0.0 keys a row have at least a half."
    assert shown.png == picture.weights({"one": left, "two": 0 * left}).png


def test_owners_are_those_of_the_stores():
    report = lab.kernel("13").xray(128, 128, 8, block=0)
    shown = picture.owners(report, 128, warp=6, lane=21)
    assert shown.words == "Lane 21 of warp 6 owns 64 words of C, in columns 5, 21, 37, 53, 69, 85, 101 and 117."


def test_who_computes_s_and_when():
    size = (1, 1, 128, 16, 16)
    traces = {number: lab.kernel(number).xray(*size, block=-1) for number in ("21", "22", "23")}
    words = picture.scores(traces, seq=128).words
    assert words == "21: 16 blocks, 100 % of S; 22: 2 blocks, 100 % of S; 23: 2 blocks, 75 % of S."
    assert picture.scores(traces, seq=128, by="block").words == words
    failed = lab.kernel("21", function="as_it_failed").xray(*size, block=-1)
    words = picture.writers({"failed": failed, "22": traces["22"]}, "o", cols=16).words
    assert words == "failed: 16 blocks, up to 4 for a word; 22: 2 blocks, 1 for a word."
    shown = picture.traffic({"22": lab.kernel("22").xray(*size)}, ("q", "s", "o"))
    assert shown.words == "22: q 16 KiB, s 0 B, o 8 KiB."


def test_a_ring_of_buffers():
    panels = {"13": (lab.kernel("13").xray(128, 128, 40, block=0), 1)}
    panels["14"] = lab.kernel("14").xray(256, 128, 40, block=0), 3
    shown = picture.ring(panels, warp=5)
    assert shown.words == (
        "13: 1 buffer; while one is read, none on the way; 14: 3 buffers; while one is read, up to 2 on the way."
    )


def test_the_walk_of_a_scan():
    size = (1, 128, 64)
    shown = picture.walk({number: lab.kernel(number).xray(*size, block=0) for number in ("40", "41")}, *size[1:])
    assert shown.words == "40: 384 requests, no step ahead; 41: 96 requests, up to 76 steps ahead."


def test_what_a_parallel_scan_joins():
    traces = {number: lab.kernel(number).xray(1, 128, 1, block=0) for number in ("42", "43")}
    assert picture.joins(traces).words == "42: 769 combines in 7 rounds; 43: 253 combines in 13 rounds."
    assert {lab.lanes(report, "a_chunk", "older{") for report in traces.values()} == {769, 253}
    with pytest.raises(ValueError, match="no line that reads or writes a_chunk holds 'elder'"):
        lab.lanes(traces["42"], "a_chunk", "elder")


def test_wavefronts_of_a_request():
    plain = lab.change("43", {"PAD = 1": "PAD = 0"})
    requests = [
        picture.requests(kernel.xray(1, 128, 1, block=0), "a_chunk", "load", warp=0)
        for kernel in (plain, lab.kernel("43"))
    ]
    # Of the older maps in the rounds up: 32, 32, 16, 8, 4 and 2 lanes of the first warp.
    assert [[picture.wavefronts(a) for a in found[:12:2]] for found in requests] == [
        [2, 4, 4, 4, 4, 2],
        [1, 1, 1, 1, 1, 1],
    ]


def test_the_pieces_of_a_scan():
    size = (1, 2048, 1)
    shown = picture.pieces(lab.kernel("44").xray(*size, block=0), size[1])
    assert shown.words == "48 requests of 8 warps; 2,048 steps asked for before a store."


def test_what_triton_hands_to_which_thread():
    pytest.importorskip("triton")
    size = (1, 1024, 64)
    panels = {f"time_dim={n}": lab.kernel("46", time_dim=n).compiled(*size) for n in (1, 2)}
    for kernel in panels.values():
        layout = triton_kernels.layout(kernel)
        owners = layout.owners().reshape(-1, 2)
        each = np.bincount(owners @ [32, 1])
        assert (len(each), set(each)) == (128, {np.prod(layout.shape) // 128})  # all threads have as many
        assert triton_kernels.instructions(kernel)["shuffles"] > 0
    assert picture.handed_out(panels).words == (
        "What lane 9 of warp 2 holds of a tile; time_dim=1: 4 steps of 4 channels; time_dim=2: 8 steps of 1 channel."
    )
    with pytest.raises(ValueError, match="44_scan_warp is not written in Triton"):
        lab.kernel("44").compiled(*size)
    with pytest.raises(NotAvailable, match="46_scan_triton has no x-ray"):
        lab.kernel("46").xray(*size)


def test_owners_in_a_layout():
    layout = triton_kernels.Layout((4, 8), thread=(1, 2), lanes=(2, 2), warps=(2, 1), order=(1, 0))
    assert layout.owners()[..., 0].tolist() == [[0] * 8] * 2 + [[1] * 8] * 2
    assert layout.owners()[:2, :, 1].tolist() == [[0, 0, 1, 1] * 2, [2, 2, 3, 3] * 2]


def test_fragments_are_those_of_the_instruction():
    a = "A[4][2..3], A[4][10..11], A[12][2..3], A[12][10..11]"
    trace = lab.kernel("15", torch.bfloat16).xray(256, 128, 64, block=0)
    shown = picture.fragments(trace, k=64, n=128, lane=17)
    assert shown.words == f"Lane 17 holds {a}; B[2..3][4], B[10..11][4]; C[4][2..3], C[12][2..3]."


def test_banks_of_a_quarter_of_a_warp():
    trace = lab.kernel("15", torch.bfloat16).xray(256, 128, 64, block=0)
    rows = picture.requests(trace, "dynamic shared memory", "load", warp=0)[0]
    shown = picture.banks({"rows": rows}, lanes=range(8, 16))
    assert shown.words == "rows: 32 words, at most 1 in a bank: 1 wavefront."


def test_how_a_box_lies():
    report = lab.kernel("16").xray(128, 256, 64, block=0)
    rows = picture.requests(report, "dynamic shared memory", "store", warp=0)[:4]
    words = "stage 16: chunk 2 of rows 0 to 7 is at places 2, 3, 0, 1, 6, 7, 4 and 5, 1 wavefront."
    assert picture.box({"stage 16": rows}, chunk=2).words == words


def test_how_lanes_lie_over_a_patch():
    reads = picture.requests(lab.kernel("14").xray(256, 128, 8, block=0), "patches", "load", warp=0)
    shown = picture.lanes({"14": (reads[0], reads[2])})
    assert shown.words == "14: 8 rows of 4 lanes, right of lane 0 lane 1, below it lane 2."


def test_what_cannot_be_shown_is_told():
    kernel = lab.kernel("11")
    with pytest.raises(ValueError, match="no request for 'a'; take the x-ray with block=0"):
        picture.requests(kernel.xray(32, 32, 8), "a")
    with pytest.raises(ValueError, match="no line of stages/11_matmul_coalesced/kernel.cu holds 'no such line'"):
        picture.code(kernel, "no such line", "}")


def test_the_chapter_in_a_notebook(capsys, monkeypatch):
    record = {"stage": "12_matmul_shared", "sizes": {"M": 4096, "N": 4096, "K": 4096}, "dtype": "float32", "ms": 3.0}
    record |= {"incumbent_ms": 1.5, "ratio": 0.5, "percent_of_limit": 40.0, "limit": "arithmetic"}
    record["date"] = "2026-01-01"
    machine = {"card": "A Card", "driver": "1.2", "torch": "2", "records": [record]}
    monkeypatch.setattr(chapter, "recorded", lambda: [machine])
    plot = lab.chapter("1")
    assert "12 shared" in capsys.readouterr().out and "12 shared 50.0 %" in plot.words
    monkeypatch.setattr(chapter, "recorded", list)
    assert lab.chapter("1") is None
    assert "Not measured yet" in capsys.readouterr().out


def test_the_comparison_with_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PACKAGE", tmp_path)
    assert "Not measured yet" in picture.nsight().markdown
    row = {"stage": "12_matmul_shared", "size": [64, 32, 96], "dtype": "float32", "date": "2026-01-01"}
    rows = [
        row | {"count": "load_sectors", "hardware": 1536, "xray": 1536, "reason": ""},
        row | {"count": "shared_load_wavefronts", "hardware": 7000, "xray": 8000, "reason": "wider reads"},
    ]
    machine = {"card": "NVIDIA H100", "rows": rows}
    nsight.write(tmp_path / "measured" / "nsight.json", [machine])
    text = picture.nsight().markdown
    assert "NVIDIA H100: 1 of 2 counts are equal" in text
    assert "| stage 12, 64 x 32 x 96 |  | 1,536 |  |  | **7,000** (8,000) |  |" in text
    assert "1 differ, wider reads" in text
    assert picture.nsight("12").markdown == text and "Not measured yet" in picture.nsight("11").markdown
    other = {"card": "Another Card", "rows": [{**rows[0], "stage": "11_matmul_coalesced"}]}
    nsight.write(tmp_path / "measured" / "nsight.json", [machine, other])
    first, second = picture.nsight("12").markdown.split("Nsight Compute on one ")[1:]
    assert f"Nsight Compute on one {first.strip()}" == text.strip() and "| stage 11" not in first
    assert second.startswith("Another Card: 1 of 1 counts are equal") and "| stage 12" not in second
    assert "| stage 11, 64 x 32 x 96 |  | 1,536 |" in second
    assert picture.nsight("11").markdown.count("Nsight Compute on one") == 1
