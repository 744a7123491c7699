// Decoder layers in one call: Llama's, Mistral's, Qwen 2's and Qwen 3's.
//
//   for each layer:  q, k, v = rope(norm(W_qkv n(x)));  x += W_o attention(q, K, V);  x += W_down(silu(W_gate n(x)) * W_up n(x))
//   then:            logits = W_head n(x)
//
// All of it is one parallel region: between two phases the threads wait for each other, and nothing else happens. Blocks
// of a weight are taken one by one, as the memory does not serve all threads alike.
//
// Shapes as in cpu_math.h, and: L layers, E width of the rows that come in, D hidden, I intermediate, A angles of RoPE,
// V vocabulary.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>

#include <atomic>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "cpu_math.h"

namespace {

constexpr int64_t padded(int64_t count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

inline void wait_for_all() {
#ifdef _OPENMP
#pragma omp barrier
#endif
}

inline int64_t most_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

// The part [first, second) of `count` that is a thread's.
inline std::pair<int64_t, int64_t> part_of(int64_t count, int64_t thread, int64_t threads) {
  return {thread * count / threads, (thread + 1) * count / threads};
}

// x / (1 + 2 ** (-x log2 e)), with powers of numbers below zero only.
inline Floats silu(Floats x) {
  const Floats magnitude = x < 0.0f ? -x : x;
  const Floats power = power_of_two(magnitude * -LOG2_E);
  return (x < 0.0f ? x * power : x) / (power + 1.0f);
}

// to = x / rms(x) * weight over D values; in bf16 rounded before the weight too, as transformers does, or once.
template <class Dtype>
void rms_norm(
    const typename Dtype::Element* from, const typename Dtype::Element* weight, int64_t size, float eps,
    typename Dtype::Element* to, bool rounds_twice = true) {
  Floats squares[4] = {};
  int64_t n = 0;
  for (int64_t i = 0; n + LANES <= size; n += LANES, i = (i + 1) % 4) {
    const Floats x = Dtype::load(from + n);
    squares[i] += x * x;
  }
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (int64_t rest = n; rest < size; ++rest) total += Dtype::widen(from[rest]) * Dtype::widen(from[rest]);
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
  typename Dtype::Element rounded[LANES], factors[LANES] = {}, values[LANES] = {};
  for (n = 0; n < size; n += LANES) {
    const int64_t count = std::min(LANES, size - n);
    const auto* x = from + n;
    const auto* w = weight + n;
    if (count < LANES) {
      std::copy(from + n, from + size, values);
      std::copy(weight + n, weight + size, factors);
      x = values, w = factors;
    }
    Floats normed = Dtype::load(x) * scale;
    if (rounds_twice) {
      Dtype::store(rounded, normed);
      normed = Dtype::load(rounded);
    }
    store_first<Dtype>(to + n, normed * Dtype::load(w), count);
  }
}

// Turns the first A of a head's values, of which the first half and the second are pairs; cos and sin [A].
template <class Dtype>
void rotate(
    typename Dtype::Element* head, const typename Dtype::Element* cos, const typename Dtype::Element* sin, int64_t angles) {
  const int64_t half = angles / 2;
  int64_t n = 0;
  for (; n + LANES <= half; n += LANES) {
    const Floats a = Dtype::load(head + n), b = Dtype::load(head + half + n);
    Dtype::store(head + n, a * Dtype::load(cos + n) - b * Dtype::load(sin + n));
    Dtype::store(head + half + n, b * Dtype::load(cos + half + n) + a * Dtype::load(sin + half + n));
  }
  for (; n < half; ++n) {
    const float a = Dtype::widen(head[n]), b = Dtype::widen(head[half + n]);
    store_first<Dtype>(head + n, broadcast(a * Dtype::widen(cos[n]) - b * Dtype::widen(sin[n])), 1);
    store_first<Dtype>(
        head + half + n, broadcast(b * Dtype::widen(cos[half + n]) + a * Dtype::widen(sin[half + n])), 1);
  }
}

// Parts [R, D] side by side, each divided by its root mean square and times a weight [D] where it has one, in the dtype of
// `like`: [R, parts * D].
inline at::Tensor normed_parts(
    const std::vector<at::Tensor>& parts, const std::vector<std::optional<at::Tensor>>& norms, double eps,
    const at::Tensor& like) {
  TORCH_CHECK(!parts.empty() && parts.size() == norms.size(), "every part needs a norm, or none");
  const int64_t rows = parts[0].size(0), size = parts[0].size(1), inputs = size * static_cast<int64_t>(parts.size());
  auto read = at::empty({rows, inputs}, like.options());
  const auto run = [&](auto dtype) {
    using Dtype = decltype(dtype);
    using Element = typename Dtype::Element;
    for (size_t part = 0; part < parts.size(); ++part) {
      const auto& of = parts[part];
      TORCH_CHECK(
          of.dim() == 2 && of.size(0) == rows && of.size(1) == size && of.stride(1) == 1 && of.dtype() == like.dtype(),
          "a part has another size or dtype");
      TORCH_CHECK(!norms[part] || (norms[part]->numel() == size && norms[part]->dtype() == like.dtype()), "rows and norm differ");
      for (int64_t row = 0; row < rows; ++row) {
        const auto* from = static_cast<const Element*>(of.const_data_ptr()) + row * of.stride(0);
        auto* to = static_cast<Element*>(read.data_ptr()) + row * inputs + static_cast<int64_t>(part) * size;
        if (norms[part])
          rms_norm<Dtype>(from, static_cast<const Element*>(norms[part]->const_data_ptr()), size, static_cast<float>(eps), to, false);
        else
          std::copy(from, from + size, to);
      }
    }
  };
  like.scalar_type() == at::kBFloat16 ? run(BFloat16{}) : run(Float32{});
  return read;
}

// Rows [R, D] of an embedding [V, D].
inline at::Tensor rows_of(const at::Tensor& embedding, const int64_t* tokens, int64_t count) {
  const int64_t bytes = embedding.size(1) * embedding.element_size();
  auto rows = at::empty({count, embedding.size(1)}, embedding.options());
  for (int64_t row = 0; row < count; ++row) {
    TORCH_CHECK(tokens[row] >= 0 && tokens[row] < embedding.size(0), "token ", tokens[row], " is not in the vocabulary");
    std::memcpy(
        static_cast<char*>(rows.data_ptr()) + row * bytes,
        static_cast<const char*>(embedding.const_data_ptr()) + tokens[row] * bytes, bytes);
  }
  return rows;
}

struct Projection {
  at::Tensor packed, bias;  // bias in fp32, or not there
  int64_t outputs = 0, inputs = 0;

  template <class Dtype>
  Weight<Dtype> weight() const {
    return {
        static_cast<const typename Dtype::Element*>(packed.const_data_ptr()),
        bias.defined() ? bias.const_data_ptr<float>() : nullptr, outputs, inputs};
  }
};

enum { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, NUM_PROJECTIONS };
constexpr int64_t STOLEN = int64_t{1} << 32, MANY_BYTES = 1 << 19;
constexpr int64_t PRODUCTS_OF_LAYER = 4;  // that threads share: q, k and v; output; gate and up; down
enum { INPUT_NORM, MLP_NORM, QUERY_NORM, KEY_NORM, NUM_NORMS };

struct Layer {
  Projection projections[NUM_PROJECTIONS];
  at::Tensor norms[NUM_NORMS];  // weights; those that a layer has not are undefined
};

// What one forward works on.
template <class Dtype>
struct Forward {
  using Element = typename Dtype::Element;

  const std::vector<Layer>& layers;
  int64_t rows, heads, kv_heads, head_size, width, hidden_size, mlp_size, angles, columns, first_kept;
  float eps, scale;
  const Element *cos, *sin;       // row `angle_rows[r]` of them is row r's, row r itself where there are none
  const int64_t* angle_rows;
  const Element *mask, *first_input;
  int64_t mask_stride, cos_stride, sin_stride, input_width;
  const std::vector<int64_t>* parents;  // of the nodes of a tree, of which the rows are the last
  const int64_t* places;  // of the rows, in the cache
  int64_t start;          // the first of them, where there are no `places`
  Element *keys, *values;
  int64_t key_layer, value_layer, key_head, value_head, key_stride, value_stride;
  const std::vector<int64_t>& taps;
  Element* features;
  const Element* final_norm;
  Weight<Dtype> head;
  Element* logits;
  float* wide_logits;
  // Of this forward alone. Rows are as far apart as blocks are wide: [R, padded(...)].
  Element *stream, *queries, *fresh, *attended, *activated, *finals;
  int32_t* seen;
  int64_t* counts;
  const Element* read;  // [n, ...] what the first n rows are projected from, or nothing
  int64_t num_read;
  Weight<Dtype> fusion;
  bool adds_last;  // of those to the rows that follow
  std::atomic<int64_t>* taken;  // [threads, products] how many of a thread's blocks of a product have been taken
  int64_t products;

  // Calls `run(i)` for each i of `count`, by one of the threads: a thread begins with its own part and goes on with what
  // others have left of theirs. If the product's weights have few bytes, asking takes longer than waiting.
  template <class Run>
  void share(int64_t product, int64_t count, int64_t bytes, int64_t thread, int64_t threads, Run run) const {
    if (bytes < MANY_BYTES) {
      const auto [begin, end] = part_of(count, thread, threads);
      for (int64_t i = begin; i < end; ++i) run(i);
      return;
    }
    for (int64_t next = 0; next < threads; ++next) {
      const int64_t owner = (thread + next) % threads;
      const auto [begin, end] = part_of(count, owner, threads);
      std::atomic<int64_t>& of_owner = taken[owner * products + product];
      while (true) {
        const int64_t before = of_owner.fetch_add(next == 0 ? 1 : STOLEN, std::memory_order_relaxed);
        const int64_t own = before % STOLEN, stolen = before / STOLEN;
        if (own + stolen >= end - begin) break;
        run(next == 0 ? begin + own : end - 1 - stolen);
      }
    }
  }

  int64_t place(int64_t row) const { return places ? places[row] : start + row; }

  void run(int64_t thread, int64_t threads) {
    const Tiles tiles;
    std::vector<Element> normed(rows * padded(std::max(hidden_size, input_width)));
    typename Attention<Dtype>::Scratch scratch(attention(0, 0));
    std::vector<float> gates(rows * BLOCK);
    std::vector<int64_t> common;
    const auto [first_row, end_row] = part_of(rows, thread, threads);
    for (int64_t row = first_row; row < end_row; ++row) see(row);
    if (read) {
      fuse(thread, threads);
      wait_for_all();
    }
    for (size_t index = 0; index < layers.size(); ++index) {
      const Layer& layer = layers[index];
      copy_tap(static_cast<int64_t>(index), stream, first_row, end_row);
      const int64_t product = static_cast<int64_t>(index) * PRODUCTS_OF_LAYER;
      const bool given = index == 0 && first_input;
      const int64_t first = first_wanted(index);
      if (!given) norm_from(0, layer.norms[INPUT_NORM], normed.data());
      project_heads(layer, index, first, given ? first_input : normed.data(), given ? input_width : width, product, thread, threads);
      wait_for_all();
      if (index == 0) common = attention(0, 0).count_common();
      const auto [first_reader, end_reader] = part_of((rows - first) * heads, thread, threads);
      attention(index, first).run(first_reader, end_reader, common.data() + first, scratch);
      wait_for_all();
      add_product(layer.projections[OUTPUT], first, attended, padded(heads * head_size), product + 1, thread, threads);
      wait_for_all();
      norm_from(first, layer.norms[MLP_NORM], normed.data());
      activate(layer, first, normed.data(), gates.data(), product + 2, thread, threads);
      wait_for_all();
      add_product(layer.projections[DOWN], first, activated, padded(mlp_size), product + 3, thread, threads);
      wait_for_all();
    }
    copy_tap(static_cast<int64_t>(layers.size()), stream, first_row, end_row);
    for (int64_t row = first_row; row < end_row; ++row) {
      const Element* from = stream + row * width;
      if (final_norm)
        rms_norm<Dtype>(from, final_norm, hidden_size, eps, finals + row * width);
      else  // EAGLE's
        std::copy(from, from + hidden_size, finals + row * width);
    }
    copy_tap(-1, finals, first_row, end_row);
    if (!head.packed) return;
    wait_for_all();
    share(products - 1, head.blocks(), head.bytes(), thread, threads, [&](int64_t block) {
      multiply_block(
          finals + first_kept * width, rows - first_kept, width, head, block, [&](int64_t row, int v, Floats values) {
            const int64_t n = block * BLOCK + v * LANES, to = row * head.outputs + n;
            if (wide_logits)
              store_first<Float32>(wide_logits + to, values, head.outputs - n);
            else
              store_first<Dtype>(logits + to, values, head.outputs - n);
          });
    });
  }

  void fuse(int64_t thread, int64_t threads) const {
    share(products - 2, fusion.blocks(), fusion.bytes(), thread, threads, [&](int64_t block) {
      multiply_block(read, num_read, fusion.inputs, fusion, block, [&](int64_t row, int v, Floats values) {
        Element* to = stream + row * width + block * BLOCK + v * LANES;
        Dtype::store(to, values);
        if (!adds_last || row < num_read - 1) return;
        for (int64_t next = 1; next < rows - row; ++next)
          Dtype::store(to + next * width, Dtype::load(to + next * width) + Dtype::load(to));
      });
    });
  }

  void see(int64_t row) {
    int32_t* to = seen + row * columns;
    if (mask) {
      counts[row] = find_seen<Dtype>(mask + row * mask_stride, columns, to);
    } else if (parents) {
      const int64_t earlier = static_cast<int64_t>(parents->size()) - rows, first = start - earlier;
      std::iota(to, to + first, 0);
      int64_t count = first;
      for (int64_t node = earlier + row; node >= 0; node = (*parents)[node]) to[count++] = static_cast<int32_t>(first + node);
      std::reverse(to + first, to + count);
      counts[row] = count;
    } else {
      counts[row] = start + row + 1;
      std::iota(to, to + counts[row], 0);
    }
  }

  const Element* weights_of(const at::Tensor& norm) const { return static_cast<const Element*>(norm.const_data_ptr()); }

  // The first row of which a layer's output is read: of the last layer's, where no features are, by the head alone. Of the
  // rows before it, a prompt's in a drafter of one layer, keys and values are all that is needed.
  int64_t first_wanted(size_t index) const {
    const int64_t last = static_cast<int64_t>(layers.size());
    const bool by_features = std::any_of(taps.begin(), taps.end(), [&](int64_t tap) { return tap < 0 || tap == last; });
    return static_cast<int64_t>(index) + 1 == last && head.packed && !by_features ? first_kept : 0;
  }

  // Of the rows from `first` on, by every thread for itself: less than waiting once more.
  void norm_from(int64_t first, const at::Tensor& norm, Element* to) const {
    for (int64_t row = first; row < rows; ++row)
      rms_norm<Dtype>(stream + row * width, weights_of(norm), hidden_size, eps, to + row * width);
  }

  // Queries, from row `first` on, keys and values of whole heads; keys and values go into the cache.
  void project_heads(
      const Layer& layer, size_t index, int64_t first, const Element* input, int64_t stride, int64_t product, int64_t thread,
      int64_t threads) {
    // As many heads as end where a block does.
    const int64_t unit = std::lcm(head_size, BLOCK);
    int64_t units[3], total = 0, bytes = 0;
    for (int kind : {QUERY, KEY, VALUE}) {
      total += units[kind] = (layer.projections[kind].outputs + unit - 1) / unit;
      bytes += layer.projections[kind].template weight<Dtype>().bytes();
    }
    // Small heads are few: threads share their rows too.
    const int64_t parts = bytes < MANY_BYTES ? std::min<int64_t>(rows, 2) : 1;
    share(product, total * parts, bytes, thread, threads, [&](int64_t item) {
      int64_t number = item / parts;
      int kind = QUERY;
      for (; number >= units[kind]; ++kind) number -= units[kind];
      auto [from, last] = part_of(rows, item % parts, parts);
      if (kind == QUERY) from = std::min(std::max(from, first), last);
      const Weight<Dtype> weight = layer.projections[kind].template weight<Dtype>();
      const int64_t padded_outputs = padded(weight.outputs), first_block = number * unit / BLOCK, first_row = from;
      Element* to = kind == QUERY ? queries : fresh + (kind == VALUE ? rows * padded_outputs : 0);
      for (int64_t block = first_block; block < std::min(weight.blocks(), first_block + unit / BLOCK); ++block)
        multiply_block(input + from * stride, last - from, stride, weight, block, [&](int64_t row, int v, Floats values) {
          Dtype::store(to + (first_row + row) * padded_outputs + block * BLOCK + v * LANES, values);
        });
      const int64_t first_head = number * unit / head_size;
      for (int64_t head = first_head; head < std::min(weight.outputs, (number + 1) * unit) / head_size; ++head)
        for (int64_t row = from; row < last; ++row)
          finish_head(layer, kind, index, head, row, to + row * padded_outputs + head * head_size);
    });
  }

  void finish_head(const Layer& layer, int kind, size_t index, int64_t head, int64_t row, Element* from) const {
    if (kind != VALUE) {
      const at::Tensor& norm = layer.norms[kind == QUERY ? QUERY_NORM : KEY_NORM];
      if (norm.defined()) rms_norm<Dtype>(from, weights_of(norm), head_size, eps, from);
      const int64_t angle = angle_rows ? angle_rows[row] : row;
      rotate<Dtype>(from, cos + angle * cos_stride, sin + angle * sin_stride, angles);
    }
    if (kind == QUERY) return;
    Element* to = kind == KEY ? keys + index * key_layer + head * key_head + place(row) * key_stride
                              : values + index * value_layer + head * value_head + place(row) * value_stride;
    std::copy(from, from + head_size, to);
  }

  Attention<Dtype> attention(size_t index, int64_t first) const {
    const int64_t of_heads = padded(heads * head_size);
    return {
        queries + first * of_heads, keys + index * key_layer, values + index * value_layer, attended + first * of_heads,
        rows - first, heads, kv_heads, head_size, columns, of_heads, head_size, of_heads, key_head, value_head, key_stride,
        value_stride, seen + first * columns, counts + first, scale};
  }

  void add_product(
      const Projection& projection, int64_t first, const Element* input, int64_t stride, int64_t product, int64_t thread, int64_t threads) {
    const Weight<Dtype> weight = projection.weight<Dtype>();
    share(product, weight.blocks(), weight.bytes(), thread, threads, [&](int64_t block) {
      multiply_block(input + first * stride, rows - first, stride, weight, block, [&](int64_t row, int v, Floats values) {
        Element* to = stream + (first + row) * width + block * BLOCK + v * LANES;
        Dtype::store(to, Dtype::load(to) + values);
      });
    });
  }

  void activate(
      const Layer& layer, int64_t first, const Element* input, float* gates, int64_t product, int64_t thread,
      int64_t threads) {
    const Weight<Dtype> gate = layer.projections[GATE].weight<Dtype>(), up = layer.projections[UP].weight<Dtype>();
    share(product, gate.blocks(), gate.bytes() + up.bytes(), thread, threads, [&](int64_t block) {
      multiply_block(input + first * width, rows - first, width, gate, block, [&](int64_t row, int v, Floats values) {
        Float32::store(gates + row * BLOCK + v * LANES, silu(values));
      });
      multiply_block(input + first * width, rows - first, width, up, block, [&](int64_t row, int v, Floats values) {
        const Floats gated = Float32::load(gates + row * BLOCK + v * LANES) * values;
        Dtype::store(activated + (first + row) * padded(mlp_size) + block * BLOCK + v * LANES, gated);
      });
    });
  }

  // Copies rows into the features [R, taps * D]: the residual stream before a layer, or after the final norm (-1).
  void copy_tap(int64_t wanted, const Element* from, int64_t first_row, int64_t end_row) const {
    for (size_t tap = 0; tap < taps.size(); ++tap)
      if (taps[tap] == wanted)
        for (int64_t row = first_row; row < end_row; ++row)
          std::copy(
              from + row * width, from + row * width + hidden_size, features + (row * taps.size() + tap) * hidden_size);
  }
};

// Decoder layers, final norm and LM head, with packed weights (`pack`).
struct DecoderLayers : torch::CustomClassHolder {
  int64_t heads, kv_heads, head_size, hidden_size;
  double eps, scale;
  std::vector<Layer> layers;
  at::Tensor final_norm, embedding, cos_table, sin_table, masks;
  Projection head, fusion;
  std::optional<at::Tensor> fused_table;
  std::vector<std::optional<at::Tensor>> fusion_norms;
  double fusion_eps = 0;
  bool fusion_adds_last = false;

  DecoderLayers(int64_t heads, int64_t kv_heads, int64_t head_size, int64_t hidden_size, double eps, double scale)
      : heads(heads), kv_heads(kv_heads), head_size(head_size), hidden_size(hidden_size), eps(eps), scale(scale) {
    TORCH_CHECK(kv_heads > 0 && heads % kv_heads == 0, "query heads must be a multiple of key-value heads");
    TORCH_CHECK(
        head_size % LANES == 0 && head_size / LANES <= MOST_PARTS, "head size must be a multiple of ", LANES,
        ", at most ", MOST_PARTS * LANES);
  }

  static Projection projection(const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t outputs, int64_t inputs) {
    const int64_t together = packed.scalar_type() == at::kBFloat16 ? 2 : 1;
    TORCH_CHECK(
        packed.dim() == 4 && packed.size(0) == (outputs + BLOCK - 1) / BLOCK && packed.is_contiguous() &&
            packed.size(1) == (inputs + together - 1) / together && packed.size(2) == BLOCK && packed.size(3) == together,
        "a packed weight has another size than ", outputs, " x ", inputs);
    TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->numel() == outputs), "a bias must be [outputs] in fp32");
    return {packed, bias ? bias->contiguous() : at::Tensor(), outputs, inputs};
  }

