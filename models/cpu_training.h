// Group attention in training on a CPU: the gradients of its part (a), and its part (b) (`models/groups/attention.py`).
//
// Part (a) is causal attention. Its gradients are summed in blocks whose scores stay in a core's cache (arXiv 2205.14135,
// algorithm 4); torch 2.13's own kernel reaches a twentieth of a product's speed in bf16. Part (b) reads a few keys for
// each position; torch's operations copy all queries several times for it.
//
// Shapes: B sequences, H query heads, G key-value heads, S positions, D head size; Q depths with queries, the last M of them
// masks; K masks with keys. A block has BLOCK positions.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>
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
        queries_by_row(padded * size), grads_by_row(padded * size), keys_by_row(padded * size), zeros(size),
        grad_query(padded * widths), grad_keys(BLOCK * widths), grad_values(BLOCK * widths), lse(padded), delta(padded) {}

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
      store(grad_keys, BLOCK, count, [&](int64_t row, int64_t n, Floats values) {
        Float32::store(to_keys + (first + row) * size + n, values);
      });
      store(grad_values, BLOCK, count, [&](int64_t row, int64_t n, Floats values) {
        Float32::store(to_values + (first + row) * size + n, values);
      });
    }
    store(grad_query, padded, length, [&](int64_t row, int64_t n, Floats values) {
      Dtype::store(to_query + row * size + n, values);
    });
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

  // Gives the sums of the first `count` of some rows to `sink`, a vector at a time.
  template <class Sink>
  void store(const std::vector<Pair>& from, int64_t rows, int64_t count, Sink sink) const {
    for (int64_t width = 0; width < widths; ++width)
      for (int64_t row = 0; row < count; ++row)
        for (int v = 0; v < VECTORS; ++v) sink(row, width * BLOCK + v * LANES, from[width * rows + row].of[v]);
  }
};

// The gradients of causal attention, of query [B, H, S, D], keys and values [B, G, S, D], from the output, its gradient and
// its log-sum-exp [B, H, S] in fp32. The output may be of more keys than these, as its log-sum-exp then is.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_gradients(
    const at::Tensor& grads, const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
    const at::Tensor& out, const at::Tensor& lse, double scale) {
  const auto grad_out = grads.stride(3) == 1 ? grads : grads.contiguous(), log_sums = lse.contiguous();
  const int64_t batch = query.size(0), heads = query.size(1), length = query.size(2), size = query.size(3);
  const int64_t kv_heads = keys.size(1), shared = heads / kv_heads;
  TORCH_CHECK(
      keys.sizes() == values.sizes() && keys.size(0) == batch && heads % kv_heads == 0 && keys.size(2) == length &&
          keys.size(3) == size && out.sizes() == query.sizes() && grad_out.sizes() == query.sizes(),
      "query, keys, values and output differ in size");
  TORCH_CHECK(size % BLOCK == 0, "head size must be a multiple of ", BLOCK);
  TORCH_CHECK(
      log_sums.scalar_type() == at::kFloat && log_sums.sizes() == query.sizes().slice(0, 3),
      "the log-sum-exp must be [B, H, S] in fp32");
  for (const auto* each : {&query, &keys, &values, &out, &grad_out})
    TORCH_CHECK(each->scalar_type() == query.scalar_type() && each->stride(3) == 1, "heads must be contiguous, in one dtype");
  const auto grad_query = at::empty(query.sizes(), query.options());
  // Of each query head, so that sums do not depend on the number of threads.
  const auto by_head = at::empty({2, batch, kv_heads, shared, length, size}, query.options().dtype(at::kFloat));
  float* of_keys = by_head.mutable_data_ptr<float>();
  float* of_values = of_keys + by_head.stride(0);
  const auto run = [&](auto dtype) {
    using Head = HeadGradients<decltype(dtype)>;
    using Element = typename Head::Element;
    const auto rows_of = [&](const at::Tensor& of, int64_t sequence, int64_t head) {
      return typename Head::Rows{
          static_cast<const Element*>(of.const_data_ptr()) + sequence * of.stride(0) + head * of.stride(1), of.stride(2)};
    };
    at::parallel_for(0, batch * heads, 1, [&](int64_t begin, int64_t end) {
      const Tiles tiles;
      Head head(length, size, static_cast<float>(scale));
      for (int64_t number = begin; number < end; ++number) {
        const int64_t sequence = number / heads, of = number % heads, first = number * length;
        head.run(
            rows_of(query, sequence, of), rows_of(keys, sequence, of / shared), rows_of(values, sequence, of / shared),
            rows_of(out, sequence, of), rows_of(grad_out, sequence, of), log_sums.const_data_ptr<float>() + first,
            static_cast<Element*>(grad_query.mutable_data_ptr()) + first * size, of_keys + first * size,
            of_values + first * size);
      }
    });
  };
  query.scalar_type() == at::kBFloat16 ? run(BFloat16{}) : run(Float32{});
  const auto sums = by_head.sum(3).to(query.scalar_type());
  return {grad_query, sums[0], sums[1]};
}

