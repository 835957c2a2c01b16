// Quantise-and-fill: a rank's tokens and routes, as the caller has them, into the views of its buffer, in one launch.
// Bit for bit what megamoe/quant.py writes: amax without NaN, sf = amax * fp32(1/448), q = e4m3(x * (1 / sf)).
#include "ptx/convert.hpp"
#include "sm90_arguments.hpp"

namespace megamoe::sm90 {
namespace {

constexpr uint32_t kFillThreads = 256;
constexpr uint32_t kGroup = 128;  // columns that share a scale
constexpr uint32_t kColumns = 8;  // of a thread: 16 bytes of bf16
constexpr uint32_t kLanes = kGroup / kColumns;
constexpr float kAmaxFloor = 1e-10f;
constexpr float kInverse448 = 0x1.24924ap-9f;

MEGAMOE_FN void load_columns(const uint16_t* bf16, float (&value)[kColumns]) {
  const uint4 pairs = *reinterpret_cast<const uint4*>(bf16);
  const uint32_t words[4] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    value[2 * i] = low_bf16(words[i]);
    value[2 * i + 1] = high_bf16(words[i]);
  }
}
MEGAMOE_FN void load_columns(const float* fp32, float (&value)[kColumns]) {
  const auto* quads = reinterpret_cast<const float4*>(fp32);
  const float4 first = quads[0], second = quads[1];
  const float all[kColumns] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (uint32_t i = 0; i < kColumns; ++i) value[i] = all[i];
}

MEGAMOE_FN float group_scale(const float (&value)[kColumns], bool power_of_two) {
  float amax = kAmaxFloor;
#pragma unroll
  for (uint32_t i = 0; i < kColumns; ++i) amax = fmaxf(amax, fabsf(value[i]));  // fmaxf takes the number beside a NaN
#pragma unroll
  for (uint32_t step = kLanes / 2; step != 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  const float sf = __fmul_rn(amax, kInverse448);
  if (!power_of_two) return sf;
  const uint32_t bits = __float_as_uint(sf);
  return __uint_as_float(((bits >> 23) + ((bits & 0x7fffffu) != 0)) << 23);  // rounded up; inf stays inf
}

// Every thread of a warp comes here equally often; those beyond the last group load it again and store nothing.
template <class T>
MEGAMOE_FN void quantise(const FillArguments& arguments) {
  const auto* x = reinterpret_cast<const T*>(arguments.x);
  auto* to_x = reinterpret_cast<uint8_t*>(arguments.to_x);
  auto* to_x_sf = reinterpret_cast<float*>(arguments.to_x_sf);
  const uint32_t groups_of_row = arguments.hidden / kGroup;
  const uint64_t groups = uint64_t(arguments.num_tokens) * groups_of_row;
  const uint64_t at_once = uint64_t(gridDim.x) * (kFillThreads / kLanes);
  const uint32_t lane = threadIdx.x % kLanes;
  const uint64_t mine = uint64_t(blockIdx.x) * (kFillThreads / kLanes) + threadIdx.x / kLanes;
  const uint64_t of_warp = mine - threadIdx.x / kLanes % 2;
  for (uint64_t i = 0; of_warp + i < groups; i += at_once) {
    const bool valid = mine + i < groups;
    const uint64_t group = valid ? mine + i : groups - 1;
    const uint64_t token = group / groups_of_row;
    const uint32_t in_row = uint32_t(group % groups_of_row), column = in_row * kGroup + lane * kColumns;
    float value[kColumns];
    load_columns(x + token * arguments.x_stride + column, value);
    const float sf = group_scale(value, arguments.ue8m0 != 0);
    const float inverse = __fdiv_rn(1.0f, sf);
    uint32_t halves[kColumns / 2];
#pragma unroll
    for (uint32_t j = 0; j < kColumns / 2; ++j)
      halves[j] = to_e4m3x2(__fmul_rn(value[2 * j], inverse), __fmul_rn(value[2 * j + 1], inverse));
    if (!valid) continue;
    const uint2 bytes = {halves[0] | halves[1] << 16, halves[2] | halves[3] << 16};
    *reinterpret_cast<uint2*>(to_x + token * arguments.hidden + column) = bytes;
    if (lane == 0) to_x_sf[token * arguments.x_sf_stride + in_row] = sf;
  }
}

MEGAMOE_FN void copy_routes(const FillArguments& arguments) {
  const uint64_t routes = uint64_t(arguments.num_tokens) * arguments.num_topk;
  const auto* weights = reinterpret_cast<const float*>(arguments.topk_weights);
  for (uint64_t i = uint64_t(blockIdx.x) * kFillThreads + threadIdx.x; i < routes;
       i += uint64_t(gridDim.x) * kFillThreads) {
    const int64_t id = arguments.wide_ids ? reinterpret_cast<const int64_t*>(arguments.topk_idx)[i]
                                          : int64_t(reinterpret_cast<const int32_t*>(arguments.topk_idx)[i]);
    reinterpret_cast<int64_t*>(arguments.to_topk_idx)[i] = id;
    reinterpret_cast<float*>(arguments.to_topk_weights)[i] =
        __fmul_rn(weights[i], arguments.routed_scaling_factor);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kFillThreads)
    megamoe_fill_bf16(const __grid_constant__ FillArguments arguments) {
  quantise<uint16_t>(arguments);
  copy_routes(arguments);
}

extern "C" __global__ void __launch_bounds__(kFillThreads)
    megamoe_fill_f32(const __grid_constant__ FillArguments arguments) {
  quantise<float>(arguments);
  copy_routes(arguments);
}

}  // namespace megamoe::sm90
