// torch's operations for decoding and training on a CPU, and the class `DecoderLayers` (cpu_layers.h).

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <queue>
#include <tuple>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cpu_layers.h"
#include "cpu_math.h"

namespace {

// Memory for packed weights, one after the other in pages of 2 MB where the system has them: a step reads all weights,
// and waits for fewer addresses of pages. A slab is freed with the last of its weights.
at::Tensor empty_packed(at::IntArrayRef sizes, const at::TensorOptions& options) {
  constexpr int64_t PAGE = int64_t{1} << 21, SLAB = 16 * PAGE;
  static std::mutex mutex;
  static std::shared_ptr<char> slab;
  static int64_t used = 0, size = 0;
  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(options.dtype().itemsize());
  const std::lock_guard lock(mutex);
  if (!slab || used + bytes > size) {
    size = std::max(SLAB, (bytes + PAGE - 1) / PAGE * PAGE), used = 0;
    slab.reset(static_cast<char*>(std::aligned_alloc(PAGE, size)), std::free);
    TORCH_CHECK(slab, "not enough memory for packed weights");
#ifdef MADV_HUGEPAGE
    madvise(slab.get(), size, MADV_HUGEPAGE);
#endif
  }
  auto packed = at::from_blob(slab.get() + used, sizes, [held = slab](void*) {}, options);
  used += (bytes + LINE - 1) / LINE * LINE;
  return packed;
}

// packed [blocks, K / PACK, BLOCK, PACK] of a weight [N, K]; what is not there is zero.
at::Tensor pack(const at::Tensor& weight) {
  check_dtype(weight);
  TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0, "a weight must be [outputs, inputs]");
  const auto from = weight.contiguous();
  const int64_t outputs = from.size(0), inputs = from.size(1), together = from.scalar_type() == at::kBFloat16 ? 2 : 1;
  const int64_t blocks = (outputs + BLOCK - 1) / BLOCK, packs = (inputs + together - 1) / together;
  auto packed = empty_packed({blocks, packs, BLOCK, together}, from.options());
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
  TORCH_CHECK(rows.dim() > 0, "rows must be [..., inputs]");
  auto sizes = rows.sizes().vec();
  sizes.back() = outputs;
  const Projection projection(packed, bias, outputs, rows.size(-1));
  auto out = at::empty(sizes, rows.options());
  multiply(rows.reshape({-1, rows.size(-1)}).contiguous(), projection, out);
  return out;
}

// query [1, H, R, D], keys and values [1, G, S, D]; a row sees the columns at which its mask [1, 1, R, S] is 0, or all:
// [1, R, H, D].
at::Tensor attention(
    const at::Tensor& query, const at::Tensor& keys, const at::Tensor& values, const std::optional<at::Tensor>& mask,
    double scale) {
  const int64_t rows = query.size(2), columns = keys.size(2), head_size = query.size(3);
  TORCH_CHECK(query.dim() == 4 && keys.dim() == 4 && (!mask || mask->dim() == 4), "query, keys, values and mask have four dimensions");
  TORCH_CHECK(query.size(0) == 1 && keys.size(0) == 1 && keys.size(1) > 0 && columns > 0, "one sequence at a time, with keys");
  TORCH_CHECK(
      keys.size(3) == head_size && values.sizes() == keys.sizes() && query.size(1) % keys.size(1) == 0,
      "query, keys and values differ in size");
  TORCH_CHECK(
      keys.dtype() == query.dtype() && values.dtype() == query.dtype(), "query, keys and values differ in dtype");
  check_head_size(head_size);
  TORCH_CHECK(query.stride(3) == 1 && keys.stride(3) == 1 && values.stride(3) == 1, "heads must be contiguous");
  TORCH_CHECK(
      !mask || (mask->size(2) == rows && mask->size(3) == columns && mask->stride(3) == 1 && mask->dtype() == query.dtype()),
      "mask must be [1, 1, rows, columns] in the query's dtype");
  std::vector<int32_t> seen(rows * columns);
  std::vector<int64_t> counts(rows, columns);
  auto out = at::empty({1, rows, query.size(1), head_size}, query.options());
  with_dtype(query, [&](auto dtype) {
    using Dtype = decltype(dtype);
    using Element = typename Dtype::Element;
    const auto at_of = [](const at::Tensor& tensor) { return static_cast<Element*>(tensor.data_ptr()); };
    for (int64_t row = 0; row < rows; ++row) {
      int32_t* to = seen.data() + row * columns;
      if (mask)
        counts[row] = find_seen<Dtype>(at_of(*mask) + row * mask->stride(2), columns, to);
      else
        std::iota(to, to + columns, 0);
      TORCH_CHECK(counts[row] > 0, "a row sees nothing");
    }
    const Attention<Dtype> attention{
        .query = {at_of(query), query.stride(1), query.stride(2)},
        .keys = {at_of(keys), keys.stride(1), keys.stride(2)},
        .values = {at_of(values), values.stride(1), values.stride(2)},
        .out = {at_of(out), head_size, query.size(1) * head_size},
        .rows = rows,
        .heads = query.size(1),
        .kv_heads = keys.size(1),
        .head_size = head_size,
        .columns = columns,
        .seen = seen.data(),
        .counts = counts.data(),
        .scale = static_cast<float>(scale)};
    const auto common = attention.count_common();
    at::parallel_for(0, attention.readers(), 1, [&](int64_t begin, int64_t end) {
      const Tiles tiles;
      typename Attention<Dtype>::Scratch scratch(attention);
      attention.run(begin, end, common.data(), scratch);
    });
  });
  return out;
}

