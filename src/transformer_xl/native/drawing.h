// One token of a plain softmax: temperature, top-k, top-p, min-p, then the word in which a share of what is left is reached. The rules are those of
// `inference/distribution.py`, which says why; all of it in double precision, so that both give the same word for the same share.

#pragma once

#include "vectors.h"

namespace {

struct Choice {
  double temperature, top_p, min_p;  // temperature 0: the likeliest word
  double share;                      // from 0 to 1: the lane's chance
  i64 top_k;                         // 0: all
};

// One thread's room for a vocabulary.
struct Drawing {
  std::vector<double> score;
  std::vector<i64> word;

  explicit Drawing(i64 vocabulary) : score(vocabulary), word(vocabulary) {}

  // Of two words the likelier; of two alike the first.
  bool before(i64 a, i64 b) const { return score[a] > score[b] || (score[a] == score[b] && a < b); }

  // The words that are left, rising by number: the share of their sum that is asked for falls into one of them.
  i64 at_share(i64 count, double share) const {
    double best = -std::numeric_limits<double>::infinity(), total = 0, reached = 0;
    for (i64 i = 0; i < count; ++i) best = std::max(best, score[word[i]]);
    for (i64 i = 0; i < count; ++i) total += std::exp(score[word[i]] - best);
    for (i64 i = 0; i < count; ++i)
      if ((reached += std::exp(score[word[i]] - best)) > share * total) return word[i];
    return word[count - 1];
  }

  // How many of `count` words, falling, reach the share p of `total`, and are at least min_p times as likely as the first.
  i64 shortened(i64 count, const Choice& c, double total) const {
    const double best = score[word[0]], lowest = c.min_p > 0 ? best + std::log(c.min_p) : -std::numeric_limits<double>::infinity();
    double reached = 0;
    i64 kept = 0;
    while (kept < count && score[word[kept]] >= lowest) {
      reached += std::exp(score[word[kept++]] - best);
      if (c.top_p < 1 && reached >= c.top_p * total) break;
    }
    return std::max<i64>(kept, 1);
  }

  // Puts the likeliest words first, falling: `most` of them, or until top_p and min_p have what they want.
  i64 nucleus(const Choice& c, i64 most) {
    const i64 V = score.size();
    double best = -std::numeric_limits<double>::infinity(), total = 0;
    for (const double each : score) best = std::max(best, each);
    if (c.top_p < 1)
      for (const double each : score) total += std::exp(each - best);
    for (i64 count = std::min<i64>(most, V);; count = std::min(count * 8, V)) {
      for (i64 v = 0; v < V; ++v) word[v] = v;
      std::partial_sort(word.begin(), word.begin() + count, word.end(), [&](i64 a, i64 b) { return before(a, b); });
      const i64 kept = shortened(count, c, total);
      if (kept < count || count == V) return kept;
    }
  }

  template <class T>
  i64 draw(const T* logits, const Choice& c) {
    const i64 V = score.size();
    double best = -std::numeric_limits<double>::infinity(), total = 0;
    for (i64 v = 0; v < V; ++v) best = std::max(best, score[v] = double(logits[v]));
    for (i64 v = 0; v < V; ++v) total += std::exp(score[v] - best);
    if (!std::isfinite(total) || !std::isfinite(best)) return -1;  // no numbers
    const double log_total = std::log(total), temperature = c.temperature > 0 ? c.temperature : 1;
    for (i64 v = 0; v < V; ++v) score[v] = (score[v] - best - log_total) / temperature;
    if (c.temperature == 0) return std::max_element(score.begin(), score.end()) - score.begin();
    i64 kept = V;
    for (i64 v = 0; v < V; ++v) word[v] = v;
    if (c.top_k > 0 && c.top_p >= 1 && c.min_p <= 0) {  // which they are is enough, in whatever order
      kept = std::min(c.top_k, V);
      if (kept < V) std::nth_element(word.begin(), word.begin() + kept, word.end(), [&](i64 a, i64 b) { return before(a, b); });
    } else if (c.top_k > 0) {
      const i64 count = std::min(c.top_k, V);
      std::partial_sort(word.begin(), word.begin() + count, word.end(), [&](i64 a, i64 b) { return before(a, b); });
      double sum = 0;
      for (i64 i = 0; i < count; ++i) sum += std::exp(score[word[i]] - score[word[0]]);
      kept = shortened(count, c, sum);
    } else if (c.top_p < 1 || c.min_p > 0) {
      kept = nucleus(c, 256);
    } else {
      return at_share(V, c.share);
    }
    std::sort(word.begin(), word.begin() + kept);
    return at_share(kept, c.share);
  }
};

}  // namespace
