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
#include <torch/custom_class.h>

#include <atomic>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#else  // whose pragmas are then ignored
inline int omp_get_max_threads() { return 1; }
inline int omp_get_num_threads() { return 1; }
inline int omp_get_thread_num() { return 0; }
#endif

#include "cpu_math.h"

namespace {

constexpr int64_t padded(int64_t count) { return (count + BLOCK - 1) / BLOCK * BLOCK; }

inline void wait_for_all() {
#pragma omp barrier
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

// Decoding is in fp32 and bf16 alone, whose bytes all code here reads.
inline void check_dtype(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16, "only fp32 and bf16 are supported");
}

// Calls `run` with how a tensor's dtype is computed.
template <class Run>
inline void with_dtype(const at::Tensor& tensor, Run run) {
  check_dtype(tensor);
  tensor.scalar_type() == at::kBFloat16 ? run(BFloat16{}) : run(Float32{});
}

inline void check_head_size(int64_t head_size) {
  TORCH_CHECK(
      head_size > 0 && head_size % LANES == 0 && head_size / LANES <= MOST_PARTS, "head size must be a multiple of ", LANES,
      ", at most ", MOST_PARTS * LANES);
}

// A packed weight (`pack`) and a bias in fp32, or none.
struct Projection {
  at::Tensor packed, bias;
  int64_t outputs = 0, inputs = 0;

  Projection() = default;
  Projection(const at::Tensor& weight, const std::optional<at::Tensor>& added, int64_t outputs, int64_t inputs)
      : packed(weight), outputs(outputs), inputs(inputs) {
    check_dtype(packed);
    const int64_t together = packed.scalar_type() == at::kBFloat16 ? 2 : 1;
    TORCH_CHECK(
        packed.dim() == 4 && outputs > 0 && packed.size(0) == (outputs + BLOCK - 1) / BLOCK && packed.is_contiguous() &&
            packed.size(1) == (inputs + together - 1) / together && packed.size(2) == BLOCK && packed.size(3) == together,
        "a packed weight has another size than ", outputs, " x ", inputs);
    TORCH_CHECK(!added || (added->scalar_type() == at::kFloat && added->numel() == outputs), "a bias must be [outputs] in fp32");
    if (added) bias = added->contiguous();
  }

  template <class Dtype>
  Weight<Dtype> weight() const {
    return {
        static_cast<const typename Dtype::Element*>(packed.const_data_ptr()),
        bias.defined() ? bias.const_data_ptr<float>() : nullptr, outputs, inputs};
  }
};

// rows [R, D] / rms(rows) * weight [D] into `out` [R, D]; in bf16 rounded twice, as transformers' own norms, if `rounds_twice`.
inline void norm_into(const at::Tensor& rows, const at::Tensor& weight, double eps, bool rounds_twice, const at::Tensor& out) {
  const int64_t size = rows.size(1);
  TORCH_CHECK(
      size > 0 && weight.numel() == size && weight.dtype() == rows.dtype() && weight.is_contiguous() && rows.stride(1) == 1 &&
          out.sizes() == rows.sizes() && out.dtype() == rows.dtype(),
      "rows and norm differ");
  with_dtype(rows, [&](auto dtype) {
    using Element = typename decltype(dtype)::Element;
    const auto *from = static_cast<const Element*>(rows.const_data_ptr()), *factors = static_cast<const Element*>(weight.const_data_ptr());
    auto* to = static_cast<Element*>(out.mutable_data_ptr());
    for (int64_t row = 0; row < rows.size(0); ++row, from += rows.stride(0), to += out.stride(0))
      rms_norm<decltype(dtype)>(from, factors, size, static_cast<float>(eps), to, rounds_twice);
  });
}

// rows [R, K] times a packed weight, into `out` [R, N]; all are contiguous.
inline void multiply(const at::Tensor& rows, const Projection& projection, const at::Tensor& out) {
  const int64_t count = rows.size(0), inputs = projection.inputs, outputs = projection.outputs;
  TORCH_CHECK(rows.scalar_type() == projection.packed.scalar_type(), "rows and weight differ in dtype");
  TORCH_CHECK(rows.size(1) == inputs, "rows and weight differ in size");
  with_dtype(rows, [&](auto dtype) {
    using Dtype = decltype(dtype);
    using Element = typename Dtype::Element;
    const Weight<Dtype> weight = projection.weight<Dtype>();
    const auto* from = static_cast<const Element*>(rows.const_data_ptr());
    auto* to = static_cast<Element*>(out.mutable_data_ptr());
    at::parallel_for(0, weight.blocks(), 1, [&](int64_t begin, int64_t end) {
      const Tiles tiles;
      for (int64_t block = begin; block < end; ++block)
        multiply_block(from, count, inputs, weight, block, [&](int64_t row, int v, Floats values) {
          const int64_t first = block * BLOCK + v * LANES;
          store_first<Dtype>(to + row * outputs + first, values, outputs - first);
        });
    });
  });
}

enum { QUERY, KEY, VALUE, OUTPUT, GATE, UP, DOWN, NUM_PROJECTIONS };
constexpr int64_t STOLEN = int64_t{1} << 32, MANY_BYTES = 1 << 19;
constexpr int64_t PRODUCTS_OF_LAYER = 4;  // that threads share: q, k and v; output; gate and up; down
enum { INPUT_NORM, MLP_NORM, QUERY_NORM, KEY_NORM, NUM_NORMS };

struct Layer {
  Projection projections[NUM_PROJECTIONS];
  at::Tensor norms[NUM_NORMS];  // weights; those that a layer has not are undefined
};

// Decoder layers, the final norm of those that have one, and the LM head.
struct Stack {
  int64_t heads, kv_heads, head_size, hidden_size;
  float eps, scale;
  std::vector<Layer> layers;
  at::Tensor final_norm;
  Projection head;

