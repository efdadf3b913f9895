// Reading in the same bits on every machine: tokens in, whole numbers out, by the arithmetic of `arithmetic.h` alone. The twin of `step` in
// `inference.cpp`, which is free to add up as this processor does it fastest.
//
// Each lane has a clock of its own, the tokens that it has read, and rings that are written by it: position n lies at n modulo the ring. So nothing that a
// lane computes depends on when its neighbours began. Several tokens of a lane are rows like those of several lanes, and are given the same chains.
//
// Shapes follow the Python side: B lane, H head, K head width, D model width, F inner width, V words. Rows of D, F, V and of a head have room for whole
// sixteens (Q = padded K). Matrices are panels of sixteen outputs, [panel][depth][16]. Keys [B, H, ring / 16, K, 16], values [B, ring, H, Q]; relative keys
// [H, distances / 16, K, 16], the farthest distance first.

#include <array>
#include <optional>

#include "arithmetic.h"

namespace {

struct PortableLayer {
  const float *query_key_value, *output, *inner, *outer, *inner_bias, *outer_bias;
  const float *attention_norm, *attention_norm_bias, *feed_norm, *feed_norm_bias, *content_bias, *position_bias, *relative;
  const float* neighbours;  // [neighbours, H, Q]; null: none
  float *keys, *values;
};

struct PortableWords {
  const float *embedding, *head, *bias, *norm, *norm_bias;  // [V, D], panels, and of the last norm, null: none
  const float *tables, *projection;                           // of runs of tokens, [orders, rows, width] and panels; null: none
  const i64* orders;
  i64 *clock, *history;  // [B], and [B, ring]: the tokens that were read
};

struct PortableSizes {
  i64 layers, lanes, heads, width, model, inner, vocabulary, ring, reach, distances, pre_norm, neighbours, orders, run_rows, run_width;
  double eps, scale;  // of norms; and what embeddings are multiplied by
};

constexpr i64 MOST_AT_ONCE = 64;      // rows that pass through the layers together
constexpr i64 MOST_OF_A_LANE = 16;    // where others could be read beside it: so many look at what it keeps while it is in cache
constexpr i64 MOST_SCORES = 1 << 20;  // that they may need room for
constexpr int MOST_MIXED = 6;            // sixteens of what is gathered at a time

struct Span {
  i64 first, last;
};

// Threads that take the same rows through the layers, each with its share of outputs, heads or rows.
struct Team {
  Meeting meeting;
  std::vector<float> hidden, prepared, mixed_tokens, content, position, mixed, inner, out, nothing;
};

// One thread's part.
struct Portable {
  const PortableSizes& z;
  const PortableLayer* layers;
  const PortableWords& words;
  const i64* tokens;
  const i64 length;  // tokens of each lane
  uint32_t* frequencies;
  Team& team;
  const i64 mine, size;  // of the team
  const i64 H, K, Q, HQ, D, F_, V;
  i64 lane = 0, lanes = 0, done = 0, now = 0, rows = 0;  // `now` tokens of each of these lanes are under way, after those that are done
  std::vector<float> by_distance, scores, shares;

  static constexpr i64 MARGIN = SIXTEEN;  // scores by distance may be asked for a little beside both ends, where nobody looks at them
  i64 by_distance_row() const { return z.distances + 2 * MARGIN; }
  i64 scores_row() const { return padded(z.reach + MOST_AT_ONCE + SIXTEEN); }

  Portable(const PortableSizes& z, const PortableLayer* layers, const PortableWords& words, const i64* tokens, i64 length, uint32_t* frequencies,
           Team& team, i64 mine, i64 size)
      : z(z), layers(layers), words(words), tokens(tokens), length(length), frequencies(frequencies), team(team), mine(mine), size(size),
        H(z.heads), K(z.width), Q(padded(z.width)), HQ(H * Q), D(padded(z.model)), F_(padded(z.inner)), V(padded(z.vocabulary)) {}

  // Rows that there is room for.
  static i64 at_once(const PortableSizes& z) {
    const i64 each = z.heads * (z.distances + 2 * MARGIN);
    return std::clamp<i64>(MOST_SCORES / each, 1, MOST_AT_ONCE);
  }

