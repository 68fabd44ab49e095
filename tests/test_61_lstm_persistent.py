"""Stage 61, lstm_persistent."""

import pytest
import torch
from conftest import GPU
from lstm_cases import LstmCases

import stages
from stages.families import FLOATING, lstm
from stages.toolkit import xray
from stages.toolkit.verify import outputs, verify

DOUBLE = 4 * 64  # the largest H of float64 on the CPU device: 64 blocks of 4 units


class TestLstmPersistent(LstmCases):
    stage = stages.load("61")

    def test_counts_equal_the_closed_forms(self):
        """How often a block looks whether the others have come depends on how they run; what else it reads does not."""
        requests = {}
        for seq in (2, 3, 6):
            report = self.stage.xray(*self.arguments((seq, 4, 3, 32)))
            assert len(report.launches) == 1
            requests[seq] = {
                name: sum(s.requests for s in report.sites if s.name == name and s.space == "global")
                for name in ("weight_hh", "h", "products")
            }
        once = {counts["weight_hh"] for counts in requests.values()}  # however many steps there are
        assert len(once) == 1 and 0 not in once
        for name in ("h", "products"):
            steps = [requests[n + 1][name] - requests[n][name] for n in (2,)]
            assert requests[6][name] == requests[2][name] + 4 * steps[0]

    def test_the_closed_forms_hold_where_the_readme_uses_them(self):
        """It uses none."""
        assert self.stage.cost is None

    @pytest.mark.parametrize("sizes", [(2, 17, 3, 40), (2, 3, 2, 300), (3, 34, 2, 16)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_no_faults_with_more_chunks_and_more_units(self, sizes, dtype):
        """Batches of more than one chunk; units of 8 a block."""
        arguments = self.arguments(sizes, dtype, requires_grad=True)
        with xray.recording("random", 2) as report:
            results = outputs(self.stage.lstm(*arguments, zoneout=0.3))
            torch.autograd.grad(results, arguments, [x.detach() for x in results])
        assert [str(fault) for fault in report.faults] == []

    @pytest.mark.parametrize("dtype", FLOATING, ids=str)
    def test_the_largest_hidden_size_of_the_cpu_device(self, dtype):
        most = DOUBLE if dtype is torch.float64 else 512
        results = verify(self.stage, self.stage.sizes((2, 2, 3, most)), dtype)
        assert [r for r in results if not r.ok] == []

    def test_what_does_not_fit_is_refused_with_the_stage_that_takes_it(self):
        for dtype, most in ((torch.float64, DOUBLE), (torch.float32, 512)):
            arguments = self.arguments((1, 1, 1, most + 1), dtype)
            with pytest.raises(ValueError, match=rf"weight_hh is .* allowed: H up to {most}.*stages.load\('60'\)"):
                self.stage.lstm(*arguments)
            assert stages.lstm.choose(*arguments).stage == "60_lstm_cell"
            assert stages.lstm.choose(*self.arguments((1, 1, 1, most), dtype)).stage == "61_lstm_persistent"

    def test_blocks_cover_all_units(self):
        for hidden in (1, 4, 16, 17, 255, 256, 257, 512):
            units, blocks = lstm.cut(hidden, torch.float32, torch.device("cpu"))
            assert units * blocks >= hidden and blocks % 4 == 0 and blocks <= lstm.CPU_BLOCKS

    @GPU
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("sizes", [(5, 64, 20, 1024), (3, 33, 8, 700), (20, 2, 8, 1021)], ids=str)
    def test_large_sizes_cuda(self, sizes, dtype):
        for options in self.options():
            results = verify(self.stage, self.stage.sizes(sizes), dtype, "cuda", options=options)
            assert [r for r in results if not r.ok] == []

    @GPU
    def test_two_streams_at_once_cuda(self):
        """Each launch has all of its blocks on the card, or none: two of them cannot wait for each other."""
        arguments = self.arguments((200, 4, 8, 512), device="cuda")
        expected = self.stage.lstm(*arguments)[0]
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in range(4)], []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(self.stage.lstm(*arguments)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(x, expected) for x in found)
