// Both math warpgroups of a CTA on a CPU: a fiber for each thread, and the instructions that prepare.py puts in place of asm.
// Products add in an order of their own, the same for either layout of the operands.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#define __device__
#define __forceinline__ inline

struct Index {
  uint32_t x;
};
inline Index threadIdx, blockIdx, gridDim;

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace emulation {

constexpr uint32_t kFirstThread = 128, kThreads = 256, kLanes = 32, kWarps = kThreads / kLanes;
constexpr size_t kStackBytes = 128 << 10;

[[noreturn]] inline void fail(const char* what) {
  std::printf("thread %u: %s\n", threadIdx.x, what);
  std::fflush(stdout);
  std::_Exit(1);
}

// --- fibers ---

struct Product {
  float* sums;
  uint32_t count;
  bool keep, rows_in_shared;
  uint64_t rows, columns;      // matrix descriptors
  std::array<float, 64> held;  // two rows of 32, from registers
};
struct Copy {
  uint32_t to;
  const void* from;
};
struct Fiber {
  ucontext_t start;
  jmp_buf place;
  bool started, done;
  uint64_t exchanges, barriers[16];
  std::vector<Product> products;
  size_t committed;
  std::vector<Copy> copies;
  std::vector<char> stack;
};
struct Warp {
  uint64_t arrived;
  std::array<uint64_t, 4> words[2][kLanes];  // of two exchanges in turn
};
inline Fiber fibers[kThreads];
inline Warp warps[kWarps];
inline uint64_t barriers[16];
inline std::map<uint32_t, uint64_t> arrivals;    // at mbarriers, by address
inline std::map<uint32_t, uint64_t> phases;      // of mbarriers, that have ended
inline std::map<uint32_t, uint64_t> multiplied;  // products, by columns
inline jmp_buf scheduler;
inline uint32_t current;
inline uint64_t progress;  // whatever may let another thread go on
inline void (*program)();
inline void (*on_arrival)();

inline Fiber& me() { return fibers[current]; }
inline uint32_t lane() { return current % kLanes; }

__attribute__((noinline)) inline void yield() {
  if (_setjmp(me().place) == 0) _longjmp(scheduler, 1);
}
inline void run_program() {
  program();
  if (!me().products.empty() || !me().copies.empty()) fail("ends with products or copies that it never waited for");
  me().done = true;
  ++progress;
  _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void resume() {
  if (_setjmp(scheduler) != 0) return;
  if (me().started) _longjmp(me().place, 1);
  me().started = true;
  setcontext(&me().start);
}

// As far as the warp's lanes can go.
inline void run_warp(uint32_t warp) {
  for (uint64_t before = ~0ull; before != progress;) {
    before = progress;
    for (current = warp * kLanes; current < (warp + 1) * kLanes; ++current) {
      threadIdx.x = kFirstThread + current;
      if (!me().done) resume();
    }
  }
}

// `function` by every thread of the math warpgroups, `others` at the start and after each arrival at an mbarrier. Warps go
// on in an order that `seed` gives, each ahead of the others until it has to wait for them.
inline void run(void (*function)(), void (*others)(), uint64_t seed) {
  program = function;
  on_arrival = others;
  std::fill_n(warps, kWarps, Warp{});
  std::fill_n(barriers, 16, 0);
  arrivals.clear();
  phases.clear();
  multiplied.clear();
  for (Fiber& fiber : fibers) {
    fiber.started = fiber.done = false;
    fiber.exchanges = fiber.committed = 0;
    std::fill_n(fiber.barriers, 16, 0);
    fiber.stack.resize(kStackBytes);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber.start, run_program, 0);
  }
  on_arrival();
  while (!std::all_of(fibers, fibers + kThreads, [](const Fiber& fiber) { return fiber.done; })) {
    const uint64_t before = progress;
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    for (uint32_t i = 0; i < kWarps; ++i) run_warp((i + (seed >> 60)) % kWarps);
    if (progress == before) fail("no thread goes on: some wait where others never come");
  }
}

// --- between threads ---

// Everybody's words, in all lanes.
inline const std::array<uint64_t, 4>* exchange(std::array<uint64_t, 4> mine) {
  Warp& warp = warps[current / kLanes];
  const uint64_t turn = me().exchanges++;
  warp.words[turn % 2][lane()] = mine;
  ++warp.arrived;
  ++progress;
  while (warp.arrived < kLanes * (turn + 1)) yield();
  return warp.words[turn % 2];
}
inline void named_barrier(uint32_t barrier, uint32_t threads) {
  if (threads != kThreads) fail("a named barrier of other threads than the math warpgroups'");
  const uint64_t turn = me().barriers[barrier]++;
  ++barriers[barrier];
  ++progress;
  while (barriers[barrier] < kThreads * (turn + 1)) yield();
}
inline void arrive(uint32_t barrier) {
  ++arrivals[barrier];
  ++progress;
  on_arrival();
}
// Whether the phase of that parity has ended.
inline bool test(bool needed, uint32_t barrier, uint32_t parity) { return !needed || (phases[barrier] & 1) != parity; }
inline void wait(bool needed, uint32_t barrier, uint32_t parity) {
  while (!test(needed, barrier, parity)) yield();
}
// Of a stage, once for the warp; where `both`, at a barrier of the partner too.
inline void release(uint32_t barrier, bool both, uint32_t there) {
  if (!me().products.empty()) fail("releases a stage that products still read");
  exchange({});
  if (lane() != 0) return;
  arrive(barrier);
  if (both) arrive(there);
}
// Where all lanes ask the same one, as uniform() does, they are to have the same value.
template <class T>
T shuffle(T value, uint32_t from) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  const auto* words = exchange({word, from});
  const auto same = [&](uint32_t i) {
    return std::all_of(words, words + kLanes, [&](const auto& other) { return other[i] == words[0][i]; });
  };
  if (same(1) && !same(0)) fail("uniform() of a value that differs between lanes");
  std::memcpy(&value, &words[from][0], sizeof value);
  return value;
}
// Element (i, j) of the 8 x 8 matrix is half j % 2 of lane 4 * i + j / 2.
inline uint32_t movmatrix(uint32_t pair) {
  const auto* words = exchange({pair});
  const auto element = [&](uint32_t i, uint32_t j) { return uint32_t(words[4 * i + j / 2][0]) >> 16 * (j % 2) & 0xffff; };
  const uint32_t row = lane() / 4, column = 2 * (lane() % 4);
  return element(column, row) | element(column + 1, row) << 16;
}