template <class Dtype>
inline float dot(const typename Dtype::Element* a, const typename Dtype::Element* b, int64_t size) {
  Floats sums = {};
  for (int64_t n = 0; n < size; n += LANES) sums += Dtype::load(a + n) * Dtype::load(b + n);
  return sum(sums);
}

// Masks attend to the masks of their own group: the m-th query of a group to its first `seen(m)` keys.
struct OwnGroups {
  int64_t batch, length, size, kv_heads, shared, depths, num_masks, num_keys;
  float scale;
  bool causal;

  OwnGroups(const at::Tensor& query, const at::Tensor& keys, int64_t depths, bool causal, double scale)
      : batch(query.size(0)), length(query.size(2)), size(query.size(3)), kv_heads(keys.size(1)),
        shared(query.size(1) / (kv_heads * depths)), depths(depths), num_masks(std::min(depths, keys.size(2))),
        num_keys(keys.size(2)), scale(static_cast<float>(scale)), causal(causal) {
    TORCH_CHECK(
        query.size(1) == shared * kv_heads * depths && keys.size(0) == batch && keys.size(3) == length && keys.size(4) == size,
        "queries and keys differ in size");
    TORCH_CHECK(size % BLOCK == 0, "head size must be a multiple of ", BLOCK);
  }

  int64_t seen(int64_t mask) const { return causal ? mask + 1 + num_keys - num_masks : num_keys; }

  // Calls what `make()` returns, once made by each thread, with the sequence, the position, the key-value head and its first
  // query head of a mask, of which there are `num_masks` in each of the `shared` times `depths` heads from there on.
  template <class Make>
  void for_each(Make make) const {
    constexpr int64_t FEW = 8;  // positions for which it does not pay to wake a thread
    at::parallel_for(0, batch * length, FEW, [&](int64_t begin, int64_t end) {
      auto run = make();
      for (int64_t place = begin; place < end; ++place)
        for (int64_t head = 0; head < kv_heads; ++head)
          run(place / length, place % length, head, head * shared * depths + depths - num_masks);
    });
  }
};

// Returns a function of the indices of a row, [..., D], that gives its address.
template <class Dtype>
inline auto rows_at(const at::Tensor& of) {
  TORCH_CHECK(
      of.stride(-1) == 1 && of.element_size() == sizeof(typename Dtype::Element), "heads must be contiguous, in one dtype");
  auto* data = static_cast<typename Dtype::Element*>(of.data_ptr());
  return [=, stride = of.strides().vec()](auto... at) {
    int64_t offset = 0, dim = 0;
    ((offset += at * stride[dim++]), ...);
    return data + offset;
  };
}

// Adds part (b) to the output [B, H * Q, S, D] and the log-sum-exp [B, H * Q, S] of part (a), in place; keys and values
// [B, G, K, S, D].
void merge_own_group(
    at::Tensor out, at::Tensor lse, const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, int64_t depths,
    bool causal, double scale) {
  const OwnGroups groups(query, keys, depths, causal, scale);
  const auto run = [&](auto dtype) {
    using Dtype = decltype(dtype);
    const auto query_at = rows_at<Dtype>(query), key_at = rows_at<Dtype>(keys), value_at = rows_at<Dtype>(values);
    const auto out_at = rows_at<Dtype>(out);
    float* sums = lse.mutable_data_ptr<float>();
    const auto lse_at = [sums, stride = lse.strides().vec()](int64_t b, int64_t h, int64_t s) {
      return sums + b * stride[0] + h * stride[1] + s * stride[2];
    };
    groups.for_each([&] {
      return [&, scores = std::vector<float>(groups.num_keys)](int64_t b, int64_t s, int64_t head, int64_t first) mutable {
        for (int64_t reader = 0; reader < groups.shared; ++reader)
          for (int64_t mask = 0; mask < groups.num_masks; ++mask) {
            const int64_t h = first + reader * groups.depths + mask, seen = groups.seen(mask);
            float most = *lse_at(b, h, s), total = 0;
            const float before = most;
            for (int64_t key = 0; key < seen; ++key) {
              scores[key] = dot<Dtype>(query_at(b, h, s), key_at(b, head, key, s), groups.size) * groups.scale;
              most = std::max(most, scores[key]);
            }
            for (int64_t key = 0; key < seen; ++key) total += scores[key] = std::exp(scores[key] - most);
            const float kept = std::exp(before - most), all = total + kept;
            *lse_at(b, h, s) = most + std::log(all);
            auto* to = out_at(b, h, s);
            for (int64_t n = 0; n < groups.size; n += LANES) {
              Floats mixed = Dtype::load(to + n) * kept;
              for (int64_t key = 0; key < seen; ++key) mixed += Dtype::load(value_at(b, head, key, s) + n) * scores[key];
              Dtype::store(to + n, mixed / all);
            }
          }
      };
    });
  };
  query.scalar_type() == at::kBFloat16 ? run(BFloat16{}) : run(Float32{});
}

