// Runs the launchers of kernels_cuda.h over random trees, against sums in extended precision and against themselves at
// other alignments. Prints a digest of the bits of all results.
//
//   check [seed [elements [trees]]]    elements: of the largest leaves
//
// Device memory is malloc'ed leaf by leaf, at its exact size, so that AddressSanitizer knows its bounds.
#include <numeric>
#include <random>

#include "kernels_cuda.h"

using namespace globalclip;

namespace {

int failures = 0;
uint64_t digest = 14695981039346656037u;

template <class V>
void enter(const V& value) {
  unsigned char bytes[sizeof(V)];
  std::memcpy(bytes, &value, sizeof value);
  for (unsigned char byte : bytes) digest = (digest ^ byte) * 1099511628211u;
}

void expect(bool good, const char* what, double got, double want) {
  if (good) return;
  std::fprintf(stderr, "check: %s: got %.17g, want %.17g\n", what, got, want);
  ++failures;
}

void expect_success(cudaError_t error) { expect(error == cudaSuccess, "launch", error, cudaSuccess); }

// One leaf in memory of its own, that begins `offset` elements after an address divisible by 16.
class Memory {
 public:
  Memory(int64_t size, DType dtype, int offset) : leaf_{nullptr, size, dtype} {
    const int64_t bytes = element_bytes(dtype);
    if (posix_memalign(&base_, 16, std::max<int64_t>(1, (size + offset) * bytes))) std::abort();
    leaf_.data = static_cast<char*>(base_) + offset * bytes;
  }
  Memory(Memory&& other) : leaf_(other.leaf_), base_(std::exchange(other.base_, nullptr)) {}
  ~Memory() { std::free(base_); }

  const Leaf& leaf() const { return leaf_; }
  void set(int64_t i, double x) {
    with_element_type(leaf_.dtype, [&](auto tag) {
      static_cast<decltype(tag)*>(leaf_.data)[i] = from_double<decltype(tag)>(x);
    });
  }
  double get(int64_t i) const {
    return with_element_type(leaf_.dtype, [&](auto tag) -> double {
      return to_double(static_cast<decltype(tag)*>(leaf_.data)[i]);
    });
  }

 private:
  Leaf leaf_;
  void* base_;
};

struct Options {
  bool per_leaf, leaf_norms, extremes;
  float loss_scale;
  double max_norm;
  OnNonfinite on_nonfinite;
  std::vector<int32_t> counted;  // or none: every leaf counts
};

// What there is to say about some elements, in extended precision.
struct Survey {
  std::vector<double> elements;
  long double squares = 0;
  int32_t nonfinite = 0;
  double largest = 0;
  int64_t zeros = 0;

