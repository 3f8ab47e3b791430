"""Attention over pages on the CPU: the loops around ``attention_stages.py``.

Flash decoding: the pages of a row are cut into ranges; each range gives, per query, the largest
score, the sum of weights, and the weighted sum of values; ranges merge exactly.  Scores are in
units of 1/log₂ e, so that weights are powers of two.
"""

from __future__ import annotations

import math

import numpy as np

from polarquant_nb.kernels.attention_stages import (
    GROUP_TOKENS,
    STRIDE,
    accumulate_values,
    query_tables,
    row_maxima,
    score_tile,
    softmax_rows,
    start_scores,
    value_radii,
)
from polarquant_nb.kernels.cpu import load_offset
from polarquant_nb.kernels.jit import kernel
from polarquant_nb.kernels.polar import rotate_row, unrotate_row
from polarquant_nb.layout import PAGE

__all__ = ["attend_ranges", "merge_ranges"]

_LOG2_E = 1.4426950408889634


@kernel
def attend_ranges(key_program, value_program, codec, shape, key_shape, value_shape, queries, keys,
                  values, key_tables, value_tables, scale, softcap, bias, bias_base, bias_strides,
                  causal, seq_len, sums, largest, totals, first, last):  # fmt: skip
    """Work items ``first .. last−1``: one row of pages, one group of queries, one range of pages.

    Parameters
    ----------
    key_program, value_program : GroupProgram
        Formats, and the number of queries of a group.
    codec : Program
        Of the keys: how queries are rotated.
    shape : tuple of int
        Queries of a group, groups of a row, ranges of a row, pages of a range.
    key_shape, value_shape : tuple of int
        See :func:`polarquant_nb.codec.kernel_shape`.
    queries : 1-d array of float32
        Rows, groups, queries of a group, coordinates; missing queries are zero.
    keys, values : 1-d array of uint32
        Pages.
    key_tables, value_tables : tuple of 1-d arrays of float32
        Signs, mix, dense matrix, cosines, cosines of pairs.
    scale, softcap : float
        Of the logits; no softcap if 0.
    bias : 1-d array of float32
        Added to the logits; empty if there is none.
    bias_base : 1-d array of int64
        Element of ``bias`` at which each query's first token is.
    bias_strides : int
        Elements from token to token.
    causal : 1-d array of int64
        Tokens that each query may see.
    seq_len : int
        Tokens of a row.
    sums, largest, totals : 1-d arrays of float32
        Results of each item: per query a vector, a number, a number.
    first, last : int
        Range of items.
    """
    group, groups, ranges, range_pages = shape
    lanes, d, _, key_words, offset_word, offset_kind, _ = key_shape
    _, dv, _, value_words, value_offset_word, value_offset_kind, _ = value_shape
    signs, mix, dense, key_cosines, key_pairs = key_tables
    value_cosines, value_pairs = value_tables[3], value_tables[4]
    pages_per_row = (seq_len + PAGE - 1) // PAGE
    Q = np.empty(group * d, np.float32)
    tables = np.empty(d // 2 * group * 64, np.float32)
    S = np.empty(group * STRIDE, np.float32)
    R = np.empty(dv // 2 * STRIDE, np.float32)
    offset, value_offset = np.zeros(d, np.float32), np.zeros(dv, np.float32)
    best = np.empty(group * lanes, np.float32)
    top = np.empty(group, np.float32)
    added = np.empty(group * lanes, np.float32)
    acc = np.empty(dv * group * lanes, np.float32)
    live = np.empty(lanes, np.uint32)
    for item in range(first, last):
        row = item // (groups * ranges)
        query = item // ranges * group  # counted over rows, groups and queries
        begin = item % ranges * range_pages
        end = min(begin + range_pages, pages_per_row)
        for i in range(group * d):
            Q[i] = queries[query * d + i] * np.float32(scale * _LOG2_E)
        for q in range(group):
            rotate_row(codec, Q[q * d : (q + 1) * d], signs, mix, dense)
        query_tables(key_program, Q, key_pairs, tables)
        for i in range(acc.size):
            acc[i] = np.float32(0)
        for q in range(group):
            largest[query * ranges + item % ranges * group + q] = np.float32(-np.inf)
            totals[query * ranges + item % ranges * group + q] = np.float32(0)
        result = query * ranges + item % ranges * group
        for page in range(begin, end, GROUP_TOKENS // PAGE):
            tokens = min(GROUP_TOKENS, seq_len - page * PAGE, (end - page) * PAGE)
            tiles = (tokens + lanes - 1) // lanes
            key_base = (row * pages_per_row + page) * key_words
            value_base = (row * pages_per_row + page) * value_words
            for p in range((tokens + PAGE - 1) // PAGE):
                if offset_kind:
                    load_offset(keys, key_base + p * key_words + offset_word, offset_kind, offset)
                start_scores(key_program, offset, Q, S, p * PAGE)
            for t in range(tiles):
                token = t * lanes
                score_tile(key_program, keys, key_base + token // PAGE * key_words, token % PAGE,
                           key_cosines, key_pairs, Q, tables, S, token)  # fmt: skip
            _finish_scores(S, group, page * PAGE, tokens, tiles * lanes, softcap, bias, bias_base,
                           bias_strides, causal, query)  # fmt: skip
            row_maxima(key_program, S, tiles * lanes, best)
            for q in range(group):
                before = largest[result + q]
                now = before
                for t in range(lanes):
                    now = max(now, best[q * lanes + t])
                largest[result + q] = now
                top[q] = np.float32(0) if now == -np.inf else now
                factor = np.float32(0) if before == -np.inf else np.float32(2) ** (before - now)
                if factor != 1:
                    totals[result + q] *= factor
                    for i in range(dv):
                        for t in range(lanes):
                            acc[(i * group + q) * lanes + t] *= factor
            softmax_rows(key_program, S, tiles * lanes, top, added)
            for q in range(group):
                for t in range(lanes):
                    totals[result + q] += added[q * lanes + t]
            live[:] = np.uint32(0xFFFFFFFF)
            for t in range(tiles):
                token = t * lanes
                if token + lanes > tokens:
                    for k in range(tokens - token, lanes):
                        live[k] = np.uint32(0)
                value_radii(value_program, values, value_base + token // PAGE * value_words,
                            token % PAGE, value_cosines, live, R, token)  # fmt: skip
            accumulate_values(value_program, values, value_base, tiles, value_cosines, value_pairs,
                              R, S, acc)  # fmt: skip
            if value_offset_kind:
                for p in range((tokens + PAGE - 1) // PAGE):
                    word = value_base + p * value_words + value_offset_word
                    load_offset(values, word, value_offset_kind, value_offset)
                    count = min(PAGE, tokens - p * PAGE)
                    _add_offset(S, p * PAGE, count, group, value_offset, acc, lanes)
        for q in range(group):
            for i in range(dv):
                total = np.float32(0)
                for t in range(lanes):
                    total += acc[(i * group + q) * lanes + t]
                sums[(result + q) * dv + i] = total


@kernel
def _add_offset(S, start, count, group, offset, acc, lanes):
    """A page's value offset, times the weight of the page's tokens."""
    for q in range(group):
        weight = np.float32(0)
        for t in range(start, start + count):
            weight += S[q * STRIDE + t]
        for i in range(offset.size):
            acc[(i * group + q) * lanes] += weight * offset[i]


@kernel
def _finish_scores(S, group, start, tokens, padded, softcap, bias, base, stride, causal, query):
    """Soft cap, bias and causal limit; lanes without a token get −∞."""
    for q in range(group):
        row = q * STRIDE
        if softcap > 0:
            cap = np.float32(softcap * _LOG2_E)
            for t in range(tokens):
                S[row + t] = cap * np.float32(math.tanh(S[row + t] / cap))
        if bias.size:
            at = base[query + q] + start * stride
            for t in range(tokens):
                S[row + t] += bias[at + t * stride] * np.float32(_LOG2_E)
        for t in range(max(0, min(tokens, causal[query + q] - start)), padded):
            S[row + t] = np.float32(-np.inf)


@kernel
def merge_ranges(codec, shape, value_tables, sums, largest, totals, out, lse):
    """Merge the ranges of each query, and rotate the result back.

    ``out`` has a vector a query, ``lse`` the logarithm of its sum of exponentials; a query that
    sees nothing gets zeros and −∞.
    """
    group, _, ranges, _ = shape
    signs, mix, dense, _, _ = value_tables
    dv = out.size // lse.size
    vector = np.empty(dv, np.float32)
    for query in range(lse.size):
        first = query // group * group * ranges + query % group
        top = np.float32(-np.inf)
        for k in range(ranges):
            top = max(top, largest[first + k * group])
        vector[:] = np.float32(0)
        total = np.float32(0)
        if top > -np.inf:
            for k in range(ranges):
                weight = np.float32(2) ** (largest[first + k * group] - top)
                total += weight * totals[first + k * group]
                for i in range(dv):
                    vector[i] += weight * sums[(first + k * group) * dv + i]
        for i in range(dv):
            vector[i] = vector[i] / total if total > 0 or math.isnan(total) else np.float32(0)
        unrotate_row(codec, vector, signs, mix, dense)
        for i in range(dv):
            out[query * dv + i] = vector[i]
        lse[query] = (top + math.log2(total)) / _LOG2_E if total > 0 else top