// `norm_into`, of rows [..., D].
at::Tensor norm(const at::Tensor& rows, const at::Tensor& weight, double eps, bool rounds_twice) {
  const auto flat = rows.reshape({-1, rows.size(-1)}).contiguous();
  const auto out = at::empty(flat.sizes(), flat.options());
  norm_into(flat, weight, eps, rounds_twice, out);
  return out.view(rows.sizes());
}

// The inputs [n + K, D] of a draft's rows. Those of ids [n] project their embeddings, if there is a table [V, D], and their
// features [n, F], D of these at a time, each part with its norm; after them come the masks [K, D], to which the last id's
// inputs are added, or not.
at::Tensor fuse(
    const at::Tensor& ids, const std::optional<at::Tensor>& table, const at::Tensor& features, at::TensorList norms, double eps,
    const at::Tensor& packed, const std::optional<at::Tensor>& bias, const at::Tensor& masks, bool adds_last) {
  const int64_t known = features.size(0), size = masks.size(1), parts = static_cast<int64_t>(norms.size());
  TORCH_CHECK(known > 0 && features.size(1) == (parts - table.has_value()) * size, "features have another size");
  const auto read = at::empty({known, parts * size}, masks.options());
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t of_features = part - table.has_value();
    const auto rows = of_features < 0 ? table->index_select(0, ids) : features.narrow(1, of_features * size, size);
    norm_into(rows, norms[part], eps, false, read.narrow(1, part * size, size));
  }
  const auto inputs = at::empty({known + masks.size(0), size}, masks.options());
  multiply(read, {packed, bias, size, parts * size}, inputs.narrow(0, 0, known));
  const auto after = inputs.narrow(0, known, masks.size(0));
  after.copy_(masks);
  if (adds_last) after.add_(inputs.narrow(0, known - 1, 1));
  return inputs;
}

constexpr int64_t FEW_LOGITS = 1 << 16;  // one thread has read them before another begins

// The `count` largest of each row [R, V] of logits, the first of equals first: their columns, and the logarithms of
// their shares of all. Both in fp64, in which columns are exact: [2, R, count].
at::Tensor most_likely(const at::Tensor& logits, int64_t count) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1, "logits must be [R, V] in fp32");
  const int64_t rows = logits.size(0), columns = logits.size(1);
  TORCH_CHECK(rows > 0 && count > 0 && count <= columns, "there are not as many rows or columns");
  auto out = at::empty({2, rows, count}, logits.options().dtype(at::kDouble));
  auto* to = out.mutable_data_ptr<double>();
  at::parallel_for(0, rows, FEW_LOGITS / columns + 1, [&](int64_t begin, int64_t end) {
    std::vector<std::pair<float, int64_t>> best(count);
    for (int64_t row = begin; row < end; ++row) {
      const float* of = logits.const_data_ptr<float>() + row * logits.stride(0);
      int64_t known = 0;
      float least = -INFINITY;
      for (int64_t first = 0; first < columns; first += LANES) {
        const int64_t last = std::min(columns, first + LANES);
        if (known == count && last - first == LANES && !any_above(Float32::load(of + first), least)) continue;
        for (int64_t column = first; column < last; ++column) {
          if (known == count && !(of[column] > least)) continue;
          int64_t place = known < count ? known++ : count - 1;
          for (; place > 0 && of[column] > best[place - 1].first; --place) best[place] = best[place - 1];
          best[place] = {of[column], column};
          least = best[known - 1].first;
        }
      }
      const float largest = best[0].first;
      Floats sums = {};
      float rest = 0;
      int64_t column = 0;
      for (; column + LANES <= columns; column += LANES)
        sums += power_of_two((Float32::load(of + column) - largest) * LOG2_E);
      for (; column < columns; ++column) rest += std::exp(of[column] - largest);
      const double all = std::log(static_cast<double>(sum(sums)) + rest);
      for (int64_t place = 0; place < count; ++place) {
        to[row * count + place] = static_cast<double>(best[place].second);
        to[(rows + row) * count + place] = static_cast<double>(best[place].first) - largest - all;
      }
    }
  });
  return out;
}

