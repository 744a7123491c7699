// Decoding on a CPU: products of a few rows with a packed weight, and attention of a few rows over a KV cache.
//
// A step of decoding reads every weight once; what it costs should be that reading. torch's own products of few rows
// reach a third of it, and the micro-kernel of inductor's C++ template, compiled by GCC, stores its accumulators to
// memory in every iteration from five rows on (torch 2.13, cpp_micro_gemm.py, CppMicroGemmFP32Vec). Here accumulators
// stay in registers.
//
// Each result is summed in an order that depends neither on how many rows there are nor on where in the cache a token
// lies: a token gives the same bits alone, in a draft tree and in a batch.
//
// Shapes: R rows, N outputs, K inputs, H query heads, G key-value heads, S columns of the cache, D head size.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// Lanes of a vector, vectors of a block of outputs, and rows whose sums fit into the registers beside them.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16, MOST_ROWS = 12;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, MOST_ROWS = 5;
#else
constexpr int64_t LANES = 4, MOST_ROWS = 5;
#endif
constexpr int64_t VECTORS = 2, BLOCK = VECTORS * LANES;
constexpr int MOST_PARTS = 16, MOST_HEADS = 3;  // vectors of a head; heads that read keys and values together

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));

inline Floats broadcast(float value) { return Floats{} + value; }
inline float sum(Floats values) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)values);
#else
  float total = 0;
  for (int64_t lane = 0; lane < LANES; ++lane) total += values[lane];
  return total;
#endif
}

// How a dtype is stored, and multiplied into fp32 sums. PACK inputs of one output lie together.
struct Float32 {
  using Element = float;
  static constexpr int64_t PACK = 1;
  static float widen(Element value) { return value; }
  static Floats load(const Element* from) { return *reinterpret_cast<const Floats*>(from); }
  static void store(Element* to, Floats values) { std::memcpy(to, &values, sizeof values); }
  using Input = Floats;
  static Input input(const Element* row, int64_t k, int64_t) { return broadcast(row[k]); }
  static Floats add_product(Floats sums, Input input, const Element* weights) { return sums + input * load(weights); }
};

struct BFloat16 {
  using Element = uint16_t;
  static constexpr int64_t PACK = 2;
  static float widen(Element value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
  }
  static void store(Element* to, Floats values) {  // to the nearest, ties to even; what is not a number stays so
    Words bits;
    std::memcpy(&bits, &values, sizeof bits);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words nearest = (bits & 0x7fffffffu) > 0x7f800000u ? Words{} + 0x7fc0u : rounded;
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector(nearest, Halves);
  }
  static Floats load(const Element* from) {
    const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words) << 16;
    return reinterpret_cast<const Floats&>(wide);
  }
  static uint32_t pair(const Element* row, int64_t k, int64_t inputs) {
    return row[k] | (k + 1 < inputs ? static_cast<uint32_t>(row[k + 1]) << 16 : 0u);
  }
#ifdef __AVX512BF16__
  using Input = __m512bh;
  static Input input(const Element* row, int64_t k, int64_t inputs) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair(row, k, inputs)));
  }
  static Floats add_product(Floats sums, Input input, const Element* weights) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, input, (__m512bh)_mm512_loadu_si512(weights));
  }
#else
  struct Input {
    Floats even, odd;
  };
  static Input input(const Element* row, int64_t k, int64_t inputs) {
    return {broadcast(widen(row[k])), broadcast(k + 1 < inputs ? widen(row[k + 1]) : 0.0f)};
  }
  static Floats add_product(Floats sums, Input input, const Element* weights) {
    const Words both = *reinterpret_cast<const Words*>(weights);
    const Words even = both << 16, odd = both & 0xffff0000u;
    sums += input.even * reinterpret_cast<const Floats&>(even);
    return sums + input.odd * reinterpret_cast<const Floats&>(odd);
  }
#endif
};

