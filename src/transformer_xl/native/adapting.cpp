// What learning while reading does beside the passes of a model: weights that go a step and a little back, in one pass over them; and what a cache gives
// each token, from the products of states that were made before.

#include "vectors.h"

#include <type_traits>

namespace {

// One tensor of weights. No gradient: it goes back only. No `inverse`: the step is along the gradient itself. No `back`: the way back is the same for all.
template <class T>
struct Moving {
  T* weight;
  const T *trained, *gradient, *inverse, *back;
  i64 count;
};

constexpr i64 BLOCK = 1 << 14;  // weights of a task

// Calls use(first, past) for blocks of each tensor, dealt to the threads of the region that this is called in.
template <class Use>
void in_blocks(i64 count, const Use& use) {
#pragma omp for schedule(static) nowait
  for (i64 first = 0; first < count; first += BLOCK) use(first, std::min(first + BLOCK, count));
}

template <class T>
T sum_of_squares(const T* x, i64 first, i64 past) {
  constexpr int W = Wide<T>::width;
  V<T> total[2] = {};
  i64 j = first;
  for (; j + 2 * W <= past; j += 2 * W)
    for (int n = 0; n < 2; ++n) {
      const V<T> value = load(x + j + n * W);
      total[n] += value * value;
    }
  T rest = 0;
  for (; j < past; ++j) rest += x[j] * x[j];
  return sum<T>(total[0] + total[1]) + rest;
}

template <class T>
void move(const Moving<T>& part, i64 first, i64 past, T rate, T decay) {
  const auto each = [&](const auto& step, const auto& back) {
    T* __restrict weight = part.weight;
    for (i64 j = first; j < past; ++j) {
      const T moved = weight[j] - step(j);
      weight[j] = moved + back(j) * (part.trained[j] - moved);
    }
  };
  const auto backwards = [&](const auto& step) {
    if (part.back)
      each(step, [&](i64 j) { return part.back[j]; });
    else
      each(step, [&](i64) { return decay; });
  };
  if (!part.gradient)
    backwards([](i64) { return T(0); });
  else if (part.inverse)
    backwards([&](i64 j) { return rate * (part.gradient[j] * part.inverse[j]); });
  else
    backwards([&](i64 j) { return rate * part.gradient[j]; });
}

// `moved` becomes 1; 0 where a gradient is not finite, and then no weight was touched.
template <class T>
void move_weights(const Moving<T>* parts, i64 count, double rate, double decay, i64* moved, int threads) {
  std::atomic<bool> finite{true};
#pragma omp parallel num_threads(threads)
  {
    T squares = 0;
    for (i64 p = 0; p < count; ++p)
      if (parts[p].gradient)
        in_blocks(parts[p].count, [&](i64 first, i64 past) { squares += sum_of_squares(parts[p].gradient, first, past); });
    if (!std::isfinite(squares)) finite = false;
#pragma omp barrier
    if (finite)
      for (i64 p = 0; p < count; ++p)
        if (parts[p].gradient || parts[p].back || decay != 0)
          in_blocks(parts[p].count, [&](i64 first, i64 past) { move(parts[p], first, past, T(rate), T(decay)); });
  }
  *moved = finite;
}

// Tokens as wide as the numbers that they are compared beside.
template <class T>
using Token = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// Of each row of scores [rows, stride], which sees `size` columns at most, the last of them column past + row - 1: what a softmax of theta times the
// scores gives the columns whose token is the row's own. Not a number where a row sees none.
template <class T>
void recall(const T* scores, const i64* next, const i64* target, T* shares, i64 rows, i64 stride, i64 past, i64 size, double theta, int threads) {
  constexpr int W = Wide<T>::width;
  typedef Token<T> Tokens __attribute__((vector_size(BYTES)));
  std::vector<Token<T>> tokens(next, next + stride);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 row = 0; row < rows; ++row) {
    const T* score = scores + row * stride;
    const i64 to = past + row, from = std::max<i64>(0, to - size), whole = from + (to - from) / W * W;
    const Tokens own = Token<T>(target[row]) - Tokens{};
    T last[W];  // what is left of a row when whole vectors are gone
    std::fill(last, last + W, -std::numeric_limits<T>::infinity());
    std::copy(score + whole, score + to, last);
    V<T> best_v = load(last);
    for (i64 j = from; j < whole; j += W) {
      const V<T> value = load(score + j);
      best_v = value > best_v ? value : best_v;
    }
    T best = best_v[0];
    for (int p = 1; p < W; ++p) best = std::max(best, best_v[p]);
    V<T> total = {}, right = {};
    for (i64 j = from; j < whole; j += W) {
      Tokens token;
      std::memcpy(&token, &tokens[j], sizeof token);
      const V<T> value = exponential((load(score + j) - best) * T(theta));
      total += value;
      right += token == own ? value : V<T>{};
    }
    T total_last = 0, right_last = 0;
    if (whole < to) {
      const V<T> value = exponential((load(last) - best) * T(theta));
      for (i64 j = whole; j < to; ++j) {
        total_last += value[j - whole];
        if (tokens[j] == Token<T>(target[row])) right_last += value[j - whole];
      }
    }
    shares[row] = from < to ? (sum<T>(right) + right_last) / (sum<T>(total) + total_last) : std::numeric_limits<T>::quiet_NaN();
  }
}

}  // namespace

#define DOORS(name, T)                                                                                                          \
  extern "C" int move_weights_##name(const Moving<T>* parts, i64 count, double rate, double decay, i64* moved, int threads) {    \
    move_weights<T>(parts, count, rate, decay, moved, threads);                                                                 \
    return DONE;                                                                                                                \
  }                                                                                                                             \
  extern "C" int recall_##name(const T* scores, const i64* next, const i64* target, T* shares, i64 rows, i64 stride, i64 past,   \
                               i64 size, double theta, int threads) {                                                           \
    if (past < 0 || rows < 0 || size < 1 || past + rows > stride) return OUT_OF_BOUNDS;                                         \
    Memory memory;                                                                                                              \
    memory.guard([&] { recall<T>(scores, next, target, shares, rows, stride, past, size, theta, threads); });                   \
    return memory.answer();                                                                                                                \
  }

DOORS(float32, float)
DOORS(float64, double)

static_assert(sizeof(Moving<double>) == sizeof(Moving<float>));
#define MEMBER(field) {"Moving." #field, offsetof(Moving<float>, field)}
extern "C" const Field fields_of_adapting[] = {MEMBER(weight),  MEMBER(trained), MEMBER(gradient), MEMBER(inverse), MEMBER(back),
                                               MEMBER(count), {"Moving", sizeof(Moving<float>)}, {nullptr, 0}};
