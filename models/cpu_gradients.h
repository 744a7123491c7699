// The gradients of causal attention on a CPU, in blocks whose scores stay in a core's cache (arXiv 2205.14135, algorithm 4).
//
// torch 2.13's own kernel reaches a twentieth of a product's speed in bf16: it was a seventh of a training step.
//
// Shapes: B sequences, H query heads, G key-value heads, S positions, D head size. A block has BLOCK positions.

#pragma once

#include <vector>

#include "cpu_math.h"

namespace {

// Adds the products of `count` rows with one block of a weight to what is there.
template <class Dtype>
inline void add_rows(
    int64_t count, const typename Dtype::Element* rows, int64_t row_stride, const typename Dtype::Element* weights,
    int64_t inputs, Floats (*to)[VECTORS]) {
  const int64_t most = most_rows<Dtype>(inputs);
  for (int64_t row = 0; row < count; row += most) {
    const int64_t some = std::min(most, count - row);
    if (in_tiles<Dtype>(inputs)) {
      sum_rows<Dtype>(some, rows + row * row_stride, row_stride, weights, inputs, to + row, true);
      continue;
    }
    Floats products[MOST_TILED_ROWS][VECTORS];
    sum_rows<Dtype>(some, rows + row * row_stride, row_stride, weights, inputs, products);
    for (int64_t i = 0; i < some; ++i)
      for (int v = 0; v < VECTORS; ++v) to[row + i][v] += products[i][v];
  }
}

// The gradients of one query head; made once for each thread.
template <class Dtype>
struct HeadGradients {
  using Element = typename Dtype::Element;
  using Sums = Floats (*)[VECTORS];
  static constexpr int64_t PACK = Dtype::PACK;

  // A head's rows [S, D]; their elements lie together.
  struct Rows {
    const Element* of;
    int64_t stride;
    const Element* operator[](int64_t row) const { return of + row * stride; }
  };

  const int64_t length, size, padded, blocks, widths;  // padded to whole blocks; blocks of positions, and of a head
  const float scale;

  HeadGradients(int64_t length, int64_t size, float scale)
      : length(length), size(size), padded((length + BLOCK - 1) / BLOCK * BLOCK), blocks(padded / BLOCK),
        widths(size / BLOCK), scale(scale), queries_by_size(padded * size), grads_by_size(padded * size),
        queries_by_row(padded * size), grads_by_row(padded * size), keys_by_row(padded * size), zeros(size), grad_query(padded * widths),
        grad_keys(BLOCK * widths), grad_values(BLOCK * widths), lse(padded), delta(padded) {}

  // Of queries, keys, values, the output and its gradient [S, D], and the log-sum-exp [S]; gradients of queries [S, D] in
  // their dtype, of keys and values [S, D] in fp32.
  void run(
      Rows query, Rows key, Rows value, Rows out, Rows grad_out, const float* log_sums, Element* to_query, float* to_keys,
      float* to_values) {
    by_size(query, queries_by_size.data());
    by_size(grad_out, grads_by_size.data());
    by_row(query, queries_by_row.data());
    by_row(grad_out, grads_by_row.data());
    by_row(key, keys_by_row.data());
    for (int64_t row = 0; row < padded; ++row) {
      lse[row] = row < length ? log_sums[row] * LOG2_E : 0.0f;
      Floats products = {};
      for (int64_t n = 0; row < length && n < size; n += LANES)
        products += Dtype::load(grad_out[row] + n) * Dtype::load(out[row] + n);
      delta[row] = sum(products);
    }
    std::fill(grad_query.begin(), grad_query.end(), Pair{});
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = block * BLOCK, count = std::min(BLOCK, length - first);
      std::fill(grad_keys.begin(), grad_keys.end(), Pair{});
      std::fill(grad_values.begin(), grad_values.end(), Pair{});
      for (int64_t rows = block; rows < blocks; ++rows) add_block(key, value, block, rows, count);
      store(grad_keys, BLOCK, 0, count, [&](int64_t row, int64_t n, Floats values) {
        Float32::store(to_keys + (first + row) * size + n, values);
      });
      store(grad_values, BLOCK, 0, count, [&](int64_t row, int64_t n, Floats values) {
        Float32::store(to_values + (first + row) * size + n, values);
      });
    }
    store(grad_query, padded, 0, length, [&](int64_t row, int64_t n, Floats values) { Dtype::store(to_query + row * size + n, values); });
  }

 private:
  struct Pair {
    Floats of[VECTORS];
  };
  std::vector<Element> queries_by_size, grads_by_size, queries_by_row, grads_by_row, keys_by_row, zeros;
  std::vector<Pair> grad_query, grad_keys, grad_values;  // [D / BLOCK, S or BLOCK, BLOCK]
  std::vector<float> lse, delta;                         // in powers of two; rowsum(dO * O)

