"""From steps to rates: Megatron-LM's FLOP of a step, tokens per second, MFU and HFU."""

from __future__ import annotations

from overlapsim.workload.model import check_positive, check_size


def megatron_step_flop(batch: int, seq_len: int, num_layers: int, hidden: int, vocabulary: int) -> float:
    """FLOP of a training step of a GPT with full recompute, as Megatron-LM reports it.

    96 B s l h^2 (1 + s/(6h) + V/(16 l h)): attention in full, the backward pass twice the forward pass, and every layer
    run forward once more (Narayanan et al., SC'21, equation 3).

    Parameters
    ----------
    batch : sequences of a step
    seq_len, num_layers, hidden, vocabulary : sizes

    Raises
    ------
    WorkloadError
        If an argument is not a size.
    """
    for name, value in (("batch", batch), ("seq_len", seq_len), ("num_layers", num_layers), ("hidden", hidden)):
        check_size(name, value)
    check_size("vocabulary", vocabulary)
    terms = 1 + seq_len / (6 * hidden) + vocabulary / (16 * num_layers * hidden)
    return 96.0 * batch * seq_len * num_layers * hidden**2 * terms


def tokens_per_s(step_s: float, sequences: int, seq_len: int) -> float:
    """Tokens per second of a step of `sequences` sequences."""
    check_positive("step_s", step_s)
    return sequences * seq_len / step_s


def utilization(flop_per_token: float, tokens_per_s: float, num_devices: int, peak_flop_per_s: float) -> float:
    """Share of the devices' dense peak that a rate of tokens uses.

    MFU with model FLOP, HFU with hardware FLOP (``step_flop_per_token`` with the recompute that runs).

    Parameters
    ----------
    flop_per_token : of a training step
    tokens_per_s : of all devices
    num_devices, peak_flop_per_s : devices, and the dense peak of one

    Raises
    ------
    WorkloadError
        If an argument is not above 0.

    Examples
    --------
    >>> round(utilization(282.46e9, 272.9e3, 240, 989e12), 4)
    0.3248
    """
    check_size("num_devices", num_devices)
    for name, value in (("flop_per_token", flop_per_token), ("tokens_per_s", tokens_per_s)):
        check_positive(name, value)
    check_positive("peak_flop_per_s", peak_flop_per_s)
    return flop_per_token * tokens_per_s / (num_devices * peak_flop_per_s)
