// The least that a clip and AdamW can cost on a CPU: two plain loops over each array, for benchmarks/step.py.
//
//   g++ -O3 -march=x86-64-v3 -ffast-math -fopenmp -shared -fPIC adamw_loop.cc -o adamw_loop.so
#include <cmath>
#include <cstdint>

extern "C" double sum_squares(const float* g, int64_t n) {
  double sum = 0;
#pragma omp parallel for reduction(+ : sum) schedule(static)
  for (int64_t begin = 0; begin < n; begin += 4096) {
    const int64_t end = begin + 4096 < n ? begin + 4096 : n;
    float part = 0;
    for (int64_t i = begin; i < end; ++i) part += g[i] * g[i];
    sum += part;
  }
  return sum;
}

extern "C" void step(const float* __restrict g, float* __restrict m, float* __restrict v, float* __restrict p,
                     int64_t n, float factor, float b1, float b2, float correction1, float correction2, float rate,
                     float eps, float decay) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    const float x = g[i] * factor;
    m[i] = b1 * m[i] + (1 - b1) * x;
    v[i] = b2 * v[i] + (1 - b2) * x * x;
    p[i] -= rate * (m[i] * correction1 / (std::sqrt(v[i] * correction2) + eps) + decay * p[i]);
  }
}