  // Everything is allocated here: threads wait for each other on the way, and none may fail there.
  void make_room(i64 most) {
    const Span heads = share(H);
    by_distance.resize((heads.last - heads.first) * most * by_distance_row());
    scores.resize((heads.last - heads.first) * most * scores_row());
    shares.resize(H);
    if (mine) return;
    const i64 runs = z.orders * z.run_width, widest = std::max({3 * HQ, D, F_, V});
    team.hidden.assign(most * D, 0), team.prepared.assign(most * D, 0), team.mixed_tokens.assign(most * runs, 0);
    team.content.assign(most * HQ, 0), team.position.assign(most * HQ, 0), team.mixed.assign(most * HQ, 0);
    team.inner.assign(most * F_, 0), team.out.assign(most * widest, 0), team.nothing.assign(std::max(widest, z.distances), 0);
  }

  Span share(i64 count) const { return {count * mine / size, count * (mine + 1) / size}; }
  void wait() { if (size > 1) team.meeting.wait(); }
  i64 lane_of(i64 row) const { return lane + row / now; }
  i64 time_of(i64 row) const { return words.clock[lane_of(row)] + done + row % now; }
  i64 first_seen(i64 n) const { return std::max<i64>(0, n - z.reach); }

  // This thread's share of outputs, for all rows, into `team.out`, [rows][width]: which columns.
  Span times(const float* x, i64 x_apart, i64 depth, const float* panels, i64 width, const float* bias) {
    const Span part = share(width / SIXTEEN);
    const Product all{x, x_apart, depth, panels, depth * SIXTEEN, bias ? bias : team.nothing.data(), 0, team.out.data(), width};
    multiply(rows, part.last - part.first, all.at(0, part.first));
    return {part.first * SIXTEEN, part.last * SIXTEEN};
  }

  // Calls use(row, columns of it) for vectors of what `times` gave.
  template <class Use>
  void with(const Span& columns, i64 width, const Use& use) {
    for (i64 row = 0; row < rows; ++row)
      for (i64 i = columns.first; i < columns.last; i += W) use(row, i, load(&team.out[row * width + i]));
  }

  void join(const Span& columns) {
    with(columns, D, [&](i64 row, i64 i, F value) { store(&team.hidden[row * D + i], load(&team.hidden[row * D + i]) + value); });
    wait();
  }

  // All threads have all rows of `to` afterwards.
  void norm(const float* weight, const float* bias, std::vector<float>& to) {
    const Span part = share(rows);
    for (i64 row = part.first; row < part.last; ++row)
      normalise(&team.hidden[row * D], &to[row * D], weight, bias, z.model, float(z.eps));
    wait();
  }

  void enter() {
    const Span part = share(rows);
    const i64 runs = z.orders * z.run_width;
    for (i64 row = part.first; row < part.last; ++row) {
      const i64 token = tokens[lane_of(row) * length + done + row % now];
      const float* embedded = words.embedding + token * z.model;
      for (i64 i = 0; i < z.model; ++i) team.hidden[row * D + i] = embedded[i] * float(z.scale);
      words.history[lane_of(row) * z.ring + time_of(row) % z.ring] = token;
    }
    wait();
    if (!runs) return;
    for (i64 row = part.first; row < part.last; ++row) gather_runs(row, &team.mixed_tokens[row * runs]);
    wait();
    const Span columns = times(team.mixed_tokens.data(), runs, runs, words.projection, D, nullptr);
    with(columns, D, [&](i64 row, i64 i, F value) {
      float* to = &team.hidden[row * D + i];
      store(to, once(value, all(float(z.scale)), load(to)));
    });
    wait();
  }

  void gather_runs(i64 row, float* to) const {
    const i64 n = time_of(row), *history = words.history + lane_of(row) * z.ring;
    i64 hash = 0, back = 0;
    for (i64 order = 0; order < z.orders; ++order) {
      for (; back < words.orders[order]; ++back)
        hash = (hash * 1000003 + (back > n ? -1 : history[(n - back) % z.ring]) + 1) & 0x7fffffff;
      const float* run = words.tables + (order * z.run_rows + row_of_run(hash, z.run_rows)) * z.run_width;
      std::copy(run, run + z.run_width, to + order * z.run_width);
    }
  }