  void add(double x) {
    squares += static_cast<long double>(x) * x;
    nonfinite += !std::isfinite(x);
    largest = std::fabs(x) > largest ? std::fabs(x) : largest;
    zeros += x == 0;
  }
};

Survey survey(const Memory& memory) {
  Survey all;
  for (int64_t i = 0; i < memory.leaf().size; ++i) {
    all.elements.push_back(memory.get(i));
    all.add(all.elements.back());
  }
  return all;
}

template <class T>
struct Results {
  std::vector<T> rows, norms;
  std::vector<int32_t> nonfinite;
  std::vector<ScaleOp<T>> ops;
  T extremes[2];
};

template <class T>
constexpr DType kDType = sizeof(T) == sizeof(double) ? DType::kF64 : DType::kF32;

// One unit in the last place of T, and half of one for float32's own rounding.
template <class T>
constexpr double kTolerance = 1.5 * (sizeof(T) == sizeof(double) ? 0x1p-52 : 0x1p-23);

// All launches of a clip, in place. Enters the bits of everything they write into the digest.
template <class T>
Results<T> clip(const std::vector<Memory>& tree, const Options& options) {
  std::vector<Leaf> leaves;
  for (const Memory& memory : tree) leaves.push_back(memory.leaf());
  const size_t n = leaves.size(), m = options.leaf_norms ? n + 1 : 1;
  std::vector<LeafTable> tables = make_leaf_tables(leaves);
  if (tables.empty()) tables.emplace_back();
  const int64_t chunks = tables.back().chunk_offset + tables.back().chunks();
  std::vector<SumSquares> partials(chunks);
  std::vector<Extremes> extremes(options.extremes ? chunks : 0);
  std::vector<Total> totals(n);
  const Workspace workspace{partials.data(), extremes.data(), totals.data()};

  const T max_norm = static_cast<T>(options.max_norm);
  Results<T> results{std::vector<T>(3 * m), std::vector<T>(m), std::vector<int32_t>(m),
                     std::vector<ScaleOp<T>>(options.per_leaf ? n + 1 : 1), {}};
  const NormOperands operands{options.counted.empty() ? nullptr : options.counted.data(), &max_norm,
                              &options.loss_scale, results.rows.data(), results.nonfinite.data(),
                              results.norms.data(), results.ops.data(), options.extremes ? results.extremes : nullptr,
                              static_cast<int32_t>(n), options.on_nonfinite, kDType<T>, options.per_leaf,
                              options.leaf_norms};
  const cudaStream_t stream = cuda_on_cpu::stream();
  for (const LeafTable& table : tables) expect_success(launch_grad_norm_partial(stream, table, workspace, operands));
  for (const LeafTable& table : tables) expect_success(launch_grad_norm_final(stream, table, workspace, operands));
  for (auto table = tables.rbegin(); table != tables.rend(); ++table)
    expect_success(launch_grad_scale(stream, *table, scale_operands(operands)));

  for (const SumSquares& partial : partials) enter(partial);
  for (T number : results.rows) enter(number);
  for (T norm : results.norms) enter(norm);
  enter(results.extremes);
  for (const Memory& memory : tree)
    for (int64_t i = 0; i < memory.leaf().size; ++i) enter(memory.get(i));
  return results;
}

template <class T>
void expect_near(const char* what, double got, long double want, double relative) {
  if (std::isnan(static_cast<double>(want))) return expect(std::isnan(got), what, got, NAN);
  if (std::isinf(static_cast<T>(want))) return expect(std::isinf(got), what, got, INFINITY);
  const double error = static_cast<double>(std::fabs(got - want));
  expect(error <= relative * static_cast<double>(std::fabs(want)) + std::numeric_limits<T>::denorm_min(), what, got,
         static_cast<double>(want));
}

template <class T>
void check_row(const T* row, long double squares) {
  const double hi = row[0], exponent = row[2];
  if (std::isnan(squares)) return expect(hi == 0 && exponent == kNanExponent, "row of NaN", exponent, kNanExponent);
  if (std::isinf(squares))
    return expect(hi == 0 && exponent == kInfiniteExponent, "infinite row", exponent, kInfiniteExponent);
  if (squares == 0) return expect(hi == 0 && exponent == kZeroExponent, "row of zeros", exponent, kZeroExponent);
  expect(hi >= 1 && hi <= 4, "row", hi, 1);
  const long double value = std::ldexp(static_cast<long double>(hi) + row[1], 2 * static_cast<int>(exponent));
  expect(std::fabs(value - squares) <= kTolerance<T> * squares, "row", static_cast<double>(value),
         static_cast<double>(squares));
}

Mode expected_mode(bool bad, double norm, const Options& options) {
  if (bad) return Mode::kFill;
  if (norm > options.max_norm) return Mode::kClip;
  return options.loss_scale == 1 ? Mode::kKeep : options.loss_scale == 1024 ? Mode::kUnscale : Mode::kDivide;
}

// Row, count, norm and mode of the whole tree, `index` 0, or of one leaf.
template <class T>
void check_numbers(size_t index, const Survey& of, bool any_nonfinite, const Results<T>& results,
                   const Options& options) {
  const bool zeroes = options.on_nonfinite == OnNonfinite::kZero, good_scale = options.loss_scale > 0;
  check_row(&results.rows[3 * index], of.squares);
  expect(results.nonfinite[index] == of.nonfinite, "non-finite elements", results.nonfinite[index], of.nonfinite);
  long double norm = good_scale ? std::sqrt(of.squares) / options.loss_scale : static_cast<long double>(NAN);
  if (zeroes && std::isnan(norm)) norm = INFINITY;
  expect_near<T>("norm", results.norms[index], norm, kTolerance<T>);
  if (index > 0 && !options.per_leaf) return;
  const ScaleOp<T>& op = results.ops[index];
  const Mode mode = expected_mode(any_nonfinite || !good_scale || !(options.max_norm >= 0), results.norms[index],
                                  options);
  expect(op.kind() == mode, "mode", static_cast<int>(op.kind()), static_cast<int>(mode));
  if (mode == Mode::kFill) expect(zeroes ? op.a == 0 : std::isnan(op.a), "fill", op.a, zeroes ? 0 : NAN);
}

template <class T>
void check_elements(const Memory& memory, const std::vector<double>& before, const ScaleOp<T>& op, double norm,
                    const Options& options) {
  const double grains[] = {0x1p-10, 0x1p-7, 0x1p-23, 0x1p-52};
  const double smallest[] = {0x1p-24, 0x1p-133, 0x1p-149, 0x1p-1074};
  const int kind = static_cast<int>(memory.leaf().dtype);
  const long double factor =
      (op.kind() == Mode::kClip ? static_cast<long double>(options.max_norm) / norm : 1.0L) / options.loss_scale;
  for (size_t j = 0; j < before.size(); ++j) {
    const double got = memory.get(static_cast<int64_t>(j));
    if (op.kind() == Mode::kFill) {
      const double fill = op.a;
      expect(std::memcmp(&got, &fill, sizeof got) == 0 || (std::isnan(got) && std::isnan(fill)), "filled element", got,
             fill);
    } else if (op.kind() == Mode::kKeep) {
      expect(std::memcmp(&got, &before[j], sizeof got) == 0, "element left alone", got, before[j]);
    } else {
      const long double want = before[j] * factor;
      const double error = static_cast<double>(std::fabs(got - want));
      const double relative = 5 * kTolerance<T> + grains[kind] / 2;
      expect(error <= relative * static_cast<double>(std::fabs(want)) + smallest[kind], "element", got,
             static_cast<double>(want));
    }
  }
}

// Clips one tree and checks every result.
template <class T>
void check_tree(std::vector<Memory>& tree, const Options& options) {
  std::vector<Survey> leaves;
  Survey all;
  for (size_t i = 0; i < tree.size(); ++i) {
    leaves.push_back(survey(tree[i]));
    if (options.counted.empty() || options.counted[i])
      for (double x : leaves[i].elements) all.add(x);
  }
  const Results<T> results = clip<T>(tree, options);
  check_numbers(0, all, all.nonfinite > 0, results, options);
  if (options.extremes) {
    expect(results.extremes[0] == static_cast<T>(all.largest), "largest magnitude", results.extremes[0], all.largest);
    expect(results.extremes[1] == all.zeros, "zeros", results.extremes[1], all.zeros);
  }
  for (size_t i = 0; i < tree.size(); ++i) {
    const bool counts = options.counted.empty() || options.counted[i];
    if (options.leaf_norms)
      check_numbers(1 + i, counts ? leaves[i] : Survey{}, all.nonfinite > 0, results, options);
    const size_t own = options.per_leaf ? 1 + i : 0;
    check_elements(tree[i], leaves[i].elements, results.ops[own], results.norms[own], options);
  }
}

// The bits of a leaf's partials and of its elements, multiplied, do not depend on where it begins.
[[maybe_unused]] void check_alignments(std::mt19937_64& random, int64_t size) {
  std::normal_distribution<double> normal;
  std::vector<double> elements(size);
  for (double& x : elements) x = random() % 16 ? normal(random) : 0;
  const Options options{false, true, true, 3.0f, 1.0, OnNonfinite::kPropagate, {}};
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    std::vector<uint64_t> digests;
    for (int offset = 0; offset < 16 / element_bytes(dtype); ++offset) {
      std::vector<Memory> tree;
      tree.emplace_back(size, dtype, offset);
      for (int64_t i = 0; i < size; ++i) tree[0].set(i, elements[i]);
      digest = 0;
      if (dtype == DType::kF64) check_tree<double>(tree, options);
      else check_tree<float>(tree, options);
      digests.push_back(digest);
    }
    for (uint64_t each : digests) expect(each == digests[0], "digest at another alignment", each, digests[0]);
  }
}

