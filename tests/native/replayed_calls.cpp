// Calls a library's kernels as they were called elsewhere: replayed_calls LIBRARY CALLS RESULTS. CALLS is what kernel_calls.py recorded; RESULTS gets
// the bytes of every tensor that a call was given, as the call left them. For machines that can be emulated, but not with all of Python and torch.

#include <dlfcn.h>
#include <omp.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

using i64 = int64_t;

[[noreturn]] void fail(const char* what, const char* which) {
  std::fprintf(stderr, "%s: %s\n", what, which);
  std::exit(1);
}

struct Reader {
  std::ifstream file;

  void take(void* to, i64 bytes) {
    if (!file.read(static_cast<char*>(to), bytes)) fail("the calls end early", "");
  }
  i64 number() {
    i64 value;
    take(&value, sizeof value);
    return value;
  }
};

// Whole numbers and addresses go their own way, numbers with a point another, on both machines that wheels are built for: all of the first, then all of the
// second is the same call as any mixture of them. What a kernel has no argument for, it does not look at.
using Kernel = int (*)(i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, i64, double, double);

int main(int count, char** words) {
  if (count != 4) fail("usage", "replayed_calls LIBRARY CALLS RESULTS");
  if (omp_get_max_threads() < 1) return 1;  // so that OpenMP is there, as torch's is
  void* library = dlopen(words[1], RTLD_NOW);
  if (!library) fail("not loaded", dlerror());
  Reader calls{std::ifstream(words[2], std::ios::binary)};
  std::ofstream results(words[3], std::ios::binary);
  for (i64 left = calls.number(); left > 0; --left) {
    char name[64];
    calls.take(name, sizeof name);
    std::vector<std::vector<i64>> buffers(calls.number());  // i64: so that they are aligned
    std::vector<i64> bytes, kept;
    for (auto& buffer : buffers) {
      bytes.push_back(calls.number()), kept.push_back(calls.number());
      buffer.resize((bytes.back() + 7) / 8);
      calls.take(buffer.data(), bytes.back());
    }
    for (i64 links = calls.number(); links > 0; --links) {
      const i64 from = calls.number(), offset = calls.number(), to = calls.number();
      buffers[from][offset / 8] = reinterpret_cast<i64>(buffers[to].data());
    }
    i64 a[16] = {};
    double d[2] = {};
    const i64 wholes = calls.number();
    if (wholes > 16) fail("too many arguments", name);
    for (i64 i = 0; i < wholes; ++i) {
      const i64 value = calls.number(), to = calls.number();
      a[i] = to < 0 ? value : reinterpret_cast<i64>(buffers[to].data());
    }
    const i64 points = calls.number();
    if (points > 2) fail("too many arguments", name);
    for (i64 i = 0; i < points; ++i) calls.take(&d[i], sizeof d[i]);
    const auto kernel = reinterpret_cast<Kernel>(dlsym(library, name));
    if (!kernel) fail("no such kernel", name);
    if (kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13], a[14], a[15], d[0], d[1]))
      fail("refused", name);
    for (size_t i = 0; i < buffers.size(); ++i)
      if (kept[i]) results.write(reinterpret_cast<const char*>(buffers[i].data()), bytes[i]);
  }
}
