// Arithmetic of decoding on a CPU: vectors, products of rows with a packed weight, attention.
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
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__znver3__) || defined(__znver4__) || defined(__znver5__)  // GCC 12 takes Zen 4 for Zen 3
#define ZEN 1
#else
#define ZEN 0
#endif
// Products of pairs of bf16 in one instruction: Zen's take half the time of fp32's, Intel's twice as much (Emerald Rapids:
// 165 and 300 GFLOP/s on two cores), so that bf16 is multiplied as fp32 there.
#if defined(__AVX512BF16__) && (ZEN || defined(TILES))
#define PAIRS
#endif

namespace {

// Lanes of a vector, vectors of a block of outputs, and rows whose sums fit into the registers beside them.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16, MOST_ROWS = 14;
#elif defined(__AVX__)
constexpr int64_t LANES = 8, MOST_ROWS = 5;
#else
constexpr int64_t LANES = 4, MOST_ROWS = 5;
#endif
constexpr int64_t LINE = 64, AHEAD = 8192;  // bytes: of a cache line, and how far ahead weights are asked for
// Rows up to which the processor itself asks the memory for enough, and for more than if it is told to. Intel's does not:
// told to, Emerald Rapids reads the weights of a row in 80 to 97 % of the time.
constexpr int FEW_ROWS = LANES < 16 ? 1 : ZEN ? 5 : 0;
constexpr int SECOND_LEVEL = 2;  // of the caches, which waits for more lines at a time than the first
constexpr int64_t VECTORS = 2, BLOCK = VECTORS * LANES;
constexpr int MOST_PARTS = 16, MOST_READERS = 24;  // vectors of a head; (row, head) pairs that read keys and values together
constexpr int MOST_SUMS = LANES == 8 ? 12 : 24;    // vectors of sums that fit into the registers beside the values

typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2)));

constexpr float LOG2_E = 1.4426950408889634f;

inline Floats broadcast(float value) { return value - Floats{}; }  // + would have to turn -0 into 0
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

// How attention weighs values: those of one column at a time, with shares that are stored in fp32.
struct OneColumn {
  using Share = float;
  using Values = Floats;
  static constexpr int64_t COLUMNS = 1;
  static Floats add_values(Floats sums, const Share* shares, Values values) { return sums + broadcast(*shares) * values; }
};

// How a dtype is stored, and multiplied into fp32 sums. PACK inputs of one output lie together.
struct Float32 : OneColumn {
  using Element = float;
  static constexpr int64_t PACK = 1;
  static float widen(Element value) { return value; }
  static Floats load(const Element* from) { return *reinterpret_cast<const Floats*>(from); }
  static void store(Element* to, Floats values) { std::memcpy(to, &values, sizeof values); }
  static Floats store_shares(Share* to, Floats shares) {  // returns what was stored
    store(to, shares);
    return shares;
  }
  using Row = Element;  // as sums of products read it
  using Input = Floats;
  static Input input(const Row* row, int64_t k, bool) { return broadcast(row[k]); }
  static Floats add_product(Floats sums, Input input, const Element* weights) { return sums + input * load(weights); }
  static Values values(const Element* of, const Element*) { return load(of); }
};

#ifdef PAIRS
struct BFloat16 {
#else
struct BFloat16 : OneColumn {
#endif
  using Element = uint16_t;
  static constexpr int64_t PACK = 2;
  static float widen(Element value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
  }
  static void store(Element* to, Floats values) {  // to the nearest, ties to even; what is not a number stays so
#ifdef __AVX512BF16__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)values));
#else
    *reinterpret_cast<Halves*>(to) = __builtin_convertvector(nearest(values), Halves);
#endif
  }
  static Floats load(const Element* from) {
#ifdef __AVX512F__
    const auto wide = (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    const Words wide = __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Words);
#endif
    return (Floats)(wide << 16);
  }
  // Two inputs in one word; what comes after the last is zero.
  static uint32_t pair(const Element* row, int64_t k, bool last_alone) {
    if (last_alone) return row[k];
    uint32_t both;
    std::memcpy(&both, row + k, sizeof both);
    return both;
  }
#ifdef PAIRS
  using Row = Element;
  using Input = __m512bh;
  static Input input(const Row* row, int64_t k, bool last_alone) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair(row, k, last_alone)));
  }
  static Floats add_product(Floats sums, Input input, const Element* weights) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, input, (__m512bh)_mm512_loadu_si512(weights));
  }
  // The values of two columns at a time; shares are rounded, as in torch's kernel.
  using Share = Element;
  using Values = __m512bh;
  static constexpr int64_t COLUMNS = 2;
  static Floats store_shares(Share* to, Floats shares) {
    store(to, shares);
    return load(to);
  }
  static Values values(const Element* first, const Element* second) {  // their lanes taking turns
    const auto at = [](const Element* of) { return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(of))); };
    const Words turns = {0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007,
                         0x280008, 0x290009, 0x2a000a, 0x2b000b, 0x2c000c, 0x2d000d, 0x2e000e, 0x2f000f};
    return (__m512bh)_mm512_permutex2var_epi16(at(first), (__m512i)turns, at(second));
  }
  static Floats add_values(Floats sums, const Share* shares, Values values) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, input(shares, 0, false), values);
  }