  // Seven projections (q, k, v, o, gate, up, down), and the norms before attention and MLP, of queries and of keys.
  void add_layer(
      const std::vector<at::Tensor>& packed, const std::vector<std::optional<at::Tensor>>& biases,
      const std::vector<std::optional<at::Tensor>>& norms, int64_t input_size, int64_t mlp_size) {
    TORCH_CHECK(packed.size() == NUM_PROJECTIONS && biases.size() == NUM_PROJECTIONS && norms.size() == NUM_NORMS, "a part is missing");
    for (const at::Tensor& each : packed) TORCH_CHECK(each.scalar_type() == packed[0].scalar_type(), "a layer's weights differ in dtype");
    const int64_t of_heads = heads * head_size, of_kv_heads = kv_heads * head_size;
    const int64_t sizes[NUM_PROJECTIONS][2] = {
        {of_heads, input_size}, {of_kv_heads, input_size}, {of_kv_heads, input_size}, {hidden_size, of_heads},
        {mlp_size, hidden_size}, {mlp_size, hidden_size}, {hidden_size, mlp_size}};
    Layer layer;
    for (int i = 0; i < NUM_PROJECTIONS; ++i) layer.projections[i] = projection(packed[i], biases[i], sizes[i][0], sizes[i][1]);
    for (int i = 0; i < NUM_NORMS; ++i)
      if (norms[i]) {
        TORCH_CHECK(norms[i]->scalar_type() == packed[0].scalar_type(), "a norm has another dtype than its layer");
        TORCH_CHECK(norms[i]->numel() == (i < QUERY_NORM ? hidden_size : head_size), "a norm has another size");
        layer.norms[i] = norms[i]->contiguous();
      }
    TORCH_CHECK(layer.norms[MLP_NORM].defined(), "a layer needs the norm before its MLP");
    TORCH_CHECK(
        layers.empty() || (layer.norms[INPUT_NORM].defined() && input_size == hidden_size),
        "only the first layer may read something else than the normed hidden states");
    TORCH_CHECK(layers.empty() || layers[0].projections[0].packed.dtype() == packed[0].dtype(), "layers differ in dtype");
    layers.push_back(layer);
  }

