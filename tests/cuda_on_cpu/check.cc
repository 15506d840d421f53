// Runs the launchers of kernels.h over random trees, against sums in extended precision and against themselves at other
// alignments. Prints a digest of the bits of all results.
//
//   check [seed [elements [trees]]]    elements: of the largest leaves
//
// Device memory is malloc'ed leaf by leaf, at its exact size, so that AddressSanitizer knows its bounds.
#include <numeric>
#include <random>

#include "kernels.h"

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

// Checks norm, per-leaf norms where they are wanted, counts and scaled elements of one tree.
template <class T>
void check_tree(std::vector<Memory>& tree, bool per_leaf, bool leaf_norms, float loss_scale, double max_norm_wanted) {
  constexpr DType dtype = sizeof(T) == sizeof(double) ? DType::kF64 : DType::kF32;
  std::vector<Leaf> leaves;
  for (const Memory& memory : tree) leaves.push_back(memory.leaf());
  const int32_t n = static_cast<int32_t>(leaves.size());
  std::vector<LeafTable> tables = make_leaf_tables(leaves);
  if (tables.empty()) tables.emplace_back();

  const int64_t chunks = tables.back().chunk_offset + tables.back().chunks();
  std::vector<SumSquares> partials(chunks);
  std::vector<Total> totals(n);
  std::vector<T> norms(leaf_norms ? n + 1 : 1);
  std::vector<int32_t> nonfinite(leaf_norms ? n : 1);
  std::vector<ScaleOp<T>> ops(per_leaf ? n : 1);
  const T max_norm = static_cast<T>(max_norm_wanted);
  const NormOperands operands{&max_norm, &loss_scale, norms.data(), nonfinite.data(), ops.data(),
                              OnNonfinite::kPropagate, dtype, per_leaf, leaf_norms};

  std::vector<std::vector<double>> before;
  std::vector<long double> squares;
  long double all = 0;
  std::vector<int32_t> bad;
  for (const Memory& memory : tree) {
    before.emplace_back();
    bad.push_back(0);
    long double sum = 0;
    for (int64_t i = 0; i < memory.leaf().size; ++i) {
      const double x = memory.get(i);
      before.back().push_back(x);
      sum += static_cast<long double>(x) * x;
      bad.back() += !std::isfinite(x);
    }
    squares.push_back(sum);
    all += sum;
  }

  for (const LeafTable& table : tables)
    expect_success(launch_grad_norm_partial(cuda_on_cpu::stream(), table, dtype, partials.data()));
  for (const LeafTable& table : tables)
    expect_success(launch_grad_norm_final(cuda_on_cpu::stream(), table, partials.data(), totals.data(), n, operands));
  for (auto table = tables.rbegin(); table != tables.rend(); ++table)
    expect_success(launch_grad_scale(cuda_on_cpu::stream(), *table, {ops.data(), dtype, per_leaf}));

  for (const SumSquares& partial : partials) enter(partial);
  for (T norm : norms) enter(norm);
  for (const Memory& memory : tree)
    for (int64_t i = 0; i < memory.leaf().size; ++i) enter(memory.get(i));

  // One unit in the last place of T, and half of one for float32's own rounding.
  const double tolerance = 1.5 * (sizeof(T) == sizeof(double) ? 0x1p-52 : 0x1p-23);
  auto expect_near = [&](const char* what, double got, long double want, double relative) {
    if (std::isnan(static_cast<double>(want))) return expect(std::isnan(got), what, got, NAN);
    if (std::isinf(static_cast<T>(want))) return expect(std::isinf(got), what, got, INFINITY);
    const double error = static_cast<double>(std::fabs(got - want));
    expect(error <= relative * static_cast<double>(std::fabs(want)) + std::numeric_limits<T>::denorm_min(), what, got,
           static_cast<double>(want));
  };
  expect_near("norm", norms[0], std::sqrt(all) / loss_scale, tolerance);
  const int32_t all_bad = std::accumulate(bad.begin(), bad.end(), 0);
  if (!leaf_norms) expect(nonfinite[0] == all_bad, "non-finite elements of the tree", nonfinite[0], all_bad);
  for (int32_t i = 0; i < n; ++i) {
    const long double leaf_norm = std::sqrt(squares[i]) / loss_scale;
    if (leaf_norms) {
      expect_near("norm of a leaf", norms[1 + i], leaf_norm, tolerance);
      expect(nonfinite[i] == bad[i], "non-finite elements", nonfinite[i], bad[i]);
    }
    const long double own = per_leaf ? leaf_norm : std::sqrt(all) / loss_scale;
    const bool keeps = (per_leaf ? norms[1 + i] : norms[0]) <= max_norm;
    const long double factor = (keeps ? 1 : max_norm / own) / loss_scale;
    const double grains[] = {0x1p-10, 0x1p-7, 0x1p-23, 0x1p-52};
    const double smallest[] = {0x1p-24, 0x1p-133, 0x1p-149, 0x1p-1074};
    const int kind = static_cast<int>(leaves[i].dtype);
    for (int64_t j = 0; j < leaves[i].size; ++j) {
      const double got = tree[i].get(j);
      if (all_bad > 0) {
        expect(std::isnan(got), "element of a non-finite tree", got, NAN);
      } else if (keeps && loss_scale == 1) {
        expect(std::memcmp(&got, &before[i][j], sizeof got) == 0, "element left alone", got, before[i][j]);
      } else {
        const long double want = before[i][j] * factor;
        const double error = static_cast<double>(std::fabs(got - want));
        expect(error <= (4 * tolerance + grains[kind] / 2) * static_cast<double>(std::fabs(want)) + smallest[kind],
               "element", got, static_cast<double>(want));
      }
    }
  }
}

