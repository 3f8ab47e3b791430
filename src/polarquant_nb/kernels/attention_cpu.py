"""Attention over pages on the CPU: the loops around ``attention_stages.py``.

Flash decoding: the pages of a row are cut into ranges, which merge exactly at the end.  A range is
gone through in spans of tokens: :func:`weigh_keys` turns a span's keys into weights,
:func:`add_values` adds its values.  The two are compiled apart, each for its own format.  Scores
are in units of 1/log₂ e, so that weights are powers of two.
"""

from __future__ import annotations

import math

import numpy as np

from polarquant_nb.codebooks import TABLE
from polarquant_nb.kernels.attention_stages import (
    GROUP_TOKENS,
    RADIUS_STRIDE,
    accumulate_values,
    add_sums,
    query_tables,
    rescale_sums,
    row_maxima,
    score_tile,
    softmax_rows,
    start_scores,
    total_sums,
    value_radii,
)
from polarquant_nb.kernels.cpu import row_signs
from polarquant_nb.kernels.jit import kernel
from polarquant_nb.kernels.polar import load_offset, rotate_row, unrotate_row
from polarquant_nb.layout import PAGE

__all__ = ["LOG2_E", "add_values", "merge_ranges", "weigh_keys", "weigh_scores"]

LOG2_E = 1.4426950408889634