// `wide`: with leaves of float64.
std::vector<Memory> random_tree(std::mt19937_64& random, int64_t num_leaves, int64_t largest, bool wide) {
  auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  std::normal_distribution<double> normal;
  const double magnitudes[] = {1, 1e-30, 1e30, 1e-3};
  std::vector<Memory> tree;
  for (int64_t i = 0; i < num_leaves; ++i) {
    const DType dtype = static_cast<DType>(below(wide ? 4 : 3));
    const int64_t size = below(2) ? largest - below(100) : below(4) == 0 ? 0 : 1 + below(2000);
    tree.emplace_back(size, dtype, static_cast<int>(below(16 / element_bytes(dtype))));
    const double magnitude = dtype == DType::kF16 ? 1 : magnitudes[below(4)] * (dtype == DType::kF64 ? 1e150 : 1);
    for (int64_t j = 0; j < size; ++j) tree.back().set(j, below(16) ? normal(random) * magnitude : 0);
    if (below(8) == 0 && size > 0) tree.back().set(below(size), below(2) ? NAN : INFINITY);
  }
  return tree;
}

}  // namespace

int main(int argc, char** argv) {
  const int seed = argc > 1 ? std::atoi(argv[1]) : 1;
  const int64_t largest = argc > 2 ? std::atoll(argv[2]) : 40000;
  const int trees = argc > 3 ? std::atoi(argv[3]) : 8;
  std::mt19937_64 random(seed);
  auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };

  for (int tree_number = 0; tree_number < trees; ++tree_number) {
    const bool first = tree_number == 0, wide = below(2);
    std::vector<Memory> tree = random_tree(random, first ? 6 : below(6), largest, wide);
    Options options{};
    options.per_leaf = below(2);
    options.leaf_norms = options.per_leaf || first || below(2);
    options.extremes = first || below(2);
    options.loss_scale = below(2) ? 1.0f : below(2) ? 1024.0f : below(4) ? 1000.0f : -1.0f;
    options.max_norm = below(3) == 0 ? INFINITY : below(8) ? 1.0 : NAN;
    options.on_nonfinite = below(2) ? OnNonfinite::kPropagate : OnNonfinite::kZero;
    if (!first && below(3) == 0)
      for (size_t i = 0; i < tree.size(); ++i) options.counted.push_back(static_cast<int32_t>(below(2)));
    if (wide) check_tree<double>(tree, options);
    else check_tree<float>(tree, options);
  }
  const uint64_t of_trees = digest;
#ifndef CUDA_ON_CPU_THREADS  // races are the same at every alignment, and slow to look for
  check_alignments(random, std::min<int64_t>(largest, 20001));
#endif
  std::printf("%016llx\n", static_cast<unsigned long long>(of_trees));
  if (failures) std::fprintf(stderr, "check: %d failures\n", failures);
  return failures ? 1 : 0;
}
