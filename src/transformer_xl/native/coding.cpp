// Tokens <-> a short stream, by what a model expects and by what was counted in the text so far. Whole numbers only: the same on every processor.
//
// A token is told as its bytes, and each byte as eight questions, its bits, highest first; between two bytes stands one question more where both can be:
// does the token end here? To each question there are eight answers, as logarithms of odds: the model's, which is the share of the tokens that go on so;
// what followed before after the same 1, 2, 3, 4 and 6 bytes and the same beginning of a word; and what followed the run of bytes that also stood here.
// Three sets of weights, chosen by what is known, add the answers up, and their mean is what a bit is coded by. Everything learns after each bit. Where no
// token is left but one, nothing is asked.
//
// All lanes share what is counted. They take turns, one token each, and so they need only one stream.
//
// tests/compression/slow_coder.py says the same slowly.

#include <algorithm>
#include <cstdint>

namespace {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int MOST_LANES = 64;
constexpr int LENGTHS[] = {1, 2, 3, 4, 6};  // of contexts, in bytes
constexpr int CONTEXTS = 6;                 // these, and the word
constexpr int ANSWERS = 1 + CONTEXTS + 1;
constexpr int ONE = 1 << 16;                      // of probabilities and of weights
constexpr int UNIT = 1024, MOST = 12 * UNIT - 1;  // of logarithms of odds
constexpr int STEP = 512, STEPS = 33;             // of logarithms of odds, where they are told apart coarsely
constexpr int FULL = 255;                         // a count does not grow beyond
constexpr int LINE_BITS = 20, PLACE_BITS = 18, HISTORY_BITS = 22;
constexpr int SHORTEST = 6, LONGEST = 32;  // runs
constexpr int SETS_BY_LENGTH = 4 * (CONTEXTS + 1);
constexpr i32 FIRST_WEIGHT = 6000;
constexpr i64 MOST_WORDS = (1 << 16) + 256;
constexpr u32 LINES_OF_ENDS = 256;  // beside those of bytes
constexpr u16 END = 256;            // beside a byte: there a token ended

// A probability of 22 bits, above how often it was asked, 10 bits.
using Chance = u32;

constexpr Chance chance(u32 probability, u32 count) { return probability << 16 | count; }

struct Tables {
  u16 probability[2 * MOST + 1];  // of odds
  int16_t odds[ONE];              // of probabilities
  i32 rate[FULL + 1];             // of learning, after so many times

  Tables() {
    // exp(-k / UNIT) by one product after the other, 62 bits behind the point.
    constexpr u64 factor = 4290775039;  // exp(-1 / UNIT), 32 bits behind the point
    u64 falling = u64(1) << 62;
    for (int k = 0; k <= MOST; ++k) {
      const u64 likely = std::min<u64>((u64(1) << 48) / ((u64(1) << 32) + (falling >> 30)), ONE - 1);
      probability[MOST + k] = u16(likely);
      probability[MOST - k] = u16(ONE - likely);
      falling = (falling >> 32) * factor + (((falling & 0xffffffff) * factor) >> 32);
    }
    int next = 0;
    for (int k = -MOST; k <= MOST; ++k)
      for (; next <= probability[MOST + k]; ++next) odds[next] = int16_t(k);
    for (int n = 0; n <= FULL; ++n) rate[n] = 2 * ONE / (2 * n + 3);
  }
};

const Tables TABLES;

u32 hashed(u64 value) { return u32((value * 0x9E3779B97F4A7C15) >> 32); }

// What followed a context, for half a byte: the chance of a 1 at each of its fifteen branches.
struct Line {
  u32 check;
  Chance branch[15];
};

struct Lane {
  u64 last;      // eight bytes
  u64 position;  // in its history
  u64 match;     // where the run that also stood here goes on
  u32 length;    // of that run
  u32 word;      // the letters since the last byte that is none
};

struct Mixer {
  i32 weight[ANSWERS];
  u32 count;
};

// Of two, the second is that of ends.
struct State {
  u64 lanes, history;           // how many, and of how many bytes each
  u64 low, high, code, taken;   // of the stream
  Chance matched[2][LONGEST + 1];  // that a run goes on, by its length
  Chance refined[2][CONTEXTS][16][STEPS];  // what a context's answer is worth, by its count and itself
  Mixer by_length[2][SETS_BY_LENGTH], by_bits[256], by_last[2][256];
  u32 place[1 << PLACE_BITS];  // where the last six bytes stood last
  Lane lane[MOST_LANES];
  Line line[1 << LINE_BITS];
  u16 bytes[1 << HISTORY_BITS];
  u64 before[MOST_WORDS + 1];  // the weight of all words before each
};

// Words in the order of their bytes: those that begin alike stand side by side, and first the one that ends there.
struct Words {
  i64 count;
  const i64* number;  // of the token that each is
  const i64* begin;   // of its bytes; that of the next is their end
  const u8* bytes;

