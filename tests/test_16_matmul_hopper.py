"""Stage 16, matmul_hopper."""

import pytest
import torch
from conftest import GPU
from matmul_cases import MatmulCases
from stage_cases import free_gpu_memory

import stages
from stages.families import FLOATING, unit_roundoff
from stages.toolkit import build, mutate, operator, xray
from stages.toolkit.errors import KernelFault
from stages.toolkit.verify import relative_error

SIZES = [  # M, N, K
    (0, 8, 8),
    (5, 0, 8),
    (5, 16, 0),
    (0, 0, 0),
    (1, 8, 8),
    (1, 40, 128),
    (31, 32, 40),
    (33, 1000, 8),
    (127, 256, 72),
    (130, 264, 712),
    (2, 8, 1000),
    (300, 520, 64),
]

# Views with the values of a matrix x, each of which the kernel has to read in its own place.
VIEWS = {
    "transposed": lambda x: torch.nn.functional.pad(x.mT, (0, -x.shape[0] % 8))[:, : x.shape[0]].mT,
    "offset": lambda x: torch.nn.functional.pad(x, (8, 16, 1, 2), value=torch.nan)[1:-2, 8:-16],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "rows of a batch": lambda x: torch.stack([torch.full_like(x, torch.nan), x], 1)[:, 1],
}

# By Nsight Compute on an H200, at M, N, K: sm__sass_inst_executed_op_tma_ld and _st,
# sm__inst_executed_pipe_tensor_op_gmma, l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld_dest_self and _multicast,
# and l1tex__m_l1tex2xbar_write_sectors_mem_global_op_tma_st.
COUNTED_ON_A_CARD = {
    (256, 256, 128): (12, 16, 128, 2048, 4096, 4096),
    (512, 512, 256): (96, 64, 1024, 16384, 32768, 16384),
    (130, 264, 712): (144, 32, 1536, None, None, 2470),  # boxes past the edges, rows that begin within a cache line
}

# What may be left out or done wrong: the text, another in its place, and what the CPU device or the x-ray says of it.
BROKEN = {
    "the barriers' fence": ("    fence_async();\n  }\n", "  }\n", "missing fence"),
    "the first meeting of the cluster": ("cluster_sync();  // the", "// the", "has had no init"),
    "the last meeting of the cluster": ("cluster_sync();  // nobody", "// nobody", "block 0 of the cluster has ended"),
    "registers that nobody gives": ("give_registers<40>();", "", "for 2048 more registers, of which"),
    "the wait for a free tile": ("wait(shared->free[at.stage], at.parity ^ 1);", "", "arrivals of this phase"),
    "a wait for the other parity": ("at.parity ^ 1", "at.parity", "deadlock"),
    "bytes that nobody expects": ("sizeof to)", "sizeof to - 128)", "deadlock"),
    "bytes that never come": (
        "load_tile<A_BY_K, ROWS, false>(to.a, a, row0, k0, full);",
        "",
        "16384 bytes",
    ),
    "a part for one block only": ("PART, true>", "PART, false>", "deadlock"),
    "the wait for a full tile": ("wait(shared->full[at.stage], at.parity);", "", "copy in flight"),
    "the fence before products": ("wgmma_fence();", "", "without a wgmma_fence"),
    "the commit": ("wgmma_commit();", "", "read in flight"),
    "the wait for the products before": ("wgmma_wait<1>();", "", "read in flight"),
    "a wait that leaves too many": ("wgmma_wait<1>();", "wgmma_wait<2>();", "read in flight"),
    "tiles that stay taken": ("if (speaks && step > 0) arrive_at(thread, shared->free[before]);", "", "deadlock"),
    "the last tile stays taken": ("      if (speaks) arrive_at(thread, shared->free[before]);", "", "deadlock"),
    "a tile freed too early": ("if (speaks && step > 0)", "if (speaks)", "read in flight"),
    "a block that is not told": ("thread < CLUSTER;", "thread == 0;", "deadlock"),
    "the wait for the sums": ("wgmma_wait<0>(sum);", "", "wrong"),
    "the wait for what is on its way to C": ("if (thread == 0) store_wait<1>();     //", "//", "read in flight"),
    "the first meeting of a group": ("sync_group<WARPGROUP>(1 + consumer);  // and", "// and", "race"),
    "the fence before C": ("fence_async();\n    sync", "sync", "missing fence"),
    "the second meeting of a group": ("sync_group<WARPGROUP>(1 + consumer);  // all", "// all", "race"),
    "a barrier for both groups": (
        "sync_group<WARPGROUP>(1 + consumer);  // all",
        "sync_group<WARPGROUP>(1);  // all",
        "deadlock",
    ),
    "the commit of C": ("      store_commit();\n", "", "read in flight"),
    "the last wait for C": ("if (thread == 0) store_wait<0>();\n  }", "}", "wrong"),
    "the swizzle": ("swizzled(row, j / 8 + lane / 16)", "(j / 8 + lane / 16)", "wrong"),
}