  // Packs rows as the outputs of a weight, a block of them at a time: [S / BLOCK, D / PACK, BLOCK, PACK].
  void by_size(Rows rows, Element* to) const {
    for (int64_t row = 0; row < padded; ++row) {
      const Element* from = row < length ? rows[row] : zeros.data();
      Element* into = to + row / BLOCK * BLOCK * size + row % BLOCK * PACK;
      for (int64_t k = 0; k < size; k += PACK) std::memcpy(into + k * BLOCK, from + k, PACK * sizeof(Element));
    }
  }

  // Packs rows as the inputs of a weight: [D / BLOCK, S / PACK, BLOCK, PACK].
  void by_row(Rows rows, Element* to) const {
    for (int64_t row = 0; row < padded; row += PACK) {
      const Element* from[PACK];
      for (int64_t i = 0; i < PACK; ++i) from[i] = row + i < length ? rows[row + i] : zeros.data();
      for (int64_t width = 0; width < widths; ++width) {
        Element* into = to + (width * padded + row) * BLOCK;
        for (int64_t n = 0; n < BLOCK; ++n)
          for (int64_t i = 0; i < PACK; ++i) into[n * PACK + i] = from[i][width * BLOCK + n];
      }
    }
  }

  // Adds what the queries of a block of rows give to its gradients, and to those of a block of keys with `count` keys.
  void add_block(Rows key, Rows value, int64_t block, int64_t rows, int64_t count) {
    // Transposed, [keys, rows]: what the gradients of keys and values are summed from.
    alignas(64) Floats scores[BLOCK][VECTORS], grad_shares[BLOCK][VECTORS];
    alignas(64) Element shares[BLOCK][BLOCK], grad_scores[BLOCK][BLOCK], by_query[BLOCK][BLOCK];
    multiply(count, key, block, queries_by_size.data() + rows * BLOCK * size, scores);
    multiply(count, value, block, grads_by_size.data() + rows * BLOCK * size, grad_shares);
    for (int64_t first = 0; first < BLOCK; first += LANES)
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t row = rows * BLOCK + v * LANES;
        const Floats sums = Float32::load(&lse[row]), less = Float32::load(&delta[row]);
        Words turned[LANES];
        for (int64_t i = 0; i < LANES; ++i) {
          const int64_t n = first + i;
          Floats share = {}, grad = {};
          if (n < count) {
            share = power_of_two(scores[n][v] * (scale * LOG2_E) - sums);
            if (rows == block) share = n <= v * LANES ? share : after(share, n - v * LANES);
            grad = share * (grad_shares[n][v] - less) * scale;
          }
          Dtype::store(&shares[n][v * LANES], share);
          Dtype::store(&grad_scores[n][v * LANES], grad);
          turned[i] = (Words)grad;
        }
        transpose(turned);
        for (int64_t i = 0; i < LANES; ++i) Dtype::store(&by_query[v * LANES + i][first], (Floats)turned[i]);
      }
    for (int64_t width = 0; width < widths; ++width) {
      const int64_t of_rows = (width * padded + rows * BLOCK) * BLOCK, of_keys = (width * padded + block * BLOCK) * BLOCK;
      add_rows<Dtype>(count, *grad_scores, BLOCK, queries_by_row.data() + of_rows, BLOCK, sums_of(grad_keys, width * BLOCK));
      add_rows<Dtype>(count, *shares, BLOCK, grads_by_row.data() + of_rows, BLOCK, sums_of(grad_values, width * BLOCK));
      add_rows<Dtype>(
          BLOCK, *by_query, BLOCK, keys_by_row.data() + of_keys, BLOCK, sums_of(grad_query, width * padded + rows * BLOCK));
    }
  }

  // Zeroes the first lanes, whose rows come before the key.
  static Floats after(Floats values, int64_t first) {
    for (int64_t lane = 0; lane < std::min(first, LANES); ++lane) values[lane] = 0;
    return values;
  }

  // Products of `count` keys or values of a block with a block of queries, or of the output's gradient.
  void multiply(int64_t count, Rows rows, int64_t block, const Element* packed, Sums to) const {
    const int64_t most = most_rows<Dtype>(size);
    for (int64_t row = 0; row < count; row += most)
      sum_rows<Dtype>(std::min(most, count - row), rows[block * BLOCK + row], rows.stride, packed, size, to + row);
  }

  static Sums sums_of(std::vector<Pair>& pairs, int64_t row) { return reinterpret_cast<Sums>(pairs.data() + row); }

  template <class Sink>
  void store(const std::vector<Pair>& from, int64_t rows, int64_t first, int64_t count, Sink sink) const {
    for (int64_t width = 0; width < widths; ++width)
      for (int64_t row = first; row < first + count; ++row)
        for (int v = 0; v < VECTORS; ++v) sink(row, width * BLOCK + v * LANES, from[width * rows + row].of[v]);
  }
};

}  // namespace