// --- numbers ---

inline float from_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float size = (code & 127) == 127 ? NAN
                     : exponent == 0     ? std::ldexp(float(mantissa), -9)
                                         : std::ldexp(float(8 + mantissa), exponent - 10);
  return code & 128 ? -size : size;
}
inline const auto values_of_e4m3 = [] {
  std::array<float, 256> values;
  for (uint32_t code = 0; code < 256; ++code) values[code] = from_e4m3(uint8_t(code));
  return values;
}();
// The nearest, of two the even one; saturating.
inline uint8_t to_e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  const double size = std::fabs(double(value));
  const auto begin = values_of_e4m3.begin(), end = begin + 126;
  uint8_t code = uint8_t(std::lower_bound(begin, end, size) - begin);
  if (code > 0) {
    const double up = values_of_e4m3[code] - size, down = size - values_of_e4m3[code - 1];
    if (down < up || (down == up && code % 2 == 1)) --code;
  }
  return uint8_t(code | (std::signbit(value) ? 128 : 0));
}
inline uint16_t to_e4m3x2(float high, float low) { return uint16_t(to_e4m3(high) << 8 | to_e4m3(low)); }
inline uint32_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t to_bf16x2(float high, float low) { return to_bf16(high) << 16 | to_bf16(low); }
// Never the nearest, so that who takes it where it should not is seen.
inline float approximate_reciprocal(float value) {
  const float nearest = 1.0f / value;
  return std::isfinite(nearest) ? std::nextafter(nearest, 0.0f) : nearest;
}

// --- global memory ---

// One instruction: 4, 8 or 16 bytes.
template <size_t kWords>
void store(bool needed, void* to, const uint32_t (&words)[kWords]) {
  if (!needed) return;
  if (uint64_t(to) % sizeof words != 0) fail("a store that is not aligned to its size");
  std::memcpy(to, words, sizeof words);
}
inline void fail_at_addresses_that_lead_nowhere() {
  const auto handler = [](int) { fail("an address that leads nowhere"); };
  for (const int signal : {SIGSEGV, SIGBUS}) std::signal(signal, handler);
}

// --- shared memory and products ---

inline uint8_t* shared_memory;
inline std::vector<float> operands;  // what lies in the stages, which are the beginning of shared memory

// After each change of them.
inline void take_operands(uint32_t first, size_t num_bytes) {
  operands.resize(std::max(operands.size(), first + num_bytes));
  for (size_t i = first; i < first + num_bytes; ++i) operands[i] = values_of_e4m3[shared_memory[i]];
}
inline void copy_later(uint32_t to, const void* from) { me().copies.push_back({to, from}); }
inline void wait_copies() {
  for (const Copy& copy : me().copies) std::memcpy(shared_memory + copy.to, copy.from, 4);
  me().copies.clear();
}
inline void ldmatrix(bool needed, uint32_t address, uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  const auto* words = exchange({address, needed});
  uint32_t* const to[4] = {&a, &b, &c, &d};
  for (uint32_t i = 0; i < 4; ++i) {
    const auto& word = words[8 * i + lane() / 4];
    if (word[1] != needed) fail("ldmatrix by a part of a warp");
    if (needed) std::memcpy(to[i], shared_memory + word[0] + 4 * (lane() % 4), 4);
  }
}