  // Queries of terms (a, c) and (b, d), scaled; keys and values to where they are kept.
  void keep(const PortableLayer& layer, const Span& columns) {
    const float scale = 1.0f / std::sqrt(float(K));
    with(columns, 3 * HQ, [&](i64 row, i64 i, F value) {
      if (i < HQ) {
        store(&team.content[row * HQ + i], (value + load(layer.content_bias + i)) * scale);
        store(&team.position[row * HQ + i], (value + load(layer.position_bias + i)) * scale);
        return;
      }
      const i64 slot = time_of(row) % z.ring, b = lane_of(row);
      if (i >= 2 * HQ) {
        store(layer.values + (b * z.ring + slot) * HQ + i - 2 * HQ, value);
        return;
      }
      float key[W];
      store(key, value);
      const i64 head = (i - HQ) / Q, k = (i - HQ) % Q;
      float* to = layer.keys + ((b * H + head) * z.ring + slot / SIXTEEN * SIXTEEN) * K + slot % SIXTEEN;
      for (i64 w = 0; w < W && k + w < K; ++w) to[(k + w) * SIXTEEN] = key[w];
    });
    wait();
  }

  void look_back(const PortableLayer& layer) {
    const Span heads = share(H);
    i64 farthest = 0;
    for (i64 row = 0; row < rows; ++row) farthest = std::max(farthest, std::min(time_of(row), z.reach));
    const i64 used = farthest / SIXTEEN + 1, skipped = z.distances - used * SIXTEEN, apart = by_distance_row();
    for (i64 h = heads.first; h < heads.last; ++h)  // all rows share a head's relative keys
      multiply(rows, used, {&team.position[h * Q], HQ, K, layer.relative + (h * z.distances + skipped) * K, K * SIXTEEN, team.nothing.data(), 0,
                            &by_distance[(h - heads.first) * rows * apart + MARGIN + skipped], apart});
    if (heads.first < heads.last)
      for (i64 row = 0; row < rows; row += now) look_back_of(layer, row, heads);
    wait();
  }

  // The rows of one lane, from `row` on.
  void look_back_of(const PortableLayer& layer, i64 row, const Span& heads) {
    const i64 b = lane_of(row), n = time_of(row), first = first_seen(n) / SIXTEEN, past = sixteens(n + now), ring = z.ring / SIXTEEN;
    const i64 apart = by_distance_row(), width = scores_row();
    for (i64 h = heads.first; h < heads.last; ++h) {
      const float* keys = layer.keys + (b * H + h) * z.ring * K;
      // Distance r stands r before the last one; the next row is one position later, and finds each key one distance farther.
      const float* nearest = &by_distance[((h - heads.first) * rows + row) * apart + MARGIN + z.distances - 1];
      for (i64 panel = first, count; panel < past; panel += count) {  // to the end of the ring, and on from its beginning
        count = std::min(past - panel, ring - panel % ring);
        multiply(now, count, {&team.content[row * HQ + h * Q], HQ, K, keys + panel % ring * SIXTEEN * K, K * SIXTEEN, nearest + (panel * SIXTEEN - n),
                              apart - 1, &scores[(h - heads.first) * now * width + (panel - first) * SIXTEEN], width});
      }
    }
    for (i64 t = 0; t < now; ++t) mix(layer, row + t, heads, &scores[t * width], now * width, first * SIXTEEN);
  }

