// A foreign kernel: each CTA fills an SM (by its dynamic shared memory) and holds it for so many nanoseconds.
#include <cuda/std/cstdint>

extern "C" __global__ void hold(uint64_t nanoseconds, uint32_t* started) {
  extern __shared__ uint8_t room[];
  uint64_t begun, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
  if (threadIdx.x == 0) {
    room[0] = 1;
    atomicAdd(started, 1);
  }
  do {
    __nanosleep(1000);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begun < nanoseconds);
}
