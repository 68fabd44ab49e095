// float16 and bfloat16 for the CPU device: storage of 16 bits, arithmetic in float, rounding to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace simt {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu;
  // Moved to float's exponent field the value is 2^-112 too small; the product is exact, subnormals included.
  const uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(rest << 13) * 0x1p112f);
  return std::bit_cast<float>(sign | scaled | (rest >= 0x7c00u ? 0x7f800000u : 0));  // inf, nan
}

inline uint16_t float_to_half(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00u | (rest >> 13 & 0x3ffu));  // nan stays nan
  if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00u);                         // 65520 and above round to inf
  if (rest < 0x38800000u) {  // below 2^-14: adding 2^-1 lets the float adder round at the subnormal's last bit
    return uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3f000000u));
  }
  return uint16_t(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13);
}

inline uint16_t float_to_bfloat16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t(bits >> 16 | 0x40u);  // nan stays nan
  return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

struct Half {
  uint16_t bits;
  Half() = default;
  explicit Half(float f) : bits(float_to_half(f)) {}
  operator float() const { return half_to_float(bits); }
};

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float f) : bits(float_to_bfloat16(f)) {}
  operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

}  // namespace simt
