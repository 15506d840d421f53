// Both tables of kernels_cpu.cc over random chunks: every bit of a sum, of extremes and of a scaled element is equal.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels_cpu.h"

using namespace globalclip;

namespace {

int failures = 0;

template <class T>
bool same(const T& a, const T& b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void expect(bool good, const char* what, DType dtype, int64_t size, int offset) {
  if (good) return;
  ++failures;
  std::fprintf(stderr, "%s differs: dtype %d, %lld elements, %d bytes off\n", what, static_cast<int>(dtype),
               static_cast<long long>(size), offset);
}

// A chunk of random bits or of ordinary numbers, `offset` bytes into memory that ends with it.
struct Memory {
  Memory(std::mt19937_64& random, DType dtype, int64_t size, int offset, bool any_bits)
      : bytes(offset + size * element_bytes(dtype)), chunk{bytes.data() + offset, size, dtype, 0} {
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < size; ++i) {
      const uint64_t bits = random();
      const double number = random() % 16 ? normal(random) : 0;
      char* const at = bytes.data() + offset + i * element_bytes(dtype);
      if (any_bits) std::memcpy(at, &bits, element_bytes(dtype));
      else with_element_type(dtype, [&](auto tag) {
        const auto x = from_double<decltype(tag)>(number);
        std::memcpy(at, &x, sizeof x);
      });
    }
  }
  Memory(const Memory& other) : bytes(other.bytes), chunk(other.chunk) {
    chunk.data = bytes.data() + (static_cast<char*>(other.chunk.data) - other.bytes.data());
  }
  std::vector<char> bytes;
  Chunk chunk;
};

template <class T>
void check_scale(const Memory& memory, const ScaleOp<T>& op, int offset) {
  Memory narrow = memory, wide = memory;
  for (auto [kernels, target] : {std::pair{&kCpuKernelsBaseline, &narrow}, {&kCpuKernelsAvx2, &wide}}) {
    if constexpr (sizeof(T) == sizeof(float)) kernels->scale_float(target->chunk, target->chunk.data, op);
    else kernels->scale_double(target->chunk, target->chunk.data, op);
  }
  expect(narrow.bytes == wide.bytes, "scaled", memory.chunk.dtype, memory.chunk.size, offset);
}

void check_sums(const Memory& memory, int offset) {
  const Chunk& chunk = memory.chunk;
  const auto same_sum = [](const SumSquares& a, const SumSquares& b) {
    // What is not finite has no bits to compare.
    return a.nonfinite == b.nonfinite &&
           (a.nonfinite > 0 || (same(a.big, b.big) && same(a.mid, b.mid) && same(a.small, b.small)));
  };
  const SumSquares narrow = kCpuKernelsBaseline.sum_squares(chunk, chunk.data);
  const SumSquares wide = kCpuKernelsAvx2.sum_squares(chunk, chunk.data);
  expect(same_sum(narrow, wide), "sum", chunk.dtype, chunk.size, offset);

  Extremes of_narrow, of_wide, want{};
  const SumSquares beside_narrow = kCpuKernelsBaseline.sum_squares_and_extremes(chunk, chunk.data, &of_narrow);
  const SumSquares beside_wide = kCpuKernelsAvx2.sum_squares_and_extremes(chunk, chunk.data, &of_wide);
  expect(same_sum(narrow, beside_narrow) && same_sum(wide, beside_wide), "sum beside extremes", chunk.dtype, chunk.size,
         offset);
  with_element_type(chunk.dtype, [&](auto tag) {
    for (int64_t i = 0; i < chunk.size; ++i) {
      const double x = to_double(static_cast<const decltype(tag)*>(chunk.data)[i]);
      want.add({std::fabs(x), x == 0});
    }
  });
  for (const Extremes& got : {of_narrow, of_wide})
    expect(same(got.largest, want.largest) && got.zeros == want.zeros, "extremes", chunk.dtype, chunk.size, offset);
}

}  // namespace

int main() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 77;
  std::mt19937_64 random(1);
  for (int round = 0; round < 400; ++round) {
    const DType dtype = static_cast<DType>(random() % 4);
    const int64_t size = random() % 2 ? random() % 100 : random() % 5000;
    const int offset = static_cast<int>(random() % 32) / element_bytes(dtype) * element_bytes(dtype);
    const bool any_bits = random() % 2;
    const Memory memory(random, dtype, size, offset, any_bits);

    check_sums(memory, offset);
    for (Mode mode : {Mode::kKeep, Mode::kUnscale, Mode::kDivide, Mode::kClip, Mode::kFill}) {
      check_scale<double>(memory, {static_cast<double>(mode), 0.3, 0.7}, offset);
      if (dtype != DType::kF64) check_scale<float>(memory, {static_cast<float>(mode), 0.3f, 0.7f}, offset);
    }
  }
  std::printf("%d failures\n", failures);
  return failures > 0;
}