// One block of outputs for ROWS rows.
template <class Dtype, int ROWS>
inline void product_of_rows(
    const typename Dtype::Element* __restrict__ rows, int64_t row_stride, const typename Dtype::Element* __restrict__ weights,
    const float* bias, int64_t inputs, typename Dtype::Element* __restrict__ out, int64_t out_stride, int64_t outputs) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) sums[row][v] = Floats{};
  for (int64_t k = 0; k < inputs; k += Dtype::PACK) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
      const auto input = Dtype::input(rows + row * row_stride, k, inputs);
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v)
        sums[row][v] = Dtype::add_product(sums[row][v], input, weights + v * LANES * Dtype::PACK);
    }
    weights += BLOCK * Dtype::PACK;
  }
  Floats added[VECTORS];
  for (int v = 0; v < VECTORS; ++v) {
    float values[LANES] = {};
    for (int64_t n = v * LANES; bias && n < std::min(outputs, (v + 1) * LANES); ++n) values[n - v * LANES] = bias[n];
    added[v] = Float32::load(values);
  }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) {
    typename Dtype::Element* to = out + row * out_stride;
    typename Dtype::Element last[BLOCK];  // of the last block, which may be wider than what is left of the row
    typename Dtype::Element* whole = outputs == BLOCK ? to : last;
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) Dtype::store(whole + v * LANES, sums[row][v] + added[v]);
    if (whole == last) std::copy(last, last + outputs, to);
  }
}

template <class Dtype, int ROWS>
inline void product_of_at_most(
    int64_t count, const typename Dtype::Element* rows, int64_t row_stride, const typename Dtype::Element* weights,
    const float* bias, int64_t inputs, typename Dtype::Element* out, int64_t out_stride, int64_t outputs) {
  if (count == ROWS)
    product_of_rows<Dtype, ROWS>(rows, row_stride, weights, bias, inputs, out, out_stride, outputs);
  else if constexpr (ROWS > 1)
    product_of_at_most<Dtype, ROWS - 1>(count, rows, row_stride, weights, bias, inputs, out, out_stride, outputs);
}

// rows [R, K], packed [blocks, K / PACK, BLOCK, PACK], bias [N] or nothing, out [R, N].
template <class Dtype>
void multiply(
    const typename Dtype::Element* rows, int64_t num_rows, int64_t row_stride, const typename Dtype::Element* packed,
    const float* bias, int64_t inputs, typename Dtype::Element* out, int64_t outputs) {
  const int64_t blocks = (outputs + BLOCK - 1) / BLOCK;
  const int64_t block_elements = (inputs + Dtype::PACK - 1) / Dtype::PACK * Dtype::PACK * BLOCK;
  const int64_t parts = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * BLOCK;
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t from = part * num_rows / parts, to = (part + 1) * num_rows / parts;
        product_of_at_most<Dtype, MOST_ROWS>(
            to - from, rows + from * row_stride, row_stride, packed + block * block_elements,
            bias ? bias + first : nullptr, inputs, out + from * outputs + first, outputs, std::min(BLOCK, outputs - first));
      }
    }
  });
}

// 2 ** x for x <= 0, to the last bit or two: a polynomial on [-1/2, 1/2], and the exponent's bits.
inline Floats power_of_two(Floats x) {
  const Floats lowest = broadcast(-126.0f);
  x = x < lowest ? lowest : x;  // what is not a number stays so
  const Ints whole = __builtin_convertvector(x - 0.5f, Ints);  // towards zero: the nearest, of what is below zero
  const Floats rest = x - __builtin_convertvector(whole, Floats);
  Floats value = broadcast(1.535336188319500e-4f);
  value = value * rest + 1.339887440266574e-3f;
  value = value * rest + 9.618437357674640e-3f;
  value = value * rest + 5.550332471162809e-2f;
  value = value * rest + 2.402264791363012e-1f;
  value = value * rest + 6.931472028550421e-1f;
  value = value * rest + 1.0f;
  const Ints bits = (whole + 127) << 23;
  return value * reinterpret_cast<const Floats&>(bits);
}

// The sums of four vectors, each in the same order wherever it stands.
inline void sum_four(const Floats (&of)[4], float* to) {
#ifdef __AVX512F__
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps((__m512)of[0], (__m512)of[1]), _mm512_unpackhi_ps((__m512)of[0], (__m512)of[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps((__m512)of[2], (__m512)of[3]), _mm512_unpackhi_ps((__m512)of[2], (__m512)of[3]));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 halves = _mm256_add_ps(
      _mm512_castps512_ps256(quarters), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(quarters), 1)));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#else
  for (int i = 0; i < 4; ++i) to[i] = sum(of[i]);
