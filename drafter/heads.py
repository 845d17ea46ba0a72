"""What turns the backbone's parallel hidden states into a left-to-right draft: sequential heads and confidence.

A sequential head adds a bias to the base logits that depends on the token before (paper section 3.2):
p_k(v) = softmax(U_k(v) + B_k(v)). The three kinds differ in one method, `bias`. Knows nothing of the backbone.

Shape letters: M blocks, D hidden size, r Markov rank, V draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafter.config import DrafterConfig


class MarkovHead(nn.Module):
    """Vanilla: B = W2 e with e = W1[x_{k-1}]."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.5)
        nn.init.zeros_(self.markov_w2.weight)  # starts as the parallel drafter

    def initial_state(self, num_blocks: int, like: Tensor) -> Tensor:
        """[M, r] zeros: s_0 of the recurrent head; the other kinds carry it untouched."""
        return like.new_zeros(num_blocks, self.markov_w1.weight.shape[1])

    def bias(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """previous = W1[x_{k-1}] [M, r], hidden h_k [M, D], state [M, r] -> (B_k [M, V], next state [M, r])."""
        return self.markov_w2(previous), state


class GatedMarkovHead(MarkovHead):
    """g = sigmoid(A [h_k ; e]), B = W2 (g * e)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def bias(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, previous), dim=-1)))
        return self.markov_w2(gate * previous), state


class RecurrentMarkovHead(MarkovHead):
    """[s ; e ; h_k] -> gate | candidate | output; s' = g s + (1 - g) tanh(candidate); B = W2 tanh(output)."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def bias(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joint = self.joint_proj(torch.cat((state, previous, hidden), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(output)), state


def build_markov_head(config: DrafterConfig) -> MarkovHead | None:
    """The head that `config` asks for; None for rank 0 (DFlash)."""
    if config.markov_rank == 0:
        return None
    kinds = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
    return kinds[config.markov_head_type](config)


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] + b) = P(slot k passes | the slots before it passed). Always fp32."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """hidden [..., D], previous [..., r] (None without a Markov head) -> logits [...] fp32."""
        inputs = hidden if previous is None else torch.cat((hidden, previous.to(hidden.dtype)), dim=-1)
        with torch.autocast(inputs.device.type, enabled=False):
            logits: Tensor = self.proj(inputs.float())
        return logits.squeeze(-1)
