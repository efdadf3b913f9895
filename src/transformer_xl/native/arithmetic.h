// Arithmetic that gives the same bits on every machine: each operation is one that IEEE 754 rounds in one way only (sum, difference, product, quotient,
// square root, fused product and sum, conversion), and their order depends on no width of vectors, no number of rows beside and no thread.
//
// A product's sums are chains: start, then input after input, each product added with one rounding. Other sums have SIXTEEN parts, number i in part
// i % 16, which are then added in halves. Compiled with -ffp-contract=off (`recipe.py`): the compiler must fuse nothing of its own accord.

#pragma once

#include "vectors.h"

namespace {

constexpr int SIXTEEN = 16, W = Wide<float>::width, PARTS = SIXTEEN / W;
using F = V<float>;

inline F all(float value) { return value - F{}; }
inline i64 sixteens(i64 count) { return (count + SIXTEEN - 1) / SIXTEEN; }
inline i64 padded(i64 count) { return sixteens(count) * SIXTEEN; }

// Rounds to nearest and keeps the smallest numbers, whatever the caller's thread was told to do (torch.set_flush_denormal), while it lives.
struct Rounding {
#if defined(__x86_64__)
  const unsigned before = __builtin_ia32_stmxcsr();
  Rounding() { __builtin_ia32_ldmxcsr(0x1f80); }
  ~Rounding() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  Rounding() {
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~Rounding() { asm volatile("msr fpcr, %0" : : "r"(before)); }
#endif
};

// a * b + c, rounded once. Without an instruction for it: the product is exact in double precision, and a sum that is not is made odd in its last bit, so
// that rounding it again to single precision gives what one rounding would (Boldo and Melquiond 2008).
inline F once(F a, F b, F c) {
#if defined(__AVX512F__) || defined(__FMA__) || defined(__aarch64__)
  return fused(a, b, c);
#else
  constexpr int HALF = W / 2;
  typedef float Few __attribute__((vector_size(BYTES / 2)));
  typedef double Exact __attribute__((vector_size(BYTES)));
  typedef int64_t Bits __attribute__((vector_size(BYTES)));
  float result[W], given[3][W];
  std::memcpy(given[0], &a, sizeof a), std::memcpy(given[1], &b, sizeof b), std::memcpy(given[2], &c, sizeof c);
  for (int half = 0; half < 2; ++half) {
    Few few[3];
    for (int i = 0; i < 3; ++i) std::memcpy(&few[i], given[i] + half * HALF, sizeof few[i]);
    const Exact product = __builtin_convertvector(few[0], Exact) * __builtin_convertvector(few[1], Exact);
    const Exact added = __builtin_convertvector(few[2], Exact), sum = product + added;
    const Exact part = sum - product, error = (product - (sum - part)) + (added - part);
    Bits bits, beyond;
    std::memcpy(&bits, &sum, sizeof bits), std::memcpy(&beyond, &error, sizeof beyond);
    const Bits inexact = (error > 0) | (error < 0), even = (bits & 1) - 1, away = ((beyond ^ bits) >> 63) | 1;
    bits += away & inexact & even;
    Exact odd;
    std::memcpy(&odd, &bits, sizeof odd);
    const Few rounded = __builtin_convertvector(odd, Few);
    std::memcpy(result + half * HALF, &rounded, sizeof rounded);
  }
  return load(result);
#endif
}

// e to the x, for x from -87 to 0; 0 below. Off by less than two units in the last place.
inline F power_of_e(F x) {
  typedef int32_t I __attribute__((vector_size(BYTES)));
  const F low = all(-87.0f), magic = all(12582912.0f);
  const F clipped = x < low ? low : x;
  const F shifted = once(clipped, all(1.44269504088896341f), magic);
  const F n = shifted - magic;
  const F r = once(n, all(2.12194440e-4f), once(n, all(-0.693359375f), clipped));
  F p = once(all(1.9875691500e-4f), r, all(1.3981999507e-3f));
  p = once(p, r, all(8.3334519073e-3f));
  p = once(p, r, all(4.1665795894e-2f));
  p = once(p, r, all(1.6666665459e-1f));
  p = once(p, r, all(5.0000001201e-1f));
  p = once(p, r * r, r) + 1.0f;
  I bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const I power = (bits + (127 - 0x4B400000)) << 23;
  F scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < low ? F{} : p * scale;
}

struct Sixteen {
  F part[PARTS] = {};

  float numbers(float (*join)(float, float)) const {
    float value[SIXTEEN];
    std::memcpy(value, part, sizeof value);
    for (int half = SIXTEEN / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) value[i] = join(value[i], value[half + i]);
    return value[0];
  }
  float sum() const {
    return numbers([](float a, float b) { return a + b; });
  }
  float most() const {
    return numbers([](float a, float b) { return a > b ? a : b; });
  }
};

// --- products: rows of x with panels of sixteen outputs, [panel][depth][16]

struct Product {
  const float* x;
  i64 x_apart;  // from row to row
  i64 depth;
  const float* panels;
  i64 panel_apart;
  const float* start;  // where each row's chains begin
  i64 start_apart;
  float* out;
  i64 out_apart;