#else
  using Row = std::conditional_t<LANES == 16, float, Element>;  // in fp32 where there are registers for it
  static float widen(float value) { return value; }
  struct Input {
    Floats even, odd;
  };
  static Input input(const Row* row, int64_t k, bool last_alone) {
    return {broadcast(widen(row[k])), broadcast(last_alone ? 0.0f : widen(row[k + 1]))};
  }
  static Floats add_product(Floats sums, Input input, const Element* weights) {
    const Words both = *reinterpret_cast<const Words*>(weights);
    const Words even = both << 16, odd = both & 0xffff0000u;
    sums += input.even * (Floats)even;
    return sums + input.odd * (Floats)odd;
  }
  static Words nearest(Floats values) {
    Words bits;
    std::memcpy(&bits, &values, sizeof bits);
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? Words{} + 0x7fc0u : rounded;
  }
  static Floats store_shares(Share* to, Floats shares) {
    const auto rounded = (Floats)(nearest(shares) << 16);
    Float32::store(to, rounded);
    return rounded;
  }
  static Values values(const Element* of, const Element*) { return load(of); }
#endif
};

// Bytes of a block's outputs for PACK inputs.
template <class Dtype>
constexpr int64_t BLOCK_BYTES = BLOCK * Dtype::PACK * sizeof(typename Dtype::Element);

// The sums of one block of outputs for ROWS rows. Never inlined: inside a larger function GCC keeps sums in memory.
template <class Dtype, int ROWS>
__attribute__((noinline)) void sum_products(
    const typename Dtype::Row* __restrict__ rows, int64_t row_stride,
    const typename Dtype::Element* __restrict__ weights, int64_t inputs, Floats (*to)[VECTORS]) {
  Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) sums[row][v] = Floats{};
  const auto add = [&](int64_t k, bool last_alone) __attribute__((always_inline)) {
    if constexpr (ROWS > FEW_ROWS)
      for (int64_t line = 0; line < BLOCK_BYTES<Dtype>; line += LINE)
        __builtin_prefetch(reinterpret_cast<const char*>(weights) + AHEAD + line, 0, SECOND_LEVEL);
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
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
    for (int v = 0; v < VECTORS; ++v) to[row][v] = sums[row][v];
}

template <class Dtype, int ROWS, class... Arguments>
inline void sum_products_of(int64_t count, Arguments... arguments) {
  if (count == ROWS)
    sum_products<Dtype, ROWS>(arguments...);
  else if constexpr (ROWS > 1)
    sum_products_of<Dtype, ROWS - 1>(count, arguments...);
}

#ifdef TILES
// AMX: one instruction multiplies 32 inputs of 16 rows by 16 outputs, so that a tree's rows cost little more than one.
constexpr int64_t TILE_INPUTS = 32, TILE_ROWS = 16, MOST_TILED_ROWS = 2 * TILE_ROWS;
constexpr int64_t TILE_BYTES = 64;  // of a tile's row

// Returns true if the system lets this process use tiles, which it must be asked once.
inline bool has_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return allowed;
}

// The tiles of a thread: sums of 32 rows and a block of outputs (0 to 3), rows (4, 5) and weights (6, 7). Other libraries
// have theirs in the same registers, so that ours are given back at the end of each of a thread's parts of the work.
struct Tiles {
  static inline thread_local int64_t rows = 0;