  // What one row's heads gather. `score`: of the first head for position `base`; those of the next lie `apart`.
  void mix(const PortableLayer& layer, i64 row, const Span& heads, float* score, i64 apart, i64 base) {
    const i64 n = time_of(row), from = first_seen(n), first = heads.first * Q, vectors = (heads.last - heads.first) * Q / SIXTEEN;
    for (i64 h = heads.first; h < heads.last; ++h) shares[h] = 1.0f / soften(score + (h - heads.first) * apart, from - base, n + 1 - base);
    for (i64 v = 0; v < vectors; v += MOST_MIXED)
      gather_of(std::min<i64>(MOST_MIXED, vectors - v), layer, row, first + v * SIXTEEN, score + from - base - heads.first * apart, apart, from);
    for (i64 i = first; i < heads.last * Q; i += W) {
      F value = load(&team.mixed[row * HQ + i]) * shares[i / Q];
      for (i64 near = 0; near < std::min(z.neighbours, n - from + 1); ++near)
        value = once(load(layer.neighbours + near * HQ + i), load(kept_at(layer, row, n - near) + i), value);
      store(&team.mixed[row * HQ + i], value);
    }
  }

  const float* kept_at(const PortableLayer& layer, i64 row, i64 n) const { return layer.values + (lane_of(row) * z.ring + n % z.ring) * HQ; }

  // A sixteens of what is gathered, from `column` on, at once: a chain alone would wait for itself. `score`: of head 0 for position `from`.
  template <int A = MOST_MIXED>
  void gather_of(i64 count, const PortableLayer& layer, i64 row, i64 column, const float* score, i64 apart, i64 from) {
    if constexpr (A > 1)
      if (count < A) return gather_of<A - 1>(count, layer, row, column, score, apart, from);
    Sixteen total[A];
    const float* of[A];
    for (int a = 0; a < A; ++a) of[a] = score + (column + a * SIXTEEN) / Q * apart;
    const i64 n = time_of(row);
    for (i64 j = from, end; j <= n; j = end) {
      end = std::min(n + 1, j + z.ring - j % z.ring);
      const float* value = kept_at(layer, row, j) + column;
      for (i64 i = j - from; i < end - from; ++i, value += HQ)
        for (int a = 0; a < A; ++a)
          for (int part = 0; part < PARTS; ++part)
            total[a].part[part] = once(all(of[a][i]), load(value + a * SIXTEEN + part * W), total[a].part[part]);
    }
    std::memcpy(&team.mixed[row * HQ + column], total, sizeof total);
  }

  void through(const PortableLayer& layer) {
    const bool pre = z.pre_norm;
    if (pre) norm(layer.attention_norm, layer.attention_norm_bias, team.prepared);
    const float* prepared = pre ? team.prepared.data() : team.hidden.data();
    keep(layer, times(prepared, D, z.model, layer.query_key_value, 3 * HQ, nullptr));
    look_back(layer);
    join(times(team.mixed.data(), HQ, HQ, layer.output, D, nullptr));
    norm(pre ? layer.feed_norm : layer.attention_norm, pre ? layer.feed_norm_bias : layer.attention_norm_bias, pre ? team.prepared : team.hidden);
    const Span columns = times(prepared, D, z.model, layer.inner, F_, layer.inner_bias);
    with(columns, F_, [&](i64 row, i64 i, F value) { store(&team.inner[row * F_ + i], value > F{} ? value : F{}); });
    wait();
    join(times(team.inner.data(), F_, z.inner, layer.outer, D, layer.outer_bias));
    if (!pre) norm(layer.feed_norm, layer.feed_norm_bias, team.hidden);
  }

  void give() {
    if (words.norm) norm(words.norm, words.norm_bias, team.prepared);
    times(words.norm ? team.prepared.data() : team.hidden.data(), D, z.model, words.head, V, words.bias);
    wait();
    const Span part = share(rows);
    for (i64 row = part.first; row < part.last; ++row)
      count(&team.out[row * V], z.vocabulary, frequencies + (lane_of(row) * length + done + row % now) * z.vocabulary);
    wait();
  }