#endif
}

// One row of a few heads that share keys and values, over the columns that it sees, in their order. PARTS: D / LANES.
template <class Dtype, int PARTS, int HEADS>
void attend(
    const typename Dtype::Element* query, int64_t head_stride, const typename Dtype::Element* keys,
    const typename Dtype::Element* values, int64_t key_stride, int64_t value_stride, const int32_t* seen, int64_t count,
    float scale, float* scores, int64_t score_stride, typename Dtype::Element* out) {
  constexpr float LOG2_E = 1.4426950408889634f;
  Floats parts[HEADS][PARTS];
  for (int head = 0; head < HEADS; ++head)
    for (int p = 0; p < PARTS; ++p)
      parts[head][p] = Dtype::load(query + head * head_stride + p * LANES) * (scale * LOG2_E);
  for (int64_t n = 0; n < count; n += 4) {
    Floats sums[HEADS][4] = {};
    for (int i = 0; i < 4; ++i) {
      const typename Dtype::Element* key = keys + seen[std::min(n + i, count - 1)] * key_stride;
#pragma GCC unroll 16
      for (int p = 0; p < PARTS; ++p) {
        const Floats part = Dtype::load(key + p * LANES);
#pragma GCC unroll 4
        for (int head = 0; head < HEADS; ++head) sums[head][i] += parts[head][p] * part;
      }
    }
    for (int head = 0; head < HEADS; ++head) sum_four(sums[head], scores + head * score_stride + n);
  }
  Floats whole[HEADS];
  const int64_t padded = (count + LANES - 1) / LANES * LANES;
  for (int head = 0; head < HEADS; ++head) {
    float* of = scores + head * score_stride;
    std::fill(of + count, of + padded, -INFINITY);
    Floats most = Float32::load(of);
    for (int64_t n = LANES; n < padded; n += LANES) {
      const Floats next = Float32::load(of + n);
      most = most > next ? most : next;
    }
    float largest = most[0];
    for (int64_t lane = 1; lane < LANES; ++lane) largest = std::max(largest, most[lane]);
    Floats total = {};
    for (int64_t n = 0; n < padded; n += LANES) {
      const Floats score = Float32::load(of + n);
      const Floats share = score == broadcast(-INFINITY) ? Floats{} : power_of_two(score - largest);
      total += share;
      std::memcpy(of + n, &share, sizeof share);
    }
    whole[head] = broadcast(sum(total));
  }
  Floats mixed[HEADS][PARTS] = {};
  for (int64_t n = 0; n < count; ++n) {
    const typename Dtype::Element* value = values + seen[n] * value_stride;
#pragma GCC unroll 16
    for (int p = 0; p < PARTS; ++p) {
      const Floats part = Dtype::load(value + p * LANES);
#pragma GCC unroll 4
      for (int head = 0; head < HEADS; ++head) mixed[head][p] += broadcast(scores[head * score_stride + n]) * part;
    }
  }
  for (int head = 0; head < HEADS; ++head)
    for (int p = 0; p < PARTS; ++p) Dtype::store(out + (head * PARTS + p) * LANES, mixed[head][p] / whole[head]);
}

template <class Dtype, int PARTS, int HEADS, class... Arguments>
void attend_heads(int64_t heads, Arguments... arguments) {
  if (heads == HEADS)
    attend<Dtype, PARTS, HEADS>(arguments...);
  else if constexpr (HEADS > 1)
    attend_heads<Dtype, PARTS, HEADS - 1>(heads, arguments...);
}

template <class Dtype, int PARTS, class... Arguments>
void attend_parts(int64_t parts, int64_t heads, Arguments... arguments) {
  if (parts == PARTS)
    attend_heads<Dtype, PARTS, MOST_HEADS>(heads, arguments...);
  else if constexpr (PARTS > 1)
    attend_parts<Dtype, PARTS - 1>(parts, heads, arguments...);
}

