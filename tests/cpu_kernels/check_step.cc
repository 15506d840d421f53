// Runs both instruction sets of adamw_cpu.cc over random leaves of every combination of types and compares the bits of
// moments and parameters. Arrays are malloc'ed at their exact size, so that AddressSanitizer knows their bounds.
// Exits with 77 where the machine has no AVX2.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "adamw_cpu.h"

using namespace globalclip;

namespace {

int failures = 0;

struct Arrays {
  std::vector<char> memory[4];  // g, m, v, p
  StepLeaf leaf{};

  Arrays(unsigned seed, bool wide) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> uniform(-1, 1);
    leaf.size = random() % 3000;
    leaf.decays = random() % 2;
    for (int j = 0; j < 4; ++j) {
      const DType dtype = static_cast<DType>(random() % (wide ? 4 : 3));
      (j == 0 ? leaf.g_type : j == 1 ? leaf.m_type : j == 2 ? leaf.v_type : leaf.p_type) = dtype;
      memory[j].resize(leaf.size * element_bytes(dtype));
      for (int64_t i = 0; i < leaf.size; ++i) {
        const double x = j == 2 ? 0.5 + 0.5 * std::abs(uniform(random)) : uniform(random);
        with_element_type(dtype, [&](auto tag) {
          reinterpret_cast<decltype(tag)*>(memory[j].data())[i] = from_double<decltype(tag)>(x);
        });
      }
    }
    leaf.g = memory[0].data();
    leaf.m = memory[1].data();
    leaf.v = memory[2].data();
    leaf.p = memory[3].data();
  }
};

template <class T>
void check(unsigned seed) {
  const Mode modes[] = {Mode::kKeep, Mode::kUnscale, Mode::kDivide, Mode::kClip, Mode::kFill};
  const ScaleOp<T> op = make_op<T>(modes[seed % 5], 0.3, 0.7);
  const Coefficients<T> of = {T(0.9), T(0.1), T(0.99), T(0.01), T(1e-3), T(1e-6), T(0.19), T(0.0199), T(0.125), T(0.25)};
  Arrays before(seed, sizeof(T) == 8), baseline(seed, sizeof(T) == 8), avx2(seed, sizeof(T) == 8);
  if constexpr (sizeof(T) == 8) {
    kAdamwKernelsBaseline.step_double(baseline.leaf, 0, baseline.leaf.size, op, of);
    kAdamwKernelsAvx2.step_double(avx2.leaf, 0, avx2.leaf.size, op, of);
  } else {
    kAdamwKernelsBaseline.step_float(baseline.leaf, 0, baseline.leaf.size, op, of);
    kAdamwKernelsAvx2.step_float(avx2.leaf, 0, avx2.leaf.size, op, of);
  }
  for (int j = 0; j < 4; ++j) {
    if (baseline.memory[j] != avx2.memory[j] && ++failures) std::fprintf(stderr, "seed %u: array %d differs\n", seed, j);
    if ((baseline.memory[j] == before.memory[j]) != (j == 0 || before.leaf.size == 0) && ++failures)
      std::fprintf(stderr, "seed %u: array %d: gradients stay, and nothing else does\n", seed, j);
  }
}

}  // namespace

int main() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("f16c")) return 77;
  for (unsigned seed = 0; seed < 300; ++seed) {
    check<float>(seed);
    check<double>(seed);
  }
  return failures ? 1 : 0;
}
