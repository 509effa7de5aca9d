"""A small decoder in plain PyTorch, as a user would write it: no op of ours, no transformers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    """RMSNorm as Llama has it, or as Gemma has it."""

    def __init__(self, size: int, gemma: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(size) + (not gemma))
        self.eps, self.gemma = 1e-6, gemma

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.gemma:
            return (normed * (1.0 + self.weight.float())).type_as(x)
        return normed.to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class Layer(nn.Module):
    def __init__(self, size: int, heads: int, kv_heads: int, gemma: bool) -> None:
        super().__init__()
        self.dim, self.gemma = size // heads, gemma
        self.before_attention, self.before_mlp = Norm(size, gemma), Norm(size, gemma)
        self.q = nn.Linear(size, heads * self.dim, bias=False)
        self.k = nn.Linear(size, kv_heads * self.dim, bias=False)
        self.v = nn.Linear(size, kv_heads * self.dim, bias=False)
        self.o = nn.Linear(heads * self.dim, size, bias=False)
        self.gate_up = nn.Linear(size, 4 * size, bias=False)
        self.gate, self.up = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.before_attention(x)
        split = (*x.shape[:2], -1, self.dim)
        q, k, v = (part(normed).view(split).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        normed = self.before_mlp(x)
        if self.gemma:
            return x + self.down(F.gelu(self.gate(normed), approximate="tanh") * self.up(normed))
        gate, up = self.gate_up(normed).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class PlainDecoder(nn.Module):
    """``forward(input_ids [batch, tokens]) -> logits``."""

    def __init__(
        self, *, gemma: bool = False, size: int = 64, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, size)
        self.layers = nn.ModuleList(Layer(size, heads, heads // 2, gemma) for _ in range(layers))
        self.norm, self.dim = Norm(size, gemma), size // heads

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        exponents = torch.arange(0, self.dim, 2, device=x.device).float() / self.dim
        positions = torch.arange(input_ids.shape[1], device=x.device).float()
        angles = positions[None, :, None] * (1e4**-exponents)
        emb = torch.cat((angles, angles), dim=-1)
        cos, sin = emb.cos().to(x.dtype), emb.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)
