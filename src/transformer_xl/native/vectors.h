// The compiler's own vectors, for whatever width this processor has, and what all kernels do with them.

#pragma once

#include <omp.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

using i64 = int64_t;

// What a door answers. Nothing was read or written where it is not DONE, but for results, which then mean nothing.
enum Answer : int { DONE = 0, OUT_OF_BOUNDS = 1, NO_MEMORY = 2 };

// A field of a structure that both languages know: the Python side compares them all when it loads the library.
struct Field {
  const char* name;
  i64 offset;
};
#define FIELD(structure, field) {#structure "." #field, i64(offsetof(structure, field))}
#define BYTES_OF(structure) {#structure, i64(sizeof(structure))}

// An exception must not leave a parallel region: memory that is not to be had is remembered, and told at the end.
struct Memory {
  std::atomic<bool> ran_out{false};

  template <class Work>
  void guard(const Work& work) {
    try {
      work();
    } catch (const std::bad_alloc&) {
      ran_out = true;
    } catch (const std::length_error&) {
      ran_out = true;
    }
  }

  Answer answer() const { return ran_out ? NO_MEMORY : DONE; }
};

// Threads wait for each other some twenty times for each token, a microsecond or two of work between: by turning in place, and only where that takes long by
// leaving the processor to somebody else.
struct Meeting {
  static constexpr int TURNS = 4000;
  std::atomic<int> there{0}, round{0};
  int threads = 1;

  void wait() {
    const int now = round.load(std::memory_order_acquire);
    if (there.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      there.store(0, std::memory_order_relaxed);
      round.store(now + 1, std::memory_order_release);
      return;
    }
    for (int turn = 0; round.load(std::memory_order_acquire) == now; ++turn)
      if (turn > TURNS) std::this_thread::yield();
  }
};

// Of a run of tokens, in the table of its order (`model/ngrams.py`).
inline i64 row_of_run(i64 hash, i64 rows) {
  constexpr i64 BITS = 0x7fffffff;
  hash = ((hash ^ (hash >> 15)) * 0x2c1b3c6d) & BITS;
  hash = ((hash ^ (hash >> 12)) * 0x297a2d39) & BITS;
  return (hash ^ (hash >> 15)) % rows;
}

template <class T>
struct Wide {
  static constexpr int width = BYTES / sizeof(T);
  typedef T V __attribute__((vector_size(BYTES)));
};

template <class T>
using V = typename Wide<T>::V;

template <class T>
inline V<T> load(const T* from) {
  V<T> value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline V<float> load(const int8_t* from) {  // the one place where the compiler does not find the instruction by itself
#if defined(__AVX512F__)
  return (V<float>)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return (V<float>)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  typedef int8_t Bytes __attribute__((vector_size(BYTES / 4)));
  Bytes value;
  std::memcpy(&value, from, sizeof value);
  return __builtin_convertvector(value, V<float>);
#endif
}

template <class T>
inline void store(T* to, V<T> value) {
  std::memcpy(to, &value, sizeof value);
}

// a * b + c. Spelled out, for the compiler rounds in between in one loop and not in the next, and then a lane's bits would depend on its neighbours.
inline V<float> fused(V<float> a, V<float> b, V<float> c) {
#if defined(__AVX512F__)
  return (V<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (V<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (V<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline V<double> fused(V<double> a, V<double> b, V<double> c) {
#if defined(__AVX512F__)
  return (V<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__FMA__)
  return (V<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
  return (V<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
  return a * b + c;
#endif
}

template <class T, int bytes = BYTES, class Vector>
inline T sum(Vector value) {  // halves onto each other until one is left
  if constexpr (bytes == sizeof(T)) {
    return value[0];
  } else {
    typedef T Half __attribute__((vector_size(bytes / 2)));
    Half low, high;
    std::memcpy(&low, &value, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
    return sum<T, bytes / 2>(low + high);
  }
}

// --- exp: |error| under 2 units in the last place over the range that a softmax needs

inline V<float> exponential(V<float> x) {
  typedef int32_t I __attribute__((vector_size(BYTES)));
  const V<float> clipped = x < -87.0f ? -87.0f - V<float>{} : x;
  const V<float> magic = 12582912.0f - V<float>{};
  const V<float> shifted = clipped * 1.44269504088896341f + magic;
  const V<float> n = shifted - magic;
  const V<float> r = (clipped - n * 0.693359375f) + n * 2.12194440e-4f;
  V<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  I bits, power;
  std::memcpy(&bits, &shifted, sizeof bits);
  power = (bits + (127 - 0x4B400000)) << 23;
  V<float> scale;
  std::memcpy(&scale, &power, sizeof scale);
  const V<float> result = p * scale;
  return x < -87.0f ? V<float>{} : result;
}

inline V<double> exponential(V<double> x) {
  V<double> result;
  for (int lane = 0; lane < Wide<double>::width; ++lane) result[lane] = std::exp(x[lane]);
  return result;
}

constexpr int MR = 6;  // rows of a tile: with two vectors each, twelve sums, what sixteen registers hold beside the operands

// C[R, 2 or 1 vectors] (+)= A[R, depth] B[depth, ...]
template <int R, int N, bool ADD, class T>
inline void tile(const T* a, i64 lda, const T* b, i64 ldb, T* c, i64 ldc, i64 depth) {
  constexpr int W = Wide<T>::width;
  V<T> total[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) total[r][n] = ADD ? load(c + r * ldc + n * W) : V<T>{};
  for (i64 k = 0; k < depth; ++k) {
    V<T> row[N];
    for (int n = 0; n < N; ++n) row[n] = load(b + k * ldb + n * W);
    for (int r = 0; r < R; ++r) {
      const T value = a[r * lda + k];
      for (int n = 0; n < N; ++n) total[r][n] += value * row[n];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(c + r * ldc + n * W, total[r][n]);
}

// Not inlined: on its own the compiler keeps all sums in registers, which is a third of the speed of `attend`.
template <int N, bool ADD, class T>
__attribute__((noinline)) void tiles(i64 rows, const T* a, i64 lda, const T* b, i64 ldb, T* c, i64 ldc, i64 depth) {
  i64 r = 0;
  for (; r + MR <= rows; r += MR) tile<MR, N, ADD>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth);
  for (; r + 2 <= rows; r += 2) tile<2, N, ADD>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth);
  for (; r < rows; ++r) tile<1, N, ADD>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, depth);
}

}  // namespace