  // Not inlined: no operation may be moved before the rounding is known.
  __attribute__((noinline)) void read(const Span& of, i64 most) {
    for (lane = of.first; lane < of.last; lane += lanes) {
      lanes = std::clamp<i64>(most / std::min(length, MOST_OF_A_LANE), 1, of.last - lane);
      for (done = 0; done < length; done += now) {
        now = std::min(length - done, std::max<i64>(1, most / lanes));
        rows = lanes * now;
        enter();
        for (i64 n = 0; n < z.layers; ++n) through(layers[n]);
        give();
      }
    }
  }
};

inline bool within(const PortableSizes& z, const PortableWords& words, const i64* tokens, i64 length) {
  const i64 B = z.lanes, longest = z.orders ? words.orders[z.orders - 1] : 1;
  if (length < 1 || z.reach < 0 || z.distances <= z.reach || z.distances % SIXTEEN || z.ring % SIXTEEN) return false;
  if (z.ring < z.reach + Portable::at_once(z) || z.ring < longest + Portable::at_once(z) || z.vocabulary >= i64(1) << TOTAL_BITS) return false;
  if (!std::all_of(words.clock, words.clock + B, [](i64 n) { return 0 <= n && n < i64(1) << 53; })) return false;
  return std::all_of(tokens, tokens + B * length, [&](i64 token) { return 0 <= token && token < z.vocabulary; });
}

// Many lanes are dealt out to the threads; few are read by all of them together, where there is enough to do for each.
Answer read(const PortableSizes& z, const PortableLayer* layers, const PortableWords& words, const i64* tokens, i64 length, uint32_t* frequencies,
            int threads) {
  constexpr i64 ENOUGH = 1 << 17;  // weights of a layer
  if (!within(z, words, tokens, length)) return OUT_OF_BOUNDS;
  const i64 most = Portable::at_once(z), work = z.model * (4 * z.heads * z.width + 2 * z.inner) * std::min(most, z.lanes * length);
  if (z.lanes < 2 * threads) threads = int(std::clamp<i64>(work / ENOUGH, 1, threads));
  Memory memory;
  std::optional<std::vector<Team>> teams;
  memory.guard([&] { teams.emplace(threads); });
  if (memory.ran_out) return NO_MEMORY;
#pragma omp parallel num_threads(threads)
  {
    const i64 there = omp_get_num_threads(), me = omp_get_thread_num();
    const bool apart = z.lanes >= 2 * there;
    std::optional<Portable> mine;
    Team& team = (*teams)[apart ? me : 0];
    memory.guard([&] {
      mine.emplace(z, layers, words, tokens, length, frequencies, team, apart ? 0 : me, apart ? 1 : there);
      mine->make_room(std::min(most, z.lanes * length));
    });
    if (apart || me == 0) team.meeting.threads = apart ? 1 : int(there);
#pragma omp barrier
    if (!memory.ran_out) {  // the same answer for all threads: whoever ran out did so before the barrier
      const Rounding rounding;
      mine->read(apart ? Span{z.lanes * me / there, z.lanes * (me + 1) / there} : Span{0, z.lanes}, most);
    }
  }
  return memory.answer();
}

// --- a known answer: a library that computes it gives the bits that every other one gives

struct Bits {
  uint64_t state = 1, digest = 14695981039346656037u;

  float number() {  // from -4 to 4, of a linear congruence
    state = state * 6364136223846793005u + 1442695040888963407u;
    return float(int32_t(state >> 40) - (1 << 23)) * (1.0f / (1 << 21));
  }
  void take(const void* from, i64 bytes) {
    for (i64 i = 0; i < bytes; ++i) digest = (digest ^ static_cast<const unsigned char*>(from)[i]) * 1099511628211u;
  }
};

__attribute__((noinline)) uint64_t known_answer() {
  constexpr i64 R = 8, N = 9, DEPTH = 37, WIDE = N * SIXTEEN;
  Bits bits;
  std::array<float, R * DEPTH> x;
  std::array<float, N * DEPTH * SIXTEEN> panels;
  std::array<float, WIDE> start;
  std::array<float, R * WIDE> out;
  std::array<uint32_t, WIDE> frequencies;
  for (float& value : x) value = bits.number();
  for (float& value : panels) value = bits.number() * bits.number();
  for (float& value : start) value = bits.number() + bits.number() * 1e-6f;
  multiply(R, N, {x.data(), DEPTH, DEPTH, panels.data(), DEPTH * SIXTEEN, start.data(), 0, out.data(), WIDE});
  bits.take(out.data(), sizeof out);
  for (i64 row = 0; row < R; ++row) {
    float* to = &out[row * WIDE];
    std::fill(to + WIDE - row, to + WIDE, 0.0f);
    normalise(to, to, start.data(), panels.data(), WIDE - row, 1e-5f);
    bits.take(to, sizeof(float) * WIDE);
    count(to, WIDE - row, frequencies.data());
    bits.take(to, sizeof(float) * WIDE);
    bits.take(frequencies.data(), sizeof(uint32_t) * (WIDE - row));
  }
  // Where a sum loses most of a product, where a result is too small to be normal, powers, and what a compiler would fuse that was not told to leave it.
  const auto probe = [&](const auto& use) {
    std::array<float, WIDE> results;
    for (i64 i = 0; i < WIDE; i += W) store(&results[i], use(load(&start[i]), load(&panels[i])));
    bits.take(results.data(), sizeof results);
  };
  probe([](F a, F b) { return once(a, b, -(a * b)); });
  probe([](F a, F b) { return once(a * 1e-30f, b * 1e-9f, a * 1e-39f); });
  probe([](F a, F) { return power_of_e(-a * a * 6.0f); });
  probe([](F a, F b) { return a * b - b; });
  return bits.digest;
}

}  // namespace

