"""What a rotary bias and key scales do to attention, on keys made up for the purpose.

Run as ``python benchmarks/synthetic_keys.py``; takes about half a minute.  Divergences are means of
KL(exact ‖ compressed) over attention rows, in nats; keys are coded as by the preset ``balanced``.
"""

from __future__ import annotations

from dataclasses import dataclass

import limits
import numpy as np

import polarquant_nb as pq
from polarquant_nb.scales import page_variance

ALPHAS = (0.25, 0.5, 0.75, 1.0)

SEEDS = range(4)

HEADS, TOKENS, QUERIES = 2, 2048, 64


def main() -> None:
    """Print the tables."""
    print("biased keys: d = 128, theta = 1e6, content of norm 17")
    print(f"{'':24}{'attention KL':>40}{'RMS error of logits':>40}")
    names = ("offsets alone", "given", "estimated")
    print(f"{'norm of the bias':24}" + "".join(f"{name:>14}" for name in 2 * names))
    for norm in (0, 300, 900):
        results = np.mean([list(biased(norm, seed).values()) for seed in SEEDS], 0)
        print(f"{norm:<24}" + "".join(f"{x:14.5f}" for x in results.T.ravel()))
    print()
    print("key scales: d = 256; KL without scales, and times lower with scales of alpha")
    print(f"{'':48}{'KL':>10}" + "".join(f"{alpha:>8}" for alpha in ALPHAS))
    for name, spectra, drift in CASES:
        plain, *scaled = np.mean([scales_effect(spectra, drift, seed) for seed in SEEDS], 0)
        label = f"{name}, rho = {spectra.rho:.2f}" + (", drifted" if drift else "")
        print(f"{label:48}{plain:10.5f}" + "".join(f"{plain / kl:8.2f}" for kl in scaled))
    print()
    print(f"time of attention with a rotary bias over without: {slowdown():.2f}")


def attention_kl(q: np.ndarray, k: np.ndarray, k_hat: np.ndarray) -> tuple[float, float]:
    """Mean divergence of attention rows, and RMS error of the logits but for shifts of a row."""
    logits, wrong = (q @ x.swapaxes(-1, -2) * q.shape[-1] ** -0.5 for x in (k, k_hat))
    error = wrong - logits
    p, other = log_softmax(logits), log_softmax(wrong)
    return float((np.exp(p) * (p - other)).sum(-1).mean()), float(error.std(-1).mean())


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Along the last axis."""
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# ---- a rotary bias -------------------------------------------------------------------------------


def slowdown() -> float:
    """At 16,384 tokens, d = 128, 8 kv heads, one query for each of 32 heads; one thread."""
    pq.set_num_threads(1)
    shape = limits.KV_HEADS, limits.HEAD_DIM
    bias = pq.RotaryBias(np.ones(shape), 1e6 ** (-np.arange(64) / 64))
    plain, biased = (
        limits.filled(
            pq.KVCache("balanced", head_dim=128, sink=0, recent=0, preconditioner=preconditioner),
            16_384,
        )
        for preconditioner in (None, pq.Preconditioner(bias=bias))
    )
    q = limits.queries()
    return limits.alternate(lambda: biased.attend(q), lambda: plain.attend(q), 51)


def rotate_half(x: np.ndarray, inv_freq: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The rotary embedding of Llama and Qwen."""
    turns = np.exp(1j * positions[:, None] * inv_freq)
    first, second = np.split(x, 2, -1)
    z = (first + 1j * second) * turns
    return np.concatenate([z.real, z.imag], -1)


