"""Random numbers as arguments: every number is a hash of (seed, absolute position, purpose[, token id]).

So it depends on no global state, batch, device or order. Knows integers that wrap, the same on every device; knows
nothing of probabilities.

A `coupled` row's seed is its request's for ever. A `rejection` row's seed must be fresh in each round (`round_seeds`):
a position that is drafted twice from one number would leak its first, discarded draft, through the confidences of a
load report two steps old, into the budget that decides whether the second draft is verified; emitted tokens would then
be biased exactly as in the paper's Appendix A.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor


class Purpose(enum.IntEnum):
    """What a random number is for: numbers of different purposes are independent."""

    DRAFT = 0
    ACCEPT = 1
    EMIT = 2
    COUPLED = 3
    """The one noise that a draft and its verification share."""


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant."""
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN = _signed(0x9E3779B97F4A7C15, 64)
_GOLDEN_HALF = 0x9E3779B9
_SPLITMIX_1 = _signed(0xBF58476D1CE4E5B9, 64)
_SPLITMIX_2 = _signed(0x94D049BB133111EB, 64)
_TOKEN_ODD = _signed(0x9E3779B1, 32)
_SCRAMBLE_1 = _signed(0x85EBCA6B, 32)
_SCRAMBLE_2 = _signed(0xC2B2AE35, 32)
_SCRAMBLE_3 = _signed(0x27D4EB2F, 32)
_BELOW_ONE = 1 - 2.0**-24


def round_seeds(seeds: Tensor, coupled: Tensor, round_number: int) -> Tensor:
    """Seeds [N] int64 for one verify round: fresh for rejection rows, unchanged where `coupled` [N] bool.

    `round_number` must never repeat for a request, and must not depend on drafted tokens: an engine's step counter.
    """
    return torch.where(coupled, seeds, _mix64(_mix64(seeds + _GOLDEN) + (round_number + 1) * _GOLDEN_HALF))


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Numbers in [0, 1), fp64, 52 bits, one per (seed, position); broadcasting int64 inputs."""
    # 52 bits, not 53: u * total is then below total in fp64 for every total, so an inverted CDF never overruns.
    return _shift_right(_keys(seeds, positions, purpose), 12).double() * 2.0**-52


def exponentials(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Standard exponential noise, fp32 [M, V], positive and finite, keyed by (seed, position, token id).

    seeds and positions [M] int64, token_ids [V] int64. -log of it is standard Gumbel noise. Two rounds of a 32-bit
    integer hash, each with its own half of the row's 64-bit key.
    """
    keys = _keys(seeds, positions, Purpose.COUPLED)[:, None]
    state = (token_ids.int() * _TOKEN_ODD)[None, :] ^ keys.int()
    _scramble_(state, 16, _SCRAMBLE_1)
    state += (keys >> 32).int()
    _scramble_(state, 15, _SCRAMBLE_2)
    _scramble_(state, 15, _SCRAMBLE_3)
    # The 31 high bits as a fraction below 1. log1p keeps the small values, the winners of a race, exact to 2^-32.
    fraction = (state >> 1).bitwise_and_(0x7FFFFFFF).float().add_(0.5)
    return fraction.mul_(-_BELOW_ONE * 2.0**-31).log1p_().neg_()


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift of int64: torch's own repeats the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _mix64(value: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection that flips half of the bits."""
    value = (value ^ _shift_right(value, 30)) * _SPLITMIX_1
    value = (value ^ _shift_right(value, 27)) * _SPLITMIX_2
    return value ^ _shift_right(value, 31)


def _keys(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """int64: for one seed a SplitMix64 stream, indexed by (position, purpose)."""
    return _mix64(_mix64(seeds + _GOLDEN) + (positions * len(Purpose) + int(purpose)) * _GOLDEN)


def _scramble_(state: Tensor, bits: int, factor: int) -> None:
    """In place, int32: fold the high bits onto the low ones, multiply. A bijection."""
    state.bitwise_xor_((state >> bits).bitwise_and_((1 << (32 - bits)) - 1)).mul_(factor)
