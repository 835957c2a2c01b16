// Arithmetic of the host target: an emulator's own plain code, by the rules of megamoe/quant.py. It shares nothing with
// the oracle. Every sum has a fixed order, so results do not depend on tile shapes, threads or vector width.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace megamoe::host {

struct E4m3Table {
  float value[256];
  constexpr E4m3Table() : value{} {
    for (int bits = 0; bits < 256; ++bits) {
      const int exponent = bits >> 3 & 15, mantissa = bits & 7;
      float magnitude = 0;
      if (exponent == 15 && mantissa == 7) {
        magnitude = std::numeric_limits<float>::quiet_NaN();
      } else {
        magnitude = exponent == 0 ? float(mantissa) / 8.0f : 1.0f + float(mantissa) / 8.0f;
        for (int power = exponent == 0 ? 1 : exponent; power < 7; ++power) magnitude /= 2.0f;
        for (int power = exponent; power > 7; --power) magnitude *= 2.0f;
      }
      value[bits] = bits & 128 ? -magnitude : magnitude;
    }
  }
};
inline constexpr E4m3Table kE4m3;

constexpr float kE4m3Max = 448.0f;

// Round to nearest even, saturating; NaN stays NaN.
inline uint8_t to_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint8_t sign = uint8_t(bits >> 24 & 0x80);
  if (std::isnan(value)) return 0x7f;
  const float magnitude = std::fabs(value);
  if (magnitude >= kE4m3Max) return sign | 0x7e;
  // Adding and taking away a power of two rounds to its multiple of 2^-23, to nearest even: choose it so that what is
  // left is three bits of mantissa, or the spacing of subnormals, 2^-9.
  const int exponent = magnitude < 0x1p-6f ? -6 : int(std::bit_cast<uint32_t>(magnitude) >> 23) - 127;
  const float anchor = std::bit_cast<float>(uint32_t(exponent - 3 + 23 + 127) << 23);
  volatile float shifted = magnitude + anchor;  // volatile: no reassociation, whatever the flags
  const float rounded = shifted - anchor;
  const uint32_t units = uint32_t(std::ldexp(rounded, 3 - exponent));  // 0 .. 16 steps of this exponent
  if (exponent == -6) return sign | uint8_t(units);                    // subnormal, or the first normal
  return sign | uint8_t(((exponent + 7) << 3) + int(units) - 8);
}

inline float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
inline uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
constexpr uint16_t kBf16NaN = 0x7fff;

// Sixteen partial sums side by side, added as a tree in the end.
constexpr uint32_t kLanes = 16;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4)));

inline float sum(const Lanes& lanes) {
  float part[kLanes];
  for (uint32_t lane = 0; lane < kLanes; ++lane) part[lane] = lanes[lane];
  for (uint32_t width = kLanes / 2; width > 0; width /= 2)
    for (uint32_t lane = 0; lane < width; ++lane) part[lane] += part[lane + width];
  return part[0];
}

// Products of one row with four columns over `count` elements. Products of e4m3 values are exact in fp32.
inline void dot4(const float* row, const float* const column[4], uint32_t count, float (&result)[4]) {
  Lanes lanes[4] = {};
  for (uint32_t k = 0; k < count; k += kLanes) {
    const Lanes a = *reinterpret_cast<const Lanes*>(row + k);
    for (uint32_t c = 0; c < 4; ++c) lanes[c] += a * *reinterpret_cast<const Lanes*>(column[c] + k);
  }
  for (uint32_t c = 0; c < 4; ++c) result[c] = sum(lanes[c]);
}

inline void decode_e4m3(const uint8_t* from, uint32_t count, float* to) {
  for (uint32_t i = 0; i < count; ++i) to[i] = kE4m3.value[from[i]];
}

// The rule of x: scale and quantise `count` values that share a scale.
inline float quantize_group(const float* values, uint32_t count, uint8_t* out) {
  float amax = 1e-10f;
  for (uint32_t i = 0; i < count; ++i) amax = std::fmax(amax, std::fabs(values[i]));
  const float sf = amax * (1.0f / kE4m3Max);
  const float inverse = 1.0f / sf;
  for (uint32_t i = 0; i < count; ++i) out[i] = to_e4m3(values[i] * inverse);
  return sf;
}

inline float swiglu(float gate, float up, float weight, bool has_clamp, float clamp) {
  if (has_clamp) {
    // Comparisons, not fmin: a NaN stays a NaN.
    if (gate > clamp) gate = clamp;
    if (up > clamp) up = clamp;
    if (up < -clamp) up = -clamp;
  }
  return gate / (1.0f + std::exp(-gate)) * up * weight;
}

}  // namespace megamoe::host