  // The final norm, of layers that have one, and the head's packed weight.
  void set_head(
      const std::optional<at::Tensor>& norm, const std::optional<at::Tensor>& packed,
      const std::optional<at::Tensor>& bias, int64_t outputs) {
    TORCH_CHECK(!layers.empty(), "there is no layer");
    TORCH_CHECK(!norm || norm->numel() == hidden_size, "the final norm has another size");
    const auto dtype = layers[0].projections[0].packed.scalar_type();
    TORCH_CHECK(
        (!norm || norm->scalar_type() == dtype) && (!packed || packed->scalar_type() == dtype),
        "layers, final norm and head differ in dtype");
    if (norm) final_norm = norm->contiguous();
    if (packed) head = projection(*packed, bias, outputs, hidden_size);
  }

  // The embedding [V, D] of `forward_tokens`.
  void set_embedding(const at::Tensor& weight) {
    TORCH_CHECK(weight.dim() == 2 && weight.size(1) == hidden_size && weight.is_contiguous(), "the embedding has another size");
    embedding = weight;
  }

  // RoPE's cos and sin [positions, A], of `forward_tokens` and `draft`.
  void set_angles(const at::Tensor& all_cos, const at::Tensor& all_sin) { cos_table = all_cos, sin_table = all_sin; }

