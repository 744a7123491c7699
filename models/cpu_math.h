// Arithmetic of decoding on a CPU: vectors, products of a few rows with a packed weight, attention of one row.
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

#pragma once

#include <algorithm>
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
constexpr int64_t LANES = 16, MOST_ROWS = 14, ROWS_TO_ASK_AHEAD = 2;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, MOST_ROWS = 5, ROWS_TO_ASK_AHEAD = 3;
#else
constexpr int64_t LANES = 4, MOST_ROWS = 5, ROWS_TO_ASK_AHEAD = 3;
#endif
constexpr int64_t LINE = 64, AHEAD = 16384;  // bytes: of a cache line, and how far ahead weights are asked for
constexpr int64_t VECTORS = 2, BLOCK = VECTORS * LANES;
constexpr int MOST_PARTS = 16, MOST_HEADS = 3;  // vectors of a head; heads that read keys and values together

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));

constexpr float LOG2_E = 1.4426950408889634f;

inline Floats broadcast(float value) { return Floats{} + value; }
inline bool any_above(Floats values, float limit) {
#ifdef __AVX512F__
  return _mm512_cmp_ps_mask((__m512)values, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
  const Ints above = values > limit;
  int32_t any = 0;
  for (int64_t lane = 0; lane < LANES; ++lane) any |= above[lane];
  return any != 0;
#endif
}
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
  static Input input(const Element* row, int64_t k, bool) { return broadcast(row[k]); }
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
  // Two inputs in one word; what comes after the last is zero.
  static uint32_t pair(const Element* row, int64_t k, bool last_alone) {
    if (last_alone) return row[k];
    uint32_t both;
    std::memcpy(&both, row + k, sizeof both);
    return both;
  }
#ifdef __AVX512BF16__
  using Input = __m512bh;
  static Input input(const Element* row, int64_t k, bool last_alone) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair(row, k, last_alone)));
  }
  static Floats add_product(Floats sums, Input input, const Element* weights) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, input, (__m512bh)_mm512_loadu_si512(weights));
  }
#else
  struct Input {
    Floats even, odd;
  };
  static Input input(const Element* row, int64_t k, bool last_alone) {
    return {broadcast(widen(row[k])), broadcast(last_alone ? 0.0f : widen(row[k + 1]))};
  }
  static Floats add_product(Floats sums, Input input, const Element* weights) {
    const Words both = *reinterpret_cast<const Words*>(weights);
    const Words even = both << 16, odd = both & 0xffff0000u;
    sums += input.even * reinterpret_cast<const Floats&>(even);
    return sums + input.odd * reinterpret_cast<const Floats&>(odd);
  }
#endif
};

// Bytes of a block's outputs for PACK inputs.
template <class Dtype>
constexpr int64_t BLOCK_BYTES = BLOCK * Dtype::PACK * sizeof(typename Dtype::Element);

// One block of outputs for ROWS rows; `sink(row, v, values)` is given each vector of sums.
template <class Dtype, int ROWS, class Sink>
inline void product_of_rows(
    const typename Dtype::Element* __restrict__ rows, int64_t row_stride,
    const typename Dtype::Element* __restrict__ weights, const float* bias, int64_t inputs, int64_t outputs, Sink sink) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) sums[row][v] = Floats{};
  const auto add = [&](int64_t k, bool last_alone) __attribute__((always_inline)) {
    // While many rows are multiplied, the processor itself does not ask the memory for enough.
    if constexpr (ROWS >= ROWS_TO_ASK_AHEAD)
      for (int64_t line = 0; line < BLOCK_BYTES<Dtype>; line += LINE)
        __builtin_prefetch(reinterpret_cast<const char*>(weights) + AHEAD + line, 0, 2);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row) {
      const auto input = Dtype::input(rows + row * row_stride, k, last_alone);
#pragma GCC unroll 16
      for (int v = 0; v < VECTORS; ++v)
        sums[row][v] = Dtype::add_product(sums[row][v], input, weights + v * LANES * Dtype::PACK);
    }
    weights += BLOCK * Dtype::PACK;
  };
  int64_t k = 0;
  for (; k + Dtype::PACK <= inputs; k += Dtype::PACK) add(k, false);
  if (k < inputs) add(k, true);
  Floats added[VECTORS] = {};
  if (bias)
    for (int v = 0; v < VECTORS; ++v) {
      float values[LANES] = {};
      for (int64_t n = v * LANES; n < std::min(outputs, (v + 1) * LANES); ++n) values[n - v * LANES] = bias[n];
      added[v] = Float32::load(values);
    }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) sink(row, v, sums[row][v] + added[v]);
}

template <class Dtype, int ROWS, class Sink>
inline void product_of_at_most(
    int64_t count, const typename Dtype::Element* rows, int64_t row_stride, const typename Dtype::Element* weights,
    const float* bias, int64_t inputs, int64_t outputs, Sink sink) {
  if (count == ROWS)
    product_of_rows<Dtype, ROWS>(rows, row_stride, weights, bias, inputs, outputs, sink);
  else if constexpr (ROWS > 1)
    product_of_at_most<Dtype, ROWS - 1>(count, rows, row_stride, weights, bias, inputs, outputs, sink);
}

// A weight [N, K] and a bias [N] or nothing, packed: [blocks, K / PACK, BLOCK, PACK], what is not there being zero.
template <class Dtype>
struct Weight {
  const typename Dtype::Element* packed;
  const float* bias;
  int64_t outputs, inputs;

  int64_t blocks() const { return (outputs + BLOCK - 1) / BLOCK; }
  int64_t block_elements() const { return (inputs + Dtype::PACK - 1) / Dtype::PACK * Dtype::PACK * BLOCK; }
};

// Rows [R, K] times one block of a weight; `sink(row, v, values)` is given vector v of the block's outputs.
template <class Dtype, class Sink>
inline void multiply_block(
    const typename Dtype::Element* rows, int64_t num_rows, int64_t row_stride, const Weight<Dtype>& weight,
    int64_t block, Sink sink) {
  const int64_t parts = (num_rows + MOST_ROWS - 1) / MOST_ROWS, first = block * BLOCK;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = part * num_rows / parts, to = (part + 1) * num_rows / parts;
    product_of_at_most<Dtype, MOST_ROWS>(
        to - from, rows + from * row_stride, row_stride, weight.packed + block * weight.block_elements(),
        weight.bias ? weight.bias + first : nullptr, weight.inputs, std::min(BLOCK, weight.outputs - first),
        [&](int64_t row, int v, Floats values) __attribute__((always_inline)) { sink(from + row, v, values); });
  }
}

// Stores the first `count` lanes, all of them if there are as many.
template <class Dtype>
inline void store_first(typename Dtype::Element* to, Floats values, int64_t count) {
  if (count >= LANES) return Dtype::store(to, values);
  typename Dtype::Element last[LANES];
  Dtype::store(last, values);
  if (count > 0) std::copy(last, last + count, to);
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

// The columns at which a row of an additive mask is zero, in order; returns how many there are.
template <class Dtype>
int64_t find_seen(const typename Dtype::Element* mask, int64_t columns, int32_t* seen) {
  int64_t count = 0;
  for (int64_t column = 0; column < columns; ++column) {
    seen[count] = static_cast<int32_t>(column);
    count += Dtype::widen(mask[column]) == 0.0f;
  }
  return count;
}

}  // namespace
