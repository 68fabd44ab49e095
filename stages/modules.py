"""Functions as modules of torch.nn, for those who come from there."""

import math

import torch
from torch import Tensor, nn

import stages


class LSTM(nn.Module):
    """One layer of an LSTM, with torch.nn.LSTM's constructor, parameters and results, by `stages.lstm`.

    A state dict of one is one of the other. Parameters: weight_ih_l0 [4 H, I], weight_hh_l0 [4 H, H] and, with `bias`,
    bias_ih_l0 and bias_hh_l0 [4 H], of which the sum counts; uniform at first, up to 1 / sqrt(H).

    Args:
        input_size: I.
        hidden_size: H.
        num_layers: 1.
        bias: Whether there are biases.
        batch_first: Whether x and h are [B, T, ..] instead of [T, B, ..].
        dropout: 0.0; it would be between layers.
        bidirectional: False.
        proj_size: 0.
        device, dtype: Of the parameters.
        activation, recurrent_dropout, zoneout: As in `stages.lstm`.

    Raises:
        NotImplementedError: There is more than one layer, a second direction or a projection.

    Example:
        >>> import stages, torch
        >>> ours, theirs = stages.LSTM(3, 4), torch.nn.LSTM(3, 4)
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(5, 2, 3)
        >>> torch.allclose(ours(x)[0], theirs(x)[0], atol=1e-6)
        True
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "soft",
        recurrent_dropout: float = 0.0,
        zoneout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, given, allowed in (
            ("num_layers", num_layers, 1),
            ("dropout", dropout, 0.0),
            ("bidirectional", bidirectional, False),
            ("proj_size", proj_size, 0),
        ):
            if given != allowed:
                raise NotImplementedError(f"LSTM: {name} is {given!r}; allowed: {allowed!r}, as this is one layer")
        self.input_size, self.hidden_size, self.bias, self.batch_first = input_size, hidden_size, bias, batch_first
        self.num_layers, self.dropout, self.bidirectional, self.proj_size = 1, 0.0, False, 0
        self.activation, self.recurrent_dropout, self.zoneout = activation, recurrent_dropout, zoneout
        gates = 4 * hidden_size
        sizes = {"weight_ih_l0": (gates, input_size), "weight_hh_l0": (gates, hidden_size)}
        sizes |= {"bias_ih_l0": (gates,), "bias_hh_l0": (gates,)} if bias else {}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform numbers up to 1 / sqrt(H), as torch.nn.LSTM has them."""
        most = 1 / math.sqrt(self.hidden_size) if self.hidden_size else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -most, most)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}"

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """h of all steps, and (h, c) after the last.

        Args:
            input: [T, B, I], with batch_first [B, T, I]; or [T, I], without a batch.
            hx: (h, c) before the first step, [1, B, H] each, without a batch [1, H]. None: zeros.
            generator: What dropout and zoneout are drawn from. None: torch's own.
        """
        batched = input.dim() == 3
        x = (input.transpose(0, 1) if self.batch_first else input) if batched else input.unsqueeze(1)
        start = (None, None) if hx is None else tuple(state[0] if batched else state for state in hx)
        bias = self.bias_ih_l0 + self.bias_hh_l0 if self.bias else None
        h, states = stages.lstm(
            x,
            self.weight_ih_l0,
            self.weight_hh_l0,
            bias,
            *start,
            activation=self.activation,
            recurrent_dropout=self.recurrent_dropout,
            zoneout=self.zoneout,
            training=self.training,
            generator=generator,
        )
        states = tuple((state[None] if batched else state).to(input.dtype) for state in states)
        h = (h.transpose(0, 1) if self.batch_first else h) if batched else h.squeeze(1)
        return h, states