  const std::vector<int64_t>& checked(const std::vector<int64_t>& positions) const {
    TORCH_CHECK(cos_table.defined(), "there are no angles");
    for (const int64_t position : positions)
      TORCH_CHECK(position >= 0 && position < cos_table.size(0), "position ", position, " has no angles");
    return positions;
  }

  // As `forward`, of tokens at these positions; logits of the rows from `first_kept` on.
  std::tuple<at::Tensor, at::Tensor> forward_tokens(
      const std::vector<int64_t>& tokens, const std::vector<int64_t>& positions, const at::Tensor& keys,
      const at::Tensor& values, int64_t start, const std::optional<at::Tensor>& places,
      const std::optional<at::Tensor>& mask, const std::optional<std::vector<int64_t>>& parents,
      const std::vector<int64_t>& taps, int64_t first_kept) const {
    TORCH_CHECK(embedding.defined(), "there is no embedding");
    TORCH_CHECK(tokens.size() == positions.size(), "every token needs a position");
    const auto inputs = rows_of(embedding, tokens.data(), static_cast<int64_t>(tokens.size()));
    return run_rows(
        inputs, cos_table, sin_table, checked(positions).data(), keys, values, start, places, mask, parents, std::nullopt, taps,
        first_kept, head.packed.defined(), false);
  }

