// How the fused kernel hands a tile's slot between its warps, and nothing else: what does racecheck say of it?
//   nvcc -std=c++20 -arch=sm_90a -lineinfo -o racecheck_minimal tests/device/racecheck_minimal.cu
//   compute-sanitizer --tool racecheck racecheck_minimal direct|through|each_lane|broken
// The warps are those of a CTA: 0 writes the slots, 1 carries in `through`, 2 and 3 read. What was read is checked; the exit
// code is 1 when something was wrong. Right by PTX's memory model: mbarrier.arrive is release.cta, a wait that succeeds is
// acquire.cta, __syncwarp orders the memory of its lanes, and all of that is transitive.
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr uint32_t kSlots = 2, kRounds = 40, kWords = 64, kReaders = 2, kThreads = 128, kCtas = 4;

enum class Way : uint32_t {
  direct,     // one lane writes and arrives; all lanes of the readers read, __syncwarp, one arrival a warp gives it back
  through,    // all lanes of warp 0 write after the slot's arrival, __syncwarp; warp 1 passes the arrival on
  each_lane,  // as direct, but every lane that has read arrives: no arrival stands for another lane
  broken,     // as direct, but the slot is given back before it is read: a race
};
constexpr const char* kNames[] = {"direct", "through", "each_lane", "broken"};

struct Slot {
  uint32_t word;
  uint32_t words[kWords];
};
struct Shared {
  uint64_t full[kSlots], ready[kSlots], carried[kSlots], empty[kSlots];
  Slot slots[kSlots];
};

__device__ uint32_t address_of(const void* shared) { return uint32_t(__cvta_generic_to_shared(shared)); }

__device__ void init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of(barrier)), "r"(arrivals) : "memory");
}
__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address_of(barrier)) : "memory");
}
__device__ bool try_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t reached;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(reached)
      : "r"(address_of(barrier)), "r"(parity)
      : "memory");
  return reached != 0;
}
__device__ bool test_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t reached;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(reached)
      : "r"(address_of(barrier)), "r"(parity)
      : "memory");
  return reached != 0;
}
__device__ void wait(uint64_t* barrier, uint32_t parity) {
  while (!try_wait(barrier, parity)) {
  }
}

__device__ uint32_t word_of(uint32_t round) { return 1000 + round; }
__device__ uint32_t word_of(uint32_t round, uint32_t i) { return 1000 * round + i; }

template <Way kWay>
__device__ void write_slots(Shared& shared, uint32_t lane) {
  for (uint32_t round = 0; round < kRounds; ++round) {
    const uint32_t at = round % kSlots, parity = round / kSlots & 1;
    Slot& slot = shared.slots[at];
    if (lane == 0) {
      while (!test_wait(&shared.empty[at], parity ^ 1)) __nanosleep(40);
    }
    __syncwarp();
    if (lane == 0) {
      slot.word = word_of(round);
      arrive(&shared.full[at]);
    }
    if constexpr (kWay == Way::through) {
      for (uint32_t i = lane; i < kWords; i += 32) slot.words[i] = word_of(round, i);
      __syncwarp();
      if (lane == 0) arrive(&shared.ready[at]);
    }
  }
}

__device__ void carry(Shared& shared, uint32_t lane) {
  for (uint32_t round = 0; lane == 0 && round < kRounds; ++round) {
    const uint32_t at = round % kSlots, parity = round / kSlots & 1;
    wait(&shared.full[at], parity);
    wait(&shared.ready[at], parity);
    arrive(&shared.carried[at]);
  }
}

template <Way kWay>
__device__ uint32_t read_slots(Shared& shared, uint32_t lane) {
  uint32_t wrong = 0;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const uint32_t at = round % kSlots, parity = round / kSlots & 1;
    const Slot& slot = shared.slots[at];
    wait(&shared.full[at], parity);
    __syncwarp();  // broken: else its first lane could give back what another still waits for
    if (kWay == Way::broken && lane == 0) arrive(&shared.empty[at]);
    wrong += slot.word != word_of(round);
    if (kWay == Way::through) {
      wait(&shared.carried[at], parity);
      for (uint32_t i = 0; i < kWords; ++i) wrong += slot.words[i] != word_of(round, i);
    }
    if (kWay == Way::each_lane) {
      arrive(&shared.empty[at]);
    } else if (kWay != Way::broken) {
      __syncwarp();
      if (lane == 0) arrive(&shared.empty[at]);
    }
  }
  return wrong;
}

template <Way kWay>
__global__ void __launch_bounds__(kThreads) hand_over(uint32_t* wrong) {
  __shared__ Shared shared;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (uint32_t at = 0; at < kSlots; ++at) {
      init(&shared.full[at], 1);
      init(&shared.ready[at], 1);
      init(&shared.carried[at], 1);
      init(&shared.empty[at], kWay == Way::each_lane ? 32 * kReaders : kReaders);
    }
  }
  __syncthreads();
  if (warp == 0) {
    write_slots<kWay>(shared, lane);
  } else if (warp == 1) {
    if (kWay == Way::through) carry(shared, lane);
  } else if (const uint32_t mine = read_slots<kWay>(shared, lane); mine != 0) {
    atomicAdd(wrong, mine);
  }
}

}  // namespace

int main(int count, char** words) {
  using Kernel = void (*)(uint32_t*);
  const Kernel kernels[] = {hand_over<Way::direct>, hand_over<Way::through>, hand_over<Way::each_lane>,
                            hand_over<Way::broken>};
  uint32_t way = 0;
  while (way < 4 && (count != 2 || std::strcmp(words[1], kNames[way]) != 0)) ++way;
  if (way == 4) {
    std::fprintf(stderr, "expected one of direct, through, each_lane, broken\n");
    return 2;
  }
  uint32_t* wrong = nullptr;
  uint32_t seen = 0;
  cudaError_t error = cudaMalloc(&wrong, sizeof(seen));
  if (error == cudaSuccess) error = cudaMemset(wrong, 0, sizeof(seen));
  if (error == cudaSuccess) {
    kernels[way]<<<kCtas, kThreads>>>(wrong);
    error = cudaGetLastError();
  }
  if (error == cudaSuccess) error = cudaMemcpy(&seen, wrong, sizeof(seen), cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", kNames[way], cudaGetErrorString(error));
    return 2;
  }
  std::printf("%s: %u CTAs, %u rounds, %u wrong words\n", kNames[way], kCtas, kRounds, seen);
  return seen != 0 && way != uint32_t(Way::broken);
}
