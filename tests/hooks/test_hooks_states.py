"""C47: what a layer keeps of a sequence between prompt and decoding, where models reach it: convolution and scan.

Prompts of 3 and 6 tokens are packed without padding; right padding would leave a convolution state of zeros and a scan
state that has decayed through the pads. Two tokens follow through the update functions.
"""

import pytest
import torch

PROMPTS = [3, 6]
NEW = 2
HEADS, DIM, STATE, WIDTH = 4, 8, 16, 4


class Layer:
    """A convolution and a recurrence behind it; subclasses say which."""

    channels: int

    def __init__(self, kernel):
        self.kernel = kernel
        self.weight = 0.5 * torch.randn(self.channels, WIDTH)
        self.bias = 0.1 * torch.randn(self.channels)
        self.inputs = [torch.randn(1, self.channels, length + NEW) for length in PROMPTS]
        self.rates = [torch.randn(1, length + NEW, HEADS) for length in PROMPTS]

    def prompt(self, x, rate, cu_seqlens):
        """Outputs, convolution states and recurrent states of prompts packed in one row."""
        y, conv_state = self.kernel.causal_conv1d_fn(
            x, self.weight, self.bias, activation="silu", return_final_states=True, cu_seqlens=cu_seqlens
        )
        out, state = self.scan(y, rate, cu_seqlens)
        return out, conv_state, state

    def step(self, x, rate, conv_state, state):
        """Output of one more token of each sequence and its states."""
        y = self.kernel.causal_conv1d_update(x, conv_state, self.weight, self.bias, activation="silu")
        return self.update(y, rate, state)


class Mamba2(Layer):
    channels = HEADS * DIM + 2 * STATE

    def __init__(self, kernel):
        super().__init__(kernel)
        self.A = -torch.rand(HEADS) - 0.5
        self.D = torch.randn(HEADS)
        self.dt_bias = torch.randn(HEADS)

    def split(self, y):
        x, B, C = y.transpose(1, 2).split([HEADS * DIM, STATE, STATE], dim=-1)
        return x.unflatten(-1, (HEADS, DIM)), B[:, :, None], C[:, :, None]

    def scan(self, y, rate, cu_seqlens):
        x, B, C = self.split(y)
        return self.kernel.mamba_chunk_scan_combined(
            x, rate, self.A, B, C, 4, D=self.D, dt_bias=self.dt_bias, dt_softplus=True, return_final_states=True,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip

    def update(self, y, rate, state):
        x, B, C = self.split(y)
        wide = lambda tensor: tensor[..., None].expand(*tensor.shape, DIM)  # noqa: E731
        out = self.kernel.selective_state_update(
            state, x[:, 0], wide(rate[:, 0]), wide(self.A)[..., None].expand(-1, -1, STATE), B[:, 0], C[:, 0],
            D=wide(self.D), dt_bias=wide(self.dt_bias), dt_softplus=True,
        )  # fmt: skip
        return out[:, None], state


class GatedDelta(Layer):
    channels = 3 * HEADS * DIM

    def arguments(self, y, rate):
        q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in y.transpose(1, 2).chunk(3, dim=-1))
        # Exact operations: PyTorch's sigmoid rounds an element by its place in the tensor.
        return q, k, v, -rate.abs(), (0.5 * rate.abs()).clamp(max=1)

    def scan(self, y, rate, cu_seqlens):
        return self.kernel.chunk_gated_delta_rule(
            *self.arguments(y, rate), output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens
        )

    def update(self, y, rate, state):
        q, k, v, g, beta = self.arguments(y, rate)
        return self.kernel.fused_recurrent_gated_delta_rule(
            q, k, v, g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )


@pytest.mark.parametrize("kind", [Mamba2, GatedDelta])
def test_states_of_a_pack_go_on_as_alone_c47(kind, kernel):
    layer = kind(kernel)
    offsets = [0, PROMPTS[0], sum(PROMPTS)]
    parts = list(zip(layer.inputs, layer.rates, PROMPTS))
    packed_x = torch.cat([x[:, :, :length] for x, _, length in parts], dim=2)
    packed_rate = torch.cat([rate[:, :length] for _, rate, length in parts], dim=1)
    out, conv_state, state = layer.prompt(packed_x, packed_rate, offsets)
    for index, (x, rate, length) in enumerate(parts):
        alone, alone_conv, alone_state = layer.prompt(x[:, :, :length], rate[:, :length], [0, length])
        whole, _, whole_state = layer.prompt(x, rate, [0, length + NEW])
        assert torch.equal(out[:, offsets[index] : offsets[index + 1]], alone)
        assert torch.equal(conv_state[index], alone_conv[0]) and torch.equal(state[index], alone_state[0])
        # What stood before the prompt's first token counts as zeros.
        before = torch.nn.functional.pad(x[0, :, :length], (WIDTH - 1, 0))[:, -(WIDTH - 1) :]
        assert torch.equal(conv_state[index], before)
        row_conv, row_state = conv_state[index : index + 1].clone(), state[index : index + 1].clone()
        for token in range(length, length + NEW):
            here = slice(token, token + 1)
            step, row_state = layer.step(x[:, :, here], rate[:, here], row_conv, row_state)
            torch.testing.assert_close(step, whole[:, here], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(row_state, whole_state, rtol=1e-5, atol=1e-5)