  Product at(i64 row, i64 panel) const {
    return {x + row * x_apart, x_apart, depth, panels + panel * panel_apart, panel_apart, start + row * start_apart + panel * SIXTEEN, start_apart,
            out + row * out_apart + panel * SIXTEEN, out_apart};
  }
};

template <int R, int N>
__attribute__((noinline)) void chains(const Product p) {
  F total[R][N * PARTS];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N * PARTS; ++n) total[r][n] = load(p.start + r * p.start_apart + n * W);
  for (i64 k = 0; k < p.depth; ++k) {
    F weight[N * PARTS];
    for (int n = 0; n < N * PARTS; ++n) weight[n] = load(p.panels + n / PARTS * p.panel_apart + k * SIXTEEN + n % PARTS * W);
    for (int r = 0; r < R; ++r) {
      const F value = all(p.x[r * p.x_apart + k]);
      for (int n = 0; n < N * PARTS; ++n) total[r][n] = once(value, weight[n], total[r][n]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N * PARTS; ++n) store(p.out + r * p.out_apart + n * W, total[r][n]);
}

constexpr int MOST_ROWS = 6, GROUP = 8;  // of a tile; and panels that stay in cache while all rows pass by
constexpr int SUMS = BYTES == 32 ? 12 : 24;  // vectors that registers hold beside the operands

template <int R, int N = GROUP>
void strip(const Product& p, i64 panels) {
  if constexpr (N > 1 && R * N * PARTS > SUMS) {
    strip<R, N / 2>(p, panels);
  } else {
    i64 n = 0;
    for (; n + N <= panels; n += N) chains<R, N>(p.at(0, n));
    if constexpr (N > 1)
      if (n < panels) strip<R, N / 2>(p.at(0, n), panels - n);
  }
}

template <int R = MOST_ROWS>
void strip_of(i64 rows, const Product& p, i64 panels) {
  if constexpr (R > 1)
    if (rows < R) return strip_of<R - 1>(rows, p, panels);
  strip<R>(p, panels);
}

inline void multiply(i64 rows, i64 panels, const Product& p) {
  for (i64 panel = 0; panel < panels; panel += GROUP)
    for (i64 row = 0; row < rows; row += MOST_ROWS)
      strip_of(std::min<i64>(MOST_ROWS, rows - row), p.at(row, panel), std::min<i64>(GROUP, panels - panel));
}

// --- rows; each has room for whole sixteens, and zeros behind its end

// Calls use(i, part, vector) for the vectors of a row.
template <class Use>
inline void each(const float* x, i64 size, const Use& use) {
  for (i64 i = 0; i < padded(size); i += W) use(i, i / W % PARTS, load(x + i));
}

inline void normalise(const float* x, float* out, const float* weight, const float* bias, i64 size, float eps) {
  Sixteen total, spread;
  each(x, size, [&](i64, int part, F value) { total.part[part] += value; });
  const float mean = total.sum() / float(size);
  float last[SIXTEEN] = {};  // where the row ends, nothing is apart from the mean
  for (i64 i = size / SIXTEEN * SIXTEEN; i < size; ++i) last[i % SIXTEEN] = x[i] - mean;
  each(x, size / SIXTEEN * SIXTEEN, [&](i64, int part, F value) { spread.part[part] = once(value - mean, value - mean, spread.part[part]); });
  for (int part = 0; part < PARTS; ++part) spread.part[part] = once(load(last + part * W), load(last + part * W), spread.part[part]);
  const float scale = 1.0f / std::sqrt(spread.sum() / float(size) + eps);
  each(x, size, [&](i64 i, int, F value) { store(out + i, once((value - mean) * scale, load(weight + i), load(bias + i))); });
}

// Scores become e to the score less the best; those beside [first, past) nothing. Their sum.
inline float soften(float* scores, i64 first, i64 past) {
  const i64 from = first / SIXTEEN * SIXTEEN, size = past - from;
  std::fill(scores + from, scores + first, -std::numeric_limits<float>::infinity());
  std::fill(scores + past, scores + from + padded(size), -std::numeric_limits<float>::infinity());
  Sixteen most, total;
  for (F& part : most.part) part = all(-std::numeric_limits<float>::infinity());
  each(scores + from, size, [&](i64, int part, F value) { most.part[part] = value > most.part[part] ? value : most.part[part]; });
  const float best = most.most();
  each(scores + from, size, [&](i64 i, int part, F value) {
    const F power = power_of_e(value - best);
    store(scores + from + i, power);
    total.part[part] += power;
  });
  return total.sum();
}

// --- whole numbers

constexpr int TOTAL_BITS = 24, FINE_BITS = 30, SHARE_BITS = 38;

// How often each word comes in 2^24, at least once; all zero where a logit is no number. The shares are rounded down, and what is left is the likeliest word's.
inline void count(float* logits, i64 words, uint32_t* frequencies) {
  bool finite = true;
  for (i64 v = 0; v < words; ++v) finite &= logits[v] - logits[v] == 0;
  if (!finite) {
    std::fill(frequencies, frequencies + words, 0);
    return;
  }
  soften(logits, 0, words);
  uint64_t total = 0;
  i64 likeliest = 0;
  for (i64 v = 0; v < words; ++v) {
    frequencies[v] = uint32_t(int32_t(logits[v] * float(1 << FINE_BITS)));
    total += frequencies[v];
    if (frequencies[v] > frequencies[likeliest]) likeliest = v;
  }
  const uint64_t free = (uint64_t(1) << TOTAL_BITS) - uint64_t(words), share = (free << SHARE_BITS) / total;
  uint64_t given = 0;
  for (i64 v = 0; v < words; ++v) {
    const uint64_t mine = (frequencies[v] * share) >> SHARE_BITS;
    frequencies[v] = uint32_t(mine + 1);
    given += mine;
  }
  frequencies[likeliest] += uint32_t(free - given);
}

}  // namespace