// The `nodes` most likely paths of tokens, one of the `branch` most likely of each row [G, V] after the other: columns,
// parents (0 is the root) and log probabilities of the nodes. As `best_first` in cpu_kernels.py, which says how.
std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>> best_first(
    const at::Tensor& logits, int64_t branch, int64_t nodes) {
  const auto found = most_likely(logits, branch);
  const int64_t depths = found.size(1), width = found.size(2);
  const auto* columns = found.const_data_ptr<double>();
  const double* log_q = columns + depths * width;
  struct Path {
    double cost;
    int64_t arrival, parent, depth, rank;
    bool operator<(const Path& other) const { return std::tie(other.cost, other.arrival) < std::tie(cost, arrival); }
  };
  std::priority_queue<Path> paths;
  paths.push({-log_q[0], 0, 0, 0, 0});
  int64_t arrivals = 1;
  std::tuple<std::vector<int64_t>, std::vector<int64_t>, std::vector<double>> tree;
  auto& [tokens, parents, confidence] = tree;
  while (!paths.empty() && static_cast<int64_t>(tokens.size()) < nodes) {
    const Path best = paths.top();
    paths.pop();
    const int64_t place = best.depth * width + best.rank;
    tokens.push_back(static_cast<int64_t>(columns[place]));
    parents.push_back(best.parent);
    confidence.push_back(-best.cost);
    if (best.rank + 1 < width && log_q[place + 1] > -INFINITY)
      paths.push({best.cost + log_q[place] - log_q[place + 1], arrivals++, best.parent, best.depth, best.rank + 1});
    if (best.depth + 1 < depths)
      paths.push({best.cost - log_q[(best.depth + 1) * width], arrivals++, static_cast<int64_t>(tokens.size()), best.depth + 1, 0});
  }
  return tree;
}

// Moves the rows start + rows[i], ascending, of each [..., S, D] to start + i.
void keep_rows(at::Tensor held, int64_t start, at::IntArrayRef rows) {
  const int64_t columns = held.size(-2), bytes = held.size(-1) * held.element_size();
  TORCH_CHECK(held.is_contiguous(), "the cache must be contiguous");
  TORCH_CHECK(start >= 0 && start <= columns, "there is no such row");
  int64_t place = 0;
  for (const int64_t row : rows) TORCH_CHECK(row >= place++ && row < columns - start, "there is no such row");
  auto* of = static_cast<char*>(held.data_ptr()) + start * bytes;
  for (int64_t part = held.numel() / std::max<int64_t>(columns * held.size(-1), 1); part > 0; --part, of += columns * bytes)
    for (size_t i = 0; i < rows.size(); ++i)
      if (rows[i] != static_cast<int64_t>(i)) std::memcpy(of + i * bytes, of + rows[i] * bytes, bytes);
}

inline float below(float value) { return std::nextafter(value, -INFINITY); }

// The first largest of each row [R, V]: [R] int64.
at::Tensor largest(const at::Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1 && logits.size(1) > 0, "logits must be [R, V]");
  const int64_t rows = logits.size(0), columns = logits.size(1), whole = columns / LANES * LANES;
  auto out = at::empty({rows}, logits.options().dtype(at::kLong));
  auto* to = out.mutable_data_ptr<int64_t>();
  with_dtype(logits, [&](auto dtype) {
    using Dtype = decltype(dtype);
    at::parallel_for(0, rows, FEW_LOGITS / columns + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const auto* of = static_cast<const typename Dtype::Element*>(logits.const_data_ptr()) + row * logits.stride(0);
        Floats most = broadcast(-INFINITY);
        for (int64_t column = 0; column < whole; column += LANES) {
          const Floats next = Dtype::load(of + column);
          most = most > next ? most : next;
        }
        float best = most[0];
        for (int64_t lane = 1; lane < LANES; ++lane) best = std::max(best, most[lane]);
        for (int64_t column = whole; column < columns; ++column) best = std::max(best, Dtype::widen(of[column]));
        int64_t place = 0;
        while (place + LANES < columns && !any_above(Dtype::load(of + place), below(best))) place += LANES;
        while (place < columns - 1 && !(Dtype::widen(of[place]) >= best)) ++place;
        to[row] = place;
      }
    });
  });
  return out;
}