// The gradients of part (b), from the merged output and log-sum-exp: those of queries are added to `grad_query`, those of keys
// and values [B, G, K, S, D] returned.
std::tuple<at::Tensor, at::Tensor> own_group_gradients(
    at::Tensor grad_query, const at::Tensor& grads, const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values,
    const at::Tensor& out, const at::Tensor& lse, int64_t depths, bool causal, double scale) {
  const OwnGroups groups(query, keys, depths, causal, scale);
  const auto grad_out = grads.stride(3) == 1 ? grads : grads.contiguous(), log_sums = lse.contiguous();
  const auto grad_keys = at::empty(keys.sizes(), keys.options()), grad_values = at::empty(values.sizes(), values.options());
  const auto run = [&](auto dtype) {
    using Dtype = decltype(dtype);
    const auto query_at = rows_at<Dtype>(query), key_at = rows_at<Dtype>(keys), value_at = rows_at<Dtype>(values);
    const auto out_at = rows_at<Dtype>(out), grad_at = rows_at<Dtype>(grad_out), to_query = rows_at<Dtype>(grad_query);
    const auto to_keys = rows_at<Dtype>(grad_keys), to_values = rows_at<Dtype>(grad_values);
    const float* lse_of = log_sums.const_data_ptr<float>();
    groups.for_each([&] {
      std::vector<float> sums(2 * groups.num_keys * groups.size), weights(2 * groups.num_keys);
      return [&, sums, weights](int64_t b, int64_t s, int64_t head, int64_t first) mutable {
        const int64_t size = groups.size;
        float *of_keys = sums.data(), *of_values = of_keys + groups.num_keys * size;
        float *of_scores = weights.data(), *shares = of_scores + groups.num_keys;
        std::fill(sums.begin(), sums.end(), 0.0f);
        const auto add = [](float* to, Floats values) { Float32::store(to, Float32::load(to) + values); };
        for (int64_t reader = 0; reader < groups.shared; ++reader)
          for (int64_t mask = 0; mask < groups.num_masks; ++mask) {
            const int64_t h = first + reader * groups.depths + mask, seen = groups.seen(mask);
            const auto *q = query_at(b, h, s), *grad = grad_at(b, h, s);
            const float merged = lse_of[(b * query.size(1) + h) * groups.length + s];
            const float less = dot<Dtype>(grad, out_at(b, h, s), size);
            for (int64_t key = 0; key < seen; ++key) {
              shares[key] = std::exp(dot<Dtype>(q, key_at(b, head, key, s), size) * groups.scale - merged);
              of_scores[key] = shares[key] * (dot<Dtype>(grad, value_at(b, head, key, s), size) - less) * groups.scale;
            }
            for (int64_t n = 0; n < size; n += LANES) {
              auto* to = to_query(b, h, s) + n;
              Floats of_query = Dtype::load(to);
              for (int64_t key = 0; key < seen; ++key) {
                of_query += Dtype::load(key_at(b, head, key, s) + n) * of_scores[key];
                add(of_keys + key * size + n, Dtype::load(q + n) * of_scores[key]);
                add(of_values + key * size + n, Dtype::load(grad + n) * shares[key]);
              }
              Dtype::store(to, of_query);
            }
          }
        for (int64_t key = 0; key < groups.num_keys; ++key)
          for (int64_t n = 0; n < size; n += LANES) {
            Dtype::store(to_keys(b, head, key, s) + n, Float32::load(of_keys + key * size + n));
            Dtype::store(to_values(b, head, key, s) + n, Float32::load(of_values + key * size + n));
          }
      };
    });
  };
  query.scalar_type() == at::kBFloat16 ? run(BFloat16{}) : run(Float32{});
  return {grad_keys, grad_values};
}

}  // namespace
