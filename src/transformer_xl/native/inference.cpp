// What inference does most, for one machine: one token through every layer (`step`), many tokens through one attention (`attend`), and a
// matrix times a few vectors (`linear`). Plain C++ with the compiler's own vectors, built in seconds.
//
// Shapes follow the Python side: B lane, T position, H head, K head width, D model width, F inner width. Keys and values are [B, H, room, K].
// Relative keys are [H, panel, K, P]: panel p holds the distances pP + P-1 down to pP, so that scores by distance stand in the order of the
// keys. Distances past the last one read the last one (the clamp).

#include <optional>

#include "drawing.h"
#include "vectors.h"

namespace {

// --- a vector laid out for dot products with rows of any width: whole vectors, then one that overlaps them, its double-counted lanes zero

template <class T>
struct Operand {
  std::vector<T> values;
  V<T> tail;
  i64 size, whole;

  void take(const T* from, i64 length) {  // allocates nothing once it has room
    constexpr int W = Wide<T>::width;
    size = length;
    values.assign(from, from + length);
    whole = length / W * W;
    tail = V<T>{};
    if (length >= W)
      for (i64 lane = W - (length - whole); lane < W; ++lane) tail[lane] = from[length - W + lane];
  }
};

// Dot products of R rows with L operands. Row r starts at row + r * stride. Each sum runs through its row in the same order whatever R and L
// are, so that a lane's numbers do not change by a bit with the number of its neighbours.
template <int R, int L, class T, class Weight>
inline void dots(const Weight* row, i64 stride, const Operand<T>* operand, T out[L][R]) {
  constexpr int W = Wide<T>::width;
  const i64 size = operand[0].size, whole = operand[0].whole;
  if (size < W) {
    for (int l = 0; l < L; ++l)
      for (int r = 0; r < R; ++r) {
        T total = 0;
        for (i64 i = 0; i < size; ++i) total += T(row[r * stride + i]) * operand[l].values[i];
        out[l][r] = total;
      }
    return;
  }
  V<T> total[L][R] = {};
  const T* x[L];
  for (int l = 0; l < L; ++l) x[l] = operand[l].values.data();
  for (i64 i = 0; i < whole; i += W) {
    V<T> w[R];
    if constexpr (R == 1) __builtin_prefetch(row + i + 1024 / sizeof(Weight));
    for (int r = 0; r < R; ++r) w[r] = load(row + r * stride + i);
    for (int l = 0; l < L; ++l) {
      const V<T> value = load(x[l] + i);
      for (int r = 0; r < R; ++r) total[l][r] = fused(w[r], value, total[l][r]);
    }
  }
  if (whole < size)
    for (int r = 0; r < R; ++r) {
      const V<T> w = load(row + r * stride + size - W);
      for (int l = 0; l < L; ++l) total[l][r] = fused(w, operand[l].tail, total[l][r]);
    }
  for (int l = 0; l < L; ++l)
    for (int r = 0; r < R; ++r) out[l][r] = sum<T>(total[l][r]);
}

// Many lanes: lanes are the vector axis. In blocks of columns, [block][residue of the column][column][2W lanes], zero where there is no lane;
// then the columns that fill no vector.
template <class T>
struct Packed {
  static constexpr int W = Wide<T>::width, P = 2 * W;
  static constexpr i64 COLUMNS = 1024;
  std::vector<T> values;
  i64 lanes;