// The cross entropy [R] of each row [R, V] of logits in bf16, and whether its label is the first largest; the gradient,
// softmax less one-hot, times the row's weight in fp32 takes the logits' place.
void cross_entropy(at::Tensor logits, const at::Tensor& labels, const at::Tensor& weights, at::Tensor losses, at::Tensor is_largest) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kBFloat16 && logits.stride(1) == 1, "logits must be [R, V] in bf16");
  for (const at::Tensor& each : {labels, weights, losses, is_largest})
    TORCH_CHECK(each.is_contiguous() && each.numel() == logits.size(0), "labels, weights and results must be [R], and contiguous");
  const int64_t rows = logits.size(0), columns = logits.size(1), whole = columns / LANES * LANES;
  const auto* label_of = labels.const_data_ptr<int64_t>();
  auto* loss_of = losses.mutable_data_ptr<float>();
  auto* first_of = is_largest.mutable_data_ptr<bool>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      auto* of = static_cast<uint16_t*>(logits.mutable_data_ptr()) + row * logits.stride(0);
      const int64_t label = label_of[row];
      TORCH_CHECK(label >= 0 && label < columns, "there is no such label");
      const float wanted = BFloat16::widen(of[label]);
      Floats most = broadcast(-INFINITY);
      for (int64_t column = 0; column < whole; column += LANES) {
        const Floats next = BFloat16::load(of + column);
        most = most > next ? most : next;
      }
      float best = -INFINITY;
      for (int64_t lane = 0; lane < LANES; ++lane) best = std::max(best, most[lane]);
      for (int64_t column = whole; column < columns; ++column) best = std::max(best, BFloat16::widen(of[column]));
      int64_t place = 0;
      if (wanted == best)
        while (place < label && !(BFloat16::widen(of[place]) == best)) ++place;
      first_of[row] = wanted == best && place == label;
      Floats sums = {};
      float total = 0;
      for (int64_t column = 0; column < whole; column += LANES)
        sums += power_of_two((BFloat16::load(of + column) - best) * LOG2_E);
      for (int64_t column = whole; column < columns; ++column) total += std::exp(BFloat16::widen(of[column]) - best);
      total += sum(sums);
      loss_of[row] = std::log(total) - (wanted - best);
      const float weight = weights.const_data_ptr<float>()[row], share = weight / total;
      for (int64_t column = 0; column < whole; column += LANES)
        BFloat16::store(of + column, power_of_two((BFloat16::load(of + column) - best) * LOG2_E) * share);
      for (int64_t column = whole; column < columns; ++column)
        store_first<BFloat16>(of + column, broadcast(std::exp(BFloat16::widen(of[column]) - best) * share), 1);
      store_first<BFloat16>(of + label, broadcast(std::exp(wanted - best) * share - weight), 1);
    }
  });
}

}  // namespace

TORCH_LIBRARY(draftsmith, library) {
  library.class_<DecoderLayers>("DecoderLayers")
      .def(torch::init<int64_t, int64_t, int64_t, int64_t, double, double>())
      .def("add_layer", &DecoderLayers::add_layer)
      .def("set_head", &DecoderLayers::set_head)
      .def("forward", &DecoderLayers::forward);
  library.def("lanes() -> int", [] { return LANES; });
  library.def("pack(Tensor weight) -> Tensor");
  library.def("linear(Tensor rows, Tensor packed, int outputs, Tensor? bias) -> Tensor");
  library.def(
      "fuse(Tensor ids, Tensor? table, Tensor features, Tensor[] norms, float eps, Tensor packed, Tensor? bias, Tensor masks, "
      "bool adds_last) -> Tensor");
  library.def("norm(Tensor rows, Tensor weight, float eps, bool rounds_twice) -> Tensor");
  library.def("most_likely(Tensor logits, int count) -> Tensor");
  library.def("best_first(Tensor logits, int branch, int nodes) -> (int[], int[], float[])");
  library.def("largest(Tensor logits) -> Tensor");
  library.def("keep_rows(Tensor(a!) held, int start, int[] rows) -> ()");
  library.def("cross_entropy(Tensor(a!) logits, Tensor labels, Tensor weights, Tensor(b!) losses, Tensor(c!) is_largest) -> ()");
  library.def("attention(Tensor query, Tensor keys, Tensor values, Tensor? mask, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(draftsmith, CPU, library) {
  library.impl("pack", pack);
  library.impl("linear", linear);
  library.impl("norm", norm);
  library.impl("fuse", fuse);
  library.impl("most_likely", most_likely);
  library.impl("best_first", best_first);
  library.impl("largest", largest);
  library.impl("keep_rows", keep_rows);
  library.impl("cross_entropy", cross_entropy);
  library.impl("attention", attention);
}