  // What `draft` makes inputs of: a projection of tokens' embeddings, if there is a table [V, D], and of features, D of them
  // at a time, each part with its norm; the rows [K, D] of the masks that follow, and whether the last token's is added.
  void set_fusion(
      const at::Tensor& packed, const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& table,
      const std::vector<std::optional<at::Tensor>>& norms, double norm_eps, const at::Tensor& mask_rows, bool adds_last) {
    fusion = projection(packed, bias, hidden_size, hidden_size * static_cast<int64_t>(norms.size()));
    TORCH_CHECK(
        !layers.empty() && packed.scalar_type() == layers[0].projections[0].packed.scalar_type(),
        "layers and fusion differ in dtype");
    TORCH_CHECK(
        !table || (table->dim() == 2 && table->size(1) == hidden_size && table->is_contiguous() && table->dtype() == packed.dtype()),
        "the embedding has another size or dtype");
    TORCH_CHECK(
        mask_rows.dim() == 2 && mask_rows.size(1) == hidden_size && mask_rows.dtype() == packed.dtype(),
        "the masks have another size or dtype");
    fused_table = table, fusion_norms = norms, fusion_eps = norm_eps, masks = mask_rows.contiguous(), fusion_adds_last = adds_last;
  }

  // As `forward`, of causal rows after `start` others: of ids [n] with features [n, F], and the masks; in fp32 the logits
  // [1 + K, V] of the last id and the masks.
  at::Tensor draft(
      const at::Tensor& ids, const at::Tensor& features, const at::Tensor& keys, const at::Tensor& values, int64_t start) const {
    const int64_t known = ids.numel(), of_features = static_cast<int64_t>(fusion_norms.size()) - fused_table.has_value();
    TORCH_CHECK(fusion.packed.defined(), "there is no fusion");
    TORCH_CHECK(known > 0 && ids.scalar_type() == at::kLong && ids.is_contiguous(), "ids must be [n] int64");
    TORCH_CHECK(features.dim() == 2 && features.size(1) == of_features * hidden_size, "features have another size");
    std::vector<at::Tensor> parts;
    if (fused_table) parts.push_back(rows_of(*fused_table, ids.const_data_ptr<int64_t>(), known));
    for (int64_t part = 0; part < of_features; ++part) parts.push_back(features.narrow(1, part * hidden_size, hidden_size));
    const auto read = normed_parts(parts, fusion_norms, fusion_eps, fusion.packed);
    const auto inputs = at::zeros({known + masks.size(0), hidden_size}, masks.options());
    std::memcpy(
        static_cast<char*>(inputs.data_ptr()) + inputs.nbytes() - masks.nbytes(), masks.const_data_ptr(), masks.nbytes());
    std::vector<int64_t> positions(inputs.size(0));
    std::iota(positions.begin(), positions.end(), start);
    return std::get<1>(run_rows(
        inputs, cos_table, sin_table, checked(positions).data(), keys, values, start, std::nullopt, std::nullopt,
        std::nullopt, std::nullopt, {}, known - 1, true, true, &read));
  }