  void take(const Operand<T>* x, i64 count) {
    const i64 size = x[0].size, whole = x[0].whole;
    lanes = count;
    values.resize(size * P);
    T* to = values.data();
    auto column = [&](i64 k) {
      for (i64 l = 0; l < count; ++l) to[l] = x[l].values[k];
      for (i64 l = count; l < P; ++l) to[l] = 0;
      to += P;
    };
    for (i64 from = 0; from < whole; from += COLUMNS)
      for (int p = 0; p < W; ++p)
        for (i64 k = from + p; k < std::min(from + COLUMNS, whole); k += W) column(k);
    for (i64 k = whole; k < size; ++k) column(k);
  }
};

// Columns [from, to) of R rows. One pass for each residue of the column gives the partial sums that `dots` holds in one vector, in the same order. The
// R rows after these are asked for meanwhile.
template <int R, class T>
__attribute__((noinline)) void passes(const T* row, i64 stride, const T* x, i64 from, i64 to, V<T>* total) {
  constexpr int W = Wide<T>::width, P = 2 * W, LINE = 64 / sizeof(T);
  const i64 part = (to - from) / W;
  for (int p = 0; p < W; ++p, total += R * 2) {
    V<T> sums[R][2];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < 2; ++n) sums[r][n] = from ? total[r * 2 + n] : V<T>{};
    i64 passed = 0;
    for (i64 k = from + p; k < to; k += W, ++passed, x += P) {
      if (passed % (LINE / 2) == 0)
        for (int r = 0; r < R; ++r) __builtin_prefetch(row + (R + r) * stride + from + p * part + passed);
      const V<T> one = load(x), two = load(x + W);
      for (int r = 0; r < R; ++r) {
        const V<T> w = row[r * stride + k] - V<T>{};
        sums[r][0] = fused(w, one, sums[r][0]);
        sums[r][1] = fused(w, two, sums[r][1]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < 2; ++n) total[r * 2 + n] = sums[r][n];
  }
}

template <int R, class T, class Use>
inline void many_lanes(const T* row, i64 size, const Packed<T>& x, const Use& use) {
  constexpr int W = Wide<T>::width, P = 2 * W;
  constexpr i64 COLUMNS = Packed<T>::COLUMNS;
  const i64 whole = size / W * W;
  V<T> total[W * R * 2];
  for (i64 from = 0; from < whole; from += COLUMNS)
    passes<R>(row, size, &x.values[from * P], from, std::min(from + COLUMNS, whole), total);
  for (i64 p = W - (size - whole); p < W; ++p)
    for (int i = 0; i < R * 2; ++i) {
      const i64 column = size - W + p;
      const V<T> w = row[i / 2 * size + column] - V<T>{};
      total[p * R * 2 + i] = fused(w, load(&x.values[column * P + i % 2 * W]), total[p * R * 2 + i]);
    }
  for (int half = W / 2; half > 0; half /= 2)
    for (int i = 0; i < half * R * 2; ++i) total[i] += total[half * R * 2 + i];
  for (int r = 0; r < R; ++r)
    for (i64 l = 0; l < x.lanes; ++l) use(l, r, total[r * 2 + l / W][l % W]);
}

// A weight matrix [rows, columns], exact or as bytes with one scale a row.
template <class T>
struct Matrix {
  const void* data;
  const float* scale;  // null: exact
};

constexpr i64 LONG = 1024;  // columns from which on one lane's rows are read one by one
constexpr i64 MANY = 11;  // lanes from which on they are the vector axis

// The vectors of all lanes, and room to lay them out by lanes: one thread's, allocated before the work begins.
template <class T>
struct Operands {
  std::vector<Operand<T>> x;
  std::vector<Packed<T>> groups;

  Operands(i64 lanes, i64 longest) : x(lanes) {
    constexpr i64 P = Packed<T>::P;
    for (auto& one : x) one.values.reserve(longest);
    if (lanes >= MANY) groups.resize((lanes + P - 1) / P);
    for (auto& group : groups) group.values.reserve(longest * P);
  }
};

// Rows [row, row + R) with the vectors of L lanes from `lane` on.
template <int R, int L, class T, class Use>
inline void block(const Matrix<T>& matrix, i64 row, const std::vector<Operand<T>>& x, i64 lane, const Use& use) {
  const i64 columns = x[0].size;
  T out[L][R];
  if constexpr (sizeof(T) == 4) {
    if (matrix.scale) {
      dots<R, L, T>(static_cast<const int8_t*>(matrix.data) + row * columns, columns, &x[lane], out);
      for (int l = 0; l < L; ++l)
        for (int r = 0; r < R; ++r) use(lane + l, row + r, out[l][r] * matrix.scale[row + r]);
      return;
    }
  }
  dots<R, L, T>(static_cast<const T*>(matrix.data) + row * columns, columns, &x[lane], out);
  for (int l = 0; l < L; ++l)
    for (int r = 0; r < R; ++r) use(lane + l, row + r, out[l][r]);
}

// Rows [row, last), R at a time while there are so many.
template <int R, int L, class T, class Use>
inline void blocks(const Matrix<T>& matrix, i64 row, i64 last, const std::vector<Operand<T>>& x, i64 lane, const Use& use) {
  for (; row + R <= last; row += R) block<R, L>(matrix, row, x, lane, use);
  for (; row < last; ++row) block<1, L>(matrix, row, x, lane, use);
}

// One lane: a long row straight through, as fast as memory gives it. Short rows, several lanes, or bytes to be made floats: the sums are the work, and
// as many are held in registers as there is room for.
template <class T, class Use>
void multiply_few(const Matrix<T>& matrix, i64 first, i64 last, const std::vector<Operand<T>>& x, const Use& use) {
  constexpr i64 PIECE = 12;  // rows that stay in cache while all lanes pass by
  const i64 B = x.size();
  for (i64 row = first; row < last; row += B > 1 ? PIECE : last - first) {
    const i64 end = B > 1 ? std::min(row + PIECE, last) : last;
    for (i64 lane = 0; lane < B;) {
      if (lane + 4 <= B) {
        blocks<3, 4>(matrix, row, end, x, lane, use);
        lane += 4;
      } else if (B == 1 && !matrix.scale && x[0].size > LONG) {
        blocks<1, 1>(matrix, row, end, x, lane++, use);
      } else {
        blocks<4, 1>(matrix, row, end, x, lane++, use);
      }
    }
  }
}

// Many lanes are laid out once, and pass by every few rows in groups.
template <class T, class Use>
void multiply_many(const Matrix<T>& matrix, i64 first, i64 last, Operands<T>& operands, const Use& use) {
  constexpr i64 P = Packed<T>::P;
  const std::vector<Operand<T>>& x = operands.x;
  const i64 B = x.size(), columns = x[0].size;
  for (i64 lane = 0; lane < B; lane += P) operands.groups[lane / P].take(&x[lane], std::min(P, B - lane));
  auto rows = [&]<int R>(i64 row) {
    for (i64 lane = 0; lane < B; lane += P)
      many_lanes<R, T>(static_cast<const T*>(matrix.data) + row * columns, columns, operands.groups[lane / P],
                       [&](i64 l, i64 r, T value) { use(lane + l, row + r, value); });
  };
  i64 row = first;
  for (; row + MR <= last; row += MR) rows.template operator()<MR>(row);
  for (; row < last; ++row) rows.template operator()<1>(row);
}

// Calls use(lane, row, value) for this thread's share of rows.
template <class T, class Use>
inline void multiply(const Matrix<T>& matrix, i64 first, i64 last, Operands<T>& operands, const Use& use) {
  const i64 lanes = operands.x.size(), columns = operands.x[0].size;
  if (lanes >= MANY && !matrix.scale && columns >= Wide<T>::width)
    multiply_many(matrix, first, last, operands, use);
  else
    multiply_few(matrix, first, last, operands.x, use);
}

struct Share {
  i64 first, last;
};

// Rows of one thread, in multiples of four so that no two threads write one cache line.
inline Share share(i64 rows) {
  const i64 threads = omp_get_num_threads(), mine = omp_get_thread_num();
  const i64 fours = (rows + 3) / 4;
  return {std::min(rows, fours * mine / threads * 4), std::min(rows, fours * (mine + 1) / threads * 4)};
}

template <class T>
void normalise(const T* x, T* out, const T* weight, const T* bias, i64 size, double eps) {
  T mean = 0, spread = 0;
  for (i64 i = 0; i < size; ++i) mean += x[i];
  mean /= size;
  for (i64 i = 0; i < size; ++i) spread += (x[i] - mean) * (x[i] - mean);
  const T scale = T(1) / std::sqrt(spread / size + T(eps));
  for (i64 i = 0; i < size; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

// --- what attention is told; every pointer of one layer

template <class T>
struct Layer {
  Matrix<T> query, key_value, output, inner, outer;
  const T *inner_bias, *outer_bias, *attention_norm, *attention_norm_bias, *feed_norm, *feed_norm_bias;
  T *keys, *values;
  const T *content_bias, *position_bias, *relative, *distance_bias;  // null where the encoding has none; the last is [H, panel, P], scaled
  const T* neighbours;  // [neighbours, H*K]: what the values of a token and of those just before it give it by themselves; null: nothing
};

struct Sizes {
  i64 layers, lanes, heads, width, model, inner, room, end, limit, distances, panels, pre_norm, neighbours;
};

template <class T>
inline i64 panels_of(i64 distances) {
  constexpr int P = 2 * Wide<T>::width;
  return (distances + P - 1) / P;
}

// What queries of one head, `apart` from each other, give to each distance of the nearest panels: [lane][used * P], the nearest last.
template <class T>
void score_distances(const Layer<T>& layer, const Sizes& z, i64 head, const T* query, i64 lanes, i64 apart, i64 used, std::vector<T>& biased,
                     T* position) {
  constexpr int P = 2 * Wide<T>::width;
  const i64 K = z.width;
  const T scale = T(1) / std::sqrt(T(K));
  for (i64 b = 0; b < lanes; ++b)
    for (i64 k = 0; k < K; ++k)
      biased[b * K + k] = (query[b * apart + k] + (layer.position_bias ? layer.position_bias[head * K + k] : T(0))) * scale;
  for (i64 panel = 0; panel < used; ++panel) {
    const i64 at = head * z.panels + panel;
    T* to = position + (used - 1 - panel) * P;
    tiles<2, false>(lanes, biased.data(), K, layer.relative + at * K * P, P, to, used * P, K);
    if (layer.distance_bias)
      for (i64 b = 0; b < lanes; ++b)
        for (int p = 0; p < P; ++p) to[b * used * P + p] += layer.distance_bias[at * P + p];
  }
}

// What one query gives to each of `count` keys, [count, K].
template <class T>
inline void score_keys(const T* keys, i64 K, i64 count, const Operand<T>& query, T* scores) {
  T out[1][4], one[1][1];
  i64 j = 0;
  for (; j + 4 <= count; j += 4) {
    dots<4, 1, T>(keys + j * K, K, &query, out);
    for (int i = 0; i < 4; ++i) scores[j + i] = out[0][i];
  }
  for (; j < count; ++j) {
    dots<1, 1, T>(keys + j * K, K, &query, one);
    scores[j] = one[0][0];
  }
}

// Scores by distance end with the distance 0, that of the last key; only the nearest `far` distances are told apart.
template <class T>
inline void add_distances(const T* position_end, i64 far, i64 count, T* scores) {
  const T* by_key = position_end - count;  // distance r stands at position_end - 1 - r
  const i64 clamped = count - far;         // the farthest share the last distance
  const T last = position_end[-far];
  i64 j = 0;
  for (; j < clamped; ++j) scores[j] += last;
  for (; j < count; ++j) scores[j] += by_key[j];
}

// Each score becomes exp(score - best); their sum.
template <class T>
inline T exponentials(T* scores, i64 count) {
  constexpr int W = Wide<T>::width;
  T best = -std::numeric_limits<T>::infinity();
  i64 j = 0;
  for (; j < count; ++j) best = std::max(best, scores[j]);
  V<T> total_v = {};
  for (j = 0; j + W <= count; j += W) {
    const V<T> p = exponential(load(&scores[j]) - best);
    store(&scores[j], p);
    total_v += p;
  }
  T total = sum<T>(total_v);
  for (; j < count; ++j) total += scores[j] = std::exp(scores[j] - best);
  return total;
}

// The rows of values [count, K], each times its score and `share`, added up.
template <class T>
inline void mix_values(const T* values, i64 K, i64 count, const T* scores, T share, T* mixed) {
  constexpr int W = Wide<T>::width;
  if (K < W) {
    for (i64 k = 0; k < K; ++k) mixed[k] = 0;
    for (i64 j = 0; j < count; ++j)
      for (i64 k = 0; k < K; ++k) mixed[k] += scores[j] * values[j * K + k] * share;
    return;
  }
  // Eight vectors of the mix at a time; the last one overlaps where the width is no multiple, and both write the same.
  const i64 vectors = (K + W - 1) / W;
  for (i64 begin = 0; begin < vectors; begin += 8) {
    const int held = std::min<i64>(8, vectors - begin);
    i64 at[8];
    V<T> mix[8] = {};
    for (int v = 0; v < 8; ++v) at[v] = std::min<i64>((begin + std::min(v, held - 1)) * W, K - W);
    if (held == 8) {
      for (i64 j = 0; j < count; ++j) {
        const T p = scores[j];
        const T* row = values + j * K;
        for (int v = 0; v < 8; ++v) mix[v] += p * load(row + at[v]);
      }
    } else {
      for (i64 j = 0; j < count; ++j) {
        const T p = scores[j];
        const T* row = values + j * K;
        for (int v = 0; v < held; ++v) mix[v] += p * load(row + at[v]);
      }
    }
    for (int v = 0; v < held; ++v) store(mixed + at[v], mix[v] * share);
  }
}

// Adds what the last of `count` values [count, K] of one head give by themselves, the query's own first.
template <class T>
inline void add_neighbours(const Layer<T>& layer, const Sizes& z, i64 head, const T* values, i64 count, T* mixed) {
  const i64 K = z.width;
  for (i64 n = 0; n < std::min(z.neighbours, count); ++n) {
    const T *weight = layer.neighbours + (n * z.heads + head) * K, *value = values + (count - 1 - n) * K;
    for (i64 k = 0; k < K; ++k) mixed[k] += weight[k] * value[k];
  }
}

// One query of one head over the kept keys [lowest, here]; `scores` has room for all of them. `position_end`: behind its scores by distance.
template <class T>
void look_back(const Layer<T>& layer, const Sizes& z, i64 lane, i64 head, const T* query, i64 lowest, T* mixed,
               Operand<T>& operand, std::vector<T>& biased, std::vector<T>& scores, const T* position_end) {
  const i64 K = z.width, here = z.end, count = here - lowest + 1, first = ((lane * z.heads + head) * z.room + lowest) * K;
  const T scale = T(1) / std::sqrt(T(K));
  for (i64 k = 0; k < K; ++k)
    biased[k] = (query[k] + (layer.content_bias ? layer.content_bias[head * K + k] : T(0))) * scale;
  operand.take(biased.data(), K);
  score_keys(layer.keys + first, K, count, operand, scores.data());
  if (layer.relative) add_distances(position_end, std::min(count, z.distances), count, scores.data());
  const T total = exponentials(scores.data(), count);
  mix_values(layer.values + first, K, count, scores.data(), T(1) / total, mixed);
  add_neighbours(layer, z, head, layer.values + first, count, mixed);
}

// What all threads of a step share.
template <class T>
struct Shared {
  Meeting meeting;
  std::atomic<i64> next[2] = {};  // the next task of a piece of work, and of the one after it
  double eps;
  const i64* lowest;
  std::vector<T> query, mixed, added, inner;

  Shared(const Sizes& z, double eps, const i64* lowest)
      : eps(eps), lowest(lowest), query(z.lanes * z.heads * z.width), mixed(query.size()), added(z.lanes * z.model),
        inner(z.lanes * z.inner) {}
};

// One thread's part of a step, or of several. Everything is allocated here: threads wait for each other on the way, and none may fail there.
template <class T>
struct Stepper {
  Shared<T>& s;
  Sizes z;  // its own, whose end moves on from step to step
  const i64 B, D, HK, F, K;
  const i64 group, groups;  // lanes that look back together
  Operands<T> operands;
  int piece = 0;  // of work that is dealt out by tasks
  std::vector<T> own, prepared, scores, position, biased;  // each thread normalises for itself: cheaper than waiting for one that does it for all
  Operand<T> operand;

  Stepper(Shared<T>& s, const Sizes& sizes, i64 steps, int threads)
      : s(s), z(sizes), B(z.lanes), D(z.model), HK(z.heads * z.width), F(z.inner), K(z.width),
        group(std::clamp<i64>(B * z.heads / (4 * threads), 1, MR)), groups((B + group - 1) / group),
        operands(B, std::max({D, HK, F})), own(B * D), prepared(D), scores(z.end + steps),
        position(group * z.panels * 2 * Wide<T>::width), biased(group * K) {
    operand.values.reserve(K);
  }

  i64 from(i64 b) const { return std::max(s.lowest[b], z.end - z.limit); }

  void take(const T* norm, const T* bias) {
    for (i64 b = 0; b < B; ++b) {
      if (norm) normalise(&own[b * D], prepared.data(), norm, bias, D, s.eps);
      operands.x[b].take(norm ? prepared.data() : &own[b * D], D);
    }
  }

  // Every thread takes up what was added; after a part of a post-norm layer comes its norm.
  void join(const T* norm, const T* bias) {
    for (i64 b = 0; b < B; ++b) {
      for (i64 i = 0; i < D; ++i) own[b * D + i] += s.added[b * D + i];
    }
    if (norm) normalise_own(norm, bias);
  }

  void normalise_own(const T* norm, const T* bias) {
    for (i64 b = 0; b < B; ++b) normalise(&own[b * D], &own[b * D], norm, bias, D, s.eps);
  }

  void wait() { s.meeting.wait(); }

  // Calls use(task) for tasks that nobody else has taken; then all are done.
  template <class Use>
  void deal(i64 tasks, const Use& use) {
    std::atomic<i64>& next = s.next[piece++ % 2];
    for (i64 task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) use(task);
    wait();
    if (omp_get_thread_num() == 0) next.store(0, std::memory_order_relaxed);  // asked for again after another meeting at the earliest
  }

  template <class Use>
  void times(const Matrix<T>& matrix, i64 height, const Use& use) {
    const Share rows = share(height);
    multiply<T>(matrix, rows.first, rows.last, operands, use);
  }

  void look(const Layer<T>& layer, i64 task) {  // one head of all lanes after another: they share its relative keys
    const i64 head = task / groups, first = task % groups * group, last = std::min(first + group, B);
    i64 panels = 0;
    for (i64 b = first; b < last; ++b) panels = std::max(panels, panels_of<T>(std::min(z.end - from(b) + 1, z.distances)));
    if (layer.relative)
      score_distances(layer, z, head, &s.query[first * HK + head * K], last - first, HK, panels, biased, position.data());
    for (i64 b = first; b < last; ++b)
      look_back(layer, z, b, head, &s.query[b * HK + head * K], from(b), &s.mixed[b * HK + head * K], operand, biased, scores,
                position.data() + (b - first + 1) * panels * 2 * Wide<T>::width);
  }

  void through(const Layer<T>& layer) {
    take(z.pre_norm ? layer.attention_norm : nullptr, layer.attention_norm_bias);
    times(layer.query, HK, [&](i64 b, i64 row, T value) { s.query[b * HK + row] = value; });
    times(layer.key_value, 2 * HK, [&](i64 b, i64 row, T value) {
      T* kept = row < HK ? layer.keys : layer.values;
      const i64 at = row < HK ? row : row - HK;
      kept[((b * z.heads + at / K) * z.room + z.end) * K + at % K] = value;
    });
    wait();
    deal(z.heads * groups, [&](i64 task) { look(layer, task); });
    for (i64 b = 0; b < B; ++b) operands.x[b].take(&s.mixed[b * HK], HK);
    times(layer.output, D, [&](i64 b, i64 row, T value) { s.added[b * D + row] = value; });
    wait();
    join(z.pre_norm ? nullptr : layer.attention_norm, layer.attention_norm_bias);
    take(z.pre_norm ? layer.feed_norm : nullptr, layer.feed_norm_bias);
    times(layer.inner, F, [&](i64 b, i64 row, T value) { s.inner[b * F + row] = std::max(T(0), value + layer.inner_bias[row]); });
    wait();
    for (i64 b = 0; b < B; ++b) operands.x[b].take(&s.inner[b * F], F);
    times(layer.outer, D, [&](i64 b, i64 row, T value) { s.added[b * D + row] = value + layer.outer_bias[row]; });
    wait();
    join(z.pre_norm ? nullptr : layer.feed_norm, layer.feed_norm_bias);
  }
};

// Where a lane's own past begins, and that it ends where the new positions do.
inline bool within(const Sizes& z, i64 length, const i64* lowest) {
  if (z.end < 0 || z.limit < 0 || length < 1 || length > z.room - z.end) return false;
  return std::all_of(lowest, lowest + z.lanes, [&](i64 first) { return 0 <= first && first <= z.end; });
}

template <class T>
struct Norm {  // null: none
  const T *weight, *bias;
};

// `steps` tokens of each lane through all layers, one after the other, the first kept at z.end. hidden: [B, D], the last layer's output for the last of
// them, normalised where the model ends in a norm. `lowest`: the first kept position of each lane that is real and seen. Every thread makes what it needs with
// `own_work()`, fills `stepper.own` with embeddings in `enter(stepper, step, work)`, and says in `after(stepper, step, work)` whether to go on, all the same.
template <class T, class OwnWork, class Enter, class After>
Answer through_layers(const Sizes& z, double eps, const Layer<T>* layers, const Norm<T>& end, i64 steps, T* hidden, const i64* lowest,
                      int threads, const OwnWork& own_work, const Enter& enter, const After& after) {
  if (!within(z, steps, lowest)) return OUT_OF_BOUNDS;
  Memory memory;
  std::optional<Shared<T>> shared;
  memory.guard([&] { shared.emplace(z, eps, lowest); });
  if (memory.ran_out) return NO_MEMORY;
#pragma omp parallel num_threads(threads)
  {
    std::optional<Stepper<T>> mine;
    std::optional<decltype(own_work())> work;
    memory.guard([&] {
      mine.emplace(*shared, z, steps, threads);
      work.emplace(own_work());
    });
#pragma omp master
    shared->meeting.threads = omp_get_num_threads();
#pragma omp barrier
    if (!memory.ran_out) {  // the same answer for all threads: whoever ran out did so before the barrier
      for (bool more = true; more; ++mine->z.end) {
        const i64 step = mine->z.end - z.end;
        enter(*mine, step, *work);
        for (i64 n = 0; n < z.layers; ++n) mine->through(layers[n]);
        if (end.weight) mine->normalise_own(end.weight, end.bias);
        more = after(*mine, step, *work) && step + 1 < steps;
      }
#pragma omp master
      std::copy(mine->own.begin(), mine->own.end(), hidden);
    }
  }
  return memory.answer();
}

template <class T>
Answer step(const Sizes& z, double eps, const Layer<T>* layers, const Norm<T>& end, T* hidden, const i64* lowest, int threads) {
  struct Nothing {};
  auto enter = [&](Stepper<T>& mine, i64, Nothing&) { std::copy(hidden, hidden + z.lanes * z.model, mine.own.begin()); };
  return through_layers<T>(
      z, eps, layers, end, 1, hidden, lowest, threads, [] { return Nothing{}; }, enter,
      [](Stepper<T>&, i64, Nothing&) { return true; });
}

// Words of a plain softmax: embeddings [V, D], and what hidden states are multiplied by.
template <class T>
struct Words {
  const T* embedding;
  Matrix<T> output;
  const T* bias;
  i64 count;
  double scale;
};

// Runs of tokens, embedded together (`model/ngrams.py`): tables [count, rows, width] of `orders`, and a projection [D, count * width].
template <class T>
struct Ngrams {
  const T *tables, *projection;
  const i64* orders;
  i64 count, rows, width, longest;
};

// One thread's room for writing: for the words of a draw, and for the rows of a token's runs.
template <class T>
struct Desk {
  Drawing drawing;
  std::vector<T> rows;
  Operand<T> runs;

  Desk(i64 vocabulary, const Ngrams<T>& ngrams) : drawing(vocabulary), rows(ngrams.count * ngrams.width) {
    runs.values.reserve(rows.size());
  }
};

// Adds what the runs that end at a token give it. token_back(i): the one i before it, -1 where there is none.
template <class T, class TokenBack>
void add_runs(const Ngrams<T>& g, const TokenBack& token_back, i64 D, T scale, Desk<T>& desk, T* to) {
  i64 hash = 0, order = 0;
  for (i64 back = 0; back < g.longest; ++back) {
    hash = (hash * 1000003 + token_back(back) + 1) & 0x7fffffff;
    if (g.orders[order] != back + 1) continue;
    const T* row = g.tables + (order * g.rows + row_of_run(hash, g.rows)) * g.width;
    std::copy(row, row + g.width, &desk.rows[order++ * g.width]);
  }
  desk.runs.take(desk.rows.data(), desk.rows.size());
  for (i64 d = 0; d < D; ++d) {
    T out[1][1];
    dots<1, 1, T>(g.projection + d * desk.runs.size, desk.runs.size, &desk.runs, out);
    to[d] += out[0][0] * scale;
  }
}

// Each lane reads its token of `tokens`, draws the next one, reads that, and so on: drawn, [steps, B], by choices [steps, B]. A lane for which the model gives
// no numbers draws -1, and with it all end.
template <class T>
Answer write(const Sizes& z, double eps, const Layer<T>* layers, const Norm<T>& end, const Words<T>& words, const Ngrams<T>& ngrams,
             const Choice* choices, const i64* recent, const i64* tokens, i64 steps, i64* drawn, T* hidden, const i64* lowest, int threads) {
  const i64 B = z.lanes, D = z.model, V = words.count;
  if (!std::all_of(tokens, tokens + B, [&](i64 token) { return 0 <= token && token < V; })) return OUT_OF_BOUNDS;
  Memory memory;
  std::vector<T> logits;
  memory.guard([&] { logits.resize(B * V); });
  if (memory.ran_out) return NO_MEMORY;
  const i64 P = ngrams.longest - 1;
  auto read = [&](i64 b, i64 step) {  // before the first of these, what was read before
    return step > 0 ? drawn[(step - 1) * B + b] : step == 0 ? tokens[b] : recent[b * P + P + step];
  };
  auto enter = [&](Stepper<T>& mine, i64 step, Desk<T>& desk) {
    for (i64 b = 0; b < B; ++b) {
      T* own = &mine.own[b * D];
      for (i64 i = 0; i < D; ++i) own[i] = words.embedding[read(b, step) * D + i] * T(words.scale);
      if (ngrams.count) add_runs(ngrams, [&](i64 back) { return read(b, step - back); }, D, T(words.scale), desk, own);
    }
  };
  auto draw = [&](Stepper<T>& mine, i64 step, Desk<T>& desk) {
    mine.take(nullptr, nullptr);
    mine.times(words.output, V, [&](i64 b, i64 row, T value) { logits[b * V + row] = value + words.bias[row]; });
    mine.wait();
    mine.deal(B, [&](i64 b) { drawn[step * B + b] = desk.drawing.draw(&logits[b * V], choices[step * B + b]); });
    return std::all_of(drawn + step * B, drawn + (step + 1) * B, [](i64 token) { return token >= 0; });
  };
  return through_layers<T>(z, eps, layers, end, steps, hidden, lowest, threads, [&] { return Desk<T>(V, ngrams); }, enter, draw);
}

template <class T>
Answer linear(const Matrix<T>& matrix, const T* bias, const T* x, T* out, i64 lanes, i64 rows, i64 columns, int threads) {
  Memory memory;
#pragma omp parallel num_threads(threads)
  memory.guard([&] {
    Operands<T> operands(lanes, columns);
    for (i64 b = 0; b < lanes; ++b) operands.x[b].take(x + b * columns, columns);
    const Share mine = share(rows);
    multiply<T>(matrix, mine.first, mine.last, operands,
                [&](i64 b, i64 row, T value) { out[b * rows + row] = value + (bias ? bias[row] : T(0)); });
  });
  return memory.answer();
}

// --- many queries: tiles of scores that stay in cache, with a running softmax

constexpr int TQ = BYTES == 64 ? 96 : 48, TK = 256;  // multiples of a panel, the first of MR too

// Rows [from, from + columns) of [.., K] as panels of two vectors, [panel][K][2W]; rows outside [low, high) are zero.
template <class T>
void pack(const T* rows, i64 K, i64 from, i64 low, i64 high, i64 columns, T* panels) {
  constexpr int P = 2 * Wide<T>::width;
  for (i64 c = 0; c < columns; c += P)
    for (int p = 0; p < P; ++p) {
      const i64 row = from + c + p;
      T* to = panels + c * K + p;
      if (row < low || row >= high) {
        for (i64 k = 0; k < K; ++k) to[k * P] = 0;
      } else {
        const T* source = rows + row * K;
        for (i64 k = 0; k < K; ++k) to[k * P] = source[k];
      }
    }
}

template <class T>
struct Scratch {
  std::vector<T> content, position, scores, by_distance, keys, values, mixed, best, total, far;
};

// Adds `by_distance` to the whole vectors [from, to) of a row of scores, and leaves out what lies beside [a, e); the best of each lane.
template <class T>
inline V<T> add_by_distance(T* row, const T* by_distance, i64 from, i64 to, i64 a, i64 e) {
  constexpr int W = Wide<T>::width;
  V<T> best = -std::numeric_limits<T>::infinity() - V<T>{};
  for (i64 c = from; c < to; c += W) {
    V<T> x = load(row + c) + load(by_distance + c);
    if (c < a || c + W > e)  // what lies beside the visible may be anything, and stays out
      for (int p = 0; p < W; ++p)
        if (c + p < a || c + p >= e) x[p] = -std::numeric_limits<T>::infinity();
    store(row + c, x);
    best = x > best ? x : best;
  }
  return best;
}

// The same where all keys are equally far.
template <class T>
inline V<T> add_far(T* row, T far, i64 from, i64 to) {
  constexpr int W = Wide<T>::width;
  V<T> best = -std::numeric_limits<T>::infinity() - V<T>{};
  for (i64 c = from; c < to; c += W) {
    const V<T> x = load(row + c) + far;
    store(row + c, x);
    best = x > best ? x : best;
  }
  return best;
}

// One head of one lane, with room to work.
template <class T>
struct Head {
  static constexpr int W = Wide<T>::width, P = 2 * W;
  static constexpr i64 SPAN = TK + TQ;  // distances that lie between a tile of queries and one of keys
  const Layer<T>& layer;
  const Sizes& z;
  Scratch<T>& s;
  const i64 length, lane, head, lowest;  // keys before the lowest are not this lane's
  const i64 K, HK, KP, rows, low, high, last_distance;
  T *keys, *values;
  const T *relative, *distance_bias;

  Head(const Layer<T>& layer, const Sizes& z, Scratch<T>& s, i64 length, i64 lane, i64 head, i64 lowest)
      : layer(layer), z(z), s(s), length(length), lane(lane), head(head), lowest(lowest),
        K(z.width), HK(z.heads * K), KP((K + W - 1) / W * W), rows((length + TQ - 1) / TQ * TQ),
        low(std::max(lowest, z.end - z.limit)),  // keys before this are seen by nobody
        high(z.end + length),                    // keys at or after this do not exist
        last_distance(z.distances - 1),
        keys(layer.keys + (lane * z.heads + head) * z.room * K), values(layer.values + (lane * z.heads + head) * z.room * K),
        relative(layer.relative ? layer.relative + head * z.panels * K * P : nullptr),
        distance_bias(layer.distance_bias ? layer.distance_bias + head * z.panels * P : nullptr) {}

  // Its rows of `key_value` [B, T, 2, H, K] go to the positions end .. end+T-1 of the layer's buffers.
  void keep(const T* key_value) {
    for (i64 i = 0; i < length; ++i) {
      const T* row = key_value + (lane * length + i) * 2 * HK + head * K;
      std::copy(row, row + K, keys + (z.end + i) * K);
      std::copy(row + HK, row + HK + K, values + (z.end + i) * K);
    }
  }

  // Its queries of [B, T, H, K], which have seen nothing yet.
  void take(const T* queries) {
    const T scale = T(1) / std::sqrt(T(K));
    s.content.resize(rows * K), s.position.resize(rows * K), s.scores.resize(TQ * TK), s.by_distance.resize(TQ * SPAN);
    s.keys.resize(TK * K), s.mixed.assign(rows * KP, 0), s.total.assign(rows, 0), s.far.assign(rows, 0);
    s.best.assign(rows, -std::numeric_limits<T>::infinity());
    if (KP != K) s.values.assign(TK * KP, 0);
    for (i64 i = 0; i < length; ++i)
      for (i64 k = 0; k < K; ++k) {
        const T q = queries[(lane * length + i) * HK + head * K + k];
        s.content[i * K + k] = (q + (layer.content_bias ? layer.content_bias[head * K + k] : T(0))) * scale;
        s.position[i * K + k] = (q + (layer.position_bias ? layer.position_bias[head * K + k] : T(0))) * scale;
      }
  }

  // What each query gives to the last distance, which all keys share that are as far or farther.
  void score_last_distance() {
    const i64 panel = last_distance / P, column = P - 1 - last_distance % P;
    for (i64 i = 0; i < length; ++i) {
      T total = distance_bias ? distance_bias[panel * P + column] : T(0);
      for (i64 k = 0; k < K; ++k) total += s.position[i * K + k] * relative[(panel * K + k) * P + column];
      s.far[i] = total;
    }
  }

  // Key tiles are counted back from the end of the last query tile, so that every panel of distances begins at a multiple of its width.
  void look_back() {
    const i64 anchor = z.end + rows;
    for (i64 m = (anchor - low + TK - 1) / TK; m >= 1; --m)
      if (const i64 j0 = anchor - m * TK; j0 < high) look_at(j0);
  }

  // All queries at the keys [j0, j0 + TK).
  void look_at(i64 j0) {
    const i64 first = std::max(low, j0), past = std::min(high, j0 + TK);
    pack(keys, K, j0, first, past, TK, s.keys.data());
    const T* v = values + first * K;
    if (KP != K) {
      for (i64 j = first; j < past; ++j) std::copy(values + j * K, values + j * K + K, &s.values[(j - first) * KP]);
      v = s.values.data();
    }
    for (i64 q0 = 0; q0 < length; q0 += TQ) {
      const i64 count = std::min<i64>(TQ, length - q0), first_at = z.end + q0, last_at = first_at + count - 1;
      if (j0 > last_at || std::max(first_at - z.limit, lowest) >= j0 + TK) continue;
      soften(j0, q0, count);
      const T* p = &s.scores[first - j0];
      i64 k = 0;
      for (; k + P <= KP; k += P) tiles<2, true>(count, p, TK, v + k, KP, &s.mixed[q0 * KP + k], KP, past - first);
      if (k < KP) tiles<1, true>(count, p, TK, v + k, KP, &s.mixed[q0 * KP + k], KP, past - first);
    }
  }

  // The scores of one tile, through the running softmax.
  void soften(i64 j0, i64 q0, i64 count) {
    for (i64 c = 0; c < TK; c += P) tiles<2, false>(count, &s.content[q0 * K], K, &s.keys[c * K], P, &s.scores[c], TK, K);
    const i64 first_at = z.end + q0, farthest = first_at + TQ - 1 - j0, nearest = first_at - (j0 + TK - 1);
    const bool told_apart = relative && nearest < last_distance;
    if (told_apart) score_distances(q0, count, farthest);
    for (i64 i = 0; i < count; ++i)
      soften_row(j0, q0 + i, &s.scores[i * TK], told_apart ? &s.by_distance[i * SPAN + (TQ - 1 - i)] : nullptr);
  }

  // What each query of a tile gives to each distance, from the farthest down.
  void score_distances(i64 q0, i64 count, i64 farthest) {
    for (i64 c = 0; c < SPAN; c += P) {
      const i64 panel = (farthest - c) >= 0 ? (farthest - c) / P : -1;  // distances farthest-c down to farthest-c-P+1
      if (panel < 0) break;
      if (panel >= z.panels) {
        for (i64 i = 0; i < count; ++i)
          for (int p = 0; p < P; ++p) s.by_distance[i * SPAN + c + p] = s.far[q0 + i];
        continue;
      }
      T* to = &s.by_distance[c];
      tiles<2, false>(count, &s.position[q0 * K], K, relative + panel * K * P, P, to, SPAN, K);
      if (distance_bias)
        for (i64 i = 0; i < count; ++i)
          for (int p = 0; p < P; ++p) to[i * SPAN + p] += distance_bias[panel * P + p];
    }
  }

  // Query i's row of scores; zero where it sees nothing. `by_distance`: null where all keys are equally far.
  void soften_row(i64 j0, i64 i, T* row, const T* by_distance) {
    const i64 at = z.end + i;
    const i64 a = std::max<i64>(std::max(lowest, at - z.limit) - j0, 0), e = std::min<i64>(at + 1 - j0, TK);
    if (a >= e) {
      std::fill(row, row + TK, T(0));
      return;
    }
    // Whole vectors around [a, e); what sticks out is set to minus infinity first.
    const i64 from = a / W * W, to = (e + W - 1) / W * W;
    for (i64 c = from; c < a; ++c) row[c] = -std::numeric_limits<T>::infinity();
    for (i64 c = e; c < to; ++c) row[c] = -std::numeric_limits<T>::infinity();
    const V<T> best_v = by_distance ? add_by_distance(row, by_distance, from, to, a, e) : add_far(row, s.far[i], from, to);
    T best = s.best[i];
    for (int p = 0; p < W; ++p) best = std::max(best, best_v[p]);
    if (best > s.best[i]) raise(i, best);
    V<T> total = {};
    for (i64 c = from; c < to; c += W) {
      const V<T> p = exponential(load(row + c) - best);
      store(row + c, p);
      total += p;
    }
    s.total[i] += sum<T>(total);
    std::fill(row, row + from, T(0));
    std::fill(row + to, row + TK, T(0));
  }

  // A better score than any before: what was gathered so far shrinks beside it.
  void raise(i64 i, T best) {
    const T shrink = std::exp(s.best[i] - best);
    s.total[i] *= shrink;
    T* mixed = &s.mixed[i * KP];
    for (i64 k = 0; k < KP; ++k) mixed[k] *= shrink;
    s.best[i] = best;
  }

  void give(T* out) const {
    for (i64 i = 0; i < length; ++i) {
      const T share = T(1) / s.total[i];
      T* to = out + (lane * length + i) * HK + head * K;
      for (i64 k = 0; k < K; ++k) to[k] = s.mixed[i * KP + k] * share;
      const i64 at = z.end + i, first = std::max(lowest, at - z.limit);
      add_neighbours(layer, z, head, values + first * K, at - first + 1, to);
    }
  }
};

// New keys and values are kept, then the queries beside them look back; out: the shape of the queries.
template <class T>
Answer attend(const Sizes& z, const Layer<T>& layer, i64 length, const T* queries, const T* key_value, const i64* lowest, T* out,
              int threads) {
  if (!within(z, length, lowest)) return OUT_OF_BOUNDS;
  Memory memory;
#pragma omp parallel num_threads(threads)
  {
    Scratch<T> scratch;
#pragma omp for schedule(dynamic, 1)
    for (i64 task = 0; task < z.heads * z.lanes; ++task)
      memory.guard([&] {
        Head<T> head(layer, z, scratch, length, task % z.lanes, task / z.lanes, lowest[task % z.lanes]);
        head.keep(key_value);
        head.take(queries);
        if (layer.relative) head.score_last_distance();
        head.look_back();
        head.give(out);
      });
  }
  return memory.answer();
}

}  // namespace

#define DOORS(name, T)                                                                                                       \
  extern "C" int step_##name(const Sizes* z, double eps, const Layer<T>* layers, const T* norm, const T* norm_bias, T* hidden, \
                             const i64* lowest, int threads) {                                                               \
    return step<T>(*z, eps, layers, Norm<T>{norm, norm_bias}, hidden, lowest, threads);                                      \
  }                                                                                                                          \
  extern "C" int write_##name(const Sizes* z, double eps, const Layer<T>* layers, const T* norm, const T* norm_bias,         \
                              const Words<T>* words, const Ngrams<T>* ngrams, const Choice* choices, const i64* recent,       \
                              const i64* tokens, i64 steps, i64* drawn, T* hidden, const i64* lowest, int threads) {          \
    return write<T>(*z, eps, layers, Norm<T>{norm, norm_bias}, *words, *ngrams, choices, recent, tokens, steps, drawn, hidden, \
                    lowest, threads);                                                                                        \
  }                                                                                                                          \
  extern "C" int attend_##name(const Sizes* z, const Layer<T>* layer, i64 length, const T* queries, const T* key_value,      \
                               const i64* lowest, T* out, int threads) {                                                     \
    return attend<T>(*z, *layer, length, queries, key_value, lowest, out, threads);                                          \
  }                                                                                                                          \
  extern "C" int linear_##name(const void* weight, const float* scale, const T* bias, const T* x, T* out, i64 lanes,         \
                               i64 rows, i64 columns, int threads) {                                                         \
    return linear<T>(Matrix<T>{weight, scale}, bias, x, out, lanes, rows, columns, threads);                                 \
  }

