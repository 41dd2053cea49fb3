// Peak of fp32 multiply-adds: twelve independent chains in registers on each of argv[1] threads. Prints flops a second.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#if defined(__AVX512F__)
constexpr int kBytes = 64;
#elif defined(__AVX__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif
typedef float Vector __attribute__((vector_size(kBytes)));
constexpr int kLanes = kBytes / sizeof(float);
// Two units of four or five cycles' latency want eight to ten chains.
constexpr int kChains = 12;
constexpr long kSteps = 20000000;

static float Chains() {
  Vector sums[kChains];
  for (int c = 0; c < kChains; ++c) sums[c] = Vector{} + float(c);
  const Vector factor = Vector{} + 0.999f, term = Vector{} + 1e-3f;
  for (long step = 0; step < kSteps; ++step)
    for (int c = 0; c < kChains; ++c) sums[c] = sums[c] * factor + term;
  float total = 0;
  for (int c = 0; c < kChains; ++c) total += sums[c][0];
  return total;
}

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  std::vector<float> sinks(threads);
  std::vector<std::thread> workers;
  const auto start = std::chrono::steady_clock::now();
  for (int t = 0; t < threads; ++t) workers.emplace_back([&sinks, t] { sinks[t] = Chains(); });
  for (auto& worker : workers) worker.join();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  // The sums decide the exit status, so that the compiler keeps them.
  float total = 0;
  for (float sink : sinks) total += sink;
  std::printf("%.0f\n", 2.0 * kLanes * kChains * kSteps * threads / seconds.count());
  return total == total ? 0 : 1;
}