  // inputs [R, D] in the weights' dtype, cos and sin [R, A]; keys and values [L, 1, G, S', D of a head], into which the
  // rows are written at `places` [R], or from `start` on. Row r sees the columns where its mask [R, S] is zero; or, with
  // the parents of the nodes of a tree whose last R they are, all before the tree and its ancestors; or all before it;
  // and always itself. `first_normed` [R, E]: what the first layer's q, k and v read, in place of norm(x).
  // Returns features [R, taps * D] and, of the rows from `first_kept` on, logits [R', V], in fp32 if `wide`.
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& inputs, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& keys,
      const at::Tensor& values, int64_t start, const std::optional<at::Tensor>& places,
      const std::optional<at::Tensor>& mask, const std::optional<std::vector<int64_t>>& parents,
      const std::optional<at::Tensor>& first_normed, const std::vector<int64_t>& taps, int64_t first_kept,
      bool with_logits, bool wide) const {
    TORCH_CHECK(cos.dim() == 2 && cos.size(0) == inputs.size(0), "cos and sin must be [R, at most the head size]");
    return run_rows(
        inputs, cos, sin, nullptr, keys, values, start, places, mask, parents, first_normed, taps, first_kept,
        with_logits, wide);
  }

  std::tuple<at::Tensor, at::Tensor> run_rows(
      const at::Tensor& inputs, const at::Tensor& cos, const at::Tensor& sin, const int64_t* angle_rows,
      const at::Tensor& keys, const at::Tensor& values, int64_t start, const std::optional<at::Tensor>& places,
      const std::optional<at::Tensor>& mask, const std::optional<std::vector<int64_t>>& parents,
      const std::optional<at::Tensor>& first_normed, const std::vector<int64_t>& taps, int64_t first_kept,
      bool with_logits, bool wide, const at::Tensor* read = nullptr) const {
    TORCH_CHECK(!layers.empty(), "there is no layer");
    const auto dtype = layers[0].projections[0].packed.scalar_type();
    const int64_t rows = inputs.size(0), columns = mask ? mask->size(1) : start + rows;
    TORCH_CHECK(inputs.dim() == 2 && inputs.size(1) == hidden_size, "rows must be [R, hidden size]");
    TORCH_CHECK(rows > 0 && first_kept >= 0 && first_kept <= rows, "no such rows");
    TORCH_CHECK(inputs.is_contiguous(), "rows must be contiguous");
    TORCH_CHECK(
        cos.dim() == 2 && cos.sizes() == sin.sizes() && cos.size(1) <= head_size && cos.size(1) % 2 == 0 &&
            cos.stride(1) == 1 && sin.stride(1) == 1,
        "cos and sin must be [R, at most the head size]");
    for (const auto* cache : {&keys, &values}) {
      TORCH_CHECK(
          cache->dim() == 5 && cache->size(0) == static_cast<int64_t>(layers.size()) && cache->size(1) == 1 &&
              cache->size(2) == kv_heads && cache->size(4) == head_size && cache->stride(4) == 1,
          "keys and values must be [layers, 1, key-value heads, columns, head size]");
      TORCH_CHECK(
          columns <= cache->size(3) && start >= 0 && (places || start + rows <= cache->size(3)), "the cache is full");
    }
    TORCH_CHECK(
        !places || (mask && places->numel() == rows && places->scalar_type() == at::kLong && places->is_contiguous()),
        "places must be [R] int64, with a mask");
    TORCH_CHECK(!mask || (mask->dim() == 2 && mask->size(0) == rows && mask->size(1) > 0 && mask->stride(1) == 1), "mask must be [R, S]");
    for (const auto* each : {&inputs, &cos, &sin, &keys, &values})
      TORCH_CHECK(each->scalar_type() == dtype, "rows, angles, cache and weights differ in dtype");
    TORCH_CHECK(!mask || mask->scalar_type() == dtype, "the mask has another dtype");
    TORCH_CHECK(
        !first_normed || (first_normed->dim() == 2 && first_normed->size(0) == rows && first_normed->is_contiguous() &&
                          first_normed->scalar_type() == dtype &&
                          first_normed->size(1) == layers[0].projections[QUERY].inputs),
        "the first layer's input has another size");
    TORCH_CHECK(
        first_normed || (layers[0].norms[INPUT_NORM].defined() && layers[0].projections[QUERY].inputs == hidden_size),
        "the first layer has no norm");
    TORCH_CHECK(!with_logits || head.packed.defined(), "there is no head");
    for (const int64_t tap : taps) TORCH_CHECK(tap >= -1 && tap <= static_cast<int64_t>(layers.size()), "there is no such layer to read features of");
    if (parents) {
      const int64_t nodes = static_cast<int64_t>(parents->size());
      TORCH_CHECK(!mask && nodes >= rows && start >= nodes - rows, "a tree needs a parent for each row, and no mask");
      for (int64_t node = 0; node < nodes; ++node)
        TORCH_CHECK((*parents)[node] < node, "a node of a tree comes before its parent");
    }
    if (places) {
      const auto* of = places->const_data_ptr<int64_t>();
      for (int64_t row = 0; row < rows; ++row)
        TORCH_CHECK(of[row] >= 0 && of[row] < keys.size(3), "the cache is full");
    }
    auto features = at::empty({rows, static_cast<int64_t>(taps.size()) * hidden_size}, inputs.options());
    auto logits = at::empty(
        {with_logits ? rows - first_kept : 0, with_logits ? head.outputs : 0},
        inputs.options().dtype(wide ? at::kFloat : dtype));
    std::vector<int64_t> counts(rows);  // of the columns that each row sees
    const auto run = [&](auto of) {
      using Dtype = decltype(of);
      using Element = typename Dtype::Element;
      const auto at_of = [](const at::Tensor& tensor) { return static_cast<const Element*>(tensor.const_data_ptr()); };
      const auto into = [](const at::Tensor& tensor) { return static_cast<Element*>(tensor.mutable_data_ptr()); };
      const int64_t width = padded(hidden_size), of_heads = padded(heads * head_size), of_kv = padded(kv_heads * head_size);
      int64_t mlp_size = 0;
      for (const Layer& layer : layers) mlp_size = std::max(mlp_size, layer.projections[GATE].outputs);
      const auto scratch = at::empty({rows * (2 * width + 2 * of_heads + 2 * of_kv + padded(mlp_size))}, inputs.options());
      Element* stream = into(scratch);
      Element* queries = stream + rows * width;
      Element* fresh = queries + rows * of_heads;
      Element* attended = fresh + 2 * rows * of_kv;
      Element* activated = attended + rows * of_heads;
      Element* finals = activated + rows * padded(mlp_size);
      for (int64_t row = 0; row < rows; ++row) {
        const auto* from = at_of(inputs) + row * hidden_size;
        std::copy(from, from + hidden_size, stream + row * width);
        std::fill(stream + row * width + hidden_size, stream + (row + 1) * width, Element{});
      }
      std::vector<int32_t> seen(rows * columns);
      const int64_t products = PRODUCTS_OF_LAYER * static_cast<int64_t>(layers.size()) + 2;  // and the fusion, the head
      std::vector<std::atomic<int64_t>> taken(most_threads() * products);
      Forward<Dtype> forward{
          layers, rows, heads, kv_heads, head_size, width, hidden_size, mlp_size, cos.size(1), columns, first_kept,
          static_cast<float>(eps), static_cast<float>(scale), at_of(cos), at_of(sin), angle_rows,
          mask ? at_of(*mask) : nullptr, first_normed ? at_of(*first_normed) : nullptr, mask ? mask->stride(0) : 0,
          cos.stride(0), sin.stride(0), first_normed ? first_normed->size(1) : 0, parents ? &*parents : nullptr, places ? places->const_data_ptr<int64_t>() : nullptr, start,
          into(keys), into(values), keys.stride(0), values.stride(0), keys.stride(2), values.stride(2), keys.stride(3),
          values.stride(3), taps, into(features), final_norm.defined() ? at_of(final_norm) : nullptr,
          with_logits ? head.weight<Dtype>() : Weight<Dtype>{}, wide ? nullptr : into(logits),
          wide && with_logits ? logits.mutable_data_ptr<float>() : nullptr, stream, queries, fresh, attended, activated,
          finals, seen.data(), counts.data(), read ? at_of(*read) : nullptr, read ? read->size(0) : 0,
          read ? fusion.weight<Dtype>() : Weight<Dtype>{}, fusion_adds_last, taken.data(), products};
#ifdef _OPENMP
#pragma omp parallel
      forward.run(omp_get_thread_num(), omp_get_num_threads());
#else
      forward.run(0, 1);
#endif
    };
    dtype == at::kBFloat16 ? run(BFloat16{}) : run(Float32{});
    for (const int64_t count : counts) TORCH_CHECK(count > 0, "a row sees nothing");
    return {features, logits};
  }
};

}  // namespace