DOORS(float32, float)
DOORS(float64, double)

extern "C" int panel_width(int bytes) { return 2 * BYTES / bytes; }

using Pointers = Layer<float>;
static_assert(sizeof(Layer<double>) == sizeof(Pointers));
#define MATRIX(matrix) {"Layer." #matrix, offsetof(Pointers, matrix.data)}, {"Layer." #matrix "_scale", offsetof(Pointers, matrix.scale)}
#define POINTER(field) {"Layer." #field, offsetof(Pointers, field)}
extern "C" const Field fields_of_inference[] = {
    MATRIX(query), MATRIX(key_value), MATRIX(output), MATRIX(inner), MATRIX(outer),
    POINTER(inner_bias), POINTER(outer_bias), POINTER(attention_norm), POINTER(attention_norm_bias), POINTER(feed_norm),
    POINTER(feed_norm_bias), POINTER(keys), POINTER(values), POINTER(content_bias), POINTER(position_bias), POINTER(relative),
    POINTER(distance_bias), POINTER(neighbours), {"Layer", sizeof(Pointers)},
    FIELD(Sizes, layers), FIELD(Sizes, lanes), FIELD(Sizes, heads), FIELD(Sizes, width), FIELD(Sizes, model), FIELD(Sizes, inner),
    FIELD(Sizes, room), FIELD(Sizes, end), FIELD(Sizes, limit), FIELD(Sizes, distances), FIELD(Sizes, panels), FIELD(Sizes, pre_norm),
    FIELD(Sizes, neighbours), BYTES_OF(Sizes),
    {"Words.embedding", offsetof(Words<float>, embedding)}, {"Words.output", offsetof(Words<float>, output.data)},
    {"Words.output_scale", offsetof(Words<float>, output.scale)}, {"Words.bias", offsetof(Words<float>, bias)},
    {"Words.count", offsetof(Words<float>, count)}, {"Words.scale", offsetof(Words<float>, scale)}, {"Words", sizeof(Words<float>)},
    {"Ngrams.tables", offsetof(Ngrams<float>, tables)}, {"Ngrams.projection", offsetof(Ngrams<float>, projection)},
    {"Ngrams.orders", offsetof(Ngrams<float>, orders)}, {"Ngrams.count", offsetof(Ngrams<float>, count)},
    {"Ngrams.rows", offsetof(Ngrams<float>, rows)}, {"Ngrams.width", offsetof(Ngrams<float>, width)},
    {"Ngrams.longest", offsetof(Ngrams<float>, longest)}, {"Ngrams", sizeof(Ngrams<float>)},
    FIELD(Choice, temperature), FIELD(Choice, top_p), FIELD(Choice, min_p), FIELD(Choice, share), FIELD(Choice, top_k), BYTES_OF(Choice),
    {nullptr, 0}};