  i64 length(i64 k) const { return begin[k + 1] - begin[k]; }
  u8 byte(i64 k, i64 place) const { return bytes[begin[k] + place]; }
};

void start(State& s, i64 lanes) {
  s.lanes = u64(lanes);
  s.history = u64(1) << HISTORY_BITS;
  while (s.history * s.lanes > u64(1) << HISTORY_BITS) s.history >>= 1;
  for (auto& matched : s.matched)
    for (int k = 0; k <= LONGEST; ++k) matched[k] = chance(u32(ONE * (k + 4) / (k + 5)), 0);
  for (auto& kind : s.refined)
    for (auto& context : kind)
      for (auto& count : context)
        for (int k = 0; k < STEPS; ++k) count[k] = chance(TABLES.probability[MOST + (k - STEPS / 2) * STEP], 6);
  const auto begin = [](Mixer& mixer) {
    mixer.weight[0] = ONE;
    std::fill(mixer.weight + 1, mixer.weight + ANSWERS, FIRST_WEIGHT);
  };
  std::for_each(s.by_length[0], s.by_length[0] + 2 * SETS_BY_LENGTH, begin);
  std::for_each(s.by_bits, s.by_bits + 256, begin);
  std::for_each(s.by_last[0], s.by_last[0] + 2 * 256, begin);
}

void learn(Chance& what, int bit) {
  const u32 count = what & 1023;
  i64 p = what >> 10;
  p += ((bit ? (1 << 22) - 1 : 0) - p) * TABLES.rate[count] / ONE;
  what = u32(p) << 10 | std::min<u32>(count + 1, FULL);
}

i64 odds_of(Chance what) { return TABLES.odds[what >> 16]; }

Line& line_of(State& s, u32 context, u32 bits) {
  const u32 check = hashed((u64(context) << 32 | bits) + 1) | 1;
  const u32 at = hashed(check ^ 0x5bd1e995) >> (32 - LINE_BITS);
  Line &one = s.line[at], &other = s.line[at ^ 1];
  if (one.check == check) return one;
  if (other.check == check) return other;
  Line& worse = (one.branch[0] & 1023) <= (other.branch[0] & 1023) ? one : other;
  worse.check = check;
  std::fill(worse.branch, worse.branch + 15, chance(ONE / 2, 0));
  return worse;
}

struct Mixed {
  Mixer& mixer;
  i64 odds;

  Mixed(Mixer& mixer, const i64* answers) : mixer(mixer) {
    i64 sum = 0;
    for (int k = 0; k < ANSWERS; ++k) sum += mixer.weight[k] * answers[k];
    odds = std::clamp<i64>(sum / ONE, -MOST, MOST);
  }