  at::ScalarType dtype() const { return layers[0].projections[0].packed.scalar_type(); }
};

// The rows of one call, and what is wanted of them.
struct Rows {
  at::Tensor inputs;                        // [R, D] in the weights' dtype; or with tokens their table [V, D]
  std::optional<std::vector<int64_t>> tokens;
  at::Tensor cos, sin;                      // [positions, A]
  std::optional<std::vector<int64_t>> positions;  // of the rows, among those of cos and sin; without them row r's is r
  at::Tensor keys, values;                  // [L, 1, G, S', D of a head], into which the rows are written
  int64_t start = 0;                        // the column of the first row, which the others follow
  std::optional<std::vector<int64_t>> parents;  // of the nodes of a tree, of which the rows are the last
  int64_t window = 0;                       // how many positions a row sees, with its own; 0: all
  bool sees_later = false;                  // rows, not of a tree, that see each other
  std::optional<at::Tensor> first_normed;   // [R, E] what the first layer's q, k and v read, in place of norm(x)
  std::vector<int64_t> taps;                // the features: after so many layers, or after the final norm (-1)
  int64_t first_kept = 0;                   // the first row that logits are wanted of
  bool with_logits = true, wide = true;     // wide: in fp32

  int64_t count() const { return tokens ? static_cast<int64_t>(tokens->size()) : inputs.size(0); }
  int64_t columns() const { return start + count(); }
};

// Keys or values of a cache [L, 1, G, S', D].
template <class Element>
struct Held {
  Element* of;
  int64_t layer_stride, head_stride, row_stride;

  explicit Held(const at::Tensor& held)
      : of(static_cast<Element*>(held.mutable_data_ptr())), layer_stride(held.stride(0)), head_stride(held.stride(2)),
        row_stride(held.stride(3)) {}

  Heads<Element> heads(size_t layer) const { return {of + static_cast<int64_t>(layer) * layer_stride, head_stride, row_stride}; }
};

// A call's forward, which all threads run together.
template <class Dtype>
struct Forward {
  using Element = typename Dtype::Element;

