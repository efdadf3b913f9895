// What the loss over a vocabulary does beside its products: a row of logits is read once from memory, and becomes its loss and its gradient in place.

#include "vectors.h"

#include <type_traits>

namespace {

using Half = uint16_t;  // bfloat16: the upper half of a float

inline float wide(Half value) {
  const uint32_t bits = uint32_t(value) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline float wide(float value) { return value; }
inline double wide(double value) { return value; }

// To the nearest, and of two to the even one.
inline Half narrow(float value, Half) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return Half((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float narrow(float value, float) { return value; }
inline double narrow(double value, double) { return value; }

template <class T>
T largest(const T* row, i64 padded) {
  constexpr int W = Wide<T>::width;
  V<T> best_v = load(row);
  for (i64 j = W; j < padded; j += W) {
    const V<T> value = load(row + j);
    best_v = value > best_v ? value : best_v;
  }
  T best = best_v[0];
  for (int p = 1; p < W; ++p) best = std::max(best, best_v[p]);
  return best;
}

// exp(row - best) in place, and the sum of them.
template <class T>
T exponentials(T* row, i64 padded, T best) {
  constexpr int W = Wide<T>::width;
  V<T> total = {};
  for (i64 j = 0; j < padded; j += W) {
    const V<T> value = exponential(load(row + j) - best);
    store(row + j, value);
    total += value;
  }
  return sum<T>(total);
}

// One row: `row` has room for whole vectors, and `of_bias` gathers what the rows of a thread give the bias.
template <class T, class L>
T one_row(L* logits, const T* bias, i64 target, T* __restrict row, T* __restrict of_bias, i64 columns, i64 padded) {
  for (i64 j = 0; j < columns; ++j) row[j] = wide(logits[j]) + bias[j];
  std::fill(row + columns, row + padded, -std::numeric_limits<T>::infinity());
  const T best = largest(row, padded), own = row[target];
  const T total = exponentials(row, padded, best), share = 1 / total;
  for (i64 j = 0; j < columns; ++j) row[j] *= share;
  row[target] -= 1;
  for (i64 j = 0; j < columns; ++j) {
    of_bias[j] += row[j];
    logits[j] = narrow(row[j], L{});
  }
  return std::log(total) + (best - own);
}

// Logits without their bias [rows, columns] become the gradient of each row's loss; a row without a target (-1) has neither. `of_bias` [columns] is added to.
template <class T, class L>
int softmax_loss(L* logits, const T* bias, const i64* target, T* loss, T* of_bias, i64 rows, i64 columns, int threads) {
  if (rows < 0 || columns < 1) return OUT_OF_BOUNDS;
  for (i64 row = 0; row < rows; ++row)
    if (target[row] < -1 || target[row] >= columns) return OUT_OF_BOUNDS;
  constexpr int W = Wide<T>::width;
  const i64 padded = (columns + W - 1) / W * W;
  const int used = int(std::max<i64>(1, std::min<i64>(threads, rows)));
  Memory memory;
  memory.guard([&] {
    // Of each thread a row, and its part of the bias: added up in the order of the threads, so that the same number of them gives the same bits.
    std::vector<T> rooms(size_t(used) * (padded + columns));
#pragma omp parallel for num_threads(used) schedule(static, 1)
    for (int part = 0; part < used; ++part) {
      T *row = &rooms[size_t(part) * (padded + columns)], *own = row + padded;
      for (i64 at = rows * part / used; at < rows * (part + 1) / used; ++at) {
        L* here = logits + at * columns;
        if (target[at] < 0) {
          std::fill(here, here + columns, L{});
          loss[at] = 0;
        } else {
          loss[at] = one_row<T, L>(here, bias, target[at], row, own, columns, padded);
        }
      }
    }
    for (int part = 0; part < used; ++part) {
      const T* own = &rooms[size_t(part) * (padded + columns) + padded];
      for (i64 j = 0; j < columns; ++j) of_bias[j] += own[j];
    }
  });
  return memory.answer();
}

}  // namespace

#define DOOR(name, T, L)                                                                                                          \
  extern "C" int name(L* logits, const T* bias, const i64* target, T* loss, T* of_bias, i64 rows, i64 columns, int threads) {      \
    return softmax_loss<T, L>(logits, bias, target, loss, of_bias, rows, columns, threads);                                       \
  }

DOOR(softmax_loss_float32, float, float)
DOOR(softmax_loss_float64, double, double)
DOOR(rounded_softmax_loss_float32, float, Half)
