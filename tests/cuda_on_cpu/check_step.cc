// Runs the launcher of adamw_cuda.h over random leaves of every combination of types, against the formula in extended
// precision and against itself at other alignments. Prints a digest of the bits of all results.
//
//   check_step [seed [elements [trees]]]    elements: of the largest leaves
//
// Device memory is malloc'ed array by array, at its exact size, so that AddressSanitizer knows its bounds.
#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <vector>

#include "adamw_cuda.h"

using namespace globalclip;

namespace {

int failures = 0;
uint64_t digest = 14695981039346656037u;

// One array in memory of its own, that begins `offset` elements after an address divisible by 16.
struct Memory {
  DType dtype;
  int64_t size;
  void* base;
  char* data;

  Memory(DType dtype, int64_t size, int offset) : dtype(dtype), size(size) {
    const int64_t bytes = element_bytes(dtype);
    if (posix_memalign(&base, 16, std::max<int64_t>(1, (size + offset) * bytes))) std::abort();
    data = static_cast<char*>(base) + offset * bytes;
  }
  ~Memory() { std::free(base); }
  void set(int64_t i, double x) {
    with_element_type(dtype, [&](auto tag) { reinterpret_cast<decltype(tag)*>(data)[i] = from_double<decltype(tag)>(x); });
  }
  double get(int64_t i) const {
    return with_element_type(dtype, [&](auto tag) -> double { return to_double(reinterpret_cast<decltype(tag)*>(data)[i]); });
  }
};

double grain(DType dtype) {
  return dtype == DType::kF16 ? 0x1p-10 : dtype == DType::kBF16 ? 0x1p-7 : dtype == DType::kF32 ? 0x1p-23 : 0x1p-52;
}

struct Tree {
  std::vector<std::unique_ptr<Memory>> arrays[4];  // g, m, v, p
  std::vector<bool> decays;
};

Tree make_tree(unsigned seed, int64_t elements, bool wide, int offset) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(-1, 1);
  Tree tree;
  for (int leaf = 0; leaf < 24; ++leaf) {
    const int64_t size = leaf < 4 ? leaf : leaf == 4 ? elements : random() % (leaf % 5 ? 600 : elements);
    for (int j = 0; j < 4; ++j) {
      const DType dtype = static_cast<DType>(random() % (wide ? 4 : 3));
      Memory& memory = *tree.arrays[j].emplace_back(new Memory(dtype, size, offset ? (offset + j) % 5 : 0));
      for (int64_t i = 0; i < size; ++i) memory.set(i, j == 2 ? 0.5 + 0.4 * uniform(random) : uniform(random));
    }
    tree.decays.push_back(random() % 2);
  }
  return tree;
}

template <class T>
void run(const Tree& tree, const ScaleOp<T>& op, const Coefficients<T>& of, bool skips, DType dtype) {
  static StepTable table;
  table.num_leaves = 0;
  table.first_chunk[0] = 0;
  for (size_t i = 0; i < tree.decays.size(); ++i) {
    const Memory *g = tree.arrays[0][i].get(), *m = tree.arrays[1][i].get(), *v = tree.arrays[2][i].get(),
                 *p = tree.arrays[3][i].get();
    table.add({g->data, m->data, v->data, p->data, g->size, g->dtype, m->dtype, v->dtype, p->dtype, tree.decays[i]});
  }
  const std::unique_ptr<ScaleOp<T>> own_op(new ScaleOp<T>(op));
  const std::unique_ptr<Coefficients<T>> own_of(new Coefficients<T>(of));
  if (launch_adamw_step(cuda_on_cpu::stream(), table, {own_op.get(), own_of.get(), dtype, skips}) != cudaSuccess) ++failures;
}

template <class T>
void check(unsigned seed, int64_t elements, bool skips) {
  const DType dtype = sizeof(T) == 8 ? DType::kF64 : DType::kF32;
  const Mode modes[] = {Mode::kKeep, Mode::kUnscale, Mode::kDivide, Mode::kClip, Mode::kFill};
  const Mode mode = skips ? Mode::kFill : modes[seed % 5];
  const T a = mode == Mode::kFill ? 0 : static_cast<T>(0.625), b = mode == Mode::kDivide ? 1 : static_cast<T>(0.5);
  const ScaleOp<T> op = make_op<T>(mode, a, b);
  const Coefficients<T> of = {T(0.9), T(0.1), T(0.99), T(0.01), T(1e-3), T(1e-6), T(0.19), T(0.0199), T(0.125), T(0.25)};
  const Tree before = make_tree(seed, elements, dtype == DType::kF64, 0);
  const Tree after = make_tree(seed, elements, dtype == DType::kF64, 0);
  const Tree elsewhere = make_tree(seed, elements, dtype == DType::kF64, 1 + seed % 4);
  run(after, op, of, skips, dtype);
  run(elsewhere, op, of, skips, dtype);
  const double unit = sizeof(T) == 8 ? 0x1p-50 : 0x1p-20;
  for (size_t leaf = 0; leaf < before.decays.size(); ++leaf)
    for (int64_t i = 0; i < before.arrays[0][leaf]->size; ++i) {
      long double x[4];
      for (int j = 0; j < 4; ++j) x[j] = before.arrays[j][leaf]->get(i);
      long double g = x[0];
      if (mode == Mode::kUnscale || mode == Mode::kClip) g *= static_cast<long double>(a) * b;
      if (mode == Mode::kDivide) g /= a;
      if (mode == Mode::kFill) g = a;
      long double want[4] = {x[0], of.b1 * x[1] + of.one_minus_b1 * g, of.b2 * x[2] + of.one_minus_b2 * g * g, 0};
      const long double update = want[1] / of.correction1 / (std::sqrt(want[2] / of.correction2 + of.eps_root) + of.eps);
      want[3] = x[3] - of.learning_rate * (update + (before.decays[leaf] ? of.weight_decay * x[3] : 0));
      for (int j = 0; j < 4; ++j) {
        const double got = after.arrays[j][leaf]->get(i);
        const long double exact = skips ? x[j] : want[j];
        const long double far = j == 0 || skips ? 0 : grain(after.arrays[j][leaf]->dtype) * std::abs(exact) + 4 * unit + 1e-6 * (after.arrays[j][leaf]->dtype == DType::kF16);
        if (!(std::abs(got - exact) <= far) && ++failures < 10)
          std::fprintf(stderr, "check_step: leaf %zu element %ld array %d: got %.17g, want %.17g\n", leaf,
                       static_cast<long>(i), j, got, static_cast<double>(exact));
        if (got != elsewhere.arrays[j][leaf]->get(i) && ++failures < 10)
          std::fprintf(stderr, "check_step: leaf %zu element %ld array %d differs at another alignment\n", leaf,
                       static_cast<long>(i), j);
        for (unsigned char byte : bit_cast<std::array<unsigned char, 8>>(got)) digest = (digest ^ byte) * 1099511628211u;
      }
    }
}

}  // namespace

int main(int argc, char** argv) {
  const unsigned seed = argc > 1 ? std::atoi(argv[1]) : 1;
  const int64_t elements = argc > 2 ? std::atoll(argv[2]) : 40000;
  const int trees = argc > 3 ? std::atoi(argv[3]) : 5;
  for (int i = 0; i < trees; ++i) {
    check<float>(seed + i, elements, false);
    check<double>(seed + i, elements, false);
  }
  check<float>(seed, elements, true);
  std::printf("%016llx\n", static_cast<unsigned long long>(digest));
  return failures ? 1 : 0;
}