  const Stack& stack;
  const Rows& call;
  const int64_t rows, columns, heads, head_size, hidden_size, width, of_heads, of_kv_heads, mlp_size;  // padded to blocks
  const Weight<Dtype> head;
  const Held<Element> keys, values;
  const Heads<const Element> cos, sin;  // of one head
  Element* const features;
  void* const logits;
  // Memory of this forward. Rows are as far apart as blocks are wide.
  const at::Tensor scratch;
  Element *stream, *queries, *fresh, *attended, *activated, *finals;
  std::vector<int32_t> seen;    // [R, S] the columns that a row sees
  std::vector<int64_t> counts;  // [R] how many these are
  const int64_t products;
  std::vector<std::atomic<int64_t>> taken;  // [threads, products] how many of a thread's blocks have been taken

  Forward(const Stack& stack, const Rows& call, const at::Tensor& features, const at::Tensor& logits)
      : stack(stack), call(call), rows(call.count()), columns(call.columns()), heads(stack.heads),
        head_size(stack.head_size), hidden_size(stack.hidden_size), width(padded(hidden_size)),
        of_heads(padded(heads * head_size)), of_kv_heads(padded(stack.kv_heads * head_size)), mlp_size(widest(stack)),
        head(call.with_logits ? stack.head.weight<Dtype>() : Weight<Dtype>{}), keys(call.keys), values(call.values),
        cos{at_of(call.cos), 0, call.cos.stride(0)}, sin{at_of(call.sin), 0, call.sin.stride(0)},
        features(into(features)), logits(logits.mutable_data_ptr()),
        scratch(at::empty({rows * (2 * width + 2 * of_heads + 2 * of_kv_heads + mlp_size)}, call.inputs.options())),
        stream(into(scratch)), queries(stream + rows * width), fresh(queries + rows * of_heads),
        attended(fresh + 2 * rows * of_kv_heads), activated(attended + rows * of_heads),
        finals(activated + rows * mlp_size), seen(rows * columns), counts(rows),
        products(PRODUCTS_OF_LAYER * static_cast<int64_t>(stack.layers.size()) + 1), taken(omp_get_max_threads() * products) {
    for (int64_t row = 0; row < rows; ++row) {
      const auto* from = at_of(call.inputs) + (call.tokens ? (*call.tokens)[row] : row) * hidden_size;
      std::copy(from, from + hidden_size, stream + row * width);
      std::fill(stream + row * width + hidden_size, stream + (row + 1) * width, Element{});
    }
  }

  static const Element* at_of(const at::Tensor& tensor) { return static_cast<const Element*>(tensor.const_data_ptr()); }
  static Element* into(const at::Tensor& tensor) { return static_cast<Element*>(tensor.mutable_data_ptr()); }

  static int64_t widest(const Stack& stack) {
    int64_t most = 0;
    for (const Layer& layer : stack.layers) most = std::max(most, padded(layer.projections[GATE].outputs));
    return most;
  }