extern "C" int portable_read_float32(const PortableSizes* z, const PortableLayer* layers, const PortableWords* words, const i64* tokens, i64 length,
                                     uint32_t* frequencies, int threads) {
  return read(*z, layers, *words, tokens, length, frequencies, threads);
}

// Rows [rows, depth] times panels [count][depth][16]: [rows, count * 16].
extern "C" int portable_product_float32(const float* x, const float* panels, const float* start, float* out, i64 rows, i64 depth, i64 count, int) {
  const Rounding rounding;
  multiply(rows, count, {x, depth, depth, panels, depth * SIXTEEN, start, 0, out, count * SIXTEEN});
  return DONE;
}

extern "C" int portable_known_answer_float32(uint64_t* digest, int) {
  const Rounding rounding;
#if defined(__FAST_MATH__)
  *digest = 0;  // whatever the compiler made of the orders that are written here
#else
  *digest = known_answer();
#endif
  return DONE;
}

extern "C" const Field fields_of_portable[] = {
    FIELD(PortableLayer, query_key_value), FIELD(PortableLayer, output), FIELD(PortableLayer, inner), FIELD(PortableLayer, outer),
    FIELD(PortableLayer, inner_bias), FIELD(PortableLayer, outer_bias), FIELD(PortableLayer, attention_norm), FIELD(PortableLayer, attention_norm_bias),
    FIELD(PortableLayer, feed_norm), FIELD(PortableLayer, feed_norm_bias), FIELD(PortableLayer, content_bias), FIELD(PortableLayer, position_bias),
    FIELD(PortableLayer, relative), FIELD(PortableLayer, neighbours), FIELD(PortableLayer, keys), FIELD(PortableLayer, values), BYTES_OF(PortableLayer),
    FIELD(PortableWords, embedding), FIELD(PortableWords, head), FIELD(PortableWords, bias), FIELD(PortableWords, norm), FIELD(PortableWords, norm_bias),
    FIELD(PortableWords, tables), FIELD(PortableWords, projection), FIELD(PortableWords, orders), FIELD(PortableWords, clock),
    FIELD(PortableWords, history), BYTES_OF(PortableWords),
    FIELD(PortableSizes, layers), FIELD(PortableSizes, lanes), FIELD(PortableSizes, heads), FIELD(PortableSizes, width), FIELD(PortableSizes, model),
    FIELD(PortableSizes, inner), FIELD(PortableSizes, vocabulary), FIELD(PortableSizes, ring), FIELD(PortableSizes, reach), FIELD(PortableSizes, distances),
    FIELD(PortableSizes, pre_norm), FIELD(PortableSizes, neighbours), FIELD(PortableSizes, orders), FIELD(PortableSizes, run_rows),
    FIELD(PortableSizes, run_width), FIELD(PortableSizes, eps), FIELD(PortableSizes, scale), BYTES_OF(PortableSizes),
    {nullptr, 0}};