// Sixteen of K at `k` of a row, under the 128-byte swizzle.
inline const float* operand(uint64_t descriptor, uint32_t row, uint32_t k) {
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) fail("a descriptor of another layout");
  const uint32_t start = (descriptor & 0x3fff) * 16, group_bytes = (descriptor >> 32 & 0x3fff) * 16;
  uint32_t address = start + row / 8 * group_bytes + row % 8 * 128 + k;
  address ^= (address >> 7 & 7) << 4;
  if (address + 16 > operands.size()) fail("a descriptor that points behind the stages");
  return &operands[address];
}
inline float dot(const float* a, const float* b) {
  using Four = float __attribute__((vector_size(16), aligned(4), may_alias));
  const auto *x = reinterpret_cast<const Four*>(a), *y = reinterpret_cast<const Four*>(b);
  const Four sum = x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
  return sum[0] + sum[1] + sum[2] + sum[3];
}
// This thread's part: rows lane / 4 and 8 below of the warp's 16, two of each 8 columns.
inline void compute(const Product& product) {
  const uint32_t first_row = current / kLanes % 4 * 16 + lane() / 4;
  const float* rows[2][2];
  for (uint32_t i = 0; i < 4; ++i)
    rows[i / 2][i % 2] = product.rows_in_shared ? operand(product.rows, first_row + i / 2 * 8, i % 2 * 16)
                                                : &product.held[i * 16];
  for (uint32_t i = 0; i < product.count; ++i) {
    const uint32_t column = i / 4 * 8 + 2 * (lane() % 4) + i % 2;
    float sum = product.keep ? product.sums[i] : 0.0f;
    for (uint32_t half = 0; half < 2; ++half)
      sum += dot(rows[i / 2 % 2][half], operand(product.columns, column, 16 * half));
    product.sums[i] = sum;
  }
}
template <uint32_t kColumns>
void multiply_shared(float* sums, uint64_t rows, uint64_t columns, bool keep) {
  ++multiplied[kColumns];
  me().products.push_back({sums, kColumns / 2, keep, true, rows, columns, {}});
}
// a[2 * half + r] of lanes 4 * i to 4 * i + 3: sixteen of K, at 16 * half, of row i + 8 * r.
template <uint32_t kColumns>
void multiply(float* sums, std::array<uint64_t, 4> a, uint64_t columns, bool keep) {
  Product product{sums, kColumns / 2, keep, false, 0, columns, {}};
  const auto* words = exchange(a);
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t r = i / 32, k = i % 32;
    product.held[i] = values_of_e4m3[words[lane() / 4 * 4 + k % 16 / 4][k / 16 * 2 + r] >> 8 * (k % 4) & 255];
  }
  ++multiplied[kColumns];
  me().products.push_back(product);
}
inline void commit_products() { me().committed = me().products.size(); }
// Only now: who reads sums before, or waits for what it has not committed, gets something else.
inline void wait_products() {
  auto& products = me().products;
  for (size_t i = 0; i < me().committed; ++i) compute(products[i]);
  products.erase(products.begin(), products.begin() + std::ptrdiff_t(me().committed));
  me().committed = 0;
}

}  // namespace emulation

// --- what CUDA C++ has built in ---

template <class T>
T __shfl_sync(uint32_t, T value, uint32_t from, uint32_t width = emulation::kLanes) {
  return emulation::shuffle(value, emulation::lane() / width * width + from % width);
}
template <class T>
T __shfl_xor_sync(uint32_t, T value, uint32_t mask) {
  return emulation::shuffle(value, emulation::lane() ^ mask);
}
template <class T>
T __shfl_up_sync(uint32_t, T, uint32_t) {
  emulation::fail("__shfl_up_sync is not emulated");
}
inline void __syncwarp() { emulation::exchange({}); }
inline bool __all_sync(uint32_t, bool) { emulation::fail("__all_sync is not emulated"); }
inline uint32_t __match_any_sync(uint32_t, uint32_t) { emulation::fail("__match_any_sync is not emulated"); }
inline int __popc(uint32_t word) { return std::popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
template <class T>
T __ldcg(const T* from) {
  return *from;
}
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float value) { return 1.0f / value; }
// Coarser than a GPU's, so that who takes it where it should not is seen.
inline float __expf(float value) { return std::exp2(value * 1.4375f); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) result |= uint32_t(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
inline uint64_t __cvta_generic_to_shared(const void* pointer) {
  return uint64_t(static_cast<const uint8_t*>(pointer) - emulation::shared_memory);
}