class TestMatmulHopper(MatmulCases):
    stage = stages.load("16")
    odd = (40, 48, 56)  # M, too: some tests multiply A transposed
    multiple = 8  # of which N and K are

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_output_and_gradients(self, sizes, dtype, device):
        self.check(sizes, dtype, device)

    @pytest.mark.parametrize("view_a", VIEWS)
    @pytest.mark.parametrize("view_b", VIEWS)
    def test_views(self, view_a, view_b, device):
        a, b = self.arguments(self.odd, device=device)
        expected = self.function(a, b)
        a, b = VIEWS[view_a](a), VIEWS[view_b](b)
        assert torch.equal(self.function(a, b), expected)

    def test_views_are_not_copied(self):
        a, b = self.arguments((128, 256, 64))
        for x, y in ((a, b), (a.mT.contiguous().mT, b.mT.contiguous().mT)):
            with xray.recording() as report:
                self.function(x, y)
            assert {site.name for site in report.sites if site.space == "global"} == {"a", "b", "c"}
            assert report.counts().bulk_load_sectors == (128 + 256) * 64 * 2 // 32

    @pytest.mark.parametrize("sizes", COUNTED_ON_A_CARD, ids=str)
    def test_counts_are_those_of_a_card(self, sizes):
        counts = self.stage.xray(*self.arguments(sizes, dtype=torch.bfloat16)).counts()
        loads, stores, products, self_sectors, multicast_sectors, store_sectors = COUNTED_ON_A_CARD[sizes]
        assert (counts.bulk_load_requests, counts.bulk_store_requests) == (loads, stores)
        assert (counts.products, counts.bulk_store_sectors) == (products, store_sectors)
        # What is brought to both blocks of a cluster is counted at each by the card, once for both by the x-ray.
        if self_sectors is not None:
            assert counts.bulk_load_sectors == self_sectors + multicast_sectors // 2

    def test_boxes_past_the_edges_are_requests_too(self):
        """Of both blocks: a box of A and two of B, and four boxes of C for each consumer."""
        counts = self.stage.xray(*self.arguments((1, 8, 8))).counts()
        assert (counts.bulk_load_requests, counts.bulk_store_requests) == (2 * 3, 2 * 8)
        assert (counts.bulk_load_sectors, counts.bulk_store_sectors) == (1 + 8, 1)

    def test_expanded_inputs(self):
        a, b = self.arguments(self.odd)
        for x, y, name in ((a[:1].expand(40, -1), b, "a"), (a, b[:, :1].expand(-1, 48), "b")):
            with pytest.raises(NotImplementedError, match=rf"but {name} is .* with strides .*; stage 15"):
                self.function(x, y)

    test_expanded_inputs_are_not_copied = None  # they are refused

    @pytest.mark.parametrize("sizes", [(2**16 + 1, 8), (1, 2**17)], ids=["tall", "wide"])
    def test_more_blocks_than_a_grid_has_in_y_or_z(self, sizes, device):
        inner = 8 if device == "cuda" else 0  # on the CPU device without the work
        a = torch.ones(sizes[0], inner, device=device, dtype=torch.float16)
        b = torch.ones(inner, sizes[1], device=device, dtype=torch.float16)
        assert (self.function(a, b) == inner).all()

    def test_gradients_of_second_order(self):
        """`gradcheck` wants float64, which the tensor cores do not take here: against the reference's own."""
        found = []
        for function, dtype in ((self.stage.matmul, self.stage.dtype), (self.stage.family.reference, torch.float64)):
            a, b = (x.to(dtype).requires_grad_() for x in self.arguments(self.odd))
            grads = torch.autograd.grad(function(a, b).square().sum(), (a, b), create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), (a, b)))
        for x, reference in zip(*found, strict=True):
            assert relative_error(x, reference) < 8 * unit_roundoff(self.stage.dtype)

    @pytest.mark.parametrize("by_k", [(True, False), (True, True), (False, True), (False, False)], ids=str)
    def test_operands_in_place_give_the_same(self, by_k, device):
        a, b = self.arguments((256, 512, 192), device=device)
        expected = self.function(a, b)
        a, b = (x if along == 1 else x.mT.contiguous().mT for x, along in ((a, by_k[0]), (b, not by_k[1])))
        assert torch.equal(self.function(a, b), expected)

    def test_negated_view(self, device):
        x = self.arguments((8, 8, 8), device=device)[0]
        view = torch._neg_view(x)
        assert view.is_neg()
        assert torch.equal(self.function(view, view), self.function(-x, -x))

    @GPU
    @pytest.mark.skipif(free_gpu_memory() < 20e9, reason="needs 20 GB of GPU memory")
    def test_strides_past_two_to_the_31(self):
        # Three rows, 2^31 + 8 elements apart, of a small matrix that lies in a huge one.
        parent = torch.zeros(3, 2**31 + 8, dtype=torch.bfloat16, device="cuda")
        a = parent[:, -8:]
        a.copy_(torch.randn(3, 8))
        b = torch.randn(8, 8, dtype=torch.bfloat16, device="cuda")
        assert torch.equal(self.function(a, b), self.function(a.contiguous(), b))

    @pytest.mark.parametrize(
        ("a", "b", "error", "words"),
        [
            (torch.ones(8, 8), torch.ones(8, 8), NotImplementedError, r"takes float16 and bfloat16.*float32; stage 14"),
            (torch.ones(8, 7).half(), torch.ones(7, 8).half(), NotImplementedError, r"K is 7; stage 15 .* takes any"),
            (torch.ones(8, 8).half(), torch.ones(8, 9).half(), NotImplementedError, r"N is 9; stage 15 .* takes any"),
            (torch.ones(8, 12).half()[:, 4:], torch.ones(8, 8).half(), NotImplementedError, r"but a is \(8, 8\) with"),
            (torch.ones(8, 17).half()[:, :8], torch.ones(8, 8).half(), NotImplementedError, r"strides \(17, 1\)"),
        ],
        ids=["float32", "K", "N", "offset", "strides"],
    )
    def test_what_it_does_not_take(self, a, b, error, words):
        with pytest.raises(error, match=words):
            self.stage.matmul(a, b)

    def test_an_address_that_is_not_aligned(self):
        """Which no stride and no offset tells."""
        bytes_ = torch.zeros(2 + 8 * 8 * 2, dtype=torch.uint8)
        a = torch.frombuffer(bytes_.numpy(), dtype=torch.float16, offset=2 if bytes_.data_ptr() % 16 == 0 else 0).view(
            8, 8
        )
        assert a.data_ptr() % 16
        with pytest.raises(ValueError, match="rows that begin at multiples of 16 bytes"):
            self.stage.matmul(a, torch.ones(8, 8).half())

    @pytest.mark.parametrize("broken", BROKEN)
    def test_it_is_told_what_is_missing(self, broken, variants):
        """Each arrival, wait, fence and commit: the x-ray, or the device, says what kind of fault it is."""
        said = variants(*BROKEN[broken][:2])
        assert any(BROKEN[broken][2] in text for text in said), said

    def test_nothing_is_told_of_the_kernel_as_it_stands(self, variants):
        assert variants("", "") == []


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    """What is wrong with the kernel after a change of its text, in the first schedule that shows it."""
    stage = stages.load("16")
    source = stage.source.read_text(encoding="utf-8")
    a, b = stage.family.make(stage.sizes((130, 520, 712)), torch.bfloat16)
    truth = stage.family.reference(a, b)
    flags = ("-Og", "-g1", stage.type_only, f"-I{stage.folder}")
    flags += mutate.parsed_headers(source, tmp_path_factory.mktemp("headers"), flags)

    def said(old: str, new: str) -> list[str]:
        folder = tmp_path_factory.mktemp("variant")
        assert not old or source.count(old) == 1
        (folder / "kernel.cu").write_text(source.replace(old, new) if old else source, encoding="utf-8")
        module = build.build_module(folder / "kernel.cu", stage.folder / "binding.cpp", "xray", folder, flags)
        empty, operator.empty = operator.empty, operator.poisoned
        found = []
        try:
            with stage.kernels.replaced(xray=module):
                for schedule, seed in (("forward", 0), ("reverse", 0), ("random", 1), ("random", 2)):
                    try:
                        with xray.recording(schedule, seed) as report:
                            c = stage.matmul(a, b)
                    except KernelFault as fault:
                        found.append(str(fault))
                    else:
                        found += ["wrong"] * (not relative_error(c, truth) < 3 * unit_roundoff(c.dtype))
                    found += map(str, report.faults)
                    if found:
                        break
        finally:
            operator.empty = empty
        return found

    return said