// The bits of a leaf's partials and of its elements, multiplied, do not depend on where it begins.
void check_alignments(std::mt19937_64& random, int64_t size) {
  std::normal_distribution<double> normal;
  std::vector<double> elements(size);
  for (double& x : elements) x = normal(random);
  for (DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    std::vector<uint64_t> digests;
    for (int offset = 0; offset < 16 / element_bytes(dtype); ++offset) {
      std::vector<Memory> tree;
      tree.emplace_back(size, dtype, offset);
      for (int64_t i = 0; i < size; ++i) tree[0].set(i, elements[i]);
      digest = 0;
      if (dtype == DType::kF64) check_tree<double>(tree, false, true, 3.0f, 1.0);
      else check_tree<float>(tree, false, true, 3.0f, 1.0);
      digests.push_back(digest);
    }
    for (uint64_t each : digests) expect(each == digests[0], "digest at another alignment", each, digests[0]);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int seed = argc > 1 ? std::atoi(argv[1]) : 1;
  const int64_t largest = argc > 2 ? std::atoll(argv[2]) : 40000;
  const int trees = argc > 3 ? std::atoi(argv[3]) : 8;
  std::mt19937_64 random(seed);
  auto below = [&](uint64_t n) { return static_cast<int64_t>(random() % n); };
  std::normal_distribution<double> normal;

  for (int tree_number = 0; tree_number < trees; ++tree_number) {
    std::vector<Memory> tree;
    const bool wide = below(2);
    const int64_t num_leaves = tree_number == 0 ? 6 : below(6);
    const double magnitudes[] = {1, 1e-30, 1e30, 1e-3};
    for (int64_t i = 0; i < num_leaves; ++i) {
      const DType dtype = static_cast<DType>(below(wide ? 4 : 3));
      const int64_t size = below(2) ? largest - below(100) : below(4) == 0 ? 0 : 1 + below(2000);
      tree.emplace_back(size, dtype, static_cast<int>(below(16 / element_bytes(dtype))));
      const double magnitude = dtype == DType::kF16 ? 1 : magnitudes[below(4)] * (dtype == DType::kF64 ? 1e150 : 1);
      for (int64_t j = 0; j < size; ++j) tree.back().set(j, normal(random) * magnitude);
      if (below(8) == 0 && size > 0) tree.back().set(below(size), below(2) ? NAN : INFINITY);
    }
    const bool per_leaf = below(2), leaf_norms = per_leaf || tree_number == 0 || below(2);
    const float loss_scale = below(2) ? 1.0f : below(2) ? 1024.0f : 1000.0f;
    const double max_norm = below(3) == 0 ? INFINITY : 1.0;
    if (wide) check_tree<double>(tree, per_leaf, leaf_norms, loss_scale, max_norm);
    else check_tree<float>(tree, per_leaf, leaf_norms, loss_scale, max_norm);
  }
  const uint64_t of_trees = digest;
#ifndef CUDA_ON_CPU_THREADS  // races are the same at every alignment, and slow to look for
  check_alignments(random, std::min<int64_t>(largest, 20001));
#endif
  std::printf("%016llx\n", static_cast<unsigned long long>(of_trees));
  if (failures) std::fprintf(stderr, "check: %d failures\n", failures);
  return failures ? 1 : 0;
}
