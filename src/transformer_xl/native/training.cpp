// What training does most beside matrix products. Dropout, whose mask is computed from a seed wherever it is needed and never kept. And attention of
// one layer, forwards and backwards, head by head in tiles that stay in cache; what is kept between the two is the probabilities, and nothing else of
// the size of queries times keys is ever written.
//
// Shapes of attention: queries [B, T, H, K]; keys and values in two parts, of memory [B, M, 2, H, K] and of the segment [B, T, 2, H, K], together S = M + T
// positions; relative keys [S, H, K], row c for distance S-1-c, so that query i finds key j's distance in row T-1-i+j; biases [H, K].

#include "vectors.h"

namespace {

struct Shape {
  i64 lanes, queries, memory, heads, width, limit;  // a query sees itself and `limit` before it, and in each lane nothing before `lowest`
  i64 neighbours;                                   // of which so many, itself the first, also give it their values, by weights [neighbours, H, K]
  i64 groups;                                       // lanes of a head are dealt to so many tasks, each with gradients of its own to be added up
  double dropout;
  uint64_t seed;
};

template <class T>
struct Inputs {
  const T *query, *memory_key_value, *key_value, *relative, *content_bias, *position_bias, *neighbours;
  const i64* lowest;
};

// Where the gradients of the inputs go. Groups of lanes have their own of what lanes share: relative [groups, S, H, K], biases [groups, H, K],
// neighbours [groups, neighbours, H, K].
template <class T>
struct Gradients {
  T *query, *memory, *key_value, *relative, *content_bias, *position_bias, *neighbours;
};

constexpr i64 ROWS = 48;  // queries of a tile: a multiple of MR

inline uint32_t scrambled(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// Whether each of `count` cells of a row is kept: 1 / (1 - rate), or 0. It depends on seed and place only, so both directions find the same.
template <class T>
void kept_cells(double rate, uint64_t seed, i64 row, i64 count, T* factors) {
  const uint32_t key = scrambled(uint32_t(row) ^ scrambled(uint32_t(seed) ^ scrambled(uint32_t(seed >> 32) + uint32_t(row >> 32))));
  const uint32_t least = uint32_t(std::min(rate * 4294967296.0, 4294967295.0));
  const T scale = T(1 / (1 - rate));
  for (i64 j = 0; j < count; ++j) factors[j] = scrambled(key + uint32_t(j) * 0x9e3779b9u) >= least ? scale : T(0);
}

template <class T, bool RELU>
void drop(const T* x, T* y, i64 count, double rate, uint64_t seed, int threads) {
  constexpr i64 ROW = 1024;
#pragma omp parallel for num_threads(threads)
  for (i64 row = 0; row < (count + ROW - 1) / ROW; ++row) {
    T factors[ROW];
    const i64 here = std::min(ROW, count - row * ROW);
    kept_cells(rate, seed, row, here, factors);
    for (i64 j = 0; j < here; ++j) {
      const T value = x[row * ROW + j];
      y[row * ROW + j] = RELU && value < 0 ? T(0) : value * factors[j];
    }
  }
}

// After a ReLU, what came out tells what was kept.
template <class T>
void relu_drop_backward(const T* y, const T* g, T* dx, i64 count, double rate, int threads) {
  const T scale = T(1 / (1 - rate));
#pragma omp parallel for num_threads(threads)
  for (i64 j = 0; j < count; ++j) dx[j] = y[j] == 0 ? T(0) : g[j] * scale;
}

// C[R keys, N vectors] += sum over `depth` rows i of A[i, key] B[i, ...]: a product with the left side transposed.
template <int R, int N, class T>
inline void turned_tile(const T* a, i64 lda, const T* b, i64 ldb, T* c, i64 ldc, i64 depth) {
  constexpr int W = Wide<T>::width;
  V<T> total[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) total[r][n] = load(c + r * ldc + n * W);
  for (i64 i = 0; i < depth; ++i) {
    V<T> row[N];
    for (int n = 0; n < N; ++n) row[n] = load(b + i * ldb + n * W);
    for (int r = 0; r < R; ++r) {
      const T value = a[i * lda + r];
      for (int n = 0; n < N; ++n) total[r][n] += value * row[n];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(c + r * ldc + n * W, total[r][n]);
}

template <int N, class T>
__attribute__((noinline)) void turned_tiles(i64 keys, const T* a, i64 lda, const T* b, i64 ldb, T* c, i64 ldc, i64 depth) {
  i64 r = 0;
  for (; r + MR <= keys; r += MR) turned_tile<MR, N>(a + r, lda, b, ldb, c + r * ldc, ldc, depth);
  for (; r < keys; ++r) turned_tile<1, N>(a + r, lda, b, ldb, c + r * ldc, ldc, depth);
}

// Over the whole width, two vectors at a time.
template <class T>
void turned_product(i64 keys, const T* a, i64 lda, const T* b, T* c, i64 padded, i64 depth) {
  constexpr int W = Wide<T>::width;
  i64 k = 0;
  for (; k + 2 * W <= padded; k += 2 * W) turned_tiles<2>(keys, a, lda, b + k, padded, c + k, padded, depth);
  if (k < padded) turned_tiles<1>(keys, a, lda, b + k, padded, c + k, padded, depth);
}

template <class T>
void product(i64 rows, const T* a, i64 lda, const T* b, T* c, i64 padded, i64 depth) {
  constexpr int W = Wide<T>::width;
  i64 k = 0;
  for (; k + 2 * W <= padded; k += 2 * W) tiles<2, false>(rows, a, lda, b + k, padded, c + k, padded, depth);
  if (k < padded) tiles<1, false>(rows, a, lda, b + k, padded, c + k, padded, depth);
}

// Rows [count, padded] as panels of two vectors, [panel][padded][2W]; what lies past the rows is zero.
template <class T>
void panelled(const T* rows, i64 count, i64 padded, std::vector<T>& to) {
  constexpr int P = 2 * Wide<T>::width;
  const i64 panels = (count + P - 1) / P;
  to.assign(panels * P * padded, T(0));
  for (i64 row = 0; row < count; ++row) {
    T* column = &to[row / P * P * padded + row % P];
    const T* from = rows + row * padded;
    for (i64 k = 0; k < padded; ++k) column[k * P] = from[k];
  }
}

// C[rows, columns from..to) = A[rows, padded] times panels; whole panels are written.
template <class T>
void scores_of(i64 rows, const T* a, i64 padded, const std::vector<T>& panels, i64 from, i64 to, T* c, i64 ldc) {
  constexpr int P = 2 * Wide<T>::width;
  for (i64 column = from / P * P; column < to; column += P)
    tiles<2, false>(rows, a, padded, &panels[column * padded], P, c + column, ldc, padded);
}

template <class T>
struct Desk {  // one thread's
  std::vector<T> content, position, keys, values, relative, key_panels, value_panels, relative_panels, scores, by_distance, kept, mixed, outer;
  std::vector<T> key_gradient, value_gradient, relative_gradient, content_gradient, position_gradient, dropped;
};

// One head of one lane, and what of it both directions need.
template <class T>
struct Head {
  static constexpr int W = Wide<T>::width, P = 2 * W;
  const Shape& z;
  const Inputs<T>& in;
  i64 lane, head, S, padded, stride;
  T scale;

  Head(const Shape& z, const Inputs<T>& in, i64 lane, i64 head)
      : z(z), in(in), lane(lane), head(head), S(z.memory + z.queries), padded((z.width + W - 1) / W * W),
        stride((S + P - 1) / P * P + 2 * P), scale(T(1) / std::sqrt(T(z.width))) {}

  i64 first(i64 i) const { return std::max(in.lowest[lane], z.memory + i - z.limit); }
  i64 past(i64 i) const { return z.memory + i + 1; }
  i64 query_at(i64 i) const { return ((lane * z.queries + i) * z.heads + head) * z.width; }

  const T* key_value_at(i64 j, i64 which) const {
    const bool kept = j < z.memory;
    const i64 place = kept ? lane * z.memory + j : lane * z.queries + j - z.memory;
    return (kept ? in.memory_key_value : in.key_value) + ((place * 2 + which) * z.heads + head) * z.width;
  }

  void take_queries(Desk<T>& d) const {
    d.content.assign(z.queries * padded, T(0));
    d.position.assign(z.queries * padded, T(0));
    for (i64 i = 0; i < z.queries; ++i)
      for (i64 k = 0; k < z.width; ++k) {
        const T q = in.query[query_at(i) + k];
        d.content[i * padded + k] = (q + (in.content_bias ? in.content_bias[head * z.width + k] : T(0))) * scale;
        d.position[i * padded + k] = (q + (in.position_bias ? in.position_bias[head * z.width + k] : T(0))) * scale;
      }
  }

  void take_keys(Desk<T>& d) const {
    d.keys.assign(S * padded, T(0));
    d.values.assign(S * padded, T(0));
    for (i64 j = 0; j < S; ++j) {
      const T *key = key_value_at(j, 0), *value = key_value_at(j, 1);
      std::copy(key, key + z.width, &d.keys[j * padded]);
      std::copy(value, value + z.width, &d.values[j * padded]);
    }
  }

  void take_relative(Desk<T>& d) const {  // the same for all lanes
    d.relative.assign(S * padded, T(0));
    for (i64 c = 0; c < S; ++c) {
      const T* from = in.relative + (c * z.heads + head) * z.width;
      std::copy(from, from + z.width, &d.relative[c * padded]);
    }
  }

  T* probability_row(T* probability, i64 i) const { return probability + ((lane * z.heads + head) * z.queries + i) * S; }
  i64 row_number(i64 i) const { return (lane * z.heads + head) * z.queries + i; }

  // Queries [i0, i0 + rows), which see keys [low, high) among them, and columns of distances from `nearest` on.
  struct Tile {
    i64 i0, rows, low, high, nearest;
  };

  Tile tile_at(i64 i0) const {
    const i64 rows = std::min(ROWS, z.queries - i0), low = first(i0);
    return {i0, rows, low, past(i0 + rows - 1), z.queries - 1 - (i0 + rows - 1) + low};
  }

  // Calls use(n, weight, value, place) for each neighbour that query i sees, the nearest first: where its value and its gradient lie.
  template <class Use>
  void for_neighbours(const Desk<T>& d, i64 i, const Use& use) const {
    for (i64 n = 0; n < std::min(z.neighbours, past(i) - first(i)); ++n) {
      const i64 place = (z.memory + i - n) * padded;
      use(n, in.neighbours + (n * z.heads + head) * z.width, &d.values[place], place);
    }
  }

  void add_neighbours(const Desk<T>& d, i64 i, T* to) const {
    for_neighbours(d, i, [&](i64, const T* weight, const T* value, i64) {
      for (i64 k = 0; k < z.width; ++k) to[k] += weight[k] * value[k];
    });
  }

  void forward(Desk<T>& d, T* probability, T* out) const {
    take_queries(d);
    take_keys(d);
    panelled(d.keys.data(), S, padded, d.key_panels);
    d.scores.resize(ROWS * stride);
    d.by_distance.resize(ROWS * stride);
    d.mixed.resize(ROWS * padded);
    d.kept.resize(stride);
    d.dropped.resize(ROWS * stride);
    for (i64 i0 = 0; i0 < z.queries; i0 += ROWS) {
      const Tile t = tile_at(i0);
      scores_of(t.rows, &d.content[i0 * padded], padded, d.key_panels, t.low, t.high, d.scores.data(), stride);
      scores_of(t.rows, &d.position[i0 * padded], padded, d.relative_panels, t.nearest, S, d.by_distance.data(), stride);
      for (i64 r = 0; r < t.rows; ++r) {
        T* row = probability_row(probability, i0 + r);
        soften(d, i0 + r, r, row);
        drop_row(d, t, r, row);
      }
      product(t.rows, &d.dropped[t.low], stride, &d.values[t.low * padded], d.mixed.data(), padded, t.high - t.low);
      for (i64 r = 0; r < t.rows; ++r) {
        T* from = &d.mixed[r * padded];
        add_neighbours(d, i0 + r, from);
        std::copy(from, from + z.width, out + query_at(i0 + r));
      }
    }
  }

  // Query i's probabilities, from its scores in row r of the tile.
  void soften(Desk<T>& d, i64 i, i64 r, T* row) const {
    const i64 a = first(i), e = past(i), to = a + (e - a + W - 1) / W * W;
    T* x = &d.scores[r * stride];
    const T* distance = &d.by_distance[r * stride + z.queries - 1 - i];
    V<T> best_v = -std::numeric_limits<T>::infinity() - V<T>{};
    for (i64 j = a; j < to; j += W) {
      V<T> sum_v = load(x + j) + load(distance + j);
      if (j + W > e)
        for (int p = int(e - j); p < W; ++p) sum_v[p] = -std::numeric_limits<T>::infinity();
      store(x + j, sum_v);
      best_v = sum_v > best_v ? sum_v : best_v;
    }
    T best = best_v[0];
    for (int p = 1; p < W; ++p) best = std::max(best, best_v[p]);
    V<T> total_v = {};
    for (i64 j = a; j < to; j += W) {
      const V<T> p = exponential(load(x + j) - best);
      store(x + j, p);
      total_v += p;
    }
    const T share = T(1) / sum<T>(total_v);
    std::fill(row, row + a, T(0));
    for (i64 j = a; j < e; ++j) row[j] = x[j] * share;
    std::fill(row + e, row + S, T(0));
  }

  // What the values are mixed by: the probabilities after dropout, zero wherever another row of the tile looks.
  void drop_row(Desk<T>& d, const Tile& t, i64 r, const T* row) const {
    const i64 i = t.i0 + r, a = first(i), e = past(i);
    T* used = &d.dropped[r * stride];
    std::fill(used + t.low, used + a, T(0));
    if (z.dropout > 0) {
      kept_cells(z.dropout, z.seed, row_number(i), S, d.kept.data());
      for (i64 j = a; j < e; ++j) used[j] = row[j] * d.kept[j];
    } else {
      std::copy(row + a, row + e, used + a);
    }
    std::fill(used + e, used + t.high, T(0));
  }

  // Adds to the desk's relative_gradient and to the biases' gradients; everything else is this head's own.
  void backward(Desk<T>& d, const T* probability, const T* out, const T* gradient, const Gradients<T>& to) const {
    take_queries(d);
    take_keys(d);
    panelled(d.values.data(), S, padded, d.value_panels);
    d.scores.resize(ROWS * stride);
    d.by_distance.resize(ROWS * stride);
    d.dropped.resize(ROWS * stride);
    d.kept.resize(stride);
    d.outer.assign(z.queries * padded, T(0));
    d.key_gradient.assign(S * padded, T(0));
    d.value_gradient.assign(S * padded, T(0));
    d.content_gradient.resize(ROWS * padded);
    d.position_gradient.resize(ROWS * padded);
    for (i64 i = 0; i < z.queries; ++i) std::copy(gradient + query_at(i), gradient + query_at(i) + z.width, &d.outer[i * padded]);
    for (i64 i = 0; i < z.queries; ++i) neighbours_gradient(d, i, to);
    for (i64 i0 = 0; i0 < z.queries; i0 += ROWS) {
      const Tile t = tile_at(i0);
      scores_of(t.rows, &d.outer[i0 * padded], padded, d.value_panels, t.low, t.high, d.scores.data(), stride);
      for (i64 r = 0; r < t.rows; ++r) score_gradient(d, t, r, probability, out, gradient);
      spread(d, t);
      give_queries(d, t, to);
    }
    give_keys(d, to);
  }

  void neighbours_gradient(Desk<T>& d, i64 i, const Gradients<T>& to) const {
    const T* g = &d.outer[i * padded];
    for_neighbours(d, i, [&](i64 n, const T* weight, const T* value, i64 place) {
      T *of_weight = to.neighbours + n * z.heads * z.width, *of_value = &d.value_gradient[place];
      for (i64 k = 0; k < z.width; ++k) {
        of_weight[k] += g[k] * value[k];
        of_value[k] += g[k] * weight[k];
      }
    });
  }

  // The gradient of one query's scores, by key and by distance, and what its values were mixed by.
  void score_gradient(Desk<T>& d, const Tile& t, i64 r, const T* probability, const T* out, const T* gradient) const {
    const i64 i = t.i0 + r, a = first(i), e = past(i);
    const T* p = probability_row(const_cast<T*>(probability), i);
    T through = 0;  // what the probabilities gave, without the neighbours
    d.mixed.assign(padded, T(0));
    add_neighbours(d, i, d.mixed.data());
    for (i64 k = 0; k < z.width; ++k) through += gradient[query_at(i) + k] * (out[query_at(i) + k] - d.mixed[k]);
    T *g = &d.scores[r * stride], *used = &d.dropped[r * stride];
    std::fill(used + t.low, used + a, T(0));
    if (z.dropout > 0) {
      kept_cells(z.dropout, z.seed, row_number(i), S, d.kept.data());
      for (i64 j = a; j < e; ++j) {
        used[j] = p[j] * d.kept[j];
        g[j] = p[j] * (g[j] * d.kept[j] - through);
      }
    } else {
      std::copy(p + a, p + e, used + a);
      for (i64 j = a; j < e; ++j) g[j] = p[j] * (g[j] - through);
    }
    std::fill(used + e, used + t.high, T(0));
    std::fill(g + t.low, g + a, T(0));
    std::fill(g + e, g + t.high, T(0));
    T* far = &d.by_distance[r * stride];  // the same by distance
    const i64 shift = z.queries - 1 - i;
    std::fill(far + t.nearest, far + shift + a, T(0));
    std::copy(g + a, g + e, far + shift + a);  // ends at S, the distance 0
  }

  // From a tile's scores to everything that they were products of.
  void spread(Desk<T>& d, const Tile& t) const {
    const i64 i0 = t.i0, rows = t.rows, low = t.low, seen = t.high - low, nearest = t.nearest;
    turned_product(seen, &d.dropped[low], stride, &d.outer[i0 * padded], &d.value_gradient[low * padded], padded, rows);
    turned_product(seen, &d.scores[low], stride, &d.content[i0 * padded], &d.key_gradient[low * padded], padded, rows);
    turned_product(S - nearest, &d.by_distance[nearest], stride, &d.position[i0 * padded], &d.relative_gradient[nearest * padded],
                   padded, rows);
    product(rows, &d.scores[low], stride, &d.keys[low * padded], d.content_gradient.data(), padded, seen);
    product(rows, &d.by_distance[nearest], stride, &d.relative[nearest * padded], d.position_gradient.data(), padded, S - nearest);
  }

  void give_queries(const Desk<T>& d, const Tile& t, const Gradients<T>& to) const {
    for (i64 r = 0; r < t.rows; ++r)
      for (i64 k = 0; k < z.width; ++k) {
        const T content = d.content_gradient[r * padded + k] * scale, position = d.position_gradient[r * padded + k] * scale;
        to.query[query_at(t.i0 + r) + k] = content + position;
        to.content_bias[k] += content;
        to.position_bias[k] += position;
      }
  }

  void give_keys(const Desk<T>& d, const Gradients<T>& to) const {
    for (i64 j = 0; j < S; ++j) {
      const bool kept = j < z.memory;
      const i64 place = kept ? lane * z.memory + j : lane * z.queries + j - z.memory;
      T* key = (kept ? to.memory : to.key_value) + (place * 2 * z.heads + head) * z.width;
      std::copy(&d.key_gradient[j * padded], &d.key_gradient[j * padded] + z.width, key);
      std::copy(&d.value_gradient[j * padded], &d.value_gradient[j * padded] + z.width, key + z.heads * z.width);
    }
  }
};

// Every query sees itself at least, and nothing before the memory begins.
template <class T>
bool within(const Shape& z, const Inputs<T>& in) {
  if (z.limit < 0 || z.neighbours < 0 || z.groups < 1 || z.groups > z.lanes || !(0 <= z.dropout && z.dropout < 1)) return false;
  return std::all_of(in.lowest, in.lowest + z.lanes, [&](i64 first) { return 0 <= first && first <= z.memory; });
}

template <class T>
Answer attend_forward(const Shape& z, const Inputs<T>& in, T* probability, T* out, int threads) {
  if (!within(z, in)) return OUT_OF_BOUNDS;
  Memory memory;
#pragma omp parallel num_threads(threads)
  {
    Desk<T> desk;
    i64 last_head = -1;
    auto work = [&](i64 task) {
      const Head<T> head(z, in, task % z.lanes, task / z.lanes);
      if (head.head != last_head) {
        head.take_relative(desk);
        panelled(desk.relative.data(), head.S, head.padded, desk.relative_panels);
        last_head = head.head;
      }
      head.forward(desk, probability, out);
    };
#pragma omp for schedule(dynamic, 1)
    for (i64 task = 0; task < z.heads * z.lanes; ++task)  // a head of all lanes after another: they share its relative keys
      memory.guard([&] { work(task); });
  }
  return memory.answer();
}

// One head of a group of lanes, which add to the same gradients of relative keys and biases.
template <class T>
void group_backward(const Shape& z, const Inputs<T>& in, Desk<T>& d, i64 head, i64 group, const T* probability, const T* out,
                    const T* gradient, Gradients<T> to) {
  const i64 HK = z.heads * z.width, S = z.memory + z.queries, padded = Head<T>(z, in, 0, head).padded;
  const i64 from = z.lanes * group / z.groups, past = z.lanes * (group + 1) / z.groups;
  for (T** bias : {&to.content_bias, &to.position_bias}) {
    *bias += group * HK + head * z.width;
    std::fill(*bias, *bias + z.width, T(0));
  }
  to.neighbours += group * z.neighbours * HK + head * z.width;
  for (i64 n = 0; n < z.neighbours; ++n) std::fill_n(to.neighbours + n * HK, z.width, T(0));
  d.relative_gradient.assign(S * padded, T(0));
  for (i64 lane = from; lane < past; ++lane) {
    const Head<T> one(z, in, lane, head);
    if (lane == from) one.take_relative(d);
    one.backward(d, probability, out, gradient, to);
  }
  for (i64 c = 0; c < S; ++c) {
    const T* row = &d.relative_gradient[c * padded];
    std::copy(row, row + z.width, to.relative + (group * S + c) * HK + head * z.width);
  }
}

template <class T>
Answer attend_backward(const Shape& z, const Inputs<T>& in, const T* probability, const T* out, const T* gradient,
                       const Gradients<T>& to, int threads) {
  if (!within(z, in)) return OUT_OF_BOUNDS;
  Memory memory;
#pragma omp parallel num_threads(threads)
  {
    Desk<T> desk;
#pragma omp for schedule(dynamic, 1)
    for (i64 task = 0; task < z.heads * z.groups; ++task)
      memory.guard([&] { group_backward(z, in, desk, task / z.groups, task % z.groups, probability, out, gradient, to); });
  }
  return memory.answer();
}

// --- the way back through a large matrix that few vectors were multiplied by: each of its rows is read once, and its gradient written once

// out = x w^T, x [few, width], w [count, width], g the gradient of out: dw and dx are written.
template <class T>
void few_backward(const T* g, const T* x, const T* w, T* dw, T* dx, i64 few, i64 count, i64 width, int threads) {
  constexpr int W = Wide<T>::width, ROWS = 4;
  const i64 padded = (width + W - 1) / W * W;
  std::vector<T> rows_of_x(few * padded, T(0)), sums(threads * few * padded, T(0)), shares(threads * few * ROWS);
  for (i64 p = 0; p < few; ++p) std::copy(x + p * width, x + (p + 1) * width, &rows_of_x[p * padded]);
#pragma omp parallel num_threads(threads)
  {
    T *mine = sums.data() + omp_get_thread_num() * few * padded, *share = shares.data() + omp_get_thread_num() * few * ROWS;
#pragma omp for schedule(static)
    for (i64 v = 0; v < count; v += ROWS) {
      const int rows = int(std::min<i64>(ROWS, count - v));
      for (i64 p = 0; p < few; ++p)
        for (int r = 0; r < ROWS; ++r) share[p * ROWS + r] = r < rows ? g[p * count + v + r] : T(0);
      const auto columns = [&](i64 e, const T* from, T* to, i64 apart) {  // one vector's width of these rows
        V<T> row[ROWS], total[ROWS] = {};
        for (int r = 0; r < ROWS; ++r) row[r] = load(from + r * apart);
        for (i64 p = 0; p < few; ++p) {
          const V<T> x_v = load(&rows_of_x[p * padded + e]);
          V<T> sum_v = load(mine + p * padded + e);
          for (int r = 0; r < ROWS; ++r) {
            total[r] += share[p * ROWS + r] * x_v;
            sum_v += share[p * ROWS + r] * row[r];
          }
          store(mine + p * padded + e, sum_v);
        }
        for (int r = 0; r < ROWS; ++r) store(to + r * apart, total[r]);
      };
      const i64 whole = rows == ROWS ? width / W * W : 0;
      for (i64 e = 0; e < whole; e += W) columns(e, w + v * width + e, dw + v * width + e, width);
      for (i64 e = whole; e < width; e += W) {  // what would reach beyond a row or the last one goes through a corner of our own
        T from[ROWS * W] = {}, to[ROWS * W];
        const i64 there = std::min<i64>(W, width - e);
        for (int r = 0; r < rows; ++r) std::copy_n(w + (v + r) * width + e, there, from + r * W);
        columns(e, from, to, W);
        for (int r = 0; r < rows; ++r) std::copy_n(to + r * W, there, dw + (v + r) * width + e);
      }
    }
  }
  for (i64 p = 0; p < few; ++p)
    for (i64 e = 0; e < width; ++e) {
      T total = 0;
      for (int thread = 0; thread < threads; ++thread) total += sums[(thread * few + p) * padded + e];
      dx[p * width + e] = total;
    }
}

}  // namespace

#define DOORS(name, T)                                                                                                          \
  extern "C" int drop_##name(const T* x, T* y, i64 count, double rate, uint64_t seed, int threads) {                            \
    drop<T, false>(x, y, count, rate, seed, threads);                                                                           \
    return DONE;                                                                                                                \
  }                                                                                                                             \
  extern "C" int relu_drop_##name(const T* x, T* y, i64 count, double rate, uint64_t seed, int threads) {                       \
    drop<T, true>(x, y, count, rate, seed, threads);                                                                            \
    return DONE;                                                                                                                \
  }                                                                                                                             \
  extern "C" int relu_drop_backward_##name(const T* y, const T* g, T* dx, i64 count, double rate, int threads) {                \
    relu_drop_backward<T>(y, g, dx, count, rate, threads);                                                                      \
    return DONE;                                                                                                                \
  }                                                                                                                             \
  extern "C" int few_backward_##name(const T* g, const T* x, const T* w, T* dw, T* dx, i64 few, i64 count, i64 width,           \
                                     int threads) {                                                                             \
    Memory memory;                                                                                                              \
    memory.guard([&] { few_backward<T>(g, x, w, dw, dx, few, count, width, threads); });                                        \
    return memory.answer();                                                                                                     \
  }                                                                                                                             \
  extern "C" int attend_forward_##name(const Shape* z, const Inputs<T>* in, T* probability, T* out, int threads) {              \
    return attend_forward<T>(*z, *in, probability, out, threads);                                                               \
  }                                                                                                                             \
  extern "C" int attend_backward_##name(const Shape* z, const Inputs<T>* in, const T* probability, const T* out,                \
                                        const T* gradient, T* query_gradient, T* memory_gradient, T* key_value_gradient,        \
                                        T* relative_gradient, T* content_bias_gradient, T* position_bias_gradient,              \
                                        T* neighbours_gradient, int threads) {                                                  \
    const Gradients<T> to{query_gradient,        memory_gradient,        key_value_gradient, relative_gradient,                 \
                          content_bias_gradient, position_bias_gradient, neighbours_gradient};                                  \
    return attend_backward<T>(*z, *in, probability, out, gradient, to, threads);                                                \
  }

DOORS(float32, float)
DOORS(float64, double)

static_assert(sizeof(Inputs<double>) == sizeof(Inputs<float>));
#define POINTER(field) {"Inputs." #field, offsetof(Inputs<float>, field)}
extern "C" const Field fields_of_training[] = {
    FIELD(Shape, lanes), FIELD(Shape, queries), FIELD(Shape, memory), FIELD(Shape, heads), FIELD(Shape, width), FIELD(Shape, limit),
    FIELD(Shape, neighbours), FIELD(Shape, groups), FIELD(Shape, dropout), FIELD(Shape, seed), BYTES_OF(Shape),
    POINTER(query), POINTER(memory_key_value), POINTER(key_value), POINTER(relative), POINTER(content_bias), POINTER(position_bias),
    POINTER(neighbours), POINTER(lowest), {"Inputs", sizeof(Inputs<float>)}, {nullptr, 0}};