  // Fast at first.
  void learn(const i64* answers, int bit) {
    const i64 rate = 4 + 64 * 256 / (mixer.count + 256);
    mixer.count = std::min<u32>(mixer.count + 1, 1 << 20);
    const i64 error = ((bit ? ONE - 1 : 0) - TABLES.probability[MOST + odds]) * rate;
    for (int k = 0; k < ANSWERS; ++k)
      mixer.weight[k] = i32(std::clamp<i64>(mixer.weight[k] + answers[k] * error / (1 << 20), -8 * ONE, 8 * ONE));
  }
};

bool is_letter(u8 value) { return value > 127 || value == '_' || ((value | 32) >= 'a' && (value | 32) <= 'z'); }

// The run goes on with this byte, or another is sought.
void follow(State& s, Lane& lane, u64 origin, u8 value) {
  const u64 mask = s.history - 1;
  const auto at = [&](u64 base, u64 position) -> u16& { return s.bytes[(base & ~mask) | (position & mask)]; };
  lane.last = lane.last << 8 | value;
  lane.word = is_letter(value) ? hashed(u64(lane.word) * 256 + value + 1) : 0;
  at(origin, lane.position++) = value;
  const bool goes_on = lane.length && u8(s.bytes[lane.match]) == value;
  lane.length = goes_on ? std::min<u32>(lane.length + 1, LONGEST) : 0;
  if (goes_on) lane.match = (lane.match & ~mask) | ((lane.match + 1) & mask);
  u32& place = s.place[hashed((lane.last & 0xffffffffffff) + 3) >> (32 - PLACE_BITS)];
  if (!lane.length && place) {
    u32 length = 0;
    while (length < LONGEST && length < lane.position && u8(at(place, place - 1 - length)) == u8(at(origin, lane.position - 1 - length))) ++length;
    if (length >= SHORTEST) lane.match = place, lane.length = length;
  }
  place = u32(origin | (lane.position & mask));
}

// What a question is about, beside what the model says: the last bytes, the lines of them, and what the run of bytes would have it be.
struct About {
  bool ends;  // whether a token does; else a bit of a byte is asked
  u32 bits;   // of that byte so far, below a 1; else 0
  u32 last;   // byte
  u32 run;    // its length, 0 where none says anything
  int wanted;
  Line* const* line;
  u32 branch;
};

// A bit. The model gives `ones` of `all` to a 1. `ask(probability of a 1)` gives it, unless there is no choice; what was counted learns it either way.
template <class Ask>
int decide(State& s, const About& about, u64 ones, u64 all, const Ask& ask) {
  i64 answers[ANSWERS];
  answers[0] = TABLES.odds[std::clamp<u64>((ones << 16) / all, 1, ONE - 1)];
  Chance* refined[CONTEXTS];
  int longest = 0;
  for (int k = 0; k < CONTEXTS; ++k) {
    const Chance counted = about.line[k]->branch[about.branch];
    const u32 count = counted & 1023;
    const i64 step = std::clamp<i64>((odds_of(counted) + (STEPS / 2) * STEP + STEP / 2) / STEP, 0, STEPS - 1);
    refined[k] = &s.refined[about.ends][k][std::min<u32>(count, 15)][step];
    answers[1 + k] = count ? odds_of(*refined[k]) : 0;
    if (count) longest = k + 1;
  }
  Chance& trust = s.matched[about.ends][about.run];
  answers[1 + CONTEXTS] = !about.run ? 0 : about.wanted ? odds_of(trust) : -odds_of(trust);

  int found = ones == all;
  if (ones && !found) {
    const int run = !about.run ? 0 : about.run < 12 ? 1 : about.run < 24 ? 2 : 3;
    Mixed mixed[] = {{s.by_length[about.ends][4 * longest + run], answers}, {s.by_bits[about.bits], answers}, {s.by_last[about.ends][about.last], answers}};
    found = ask(u32(TABLES.probability[MOST + (mixed[0].odds + mixed[1].odds + mixed[2].odds) / 3]));
    for (Mixed& one : mixed) one.learn(answers, found);
  }
  for (int k = 0; k < CONTEXTS; ++k) {
    Chance& counted = about.line[k]->branch[about.branch];
    if (counted & 1023) learn(*refined[k], found);
    learn(counted, found);
  }
  if (about.run) learn(trust, found == about.wanted);
  return found;
}

void find_contexts(const Lane& lane, u32* context) {
  for (int k = 0; k < 5; ++k) context[k] = hashed((lane.last & (~u64(0) >> (64 - 8 * LENGTHS[k]))) * 8 + u64(k) + 1);
  context[5] = hashed((u64(lane.word) << 32) + 77);
}

// The byte at `place` of the words from `low` to `high`.
template <class Ask>
u8 code_byte(State& s, const Lane& lane, const Words& words, i64 place, i64 low, i64 high, const Ask& ask) {
  u64 weight[512] = {};  // of each branch of a byte: byte b is 256 + b
  for (i64 k = low; k < high; ++k) weight[256 + words.byte(k, place)] += s.before[k + 1] - s.before[k];
  for (int k = 255; k; --k) weight[k] = weight[2 * k] + weight[2 * k + 1];

  u32 context[CONTEXTS];
  find_contexts(lane, context);
  const u32 expected = lane.length ? 256u | u8(s.bytes[lane.match]) : 0;
  Line* line[CONTEXTS];
  u32 byte = 1;
  for (int bit = 0; bit < 8; ++bit) {
    if (bit % 4 == 0)
      for (int k = 0; k < CONTEXTS; ++k) line[k] = &line_of(s, context[k], byte);
    const u32 branch = (bit < 4 ? byte : (byte & ((1u << (bit - 4)) - 1)) | 1u << (bit - 4)) - 1;
    const u32 run = expected >> (8 - bit) == byte ? lane.length : 0;
    const About about{false, byte, u32(lane.last & 255), run, int(expected >> (7 - bit) & 1), line, branch};
    byte = 2 * byte + u32(decide(s, about, weight[2 * byte + 1], weight[byte], [&](u32 p) { return ask(p, 7 - bit); }));
  }
  return u8(byte);
}

// Whether the word `low`, of which all bytes were told, is meant, and none of those up to `high` that go on.
template <class Ask>
bool code_end(State& s, const Lane& lane, i64 place, i64 low, i64 high, const Ask& ask) {
  const u64 mask = s.history - 1;
  u32 context[CONTEXTS];
  find_contexts(lane, context);
  Line* line[CONTEXTS];
  for (int k = 0; k < CONTEXTS; ++k) line[k] = &line_of(s, context[k], LINES_OF_ENDS + u32(place));
  const int wanted = lane.length && (s.bytes[(lane.match & ~mask) | ((lane.match - 1) & mask)] & END);
  const About about{true, 0, u32(lane.last & 255), lane.length, wanted, line, 0};
  return decide(s, about, s.before[low + 1] - s.before[low], s.before[high] - s.before[low], ask);
}

// One token of one lane. `frequency`: the model's, of each of its `tokens`; a word that is none of them is not impossible. `ask(probability of a 1, place)`
// gives each bit: that of a byte, or, where the place is -1, whether the token ends.
template <class Ask>
i64 code(State& s, u64 number, const u32* frequency, i64 tokens, const Words& words, const Ask& ask) {
  Lane& lane = s.lane[number];
  const u64 origin = number * s.history;
  for (i64 k = 0; k < words.count; ++k) {
    const i64 token = words.number[k];
    s.before[k + 1] = s.before[k] + (token < tokens ? u64(frequency[token]) << 4 : 0) + 1;
  }
  i64 low = 0, high = words.count;
  for (i64 place = 0;; ++place) {
    if (place && words.length(low) == place) {
      const bool ends = high - low == 1 || code_end(s, lane, place, low, high, [&](u32 p) { return ask(p, place, -1); });
      if (ends) {
        s.bytes[origin | ((lane.position - 1) & (s.history - 1))] |= END;
        return words.number[low];
      }
      ++low;
    }
    const u8 value = code_byte(s, lane, words, place, low, high, [&](u32 p, int bit) { return ask(p, place, bit); });
    follow(s, lane, origin, value);
    while (words.byte(low, place) < value) ++low;
    while (words.byte(high - 1, place) > value) --high;
  }
}

// --- the stream: a number between low and high, of which what is certain is written

u64 middle(const State& s, u32 p) {
  const u64 range = s.high - s.low;
  return s.low + (range >> 16) * p + (((range & 0xffff) * p) >> 16);
}

void narrow(State& s, u64 middle, int bit) {
  if (bit)
    s.high = middle;
  else
    s.low = middle + 1;
}

template <class Shifted>
void shift(State& s, const Shifted& shifted) {
  while (!((s.low ^ s.high) >> 56)) {
    shifted(u8(s.high >> 56));
    s.low <<= 8;
    s.high = s.high << 8 | 255;
  }
}

struct Source {
  const u8* bytes;
  u64 count;