  // Calls `run(i)` for each i of `count`, by one of the threads: a thread begins with its own part and goes on with what
  // others have left of theirs. If the product's weights have few bytes, asking takes longer than waiting.
  template <class Run>
  void share(int64_t product, int64_t count, int64_t bytes, int64_t thread, int64_t threads, Run run) {
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

  void run(int64_t thread, int64_t threads) {
    const Tiles tiles;
    const int64_t input_width = call.first_normed ? call.first_normed->size(1) : width;
    std::vector<Element> normed(rows * padded(std::max(hidden_size, input_width)));
    typename Attention<Dtype>::Scratch scratch(attention(0, 0));
    std::vector<float> gates(rows * BLOCK);
    std::vector<int64_t> common;
    const auto [first_row, end_row] = part_of(rows, thread, threads);
    for (int64_t row = first_row; row < end_row; ++row) see(row);
    for (size_t index = 0; index < stack.layers.size(); ++index) {
      const Layer& layer = stack.layers[index];
      copy_tap(static_cast<int64_t>(index), stream, first_row, end_row);
      const int64_t product = static_cast<int64_t>(index) * PRODUCTS_OF_LAYER;
      const bool is_given = index == 0 && call.first_normed;
      const int64_t first = first_wanted(index);
      if (!is_given) norm_from(0, layer.norms[INPUT_NORM], normed.data());
      const Element* input = is_given ? at_of(*call.first_normed) : normed.data();
      project_heads(layer, index, first, input, is_given ? input_width : width, product, thread, threads);
      wait_for_all();
      if (index == 0) common = attention(0, 0).count_common();
      const auto [first_reader, end_reader] = part_of((rows - first) * heads, thread, threads);
      attention(index, first).run(first_reader, end_reader, common.data() + first, scratch);
      wait_for_all();
      add_product(layer.projections[OUTPUT], first, attended, of_heads, product + 1, thread, threads);
      wait_for_all();
      norm_from(first, layer.norms[MLP_NORM], normed.data());
      activate(layer, first, normed.data(), gates.data(), product + 2, thread, threads);
      wait_for_all();
      add_product(layer.projections[DOWN], first, activated, mlp_size, product + 3, thread, threads);
      wait_for_all();
    }
    copy_tap(static_cast<int64_t>(stack.layers.size()), stream, first_row, end_row);
    for (int64_t row = first_row; row < end_row; ++row) {
      const Element* from = stream + row * width;
      if (stack.final_norm.defined())
        rms_norm<Dtype>(from, at_of(stack.final_norm), hidden_size, stack.eps, finals + row * width);
      else  // EAGLE's
        std::copy(from, from + hidden_size, finals + row * width);
    }
    copy_tap(-1, finals, first_row, end_row);
    if (!head.packed) return;
    wait_for_all();
    const Element* kept = finals + call.first_kept * width;
    share(products - 1, head.blocks(), head.bytes(), thread, threads, [&](int64_t block) {
      multiply_block(kept, rows - call.first_kept, width, head, block, [&](int64_t row, int v, Floats values) {
        const int64_t n = block * BLOCK + v * LANES, to = row * head.outputs + n;
        if (call.wide)
          store_first<Float32>(static_cast<float*>(logits) + to, values, head.outputs - n);
        else
          store_first<Dtype>(static_cast<Element*>(logits) + to, values, head.outputs - n);
      });
    });
  }

  // The columns that a row sees: all before a tree, its ancestors and itself; or all up to itself, or to the last row. Those
  // outside its window are left out; a node's position is that of its depth.
  void see(int64_t row) {
    const int64_t earlier = call.parents ? static_cast<int64_t>(call.parents->size()) - rows : 0, first = call.start - earlier;
    const auto parent_of = [&](int64_t node) { return (*call.parents)[node]; };
    int64_t position = call.start + row;
    if (call.parents) {
      position = first;
      for (int64_t node = parent_of(earlier + row); node >= 0; node = parent_of(node)) ++position;
    }
    const int64_t lowest = call.window > 0 ? std::max<int64_t>(position - call.window + 1, 0) : 0;
    const int64_t end = call.parents ? first : call.sees_later ? columns : position + 1;
    int32_t* const to = seen.data() + row * columns;
    int32_t* last = to + std::max<int64_t>(end - lowest, 0);
    std::iota(to, last, static_cast<int32_t>(lowest));
    if (call.parents) {
      int32_t* const begin = last;
      for (int64_t node = earlier + row; node >= 0 && position >= lowest; node = parent_of(node), --position)
        *last++ = static_cast<int32_t>(first + node);
      std::reverse(begin, last);
    }
    counts[row] = last - to;
  }

  // The first row of which a layer's output is read: of the last layer's, where no features are, by the head alone. Of the
  // rows before it, a prompt's in a drafter of one layer, keys and values are all that is needed.
  int64_t first_wanted(size_t index) const {
    const int64_t last = static_cast<int64_t>(stack.layers.size());
    const auto is_last = [&](int64_t tap) { return tap < 0 || tap == last; };
    const bool by_features = std::any_of(call.taps.begin(), call.taps.end(), is_last);
    return static_cast<int64_t>(index) + 1 == last && head.packed && !by_features ? call.first_kept : 0;
  }

  // Of the rows from `first` on, by every thread for itself: less than waiting once more.
  void norm_from(int64_t first, const at::Tensor& norm, Element* to) const {
    for (int64_t row = first; row < rows; ++row)
      rms_norm<Dtype>(stream + row * width, at_of(norm), hidden_size, stack.eps, to + row * width);
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
      if (norm.defined()) rms_norm<Dtype>(from, at_of(norm), head_size, stack.eps, from);
      const int64_t angle = call.positions ? (*call.positions)[row] : row;
      rotate<Dtype>(from, cos.at(0, angle), sin.at(0, angle), call.cos.size(1));
    }
    if (kind == QUERY) return;
    std::copy(from, from + head_size, (kind == KEY ? keys : values).heads(index).at(head, call.start + row));
  }

