"""Stage 23, qkv_causal."""

import pytest
import torch
from qkv_cases import GOLDEN, QkvCases, check_golden

import stages
from stages.families.qkv import ANTICAUSAL, CAUSAL


class TestQkvCausal(QkvCases):
    stage = stages.load("23")

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    @pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
    def test_values_of_another_implementation(self, path, dtype, device):
        check_golden(self.stage.qkv, path, dtype, device)

    @pytest.mark.parametrize("now", [1, 63, 64, 65, 100])
    def test_the_future_changes_nothing(self, now, device):
        """Bit for bit, neither in the output nor in the gradients of what comes before."""
        arguments = self.arguments((1, 2, 150, 20, 9), device=device)
        other = self.arguments((1, 2, 150, 20, 9), device=device, seed=5)
        changed = [torch.cat([x[:, :, :now], y[:, :, now:]], 2) for x, y in zip(arguments, other, strict=True)]
        seen = []
        for given in (arguments, changed):
            given = [x.clone().requires_grad_() for x in given]
            output = self.stage.qkv(*given, causal=True)
            gradients = torch.autograd.grad(output[:, :, :now].sum(), given)
            assert not any(g[:, :, now:].any() for g in gradients)  # nothing before it depends on the future
            seen.append([x[:, :, :now] for x in (output, *gradients)])
        assert all(torch.equal(x, y) for x, y in zip(*seen, strict=True))

    @pytest.mark.parametrize("now", [1, 64, 65, 100, 128])
    def test_the_beginning_alone_is_the_beginning_of_the_whole(self, now, device):
        arguments = self.arguments((1, 2, 150, 20, 9), device=device)
        whole = self.stage.qkv(*arguments, causal=True)
        assert torch.equal(self.stage.qkv(*(x[:, :, :now] for x in arguments), causal=True), whole[:, :, :now])

    def test_the_last_row_sees_all(self, device):
        arguments = self.arguments((1, 2, 129, 20, 9), device=device)
        masked, full = (self.stage.qkv(*arguments, causal=causal) for causal in (True, False))
        assert torch.equal(masked[:, :, -1], full[:, :, -1])

    def test_nan_in_a_hidden_key_does_no_harm(self, device):
        q, k, v = self.arguments((1, 1, 70, 5, 7), device=device)
        expected = self.stage.qkv(q, k, v, causal=True)
        k[0, 0, 40], k[0, 0, 69] = torch.nan, torch.inf
        result = self.stage.qkv(q, k, v, causal=True)
        assert torch.equal(result[:, :, :40], expected[:, :, :40])
        assert result[:, :, 40:].isnan().all()

    def test_opcheck_with_each_mask(self, device):
        arguments = self.arguments(self.odd, device=device, requires_grad=True)
        for mask in (CAUSAL, ANTICAUSAL):
            torch.library.opcheck(torch.ops.stages.qkv_causal.default, (*arguments, 0.5, mask))

    def test_the_transposed_mask(self, device):
        q, k, v = self.arguments((1, 2, 129, 20, 9), torch.float64, device=device)
        result = torch.ops.stages.qkv_causal(q, k, v, 0.5, ANTICAUSAL)
        torch.testing.assert_close(result, (0.5 * q @ k.mT).triu() @ v)

    def test_half_of_the_bytes_are_gone(self):
        arguments = self.arguments((1, 1, 640, 16, 16))
        full, half = (self.stage.xray(*arguments, causal=causal).counts() for causal in (False, True))
        assert half.load_sectors * 20 == full.load_sectors * 11  # (n + 1) / 2 n for n = 10 tiles
        assert half.store_sectors == full.store_sectors