  u64 next(State& s) const { return s.taken++ < count ? bytes[s.taken - 1] : 0; }
};

}  // namespace

extern "C" int64_t coding_state_bytes() { return sizeof(State); }

extern "C" int coding_most_lanes() { return MOST_LANES; }

extern "C" int64_t coding_most_words() { return MOST_WORDS; }

// `state`: zeros.
extern "C" void coding_start(State* state, int64_t lanes) { start(*state, lanes); }

// A stream begins; `count` bytes of it are there to be decoded.
extern "C" void coding_begin(State* state, const uint8_t* bytes, int64_t count) {
  state->low = state->code = state->taken = 0;
  state->high = ~u64(0);
  for (int k = 0; k < 8; ++k) state->code = state->code << 8 | Source{bytes, u64(count)}.next(*state);
}

// `steps` tokens of each lane, lane after lane, of which only the first `length` are coded; `frequencies` has so many `tokens` for each. `rank`: of each
// token, which of the words it is. Gives how many bytes were written to `out`, which has room for 18 for each byte of the tokens, and 8.
extern "C" int64_t coding_encode(State* state, const uint32_t* frequencies, int64_t tokens, const Words* words, const int64_t* rank, const int64_t* told,
                                 int64_t steps, const int64_t* length, uint8_t* out) {
  State& s = *state;
  uint8_t* const begin = out;
  for (i64 step = 0; step < steps; ++step)
    for (u64 lane = 0; lane < s.lanes; ++lane) {
      if (step >= length[lane]) continue;
      const i64 at = i64(lane) * steps + step, word = rank[told[at]];
      code(s, lane, frequencies + at * tokens, tokens, *words, [&](u32 p, i64 place, int bit) {
        const int given = bit < 0 ? words->length(word) == place : words->byte(word, place) >> bit & 1;
        narrow(s, middle(s, p), given);
        shift(s, [&](u8 certain) { *out++ = certain; });
        return given;
      });
    }
  return out - begin;
}

