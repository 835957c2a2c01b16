// Number formats.
#pragma once
#include "primitives.hpp"

namespace megamoe::sm90 {

// Exact: every e4m3 value is an fp16 value, and every fp16 value an fp32 value.
MEGAMOE_FN float from_e4m3(uint8_t bits) {
  float value;
  asm("{\n\t"
      ".reg .b32 halves;\n\t"
      ".reg .b16 low, high;\n\t"
      "cvt.rn.f16x2.e4m3x2 halves, %1;\n\t"
      "mov.b32 {low, high}, halves;\n\t"
      "cvt.f32.f16 %0, low;\n\t"
      "}"
      : "=f"(value)
      : "h"(uint16_t(bits)));
  return value;
}

// Two e4m3 in two bytes: round to nearest even, saturating, NaN stays NaN.
MEGAMOE_FN uint16_t to_e4m3x2(float low, float high) {
  uint16_t bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}

// Two bf16 in one word, round to nearest even.
MEGAMOE_FN uint32_t to_bf16x2(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
MEGAMOE_FN uint16_t to_bf16(float value) { return uint16_t(to_bf16x2(value, 0.0f)); }
MEGAMOE_FN float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
MEGAMOE_FN float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

MEGAMOE_FN float approximate_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

constexpr uint32_t kBf16NaNPair = 0x7fff7fffu;
constexpr uint32_t kFp32NaN = 0x7fffffffu;

}  // namespace megamoe::sm90