def biased(norm: float, seed: int) -> dict[str, tuple[float, float]]:
    """KL and error of logits of keys with a bias on all pairs: Qwen2's kind."""
    d, rng = 128, np.random.default_rng(seed)
    inv_freq = 1e6 ** (-np.arange(d // 2) / (d // 2))
    fmt = pq.preset("balanced", d).keys
    b = rng.standard_normal((HEADS, d))
    b *= norm / np.linalg.norm(b, axis=-1, keepdims=True)
    content = rng.standard_normal((HEADS, TOKENS, d)) * 17 / np.sqrt(d)
    k = rotate_half(content + b[:, None], inv_freq, np.arange(TOKENS)).astype(np.float32)
    last = np.full(QUERIES, TOKENS - 1)
    q = rotate_half(rng.standard_normal((HEADS, QUERIES, d)), inv_freq, last)
    biases = {
        "offsets alone": None,
        "given": pq.RotaryBias(b, inv_freq),
        "estimated": pq.RotaryBias.estimate(k[:, :256], inv_freq),
    }
    results = {}
    for name, bias in biases.items():
        preconditioner = None if bias is None else pq.Preconditioner(bias=bias)
        pages = pq.encode(k, fmt, preconditioner=preconditioner)
        results[name] = attention_kl(q, k.astype(np.float64), pages.decode(dtype="float64"))
    return results


# ---- key scales ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spectra:
    """Variances of channels, of queries and of keys."""

    queries: np.ndarray
    keys: np.ndarray

    @property
    def rho(self) -> float:
        """Below 1, keys vary most where queries are small."""
        q, k = self.queries, self.keys
        return q.size * float(q @ k) / float(q.sum() * k.sum())


def lognormal(rho: float, d: int = 256) -> Spectra:
    """Log-normal spectra, correlated as ``rho`` demands; below 1 the least that scales can gain."""
    rng = np.random.default_rng(0)
    t, u = rng.standard_normal((2, d))
    spread = 1.33  # exp(−1.33²) is 0.17

    def at(correlation: float) -> Spectra:
        other = correlation * t + np.sqrt(1 - correlation**2) * u
        return Spectra(np.exp(spread * other), np.exp(spread * t))

    low, high = -1.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle).rho < rho else (low, middle)
    return at(low)


def outliers(count: int, d: int = 256) -> Spectra:
    """Some channels in which keys vary 160 times more, and queries as much less."""
    keys = np.ones(d)
    keys[:count] = 160
    return Spectra(1 / keys, keys)


CASES = (
    ("log-normal", lognormal(0.17), 0.0),
    ("8 outlier channels", outliers(8), 0.0),
    ("log-normal", lognormal(1.0), 0.0),
    ("log-normal", lognormal(1.3), 0.0),
    ("log-normal", lognormal(2.0), 0.0),
    ("equal variances", Spectra(np.ones(256), np.ones(256)), 0.0),
    ("log-normal", lognormal(0.17), 0.3),
    ("8 outlier channels", outliers(8), 0.3),
    ("log-normal", lognormal(1.0), 0.3),
    ("log-normal", lognormal(2.0), 0.3),
    ("equal variances", Spectra(np.ones(256), np.ones(256)), 0.3),
)
"""Name, spectra, and standard deviation of what log-variances differ by where they are measured."""


def scales_effect(
    spectra: Spectra, drift: float, seed: int, alphas: tuple[float, ...] = ALPHAS
) -> list[float]:
    """Divergence without scales, and with scales of each alpha.

    Moments are measured on 256 tokens that are not those scored.
    """
    d, rng = spectra.keys.size, np.random.default_rng(seed)
    fmt = pq.preset("balanced", d).keys
    # logits with a standard deviation of 2
    size = 2 / np.sqrt(spectra.queries @ spectra.keys / d)
    q = rng.standard_normal((HEADS, QUERIES, d)) * np.sqrt(spectra.queries) * size
    k = rng.standard_normal((HEADS, TOKENS, d)) * np.sqrt(spectra.keys)
    k = k.astype(np.float32)
    measured = []
    for variance in (spectra.queries, spectra.keys):
        other = variance * np.exp(drift * rng.standard_normal((HEADS, d)))
        measured.append(rng.standard_normal((HEADS, 256, d)) * np.sqrt(other)[:, None])
    q_squared = np.square(measured[0]).mean(-2)
    k_variance = page_variance(measured[1])
    results = []
    for alpha in (None, *alphas):
        preconditioner = None
        if alpha is not None:
            scales = pq.key_scales(q_squared, k_variance, alpha=alpha)
            preconditioner = pq.Preconditioner(scales)
        pages = pq.encode(k, fmt, preconditioner=preconditioner)
        results.append(attention_kl(q, k.astype(np.float64), pages.decode(dtype="float64"))[0])
    return results


if __name__ == "__main__":
    main()
