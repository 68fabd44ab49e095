"""The functions of the package as modules of torch.nn."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


class LSTM(nn.Module):
    """One layer of an LSTM with the constructor, the parameters and the calls of torch.nn.LSTM; `stages.lstm` inside.

    State dictionaries load both ways, and the same seed gives the same parameters. There is one layer, in one
    direction; more of them are several modules, one after the other.

    Args:
        input_size: I, the features of a step.
        hidden_size: H, the units.
        num_layers, dropout, bidirectional, proj_size: As torch.nn.LSTM has them; only 1, 0, False and 0 are known here.
        bias: Whether there are bias_ih_l0 and bias_hh_l0.
        batch_first: Whether input and output are [B, T, features] instead of [T, B, features]; states are not.
        device, dtype: Of the parameters.
        activation, recurrent_dropout, zoneout: As in `stages.lstm`, which draws in training mode only.

    Attributes:
        weight_ih_l0: [4 H, I], gates in the order i, f, g, o.
        weight_hh_l0: [4 H, H].
        bias_ih_l0, bias_hh_l0: [4 H], if `bias`.

    Raises:
        TypeError: The input is a PackedSequence, or an option is of the wrong type.
        ValueError: A size is not positive, or the sizes of a call do not fit.
        NotImplementedError: More than one layer, dropout between layers, two directions or a projection.

    Example:
        >>> import stages, torch
        >>> layer = stages.LSTM(3, 5)
        >>> h, (h_last, c_last) = layer(torch.ones(7, 2, 3))
        >>> h.shape, h_last.shape, c_last.shape
        (torch.Size([7, 2, 5]), torch.Size([1, 2, 5]), torch.Size([1, 2, 5]))
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
        for name, value, known in (
            ("num_layers", num_layers, 1),
            ("dropout", dropout, 0),
            ("bidirectional", bidirectional, False),
            ("proj_size", proj_size, 0),
        ):
            if value != known:
                raise NotImplementedError(
                    f"stages.LSTM: {name} is {value}; allowed: {known} (torch.nn.LSTM has others)"
                )
        for name, value in (("input_size", input_size), ("hidden_size", hidden_size)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"stages.LSTM: {name} must be an int, got {type(value).__name__}")
            if value <= 0:
                raise ValueError(f"stages.LSTM: {name} is {value}; allowed: 1 or more")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout = bias, batch_first, dropout
        self.bidirectional, self.proj_size = bidirectional, proj_size
        self.activation, self.recurrent_dropout, self.zoneout = activation, recurrent_dropout, zoneout

        def parameter(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, device=device, dtype=dtype))

        self.weight_ih_l0 = parameter(4 * hidden_size, input_size)
        self.weight_hh_l0 = parameter(4 * hidden_size, hidden_size)
        for name in ("bias_ih_l0", "bias_hh_l0"):
            self.register_parameter(name, parameter(4 * hidden_size) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(H), as torch.nn.LSTM draws them."""
        bound = self.hidden_size**-0.5
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def extra_repr(self) -> str:
        options = {"bias": True, "batch_first": False, "activation": "soft", "recurrent_dropout": 0.0, "zoneout": 0.0}
        chosen = (f"{name}={getattr(self, name)!r}" for name, usual in options.items() if getattr(self, name) != usual)
        return ", ".join((str(self.input_size), str(self.hidden_size), *chosen))

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """h of all steps, and the last h and c.

        Args:
            input: [T, B, I], [B, T, I] if batch_first, or [T, I].
            hx: h and c before the first step, [1, B, H] each, or [1, H] beside an input [T, I]. None: zeros.

        Returns:
            h, [T, B, H], [B, T, H] or [T, H], and both last states in the shape of hx and the dtype of the input.
        """
        import stages  # not above: whoever asks for this module is the package itself

        if isinstance(input, PackedSequence):
            raise TypeError("stages.LSTM: input is a PackedSequence; allowed: a Tensor (torch.nn.LSTM has both)")
        if not isinstance(input, Tensor):
            raise TypeError(f"stages.LSTM: input must be a torch.Tensor, got {type(input).__name__}")
        if input.dim() not in (2, 3):
            raise ValueError(f"stages.LSTM: input is {tuple(input.shape)}; allowed: 2 dimensions or 3")
        batched = input.dim() == 3
        x = input.unsqueeze(1) if not batched else input.transpose(0, 1) if self.batch_first else input
        if x.shape[2] != self.input_size:
            raise ValueError(f"stages.LSTM: input is {tuple(input.shape)}; allowed: {self.input_size} features")
        h0 = c0 = None
        if hx is not None:
            size = (1, x.shape[1], self.hidden_size) if batched else (1, self.hidden_size)
            for name, state in zip(("h", "c"), hx, strict=True):
                if state.shape != size:
                    raise ValueError(f"stages.LSTM: {name} of hx is {tuple(state.shape)}; allowed: {size}")
            h0, c0 = (state[0] if batched else state for state in hx)
        bias = self.bias_ih_l0 + self.bias_hh_l0 if self.bias else None
        h, states = stages.lstm(
            x,
            self.weight_ih_l0,
            self.weight_hh_l0,
            bias,
            h0,
            c0,
            activation=self.activation,
            recurrent_dropout=self.recurrent_dropout,
            zoneout=self.zoneout,
            training=self.training,
        )
        h_last, c_last = (state.to(x.dtype)[None] if batched else state.to(x.dtype) for state in states)
        if not batched:
            return h.squeeze(1), (h_last, c_last)
        return h.transpose(0, 1) if self.batch_first else h, (h_last, c_last)