@kernel
def weigh_keys(program, codec, shape, sizes, queries, keys, starts, lengths, tables, scale, softcap,
               bias, bias_base, bias_stride, visible, span, S, top, totals, factors, first,
               last):  # fmt: skip
    """Weights of a span of tokens, for items ``first .. last−1``: a row, a group, a range each.

    Parameters
    ----------
    program : GroupProgram
        Format of the keys, and the number of queries of a group.
    codec : Program
        How queries are rotated.
    shape : tuple of int
        Queries of a group, groups of a row, ranges of a row, pages of a range, pages of a span.
    sizes : tuple of int
        See :func:`polarquant_nb.codec.kernel_shape`.
    queries : 1-d array of float32
        Rows, groups, queries of a group, coordinates; missing queries are zero.
    keys : 1-d array of uint32
        Memory that holds the pages.
    starts : array of int64, shape ``(rows, pages)``
        Each page's first word.
    lengths : 1-d array of int64
        Tokens of each row.
    tables : tuple of 1-d arrays
        Signs (see :func:`~polarquant_nb.kernels.cpu.row_signs`), order, mix, dense matrix, cosines,
        cosines of pairs.
    scale, softcap : float
        Of the logits; no softcap if 0.
    bias : 1-d array of float32
        Added to the logits; empty if there is none.
    bias_base : 1-d array of int64
        Element of ``bias`` at which each query's first token is.
    bias_stride : int
        Elements from token to token.
    visible : 1-d array of int64
        Tokens that each query may see.
    span : int
        Which span of each range; 0 starts afresh.
    S : 1-d array of float32
        Weights: items, queries, tokens of a span and 16 elements of padding.
    top, totals, factors : 1-d arrays of float32
        Per item and query: the largest score so far, the sum of weights, and the factor by which
        what was added up before shrinks.
    first, last : int
        Range of items.
    """
    group, groups, ranges, range_pages, span_pages = shape
    lanes, d, _, _, offset_word, offset_kind, _, _ = sizes
    all_signs, order, mix, dense, cosines, pairs = tables
    stride = span_pages * PAGE + 16
    columns, flat = starts.shape[1], starts.reshape(starts.size)
    Q = np.empty(group * d, np.float32)
    query_table = np.empty(d // 2 * group * TABLE, np.float32)
    offset = np.zeros(d, np.float32)
    best, added = np.empty(group * lanes, np.float32), np.empty(group * lanes, np.float32)
    for item in range(first, last):
        row = item // (groups * ranges)
        query = item // ranges * group  # counted over rows, groups and queries
        seq_len = lengths[row]
        pages = (seq_len + PAGE - 1) // PAGE
        begin = item % ranges * range_pages + span * span_pages
        end = min(begin + span_pages, (item % ranges + 1) * range_pages, pages)
        following = _first_page(item + 1, last, shape, lengths, columns, span)
        if begin >= end:
            factors[item * group : (item + 1) * group] = np.float32(1)
            if span == 0:
                top[item * group : (item + 1) * group] = np.float32(-np.inf)
                totals[item * group : (item + 1) * group] = np.float32(0)
            continue
        tokens = min((end - begin) * PAGE, seq_len - begin * PAGE)
        padded = (tokens + lanes - 1) // lanes * lanes
        s = item * group * stride
        for i in range(group * d):
            Q[i] = queries[query * d + i] * np.float32(scale * LOG2_E)
        signs = row_signs(all_signs, row, d)
        for q in range(group):
            rotate_row(codec, Q[q * d : (q + 1) * d], signs, order, mix, dense)
        query_tables(program, Q, pairs, query_table)
        for page in range(begin, end):
            word = starts[row, page]
            ahead = flat[_fetched_page(page, end, row * columns, following, flat.size - 1)]
            at = s + (page - begin) * PAGE
            if offset_kind:
                load_offset(program, keys, word + offset_word, offset)
            start_scores(program, keys, ahead, offset, Q, S, at, stride)
            for lane in range(0, min(PAGE, seq_len - page * PAGE), lanes):
                score_tile(program, keys, word, ahead, lane, cosines, pairs, Q, query_table, S,
                           at + lane, stride)  # fmt: skip
        here = slice(item * group, (item + 1) * group)
        _to_weights(program, S, s, stride, group, begin * PAGE, tokens, padded, softcap, bias,
                    bias_base[query : query + group], bias_stride, visible[query : query + group],
                    span == 0, best, added, top[here], totals[here], factors[here])  # fmt: skip


@kernel
def weigh_scores(program, lanes, S, stride, start, tokens, softcap, bias, bias_base, bias_stride,
                 visible, fresh, top, totals, factors, first, last):  # fmt: skip
    """Weights from scores that are there already, for queries ``first .. last−1`` of one row.

    Parameters are those of :func:`weigh_keys`; ``program`` is for one query,
    of so many ``lanes``; ``start`` is the first token, and ``fresh`` starts afresh.
    """
    padded = (tokens + lanes - 1) // lanes * lanes
    best, added = np.empty(lanes, np.float32), np.empty(lanes, np.float32)
    for q in range(first, last):
        here = slice(q, q + 1)
        _to_weights(program, S, q * stride, stride, 1, start, tokens, padded, softcap, bias,
                    bias_base[here], bias_stride, visible[here], fresh, best, added, top[here],
                    totals[here], factors[here])  # fmt: skip


@kernel
def _to_weights(program, S, s, stride, group, start, tokens, padded, softcap, bias, bias_base,
                bias_stride, visible, fresh, best, added, top, totals, factors):  # fmt: skip
    """Scores to weights in place, and the running maxima, sums and factors of a group."""
    lanes = best.size // group
    _finish_scores(S, s, stride, group, start, tokens, padded, softcap, bias, bias_base,
                   bias_stride, visible)  # fmt: skip
    row_maxima(program, S, s, stride, padded, best)
    for q in range(group):
        before = np.float32(-np.inf) if fresh else top[q]
        now = before
        for t in range(lanes):
            now = max(now, best[q * lanes + t])
        top[q] = now
        # a query that has seen nothing yet: any finite number will do
        best[q] = np.float32(0) if now == -np.inf else now
        factors[q] = np.float32(0) if before == -np.inf else np.float32(2) ** (before - now)
    softmax_rows(program, S, s, stride, padded, best, added)
    for q in range(group):
        total = np.float32(0) if fresh else totals[q] * factors[q]
        for t in range(lanes):
            total += added[q * lanes + t]
        totals[q] = total


@kernel
def add_values(program, shape, sizes, values, starts, lengths, tables, span, S, factors, sums,
               first, last):  # fmt: skip
    """Weighted values of a span, added to ``sums``: items, coordinates, queries, lanes.

    Parameters are those of :func:`weigh_keys`, of the values.
    """
    group, groups, ranges, range_pages, span_pages = shape
    lanes, d, _, _, offset_word, offset_kind, _, _ = sizes
    _, _, _, _, cosines, pairs = tables
    stride = span_pages * PAGE + 16
    columns, flat = starts.shape[1], starts.reshape(starts.size)
    R = np.empty(d // 2 * RADIUS_STRIDE, np.float32)
    offset = np.zeros(d, np.float32)
    live = np.empty(lanes, np.uint32)
    for item in range(first, last):
        row = item // (groups * ranges)
        seq_len = lengths[row]
        pages = (seq_len + PAGE - 1) // PAGE
        begin = item % ranges * range_pages + span * span_pages
        end = min(begin + span_pages, (item % ranges + 1) * range_pages, pages)
        following = _first_page(item + 1, last, shape, lengths, columns, span)
        a = item * d * group * lanes
        if span == 0:
            sums[a : a + d * group * lanes] = np.float32(0)
        else:
            rescale_sums(program, sums, a, factors[item * group : (item + 1) * group])
        for page in range(begin, end, GROUP_TOKENS // PAGE):
            tokens = min(GROUP_TOKENS, (end - page) * PAGE, seq_len - page * PAGE)
            tiles = (tokens + lanes - 1) // lanes
            s = item * group * stride + (page - begin) * PAGE
            live[:] = np.uint32(0xFFFFFFFF)
            for token in range(0, tokens, lanes):
                for t in range(max(0, tokens - token), lanes):
                    live[t] = np.uint32(0)
                here = page + token // PAGE
                ahead = flat[_fetched_page(here, end, row * columns, following, flat.size - 1)]
                value_radii(program, values, starts[row, here], ahead, token % PAGE, cosines, live,
                            R, token)  # fmt: skip
            limit = flat.size - (tokens + PAGE - 1) // PAGE
            fetched = _fetched_page(page, end, row * columns, following, limit)
            accumulate_values(program, values, flat, row * columns + page, fetched, tiles, cosines,
                              pairs, R, S, s, stride, sums, a)  # fmt: skip
            if offset_kind:
                for p in range((tokens + PAGE - 1) // PAGE):
                    load_offset(program, values, starts[row, page + p] + offset_word, offset)
                    count = min(PAGE, tokens - p * PAGE)
                    _add_offset(S, s + p * PAGE, stride, count, group, offset, sums, a, lanes)


@kernel
def _first_page(item, last, shape, lengths, columns, span):
    """Where an item's first page of a span is in the table of pages; −1 if there is none."""
    _, groups, ranges, range_pages, span_pages = shape
    row, page = item // (groups * ranges), item % ranges * range_pages + span * span_pages
    exists = item < last and page * PAGE < lengths[row]
    return row * columns + page if exists else -1


@kernel
def _fetched_page(page, end, row_start, following, limit):
    """Which page to fetch while working on ``page``: one page group further, ``limit`` at most.

    Beyond the item's end, pages of the following item.
    """
    ahead = page + GROUP_TOKENS // PAGE
    if ahead < end:
        return min(row_start + ahead, limit)
    return min(following + (ahead - end), limit) if following >= 0 else row_start + page


@kernel
def _add_offset(S, s, stride, count, group, offset, sums, a, lanes):
    """A page's value offset, times the weight of the page's tokens."""
    for q in range(group):
        weight = np.float32(0)
        for t in range(count):
            weight += S[s + q * stride + t]
        for i in range(offset.size):
            sums[a + (i * group + q) * lanes] += weight * offset[i]


@kernel
def _finish_scores(S, s, stride, group, start, tokens, padded, softcap, bias, base, bias_stride,
                   visible):  # fmt: skip
    """Soft cap, bias and causal limit; lanes without a token get −∞."""
    for q in range(group):
        row = s + q * stride
        if softcap > 0:
            cap = np.float32(softcap * LOG2_E)
            for t in range(tokens):
                S[row + t] = cap * np.float32(math.tanh(S[row + t] / cap))
        if bias.size:
            at = base[q] + start * bias_stride
            for t in range(tokens):
                S[row + t] += bias[at + t * bias_stride] * np.float32(LOG2_E)
        for t in range(max(0, min(tokens, visible[q] - start)), padded):
            S[row + t] = np.float32(-np.inf)


@kernel
def merge_ranges(program, codec, shape, sizes, tables, sums, top, totals, out, lse):
    """Merge the ranges of each query, and rotate the result back.

    ``out`` has a vector a query, ``lse`` the logarithm of its sum of exponentials; a query that
    sees nothing gets zeros and −∞.  ``sums`` are changed.
    """
    group, groups, ranges, _, _ = shape
    lanes, d, _, _, _, _, _, _ = sizes
    all_signs, order, mix, dense, _, _ = tables
    size = d * group * lanes
    weights, best = np.empty(group, np.float32), np.empty(group, np.float32)
    total = np.empty(group, np.float32)
    merged = np.empty(group * d + lanes, np.float32)
    for first in range(0, lse.size // group * ranges, ranges):
        query = first // ranges * group
        best[:] = np.float32(-np.inf)
        total[:] = np.float32(0)
        for item in range(first, first + ranges):
            for q in range(group):
                best[q] = max(best[q], top[item * group + q])
        for item in range(first, first + ranges):
            for q in range(group):
                seen = best[q] > -np.inf
                weight = np.float32(2) ** (top[item * group + q] - best[q]) if seen else 0
                weights[q] = np.float32(weight)
                total[q] += weights[q] * totals[item * group + q]
            if item == first:
                rescale_sums(program, sums, first * size, weights)
            else:
                add_sums(program, sums, first * size, item * size, weights)
        total_sums(program, sums, first * size, merged)
        signs = row_signs(all_signs, first // (groups * ranges), d)
        for q in range(group):
            vector = out[(query + q) * d : (query + q + 1) * d]
            some = total[q] > 0 or math.isnan(total[q])
            for i in range(d):
                vector[i] = merged[q * d + i] / total[q] if some else np.float32(0)
            unrotate_row(codec, vector, signs, order, mix, dense)
            base_2 = best[q] + math.log2(total[q]) if total[q] > 0 else best[q]
            lse[query + q] = base_2 / LOG2_E