  Attention<Dtype> attention(size_t index, int64_t first) const {
    return {
        .query = {queries + first * of_heads, head_size, of_heads},
        .keys = keys.heads(index),
        .values = values.heads(index),
        .out = {attended + first * of_heads, head_size, of_heads},
        .rows = rows - first,
        .heads = heads,
        .kv_heads = stack.kv_heads,
        .head_size = head_size,
        .columns = columns,
        .seen = seen.data() + first * columns,
        .counts = counts.data() + first,
        .scale = stack.scale};
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
        Dtype::store(activated + (first + row) * mlp_size + block * BLOCK + v * LANES, gated);
      });
    });
  }

  // Copies rows into the features [R, taps * D]: the residual stream before a layer, or after the final norm (-1).
  void copy_tap(int64_t wanted, const Element* from, int64_t first_row, int64_t end_row) const {
    const size_t taps = call.taps.size();
    for (size_t tap = 0; tap < taps; ++tap)
      if (call.taps[tap] == wanted)
        for (int64_t row = first_row; row < end_row; ++row)
          std::copy(from + row * width, from + row * width + hidden_size, features + (row * taps + tap) * hidden_size);
  }
};

// Decoder layers, final norm and LM head, with packed weights (`pack`).
struct DecoderLayers : torch::CustomClassHolder, Stack {
  DecoderLayers(int64_t heads, int64_t kv_heads, int64_t head_size, int64_t hidden_size, double eps, double scale)
      : Stack{heads, kv_heads, head_size, hidden_size, static_cast<float>(eps), static_cast<float>(scale)} {
    TORCH_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "query heads must be a multiple of key-value heads");
    check_head_size(head_size);
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
    for (int i = 0; i < NUM_PROJECTIONS; ++i) layer.projections[i] = {packed[i], biases[i], sizes[i][0], sizes[i][1]};
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
    TORCH_CHECK(layers.empty() || dtype() == packed[0].scalar_type(), "layers differ in dtype");
    layers.push_back(layer);
  }

  // The final norm, of layers that have one, and the head's packed weight.
  void set_head(
      const std::optional<at::Tensor>& norm, const std::optional<at::Tensor>& packed,
      const std::optional<at::Tensor>& bias, int64_t outputs) {
    TORCH_CHECK(!layers.empty(), "there is no layer");
    TORCH_CHECK(!norm || norm->numel() == hidden_size, "the final norm has another size");
    TORCH_CHECK(
        (!norm || norm->scalar_type() == dtype()) && (!packed || packed->scalar_type() == dtype()),
        "layers, final norm and head differ in dtype");
    if (norm) final_norm = norm->contiguous();
    if (packed) head = {*packed, bias, outputs, hidden_size};
  }

  // Features [R, taps * D], and logits [R', V] of the rows from `first_kept` on. Arguments in the order of `Rows`.
  std::tuple<at::Tensor, at::Tensor> forward(
      const at::Tensor& inputs, const std::optional<std::vector<int64_t>>& tokens, const at::Tensor& cos, const at::Tensor& sin,
      const std::optional<std::vector<int64_t>>& positions, const at::Tensor& keys, const at::Tensor& values, int64_t start,
      const std::optional<std::vector<int64_t>>& parents, int64_t window, bool sees_later,
      const std::optional<at::Tensor>& first_normed, const std::vector<int64_t>& taps, int64_t first_kept, bool with_logits,
      bool wide) const {
    const Rows call{
        inputs, tokens, cos, sin, positions, keys, values, start, parents, window, sees_later, first_normed, taps, first_kept,
        with_logits, wide};
    check(call);
    const int64_t rows = call.count();
    auto features = at::empty({rows, static_cast<int64_t>(taps.size()) * hidden_size}, inputs.options());
    auto logits = at::empty(
        {with_logits ? rows - first_kept : 0, with_logits ? head.outputs : 0}, inputs.options().dtype(wide ? at::kFloat : dtype()));
    with_dtype(inputs, [&](auto of) {
      Forward<decltype(of)> forward(*this, call, features, logits);
#pragma omp parallel
      forward.run(omp_get_thread_num(), omp_get_num_threads());
    });
    return {features, logits};
  }

  void check(const Rows& call) const {
    TORCH_CHECK(!layers.empty(), "there is no layer");
    TORCH_CHECK(call.inputs.dim() == 2 && call.inputs.size(1) == hidden_size, "rows must be [R, hidden size]");
    const int64_t rows = call.count();
    TORCH_CHECK(rows > 0 && call.first_kept >= 0 && call.first_kept <= rows, "no such rows");
    TORCH_CHECK(call.inputs.is_contiguous(), "rows must be contiguous");
    if (call.tokens)
      for (const int64_t token : *call.tokens)
        TORCH_CHECK(token >= 0 && token < call.inputs.size(0), "token ", token, " is not in the vocabulary");
    TORCH_CHECK(
        call.cos.dim() == 2 && call.cos.sizes() == call.sin.sizes() && call.cos.size(1) <= head_size &&
            call.cos.size(1) % 2 == 0 && call.cos.stride(1) == 1 && call.sin.stride(1) == 1,
        "cos and sin must be [positions, at most the head size]");
    const int64_t angles = call.cos.size(0);
    TORCH_CHECK(call.positions ? static_cast<int64_t>(call.positions->size()) == rows : angles == rows, "every row needs a position");
    if (call.positions)
      for (const int64_t position : *call.positions)
        TORCH_CHECK(position >= 0 && position < angles, "position ", position, " has no angles");
    for (const auto* cache : {&call.keys, &call.values}) {
      TORCH_CHECK(
          cache->dim() == 5 && cache->size(0) == static_cast<int64_t>(layers.size()) && cache->size(1) == 1 &&
              cache->size(2) == kv_heads && cache->size(4) == head_size && cache->stride(4) == 1,
          "keys and values must be [layers, 1, key-value heads, columns, head size]");
      TORCH_CHECK(call.start >= 0 && call.start <= cache->size(3) - rows, "the cache is full");
    }
    for (const auto* each : {&call.inputs, &call.cos, &call.sin, &call.keys, &call.values})
      TORCH_CHECK(each->scalar_type() == dtype(), "rows, angles, cache and weights differ in dtype");
    const int64_t first_width = layers[0].projections[QUERY].inputs;
    if (call.first_normed) {
      const at::Tensor& first = *call.first_normed;
      TORCH_CHECK(
          first.dim() == 2 && first.size(0) == rows && first.size(1) == first_width && first.is_contiguous() &&
              first.scalar_type() == dtype(),
          "the first layer's input has another size");
    }
    TORCH_CHECK(
        call.first_normed || (layers[0].norms[INPUT_NORM].defined() && first_width == hidden_size),
        "the first layer has no norm");
    TORCH_CHECK(!call.with_logits || head.packed.defined(), "there is no head");
    for (const int64_t tap : call.taps)
      TORCH_CHECK(tap >= -1 && tap <= static_cast<int64_t>(layers.size()), "there is no such layer to read features of");
    if (call.parents) {
      const int64_t nodes = static_cast<int64_t>(call.parents->size());
      TORCH_CHECK(nodes >= rows && call.start >= nodes - rows && !call.sees_later, "a tree needs a parent for each row");
      for (int64_t node = 0; node < nodes; ++node)
        TORCH_CHECK((*call.parents)[node] < node, "a node of a tree comes before its parent");
    }
  }
};

}  // namespace
