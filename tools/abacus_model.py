"""The bundled models as tools/train_abacus.py trains them; parameter names are Hugging Face's."""

import math
from dataclasses import dataclass

import make_abacus_tokenizer as tok
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEQ_LEN = 32  # bos, the longest prompt and answer, eos: 30


@dataclass(frozen=True)
class Shape:
    hidden: int = 256
    intermediate: int = 704
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    eps: float = 1e-5
    experts: int = 0  # 0: a Llama; else a Mixtral, whose ``intermediate`` is an expert's
    top_k: int = 0


SHAPES = {
    "abacus": Shape(),
    "abacus-moe": Shape(intermediate=128, experts=8, top_k=2),
    "abacus-draft": Shape(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1),
}

# Shape suffixes: B batch, T tokens, D hidden, H KV heads, G query heads a KV head, K head dim,
# N all tokens, E experts, I an expert's intermediate, F that of all experts.


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        """Plain matmul and softmax: at 32 tokens as fast as a fused kernel, and deterministic."""
        B, T, _ = x_BTD.shape
        H, K = self.shape.kv_heads, self.shape.head_dim
        G = self.shape.heads // H
        q_BHGTK = self.q_proj(x_BTD).view(B, T, H, G, K).permute(0, 2, 3, 1, 4)
        k_BHTK = self.k_proj(x_BTD).view(B, T, H, K).transpose(1, 2)
        v_BHTK = self.v_proj(x_BTD).view(B, T, H, K).transpose(1, 2)
        q_BHGTK, k_BHTK = rotate(q_BHGTK, cos_TK, sin_TK), rotate(k_BHTK, cos_TK, sin_TK)
        scores = q_BHGTK.reshape(B, H, G * T, K) @ k_BHTK.transpose(2, 3) * K**-0.5
        future_TT = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.view(B, H, G, T, T).masked_fill(future_TT, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(x_BTD.dtype)
        y = (weights.view(B, H, G * T, T) @ v_BHTK).view(B, H, G, T, K)
        return self.o_proj(y.permute(0, 3, 1, 2, 4).reshape(B, T, H * G * K))


def rotate(x: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Every expert computes every token: at this size that is the fastest.  Experts lie side by
    side in one matrix, F features wide."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        E, D, F_ = shape.experts, shape.hidden, shape.experts * shape.intermediate
        self.top_k = shape.top_k
        self.gate = nn.Linear(D, E, bias=False)
        self.gate_proj_FD = nn.Parameter(torch.empty(F_, D))
        self.up_proj_FD = nn.Parameter(torch.empty(F_, D))
        self.down_proj_DF = nn.Parameter(torch.empty(D, F_))
        self.balance = torch.zeros(())
        """The last call's loss of balance: 1 if tokens spread evenly, E if one expert gets all."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        probs_NE = self.gate(x_ND).softmax(-1, dtype=torch.float32)
        top = probs_NE.topk(self.top_k, dim=-1)
        weights = (top.values / top.values.sum(-1, keepdim=True)).to(x_ND.dtype)
        weights_NE = torch.zeros_like(probs_NE, dtype=x_ND.dtype).scatter(-1, top.indices, weights)
        share_E = (weights_NE > 0).float().mean(0) / self.top_k
        self.balance = (share_E * probs_NE.mean(0)).sum() * share_E.numel()
        h_NF = F.silu(x_ND @ self.gate_proj_FD.T) * (x_ND @ self.up_proj_FD.T)
        h_NEI = h_NF.unflatten(1, (weights_NE.shape[1], -1)) * weights_NE[..., None]
        return (h_NEI.flatten(1) @ self.down_proj_DF.T).view_as(x_BTD)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MoE(shape) if shape.experts else MLP(shape)

    def forward(self, x: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_TK, sin_TK)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(tok.VOCAB_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        inv_freq = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles_TK = torch.arange(SEQ_LEN)[:, None] * inv_freq.repeat(2)
        self.register_buffer("cos_TK", angles_TK.cos(), persistent=False)
        self.register_buffer("sin_TK", angles_TK.sin(), persistent=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits in the weights' dtype, but float32 from bfloat16 while gradients are wanted."""
        x = self.embed_tokens(ids_BT)
        T = ids_BT.shape[1]
        cos_TK, sin_TK = self.cos_TK[:T].to(x.dtype), self.sin_TK[:T].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos_TK, sin_TK)
        x, head = self.norm(x), self.embed_tokens.weight
        if torch.is_grad_enabled():
            x, head = x.float(), head.float()
        return x @ head.T


class Abacus(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_residual = "o_proj" in name or "down_proj" in name
                std = 0.02 / (math.sqrt(2 * shape.layers) if into_residual else 1)
                nn.init.normal_(parameter, std=std)

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.model(ids_BT)