template <class Dtype>
void attend_all(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const std::vector<int32_t>& seen,
    const std::vector<int64_t>& counts, double scale, at::Tensor& out) {
  using Element = typename Dtype::Element;
  const int64_t heads = query.size(1), rows = query.size(2), head_size = query.size(3), columns = keys.size(2);
  const int64_t shared = heads / keys.size(1), tiles = (shared + MOST_HEADS - 1) / MOST_HEADS;
  const auto at_of = [](const at::Tensor& tensor) { return static_cast<const Element*>(tensor.const_data_ptr()); };
  auto* to = static_cast<Element*>(out.data_ptr());
  at::parallel_for(0, keys.size(1) * tiles * rows, 1, [&](int64_t begin, int64_t end) {
    const int64_t score_stride = columns + LANES;
    std::vector<float> scores(MOST_HEADS * score_stride);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t key_head = task / (rows * tiles), tile = task / rows % tiles, row = task % rows;
      const int64_t from = tile * shared / tiles, head = key_head * shared + from;
      attend_parts<Dtype, MOST_PARTS>(
          head_size / LANES, (tile + 1) * shared / tiles - from,
          at_of(query) + head * query.stride(1) + row * query.stride(2), query.stride(1),
          at_of(keys) + key_head * keys.stride(1), at_of(values) + key_head * values.stride(1), keys.stride(2),
          values.stride(2), seen.data() + row * columns, counts[row], static_cast<float>(scale), scores.data(),
          score_stride, to + (row * heads + head) * head_size);
    }
  });
}

template <class Dtype>
void find_seen(const at::Tensor& mask, int64_t row, int64_t columns, std::vector<int32_t>& seen, int64_t& count) {
  const auto* of = static_cast<const typename Dtype::Element*>(mask.const_data_ptr()) + row * mask.stride(2);
  int32_t* to = seen.data() + row * columns;
  for (int64_t column = 0; column < columns; ++column) {
    to[count] = static_cast<int32_t>(column);
    count += Dtype::widen(of[column]) == 0.0f;
  }
}

// packed [blocks, K / PACK, BLOCK, PACK] of a weight [N, K]; what is not there is zero.
at::Tensor pack(const at::Tensor& weight) {
  const auto from = weight.contiguous();
  const int64_t outputs = from.size(0), inputs = from.size(1), together = from.scalar_type() == at::kBFloat16 ? 2 : 1;
  const int64_t blocks = (outputs + BLOCK - 1) / BLOCK, packs = (inputs + together - 1) / together;
  auto packed = at::empty({blocks, packs, BLOCK, together}, from.options());
  const auto bytes = from.element_size();
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* to = static_cast<char*>(packed.data_ptr());
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    std::memset(to + begin * packs * BLOCK * together * bytes, 0, (end - begin) * packs * BLOCK * together * bytes);
    for (int64_t n = begin * BLOCK; n < std::min(end * BLOCK, outputs); ++n)
      for (int64_t k = 0; k < inputs; ++k) {
        const int64_t place = ((n / BLOCK * packs + k / together) * BLOCK + n % BLOCK) * together + k % together;
        std::memcpy(to + place * bytes, source + (n * inputs + k) * bytes, bytes);
      }
  });
  return packed;
}

// rows [..., K] times a packed weight, and a bias [N] in fp32: [..., N].
at::Tensor linear(const at::Tensor& rows, const at::Tensor& packed, int64_t outputs, const std::optional<at::Tensor>& bias) {
  const int64_t inputs = rows.size(-1);
  TORCH_CHECK(rows.scalar_type() == packed.scalar_type(), "rows and weight differ in dtype");
  const int64_t together = packed.size(3), blocks = (outputs + BLOCK - 1) / BLOCK;
  TORCH_CHECK(
      packed.size(0) == blocks && packed.size(1) == (inputs + together - 1) / together, "rows and weight differ in size");
  const auto flat = rows.reshape({-1, inputs}).contiguous();
  auto sizes = rows.sizes().vec();
  sizes.back() = outputs;
  auto out = at::empty(sizes, rows.options());
  const float* added = bias ? bias->const_data_ptr<float>() : nullptr;
  const auto run = [&](auto dtype) {
    using Dtype = decltype(dtype);
    using Element = typename Dtype::Element;
    multiply<Dtype>(
        static_cast<const Element*>(flat.const_data_ptr()), flat.size(0), inputs,
        static_cast<const Element*>(packed.const_data_ptr()), added, inputs, static_cast<Element*>(out.data_ptr()), outputs);
  };
  rows.scalar_type() == at::kBFloat16 ? run(BFloat16{}) : run(Float32{});
  return out;
}