// The fewest bytes that end the stream, whatever follows being zeros; gives how many.
extern "C" int64_t coding_finish(State* state, uint8_t* out) {
  int count = 0;
  u64 value = 0;
  while (value < state->low) value = state->high & ~(~u64(0) >> (8 * ++count));
  for (int k = 0; k < count; ++k) out[k] = u8(value >> (56 - 8 * k));
  return count;
}

// How many bytes of the stream were certain.
extern "C" int64_t coding_taken(const State* state) { return i64(state->taken) - 8; }

// The next token of each lane that `has` one.
extern "C" void coding_decode(State* state, const uint32_t* frequencies, int64_t tokens, const Words* words, const uint8_t* has, const uint8_t* bytes,
                              int64_t count, int64_t* out) {
  State& s = *state;
  const Source source{bytes, u64(count)};
  for (u64 lane = 0; lane < s.lanes; ++lane) {
    if (!has[lane]) continue;
    out[lane] = code(s, lane, frequencies + i64(lane) * tokens, tokens, *words, [&](u32 p, i64, int) {
      const u64 border = middle(s, p);
      const int bit = s.code <= border;
      narrow(s, border, bit);
      shift(s, [&](u8) { s.code = s.code << 8 | source.next(s); });
      return bit;
    });
  }
}