  static void set_rows(int64_t count) {
    if (rows == count) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const auto first = static_cast<uint8_t>(std::min(count, TILE_ROWS)), second = static_cast<uint8_t>(count - first);
    const uint8_t of_tile[] = {first, first, second, second, first, second, TILE_ROWS, TILE_ROWS};
    for (int tile = 0; tile < 8; ++tile)
      if (of_tile[tile] > 0) config.rows[tile] = of_tile[tile], config.row_bytes[tile] = TILE_BYTES;
    _tile_loadconfig(&config);
    rows = count;
  }

  ~Tiles() {
    if (rows > 0) _tile_release();
    rows = 0;
  }
};

// As `sum_products`, of at most 16 rows, or of at most 32; added to what is there, or not.
template <bool SECOND>
void sum_tiles(
    const uint16_t* rows, int64_t row_stride, const uint16_t* weights, int64_t inputs, Floats (*to)[VECTORS], bool adds) {
  constexpr int64_t OUT_BYTES = BLOCK * sizeof(float), PAIRS_BYTES = BLOCK_BYTES<BFloat16>;
  const int64_t row_bytes = row_stride * static_cast<int64_t>(sizeof *rows);
  if (adds) {
    _tile_loadd(0, to, OUT_BYTES);
    _tile_loadd(1, &to[0][1], OUT_BYTES);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  if (SECOND && adds) {
    _tile_loadd(2, to + TILE_ROWS, OUT_BYTES);
    _tile_loadd(3, &to[TILE_ROWS][1], OUT_BYTES);
  } else if (SECOND) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < inputs; k += TILE_INPUTS, weights += TILE_INPUTS * BLOCK) {
    for (int64_t line = 0; line < TILE_INPUTS / 2 * PAIRS_BYTES; line += LINE)
      __builtin_prefetch(reinterpret_cast<const char*>(weights) + AHEAD + line, 0, SECOND_LEVEL);
    _tile_loadd(4, rows + k, row_bytes);
    _tile_loadd(6, weights, PAIRS_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + TILE_INPUTS, PAIRS_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (SECOND) {
      _tile_loadd(5, rows + TILE_ROWS * row_stride + k, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to, OUT_BYTES);
  _tile_stored(1, &to[0][1], OUT_BYTES);
  if constexpr (SECOND) {
    _tile_stored(2, to + TILE_ROWS, OUT_BYTES);
    _tile_stored(3, &to[TILE_ROWS][1], OUT_BYTES);
  }
}
#else
struct Tiles {};
constexpr int64_t MOST_TILED_ROWS = MOST_ROWS;
#endif

template <class Dtype>
inline bool in_tiles([[maybe_unused]] int64_t inputs) {
#ifdef TILES
  if constexpr (std::is_same_v<Dtype, BFloat16>) return inputs % TILE_INPUTS == 0 && has_tiles();
#endif
  return false;
}

// Rows whose products with one block of a weight are summed together.
template <class Dtype>
inline int64_t most_rows(int64_t inputs) {
  return in_tiles<Dtype>(inputs) ? MOST_TILED_ROWS : MOST_ROWS;
}

// The sums of one block of outputs, by tiles where the processor has them, for any number of rows alike. Only tiles add
// to what is there.
template <class Dtype>
inline void sum_rows(
    int64_t count, const typename Dtype::Element* rows, int64_t row_stride, const typename Dtype::Element* weights,
    int64_t inputs, Floats (*to)[VECTORS], [[maybe_unused]] bool adds = false) {
#ifdef TILES
  if constexpr (std::is_same_v<Dtype, BFloat16>)
    if (in_tiles<Dtype>(inputs)) {
      Tiles::set_rows(count);
      return count > TILE_ROWS ? sum_tiles<true>(rows, row_stride, weights, inputs, to, adds)
                               : sum_tiles<false>(rows, row_stride, weights, inputs, to, adds);
    }
#endif
  if constexpr (std::is_same_v<typename Dtype::Row, typename Dtype::Element>) {
    sum_products_of<Dtype, MOST_ROWS>(count, rows, row_stride, weights, inputs, to);
  } else {
    static thread_local std::vector<float> wide;
    wide.resize(count * inputs);
    for (int64_t row = 0; row < count; ++row)
      std::transform(
          rows + row * row_stride, rows + row * row_stride + inputs, &wide[row * inputs],
          [](typename Dtype::Element value) { return Dtype::widen(value); });
    sum_products_of<Dtype, MOST_ROWS>(count, static_cast<const float*>(wide.data()), inputs, weights, inputs, to);
  }
}

// A weight [N, K] and a bias [N] or nothing, packed: [blocks, K / PACK, BLOCK, PACK], what is not there being zero.
template <class Dtype>
struct Weight {
  const typename Dtype::Element* packed;
  const float* bias;
  int64_t outputs, inputs;

  int64_t blocks() const { return (outputs + BLOCK - 1) / BLOCK; }
  int64_t bytes() const { return blocks() * block_elements() * static_cast<int64_t>(sizeof(typename Dtype::Element)); }
  int64_t block_elements() const { return (inputs + Dtype::PACK - 1) / Dtype::PACK * Dtype::PACK * BLOCK; }
};

// Rows [R, K] times one block of a weight; `sink(row, v, values)` is given vector v of the block's outputs.
template <class Dtype, class Sink>
inline void multiply_block(
    const typename Dtype::Element* rows, int64_t num_rows, int64_t row_stride, const Weight<Dtype>& weight,
    int64_t block, Sink sink) {
  const int64_t most = most_rows<Dtype>(weight.inputs), parts = (num_rows + most - 1) / most, first = block * BLOCK;
  float bias[BLOCK] = {};
  if (weight.bias) std::copy(weight.bias + first, weight.bias + std::min(first + BLOCK, weight.outputs), bias);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t from = part * num_rows / parts, to = (part + 1) * num_rows / parts;
    Floats sums[MOST_TILED_ROWS][VECTORS];
    sum_rows<Dtype>(
        to - from, rows + from * row_stride, row_stride, weight.packed + block * weight.block_elements(), weight.inputs, sums);
    for (int64_t row = from; row < to; ++row)
      for (int v = 0; v < VECTORS; ++v) sink(row, v, sums[row - from][v] + Float32::load(bias + v * LANES));
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
  return value * (Floats)bits;
}

// The first halves of two vectors, their lanes taking turns, or the second halves.
template <bool SECOND>
inline Words interleave(Words a, Words b) {
  constexpr int64_t first = SECOND ? LANES / 2 : 0;
  return [&]<size_t... lane>(std::index_sequence<lane...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, static_cast<int>(first + lane / 2 + lane % 2 * LANES)...);
#else
    return __builtin_shuffle(a, b, Words{static_cast<uint32_t>(first + lane / 2 + lane % 2 * LANES)...});
#endif
  }(std::make_index_sequence<LANES>());
}

// Lane i of vector k becomes lane k of vector i.
inline void transpose(Words (&of)[LANES]) {
#pragma GCC unroll 4
  for (int64_t step = 1; step < LANES; step *= 2) {
    Words next[LANES];
#pragma GCC unroll 8
    for (int64_t i = 0; i < LANES / 2; ++i) {
      next[2 * i] = interleave<false>(of[i], of[i + LANES / 2]);
      next[2 * i + 1] = interleave<true>(of[i], of[i + LANES / 2]);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < LANES; ++i) of[i] = next[i];
  }
}

// Rows of heads [heads, rows, D]; a row's elements lie together.
template <class Element>
struct Heads {
  Element* of;
  int64_t head_stride, row_stride;

  Element* at(int64_t head, int64_t row = 0) const { return of + head * head_stride + row * row_stride; }
};

// Attention of rows. A reader is a row's head; readers [G, R, H / G] of a key-value head read keys and values together
// where their rows see the same columns.
template <class Dtype>
struct Attention {
  using Element = typename Dtype::Element;

  Heads<Element> query, keys, values, out;
  int64_t rows, heads, kv_heads, head_size, columns;
  const int32_t* seen;    // [R, S] the columns that a row sees, in their order
  const int64_t* counts;  // [R] how many these are
  float scale;

  static constexpr int64_t MIXED = 256;  // columns whose values tiles mix at a time

  int64_t readers() const { return rows * heads; }
  bool mixes_in_tiles() const { return in_tiles<Dtype>(BLOCK) && head_size % BLOCK == 0; }
  // Columns whose values are summed together, wherever they stand among those that a row sees.
  int64_t columns_mixed() const { return mixes_in_tiles() ? BLOCK : Dtype::COLUMNS; }
  int64_t score_stride() const { return columns + BLOCK; }

  // What a thread works on.
  struct Scratch {
    std::vector<float> scores, sums;          // [readers, S + BLOCK], [readers, D]
    std::vector<Element> queries, key_block;  // [readers, D], [D / PACK, BLOCK, PACK]
    std::vector<Element> value_block;         // [MIXED / PACK, BLOCK, PACK]

    explicit Scratch(const Attention& of)
        : scores(MOST_READERS * of.score_stride()), sums(MOST_READERS * of.head_size),
          queries(MOST_READERS * of.head_size), key_block(BLOCK * of.head_size),
          value_block(of.mixes_in_tiles() ? MIXED * BLOCK : 0) {}
  };

  // How many columns each row sees as the row before it does, from the first on: [R].
  std::vector<int64_t> count_common() const {
    std::vector<int64_t> common(rows, 0);
    for (int64_t row = 1; row < rows; ++row) {
      const int32_t *of = seen + row * columns, *before = of - columns;
      common[row] = std::mismatch(of, of + std::min(counts[row], counts[row - 1]), before).first - of;
    }
    return common;
  }

  // Of the readers [begin, end).
  void run(int64_t begin, int64_t end, const int64_t* common, Scratch& scratch) const {
    const int64_t shared = heads / kv_heads, of_head = rows * shared;
    while (begin < end) {
      const int64_t number = begin / of_head, first = begin % of_head, row = first / shared;
      const int64_t most = std::min({end - number * of_head, of_head, first + MOST_READERS});
      int64_t together = counts[row], last_row = row + 1;
      for (; last_row * shared < most && 2 * common[last_row] >= counts[row]; ++last_row)
        together = std::min(together, common[last_row]);
      together -= together % columns_mixed();
      const int64_t last = std::min(most, last_row * shared);
      attend_parts<MOST_PARTS>(number, first, last, together, scratch);
      begin += last - first;
    }
  }

 private:
  template <int PARTS>
  void attend_parts(int64_t number, int64_t first, int64_t last, int64_t together, Scratch& scratch) const {
    if (head_size == PARTS * LANES)
      attend<PARTS>(number, first, last, together, scratch);
    else if constexpr (PARTS > 1)
      attend_parts<PARTS - 1>(number, first, last, together, scratch);
  }

  // Readers [first, last) of one key-value head, whose rows all see the first row's first `together` columns.
  template <int PARTS>
  void attend(int64_t number, int64_t first, int64_t last, int64_t together, Scratch& scratch) const {
    const int64_t shared = heads / kv_heads, count = last - first;
    const Element *key = keys.at(number), *value = values.at(number);
    float *scores = scratch.scores.data(), *sums = scratch.sums.data(), totals[MOST_READERS];
    Element* queries = scratch.queries.data();
    // What `run` does for the columns that all rows see, and then for each row's others.
    const auto for_columns = [&](auto run) {
      run(int64_t{0}, count, seen + first / shared * columns, int64_t{0}, together);
      for (int64_t from = 0, to; from < count; from = to) {
        const int64_t row = (first + from) / shared;
        to = std::min(count, (row + 1) * shared - first);
        run(from, to, seen + row * columns, together, counts[row]);
      }
    };
    const auto at = [&](int64_t reader) { return std::pair((first + reader) / shared, number * shared + (first + reader) % shared); };
    for (int64_t reader = 0; reader < count; ++reader) {
      const auto [row, head] = at(reader);
      const Element* of = query.at(head, row);
      std::copy(of, of + head_size, queries + reader * head_size);
    }
    for_columns([&](int64_t from, int64_t to, const int32_t* of, int64_t n, int64_t end) {
      score(key, value, from, to, of, n, end, scratch);
    });
    for (int64_t reader = 0; reader < count; ++reader)
      totals[reader] = to_shares(scores + reader * score_stride(), counts[at(reader).first]);
    std::fill(sums, sums + count * head_size, 0.0f);
    for_columns([&](int64_t from, int64_t to, const int32_t* of, int64_t n, int64_t end) {
      if (mixes_in_tiles()) return mix_in_tiles(from, to, value, of, n, end, scratch);
      // As many vectors of a head at a time as leave registers for several readers.
      constexpr int WIDTH = PARTS <= 6 ? PARTS : PARTS % 4 == 0 ? 4 : PARTS % 3 == 0 ? 3 : PARTS % 2 == 0 ? 2 : 1;
      constexpr int MOST = std::clamp(MOST_SUMS / WIDTH, 1, 6), FEW = std::min(MOST, 3);
      for (int64_t reader = from, some; reader < to; reader += some) {
        const auto mix = [&](auto readers) {
          some = readers();
          for (int64_t part = 0; part < PARTS; part += WIDTH)
            mix_values<WIDTH, readers()>(
                sums + (reader * PARTS + part) * LANES, scores + reader * score_stride(), value + part * LANES, of, n, end);
        };
        if (to - reader >= MOST)
          mix(std::integral_constant<int, MOST>{});
        else if (to - reader >= FEW)
          mix(std::integral_constant<int, FEW>{});
        else
          mix(std::integral_constant<int, 1>{});
      }
    });
    for (int64_t reader = 0; reader < count; ++reader) {
      const auto [row, head] = at(reader);
      Element* to = out.at(head, row);
      for (int p = 0; p < PARTS; ++p)
        Dtype::store(to + p * LANES, Float32::load(sums + (reader * PARTS + p) * LANES) / totals[reader]);
    }
  }

  // Scores of the readers [from, to) and the columns of[n] to of[end - 1].
  __attribute__((noinline)) void score(
      const Element* key, const Element* value, int64_t from, int64_t to, const int32_t* of, int64_t n, int64_t end,
      Scratch& scratch) const {
    constexpr int64_t SUMMED = Dtype::PACK == 1 ? 8 : 64;  // inputs at a time: sums of sums, which round less
    const auto* queries = scratch.queries.data();
    auto* key_block = scratch.key_block.data();
    for (; n < end; n += BLOCK) {
      const int64_t width = std::min(BLOCK, end - n);
      if (head_size / Dtype::PACK >= LANES)
        pack_keys<LANES>(key, of + n, width, end - n, key_block);
      else
        pack_keys<LANES / Dtype::PACK>(key, of + n, width, end - n, key_block);
      for (int64_t i = 0; i < width; ++i)
        for (int64_t line = 0; line < head_size; line += LINE / static_cast<int64_t>(sizeof(Element)))
          __builtin_prefetch(value + of[n + i] * values.row_stride + line, 0, SECOND_LEVEL);
      for (int64_t reader = from, some; reader < to; reader += some) {
        some = std::min(most_rows<Dtype>(head_size), to - reader);
        for (int64_t k = 0; k < head_size; k += SUMMED) {
          Floats products[MOST_TILED_ROWS][VECTORS];
          sum_rows<Dtype>(
              some, queries + reader * head_size + k, head_size, key_block + k * BLOCK, std::min(SUMMED, head_size - k),
              products);
          for (int64_t i = 0; i < some; ++i)
            for (int v = 0; v < VECTORS; ++v) {
              float* to_score = scratch.scores.data() + (reader + i) * score_stride() + n + v * LANES;
              const Floats total = k == 0 ? products[i][v] : Float32::load(to_score) + products[i][v];
              Float32::store(to_score, k + SUMMED < head_size ? total : total * (scale * LOG2_E));
            }
        }
      }
    }
  }

  // Packs the keys of columns of[0] to of[count - 1] as the block of a weight, [D / PACK, BLOCK, PACK], TAKEN words of a
  // key at a time. Of the `coming` columns the next are asked for: since the step before, weights took the place of keys
  // in the caches.
  template <int64_t TAKEN>
  void pack_keys(const Element* key, const int32_t* of, int64_t count, int64_t coming, Element* to) const {
    constexpr int64_t PACK = Dtype::PACK;
    const int64_t words_of_key = head_size / PACK;
    for (int64_t i = BLOCK; i < std::min(2 * BLOCK, coming); ++i)
      for (int64_t line = 0; line < head_size; line += LINE / static_cast<int64_t>(sizeof(Element)))
        __builtin_prefetch(key + of[i] * keys.row_stride + line, 0, SECOND_LEVEL);
    for (int64_t v = 0; v * LANES < count; ++v)
      for (int64_t word = 0; word < words_of_key; word += TAKEN) {
        const int64_t start = std::min(word, words_of_key - TAKEN);
        Words words[LANES] = {};
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; ++i)
          std::memcpy(&words[i], key + of[std::min(v * LANES + i, count - 1)] * keys.row_stride + start * PACK, 4 * TAKEN);
        transpose(words);
#pragma GCC unroll 16
        for (int64_t i = 0; i < TAKEN; ++i) std::memcpy(to + ((start + i) * BLOCK + v * LANES) * PACK, &words[i], 4 * LANES);
      }
  }

  // Adds WIDTH vectors of the values of the columns [n, end), each times its share, to the sums of READERS readers.
  template <int WIDTH, int READERS>
  void mix_values(float* to, float* scores, const Element* value, const int32_t* of, int64_t n, int64_t end) const {
    Floats sums[READERS][WIDTH];
#pragma GCC unroll 16
    for (int reader = 0; reader < READERS; ++reader)
#pragma GCC unroll 16
      for (int p = 0; p < WIDTH; ++p) sums[reader][p] = Float32::load(to + reader * head_size + p * LANES);
    for (; n < end; n += Dtype::COLUMNS) {
      const Element *first = value + of[n] * values.row_stride, *second = value + of[std::min(n + 1, end - 1)] * values.row_stride;
      typename Dtype::Values parts[WIDTH];
#pragma GCC unroll 16
      for (int p = 0; p < WIDTH; ++p) parts[p] = Dtype::values(first + p * LANES, second + p * LANES);
#pragma GCC unroll 16
      for (int reader = 0; reader < READERS; ++reader)
#pragma GCC unroll 16
        for (int p = 0; p < WIDTH; ++p)
          sums[reader][p] = Dtype::add_values(sums[reader][p], shares_of(scores + reader * score_stride()) + n, parts[p]);
    }
#pragma GCC unroll 16
    for (int reader = 0; reader < READERS; ++reader)
#pragma GCC unroll 16
      for (int p = 0; p < WIDTH; ++p) Float32::store(to + reader * head_size + p * LANES, sums[reader][p]);
  }

  // As `mix_values`, for the readers [from, to): their shares times blocks of values, a weight that is packed here.
  void mix_in_tiles(
      int64_t from, int64_t to, const Element* value, const int32_t* of, int64_t n, int64_t end, Scratch& scratch) const {
    for (; n < end; n += MIXED) {
      const int64_t count = std::min(MIXED, end - n), whole = (count + BLOCK - 1) / BLOCK * BLOCK;
      for (int64_t first = 0; first < head_size; first += BLOCK) {
        auto* packed = scratch.value_block.data();
        for (int64_t i = 0; i < count; i += 2) {
          const Element *one = value + of[n + i] * values.row_stride + first;
          const Element *two = value + of[n + std::min(i + 1, count - 1)] * values.row_stride + first;
          for (int64_t v = 0; v < VECTORS; ++v, packed += 2 * LANES) {
            const auto both = Dtype::values(one + v * LANES, two + v * LANES);
            std::memcpy(packed, &both, sizeof both);
          }
        }
        std::fill(packed, scratch.value_block.data() + whole * BLOCK, Element{});
        Floats sums[MOST_TILED_ROWS][VECTORS];
        for (int64_t reader = from; reader < to; ++reader)
          std::memcpy(sums[reader - from], &scratch.sums[reader * head_size + first], sizeof *sums);
        sum_rows<Dtype>(
            to - from, reinterpret_cast<const Element*>(scratch.scores.data() + from * score_stride()) + n,
            score_stride() * 2, scratch.value_block.data(), whole, sums, true);
        for (int64_t reader = from; reader < to; ++reader)
          std::memcpy(&scratch.sums[reader * head_size + first], sums[reader - from], sizeof *sums);
      }
    }
  }

  // A reader's shares, which lie where its scores were.
  static typename Dtype::Share* shares_of(float* scores) { return reinterpret_cast<typename Dtype::Share*>(scores); }

  // Turns scores into 2 ** (score - largest), with zeros up to a whole block; returns their sum.
  static float to_shares(float* of, int64_t count) {
    const int64_t padded = (count + BLOCK - 1) / BLOCK * BLOCK;
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
      total += Dtype::store_shares(shares_of(of) + n, share);
    }
    return sum(total);
  }
};

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