// query [1, H, R, D], keys and values [1, G, S, D]; a row sees the columns at which its mask [1, 1, R, S] is 0, or all:
// [1, R, H, D].
at::Tensor attention(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const std::optional<at::Tensor>& mask,
    double scale) {
  const int64_t rows = query.size(2), columns = keys.size(2), head_size = query.size(3);
  TORCH_CHECK(query.size(0) == 1 && keys.size(0) == 1, "one sequence at a time");
  TORCH_CHECK(
      keys.size(3) == head_size && values.sizes() == keys.sizes() && query.size(1) % keys.size(1) == 0,
      "query, keys and values differ in size");
  TORCH_CHECK(
      keys.dtype() == query.dtype() && values.dtype() == query.dtype(), "query, keys and values differ in dtype");
  TORCH_CHECK(
      head_size % LANES == 0 && head_size / LANES <= MOST_PARTS, "head size must be a multiple of ", LANES, ", at most ",
      MOST_PARTS * LANES);
  TORCH_CHECK(query.stride(3) == 1 && keys.stride(3) == 1 && values.stride(3) == 1, "heads must be contiguous");
  TORCH_CHECK(
      !mask || (mask->size(2) == rows && mask->size(3) == columns && mask->stride(3) == 1 && mask->dtype() == query.dtype()),
      "mask must be [1, 1, rows, columns] in the query's dtype");
  std::vector<int32_t> seen(rows * columns);
  std::vector<int64_t> counts(rows, 0);
  auto out = at::empty({1, rows, query.size(1), head_size}, query.options());
  const auto run = [&](auto dtype) {
    using Dtype = decltype(dtype);
    for (int64_t row = 0; row < rows; ++row) {
      if (mask) {
        find_seen<Dtype>(*mask, row, columns, seen, counts[row]);
      } else {
        for (int64_t column = 0; column < columns; ++column) seen[row * columns + column] = static_cast<int32_t>(column);
        counts[row] = columns;
      }
      TORCH_CHECK(counts[row] > 0, "a row sees nothing");
    }
    attend_all<Dtype>(query, keys, values, seen, counts, scale, out);
  };
  query.scalar_type() == at::kBFloat16 ? run(BFloat16{}) : run(Float32{});
  return out;
}

// Reads every byte once, as fast as the memory gives them; what it returns keeps the compiler from leaving that out.
int64_t read_all(const at::Tensor& data) {
  TORCH_CHECK(data.is_contiguous(), "what is read must be contiguous");
  const int64_t vectors = static_cast<int64_t>(data.nbytes()) / static_cast<int64_t>(sizeof(Words));
  const auto* from = static_cast<const Words*>(data.const_data_ptr());
  std::atomic<int64_t> total{0};
  at::parallel_for(0, vectors, 4096, [&](int64_t begin, int64_t end) {
    Words sums[4] = {};
    for (; begin + 4 <= end; begin += 4)
      for (int i = 0; i < 4; ++i) sums[i] += from[begin + i];
    for (; begin < end; ++begin) sums[0] += from[begin];
    const Words all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    int64_t sum = 0;
    for (int64_t lane = 0; lane < LANES; ++lane) sum += all[lane];
    total += sum;
  });
  return total;
}

}  // namespace

TORCH_LIBRARY(draftsmith, library) {
  library.def("lanes() -> int", [] { return LANES; });
  library.def("read(Tensor data) -> int");
  library.def("pack(Tensor weight) -> Tensor");
  library.def("linear(Tensor rows, Tensor packed, int outputs, Tensor? bias) -> Tensor");
  library.def("attention(Tensor query, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) {
  library.impl("read", read_all);
  library.impl("pack", pack);
  library.impl("linear", linear);
  library.impl("attention", attention);
}
